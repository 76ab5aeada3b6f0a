"""The engine of `blinkpy serve`: its process, and with --restart a new process after each death.

After a death, the recording is saved and the segment removed before the next start. An engine without a
heartbeat for engine_hang_s is killed first. The heartbeat comes from its loop, not from the process: if the
loop is on a GPU, it still serves while the process is stopped.

The pause before a start doubles up to PAUSES_S, and is reset after an engine that served for a while.
EngineStarts publishes the time of the next start to front ends, which detect the death and attach to the new
engine themselves.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Mapping

from blinkpy.config import Config
from blinkpy.dpu.engine_starts import EngineStarts
from blinkpy.kept_process import BeatWatch, Death, KeptProcess
from blinkpy.processes import Child, no_progress
from blinkpy.progress import ProgressCallback
from blinkpy.recording.dump_file import save_crash
from blinkpy.recording.recording_layout import RecordingError, remove_dead_links
from blinkpy.recording.recording_reader import RecordingReader
from blinkpy.serving.engine_process import ENGINE_STOP_S, START_SILENCE_S
from blinkpy.transport.engine_life import EngineLife
from blinkpy.transport.segment import unlink_stale

PAUSES_S = (0.5, 60.0)  # first and maximum pause
FAULT_EXIT_S = 30.0  # from a fault to the end of the process, which saves its recording and frees its resources
START_STOP_S = 1.0  # maximum time for the end of a starting engine, which has no requests

logger = logging.getLogger("blinkpy.serve")


class KeptEngine:
    """The engine's processes, one after another, with the config's segment.

    hurry: returns whether a second signal arrived.
    called: name in the log.
    environment: additional environment variables of its processes.
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
        self.called = called
        self.flags = ""  # options with which a front end reaches it, once it serves
        self._process = KeptProcess(
            lambda: Child("engine", config, environment=environment), PAUSES_S, START_SILENCE_S, self._stuck
        )
        self._recording: RecordingReader | None = None  # keeps the memory of a killed engine
        self._life: EngineLife | None = None
        self._faulted_at: float | None = None  # monotonic s
        self._hang = BeatWatch(0)

    @property
    def ready(self) -> bool:
        return self._process.ready

    @property
    def served(self) -> bool:
        """Whether any of its processes has served."""
        return self._process.served

    def start(self) -> None:
        """Start the first process."""
        self._process.start()

    def look(self, timeout_s: float = 0.0, on_progress: ProgressCallback = no_progress) -> Death | None:
        """Wait up to timeout_s seconds for reports. If the engine has just been found dead, or was killed because it
        hung: save its recording, and return its death.
        """
        served = self.ready
        death = self._process.look(timeout_s, on_progress)
        if not served and self.ready:
            self._serves()
        if death is not None and death.code < 0 and self._recording is not None and self._faulted_at is None:
            # A process that exits with an error has saved its recording itself.
            engine = self._config.engine
            logger.error("%s", save_crash(self._recording, engine.record_folder, engine.name, f"{self.called} {death.how}"))
        return death

    def restart(self, death: Death) -> None:
        """Remove the files of a dead engine, and plan the start of the next one; restart_if_due() starts it."""
        process, how = self._process, str(death)
        if not death.was_ready:
            how = f"did not start: {death.start_error}"
        self._starts.expect(process.pause_s + process.start_s)
        self._clear()
        logger.error("%s %s; restart %d in %g s", self.called, how, self._starts.restarts + 1, process.pause_s)

    def restart_if_due(self) -> None:
        """Start the next engine if the pause after a death is over."""
        if self._process.restart_if_due():
            self._starts.count()
            self._starts.expect(self._process.start_s)

    def end(self, drain_s: float = 0.0) -> None:
        """End the process, in order if it serves. Its segment is removed then.

        drain_s: maximum time for its requests.
        """
        self._process.end(drain_s + ENGINE_STOP_S if self.ready else START_STOP_S, self._hurry)
        self._clear()

    def _serves(self) -> None:
        engine = self._config.engine
        self.flags = str(self._process.facts.get("flags", ""))
        self._faulted_at, self._hang = None, BeatWatch(engine.engine_hang_s)
        with contextlib.suppress(OSError):  # it has died already, which the next look() reports
            self._life = EngineLife(engine.name)
        if engine.record_steps:
            with contextlib.suppress(RecordingError):
                self._recording = RecordingReader(engine.name)
        if self._starts.restarts:
            logger.warning("%s is ready again after %.1f s", self.called, self._process.start_s)
        self._starts.serving()

    def _stuck(self) -> str:
        """Why the engine must be killed, or ""."""
        if self._life is None:
            return ""
        now, limit_s = time.monotonic(), self._config.engine.engine_hang_s
        if self._life.has_fault():
            self._faulted_at = now if self._faulted_at is None else self._faulted_at
            if now - self._faulted_at > FAULT_EXIT_S:
                return f"had a fault, and was killed: its process did not exit within {FAULT_EXIT_S:.0f} s"
        elif self._hang.is_over(self._life.beat(), now):
            return f"hung, and was killed: its loop made no progress for {limit_s} s"
        return ""

    def _clear(self) -> None:
        """Remove the files of a process that has ended."""
        self._recording = self._life = None
        unlink_stale(self._config.engine.name)
        remove_dead_links()
