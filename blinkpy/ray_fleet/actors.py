"""Ray actors for an engine or a front end. Each runs one process, which ends when the actor ends."""

import contextlib
import logging
import os
import re
import shlex
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from blinkpy.config import Config, ConfigError
from blinkpy.dpu.engine_starts import STARTS_BYTES, EngineStarts
from blinkpy.dpu.supervisor import END_GRACE_S
from blinkpy.dpu.watch.log_output import start_logging
from blinkpy.kept_process import KeptProcess, start_kept, wait_end
from blinkpy.models.weights.model_folder import find_model
from blinkpy.packages import require_packages
from blinkpy.process_exit import Stopped
from blinkpy.processes import REPORT_S, Child, ChildError
from blinkpy.serving import load_choices
from blinkpy.serving.engine_process import ENGINE_STOP_S, private_name, remove_leftovers
from blinkpy.serving.frontend_process import FRONTEND_START_S, PACKAGES, base_url, check_access
from blinkpy.serving.kept_engine import PAUSES_S, KeptEngine
from blinkpy.top.server_sample import ServerSample, look
from blinkpy.transport.segment import unlink_stale

EVERYWHERE = ("", "0.0.0.0", "::")  # hosts that stand for all addresses of a node
PREFIX = "blinkpy-ray-"  # of folders with a list of engines: PREFIX, the actor's process id, and a random text

logger = logging.getLogger("blinkpy.ray")


class Started(NamedTuple):
    """The result of a start.

    address: an engine's address in the front ends' list; a front end's URL.
    segment: name of an engine's segment.
    problem: why the process does not run, or "".
    hopeless: whether another attempt would also fail.
    """

    address: str = ""
    segment: str = ""
    problem: str = ""
    hopeless: bool = False


class _Actor:
    """Runs one process. Ray calls methods in threads, and end() while others run. The keeper restarts the
    actor; the actor does not restart its process.

    table: options, as returned by as_table() in another process.
    called: name in the log.
    end_wait_s: maximum time for which end() waits for wait_end().
    """

    def __init__(self, table: Mapping[str, Any], called: str, end_wait_s: float):
        load_choices()
        self._config = Config().with_options(table)
        self._called = called
        self._end_wait_s = end_wait_s
        self._kept: KeptProcess | KeptEngine | None = None
        self._stopping, self._busy = threading.Event(), threading.Lock()  # busy: held while a thread waits for the process
        start_logging(called, self._config.frontend.log_level, self._config.watch.log_format)

    def wait_end(self) -> str:
        """Wait until the process has died or was ended. Returns a description, after all its resources are
        freed.
        """
        assert self._kept is not None
        with self._busy:
            try:
                how = str(wait_end(self._kept, self._tick))
            except Stopped:
                return "was asked to end"
            self._free(0.0)
        return how

    def end(self) -> None:
        """End the process in order: its requests may continue for shutdown_s."""
        self._stopping.set()
        waited = self._busy.acquire(timeout=self._end_wait_s)
        self._free(self._config.frontend.shutdown_s)
        if waited:
            self._busy.release()

    def _free(self, drain_s: float) -> None:
        """End the process if it runs, and free its resources. drain_s: longest time for its requests."""
        raise NotImplementedError

    def _start(self, start: Callable[[], Started]) -> Started:
        try:
            self._tick()
            return start()
        except Stopped:
            return Started(problem="it was asked to end")
        except ConfigError as error:
            return Started(problem=str(error), hopeless=True)
        except ChildError as error:
            return Started(problem=str(error), hopeless=error.usage)

    def _tick(self) -> None:
        if self._stopping.is_set():
            raise Stopped

    def _report(self, phase: str, done: float = 0, total: float = 0) -> None:
        logger.debug("%s %g/%g", phase, done, total)


class EngineActor(_Actor):
    """Runs one engine.

    table: the engine's options.
    number: the engine's number.
    crosses_machines: front ends may be on other nodes.
    """

    def __init__(self, table: Mapping[str, Any], number: int, crosses_machines: bool):
        super().__init__(table, f"engine {number}", ENGINE_STOP_S)
        self._crosses_machines = crosses_machines

    def start(self, lost: Sequence[str]) -> Started:
        """Start, and wait until it serves. lost: segments of engines whose actors are gone. One of them may still
        be running on this actor's GPU; wait for its end.
        """
        return self._start(lambda: self._start_engine(lost))

    def _start_engine(self, lost: Sequence[str]) -> Started:
        config = self._config.with_options({"name": private_name()})
        if self._crosses_machines:
            config = config.with_options({"listen": f"{_bracketed(node_address())}:0"})
        config = find_model(config, self._report, tokenizer=False)
        self._wait_for(lost)
        remove_leftovers()
        starts = EngineStarts(memoryview(bytearray(STARTS_BYTES)))
        self._kept = kept = KeptEngine(config, starts, lambda: False, self._called)
        start_kept(kept, self._report, self._tick)
        name = config.engine.name
        return Started(_address(kept.flags) if self._crosses_machines else name, name)

    def _free(self, drain_s: float) -> None:
        if isinstance(self._kept, KeptEngine):
            self._kept.end(drain_s)

    def _wait_for(self, lost: Sequence[str]) -> None:
        """Wait for the end of lost engines. Only engines of this node have a segment here."""
        deadline = time.monotonic() + self._config.frontend.shutdown_s + ENGINE_STOP_S
        while any(not unlink_stale(name) for name in lost) and time.monotonic() < deadline:
            self._tick()
            time.sleep(REPORT_S)


class FrontEndActor(_Actor):
    """Runs one front end. A file lists its engines.

    table: the front end's options.
    number: the front end's number.
    crosses_machines: whether its address must be reachable from other nodes.
    """

    def __init__(self, table: Mapping[str, Any], number: int, crosses_machines: bool = False):
        super().__init__(table, f"front end {number}", END_GRACE_S)
        self._crosses_machines, self._url = crosses_machines, ""
        self._writing = threading.Lock()  # held while the folder is written
        remove_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))

    def start(self, engines: Sequence[str]) -> Started:
        """Start, and wait until it listens. engines: their addresses."""
        with self._busy:
            return self._start(lambda: self._start_front_end(engines))

    def _start_front_end(self, engines: Sequence[str]) -> Started:
        self.set_engines(engines)
        require_packages("a front end", *PACKAGES)
        config = self._config.with_options({"engines_file": str(self._file)})
        self._wait_for_address()
        config = find_model(config, self._report, weights=False)
        self._kept = kept = KeptProcess(lambda: Child("frontend", config), PAUSES_S, FRONTEND_START_S)
        start_kept(kept, self._report, self._tick)
        scheme = "https" if config.access.ssl_certfile else "http"
        host = config.frontend.host
        if self._crosses_machines and host in EVERYWHERE:
            host = node_address()
        self._url = base_url(host, int(kept.facts["port"]), scheme)
        return Started(self._url)

    def set_engines(self, engines: Sequence[str]) -> None:
        """Replace the list of engines by these addresses."""
        with self._writing:
            if self._stopping.is_set():
                return
            new = self._file.with_suffix(".new")
            new.write_text("".join(f"{engine}\n" for engine in engines))
            os.replace(new, self._file)

    def look(self) -> ServerSample:
        """A sample of its metrics."""
        return look(self._url, insecure=True)

    @property
    def _file(self) -> Path:
        return self._folder / "engines"

    def _free(self, drain_s: float) -> None:
        if isinstance(self._kept, KeptProcess):
            self._kept.end(drain_s + 2 * END_GRACE_S)
        with self._writing:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_address(self) -> None:
        """Wait until the front end of a lost actor has freed its address. Raises ConfigError."""
        deadline = time.monotonic() + self._config.frontend.shutdown_s + END_GRACE_S
        while True:
            try:
                return check_access(self._config)
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
            self._tick()
            time.sleep(REPORT_S)


def remove_folders() -> None:
    """Remove the folders of killed actors."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        found = re.match(rf"{PREFIX}(\d+)-", path.name)
        with contextlib.suppress(OSError):
            if found and path.stat().st_uid == os.geteuid() and not Path(f"/proc/{found[1]}").exists():
                shutil.rmtree(path, ignore_errors=True)


def node_address() -> str:
    """The address of this actor's node."""
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


def _address(flags: str) -> str:
    """The engine's address in the flags of a front end."""
    words = shlex.split(flags)
    return words[words.index("--engine") + 1]


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
