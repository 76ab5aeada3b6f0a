"""Turns of a scheduler on the host, one after another, with the steps that they ask for."""

import time
from collections.abc import Callable

from blinkpy.kv import state as S
from blinkpy.scheduler.host_scheduler import Scheduler

Compute = Callable[[int], None]
"""Computes the batch that a turn planned. Gets the time at which the turn began, monotonic clock, ns."""


def run_turns(
    scheduler: Scheduler,
    compute: Compute,
    idle_ns: int,
    deadline_ns: int,
    after_turn: Callable[[], None] = lambda: None,
    before_turn: Callable[[int], None] = lambda now_ns: None,
) -> int:
    """Run an attached scheduler: before_turn with the time, a turn, after_turn, and compute if there is a batch.

    Returns NO_BATCH after idle_ns without work or when time.monotonic_ns() reaches deadline_ns, or else STOPPED or DRAINED.
    """
    now = worked = time.monotonic_ns()
    while now < deadline_ns and now - worked <= idle_ns:
        before_turn(now)
        result = scheduler.turn(now)
        after_turn()
        if result in (S.STOPPED, S.DRAINED):
            return result
        if result >= 0:
            compute(now)
            worked = time.monotonic_ns()
        now = time.monotonic_ns()
    return S.NO_BATCH
