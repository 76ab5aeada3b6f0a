"""Limits of connections, streams and queue pairs, each as the only limit that binds: all other limits have
their defaults."""

import socket
from pathlib import Path
from typing import Any

import pytest
from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.http_server import completion_bytes, serving
from support.front_end.tiny_tokenizer import write_model
from support.waiting import BUSY_S, wait_for

from blinkpy.dpu.link.queue_pair import QueuePair

MANY = FACTS._replace(max_model_len=100_000, num_pages=100_000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


# By bytes with a number that is out of reach; by number with small events.
@pytest.mark.parametrize(
    ("limit", "fields"),
    [({"max_output_backlog": 50}, {}), ({"max_output_backlog_mib": 1, "max_output_backlog": 1 << 24}, {"logprobs": 20})],
    ids=["events", "bytes"],
)
def test_a_stream_that_is_not_read_is_cancelled(folder: Path, limit: dict[str, int], fields: dict[str, Any]) -> None:
    with FakeEngine(facts=MANY, step_s=0.0002) as engine, serving(engine, folder, send_buffer=4096, **limit) as server:
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            sock.sendall(completion_bytes(prompt=[7, 8], max_tokens=90_000, stream=True, **fields))
            wait_for(lambda: engine.submitted)

            def is_cancelled() -> bool:
                assert server.complete([7], max_tokens=3).status_code == 200
                return engine.cancels > 0

            wait_for(is_cancelled)
            server.idle()
        assert 'blinkpy_slow_clients_total{worker="0"} 1' in server.client.get("/metrics").text


def test_an_idle_connection_is_closed(folder: Path) -> None:
    with (
        FakeEngine() as engine,
        serving(engine, folder, keep_alive_s=1) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock,
    ):
        sock.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        assert sock.recv(65536) == b"", "it is open for less than the default of 30 s"


def test_a_worker_without_a_heartbeat_loses_its_queue_pair(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests end, and it gets the pair again once it beats."""
    with FakeEngine() as engine, serving(engine, folder) as server:
        engine.hold = True
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            sock.sendall(completion_bytes(prompt=[7], max_tokens=5, stream=True))
            wait_for(lambda: engine.pairs[0].requests)
            with monkeypatch.context() as patch:
                patch.setattr(QueuePair, "beat", lambda pair: None)
                patch.setattr(engine, "facts", engine.facts._replace(lease_ms=500))
                wait_for(lambda: engine.fences)
            received = b""
            while b'"error"' not in received:  # the connection is open until keep_alive_s
                piece = sock.recv(65536)
                assert piece, received
                received += piece
        engine.hold = False
        server.ready()
        assert server.complete([7], max_tokens=1).status_code == 200
