"""The end and the contents of a request: odd framing hides no second request, and no header behind a body.

Supports claim front-ends/http.
"""

import contextlib
import http.client
import json
import logging
import socket
import time
from collections.abc import Iterator

import httpx
import pytest
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import COMPLETIONS_HEAD, RunningServer, events, serving
from support.front_end.tiny_tokenizer import write_model
from support.waiting import BUSY_S, wait_for

BODY = b'{"prompt":[70],"max_tokens":2}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
IN_CHUNKS = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
OFFERS = (
    b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n",
    b"connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[RunningServer]:
    with FakeEngine() as engine, serving(engine, write_model(tmp_path_factory.mktemp("model"))) as server:
        yield server


def statuses(answers: bytes) -> list[bytes]:
    return [part[:3] for part in answers.split(b"HTTP/1.1 ")[1:]]


@pytest.mark.parametrize("size", [3, 16, 100])
def test_a_client_of_http_2_gets_an_error_in_its_protocol(server, size) -> None:
    """Frames, with lengths as RFC 9113 has them: SETTINGS, then GOAWAY with HTTP_1_1_REQUIRED and a text."""
    begin = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
    with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
        with contextlib.suppress(OSError):  # the server closes before all has come
            for at in range(0, len(begin), size):
                sock.sendall(begin[at : at + size])
                time.sleep(0.02)
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(4096):
                received += piece
    frames = []
    while received:
        length, kind = int.from_bytes(received[:3], "big"), received[3]
        frames.append((kind, received[9 : 9 + length]))
        received = received[9 + length :]
    assert [kind for kind, _ in frames] == [4, 7]
    assert frames[1][1][:8] == bytes((0, 0, 0, 0, 0, 0, 0, 0xD))
    assert b"HTTP/1.1" in frames[1][1][8:]
    assert server.client.get("/health").status_code == 200


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket"])
@pytest.mark.parametrize("chunked", [False, True])
def test_an_upgrade_offer_is_ignored(server, offer, chunked) -> None:
    """Java's client makes one with each first request. The body is the request's, wherever a packet ends, and
    the next bytes are the next request."""
    head = COMPLETIONS_HEAD + offer + (CHUNKED if chunked else LENGTH) + b"\r\n"
    body = IN_CHUNKS + b"\r\n" if chunked else BODY
    following = b"GET /livez HTTP/1.1\r\nhost: x\r\n" + offer + b"\r\nGET /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    for cut in (0, len(head), len(head) + 7):
        whole = head + body
        with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.sendall(whole[:cut])
            if cut >= len(head):
                wait_for(lambda: server.server.app.running == 1)
            sock.sendall(whole[cut:])
            answer = b""
            while b"text_completion" not in answer:
                answer += sock.recv(65536)
            assert statuses(answer) == [b"200"]
            sock.sendall(following)
            answers = b""
            while answers.count(b"alive") < 2:
                answers += sock.recv(65536)
            assert statuses(answers) == [b"200", b"200"]


@pytest.mark.parametrize("offer", OFFERS, ids=["h2c", "websocket"])
def test_a_body_behind_such_an_offer_is_no_request(server, offer) -> None:
    """A proxy that takes it for a body would let a request of a stranger through."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
        sock.sendall(COMPLETIONS_HEAD + offer + b"content-length: %d\r\n\r\n" % len(HIDDEN))
        wait_for(lambda: server.server.app.running == 1)
        sock.sendall(HIDDEN)
        answer = sock.recv(65536)
        sock.settimeout(0.3)
        with pytest.raises(TimeoutError):
            raise AssertionError(sock.recv(65536))
        assert statuses(answer) == [b"400"]
        assert b"invalid_json" in answer


def test_a_trailer_is_no_header(server) -> None:
    """It comes behind what was checked, also in one packet."""
    head = COMPLETIONS_HEAD.replace(b"content-type: application/json\r\n", b"") + CHUNKED + b"\r\n"
    assert b" 415 " in server.raw(head + IN_CHUNKS + b"content-type: application/json\r\n\r\n")
    answer = server.raw(COMPLETIONS_HEAD + CHUNKED + b"\r\n" + IN_CHUNKS + b"x-request-id: forged\r\n\r\n")
    assert statuses(answer) == [b"200"]
    assert b"forged" not in answer


ODD = (
    LENGTH + CHUNKED,
    CHUNKED + b"content-length: 4\r\n",
    b"content-length: 4\r\n" + LENGTH,
    b"content-length: +%d\r\n" % len(BODY),
    b"content-length: %d, %d\r\n" % (len(BODY), len(BODY)),
    b"content-length: -1\r\n",
    b"content-length: %d\r\n" % 2**64,
    b"transfer-encoding : chunked\r\n",
    b"transfer-encoding: xchunked\r\n",
    b"transfer-encoding: chunked, identity\r\n",
    b"transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n",
    b"transfer-encoding:\x0bchunked\r\n",
)


@pytest.mark.parametrize("offer", [b"", *OFFERS], ids=["plain", "h2c", "websocket"])
@pytest.mark.parametrize("framing", [*ODD, b"transfer-encoding: gzip\r\n"])
def test_framing_that_two_readers_may_understand_differently_is_refused(server, framing, offer, caplog) -> None:
    """And nothing that comes behind it on the connection is read."""
    for body in (BODY, IN_CHUNKS + b"\r\n"):
        assert statuses(server.raw(COMPLETIONS_HEAD + offer + framing + b"\r\n" + body + HIDDEN)) == [b"400"]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_other_transfer_codings_are_not_understood(server) -> None:
    answer = server.raw(COMPLETIONS_HEAD + b"transfer-encoding: gzip, chunked\r\n\r\n" + IN_CHUNKS + b"\r\n" + HIDDEN)
    assert statuses(answer) == [b"400"]
    assert json.loads(answer.split(b"\r\n\r\n")[1])["error"]["code"] == "unsupported_transfer_encoding"


CHUNKS = (
    b"-1\r\n",
    b"fffffffffffffffff\r\n",
    b"0x5\r\n",
    b" 5\r\n",
    b"\r\n",
    b"1e\n" + BODY + b"\n0\n\n",
    b"1e\r\n" + BODY + b"XX0\r\n\r\n",
)


@pytest.mark.parametrize("chunks", CHUNKS)
def test_odd_chunks_are_refused(server, chunks) -> None:
    assert statuses(server.raw(COMPLETIONS_HEAD + CHUNKED + b"\r\n" + chunks + HIDDEN)) == [b"400"]


@pytest.mark.parametrize("start", [b"\x16\x03\x01\x00\xa5\x01\x00\x00\xa1\x03\x03" + bytes(160), bytes(2000)])
def test_other_protocols_are_refused(server, start) -> None:
    assert statuses(server.raw(start)) == [b"400"]


def joined(parts: list[dict]) -> tuple[object, ...]:
    """The text of events, in any form."""
    choices = [choice for part in parts for choice in part["choices"]]
    tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
    return "".join(choice["text"] for choice in choices), tokens, choices[-1]["finish_reason"], parts[-1].get("usage")


class OldConnection(http.client.HTTPConnection):
    """As older releases of nginx ask what is behind them, and `curl --http1.0`."""

    _http_vsn, _http_vsn_str = 10, "HTTP/1.0"


@pytest.mark.parametrize(
    "fields", [{}, {"logprobs": 1}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}]
)
def test_streams_over_http_1_0_end_with_the_connection(server, fields) -> None:
    """Such a client knows no chunks: it gets the same events, up to the end of the connection."""
    ask = {"prompt": [70, 71], "max_tokens": 9, "temperature": 0, "stream": True, **fields}
    expected = events(server.client.post("/v1/completions", json=ask))
    client = OldConnection("127.0.0.1", server.port, timeout=BUSY_S)
    client.request("POST", "/v1/completions", json.dumps(ask), {"Content-Type": "application/json", "Connection": "keep-alive"})
    answer = client.getresponse()
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert (answer.headers["transfer-encoding"], answer.headers["content-length"]) == (None, None)
    assert answer.headers["connection"] == "close"
    found = events(httpx.Response(200, content=answer.read()))
    assert joined(found) == joined(expected)
    assert len(joined(found)[0]) >= 9


def test_an_error_in_a_stream_over_http_1_0_is_an_event(tmp_path) -> None:
    with FakeEngine() as engine, serving(engine, write_model(tmp_path)) as server:
        client = OldConnection("127.0.0.1", server.port, timeout=BUSY_S)
        engine.most_tokens, ask = 5, json.dumps({"prompt": [70], "max_tokens": 100, "stream": True})
        client.request("POST", "/v1/completions", ask, {"Content-Type": "application/json"})
        answer = client.getresponse()
        first = answer.readline()
        engine.stop()
        *_, last = (line for line in answer.read().split(b"\n") if line)
        assert first.startswith(b"data: {")
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"]
