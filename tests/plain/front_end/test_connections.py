"""Attacks on connections: each has a bound, and well-behaved clients are served meanwhile."""

import contextlib
import itertools
import logging
import os
import random
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import httpx
import pytest
from support.commands import Command
from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.http_server import RunningServer, completion_bytes, serving
from support.waiting import wait_for, wait_until_served

from benchmarks.serving.systems import free_port
from blinkpy.config import ConfigError, FrontendOptions
from blinkpy.dpu import descriptors
from blinkpy.dpu.admission.gate import KNOWN, STRANGERS, Asker
from blinkpy.dpu.http.wire import connection, connections
from blinkpy.dpu.http.wire.listener import AT_ONCE
from blinkpy.dpu.metrics import Metrics

GET = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
CHUNKED = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"


def connect(server: RunningServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=10)


def rest(sock: socket.socket) -> bytes:
    """The bytes received until the other side closes."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(65536):
            received += piece
    return received


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def test_a_client_that_reads_no_answer_is_disconnected(engine, folder) -> None:
    """While an answer waits for an unread one, within its own time limit, which is far below the limit for
    unread data."""
    with serving(engine, folder, send_timeout_s=0.3) as server, connect(server) as sock:
        state = server.server.connections
        wait_for(lambda: state.open)
        (served,) = state.open
        for count in range(1, 1000):  # until the kernel's buffers are full
            with contextlib.suppress(ConnectionError):  # on a busy machine it may be over by then
                sock.sendall(GET.replace(b"/health", b"/openapi.json"))
            wait_for(lambda count=count: state.answered == count or served.write_paused or served not in state.open)
            if state.answered < count:
                break
        wait_for(lambda: served not in state.open)
        assert server.complete([7], max_tokens=1).status_code == 200


def test_idle_connections_are_evicted_oldest_first(engine, folder) -> None:
    with serving(engine, folder, max_connections=4) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server)) for _ in range(4)]
        for sock in idle[2:]:
            sock.sendall(GET)
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        for one in list(server.server.connections.open):
            one.since -= connections.GRACE_S
        for _ in range(2):
            assert server.complete([7], max_tokens=1).status_code == 200
        assert rest(idle[0]) == b"", "it had waited longest"
        idle[3].sendall(GET)
        assert idle[3].recv(65536).startswith(b"HTTP/1.1 200"), "the newest is still there"


def test_a_turn_of_the_event_loop_accepts_several_connections(engine, folder) -> None:
    """With long turns, new clients would wait behind each other."""
    count = 4 * AT_ONCE
    with serving(engine, folder) as server, contextlib.ExitStack() as stack:
        loop, there = server.server._loop, server.server.connections.open
        assert loop is not None
        stopped, all_wait, turns = threading.Event(), threading.Event(), list[int]()

        def stop() -> None:
            stopped.set()
            assert all_wait.wait(60)
            look()

        def look() -> None:
            turns.append(len(there))
            if len(there) < count and len(turns) < 2 * count:
                loop.call_soon(look)

        loop.call_soon_threadsafe(stop)
        assert stopped.wait(60)
        for _ in range(count):
            stack.enter_context(connect(server))
        all_wait.set()
        wait_for(lambda: len(there) == count)
        assert len(turns) <= 4 + 2, turns


def test_connections_with_requests_are_not_closed(engine, folder) -> None:
    engine.step_s = 0.05
    with serving(engine, folder, max_connections=2) as server, contextlib.ExitStack() as stack:
        streams = [stack.enter_context(connect(server)) for _ in range(2)]
        for sock in streams:
            sock.sendall(completion_bytes(prompt=[7, 8], max_tokens=100, stream=True))
            assert sock.recv(1).startswith(b"H")
            engine.hold = sock is streams[-1]  # as long as this takes
        assert code(server.complete([7], max_tokens=1)) == (503, "too_many_connections")
        assert server.client.get("/health").status_code == 200
        many = [stack.enter_context(connect(server)) for _ in range(descriptors.SPARE_CONNECTIONS + 10)]
        for sock in many:
            with contextlib.suppress(OSError):
                sock.sendall(GET[:-2])
        wait_for(lambda: len(server.server.connections.open) <= 2 + descriptors.SPARE_CONNECTIONS)
        engine.hold, engine.step_s = False, 0.005
        for sock in streams:
            assert rest_of_stream(sock).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")


def test_unfinished_requests_leave_spare_connections_to_newcomers(engine, folder, monkeypatch, seed: int) -> None:
    """Many more connections with half of a request than allowed, which come back when they are refused: no more than allowed
    have a request at any time. A new connection does not wait for them, and is never closed because of them."""
    most, draw = 40, random.Random(seed)
    monkeypatch.setattr(connections, "GRACE_S", 60.0)  # as long as a busy machine takes until a newcomer's first bytes
    begun = CHUNKED + b"5\r\n{"
    with serving(engine, folder, max_connections=most, body_timeout_s=60) as server, contextlib.ExitStack() as stack:
        state, counts = server.server.connections, list[int]()
        sockets = [
            stack.enter_context(connect(server)) for _ in range(most + descriptors.SPARE_CONNECTIONS + draw.randrange(1, 60))
        ]
        for sock in sockets:
            sock.sendall(begun)
        for _ in range(20):
            for _ in range(draw.randrange(1, 10)):
                with contextlib.suppress(OSError):
                    again = stack.enter_context(connect(server))
                    again.sendall(begun)
            asked = time.monotonic()
            with connect(server) as fresh:
                time.sleep(draw.choice([0, 0, 0.05]))
                fresh.sendall(GET)
                assert fresh.recv(1000).startswith(b"HTTP/1.1 200")
            assert time.monotonic() - asked < 20, "far below the minute that the others have"
            counts.append(len(state.open) - len(state.fresh) - len(state.waiting) - len(state.lingering))
        assert max(counts) <= most + 1, "the request that is being refused counts"
        assert min(counts) >= most // 2, "requests that may stay were closed"


def test_room_for_connections_ends_where_all_are_served() -> None:
    budget = connections.Connections(FrontendOptions(max_connections=3), 1, Metrics(), Mock())
    for _ in range(200):
        if budget.may_enter():
            budget.enter(Mock())
        budget.fresh.clear()  # its headers have come
    kept = len(budget.open)
    assert kept == 3 + descriptors.SPARE_CONNECTIONS


def client(name: str, opened: float = -1e9, asked: bool = False, is_answering: bool = False, handshaking: bool = False) -> Any:
    """A connection of an owner. opened: s; asked: whether it has unread bytes."""
    transport = SimpleNamespace(asked=asked, handshaking=handshaking)
    one = Mock(asker=Asker(name), address=name, since=opened, is_answering=is_answering)
    one.transport = transport
    return one


def test_a_full_server_closes_the_least_valuable_connection_at_once(monkeypatch, seed: int) -> None:
    """Random connections come and advance; a search through all of them finds what is closed for a newcomer. A crowd of TLS
    handshakes delays a newcomer by TURN_S at most. Requests that wait for turns are never closed."""
    draw, now, most, spare = random.Random(seed), 1000.0, 8, 4
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(connections, "SPARE_CONNECTIONS", spare)
    monkeypatch.setattr(connections, "GRACE_S", 0.5)  # sums are exact
    monkeypatch.setattr(connections, "TURN_S", 1 / 16)
    budget, outcomes = connections.Connections(FrontendOptions(max_connections=most), 1, Metrics(), Mock()), Counter[str]()
    group, came = (
        dict[Any, str](),
        dict[Any, float](),
    )  # of each connection, the longest in its group first; when its client acted
    crowd = Counter[str]()  # connections of each tenant
    monkeypatch.setattr(budget, "asker_of", lambda one: one.tenant)

    def put(one: Any, name: str, act: Any = lambda one: None, acted: bool = True) -> None:
        group.pop(one, None)
        group[one] = name
        act(one)
        came[one] = now if acted else came[one]

    def expected() -> Any:
        """The connection to close, or a word."""
        if len(group) < most:
            return "free"
        named = {
            name: [one for one in group if group[one] == name] for name in ("left", "fresh", "begun", "waiting", "lingering")
        }
        largest = sorted(("fresh", "begun", "waiting"), key=lambda name: len(named[name]), reverse=True)
        for name in ("left", *largest, "lingering"):
            grace = connections.GRACE_S if name in ("fresh", "begun") else 0.0
            for one in named[name]:
                if name == "left" or (not one.transport.asked and now - came[one] >= grace):
                    return one
        if len(group) < most + spare:
            return "spare"
        larger = named["fresh"] if len(named["fresh"]) > len(named["begun"]) else named["begun"]
        late = [one for one in larger if now - came[one] >= connections.TURN_S and one.transport.handshaking]
        strangers = [one for one in late if one.tenant.group != KNOWN]
        biggest = max((crowd[one.tenant.name] for one in late), default=0)
        return next(iter(strangers or [one for one in late if crowd[one.tenant.name] == biggest]), "full")

    for _ in range(3000):
        now += draw.choice([0, 1, 2, 8]) / 256
        act, one = draw.randrange(12), draw.choice([*group, None])
        if one is None or act < 6:
            found = expected()
            assert budget.may_enter() == (found != "full")
            if isinstance(found, str):
                outcomes[found] += 1
            else:
                assert found.abort.called and [some for some in group if some.abort.called] == [found]
                outcomes[f"{group[found]} {found.transport.asked}"] += 1
                crowd[found.asker.name] -= 1
                del group[found]
            if found != "full":
                new = client(draw.choice("abc"), now, asked=draw.random() < 0.8, handshaking=draw.random() < 0.7)
                new.tenant = draw.choice([Asker(new.asker.name, group=KNOWN), Asker("10.0.0.1", group=STRANGERS)])
                budget.enter(new)
                crowd[new.asker.name] += 1
                put(new, "fresh")
        elif act == 6 and group[one] in ("fresh", "begun"):
            put(one, "begun", budget.advance)
        elif act == 7 and group[one] not in ("waiting", "lingering"):
            put(one, "request", budget.busy, acted=False)
        elif act == 8 and group[one] == "request":
            put(one, "waiting", budget.understood, acted=False)
        elif act == 9 and group[one] == "request":
            put(one, "lingering", budget.linger, acted=False)
        elif act == 10 and group[one] in ("fresh", "begun", "waiting"):
            put(one, "left", budget.ended, acted=False)
        elif act == 11:
            one.transport.asked = draw.random() < 0.8
    assert {"free", "full", "spare", "fresh False", "fresh True", "begun True", "left True", "waiting False"} <= set(outcomes), (
        outcomes
    )


def test_a_tenant_with_all_connections_makes_way_for_another() -> None:
    budget = connections.Connections(FrontendOptions(max_connections=4), 1, Metrics(), Mock())
    greedy = [client("greedy", is_answering=number == 3) for number in range(4)]
    other = client("stranger")
    for one in (*greedy, other):
        budget.enter(one)
        budget.busy(one)
    budget.own(other, Asker("honest"))
    assert budget.close_another(other)
    assert [one.refuse.called for one in greedy] == [False, False, True, False], "the newest without an answer"
    assert not budget.close_another(greedy[0]), "it has most itself"
    greedy[0].is_answering = greedy[1].is_answering = True
    assert not budget.close_another(other), "answers have begun"
    for many, few in itertools.product(range(1, 6), repeat=2):  # with the new one
        budget = connections.Connections(FrontendOptions(max_connections=4), 1, Metrics(), Mock())
        clients = [client("greedy", is_answering=False) for _ in range(many)] + [client("other") for _ in range(few)]
        for one in clients:
            budget.enter(one)
            budget.busy(one)
        assert budget.close_another(clients[-1]) == (many - few >= 2), f"{many} and {few} connections"


def test_new_connections_belong_to_the_tenant_at_their_address(rng) -> None:
    """As long as a connection from there has an admitted request or had one; of several tenants, to that of the newest of these.
    Only until their first request."""
    budget = connections.Connections(FrontendOptions(max_connections=100), 1, Metrics(), Mock())
    here, admitted = list[Any](), dict[Any, str]()
    for _ in range(300):
        if not here or (len(here) < 20 and rng.random() < 0.5):
            here.append(client("stranger"))
            here[-1].address = f"10.0.0.{rng.integers(4)}"
            budget.enter(here[-1])
        elif rng.random() < 0.5:
            one = here[rng.integers(len(here))]
            budget.busy(one)
            budget.own(one, Asker(name := f"tenant {rng.integers(3)}"))
            admitted[one] = name
        else:
            gone = here.pop(int(rng.integers(len(here))))
            admitted.pop(gone, None)
            budget.remove(gone)
        for one in here:
            tenants = [name for other, name in admitted.items() if other.address == one.address]
            expected = Asker(tenants[-1], group=KNOWN) if tenants and one in budget.fresh else one.asker
            assert budget.asker_of(one) == expected
    for one in here:
        budget.remove(one)
    assert not budget._admitted


def test_connection_accounting_matches_the_events(seed: int) -> None:
    """Random connections of four owners enter, change their owner, get requests, wait, linger and end. The numbers of each owner
    and of requests follow from the connections' own states."""
    draw, most = random.Random(seed), 5
    budget = connections.Connections(FrontendOptions(max_connections=most), 1, Metrics(), Mock())
    state = dict[Any, str]()  # of each open connection, the oldest first: fresh, left, request, waiting or lingering
    names, seen = ("a", "b", "c", "d"), set[object]()
    acts = ("enter", "enter", "busy", "busy", "busy", "own", "understood", "linger", "ended", "remove", "another")
    for _ in range(2000):
        act, one = draw.choice(acts), draw.choice([*state, None])
        if act == "enter" and len(state) < 12:
            budget.enter(new := client(draw.choice(names), is_answering=draw.random() < 0.3))
            state[new] = "fresh"
        elif one is None:
            continue
        elif act == "own":
            budget.own(one, Asker(draw.choice(names)))
        elif act == "busy" and state[one] != "lingering":
            budget.busy(one)
            state[one] = "request"
        elif act == "ended":
            budget.ended(one)
            state[one] = "left" if state[one] in ("fresh", "waiting") else state[one]
        elif act == "understood" and state[one] in ("fresh", "left", "request"):
            budget.understood(one)
            state[one] = "waiting"
        elif act == "linger" and state[one] == "request":
            budget.linger(one)
            state[one] = "lingering"
        elif act == "remove":
            budget.remove(one)
            del state[one]
        elif act == "another":
            owned = Counter(some.asker.name for some in state)
            greedy = {name for name, count in owned.items() if count == max(owned.values()) and count > owned[one.asker.name] + 1}
            victims = {
                next((some for some in reversed(state) if some.asker.name == name and not some.is_answering), None)
                for name in greedy
            }
            closed, gone = budget.close_another(one), [some for some in state if some.refuse.called]
            assert closed == (len(gone) == 1)
            assert gone[0] in victims if closed else not gone and (not victims or None in victims)
            for some in gone:
                del state[some]
        requests = sum(kind == "request" for kind in state.values())
        assert list(budget.open) == list(state)
        assert budget.too_many_requests() == (requests > most)
        assert budget._owned == Counter(some.asker.name for some in state)
        seen |= {act, requests > most}
    assert len(seen) == 10


def rest_of_stream(sock: socket.socket) -> bytes:
    received = b""
    while not received.endswith(b"0\r\n\r\n"):
        piece = sock.recv(65536)
        assert piece, received[-200:]
        received += piece
    return received


MORE_THAN_KERNELS_HOLD = 1 << 26  # bytes: unread data waits in the buffers of a connection


@pytest.mark.parametrize("end", [b"0\r\nx: ", b"0\r\n", b"5;"], ids=["one trailer", "many trailers", "a chunk's extension"])
def test_what_follows_a_body_has_a_limit(engine, folder, end) -> None:
    filler = b"a: b\r\n" * 1000 if end == b"0\r\n" else b"y" * 6000
    with serving(engine, folder) as server, connect(server) as sock:
        sock.sendall(CHUNKED + b"2\r\n[]\r\n" + end)
        sent = 0
        with contextlib.suppress(OSError):
            while sent < MORE_THAN_KERNELS_HOLD:
                sock.sendall(filler)
                sent += len(filler)
        assert sent < MORE_THAN_KERNELS_HOLD, "the server reads without a limit"
        assert server.complete([7], max_tokens=1).status_code == 200


def test_trailers_within_the_limit_are_fine(engine, folder) -> None:
    with serving(engine, folder) as server, connect(server) as sock:
        body = b'{"prompt":[7],"max_tokens":1}'
        pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        sock.sendall(CHUNKED + pieces + b"0\r\nx: " + b"y" * 1000 + b"\r\n\r\n")
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")


def test_pipelined_requests_are_answered_in_order_and_bounded(engine, folder) -> None:
    with serving(engine, folder) as server:
        with connect(server) as sock:
            sock.sendall(GET + GET)
            wait_for(lambda: sock.recv(65536, socket.MSG_PEEK).count(b"HTTP/1.1 200") == 2)
        with connect(server) as sock:
            sock.sendall(GET * 2000)
            answers = rest(sock)
            assert answers.count(b"HTTP/1.1 ") <= 3
            assert b"HTTP/1.1 400" in answers
        assert server.complete([7], max_tokens=1).status_code == 200


def test_a_request_that_was_answered_early_has_to_end(engine, folder) -> None:
    with serving(engine, folder, header_timeout_s=0.2) as server, connect(server) as sock:
        sock.sendall(GET.replace(b"\r\n\r\n", b"\r\ncontent-length: 1000000\r\n\r\n"))
        assert sock.recv(65536).startswith(b"HTTP/1.1 200")
        began = time.monotonic()
        while time.monotonic() < began + 10:
            try:
                sock.sendall(b"x")
            except OSError:
                break
            time.sleep(0.02)
        else:
            raise AssertionError("it dripped on for 10 s")


@pytest.mark.parametrize(
    ("soft", "hard", "allowed"), [(1 << 20, 1 << 20, 500), (256, 1 << 20, 500), (256, -1, 500), (-1, -1, 500), (256, 400, 144)]
)
def test_the_limit_of_descriptors_is_raised_as_far_as_needed(monkeypatch, soft, hard, allowed) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: limits.append(pair))
    assert descriptors.allowed_connections(500) == allowed
    final = limits[-1][0]
    assert final == -1 or final >= allowed + descriptors.SPARE_CONNECTIONS + descriptors.OWN_DESCRIPTORS


def test_a_process_with_too_few_descriptors_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (100, 150))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, pair: None)
    with pytest.raises(ConfigError, match="150 file descriptors"):
        descriptors.allowed_connections(500)


def test_more_idle_connections_than_descriptors_block_no_request(folder) -> None:
    """A worker with 300 descriptors and 500 silent connections: health, requests and heartbeats continue."""
    with FakeEngine(facts=FACTS._replace(lease_ms=30_000)) as engine:  # a busy machine alone exceeds a short lease
        check_service_beside_idle_connections(engine, folder)


def check_service_beside_idle_connections(engine: FakeEngine, folder) -> None:
    options = ("--name", engine.segment_name, "--model", str(folder), "--port", "0")
    command = Command("frontend", *options, descriptors=300)
    try:
        port = int(command.find(re.compile(r"http://127\.0\.0\.1:(\d+)"))[1])
        url = f"http://127.0.0.1:{port}"

        def is_healthy() -> bool:
            """On a busy machine the engine, a thread of this process, may be silent for a moment."""
            return httpx.get(f"{url}/health", timeout=10).status_code == 200

        with contextlib.ExitStack() as stack:
            wait_for(is_healthy)
            for _ in range(500):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            for _ in range(3):
                wait_for(is_healthy)
                assert httpx.post(f"{url}/v1/completions", json={"prompt": [7], "max_tokens": 2}, timeout=10).status_code == 200
                beat = engine.pairs[0].heartbeat
                wait_for(lambda beat=beat: engine.pairs[0].heartbeat > beat)
        assert engine.pairs[0].epoch == 1, "the lease held"
    finally:
        command.end()


def test_a_failed_link_ends_the_worker_with_a_reason(engine, folder, caplog) -> None:
    """Whatever raises in the task that keeps the lease, or in the poll: no request hangs."""
    for method in ("check", "poll"):
        with serving(engine, folder) as server:
            engine.hold = True
            with ThreadPoolExecutor(1) as pool:
                answer = pool.submit(server.complete, [7], max_tokens=100)
                wait_for(lambda: server.engine_client.pair.in_flight == 1)
                setattr(server.engine_client.pair, method, lambda *_: 1 // 0)
                assert answer.result(60).status_code == 503
            wait_for(lambda: server.server.should_exit)
            assert server.server.failed
            engine.hold = False
        assert "ZeroDivisionError" in caplog.text
        caplog.clear()


def test_disconnects_at_any_moment_are_no_fault(engine, folder, caplog, rng) -> None:
    """Also with all events there, and the answer about to go out."""
    requests = [completion_bytes(prompt=[7], max_tokens=count, stream=stream) for count in (1, 2) for stream in (True, False)]
    with serving(engine, folder) as server:
        for _ in range(400):
            with connect(server) as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reset
                sock.sendall(requests[rng.integers(len(requests))])
                time.sleep(rng.uniform(0, 0.004))
        server.idle()
        assert server.complete([7], max_tokens=1).status_code == 200
        wait_for(lambda: not server.server.connections.tasks)
        assert not server.server.failed
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_as_its_wait_ends_is_not_submitted(folder, monkeypatch, stream) -> None:
    """It disconnected after the last cancellable moment. No code would cancel the submission, and the stream
    would write to a closed transport, which ends the worker."""
    with FakeEngine(step_s=0.002) as engine, serving(engine, folder) as server, connect(server) as sock:
        handler, there, left = server.server.app._requests, server.server.connections.open, []
        prepare, submit, submitted = handler.service.prepare, handler.submit, []

        async def prepare_then_leave(*arguments: Any) -> Any:
            prepared = await prepare(*arguments)
            connection = next(one for one in there if one.client == "{}:{}".format(*sock.getsockname()))
            connection.transport.abort()
            left.append(connection)
            return prepared

        def noted(*arguments: Any) -> None:
            submitted.append(arguments)
            submit(*arguments)

        monkeypatch.setattr("blinkpy.dpu.http.request_handler.is_brief", lambda body: False)
        monkeypatch.setattr(handler.service, "prepare", prepare_then_leave)
        monkeypatch.setattr(handler, "submit", noted)
        sock.sendall(completion_bytes(prompt=[70, 71], max_tokens=100, stream=stream))
        wait_for(lambda: left and left[0].disconnected)
        wait_for(lambda: server.server.app.running == 0 or submitted)
        monkeypatch.undo()
        assert server.complete([70], max_tokens=100).status_code == 200
        assert not submitted


def test_a_disconnect_cancels_all_pipelined_requests(engine, folder, caplog) -> None:
    """The request in service is not the last one received; damage behind it does not end up in its answer."""
    engine.hold = True
    request = completion_bytes(prompt=[7], max_tokens=5)
    with serving(engine, folder) as server:
        with connect(server) as sock:
            sock.sendall(request * 2)
            wait_for(lambda: server.engine_client.pair.in_flight == 1)
            there = server.server.connections.open
            wait_for(lambda: any(len(one.pending) == 2 for one in there))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # reading is paused: a reset is seen
        for one in list(there):
            server.engine_client._loop.call_soon_threadsafe(one.transport.abort)
        wait_for(lambda: not server.server.connections.tasks)
        server.idle()
        engine.hold, engine.step_s = False, 0.02
        with connect(server) as sock:
            sock.sendall(completion_bytes(prompt=[7], max_tokens=50, stream=True))
            assert sock.recv(1000).startswith(b"HTTP/1.1 200")
            sock.sendall(b"nonsense\r\n\r\n")
            assert b"HTTP/1.1" not in rest(sock)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("closing", [False, True])
def test_only_clients_that_read_nothing_are_disconnected(closing: bool, seed: int) -> None:
    """By looks at random times. More that is written is no progress of the client's."""
    draw, outcomes = random.Random(seed), set[bool]()
    limits = {"send_timeout_s": 9.0, "close_timeout_s": 5.0}
    for _ in range(100):
        one, ended = cast(Any, object.__new__(connection.Connection)), list[str]()
        unread, before, now, since = draw.randrange(1, 1000), 0, 0.0, 0.0
        one.all = SimpleNamespace(
            unread=SimpleNamespace(release=lambda holder: None), metrics=SimpleNamespace(refused=ended.append)
        )
        one.options, one._served = SimpleNamespace(**limits), None
        one._unread, one._unread_since = 0, now
        one.abort = lambda ended=ended: ended.append("abort")
        share = draw.random()  # of the looks before which some was taken
        for _ in range(20):
            now += draw.uniform(0.1, 3)
            if draw.random() < share:
                unread = draw.randrange(unread) if unread else 0
            elif draw.random() < 0.3:
                unread += draw.randrange(1, 100)
            since = now if unread < before or (not unread and not closing) else since
            before = unread
            one.transport = SimpleNamespace(get_write_buffer_size=lambda size=unread: size, is_closing=lambda: closing)
            one.end_if_stuck(now)
            limit = "close_timeout_s" if closing else "send_timeout_s"
            stuck = now - since > limits[limit]
            assert ended == ([limit, "abort"] if stuck else [])
            if stuck:
                break
        outcomes.add(stuck)
    assert outcomes == {False, True}


CLOSED = [" ".join(f"{fd}<&-" if fd == 0 else f"{fd}>&-" for fd in fds) for n in (1, 2, 3) for fds in combinations(range(3), n)]
CHOSEN = int(os.environ["BLINKPY_SEED"])  # of other sockets closed in this run


@pytest.mark.parametrize("closed", [CLOSED[CHOSEN % 6], CLOSED[-1]])
def test_a_front_end_serves_without_standard_descriptors(folder, closed: str) -> None:
    """As some supervisors start it: its sockets must not get their numbers."""
    with FakeEngine() as engine:
        port = free_port()
        options = f"--name {engine.segment_name} --model {folder} --port {port}"
        command = ["sh", "-c", f"exec {sys.executable} -m blinkpy frontend {options} {closed}"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until_served(process, port)
        finally:
            process.terminate()
            process.wait(30)


@pytest.mark.parametrize("closed", [CLOSED[(CHOSEN + i) % 7] for i in (0, 2, 4)])
@pytest.mark.parametrize("fault", ["--port none", "--model /nowhere"], ids=["an option", "a model"])
def test_without_standard_descriptors_the_end_has_its_reason(closed: str, fault: str) -> None:
    """On standard error if it is open, and nothing anywhere else. The exit code always says that the options are at fault."""
    command = ["sh", "-c", f"exec {sys.executable} -m blinkpy frontend {fault} {closed}"]
    ended = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 2, ended
    assert ended.stdout == ""
    if "2>&-" not in closed:
        assert re.search(r"^blinkpy: error: .+\n\Z", ended.stderr, re.MULTILINE), ended.stderr
    else:
        assert ended.stderr == ""
