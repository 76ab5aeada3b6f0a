"""A front-end worker on a thread of this process, in front of an engine in plain Python; for the tests of the HTTP
side."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
from support.front_end.fake_engine import FakeEngine

from blinkpy.config import Config
from blinkpy.dpu.supervisor import listen
from blinkpy.dpu.worker import Server, make_server

MODEL = "tiny"


class RunningServer:
    """A served worker. url: its address; client: an httpx client with that base."""

    def __init__(self, server: Server, port: int):
        self.server, self.port = server, port
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=20)
        self.engine_client = server.app.service.engine

    def post(self, path: str, **fields: object) -> httpx.Response:
        return self.client.post(path, json=fields)

    def chat(self, content: str = "Hello", **fields: object) -> httpx.Response:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": content}], **fields)

    def complete(self, prompt: object = "Hello", **fields: object) -> httpx.Response:
        return self.post("/v1/completions", prompt=prompt, **fields)

    def idle(self, timeout: float = 5.0) -> None:
        """Wait until no slot is in use any more."""
        self.wait(lambda: self.engine_client.pair is not None and self.engine_client.pair.in_flight == 0, timeout)

    def ready(self, timeout: float = 5.0) -> None:
        self.wait(lambda: self.engine_client.status() is None, timeout)

    @staticmethod
    def wait(condition: Callable[[], bool], timeout: float = 5.0) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.002)

    def raw(self, data: bytes, timeout: float = 10.0) -> bytes:
        """Send bytes and return all that comes until the server closes or is silent for 0.3 s."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=timeout) as sock:
            sock.sendall(data)
            received = b""
            with contextlib.suppress(TimeoutError, ConnectionResetError):
                while piece := sock.recv(65536):
                    received += piece
                    sock.settimeout(0.3)
            return received


def events(response: httpx.Response) -> list[dict]:
    """The JSON events of a stream, which must end with [DONE]."""
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines), response.text
    assert lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


@contextlib.contextmanager
def serving(
    engine: FakeEngine | str, folder: Path, wait_ready: bool = True, send_buffer: int = 0, **options: object
) -> Iterator[RunningServer]:
    """A worker for an engine, or for one with that name, until the end of the block. send_buffer: of the server's
    sockets, in bytes, 0 for what the kernel gives. options: by their flat names."""
    name = engine if isinstance(engine, str) else engine.segment_name
    values = {"name": name, "served_model_name": MODEL, "shutdown_s": 1, "log_level": "error", **options}
    config = Config().with_options(values)
    (sock,) = listen("127.0.0.1", 0, 1)
    if send_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
    server = make_server(config, 0, folder)
    running = RunningServer(server, sock.getsockname()[1])
    thread = threading.Thread(target=lambda: server.run(sockets=[sock]), daemon=True)
    thread.start()
    try:
        running.wait(lambda: server.started, 10)
        if wait_ready:
            running.ready()
        yield running
    finally:
        running.client.close()
        server.should_exit = True
        thread.join(15)
        assert not thread.is_alive(), "the server did not end"


def on_loop(server: RunningServer, function: Callable[[], None]) -> None:
    """Run something on the server's event loop and wait for it."""
    loop = server.engine_client._loop
    assert loop is not None

    async def call() -> None:
        function()

    asyncio.run_coroutine_threadsafe(call(), loop).result(5)
