"""A null engine, front ends with one worker, and probes that send requests while other clients load them."""

import contextlib
import http.client
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.common.harness import Run
from benchmarks.serving.process_memory import worker_below
from benchmarks.serving.systems import Model, Running, System
from blinkpy.config import Config
from blinkpy.models.weights.model_folder import find_model
from blinkpy.processes import Child

START_S, STOP_S, PROBE_S = 600.0, 20.0, 30.0
MODEL = Model("demo", "demo", 0, 0, True)
PAUSES_S = {"health": 0.04, "answer": 0.1}  # between two probes


@contextlib.contextmanager
def null_engine(run: Run, **options: Any) -> Iterator[str]:
    """An engine that generates synthetic tokens, with two queue pairs; the name of its segment. options: as of the
    engine."""
    name = f"null-{os.getpid()}-{secrets.token_hex(4)}"
    values = {"name": name, "model": "demo", "device": "null", "load_format": "dummy", "workers": 2, "log_level": "error"}
    child = Child("engine", find_model(Config().with_options(values | options), run.progress))
    try:
        child.wait_ready(START_S, run.progress)
        yield name
    finally:
        child.end(STOP_S)


def front_end(segment: str, extra: str = "", before: str = "") -> System:
    """A front end for an engine, with one worker. extra: its options; before: the start of its command."""
    command = f"{before} {{python}} -m blinkpy frontend {{model}} --served-model-name {{name}} --port {{port}} --name {segment}"
    return System("blinkpy", f"{command} --workers 1 --no-access-log --log-level error {extra}")


def worker_of(server: Running) -> int:
    """Process id of a front end's worker."""
    assert server.process is not None
    return worker_below(server.process.pid)


class Probes:
    """Sends requests on new connections, from a thread for each of PAUSES_S, until it is closed.

    samples: (time.perf_counter() at the end, seconds, status) of each kind; status 0: no answer.
    """

    def __init__(self, port: int, key: str = "none"):
        self.samples: dict[str, list[tuple[float, float, int]]] = {kind: [] for kind in PAUSES_S}
        self._port, self._headers = port, {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(kind,), daemon=True) for kind in PAUSES_S]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join()

    def _run(self, kind: str) -> None:
        while not self._ended.wait(PAUSES_S[kind]):
            began, status = time.perf_counter(), 0
            connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PROBE_S)
            with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
                if kind == "health":
                    connection.request("GET", "/health")
                else:
                    connection.request("POST", "/v1/completions", b'{"prompt":"the sea","max_tokens":1}', self._headers)
                answer = connection.getresponse()
                answer.read()
                status = answer.status
            now = time.perf_counter()
            self.samples[kind].append((now, now - began, status))

    def between(self, kind: str, begin: float, end: float) -> list[tuple[float, int]]:
        """The samples that ended in this period."""
        return [(seconds, status) for when, seconds, status in self.samples[kind] if begin <= when < end]
