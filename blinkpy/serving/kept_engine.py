"""Keeps the engine of `blinkpy serve` running: with --restart, each death is followed by a new process.

After a death, the recording is saved and the segment removed before the next start. An engine without a
heartbeat for engine_hang_s is killed first. The engine's loop sends the heartbeat, not its process: a loop on a GPU serves even
while the process is stopped.

The pause before a start doubles up to PAUSES_S, and is reset after an engine that served for a while.
EngineStarts publishes the time of the next start to front ends, which detect the death themselves and attach to the new engine.
"""

import contextlib
import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.engine_starts import EngineStarts, map_starts
from blinkpy.kept_process import BeatWatch, Death, KeptProcess
from blinkpy.processes import REPORT_S, Child, ChildError, Tick, no_progress
from blinkpy.progress import ProgressCallback
from blinkpy.queues import words as W
from blinkpy.queues.layout import read_header
from blinkpy.recording.recording_layout import RecordingError, remove_dead_links
from blinkpy.recording.recording_reader import RecordingReader, save_crash
from blinkpy.serving.engine_process import ENGINE_STOP_S, START_SILENCE_S
from blinkpy.transport.segment import open_file, segment_path, unlink_stale

# The health of an engine on this machine, for the process that watches it: fault and progress.


class EngineLife:
    """The engine that currently owns a segment's name. Raises OSError if there is no such engine."""

    def __init__(self, name: str):
        fd = open_file(segment_path(name))
        try:
            memory = memoryview(mmap.mmap(fd, 0, prot=mmap.PROT_READ))
        finally:
            os.close(fd)
        layout, _ = read_header(memory)
        self._words = memory.cast("q")
        self._engine = layout.engine_words // 8
        self._control = layout.control_words // 8

    def has_fault(self) -> bool:
        """Whether the engine has reported a fault."""
        return self._words[self._control + W.CONTROL_FAULT] != 0

    def beat(self) -> int:
        """A counter that changes while the engine's loop turns or a step computes. A loop on the GPU changes it independently of
        the host.
        """
        return self._words[self._engine + W.ENGINE_HEARTBEAT] + self._words[self._engine + W.ENGINE_PROGRESS]


PAUSES_S = (0.5, 60.0)  # first and maximum pause
FAULT_EXIT_S = 30.0  # from a fault to the process's exit; meanwhile it saves its recording and frees its resources
START_STOP_S = 1.0  # time limit for stopping an engine that still starts, and has no requests

logger = logging.getLogger("blinkpy.serve")


class KeptEngine:
    """The engine's processes, one after another, with the config's segment.

    hurry: returns whether a second signal arrived. called: the engine's name in the log.
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
        self._config = config
        self._starts = starts
        self._hurry = hurry
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
        self._starts.begin()
        self._process.start()

    def look(self, timeout_s: float = 0.0, on_progress: ProgressCallback = no_progress) -> Death | None:
        """Wait up to timeout_s seconds for reports. If the engine died, or was killed because it hung, save its recording and
        return its death.
        """
        served = self.ready
        death = self._process.look(timeout_s, on_progress)
        if not served and self.ready:
            self._serves()
        if death is not None and death.code < 0 and self._recording is not None and self._faulted_at is None:
            # A process that exits with an error has already saved its recording.
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
        """End the process, in order if it serves, and remove its segment.

        drain_s: maximum time for its requests.
        """
        self._process.end(drain_s + ENGINE_STOP_S if self.ready else START_STOP_S, self._hurry)
        self._clear()

    def _serves(self) -> None:
        engine = self._config.engine
        self.flags = str(self._process.facts.get("flags", ""))
        self._faulted_at, self._hang = None, BeatWatch(engine.engine_hang_s)
        with contextlib.suppress(OSError):  # it is already dead, as the next look() will report
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


# The engines of `blinkpy serve`: one or more KeptEngines.

GPUS = Path("/proc/driver/nvidia/gpus")  # one folder per GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_of(config: Config, engines: int) -> list[str]:
    """The GPUs of each engine, for CUDA_VISIBLE_DEVICES; empty for engines without a GPU. Raises ConfigError if
    there are too few.
    """
    if config.engine.device not in ("auto", "cuda"):
        return []
    visible = os.environ.get(VISIBLE)
    present = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    gpus = [str(gpu) for gpu in range(present)] if visible is None else [one.strip() for one in visible.split(",") if one.strip()]
    if config.engine.device == "auto" and (not present or not gpus):
        return []
    each = config.engine.tensor_parallel_size
    if len(gpus) < engines * each:
        of = f" of tensor_parallel_size {each}" if each > 1 else ""
        raise ConfigError(f"data_parallel_size {engines}{of} needs {engines * each} GPUs, but this machine has {len(gpus)}")
    return [",".join(gpus[i * each : (i + 1) * each]) for i in range(engines)]


class EngineGroup:
    """The engines of a server.

    config: the server's options; data_parallel_size is the number of engines.
    starts_fd: see EngineStarts, one for each engine.
    hurry: returns whether a second signal arrived.
    front_config: the config for front ends.
    Raises ConfigError.
    """

    def __init__(self, config: Config, starts_fd: int, hurry: Callable[[], bool]):
        number, name = config.engine.data_parallel_size, config.engine.name
        names, called, gpus = [name], ["the engine"], list[str]()
        self.front_config = config
        if number > 1:
            gpus = gpus_of(config, number)
            if not gpus and not config.engine.threads:  # divide the cores
                config = config.with_options({"threads": max(1, len(os.sched_getaffinity(0)) // number)})
            names, called = [f"{name}-{i}" for i in range(number)], [f"engine {i}" for i in range(number)]
            self.front_config = config.with_options({"engine": ",".join(names)})

        def kept(i: int) -> KeptEngine:
            environment: Mapping[str, str] = {VISIBLE: gpus[i]} if gpus else {}
            return KeptEngine(config.with_options({"name": names[i]}), map_starts(starts_fd, i), hurry, called[i], environment)

        self._engines = [kept(i) for i in range(number)]
        self._restart = config.engine.restart
        self.lost = ""  # name and death of an engine that is not restarted

    def start(self) -> None:
        """Start all engines concurrently."""
        for engine in self._engines:
            engine.start()

    def wait_ready(self, on_progress: ProgressCallback, on_tick: Tick) -> None:
        """Wait until all engines serve. Reports the first engine's progress. Raises ChildError, and exceptions of on_tick."""
        while starting := [engine for engine in self._engines if not engine.ready]:
            on_tick()
            for engine in self._engines:
                first = engine is self._engines[0]
                wait_s = REPORT_S if engine is starting[0] else 0.0
                death = engine.look(wait_s, on_progress if first else no_progress)
                if death is not None:
                    on_tick()  # first, because its exceptions have priority
                    if not engine.served:
                        raise death.start_error
                    self._died(engine, death)
                    if self.lost:
                        raise ChildError(self.lost)
                elif self._restart and engine.served:
                    engine.restart_if_due()

    def look(self, timeout_s: float = 0.0) -> None:
        """Wait up to timeout_s seconds for reports of all engines, and restart dead engines.

        Call it several times a second.
        """
        for i, engine in enumerate(self._engines):
            death = engine.look(timeout_s if i == 0 else 0.0)
            if death is not None:
                self._died(engine, death)
            if self._restart:
                engine.restart_if_due()

    def end(self) -> None:
        """End all processes, serving engines in order."""
        enders = [threading.Thread(target=engine.end) for engine in self._engines]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()

    def _died(self, engine: KeptEngine, death: Death) -> None:
        if self._restart:
            engine.restart(death)
        else:
            self.lost = self.lost or f"{engine.called} {death}"
