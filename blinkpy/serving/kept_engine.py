"""The engine of `blinkpy serve`: its process, and with --restart a new one after each death.

After a death, the recording is saved and the segment removed before the next start. An engine without a
heartbeat for engine_hang_s is killed first. The heartbeat is its loop's, not the process's: with the loop
on a GPU, a stopped process serves on.

The pause before a start doubles up to PAUSES_S, and is reset after an engine that served for a while.
EngineStarts publishes the time of the next start to front ends; they notice the death and attach to the new
engine by themselves.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from blinkpy.config import Config
from blinkpy.dpu.engine_starts import EngineStarts
from blinkpy.process_exit import describe_exit
from blinkpy.processes import BeatWatch, Child, ChildError, pause_before_start
from blinkpy.progress import ProgressCallback
from blinkpy.recording.dump_file import save_crash
from blinkpy.recording.recording_layout import RecordingError, remove_dead_links
from blinkpy.recording.recording_reader import RecordingReader
from blinkpy.serving.engine_process import ENGINE_STOP_S, START_SILENCE_S
from blinkpy.transport.engine_life import EngineLife
from blinkpy.transport.segment import unlink_stale

PAUSES_S = (0.5, 60.0)  # the first, and the longest
FAULT_EXIT_S = 30.0  # from a fault to the end of the process, which saves its recording and frees its resources
START_STOP_S = 1.0  # longest time for the end of an engine that starts: it has nothing to lose
POLL_S = 0.1

logger = logging.getLogger("blinkpy.serve")

Tick = Callable[[], None]  # called several times a second; its exceptions end a wait


class KeptEngine:
    """The engine's processes, one after another, share the config's segment.

    hurry: whether a second signal arrived.
    called: its name in the log.
    environment: variables of its processes, in addition to this one's.
    flags: with which a front end reaches it, once it serves.
    """

    def __init__(
        self,
        config: Config,
        starts: EngineStarts,
        hurry: Callable[[], bool],
        called: str = "the engine",
        environment: Mapping[str, str] | None = None,
    ):
        self._config, self._starts, self._hurry = config, starts, hurry
        self.called, self._environment = called, environment
        self.flags = ""
        self._child: Child | None = None
        self._recording: RecordingReader | None = None  # it holds the memory of an engine that was killed
        self._life: EngineLife | None = None
        self._ready_at: float | None = None  # None: it has not served yet
        self._start_s = self._pause_s = 0.0

    def start(self, on_progress: ProgressCallback, on_tick: Tick) -> None:
        """Start a process, and wait until it serves. Raises ChildError, and exceptions of on_tick."""
        began, self._ready_at = time.monotonic(), None
        self._child = Child("engine", self._config, environment=self._environment)
        self.flags = str(self._child.wait_ready(START_SILENCE_S, on_progress, on_tick).get("flags", ""))
        with contextlib.suppress(OSError):  # it is gone already: that is found out next
            self._life = EngineLife(self._config.engine.name)
        if self._config.engine.record_steps:
            with contextlib.suppress(RecordingError):
                self._recording = RecordingReader(self._config.engine.name)
        self._ready_at = time.monotonic()
        self._start_s = self._ready_at - began
        self._starts.serving()

    def wait_end(self, on_tick: Tick) -> str:
        """Wait until the engine has died, or has to be killed; save its recording, and return how it ended. Raises
        exceptions of on_tick.
        """
        assert self._child is not None
        engine, faulted_at, hangs = self._config.engine, 0.0, False
        watch = BeatWatch(engine.engine_hang_s)
        while (code := self._child.exit_code()) is None:
            time.sleep(POLL_S)
            on_tick()
            if self._life is None:
                continue
            now = time.monotonic()
            if self._life.has_fault():
                faulted_at = faulted_at or now
                if now - faulted_at > FAULT_EXIT_S:
                    return f"had a fault, and was ended: its process did not end by itself within {FAULT_EXIT_S:.0f} s"
            elif hangs or watch.is_over(self._life.beat(), now):
                hangs = True
                self._child.kill()
        how = f"hung, and was ended: its loop stood still for {engine.engine_hang_s} s" if hangs else describe_exit(code)
        reason = self._child.last_error()
        if code < 0 and self._recording is not None:  # a process that exits with an error has saved it itself
            logger.error("%s", save_crash(self._recording, engine.record_folder, engine.name, f"{self.called} {how}"))
        return how + (f" ({reason})" if reason else "")

    def start_again(self, how: str, on_tick: Tick) -> None:
        """Start until an engine serves. how: the last one ended. Raises what on_tick raises."""
        reason = f"{self.called} {how}"
        while True:
            served_s = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
            self._pause_s = pause_before_start(self._pause_s, served_s, PAUSES_S)
            self._starts.expect(self._pause_s + self._start_s)
            self._clear()
            logger.error("%s; restart %d in %g s", reason, self._starts.restarts + 1, self._pause_s)
            due = time.monotonic() + self._pause_s
            while time.monotonic() < due:
                on_tick()
                time.sleep(min(POLL_S, max(0.0, due - time.monotonic())))
            self._starts.count()
            self._starts.expect(self._start_s)
            try:
                self.start(lambda *report: None, on_tick)
            except ChildError as error:
                on_tick()  # its exceptions have priority
                reason = f"{self.called} did not start: {error}"
                continue
            logger.warning("%s is ready again after %.1f s", self.called, self._start_s)
            return

    def end(self, drain_s: float = 0.0) -> None:
        """End the process: in order if it serves. Its segment is gone then. drain_s: that requests get, where front ends are
        there that have some."""
        self._clear(drain_s + ENGINE_STOP_S if self._ready_at is not None else START_STOP_S)

    def _clear(self, stop_s: float = 0.0) -> None:
        """End the process and its children if they still run, and remove its files."""
        if self._child is not None:
            self._child.end(stop_s, self._hurry)
        self._child = self._recording = self._life = None
        unlink_stale(self._config.engine.name)
        remove_dead_links()
