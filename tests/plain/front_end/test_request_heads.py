"""Heads and framing of requests according to RFC 9112: answers, and whether the connection stays open. A neighbour's
stream always does."""

import itertools
import json
import re
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.front_end.http_server import RunningServer
from support.front_end.tiny_tokenizer import write_model
from support.front_end.victim import Victim, attacked
from support.waiting import BUSY_S, wait_for

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.fields.request_head import check_head, others_within

EVENTS = 3  # that the neighbour gets next to each case, at least
LARGEST = 50_000  # bytes of a body
BODY = b'{"prompt":[70],"max_tokens":2}'
LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
OFFER = b"connection: upgrade\r\nupgrade: websocket\r\n"
LAST = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n"


def get(
    target: bytes = b"/livez", headers: bytes = b"host: x\r\n", method: bytes = b"GET", version: bytes = b"HTTP/1.1"
) -> bytes:
    return b"%b %b %b\r\n%b\r\n" % (method, target, version, headers)


def post(headers: bytes, body: bytes = b"", version: bytes = b"HTTP/1.1", target: bytes = b"/v1/completions") -> bytes:
    return get(target, b"host: x\r\ncontent-type: application/json\r\n" + headers, b"POST", version) + body


def chunk(size: bytes, body: bytes = BODY) -> bytes:
    return post(CHUNKED, size + body + b"\r\n0\r\n\r\n")


OPEN, CLOSED = True, False
REFUSED = ([400], CLOSED)
SERVED = ([200], OPEN)
# By subject: bytes, statuses, whether the connection continues.
CASES: dict[str, tuple[bytes, list[int], bool]] = {
    "no Host": (get(headers=b""), *REFUSED),
    "two Hosts": (get(headers=b"host: x\r\nHost: x\r\n"), *REFUSED),
    "two Authorizations": (get(headers=b"host: x\r\nauthorization: Bearer a\r\nAuthorization: Bearer b\r\n"), *REFUSED),
    "two codings": (post(CHUNKED * 2, b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"), *REFUSED),
    "two Origins": (get(headers=b"host: x\r\norigin: http://a\r\norigin: http://b\r\n"), *REFUSED),
    "two types": (post(LENGTH + b"Content-Type: application/json\r\n", BODY), *REFUSED),
    "an empty Host": (get(headers=b"host:\r\n"), *SERVED),
    "a Host and white space": (get(headers=b"host: \tx:80 \t\r\n"), *SERVED),
    "an address as Host": (get(headers=b"host: [::1]:80\r\n"), *SERVED),
    **{
        f"Host {bad!r}": (get(headers=b"host: %b\r\n" % bad), *REFUSED)
        for bad in (b"a b", b"a\tb", b"a\x01", b"a\0", b"a/b", b"a@b")
    },
    **{
        f"Host {bad!r}": (get(headers=b"host: %b\r\n" % bad), *REFUSED)
        for bad in (b"a,b", b"a:b", b"[::1", b"a%2", b"\xe9", b"a?b")
    },
    "no Host behind a good request": (get() + get(headers=b""), *REFUSED),
    "no Host, and an offer": (get(headers=OFFER), *REFUSED),
    "no Host behind an offer": (get(headers=b"host: x\r\n" + OFFER) + get(headers=OFFER), *REFUSED),
    "two offers": (get(headers=b"host: x\r\n" + OFFER) * 2, [200, 200], OPEN),
    "1.0 without Host": (get(headers=b"", version=b"HTTP/1.0"), [200], CLOSED),
    "1.0 with two Hosts": (get(headers=b"host: x\r\nhost: y\r\n", version=b"HTTP/1.0"), *REFUSED),
    "1.0 keep-alive": (get(headers=b"connection: keep-alive\r\n", version=b"HTTP/1.0"), [200], CLOSED),
    "1.0 in chunks": (post(CHUNKED, b"1e\r\n" + BODY + b"\r\n0\r\n\r\n", b"HTTP/1.0"), *REFUSED),
    "1.0 expects": (post(LENGTH + b"expect: 100-continue\r\n", BODY, b"HTTP/1.0"), [200], CLOSED),
    "0.9": (b"GET /livez\r\n\r\n", *REFUSED),
    **{
        f"version {bad!r}": (get(version=bad), *REFUSED)
        for bad in (b"HTTP/2.0", b"HTTP/1.2", b"HTTP/3.1", b"http/1.1", b"HTTP/1.10")
    },
    **{
        f"protocol {bad!r}": (get(version=bad, method=method), *REFUSED)
        for method, bad in ((b"GET", b"RTSP/1.0"), (b"GET", b"RTSP/1.1"), (b"OPTIONS", b"RTSP/1.0"), (b"SOURCE", b"ICE/1.0"))
    },
    **{
        f"another protocol behind a good request: {name}": (before + get(version=version, method=method) + after, *REFUSED)
        for name, before, method, version, after in (
            ("RTSP", get(), b"GET", b"RTSP/1.0", b""),
            ("ICE", get(), b"SOURCE", b"ICE/1.0", b""),
            ("a method of RTSP", get(), b"DESCRIBE", b"RTSP/1.0", b""),
            ("spaces", get(), b"GET  ", b" RTSP/1.1", b""),
            ("a body", post(LENGTH, BODY), b"OPTIONS", b"RTSP/1.0", b""),
            ("chunks", chunk(b"1e\r\n"), b"POST", b"RTSP/1.1", b""),
            ("an offer", get(headers=b"host: x\r\n" + OFFER), b"GET", b"RTSP/1.1", b""),
            ("and before one", get(), b"GET", b"RTSP/1.1", get()),
            ("among many", get() + b"\r\n", b"GET", b"RTSP/1.1", get() + b"GET / RTSP/1.1\r\n" * 100),
        )
    },
    "the name of another protocol behind a good request": (
        get() + get(b"/livez?a=GET", b"host: x\r\nx: GET /livez RTSP/1.1\r\ny: POST /livez?a=GET RTSP/1.1\r\n"),
        [200, 200],
        OPEN,
    ),
    "another protocol behind empty lines": (b"\r\n\r\n" + get(version=b"RTSP/1.1"), *REFUSED),
    "the name of another protocol": (get(b"/livez?a=GET", b"host: x\r\nx: GET /livez?a=GET RTSP/1.1\r\n"), *SERVED),
    "close, and more": (get(headers=b"host: x\r\nconnection: close\r\n") + get(), [200], CLOSED),
    "a URL": (get(b"http://y:80/livez?a=b"), *SERVED),
    "a URL without Host": (get(b"http://x/livez", b""), *REFUSED),
    **{
        f"target {bad!r}": (get(bad), *REFUSED)
        for bad in (b"ftp://x/livez", b"http://a:b@x/livez", b"livez", b"*", b"/livez#a", b"?")
    },
    **{f"target {bad!r}": (get(bad), *REFUSED) for bad in (b"/a b", b"/livez\t", b"/\x01", b"/\xe9", b"http://x:999999/livez")},
    **{f"path {path!r}": (get(path), [404], OPEN) for path in (b"/v1%2fmodels", b"/v1%2Fmodels/tiny", b"/livez/", b"/LIVEZ")},
    **{f"path {path!r}": (get(path), *REFUSED) for path in (b"//v1/models", b"/../livez", b"/v1/%2e%2e/livez", b"/livez/.")},
    **{f"path {path!r}": (get(path), *REFUSED) for path in (b"/livez%00", b"/%zz", b"/%ff", b"/%6civez", b"/v1\\models")},
    **{f"{method!r}": (get(method=method), [405], OPEN) for method in (b"TRACE", b"PUT", b"DELETE", b"OPTIONS")},
    **{f"{method!r}": (get(method=method), *REFUSED) for method in (b"CONNECT", b"BREW", b"get", b"PRI", b"G\0T")},
    "CONNECT to another": (get(b"y:80", method=b"CONNECT") + get(), *REFUSED),
    "OPTIONS *": (get(b"*", method=b"OPTIONS"), [404], OPEN),
    **{
        f"header line {bad!r}": (get(headers=b"host: x\r\n" + bad), *REFUSED)
        for bad in (
            b"x: a\r\n b\r\n",
            b"x: a\rb\r\n",
            b"x: a\nb: c\r\n",
            b"x: a\0b\r\n",
            b"x: a\x7f\r\n",
            b"x : a\r\n",
            b"x\t: a\r\n",
        )
    },
    **{
        f"header line {bad!r}": (get(headers=b"host: x\r\n" + bad), *REFUSED)
        for bad in (b": a\r\n", b"a\r\n", b"a(b): c\r\n", b"\n")
    },
    "folded before the first": (get(headers=b" x: a\r\nhost: x\r\n"), *REFUSED),
    "a folded Host": (get(headers=b"host:\r\n x\r\n"), *REFUSED),
    "bare LFs": (b"GET /livez HTTP/1.1\nhost: x\n\n", *REFUSED),
    "empty lines before": (b"\r\n\r\n" + get(), *SERVED),
    "length and chunks": (post(LENGTH + CHUNKED, b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"), *REFUSED),
    "chunks and length": (post(CHUNKED + LENGTH, b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"), *REFUSED),
    **{
        f"coding {bad!r}": (post(b"transfer-encoding: %b\r\n" % bad, b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"), *REFUSED)
        for bad in (
            b"chunked, chunked",
            b"identity",
            b"gzip, chunked",
            b"",
            b"chunked;q=1",
            b", chunked",
            b"\r\n chunked",
            b"chunkedx",
        )
    },
    "a coding in capitals": (post(b"Transfer-Encoding: Chunked \r\n", b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"), *SERVED),
    "a coding of a GET": (get(headers=b"host: x\r\ntransfer-encoding: gzip, chunked\r\n") + b"0\r\n\r\n", *REFUSED),
    **{
        f"length {bad!r}": (post(b"content-length: %b\r\n" % bad, BODY), *REFUSED)
        for bad in (
            b"-1",
            b"+30",
            b"30, 30",
            b"",
            b"0x1e",
            b"3_0",
            b"30.0",
            b"%d" % 2**64,
            b"%d" % (2**64 + 30),
            b"\xb23",
            b"3 0",
        )
    },
    "a length and white space": (post(b"content-length: 30 \t\r\n", BODY), *SERVED),
    "a length twice": (post(LENGTH * 2, BODY), *REFUSED),
    "two lengths": (post(LENGTH + b"content-length: 3\r\n", BODY), *REFUSED),
    "no length": (post(b""), [400], OPEN),
    "a GET with a body": (get(headers=b"host: x\r\ncontent-length: 5\r\n") + b"hello", *SERVED),
    **{
        f"chunk size {bad!r}": (chunk(bad), *REFUSED)
        for bad in (
            b"+1e\r\n",
            b"-1\r\n",
            b"1_e\r\n",
            b"0x1e\r\n",
            b"1e \r\n",
            b" 1e\r\n",
            b"1e\n",
            b"1e\r",
            b"1" + b"0" * 16 + b"\r\n",
        )
    },
    **{f"chunk size {good!r}": (chunk(good), *SERVED) for good in (b"1E\r\n", b"0" * 24 + b"1e\r\n", b"1e;a=b\r\n")},
    **{
        f"chunk size {big!r}": (chunk(big, b" " * 60_000), [413], CLOSED)
        for big in (b"f" * 16 + b"\r\n", b"8" + b"0" * 15 + b"\r\n")
    },
    "a chunk without its end": (post(CHUNKED, b"1e\r\n" + BODY + b"0\r\n\r\n"), *REFUSED),
    "a Host as trailer": (post(CHUNKED, b"1e\r\n" + BODY + b"\r\n0\r\nhost: y\r\n\r\n"), *SERVED),
    "another expectation": (post(LENGTH + b"expect: 200-ok\r\n", BODY), *SERVED),
    "too large to go on": (post(b"content-length: 99999999\r\nexpect: 100-continue\r\n"), [413], CLOSED),
}


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[tuple[RunningServer, Victim]]:
    with attacked(write_model(tmp_path_factory.mktemp("model")), max_body_bytes=LARGEST) as both:
        yield both


@pytest.mark.parametrize("case", CASES)
def test_a_request_is_answered_and_its_connection_stays_or_closes(served, case) -> None:
    """It stays open if the next request is answered."""
    (server, victim), (sent, statuses, continues) = served, CASES[case]
    begin, answers = victim.events, b""
    with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
        sock.sendall(sent)
        while len(re.findall(rb"HTTP/1\.1 \d+ .*?\r\n\r\n.", answers, re.DOTALL)) < len(statuses):
            piece = sock.recv(65536)
            assert piece, answers
            answers += piece
        try:
            sock.sendall(LAST)
            while b'"version"' not in answers and (piece := sock.recv(65536)):
                answers += piece
        except (ConnectionResetError, BrokenPipeError):
            pass  # it had closed before
    found = [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", answers)]
    assert found == statuses + [200] * continues, answers
    for head in re.findall(rb"HTTP/1\.1 (?!100)\d+ .*?\r\n\r\n", answers, re.DOTALL):
        assert [head.count(b"\r\n%b: " % name) for name in (b"date", b"content-type", b"x-request-id")] == [1, 1, 1], head
    assert (b'"version"' in answers) == continues
    wait_for(lambda: victim.events >= begin + EVENTS)


def test_a_body_may_wait_until_it_is_expected(served) -> None:
    server, victim = served
    with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
        sock.sendall(post(LENGTH + b"expect: 100-continue\r\n"))
        assert sock.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        begin = victim.events
        wait_for(lambda: victim.events >= begin + EVENTS)
        sock.sendall(BODY)
        assert sock.recv(1000).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("served_before", [get(), post(LENGTH, BODY), chunk(b"1e\r\n")])
def test_another_protocol_in_pieces_behind_a_good_request(served, rng: np.random.Generator, served_before: bytes) -> None:
    """The first cut is within it, so the piece has the bytes before, but not its start."""
    server, _ = served
    for version, status in ((b"RTSP/1.1", 400), (b"HTTP/1.1", 200)):
        whole = served_before + get(b"/version?a", b"host: x\r\nx: RTSP/1.1\r\n", version=version)
        first = int(rng.integers(len(served_before) + 1, len(whole)))
        cuts = sorted({0, first, *rng.integers(first, len(whole), int(rng.integers(0, 8))).tolist(), len(whole)})
        answers = b""
        with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for start, end in itertools.pairwise(cuts):
                sock.sendall(whole[start:end])
                time.sleep(0.005)
            while not re.search(rb"HTTP/1\.1 400|HTTP/1\.1 200.*HTTP/1\.1 200.*version", answers, re.DOTALL):
                piece = sock.recv(65536)
                assert piece, (cuts, answers)
                answers += piece
        assert [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+) ", answers)][-1] == status, cuts


@pytest.mark.parametrize(
    ("sent", "known"),
    [
        (get(headers=b"host: x\r\nx-request-id: a-1\r\nhost: y\r\n"), True),
        (get(headers=b"x-request-id: a-1\r\nhost: x\r\n" + b"a: b\r\n" * 200), True),
        (get(headers=b"x-request-id: a-1\r\nhost: x\r\n") + b"\0", False),  # the bytes after it are not a request
        (b"\0", False),
    ],
)
def test_invalid_http_gets_a_complete_error_response(served, sent: bytes, known: bool) -> None:
    """With a date and a request id, the client's if it sent one."""
    server, _ = served
    answer = server.raw(sent)
    head = answer[answer.rindex(b"HTTP/1.1 ") :].partition(b"\r\n\r\n")[0].lower()
    assert re.match(rb"http/1\.1 4\d\d ", head) and b"\r\ndate: " in head and b"\r\nconnection: close" in head
    (request_id,) = re.findall(rb"\r\nx-request-id: (\S+)", head)
    assert (request_id == b"a-1") == known


def test_where_other_protocols_may_be() -> None:
    """Found in any bytes, as fast as they are read: otherwise this would take minutes."""
    for unit in (b" ", b"RTSP/1.0 ", b"GET / RTSP/1.0", b"GET a", b"RTSP/1.0\r\r\n"):
        assert len(others_within(b"GET " + unit * ((1 << 22) // len(unit)) + b" RTSP/1.0\n")) <= 1
    for unit in (b"RTSP/1.0\n", b"GET / RTSP/1.0\n", b" ICE/1.0\r\n"):
        assert len(others_within(b"GET " + unit * 64)) <= 2
        with pytest.raises(ApiError, match="must be HTTP"):
            others_within(b"GET " + unit * 65)
    assert others_within(b"xGET /a RTSP/1.0\r\nPOST  /b   ICE/2.0\nGET /c RTSP/1.0 \r\n") == {(b"GET", b"/a"), (b"POST", b"/b")}


def test_another_protocol_in_pieces(served, rng: np.random.Generator) -> None:
    """And HTTP with its name in a body."""
    server, _ = served
    named = b'{"prompt":"POST /v1/completions RTSP/1.1",\r\n"max_tokens":2}'
    fine = post(b"content-length: %d\r\n" % len(named), named)
    for sent, status in ((get(version=b"RTSP/1.1"), 400), (get(version=b"HTTP/1.1"), 200), (fine, 200)):
        for before, lines in ((b"", b""), (b"", b"\r\n"), (fine, b""), (fine, b"\r\n")):
            whole, answers = lines + sent, b""
            cuts = sorted({0, *rng.integers(1, len(whole), int(rng.integers(1, 12))).tolist(), len(whole)})
            with socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) as sock:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(before)
                while before and b'"usage"' not in answers:
                    answers += sock.recv(65536)
                for start, end in itertools.pairwise(cuts):
                    sock.sendall(whole[start:end])
                    time.sleep(0.005)
                while len(re.findall(rb"HTTP/1\.1 \d+ .*?\r\n\r\n.", answers, re.DOTALL)) < 1 + bool(before):
                    piece = sock.recv(65536)
                    assert piece, (cuts, answers)
                    answers += piece
            assert [int(code) for code in re.findall(rb"HTTP/1\.1 (\d+) ", answers)] == [200] * bool(before) + [status], cuts
            assert (b"The protocol must be HTTP." in answers) == (status == 400), (cuts, answers)


def test_methods_that_a_path_has_are_named(served) -> None:
    server, _ = served
    assert server.client.get("/v1/completions").headers["allow"] == "POST"
    assert server.client.delete("/v1/models").headers["allow"] == "GET, HEAD"


def test_refusals_of_a_head_state_the_reason(served) -> None:
    server, _ = served
    for case, word in (("no Host", "Host"), ("0.9", "version"), ("a coding of a GET", "coding"), ("CONNECT to another", "proxy")):
        answer = server.raw(CASES[case][0])
        assert word in json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["message"]


def test_an_escaped_slash_is_of_a_name(served) -> None:
    server, _ = served
    assert server.client.get("/v1/models/tiny").status_code == 200
    answer = server.client.get("/v1/models/some%2Fone%2fother")
    expected = "The model 'some/one/other' does not exist: /v1/models lists the names."
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, expected)


def test_hosts_of_any_bytes(rng: np.random.Generator) -> None:
    """Against the grammar of RFC 3986, read letter by letter."""
    letters = b"ab09.-_~!$&'()*+;=%:[],/@ ?#\\\"<>^`{|}\xe9\x01"
    plain = frozenset(b"ab09.-_~!$&'()*+;=")

    def valid(host: bytes) -> bool:
        name, _, port = host.rpartition(b":") if not host.endswith(b"]") and b":" in host else (host, b"", b"")
        if name.startswith(b"["):
            return (
                name.endswith(b"]") and len(name) > 2 and set(name[1:-1]) <= frozenset(b"ab09:.-_~") and port.strip(b"09") == b""
            )
        while name:
            escaped = name[:1] == b"%" and len(name) > 2 and set(name[1:3]) <= frozenset(b"ab09")
            if not escaped and name[0] not in plain:
                return False
            name = name[3:] if escaped else name[1:]
        return port.strip(b"09") == b""

    seen = set()
    for _ in range(20_000):
        size = int(rng.integers(0, 7))
        host = bytes(rng.choice(np.frombuffer(letters if rng.random() < 0.5 else b"ab09.%:[]", np.uint8), size))
        try:
            check_head("1.1", b"GET", b"/", [(b"host", host)])
            found = True
        except ApiError:
            found = False
        assert found == valid(host), host
        seen.add((found, size))
    assert len(seen) == 13, "all sizes, valid and not, but for the empty one"
