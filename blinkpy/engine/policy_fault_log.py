"""Faults of a user's policy while it serves, as occasional lines of the engine's log."""

import logging
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from blinkpy.queues.words import COUNTER, ENGINE_POLICY_FAULT
from blinkpy.scheduler.guarded_arithmetic import describe_policy_fault
from blinkpy.scheduler.policies import Policy, guarded_policy, is_shipped

logger = logging.getLogger("blinkpy.engine")

PERIOD_S = 60.0  # between two lines


class PolicyFaultLog:
    """Watches the engine's words for faults of its policy. name: the value of --policy. words: the engine's
    block of the segment.
    """

    def __init__(self, name: str, policy: Policy, words: NDArray[np.int64], clock: Callable[[], float] = time.monotonic):
        self._name, self._policy, self._words, self._clock = name, policy, words, clock
        self._silent = is_shipped(policy)
        self._logged, self._next = 0, -float("inf")

    def look(self) -> None:
        """Log faults that were counted since the last line, if that was PERIOD_S ago or more."""
        if self._silent or (count := int(self._words[COUNTER["policy_faults"]])) == self._logged or self._clock() < self._next:
            return
        try:
            place, what = describe_policy_fault(int(self._words[ENGINE_POLICY_FAULT]), guarded_policy(self._policy).places)
        except ValueError:  # the count came before the fault; the next look has both
            return
        new = count - self._logged
        requests = "a request gets" if new == 1 else f"{new:,} requests get"
        logger.warning("policy %s: %s, line %d: %s; %s the last rank", self._name, place.file, place.line, what, requests)
        self._logged, self._next = count, self._clock() + PERIOD_S
