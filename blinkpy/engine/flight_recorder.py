"""The flight recorder of an engine: records in shared memory, saved to a file after a crash."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import Config
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.queues.layout import QueueSizes
from blinkpy.queues.words import COUNTER, ENGINE_POLICY_FAULT
from blinkpy.recording.recording_layout import RecordingError
from blinkpy.recording.recording_memory import RecordingMemory
from blinkpy.recording.recording_reader import RecordingReader, save_crash
from blinkpy.scheduler.guarded_arithmetic import describe_policy_fault
from blinkpy.scheduler.policies import Policy, guarded_policy, is_shipped
from blinkpy.scheduler.policy_vetting import policy_facts
from blinkpy.sources import SCHEDULER, source_digest

logger = logging.getLogger("blinkpy.engine")

PERIOD_S = 60.0  # between two log lines


class PolicyFaultLog:
    """Logs the policy's faults from the engine's words.

    name: the value of --policy.
    words: the engine's block of the segment.
    """

    def __init__(self, name: str, policy: Policy, words: NDArray[np.int64], clock: Callable[[], float] = time.monotonic):
        self._name = name
        self._policy = policy
        self._words = words
        self._clock = clock
        self._silent = is_shipped(policy)
        self._logged, self._next = 0, -float("inf")

    def look(self) -> None:
        """Log the faults since the last line, at most one line per PERIOD_S."""
        if self._silent or (count := int(self._words[COUNTER["policy_faults"]])) == self._logged or self._clock() < self._next:
            return
        try:
            place, what = describe_policy_fault(int(self._words[ENGINE_POLICY_FAULT]), guarded_policy(self._policy).places)
        except ValueError:  # the count was written, but not yet the fault's text: the next call reads both
            return
        new = count - self._logged
        requests = "a request gets" if new == 1 else f"{new:,} requests get"
        logger.warning("policy %s: %s, line %d: %s; %s the last rank", self._name, place.file, place.line, what, requests)
        self._logged, self._next = count, self._clock() + PERIOD_S


class FlightRecorder:
    """Records a scheduler, if --record-steps is not 0.

    memory: the recording, once a state has a recorder.
    """

    def __init__(self, config: Config, sizes: QueueSizes, limits: Limits, policy: Policy):
        self.memory: RecordingMemory | None = None
        self._config = config
        self._sizes = sizes
        self._limits = limits
        self._policy = policy

    def attach(self, state: State, share_inputs: bool = False) -> State:
        """The state, with a recorder in shared memory if recording is enabled and memory suffices.

        share_inputs: also share the inputs of a turn, for a host that calls open_turn before each turn.
        """
        if self._limits.record_turns == 0:
            return state
        facts = {
            "queue": dataclasses.asdict(self._sizes),
            "device": self._config.engine.device,
            "sources": source_digest(SCHEDULER),
            **policy_facts(self._config.scheduler.policy, self._policy),
        }
        try:
            self.memory = RecordingMemory(self._limits, state, facts)
        except RecordingError as error:
            logger.warning("the flight recorder is off: %s", error)
            return state
        recorded = state._replace(recorder=self.memory.recorder)
        recorded = self.memory.share_inputs(recorded) if share_inputs else recorded
        self.memory.keep(recorded)
        return recorded

    def publish(self) -> None:
        """Publish the recording under the engine's name."""
        if self.memory is not None:
            self.memory.publish(self._config.engine.name)

    def open_turn(self, now_ns: int, number: int) -> None:
        """Begin a turn. If the turn fails before close_turn, its inputs are the last record."""
        if self.memory is not None:
            self.memory.open_turn(now_ns, number)

    def close_turn(self, state: State) -> None:
        """Copy the state if a copy is due. Call it after a turn, before the planned step."""
        if self.memory is not None:
            self.memory.close_turn()
            self.memory.keep(state)

    def save_crash(self, error: BaseException) -> None:
        """Save the recording after a fault, and log the path."""
        if self.memory is not None and isinstance(error, Exception):
            name, folder = self._config.engine.name, self._config.engine.record_folder
            with contextlib.suppress(RecordingError):
                saved = save_crash(RecordingReader(name), folder, name, f"{type(error).__name__}: {error}"[:500])
                logger.error("%s", saved)

    def close(self) -> None:
        if self.memory is not None:
            self.memory.close()
            self.memory = None
