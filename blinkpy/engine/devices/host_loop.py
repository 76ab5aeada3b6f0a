"""A loop on the host: the scheduler compiled for the CPU, and the device's step.

One thread runs both: a turn, then its step. Without work, the loop sleeps with exponential back-off up to a limit, so an idle
engine uses no core.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from blinkpy.engine.devices.device_contract import Setup, require_integrity
from blinkpy.engine.devices.null_step import Compute, run_turns
from blinkpy.engine.flight_recorder import PolicyFaultLog
from blinkpy.engine.link.pair_memory import QueueMemory
from blinkpy.kv import state as S
from blinkpy.kv.state import State
from blinkpy.queues.words import ENGINE_PROGRESS
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.transport.segment import Segment

if TYPE_CHECKING:
    pass


IDLE_SPIN_NS = 200_000  # time for which the loop spins after work, before it sleeps
IDLE_SLEEP_S = (20e-6, 1e-3)  # first and maximum sleep
INTEGRITY_PERIOD_NS = 1_000_000_000  # while idle
NO_DEADLINE_NS = 1 << 62


class HostLoop:
    """A device_contract.Runner whose loop runs on the host.

    state: the scheduler's state on the host, with its recorder.
    step: run(batch, requests) writes keys and values of the batch's tokens, and batch.sampled of rows that emit. If None, the
    creator sets `compute`.
    progress: word that advances during a step.
    scheduler: bound to `state`; None: compile it first.
    """

    faults: tuple[type[BaseException], ...] = (BaseException,)
    pair_memory: QueueMemory | None = None

    def __init__(
        self, setup: Setup, state: State, step: Any = None, progress: Any = None, scheduler: Scheduler | None = None
    ) -> None:
        self.setup, self.state = setup, state
        self._recorder, self._when = setup.recorder, setup.config.engine.check_integrity
        if scheduler is None:
            setup.report("compiling the scheduler")
            scheduler = Scheduler(setup.limits, self.state, setup.policy)
        self.scheduler, self.step, self.progress = scheduler, step, progress
        self.compute: Compute = lambda began_ns: self.step.run(self.state.batch, self.state.requests)
        self._integrity_due = 0

    def attach(self, segment: Segment) -> None:
        words = segment.views().engine
        self.scheduler.attach(segment.views())
        self._fault_log = PolicyFaultLog(self.setup.config.scheduler.policy, self.setup.policy, words)
        if self.progress is not None:
            self.progress.word = words[ENGINE_PROGRESS : ENGINE_PROGRESS + 1]
        self.scheduler.turn(time.monotonic_ns())  # the first call loads the compiled code
        if self._checks():
            require_integrity(self.check())  # also loads the compiled check now, which would delay the loop later

    def run(self, budget_s: float) -> int:
        counts, (shortest, longest) = self.state.counts, IDLE_SLEEP_S
        now = time.monotonic_ns()
        deadline = now + int(budget_s * 1e9) if budget_s else NO_DEADLINE_NS
        spin_ns, pause = IDLE_SPIN_NS, shortest
        while now < deadline:
            steps = counts[S.STEPS]
            result = run_turns(self.scheduler, self.compute, spin_ns, deadline, self._after_turn, self._before_turn)
            if result in (S.STOPPED, S.DRAINED):
                return result
            now = time.monotonic_ns()
            if counts[S.STEPS] != steps:
                spin_ns, pause = IDLE_SPIN_NS, shortest
                continue
            if self._checks() and now >= self._integrity_due:
                self._integrity_due = now + INTEGRITY_PERIOD_NS
                require_integrity(self.check())
            due = int(self.state.pace[S.PACE_DUE_NS])  # time at which a delayed step is due
            time.sleep(min(pause, max(0, due - now) / 1e9) if due else pause)
            spin_ns, pause = 0, min(2 * pause, longest)
        return S.NO_BATCH

    def _before_turn(self, now_ns: int) -> None:
        self._recorder.open_turn(now_ns, self.state.counts[S.TURNS])

    def _after_turn(self) -> None:
        self._recorder.close_turn(self.state)
        self._fault_log.look()
        if self._when == "always":
            require_integrity(self.check())

    def _checks(self) -> bool:
        """Whether to check while idle. An interpreted check of many pages takes seconds, after which front ends would consider
        the engine lost.
        """
        return self._when != "never" and self.scheduler.mode == "njit"

    def check(self) -> list[str]:
        return self.scheduler.check()

    def close(self) -> None:
        self.scheduler.close()
