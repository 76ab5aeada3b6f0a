"""What `make fuzz-http` sends, and that it notices what must not happen."""

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

TOOLS = Path(__file__).parents[3] / "tools"
FIELDS = {
    path: ["prompt", "messages", "input", "tokens", "max_tokens", "user", "stream", "n"]
    for path in (
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/tokenize",
        "/detokenize",
    )
}


@pytest.fixture
def fuzz_http(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(TOOLS))
    import fuzz_http

    monkeypatch.setattr(fuzz_http, "KEPT", tmp_path)
    return fuzz_http


@contextlib.contextmanager
def stub(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server that does this with each connection, once something came; its port."""
    listening, taken = socket.create_server(("127.0.0.1", 0), backlog=128), list[socket.socket]()

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listening.accept()
                taken.append(sock)
                sock.recv(1 << 20)
                answer(sock)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listening.getsockname()[1]
    finally:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for sock in [listening, *taken]:
            sock.close()


def say(text: bytes) -> Callable[[socket.socket], None]:
    def answer(sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            sock.sendall(text)
            sock.shutdown(socket.SHUT_RDWR)

    return answer


def test_a_request_is_made_again_by_seed_and_number(fuzz_http: Any, seed: int) -> None:
    first, again, other = (fuzz_http.Requests(number, FIELDS) for number in (seed, seed, seed + 1))
    made = [first.make(number) for number in range(3000)]
    assert made == [again.make(number) for number in range(3000)]
    assert made[:50] != [other.make(number) for number in range(50)]
    assert len({each.data for each in made}) > 1500
    kinds = Counter(each.kind for each in made)
    assert min(kinds.values()) > 30 and len(kinds) == 5, kinds
    assert sum(each.data.startswith(b"POST /v1/") for each in made) > 600


@pytest.mark.parametrize(
    ("answer", "failure", "statuses"),
    [
        (b"HTTP/1.1 500 Internal Server Error\r\n\r\n", "500", {"500"}),
        (b"HTTP/1.1 200 OK\r\n\r\n{}HTTP/1.1 503 Service Unavailable\r\n\r\n", "503", {"200", "503"}),
        (b"HTTP/1.1 422 What\r\n\r\n", "", {"422"}),
        (b"", "", {"closed"}),
        (None, "hang", set()),
    ],
    ids=["500", "503 behind 200", "422", "closed", "hang"],
)
def test_what_must_not_happen_is_a_failure(
    fuzz_http: Any, answer: bytes | None, failure: str, statuses: set[str], seed: int, tmp_path: Path, monkeypatch: Any
) -> None:
    """Each time; and what was sent is kept."""
    if failure == "hang":
        monkeypatch.setattr(fuzz_http, "HANG_S", 0.5)
    requests = fuzz_http.Requests(seed, FIELDS)
    with stub(lambda sock: None if answer is None else say(answer)(sock)) as port:
        clients = fuzz_http.Clients(port, requests)
        asyncio.run(clients.run(range(5, 25), 20))
    assert clients.kinds.total() == 20
    assert set(clients.statuses) == statuses
    kept = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    expected = {f"{seed}-{number}-{failure}": requests.make(number).data for number in range(5, 25)} if failure else {}
    assert sorted(clients.failures) == [(number, failure) for number in range(5, 25) if failure]
    assert kept == expected
