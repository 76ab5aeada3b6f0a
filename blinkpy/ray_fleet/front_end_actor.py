"""A front end in a Ray actor: its process, which ends with the actor, and its file of engines."""

import contextlib
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.dpu.supervisor import END_GRACE_S
from blinkpy.dpu.watch.log_output import start_logging
from blinkpy.models.weights.checkpoint import find_model
from blinkpy.packages import require_packages
from blinkpy.process_exit import Stopped, describe_exit
from blinkpy.processes import Child, ChildError
from blinkpy.ray_fleet.engine_actor import Started, config_of, node_address
from blinkpy.serving.addresses import base_url, check_access
from blinkpy.serving.frontend_process import FRONTEND_START_S, PACKAGES
from blinkpy.serving.kept_engine import POLL_S
from blinkpy.top.server_sample import ServerSample, look

EVERYWHERE = ("", "0.0.0.0", "::")  # hosts
PREFIX = "blinkpy-ray-"  # of folders with a list of engines: PREFIX, the actor's process id, and a random part


class FrontEndActor:
    """Runs one front end. Ray calls its methods in threads, end() while others run.

    table: the front end's options.
    number: of the front end.
    crosses_machines: its address must be reachable from other nodes.
    """

    def __init__(self, table: Mapping[str, Any], number: int, crosses_machines: bool = False):
        self._config, self._crosses_machines = config_of(table), crosses_machines
        self._child: Child | None = None
        self._stopping = threading.Event()
        self._busy, self._writing = (
            threading.Lock(),
            threading.Lock(),
        )  # a method waits for the process; a method writes the folder
        start_logging(f"front end {number}", self._config.frontend.log_level, self._config.watch.log_format)
        remove_folders()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-"))
        self._url = ""

    def start(self, engines: Sequence[str]) -> Started:
        """Start the process, and wait until it listens. engines: their addresses."""
        with self._busy:
            return self._start(engines)

    def _start(self, engines: Sequence[str]) -> Started:
        try:
            self._tick()
            self.set_engines(engines)
            require_packages("a front end", *PACKAGES)
            config = self._config.with_options({"engines_file": str(self._file)})
            self._wait_for_address()
            config = find_model(config, lambda *report: None, weights=False)
            self._child = Child("frontend", config)
            facts = self._child.wait_ready(FRONTEND_START_S, on_tick=self._tick)
        except Stopped:
            return Started(problem="it was asked to end")
        except ConfigError as error:
            return Started(problem=str(error), hopeless=True)
        except ChildError as error:
            return Started(problem=str(error), hopeless=error.usage)
        scheme = "https" if config.access.ssl_certfile else "http"
        host = config.frontend.host
        if self._crosses_machines and host in EVERYWHERE:
            host = node_address()
        self._url = base_url(host, int(facts["port"]), scheme)
        return Started(self._url)

    def set_engines(self, engines: Sequence[str]) -> None:
        """Replace its list of engines' addresses."""
        with self._writing:
            if self._stopping.is_set():
                return
            new = self._file.with_suffix(".new")
            new.write_text("".join(f"{engine}\n" for engine in engines))
            os.replace(new, self._file)

    def look(self) -> ServerSample:
        """Read its /metrics."""
        return look(self._url, insecure=True)

    def wait_end(self) -> str:
        """Wait until it has died. Returns how it ended."""
        assert self._child is not None
        with self._busy:
            try:
                while (code := self._child.exit_code()) is None:
                    time.sleep(POLL_S)
                    self._tick()
            except Stopped:
                return "was told to end"
            reason = self._child.last_error()
            self._child.end(0)
            self._remove_folder()
        return describe_exit(code) + (f" ({reason})" if reason else "")

    def end(self) -> None:
        """Shut down in order: requests may continue for shutdown_s."""
        self._stopping.set()
        waited = self._busy.acquire(timeout=END_GRACE_S)
        if self._child is not None:
            self._child.end(self._config.frontend.shutdown_s + 2 * END_GRACE_S)
        self._remove_folder()
        if waited:
            self._busy.release()

    @property
    def _file(self) -> Path:
        return self._folder / "engines"

    def _remove_folder(self) -> None:
        with self._writing:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for_address(self) -> None:
        """Wait until the front end of a lost actor has released its address. Raises ConfigError."""
        deadline = time.monotonic() + self._config.frontend.shutdown_s + END_GRACE_S
        while True:
            try:
                return check_access(self._config)
            except ConfigError:
                if time.monotonic() > deadline:
                    raise
            self._tick()
            time.sleep(POLL_S)

    def _tick(self) -> None:
        if self._stopping.is_set():
            raise Stopped


def remove_folders() -> None:
    """Remove the folders of killed actors."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        found = re.match(rf"{PREFIX}(\d+)-", path.name)
        with contextlib.suppress(OSError):
            if found and path.stat().st_uid == os.geteuid() and not Path(f"/proc/{found[1]}").exists():
                shutil.rmtree(path, ignore_errors=True)
