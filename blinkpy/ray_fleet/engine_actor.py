"""An engine in a Ray actor, and its process, which ends with the actor."""

import logging
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.engine_starts import STARTS_BYTES, EngineStarts
from blinkpy.dpu.watch.log_output import start_logging
from blinkpy.models.weights.checkpoint import find_model
from blinkpy.process_exit import Stopped
from blinkpy.processes import ChildError
from blinkpy.serving.engine_process import ENGINE_STOP_S
from blinkpy.serving.kept_engine import POLL_S, KeptEngine
from blinkpy.serving.option_choices import load_choices
from blinkpy.serving.segment_names import private_name, remove_leftovers
from blinkpy.transport.segment import unlink_stale

logger = logging.getLogger("blinkpy.ray")


class Started(NamedTuple):
    """The result of a start.

    address: of an engine, for front ends; or the URL of a front end.
    segment: name of an engine's segment.
    problem: why the start failed, or "".
    hopeless: another attempt would fail, too.
    """

    address: str = ""
    segment: str = ""
    problem: str = ""
    hopeless: bool = False


def config_of(table: Mapping[str, Any]) -> Config:
    """A config from the result of as_table() in another process."""
    load_choices()
    return Config().with_options(table)


class EngineActor:
    """Runs one engine. Ray calls its methods in threads, end() while others run.

    table: the engine's options.
    number: of the engine.
    crosses_machines: front ends may be on other nodes.
    """

    def __init__(self, table: Mapping[str, Any], number: int, crosses_machines: bool):
        self._number, self._crosses_machines = number, crosses_machines
        self._config = config_of(table)
        self._kept: KeptEngine | None = None
        self._stopping, self._busy = threading.Event(), threading.Lock()  # busy: a method waits for the process
        start_logging(f"engine {number}", self._config.frontend.log_level, self._config.watch.log_format)

    def start(self, lost: Sequence[str]) -> Started:
        """Start the process, and wait until it serves.

        lost: segments of engines whose actors are lost. One of them may still run on this actor's GPU; wait
            for its end.
        """
        config = self._config.with_options({"name": private_name()})
        if self._crosses_machines:
            config = config.with_options({"listen": f"{_bracketed(node_address())}:0"})
        try:
            self._tick()
            config = find_model(config, self._report, tokenizer=False)
            self._wait_for(lost)
            remove_leftovers()
            starts = EngineStarts(memoryview(bytearray(STARTS_BYTES)))
            self._kept = KeptEngine(config, starts, lambda: False, f"engine {self._number}")
            self._kept.start(self._report, self._tick)
        except Stopped:
            return Started(problem="it was asked to end")
        except ConfigError as error:
            return Started(problem=str(error), hopeless=True)
        except ChildError as error:
            return Started(problem=str(error), hopeless=error.usage)
        name = config.engine.name
        return Started(_address(self._kept.flags) if self._crosses_machines else name, name)

    def wait_end(self) -> str:
        """Wait until the engine has died or was ended, and free its resources. Returns how it ended."""
        assert self._kept is not None
        with self._busy:
            try:
                how = self._kept.wait_end(self._tick)
            except Stopped:
                return "was told to end"
            self._kept.end()
        return how

    def end(self) -> None:
        """Shut down in order: requests may continue for shutdown_s."""
        self._stopping.set()
        waited = self._busy.acquire(timeout=ENGINE_STOP_S)
        if self._kept is not None:
            self._kept.end(self._config.frontend.shutdown_s)
        if waited:
            self._busy.release()

    def _wait_for(self, lost: Sequence[str]) -> None:
        """Wait for the ends of lost engines of this node; only they have a segment here."""
        deadline = time.monotonic() + self._config.frontend.shutdown_s + ENGINE_STOP_S
        while any(not unlink_stale(name) for name in lost) and time.monotonic() < deadline:
            self._tick()
            time.sleep(POLL_S)

    def _tick(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def _report(self, phase: str, done: float = 0, total: float = 0) -> None:
        logger.debug("%s %g/%g", phase, done, total)


def _address(flags: str) -> str:
    """The engine's address in the flags of a front end."""
    words = shlex.split(flags)
    return words[words.index("--engine") + 1]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def node_address() -> str:
    """The address of this actor's node."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
