"""The flight recorder: what it wrote down, run again, decides the same."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
from support.recorded_world import RecordedWorld, crowded, replayed
from support.scheduler_story import Story, random_sizes
from support.scheduler_world import Sizes, World

from blinkpy.device.array_trees import named_arrays
from blinkpy.kv.state import EMPTY, FAST_PATH, FINISHING, RECORDS, TURNS
from blinkpy.kv.state_snapshots import snapshot as copies
from blinkpy.queues.words import COMMAND_DRAIN, COMMAND_RUN, CONTROL_COMMAND
from blinkpy.scheduler.policies import fcfs, priority, shortest_first
from blinkpy.verify.recording.recording_layout import NOT_COPIED
from blinkpy.verify.replay.call_records import parse_calls
from blinkpy.verify.replay.replayer import Replay

# Written by the step, or meaningless: cancel words of requests that are gone are not recorded.
NOT_REPEATED = (*NOT_COPIED, "inbox.cancel", "inbox.now_ns", "batch.sampled", "batch.logprobs", "pairs.verdict", "counts")
COUNTED = ("requests_rejected", "requests_cancelled", "preemptions", "prefix_hit_tokens", "reader_stalls")


def same_state(world: World, replay: Replay) -> list[str]:
    """Arrays that differ after a replay to the present, as far as they mean anything."""
    ours, theirs = dict(named_arrays(world.state)), dict(named_arrays(replay.state))
    alive = ours["requests.status"] != EMPTY
    different = []
    for name, array in ours.items():
        if name.startswith(NOT_REPEATED):
            continue
        chosen = alive if name.startswith("requests.") else slice(None)
        a, b = array[chosen], theirs[name][chosen]
        if name == "requests.tokens":
            # A request that only waits to be told its end has no tokens any more; a rejected one never had any.
            length = np.where(ours["requests.status"] == FINISHING, 0, ours["requests.length"])[alive]
            known = np.arange(array.shape[1]) < length[:, None]
            a, b = np.where(known, a, 0), np.where(known, b, 0)
        if not (a == b).all():
            different.append(name)
    # Calls without news have a number, but no record. And a cancel is not recorded where the request ended by itself in that
    # call: the replay may then take the short way where the scheduler did not, to the same state.
    numbers = ~np.isin(np.arange(len(ours["counts"])), (TURNS, FAST_PATH))
    return different + ([] if (ours["counts"][numbers] == theirs["counts"][numbers]).all() else ["counts"])


def test_random_worlds_replay_call_by_call(seed: int) -> None:
    happened: Counter[str] = Counter()
    wrapped = 0
    for number in range(seed, seed + 12):
        policy = random.Random(number).choice((fcfs, priority, shortest_first))
        world = RecordedWorld(random_sizes(number), "python", policy)
        story = Story(world, number)
        for tick in range(150):
            if tick == 60:
                world.now += 2 * world.limits.lease_ns  # nobody was heard for a while
                world._schedule(world.now)
            story.tick()
        capture = world.reader.capture()
        replay = Replay(capture, policy)
        assert replayed(replay) > 0
        assert same_state(world, replay) == []
        wrapped += world.reader.position > world.limits.record_words
        for name in (
            "preemptions",
            "prefix_hit_tokens",
            "requests_cancelled",
            "leases_expired",
            "stale_entries",
            "reader_stalls",
        ):
            happened[name] += world.counter(name)
        happened["requests_rejected"] += world.counter("requests_rejected")
    assert wrapped, "no ring was overwritten"
    assert all(happened[name] for name in happened), happened


@pytest.mark.parametrize("mode", ["njit", 4])
def test_every_execution_writes_the_same_records(mode: str | int, seed: int) -> None:
    worlds = [RecordedWorld(random_sizes(seed), each, seed=seed) for each in ("python", mode)]
    stories = [Story(world, seed) for world in worlds]
    for _ in range(60):
        for story in stories:
            story.tick()
    first, second = (copies(world.state) for world in worlds)
    for name in ("recorder.words", "recorder.progress", "recorder.cursor", "recorder.seen"):
        assert (first[name] == second[name]).all(), name
    assert replayed(Replay(worlds[1].reader.capture(), fcfs, "njit" if mode == "njit" else "python")) > 0


def test_calls_that_leave_no_record_changed_nothing(seed: int) -> None:
    quiet = 0
    for number in range(seed, seed + 4):
        world = RecordedWorld(random_sizes(number), "python", record=64)
        story = Story(world, number, load=0.05)
        for _ in range(150):
            story.tick()
            for _ in range(3):  # nobody does anything meanwhile
                if world.bucket >= 0:
                    break
                before, records = copies(world.state), int(world.state.recorder.cursor[RECORDS])
                world.bucket = world._schedule(world.now + 1)
                if world.bucket >= 0:
                    world._compute()
                if world.state.recorder.cursor[RECORDS] == records:
                    quiet += 1
                    after = copies(world.state)
                    before["counts"][TURNS] = after["counts"][TURNS]
                    of_one_call = (*NOT_COPIED, "pairs.verdict", "inbox.now_ns")
                    changed = [name for name in before if (before[name] != after[name]).any()]
                    assert [name for name in changed if not name.startswith(of_one_call)] == []
    assert quiet > 20


def test_a_recorder_that_is_off_writes_nothing(seed: int) -> None:
    world = World(random_sizes(seed))
    story = Story(world, seed)
    for _ in range(30):
        story.tick()
    assert not world.state.recorder.cursor.any()
    assert not world.state.recorder.words.any()


def test_another_policy_or_token_is_a_difference() -> None:
    capture = crowded().reader.capture()
    assert replayed(Replay(capture, fcfs)) > 10
    other = [d for _, differences in Replay(capture, shortest_first).run() for d in differences]
    assert any(d.startswith("rows (slot, tokens)") for d in other)
    # A page less at the start: the first difference is the number of free pages.
    changed = dataclasses.replace(next(iter(parse_calls(capture.words, 1))), free=3)
    replay = Replay(capture, fcfs)
    replay.calls[0] = changed
    assert next(replay.run())[1] == [f"free pages: {8} here, 3 recorded"]


def test_control_words_of_a_drain_are_recorded() -> None:
    world = RecordedWorld(Sizes(pairs=1), "python", record=64)
    world.attach()
    world.fronts[0].submit([1, 2], 3)
    world.step()
    world.views.control[CONTROL_COMMAND] = COMMAND_DRAIN
    for _ in range(6):
        world.step()
    replay = Replay(world.reader.capture(), fcfs)
    assert replayed(replay) > 3
    assert {call.command for call in replay.calls} == {COMMAND_RUN, COMMAND_DRAIN}
