"""A world whose scheduler records, in memory that readers can attach to: what an engine has, without one."""

from __future__ import annotations

import dataclasses
import os

from support.scheduler_world import Sizes, World

from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.verify.recording.recording_memory import RecordingMemory
from blinkpy.verify.recording.recording_reader import RecordingReader
from blinkpy.verify.replay.replayer import Replay


class RecordedWorld(World):
    """record: how many calls the ring has at least. reader: attached to it. linked: whether others find it too."""

    def __init__(
        self,
        sizes: Sizes,
        mode: str | int = "python",
        policy: Policy = fcfs,
        seed: int = 0,
        record: int = 16,
        linked: bool = False,
    ):
        super().__init__(dataclasses.replace(sizes, record_turns=record, intake_tokens=8), mode, policy, seed)
        facts = {"queue": dataclasses.asdict(self.queue), "policy": policy.__name__, "policy_digest": "", "sources": ""}
        self.memory = RecordingMemory(self.limits, self.state, facts)
        self.state = self.state._replace(recorder=self.memory.recorder)
        self.memory.keep(self.state)
        schedule = self._runner(mode, policy, seed)

        def call_and_keep(now: int) -> int:
            bucket = schedule(now)
            self.memory.keep(self.state)
            return bucket

        self._schedule = call_and_keep
        name = f"test-{os.getpid()}-{id(self)}"
        self.memory.publish(name)
        self.reader = RecordingReader(name)
        if not linked:
            self.memory.close()  # the link; the memory stays while it is used


def crowded(policy: Policy = fcfs) -> RecordedWorld:
    """One pair, two rows, few pages: four requests of different lengths."""
    world = RecordedWorld(
        Sizes(pairs=1, slots=6, rows=2, tokens=8, pages=8, page_size=4, max_model_len=32), "python", policy, record=256
    )
    world.attach()
    front = world.fronts[0]
    for length, most in ((14, 10), (3, 10), (9, 4), (2, 2)):
        front.submit(list(range(length)), most)
    world.finish()
    return world


def replayed(replay: Replay) -> int:
    """Run it; every call must be as recorded. Returns the number of calls."""
    for call, differences in replay.run():
        assert not differences, (call.number, differences)
    return len(replay.calls)
