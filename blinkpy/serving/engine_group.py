"""The engines of `blinkpy serve`, from one to many: each is a KeptEngine, with a thread that restarts it."""

import os
import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.engine_starts import map_starts
from blinkpy.process_exit import Stopped
from blinkpy.progress import ProgressCallback
from blinkpy.serving.kept_engine import POLL_S, KeptEngine, Tick

GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each
VISIBLE = "CUDA_VISIBLE_DEVICES"
JOIN_S = 5.0  # for a thread to stop; it checks several times a second


def gpus_of(config: Config, engines: int) -> list[str]:
    """A GPU for each engine, as CUDA_VISIBLE_DEVICES names it; empty for engines without. Raises ConfigError if
    there are too few.
    """
    if config.engine.device not in ("auto", "cuda"):
        return []
    visible = os.environ.get(VISIBLE)
    present = len(list(GPUS.iterdir())) if GPUS.is_dir() else 0
    gpus = [str(gpu) for gpu in range(present)] if visible is None else [one.strip() for one in visible.split(",") if one.strip()]
    if config.engine.device == "auto" and (not present or not gpus):
        return []
    if len(gpus) < engines:
        raise ConfigError(f"data_parallel_size {engines} needs {engines} GPUs, but this machine has {len(gpus)}")
    return gpus[:engines]


class EngineGroup:
    """The engines of a server.

    config: of the server; data_parallel_size is the number of engines.
    starts_fd: of EngineStarts, one for each engine.
    hurry: whether a second signal came.
    front_config: the config for front ends.

    Raises ConfigError.
    """

    def __init__(self, config: Config, starts_fd: int, hurry: Callable[[], bool]):
        number, name = config.engine.data_parallel_size, config.engine.name
        names, called, gpus = [name], ["the engine"], list[str]()
        self.front_config = config
        if number > 1:
            gpus = gpus_of(config, number)
            if not gpus and not config.engine.threads:  # they share the cores
                config = config.with_options({"threads": max(1, len(os.sched_getaffinity(0)) // number)})
            names, called = [f"{name}-{i}" for i in range(number)], [f"engine {i}" for i in range(number)]
            self.front_config = config.with_options({"engine": ",".join(names)})

        def kept(i: int) -> KeptEngine:
            environment: Mapping[str, str] = {VISIBLE: gpus[i]} if gpus else {}
            return KeptEngine(config.with_options({"name": names[i]}), map_starts(starts_fd, i), hurry, called[i], environment)

        self._engines = [kept(i) for i in range(number)]
        self._restart = config.engine.restart
        self._stopping = threading.Event()
        self._serving: queue.Queue[int] = queue.Queue()
        self._ends: queue.Queue[str | Exception] = queue.Queue()  # how one ended, or why it can't be looked after
        self._threads = [
            threading.Thread(target=self._look_after, args=(number,), name=f"engine {number}", daemon=True)
            for number in range(len(self._engines))
        ]

    def start(self, on_progress: ProgressCallback, on_tick: Tick) -> None:
        """Start all concurrently, and wait until they serve; reports the first one's progress. Raises ChildError,
        and exceptions of on_tick.
        """
        reports: queue.Queue[tuple[str, float, float]] = queue.Queue()
        self._report = lambda phase, done=0.0, total=0.0: reports.put((phase, done, total))
        for thread in self._threads:
            thread.start()
        started = 0
        while started < len(self._threads):
            self._raise_ends()
            on_tick()
            while not reports.empty():
                on_progress(*reports.get())
            try:
                self._serving.get(timeout=POLL_S)
                started += 1
            except queue.Empty:
                continue

    def wait_end(self, on_tick: Tick) -> str:
        """Wait until an engine has died that is not restarted; return which one, and how. Raises ChildError, and exceptions
        of on_tick.
        """
        while True:
            on_tick()
            try:
                return self._raised(self._ends.get(timeout=POLL_S))
            except queue.Empty:
                continue

    def stop_restarts(self) -> None:
        """From now on a dead engine stays dead."""
        self._stopping.set()

    def end(self) -> None:
        """End all processes; engines that serve end in order."""
        self.stop_restarts()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(JOIN_S)
        enders = [threading.Thread(target=engine.end) for engine in self._engines]
        for ender in enders:
            ender.start()
        for ender in enders:
            ender.join()

    def _raise_ends(self) -> None:
        while not self._ends.empty():
            self._raised(self._ends.get())

    @staticmethod
    def _raised(end: str | Exception) -> str:
        if isinstance(end, Exception):
            raise end
        return end

    def _tick(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def _look_after(self, number: int) -> None:
        """Thread: an engine from its start to the end of the server."""
        engine = self._engines[number]
        try:
            engine.start(self._report if number == 0 else lambda *report: None, self._tick)
            self._serving.put(number)
            while True:
                how = engine.wait_end(self._tick)
                if not self._restart:
                    self._ends.put(f"{engine.called} {how}")
                    return
                engine.start_again(how, self._tick)
        except Stopped:
            return
        except Exception as error:
            self._ends.put(error)
