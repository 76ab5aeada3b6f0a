"""Cases and storms whose scheduler records, in memory that readers can attach to: what an engine has, without one."""

import dataclasses
import os
import random
from typing import Any

from support.scheduler_cases import Case, case_sizes

from blinkpy.queues.header import read_header
from blinkpy.queues.words import COMMAND_RUN
from blinkpy.scheduler.cycle import make_turn
from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.verify.recording.recording_memory import RecordingMemory
from blinkpy.verify.recording.recording_reader import RecordingReader
from blinkpy.verify.replay.replayer import Replay
from blinkpy.verify.sim.simulation import Simulation
from blinkpy.verify.sim.world import World, make_world, random_limits


class Recording:
    """What an engine keeps of a world's scheduler, and a reader of it. linked: whether others find it too."""

    def __init__(self, world: World, policy: Policy = fcfs, linked: bool = False) -> None:
        queue = dataclasses.asdict(read_header(world.segment)[0].sizes)
        facts = {"queue": queue, "policy": policy.__name__, "policy_digest": "", "sources": ""}
        self.memory = RecordingMemory(world.limits, world.state, facts)
        self.world = world._replace(state=world.state._replace(recorder=self.memory.recorder))
        self.keep()
        name = f"test-{os.getpid()}-{id(self)}"
        self.memory.publish(name)
        self.reader = RecordingReader(name)
        if not linked:
            self.memory.close()  # the link; the memory stays while it is used

    def keep(self) -> None:
        """After each call of the scheduler."""
        self.memory.keep(self.world.state)


class RecordedCase(Case):
    """See make_case. record: calls that the ring has at least."""

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
    """A storm of a seed, with the recorder on. options: of Simulation."""

    def __init__(self, seed: int, turns: int, policy: Policy = fcfs, record: int = 16, **options: Any) -> None:
        queue, facts, limits = random_limits(random.Random(seed), tight=False)
        chosen = queue, facts, limits | {"record_turns": record, "intake_tokens": 8}
        self.recording = Recording(make_world(seed, turns, chosen=chosen), policy)
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


def replayed(replay: Replay) -> int:
    """Run it; every turn must be as recorded. Returns the number of turns."""
    for turn, differences in replay.run():
        assert not differences, (turn.number, differences)
    return len(replay.turns)
