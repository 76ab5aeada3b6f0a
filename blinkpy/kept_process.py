"""Processes that are watched, killed if they hang, and restarted after each death.

The engines of `blinkpy serve`, the workers of a front end and the actors of a Ray fleet are such processes.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from blinkpy.process_exit import describe_exit
from blinkpy.processes import REPORT_S, USAGE_EXIT, Child, ChildError, Tick, no_progress
from blinkpy.progress import ProgressCallback

STEADY_S = 60.0  # after serving for this long, a death counts as the first one
MOST_GAP_S = 1.0  # maximum counted time between two checks of a beat, because the watcher may have been stopped


class BeatWatch:
    """Detects that a process or thread hangs: its beat, a number that changes while it works, stays the same.

    limit_s: maximum time without a change, in seconds; 0: no limit.
    """

    def __init__(self, limit_s: float):
        self._limit_s = limit_s
        self.still_s = 0.0  # time without a change
        self._beat: int | None = None
        self._looked = 0.0

    def is_over(self, beat: int, now: float) -> bool:
        """Whether the beat has not changed for longer than the limit. now: on any clock, s."""
        self.still_s = self.still_s + min(now - self._looked, MOST_GAP_S) if beat == self._beat else 0.0
        self._beat, self._looked = beat, now
        return 0 < self._limit_s < self.still_s


def pause_before_start(before_s: float, served_s: float, pauses_s: tuple[float, float]) -> float:
    """Seconds from the death of a process to the start of its successor: twice the last pause, within
    pauses_s.

    before_s: the last pause.
    served_s: seconds for which the dead process served.
    pauses_s: the first and the maximum pause.
    """
    first, most = pauses_s
    return first if served_s > STEADY_S else min(most, max(first, 2 * before_s))


class Death(NamedTuple):
    """The end of a process.

    entry: name of its entry.
    code: its exit code, negative for a signal.
    how: description, such as "ended with exit code 1" or the reason of a kill.
    error: the error that it reported, or "".
    was_ready: whether it had been ready.
    """

    entry: str
    code: int
    how: str
    error: str
    was_ready: bool

    def __str__(self) -> str:
        return self.how + (f" ({self.error})" if self.error else "")

    @property
    def start_error(self) -> ChildError:
        """The error of a start that failed because of this death."""
        return ChildError(self.error or f"the {self.entry} process {self.how} while starting", self.code == USAGE_EXIT)


class KeptProcess:
    """A process and its successors: watched, killed if stuck, and restarted after a pause.

    The pause doubles with each death within `pauses_s` (first, maximum). A process that was ready for
    STEADY_S resets it to the first. A process that the machine can't start counts as a death.

    launch: starts a process. Raises ChildError.
    silence_s: maximum time between two reports of a starting process.
    stuck: returns why a ready process must be killed, or "".
    """

    def __init__(
        self,
        launch: Callable[[], Child],
        pauses_s: tuple[float, float],
        silence_s: float,
        stuck: Callable[[], str] = lambda: "",
    ):
        self._launch = launch
        self._pauses_s = pauses_s
        self._silence_s = silence_s
        self._stuck = stuck
        self.child: Child | None = None
        self.ready_at: float | None = None  # monotonic s; None while no process is ready
        self.served = False  # a process has been ready
        self.starts = 0
        self.start_s = 0.0  # duration of the last start
        self.pause_s = 0.0  # between the last death and the next start
        self.due = 0.0  # time of the next start, monotonic s
        self._killed = ""  # the reason
        self._unstarted = ""  # the reason, until look() returns it
        self._started_at = 0.0

    @property
    def pid(self) -> int:
        """Process id; 0 without a process."""
        return self.child.pid if self.child is not None else 0

    @property
    def facts(self) -> dict[str, Any]:
        """Facts that the process reported when it became ready."""
        return (self.child.facts if self.child is not None else None) or {}

    @property
    def ready(self) -> bool:
        return self.ready_at is not None

    def start(self) -> None:
        """Start a process. The previous one must have ended. If that fails, the next look() returns a death."""
        self.starts += 1
        self.ready_at = None
        self._killed = ""
        self._started_at = time.monotonic()
        try:
            self.child = self._launch()
        except ChildError as error:
            self._unstarted = str(error)

    def restart_if_due(self) -> bool:
        """Start a successor if the pause after a death is over. Returns whether it did."""
        due = self.child is None and not self._unstarted and time.monotonic() >= self.due
        if due:
            self.start()
        return due

    def look(self, timeout_s: float = 0.0, on_progress: ProgressCallback = no_progress) -> Death | None:
        """Wait up to timeout_s seconds for reports. Returns the death of the process when it is first found
        dead.
        """
        child = self.child
        if child is None and self._unstarted:
            error, self._unstarted = self._unstarted, ""
            self._plan_restart(0.0)
            return Death("", 1, "could not be started", error, False)
        if child is None:
            time.sleep(timeout_s)
            return None
        code = child.exit_code()
        child.read(timeout_s, on_progress)
        now = time.monotonic()
        if child.facts is not None and self.ready_at is None:
            self.ready_at = now
            self.start_s = now - self._started_at
            self.served = True
        if code is None:
            self._killed = self._killed or (self._stuck() if self.ready else child.silence(self._silence_s))
            if self._killed:
                child.kill()
            return None
        was_ready, served_s = self.ready, 0.0 if self.ready_at is None else now - self.ready_at
        self.child = self.ready_at = None
        child.end(0)
        self._plan_restart(served_s)
        return Death(child.entry, code, self._killed or describe_exit(code), child.error, was_ready)

    def _plan_restart(self, served_s: float) -> None:
        self.pause_s = pause_before_start(self.pause_s, served_s, self._pauses_s)
        self.due = time.monotonic() + self.pause_s

    def end(self, timeout_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """End the process if one runs; see Child.end."""
        child, self.child, self.ready_at = self.child, None, None
        if child is not None:
            child.end(timeout_s, hurry)


class Kept(Protocol):
    """A KeptProcess, or an object that adds to one."""

    @property
    def ready(self) -> bool: ...
    def start(self) -> None: ...
    def look(self, timeout_s: float = 0.0, on_progress: ProgressCallback = no_progress) -> Death | None: ...


def start_kept(kept: Kept, on_progress: ProgressCallback, on_tick: Tick) -> None:
    """Start a process, and wait until it is ready. Raises ChildError if it dies, and exceptions of
    on_tick.
    """
    kept.start()
    while not kept.ready:
        on_tick()
        death = kept.look(REPORT_S, on_progress)
        if death is not None:
            on_tick()  # its exceptions have priority
            raise death.start_error


def wait_end(kept: Kept, on_tick: Tick) -> Death:
    """Wait until a process has died or was killed because it hung. Raises exceptions of on_tick."""
    while (death := kept.look(REPORT_S)) is None:
        on_tick()
    return death
