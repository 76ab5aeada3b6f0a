"""The engines of `blinkpy serve`, from one to many: each is a KeptEngine."""

import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.engine_starts import map_starts
from blinkpy.kept_process import Death
from blinkpy.processes import REPORT_S, ChildError, Tick, no_progress
from blinkpy.progress import ProgressCallback
from blinkpy.serving.kept_engine import KeptEngine

GPUS = Path("/proc/driver/nvidia/gpus")  # one folder per GPU
VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_of(config: Config, engines: int) -> list[str]:
    """A GPU for each engine, for CUDA_VISIBLE_DEVICES; empty for engines without a GPU. Raises ConfigError if
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

    def start(self, on_progress: ProgressCallback, on_tick: Tick) -> None:
        """Start all engines concurrently, and wait until they serve. Reports the first engine's progress.
        Raises ChildError, and exceptions of on_tick.
        """
        for engine in self._engines:
            engine.start()
        while starting := [engine for engine in self._engines if not engine.ready]:
            on_tick()
            for engine in self._engines:
                first = engine is self._engines[0]
                wait_s = REPORT_S if engine is starting[0] else 0.0
                death = engine.look(wait_s, on_progress if first else no_progress)
                if death is not None:
                    on_tick()  # its exceptions have priority
                    if not engine.served:
                        raise death.start_error
                    self._died(engine, death)
                    if self.lost:
                        raise ChildError(self.lost)
                elif self._restart and engine.served:
                    engine.restart_if_due()

    def look(self, timeout_s: float = 0.0) -> None:
        """Watch all engines, waiting up to timeout_s seconds for reports, and restart dead engines.

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
