"""A front-end worker on a thread of this process, with an engine in plain Python."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from support.front_end.fake_engine import FakeEngine
from support.waiting import BUSY_S, wait_for

from blinkpy.config import Config
from blinkpy.dpu.http.http_server import Server
from blinkpy.dpu.supervisor import listen
from blinkpy.dpu.worker import make_server

MODEL = "tiny"
NO_DETAILS = {"prompt_tokens_details": {"cached_tokens": 0}, "completion_tokens_details": {"reasoning_tokens": 0}}  # of usage
SILENT_S = 0.15
COMPLETIONS_HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


class RunningServer:
    """A served worker. url: its address; client: an httpx client with that base."""

    def __init__(self, server: Server, port: int):
        self.server, self.port = server, port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=BUSY_S)
        self.engine_client = server.app.service.engine

    def chat(self, content: str = "Hello", **fields: object) -> httpx.Response:
        return self.client.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": content}], **fields})

    def complete(self, prompt: object = "Hello", **fields: object) -> httpx.Response:
        return self.client.post("/v1/completions", json={"prompt": prompt, **fields})

    def idle(self) -> None:
        """Wait until all slots are free."""
        wait_for(lambda: self.engine_client.pair is not None and self.engine_client.pair.in_flight == 0)

    def ready(self) -> None:
        """Wait until the engine takes requests."""
        wait_for(lambda: self.engine_client.status() is None)

    def raw(self, data: bytes) -> bytes:
        """Send bytes and return all data until the server closes the connection, or is silent for a while although its event loop
        runs and all requests are answered."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=BUSY_S) as sock:
            sock.sendall(data)
            sock.settimeout(SILENT_S)
            received, silences = b"", 0
            with contextlib.suppress(ConnectionResetError):
                until = time.monotonic() + BUSY_S
                while silences < 2 and time.monotonic() < until:  # in the first turn, the server has read all sent data
                    turned = self._next_turn()
                    try:
                        if not (piece := sock.recv(65536)):
                            break
                        received, silences = received + piece, 0
                    except TimeoutError:
                        app = self.server.app
                        idle = received and turned.is_set() and not app.running and not app.service.gate.waiting
                        silences = silences + 1 if idle else 0
            return received

    def _next_turn(self) -> threading.Event:
        """An event that a later turn of the server's event loop sets."""
        turned = threading.Event()
        assert self.server._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self.server._loop.call_soon_threadsafe(turned.set)
        return turned


def events(response: httpx.Response) -> list[dict]:
    """The JSON events of a stream, which must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), response.text
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


def text_and_end(response: httpx.Response) -> tuple[str, str]:
    """Text and finish reason of a completion of one prompt, whole or streamed."""
    streamed = response.headers["content-type"].startswith("text/event-stream")
    choices = [part["choices"][0] for part in (events(response) if streamed else [response.json()])]
    return "".join(choice["text"] for choice in choices), choices[-1]["finish_reason"]


def completion_bytes(**fields: object) -> bytes:
    """A request for a completion, for a client that is a bare socket."""
    body = json.dumps(fields).encode()
    return COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)


@contextlib.contextmanager
def serving(
    engine: FakeEngine | str,
    folder: Path,
    /,
    wait_ready: bool = True,
    send_buffer: int = 0,
    make: Callable[..., Any] = make_server,
    **options: object,
) -> Iterator[RunningServer]:
    """A worker for an engine, or for the engine with this name, until the end of the block. send_buffer: bytes of the server's
    send buffers; 0: the kernel's default. make: a make_server with a planted bug. options: by their flat names.
    """
    name = engine if isinstance(engine, str) else engine.segment_name
    values = {"name": name, "served_model_name": MODEL, "shutdown_s": 1, "log_level": "error", "engine_timeout_ms": 60_000}
    values |= options
    config = Config().with_options(values)
    (sock,) = listen("127.0.0.1", 0, 1)
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = make(config, 0, folder)
    server.app.metrics_page.every_s = 0.0  # tests read counters immediately after their requests
    running = RunningServer(server, sock.getsockname()[1])
    thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
    thread.start()
    try:
        wait_for(lambda: server.started)
        if wait_ready:
            running.ready()
        yield running
    finally:
        running.client.close()
        server.should_exit = True
        thread.join(BUSY_S)
        assert not thread.is_alive(), "the server did not end"
