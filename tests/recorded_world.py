"""A world whose scheduler records, in memory that readers can attach to: what an engine has, without one."""

from __future__ import annotations

import dataclasses
import os

from scheduler_world import Sizes, World

from blinkpy.kernels.policies import Policy, fcfs
from blinkpy.recording.memory import RecordingMemory, RecordingReader


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
        super().__init__(dataclasses.replace(sizes, record_calls=record, intake_tokens=8), mode, policy, seed)
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
