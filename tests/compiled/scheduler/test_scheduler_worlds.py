"""Random worlds: the scheduler under everything that front ends may do, and the same in all its executions."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.scheduler_story import Story, random_sizes
from support.scheduler_world import World

from blinkpy.device.array_trees import as_memoryviews
from blinkpy.kv.state import FAST_PATH, RUNNING_COUNT, WAITING_COUNT
from blinkpy.kv.state_snapshots import differences, snapshot
from blinkpy.scheduler.phases.plan import step_budget
from blinkpy.scheduler.policies import SHIPPED

quick = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck), print_blob=True)


@quick
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120), policy=st.sampled_from(sorted(SHIPPED)), load=st.floats(0.05, 0.8))
def test_every_request_gets_its_tokens(seed: int, steps: int, policy: str, load: float) -> None:
    """Integrity after each step; each token right, in order, once; every request ends; all pages come back."""
    world = World(random_sizes(seed), "python", SHIPPED[policy])
    story = Story(world, seed, load)
    for _ in range(steps):
        story.tick()
    story.end()
    accepted, finished, cancelled = (world.counter(f"requests_{n}") for n in ("accepted", "finished", "cancelled"))
    assert accepted == finished + cancelled


@pytest.mark.parametrize("number", range(4))
def test_python_njit_and_lanes_agree(seed: int, number: int) -> None:
    """Bit for bit the same state and the same shared memory after each step, whatever the order of the lanes."""
    seed += 1_000 * number
    sizes = random_sizes(seed)
    worlds = [World(sizes, mode, seed=seed) for mode in ("python", "njit", 4)]
    stories = [Story(world, seed) for world in worlds]
    for _ in range(60):
        for story in stories:
            story.tick()
        expected = snapshot(worlds[0].state)
        for world in worlds[1:]:
            assert not differences(expected, snapshot(world.state))
            assert world.segment == worlds[0].segment


def test_the_budget_follows_from_who_decodes_and_what_waits(seed: int) -> None:
    """Against the same rule in NumPy, in states of random courses of events."""
    seen = {8: 0, 14: 0, 20: 0}
    for number in range(16):
        sizes = dataclasses.replace(
            random_sizes(seed + number), rows=4, tokens=20, mixed_tokens=8, burst_step_tokens=14, pages=40, page_size=4
        )
        world = World(sizes, "general", seed=seed)
        story = Story(world, seed + number, 0.3)
        for _ in range(60):
            story.tick()
            r, running = world.state.requests, world.state.running[: world.state.counts[RUNNING_COUNT]]
            lacking = (r.length - r.computed)[running][r.stalled[running] == 0]
            prompts = np.concatenate([lacking[lacking > 1], r.length[world.state.waiting[: world.state.counts[WAITING_COUNT]]]])
            expected = 20
            if (lacking == 1).any() and prompts.sum() <= world.limits.burst_tokens:
                expected = 8
            elif (lacking == 1).any() and prompts.mean() > 8:
                expected = 14
            assert step_budget(world.limits, as_memoryviews(world.state), 0, 1) == expected
            seen[expected] += 1
    assert min(seen.values()) > 15, seen


@quick
@given(seed=st.integers(0, 2**32), steps=st.integers(1, 120), policy=st.sampled_from(sorted(SHIPPED)), load=st.floats(0.02, 0.6))
def test_the_short_way_leaves_what_the_general_phases_leave(seed: int, steps: int, policy: str, load: float) -> None:
    compare_short_way(seed, steps, policy, load)


def test_the_short_way_is_usual_where_it_should_be(seed: int) -> None:
    """Long outputs, room for everything, now and then an arrival: turns of both kinds, thousands of each."""
    steady, ended, turns = 0, 0, 0
    for number in range(12):
        more = compare_short_way(seed + number, 200, "fcfs", 0.1, roomy=True)
        steady, ended, turns = steady + more[0], ended + more[1], turns + more[2]
    print(f"{turns} turns, {steady} of them steady; requests ended in {ended} of these")
    assert steady > turns // 6
    assert turns - steady > turns // 8
    assert ended > 10


def compare_short_way(seed: int, steps: int, policy: str, load: float, roomy: bool = False) -> tuple[int, int, int]:
    """The same story with and without the short way: the same state and shared memory after each turn. Returns the number of
    steady turns, of those in which a request ended, and of all."""
    sizes = random_sizes(seed)
    if roomy:
        sizes = dataclasses.replace(
            sizes,
            rows=6,
            tokens=24,
            mixed_tokens=12,
            burst_step_tokens=0,
            slots=6,
            cq_entries=64,
            pages=64,
            page_size=2,
            max_model_len=48,
        )
    worlds = [World(sizes, mode, SHIPPED[policy]) for mode in ("python", "general")]
    stories = [Story(world, seed, load) for world in worlds]
    steady, ended = 0, 0
    for _ in range(steps):
        finished = worlds[0].counter("requests_finished")
        for story in stories:
            story.tick()
        assert not differences(*(snapshot(world.state) for world in worlds))
        assert worlds[0].segment == worlds[1].segment
        if worlds[0].state.counts[FAST_PATH] != 0:
            steady += 1
            ended += worlds[0].counter("requests_finished") > finished
    return steady, ended, steps


def test_njit_on_larger_worlds(seed: int) -> None:
    """Many pairs (more than are counted at once), many rows, and long prompts."""
    sizes = dataclasses.replace(
        random_sizes(seed), pairs=9, slots=20, rows=48, tokens=256, mixed_tokens=(0, 96, 128)[seed % 3],
        burst_step_tokens=(0, 0, 192)[seed % 3], pages=300, page_size=4,
        max_model_len=200, cq_entries=64,
    )  # fmt: skip
    world = World(sizes, "njit")
    story = Story(world, seed, load=0.8)
    for _ in range(150):
        story.tick()
    story.end()
    assert world.counter("requests_finished") > 50
