"""Cases and storms whose scheduler records into memory to which readers can attach: an engine's recording, without an engine."""

import dataclasses
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from support.scheduler_cases import Case, case_sizes

from blinkpy.device.tables import named_arrays
from blinkpy.kv.state import COUNTER_INDEX, EMPTY, FAST_PATH, FINISHING, TURNS
from blinkpy.queues.layout import read_header
from blinkpy.queues.words import COMMAND_RUN
from blinkpy.recording.recording_layout import NOT_COPIED
from blinkpy.recording.recording_memory import RecordingMemory
from blinkpy.recording.recording_reader import Capture, RecordingReader
from blinkpy.scheduler.cycle import make_turn
from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.scheduler.policy_vetting import recorded_policy
from blinkpy.verify.replay.replayer import Replay
from blinkpy.verify.sim.simulation import Simulation
from blinkpy.verify.sim.world import World, make_world, random_limits

# Written by the step, or meaningless: cancel words of ended requests are not recorded.
NOT_REPEATED = (*NOT_COPIED, "inbox.cancel", "inbox.now_ns", "batch.sampled", "batch.logprobs", "pairs.verdict", "counts")

Turn = Callable[..., int]


class Recording:
    """An engine's recorder for a world's scheduler, and its reader. linked: whether other readers can find it, too."""

    def __init__(self, world: World, policy: Policy = fcfs, linked: bool = False) -> None:
        queue = dataclasses.asdict(read_header(world.segment)[0].sizes)
        facts = {"queue": queue, "policy": policy.__name__, "policy_digest": "", "sources": ""}
        self.memory = RecordingMemory(world.limits, world.state, facts)
        self.world = world._replace(state=self.memory.share_inputs(world.state._replace(recorder=self.memory.recorder)))
        self.keep()
        name = f"test-{os.getpid()}-{id(self)}"
        self.memory.publish(name)
        self.reader = RecordingReader(name)
        if not linked:
            self.memory.close()  # removes the link; the memory remains while it is in use

    def keep(self) -> None:
        """Keep the state after each call of the scheduler."""
        self.memory.keep(self.world.state)

    def opens(self, turn: Turn) -> Turn:
        """The same turn, with the recorder opened and closed around it, as an engine does."""

        def run(limits: Any, queues: Any, state: Any, now: int, lane: int, lanes: int) -> int:
            self.memory.open_turn(now, state.counts[TURNS])
            bucket = turn(limits, queues, state, now, lane, lanes)
            self.memory.close_turn()
            return bucket

        return run


class RecordedCase(Case):
    """See make_case. record: minimum calls that the ring holds."""

    def __init__(self, policy: Policy = fcfs, record: int = 64, linked: bool = False, **sizes: Any) -> None:
        chosen = case_sizes(**sizes, record_turns=record, intake_tokens=8)
        self.recording = Recording(make_world(1, 1, chosen=chosen), policy, linked)
        turn = make_turn(policy)

        def run(*arguments: Any) -> int:
            bucket = turn(*arguments)
            self.recording.keep()
            return bucket

        super().__init__(self.recording.world, run, policy)
        for pair in range(self.limits.pairs):
            self.claim(pair)


class RecordedStorm(Simulation):
    """A storm of one seed that records. options: see Simulation."""

    def __init__(
        self, seed: int, turns: int, policy: Policy = fcfs, record: int = 16, scheduler: Turn | None = None, **options: Any
    ) -> None:
        queue, facts, limits = random_limits(random.Random(seed), tight=False)
        chosen = queue, facts, limits | {"record_turns": record, "intake_tokens": 8}
        self.recording = Recording(make_world(seed, turns, chosen=chosen), policy)
        if scheduler is not None:
            options["scheduler"] = self.recording.opens(scheduler)
        super().__init__(seed, turns, policy, world=self.recording.world, **options)

    def advance(self, command: int = COMMAND_RUN) -> bool:
        fine = super().advance(command)
        self.recording.keep()
        return fine


def crowded(policy: Policy = fcfs) -> RecordedCase:
    """One pair, two rows, few pages: four requests of different lengths, one of which is preempted."""
    case = RecordedCase(policy, record=256, pairs=1, slots=6, rows=2, tokens=8, pages=8)
    for length, most in ((14, 10), (3, 10), (9, 4), (2, 2)):
        case.submit(list(range(length)), most)
    case.finish()
    return case


def changed_by_replay(world: World, replay: Replay) -> list[str]:
    """Arrays that differ after a replay to the present, without their meaningless parts."""
    ours, theirs = dict(named_arrays(world.state)), dict(named_arrays(replay.state))
    alive = ours["requests.status"] != EMPTY
    different = []
    for name, array in ours.items():
        if name.startswith(NOT_REPEATED):
            continue
        chosen = alive if name.startswith("requests.") else slice(None)
        a, b = array[chosen], theirs[name][chosen]
        if name == "requests.tokens":
            # A request that only waits to report its end has no tokens any more; a rejected request never had tokens.
            length = np.where(ours["requests.status"] == FINISHING, 0, ours["requests.length"])[alive]
            known = np.arange(array.shape[1]) < length[:, None]
            a, b = np.where(known, a, 0), np.where(known, b, 0)
        if not (a == b).all():
            different.append(name)
    # Calls without news have a number, but no record. A cancel is not recorded if its request ended by itself in that call. The
    # replay may then take the fast path, unlike the scheduler, to the same state.
    numbers = ~np.isin(np.arange(len(ours["counts"])), (TURNS, FAST_PATH))
    return different + ([] if (ours["counts"][numbers] == theirs["counts"][numbers]).all() else ["counts"])


def replayed(replay: Replay) -> int:
    """Run a replay; every turn must be as recorded. Returns the number of turns."""
    for turn, differences in replay.run():
        assert not differences, (turn.number, differences)
    return len(replay.turns)


def replay_all(captures: list[Capture], counter: str) -> tuple[int, int]:
    """Replay the captures; each turn must make the same decisions. Returns the number of turns, and the increase of a counter of
    COUNTER_NAMES in them."""
    replayed, rose = 0, 0
    for capture in captures:
        replay = Replay(capture, recorded_policy(capture.description, ""), "njit")
        before = int(replay.state.counters[COUNTER_INDEX[counter]])
        for turn, differences in replay.run():
            assert not differences, (turn.number, differences)
            replayed += 1
        rose += int(replay.state.counters[COUNTER_INDEX[counter]]) - before
    return replayed, rose
