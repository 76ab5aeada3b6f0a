"""Each budget of the HTTP server: an option, a metric, an error that names it, and service for well-behaved clients.

Claim front-ends/http: A client that exceeds a limit gets an error that names the limit, and other streams
continue. Unusual framing hides no request.
"""

import contextlib
import json
import re
import select
import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

import pytest
from support.front_end.http_server import COMPLETIONS_HEAD, RunningServer, completion_bytes
from support.front_end.victim import attacked
from support.waiting import BUSY_S, wait_for

from blinkpy.config import Config, options
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.wire.byte_budget import ByteBudget
from blinkpy.dpu.http.wire.connection import Connection
from blinkpy.dpu.http.wire.request_reader import CHUNK_BYTES
from blinkpy.dpu.metrics import COUNTERS, LIMITS
from blinkpy.dpu.worker import worker_memory_bytes

GET = b"GET /livez HTTP/1.1\r\nhost: x\r\n"
CHUNKED = COMPLETIONS_HEAD + b"transfer-encoding: chunked\r\n\r\n"
EVENTS = 20  # that the victim gets next to each attack, at least
SLOW_REGEX = "(?:a?){4000}a{4000}"


def connected(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S)


def count_of(server: RunningServer, name: str) -> float:
    found = re.search(rf'^blinkpy_{name}(?:_total)?{{worker="0"}} ([\d.]+)$', server.client.get("/metrics").text, re.MULTILINE)
    assert found, name
    return float(found[1])


class Case(NamedTuple):
    """limit: the option, with its value here. attack: bytes of a connection that exceed it; more: bytes sent
    repeatedly after them, until there is an answer."""

    limit: str
    value: float
    attack: bytes | Callable[[], bytes]
    status: int
    code: str
    more: bytes = b""


def nested(depth: int) -> bytes:
    return completion_bytes(prompt=[7], metadata=json.loads("[" * depth + "]" * depth))


CASES = (
    Case("max_header_bytes", 2048, GET + b"x: " + b"y" * 5000, 431, "headers_too_large"),
    Case("max_header_bytes", 2048, CHUNKED + b"2\r\n[]\r\n0\r\nx: ", 431, "headers_too_large", b"y" * 1000),
    Case("max_header_bytes", 2048, CHUNKED + b"2;", 431, "headers_too_large", b"y" * 1000),
    Case("max_header_count", 20, GET + b"h: x\r\n" * 30 + b"\r\n", 431, "too_many_headers"),
    Case("max_pipelined", 1, (GET + b"\r\n") * 3, 400, "too_many_pipelined"),
    Case("max_pipelined", 0, (GET + b"\r\n") * 2, 400, "too_many_pipelined"),
    Case("header_timeout_s", 0.2, GET, 408, "timeout"),
    Case("max_body_bytes", 2000, COMPLETIONS_HEAD + b"content-length: 5000\r\n\r\n", 413, "body_too_large"),
    Case("max_body_bytes", 2000, CHUNKED + b"1388\r\n" + b" " * 5000 + b"\r\n", 413, "body_too_large"),
    Case("max_body_chunks", 50, CHUNKED + b"1\r\n[\r\n" * 200, 400, "too_many_chunks"),
    Case("body_timeout_s", 0.2, COMPLETIONS_HEAD + b"content-length: 50\r\n\r\n{", 408, "timeout"),
    Case("body_timeout_s", 0.2, COMPLETIONS_HEAD + b"expect: 100-continue\r\ncontent-length: 50\r\n\r\n", 408, "timeout"),
    Case("max_body_values", 64, completion_bytes(prompt=[7] * 100), 413, "too_many_values"),
    Case("max_body_depth", 8, nested(20), 400, "too_deep"),
    Case("prepare_ms", 10, lambda: completion_bytes(prompt="the king and the sea " * 50_000), 413, "too_costly"),
    Case("grammar_compile_ms", 10, completion_bytes(prompt=[7], guided_regex=SLOW_REGEX), 400, "invalid_grammar"),
    Case("grammar_compile_mib", 16, completion_bytes(prompt=[7], guided_regex=SLOW_REGEX), 400, "invalid_grammar"),
)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.limit} {i}" for i, case in enumerate(CASES)])
def test_a_refusal_names_its_limit_and_others_are_served(folder, case) -> None:
    with attacked(folder, **{case.limit: case.value}) as (server, victim):
        begin, tries = victim.events, 0
        attack = case.attack() if callable(case.attack) else case.attack

        def answered() -> bool:
            with connected(server) as sock:
                sock.sendall(attack)
                while case.more and not select.select([sock], [], [], 0.01)[0]:
                    sock.sendall(case.more)
                answer = b""
                while b'"code":"' not in answer and (piece := sock.recv(65536)):
                    answer += piece
            assert re.search(rb"HTTP/1\.1 %d " % case.status, answer), answer
            assert f'"code":"{case.code}"'.encode() in answer
            return victim.events >= begin + EVENTS

        while not answered():
            tries += 1
        assert count_of(server, f"refused_{case.limit}") >= tries + 1


def test_limits_are_options_and_have_metrics() -> None:
    known = {item.name for _, item in options("frontend")}
    assert set(LIMITS) <= known
    elsewhere = {"close_timeout_s", "send_timeout_s", "max_connections", "max_lag_ms"}
    assert {case.limit for case in CASES} | elsewhere == set(LIMITS)
    assert {f"refused_{name}" for name in LIMITS} <= COUNTERS.keys()


def test_excess_connections_are_refused_and_counted(folder) -> None:
    with attacked(folder, max_connections=2) as (server, victim):
        with connected(server) as other:
            other.sendall(completion_bytes(prompt=[7], max_tokens=60_000, stream=True))
            assert other.recv(100)
            begin = victim.events
            wait_for(lambda: server.complete([7]).json()["error"]["code"] == "too_many_connections" and victim.events > begin)
        server.client.close()
        wait_for(lambda: len(server.server.connections.open) == 1)
        server.client = type(server.client)(base_url=server.url, timeout=BUSY_S)
        assert count_of(server, "refused_max_connections") >= 1


def test_whole_answers_share_a_budget_and_the_largest_is_evicted(folder) -> None:
    """A request for many log probabilities ends with an error; another whole answer is complete."""
    asked = {"max_tokens": 4000, "logprobs": 20}
    with attacked(folder, answer_budget_mib=2) as (server, victim):
        begin = victim.events
        answer = server.complete([7], n=4, **asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_answers")
        assert victim.events >= begin + EVENTS
        wait_for(lambda: count_of(server, "answers_given_up") == 1)
        small = server.complete([7, 8], max_tokens=200, logprobs=20)
        assert len(small.json()["choices"][0]["logprobs"]["tokens"]) == 200
        wait_for(lambda: server.server.connections.answers.used == 0)
        wait_for(lambda: server.engine_client.pair.in_flight == 1)  # the victim's
        wait_for(lambda: count_of(server, "answer_bytes") == 0)


def test_bodies_without_an_end_hold_up_neither_small_requests_nor_streams(folder) -> None:
    piece = b"%x\r\n%b\r\n" % (1 << 16, b" " * (1 << 16))
    stop = threading.Event()

    with attacked(folder, body_budget_mib=16) as (server, victim):

        def pour() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError), connected(server) as sock:
                    sock.sendall(CHUNKED)
                    while not stop.is_set():
                        sock.sendall(piece)

        budget = server.server.connections.bodies
        threads = [threading.Thread(target=pour, daemon=True) for _ in range(4)]
        try:
            for thread in threads:
                thread.start()
            begin = victim.events
            wait_for(lambda: budget.used > 0)
            for _ in range(3):
                with connected(server) as small:
                    small.sendall(completion_bytes(prompt=[7], max_tokens=1))
                    assert small.recv(65536).startswith(b"HTTP/1.1 200")
            wait_for(lambda: victim.events >= begin + EVENTS)
            assert budget.used <= budget.limit
        finally:
            stop.set()
            for thread in threads:
                thread.join(30)
        wait_for(lambda: budget.used == 0)


def test_small_chunks_that_come_one_by_one_are_fine(folder, monkeypatch) -> None:
    """A client that writes JSON incrementally sends such chunks; their number counts only if they arrive in heaps."""
    most, came, on_body = 20, list[bytes](), Connection.on_body

    def counted(connection: Connection, body: bytes) -> None:
        came.append(body)
        on_body(connection, body)

    monkeypatch.setattr(Connection, "on_body", counted)
    with attacked(folder, max_body_chunks=most) as (server, _), connected(server) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(CHUNKED)
        body = json.dumps({"prompt": [70] * 30, "max_tokens": 1}).encode()
        came.clear()
        for place in range(0, len(body), 4):
            piece = body[place : place + 4]
            sock.sendall(b"%x\r\n%b\r\n" % (len(piece), piece))
            wait_for(lambda sent=body[: place + 4]: b"".join(came) == sent)
        assert len(body) // 4 > most
        sock.sendall(b"0\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("small", [False, True])
def test_the_number_of_chunks_counts_beyond_what_they_bring(small: bool, folder) -> None:
    """A long body has many, however it is sent; chunks with a byte less than they may have are too many."""
    size, most = CHUNK_BYTES - small, 20
    body = json.dumps({"prompt": [70] * 3, "max_tokens": 1}).encode().ljust(10 * most * size)
    chunks = [body[place : place + size] for place in range(0, len(body), size)]
    with attacked(folder, max_body_chunks=most) as (server, _), connected(server) as sock:
        sock.sendall(CHUNKED + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n")
        assert sock.recv(65536).split()[1] == (b"400" if small else b"200")


def test_evicting_the_largest_holder_spares_small_ones() -> None:
    gone: list[str] = []
    budget = ByteBudget(100, lambda: ApiError(503, "full"), largest=True)
    for holder, size in (("old", 10), ("large", 60), ("new", 20), ("new", 35)):
        budget.hold(holder, size, lambda error, holder=holder: gone.append(holder))
    assert (gone, budget.used, budget.given_up) == (["large"], 45, 1)
    budget.hold("old", 99, lambda error: gone.append("old"))
    assert (gone, budget.used) == (["large", "old"], 35)


def test_the_owner_with_the_most_bytes_is_evicted_first(rng) -> None:
    """Against lists: the owner with the most bytes, and of its holders the oldest, or the largest."""
    for largest in (False, True):
        gone, held = list[int](), dict[int, tuple[int, str]]()
        budget = ByteBudget(1000, lambda: ApiError(503, "full"), largest=largest)
        for number in range(500):
            owner, size = "abc"[int(rng.integers(3))], int(rng.integers(1, 300))
            if rng.random() < 0.3 and held:
                name = next(iter(held))
                budget.release(name)
                del held[name]
            held[number] = size, owner
            budget.hold(number, size, lambda error, number=number, gone=gone: gone.append(number), owner)
            expected = list[int]()
            while sum(size for size, _ in held.values()) > 1000:
                totals = {one: sum(size for size, its in held.values() if its == one) for one in "abc"}
                most = max(totals.values())
                own = [name for name, (_, its) in held.items() if totals[its] == most]
                victim = max(own, key=lambda name: held[name][0]) if largest else own[0]
                if gone and gone[len(expected)] != victim:  # owners that hold the same: either may give way
                    victim = gone[len(expected)]
                    assert totals[held[victim][1]] == most
                expected.append(victim)
                del held[victim]
            assert gone == expected
            assert budget.used == sum(size for size, _ in held.values())
            gone.clear()


def test_scores_of_prompts_are_counted_before_the_engine_makes_them(folder) -> None:
    """Many prompts with many log probabilities each would fill the memory while they come."""
    with attacked(folder, answer_budget_mib=1) as (server, victim):
        begin = victim.events
        asked = {"max_tokens": 1, "prompt_logprobs": 20}
        answer = server.complete([[7] * 100 for _ in range(4)], **asked)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "too_many_answers")
        assert server.engine_client.pair.in_flight == 1, "the victim's alone"
        assert server.complete([[7] * 100], **asked).status_code == 200
        wait_for(lambda: server.server.connections.answers.used == 0)
        wait_for(lambda: victim.events >= begin + EVENTS)


def test_unread_streams_share_a_budget(folder) -> None:
    """Each is within its own bound: beyond that of all the oldest of the client with the most are closed."""
    with attacked(folder, unread_budget_mib=1, max_output_backlog=1 << 20) as (server, victim), contextlib.ExitStack() as stack:
        budget = server.server.connections.unread
        for _ in range(6):
            sock = stack.enter_context(connected(server))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(completion_bytes(prompt=[7], max_tokens=60_000, stream=True, logprobs=20))
        wait_for(lambda: budget.given_up + count_of(server, "unread_given_up") >= 1, 120)
        begin = victim.events
        wait_for(lambda: victim.events >= begin + EVENTS)
        assert budget.used <= budget.limit


@pytest.mark.parametrize(
    "changed",
    [
        {"max_connections": 8192}, {"max_header_bytes": 1 << 17}, {"body_budget_mib": 1024}, {"unread_budget_mib": 512},
        {"answer_budget_mib": 512}, {"grammar_cache_mib": 512}, {"slots": 4096}, {"max_waiting_tokens": 1 << 30},
    ],
)  # fmt: skip
def test_the_bound_of_a_worker_s_memory_follows_its_options(changed: dict[str, int]) -> None:
    ((name, value),) = changed.items()
    before, after = (worker_memory_bytes(Config().with_options(one)) for one in ({}, changed))
    grows = (value << 20 if name.endswith("_mib") else value) / 8
    assert after - before > grows
    assert before < 3 << 30
