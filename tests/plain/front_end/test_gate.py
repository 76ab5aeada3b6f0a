"""An overloaded worker: its running work continues, and new work is refused by its headers."""

import asyncio
import contextlib
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import httptools
import pytest
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import COMPLETIONS_HEAD, RunningServer, completion_bytes, serving
from support.in_loop import in_loop
from support.waiting import wait_for

from blinkpy.dpu.admission.fair_line import FairLine
from blinkpy.dpu.admission.gate import ACCEPTED, HANDSHAKES, KNOWN, LEFT, STRANGERS, TURN_S, Ask, Asker, FullError, Gate, Places
from blinkpy.dpu.metrics import Metrics

LAG_S, WORK_S = 0.2, 0.001
HONEST, GREEDY = Asker("honest"), Asker("greedy")


def test_a_line_is_fair_by_weight_whatever_the_costs(rng) -> None:
    """Owners that always have items are charged in proportion to their weights, within two items of each."""
    weights, most = {"a": 1.0, "b": 1.0, "c": 3.0}, 10.0
    line, charged = FairLine[str](), dict.fromkeys(weights, 0.0)
    for name, weight in weights.items():
        for _ in range(3):
            line.push(name, weight, name)
    for _ in range(3000):
        found = line.pop()
        assert found is not None
        name, _ = found
        cost = rng.uniform(0, most) if name == "a" else rng.uniform(0, most) ** 2 / most
        line.charge(name, cost)
        charged[name] += cost
        line.push(name, weights[name], name)
        shares = [charged[one] / weights[one] for one in weights]
        assert max(shares) - min(shares) <= 2 * most


@pytest.mark.parametrize("both_ends", [False, True])
def test_a_line_is_that_of_each_owner_and_keeps_count(both_ends: bool, rng) -> None:
    """Compared with a list: items of an owner in order, without cancelled items, sizes and weights added up."""
    line, model = FairLine[tuple[str, int]](both_ends), list[tuple[str, int]]()
    taken = Counter[str]()  # of each owner
    for number in range(4000):
        act = rng.random()
        if act < 0.5:
            item = str(rng.integers(5)), number
            line.push(item[0], float(rng.choice((0.5, 1.0, 3.0))), item, number)  # a key may get another weight
            model.append(item)
        elif act < 0.6 and model:
            item = model.pop(int(rng.integers(len(model))))
            assert line.remove(item[0], item)
            assert not line.remove(item[0], item)
        elif act < 0.9:
            without = {str(rng.integers(5))}
            found = line.pop(without)
            ready = [item for item in model if item[0] not in without]
            assert (found is None) == (not ready)
            if found is not None:
                newest = both_ends and taken[found[0]] % 2 == 0
                assert found[1] == [item for item in model if item[0] == found[0]][-1 if newest else 0]
                model.remove(found[1])
                taken[found[0]] += 1
                line.charge(found[0], rng.uniform(0, 3))
        assert (line.count, line.size) == (len(model), sum(number for _, number in model))
        assert line._weights == sum(owner.weight for *_, owner, _ in line._heap)
        for name in {item[0] for item in model}:
            own = [item for item in model if item[0] == name]
            assert (line.head(name), line.last(name)) == (own[0], own[-1])


def test_idle_owners_accumulate_no_credit() -> None:
    """An owner that was away is next, and not for all the time that it was away."""
    line = FairLine[int]()
    for number in range(1000):
        line.push("busy", 1.0, number)
    for _ in range(500):
        line.pop()
        line.charge("busy", 1.0)
    for number in range(100):
        line.push("back", 1.0, number)
    order = []
    for _ in range(100):
        found = line.pop()
        assert found is not None
        order.append(found[0])
        line.charge(found[0], 1.0)
    assert 45 <= order.count("back") <= 55


def test_endless_new_items_starve_no_item_of_their_owner(rng) -> None:
    """At both ends: of items that come singly every second is taken immediately, and earlier ones within twice their number."""
    line, waiting = FairLine[int](both_ends=True), int(rng.integers(1, 100))
    for number in range(waiting):
        line.push("one", 1.0, number)
    taken = list[int]()
    for number in range(waiting, 4 * waiting):
        line.push("one", 1.0, number)
        taken += [found[1] for found in (line.pop(),) if found is not None]
    assert taken[::2] == list(range(waiting, 4 * waiting, 2))
    assert set(range(waiting)) <= set(taken[: 2 * waiting])


@pytest.mark.parametrize("weight", [0.5, 1.0, 4.0])
def test_endless_new_owners_starve_no_owner(weight: float, rng) -> None:
    """An owner is next as soon as each owner that waits has had the service that it had before."""
    line, waiting, had = FairLine[str](), int(rng.integers(20, 100)), 5.0
    for number in range(waiting):
        line.push(f"first {number}", 1.0, "new")
    line.charge("before", had)
    line.push("before", weight, "before")
    for number in range(10 * waiting):
        found = line.pop()
        assert found is not None
        line.charge(found[0], 1.0)
        if found[1] == "before":
            break
        line.push(f"new {number}", 1.0, "new")
    assert number <= (had / min(weight, 1.0) + 2) * waiting


class Turns:
    """A gate with a clock that moves by hand, and work that moves it; done: numbers, in order."""

    def __init__(self) -> None:
        self.now, self.metrics, self.done = 100.0, Metrics(), list[tuple[str, int]]()
        self.paused = 0.0  # s of the clock without CPU time
        self.gate = Gate(LAG_S, self.metrics, clock=lambda: self.now, cpu=lambda: self.now - self.paused)

    def come(self, asker: Asker, count: int, cost_s: float = WORK_S) -> list[Ask]:
        def work(number: int) -> None:
            self.now += cost_s
            self.done.append((asker.name, number))

        return [self.gate.ask(asker, lambda number=number: work(number)) for number in range(count)]

    async def turn(self, seconds: float = 0.0) -> int:
        """One turn of the event loop, that long by the clock; how much was done in it."""
        before, self.now = len(self.done), self.now + seconds
        await asyncio.sleep(0)
        return len(self.done) - before


@in_loop
async def test_a_turn_does_what_its_budget_has_time_for_in_order() -> None:
    turns, most = Turns(), round(TURN_S / WORK_S)
    turns.come(HONEST, 50)
    assert len(turns.done) == most, "some are done at once"
    counts = [await turns.turn() for _ in range(60)]
    assert max(counts) == most and sum(counts) == 50 - most
    assert turns.done == [("honest", number) for number in range(50)]
    await turns.turn()
    turns.come(HONEST, 1)
    assert len(turns.done) == 51, "where nobody waits, one is done at once"


@in_loop
async def test_unauthenticated_clients_share_the_service_of_one_tenant() -> None:
    turns = Turns()
    for number in range(200):
        turns.come(Asker(f"10.0.0.{number}", group=STRANGERS), 20)
    turns.come(GREEDY, 2000)
    turns.come(HONEST, 2000)
    while len(turns.done) < 1000:
        await turns.turn()
    assert sum(name.startswith("10.") for name, _ in turns.done) <= 0.4 * len(turns.done)


@in_loop
async def test_handshakes_of_an_address_delay_no_tenant_and_no_other_address() -> None:
    """A connection whose handshake has begun, a tenant, and the handshake of another address do not wait for them."""
    turns = Turns()
    turns.come(Asker("10.0.0.1", group=HANDSHAKES), 900)
    before = len(turns.done)
    later = [Asker("10.0.0.3", group=STRANGERS), Asker("10.0.0.2", group=HANDSHAKES), HONEST]
    for asker in later:
        turns.come(asker, 1)
    while turns.gate.waiting > 800:
        await turns.turn()
    assert {asker.name for asker in later} <= {name for name, _ in turns.done[before : before + 8]}


@in_loop
async def test_a_new_connection_of_a_tenant_does_not_wait_for_other_owners() -> None:
    """Neither for handshakes of strangers or of another tenant's clients, nor for earlier clients at its address."""
    turns = Turns()
    for number in range(900):
        turns.come(Asker(f"10.0.{number}", group=HANDSHAKES), 2)
        turns.come(Asker(f"10.0.{number}", group=STRANGERS), 2)
    turns.come(Asker("other", group=KNOWN), 900)
    turns.come(Asker("victim", group=KNOWN), 500)
    for _ in range(100):
        await turns.turn()
    newest, begun = turns.gate.ask(Asker("victim", group=KNOWN), lambda: turns.done.append(("newest", 0))), len(turns.done)
    while newest.run is not None:
        await turns.turn()
    assert turns.done.index(("newest", 0)) - begun <= 16


@in_loop
async def test_work_that_is_taken_back_leaves_the_line() -> None:
    """Otherwise, of work whose newest piece is next, the oldest would stay for ever."""
    turns = Turns()
    for asker in (HONEST, Asker("10.0.0.1", group=HANDSHAKES), Asker("10.0.0.2", group=STRANGERS)):
        asks = [turns.gate.ask(asker, lambda: turns.done.append(("done", 0)), later=True) for _ in range(100)]
        for ask in asks[:60] + asks[70:]:
            turns.gate.cancel(ask)
        assert turns.gate.waiting == 10
        while turns.gate.waiting:
            await turns.turn()
        assert len(turns.done) == 10
        turns.done.clear()


@in_loop
async def test_accepting_keeps_a_third_however_many_wait() -> None:
    """And leaves the others the rest, however many connections come."""
    turns, tenants = Turns(), 200
    for number in range(tenants):
        turns.come(Asker(f"tenant {number}"), 50)
    turns.come(ACCEPTED, 5000)
    begun = len(turns.done)
    while len(turns.done) < begun + 3000:
        await turns.turn()
    accepted = sum(name == ACCEPTED.name for name, _ in turns.done[begun:])
    assert 900 <= accepted <= 1100
    busiest = Counter(name for name, _ in turns.done[begun:] if name != ACCEPTED.name)
    assert len(busiest) == tenants and max(busiest.values()) - min(busiest.values()) <= 2


@in_loop
async def test_clients_that_have_left_go_last() -> None:
    turns = Turns()
    turns.come(Asker("left", group=LEFT), 1000)
    turns.come(Asker("here", group=STRANGERS), 100)
    begun = len(turns.done)
    while ("here", 99) not in turns.done:
        await turns.turn()
    assert 100 / 32 <= len(turns.done) - begun - 100 <= 100 / 8


@in_loop
async def test_a_moment_without_a_core_is_not_charged() -> None:
    """The next work of its owner does not wait for that long a time of each other owner."""
    turns, others = Turns(), 100
    victim = Asker("10.0.0.0", group=STRANGERS)
    for number in range(1, others + 1):
        turns.come(Asker(f"10.0.0.{number}", group=STRANGERS), 1000)

    def interrupted() -> None:
        turns.now += 10.0
        turns.paused += 10.0

    ask = turns.gate.ask(victim, interrupted)
    while ask.run is not None:
        await turns.turn()
    begun = len(turns.done)
    turns.come(victim, 1)
    while (victim.name, 0) not in turns.done:
        assert len(turns.done) - begun <= 2 * others
        await turns.turn()


@in_loop
async def test_addresses_of_unauthenticated_clients_get_equal_shares() -> None:
    turns = Turns()
    turns.come(Asker("10.0.0.1", group=STRANGERS), 500)
    turns.come(Asker("10.0.0.2", group=STRANGERS), 5)
    for _ in range(8):
        await turns.turn()
    assert sum(name == "10.0.0.2" for name, _ in turns.done) == 5


@in_loop
async def test_only_owners_above_their_share_are_late() -> None:
    turns = Turns()
    turns.come(GREEDY, 1000)
    while not turns.gate.late(GREEDY):
        assert len(turns.done) < 900
        await turns.turn()
    assert not turns.gate.late(HONEST)
    turns.come(HONEST, 1)
    await turns.turn()
    await turns.turn()
    assert turns.done[-1][0] == "honest" or ("honest", 0) in turns.done
    while turns.gate.waiting:
        await turns.turn()
    await turns.turn()
    assert not turns.gate.late(GREEDY)
    assert turns.metrics.gauge_of_all("lag_seconds") == 0.0


@in_loop
async def test_a_pause_of_the_process_counts_as_no_lateness() -> None:
    turns = Turns()
    turns.come(HONEST, 10)
    turns.now += 100 * LAG_S
    assert not turns.gate.late(HONEST)
    for _ in range(20):
        await turns.turn()
    assert len(turns.done) == 10


@in_loop
async def test_cancelled_or_failed_work_blocks_no_other_work(caplog) -> None:
    turns = Turns()
    asks = turns.come(HONEST, 20)
    for ask in asks[5:15]:
        ask.run = None
    turns.gate.ask(HONEST, lambda: 1 // 0)
    turns.come(HONEST, 1)
    for _ in range(30):
        await turns.turn()
    assert [number for _, number in turns.done] == [*range(5), *range(15, 20), 0]
    assert "ZeroDivisionError" in caplog.text
    assert await turns.gate.run(HONEST, lambda: 7) == 7
    with pytest.raises(KeyError):
        await turns.gate.run(HONEST, lambda: {}[1])


@in_loop
async def test_a_turn_ends_in_time_whatever_was_taken_back() -> None:
    """Each look at the clock takes its time."""
    turns, looks = Turns(), list[float]()

    def look() -> float:
        turns.now += TURN_S / 50
        looks.append(turns.now)
        return turns.now

    asks = [turns.gate.ask(HONEST, lambda: None, later=True) for _ in range(1000)]
    for ask in asks:
        ask.run = None
    turns.gate._clock = look
    await turns.turn()
    assert len(looks) <= 60 and turns.gate.waiting


@in_loop
async def test_a_pool_leaves_places_and_memory_to_other_owners(seed: int) -> None:
    """One tenant with any number of jobs: another enters immediately, and its jobs are not dropped."""
    places, refused = Places(4, 20, 1000, of_one=2), list[str]()
    free, inside, order = asyncio.Event(), Counter[str](), list[str]()

    async def job(asker: Asker, size: int) -> None:
        try:
            async with places.place(asker, size):
                inside[asker.name] += 1
                order.append(asker.name)
                assert places.used <= 4 and inside[asker.name] <= 2
                await (free.wait() if not free.is_set() else asyncio.sleep(0.001))
                inside[asker.name] -= 1
        except FullError:
            refused.append(asker.name)

    greedy = [asyncio.ensure_future(job(GREEDY, 40)) for _ in range(100)]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    honest = [asyncio.ensure_future(job(HONEST, 40)) for _ in range(10)]
    await asyncio.sleep(0.01)
    assert inside == {"greedy": 2, "honest": 2}
    assert set(refused) == {"greedy"}
    assert places.waiting <= 20 and places.bytes <= 1000
    for task in greedy[::3]:
        task.cancel()
    order.clear()
    free.set()
    await asyncio.gather(*honest)
    assert "greedy" in order
    await asyncio.gather(*greedy, return_exceptions=True)
    assert (places.used, places.waiting, places.bytes, places._places) == (0, 0, 0, {})
    with pytest.raises(FullError):
        async with places.place(HONEST, 1001):
            pass
    assert (places.used, places.waiting, places.bytes) == (0, 0, 0)


# ---- a worker --------------------------------------------------------------------------------------------------------

FLOOD, MORE = 200, 20
PREPARE_S = 0.01  # on the event loop: longer than its turn


class Answers:
    """The bytes received on one connection. whole: answers, as (status, headers, body)."""

    def __init__(self) -> None:
        self.whole = list[tuple[int, dict[bytes, bytes], bytes]]()
        self._parser = httptools.HttpResponseParser(self)

    def on_message_begin(self) -> None:
        self._headers, self._body = dict[bytes, bytes](), b""

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self._body += body

    def on_message_complete(self) -> None:
        self.whole.append((self._parser.get_status_code(), self._headers, self._body))

    def read(self, sock: socket.socket, count: int = 1) -> list[tuple[int, dict[bytes, bytes], bytes]]:
        """As many answers, the first ones of the connection included."""
        while len(self.whole) < count:
            piece = sock.recv(65536)
            assert piece, self.whole
            self._parser.feed_data(piece)
        return self.whole


@contextlib.contextmanager
def flooded_worker(
    folder: Any, prepares: Callable[[FakeEngine, int], None] = lambda *_: None
) -> Iterator[tuple[RunningServer, list[int]]]:
    """A worker, and a growing list of the requests that it has prepared. prepares: called before each of them, on the event
    loop, with its number from 0."""
    with FakeEngine() as engine, serving(engine, folder, max_lag_ms=400) as server, pytest.MonkeyPatch.context() as patches:
        handler, prepared = server.server.app._requests, list[int]()
        prepare = handler.prepare_short

        def spied(*args: Any) -> Any:
            prepared.append(len(prepared))
            prepares(engine, prepared[-1])
            return prepare(*args)

        patches.setattr(handler, "prepare_short", spied)
        yield server, prepared


def connected(stack: contextlib.ExitStack, server: RunningServer, count: int) -> list[socket.socket]:
    made = [stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60)) for _ in range(count)]
    wait_for(lambda: len(server.server.connections.open) >= count)
    return made


def test_overload_refuses_only_new_requests(folder) -> None:
    """Accepted requests are answered, GET is, and afterwards the state is as before. Accepted ones wait until the test
    releases them."""
    short, asker = completion_bytes(prompt=[7], max_tokens=1), Asker("address 127.0.0.1")
    with flooded_worker(folder) as (server, prepared), contextlib.ExitStack() as stack:
        gate = server.server.app.service.gate
        flood, late = connected(stack, server, FLOOD), connected(stack, server, MORE)
        with pytest.MonkeyPatch.context() as held:
            held.setattr(gate, "ask", partial(gate.ask, later=True))
            held.setattr(gate._line, "pop", partial(gate._line.pop, {asker.name}))
            with pytest.MonkeyPatch.context() as patient:
                patient.setattr(gate, "_lag_s", math.inf)
                for sock in flood:
                    sock.sendall(short)
                wait_for(lambda: gate.waiting >= FLOOD)
            wait_for(lambda: gate.late(asker))

            assert server.client.get("/health").status_code == 200
            assert server.client.get("/metrics").status_code == 200
            for sock in late:
                sock.sendall(short)
            for sock in late:
                ((status, headers, body),) = Answers().read(sock)
                assert (status, headers[b"retry-after"]) == (503, b"1")
                assert b'"code":"max_lag_ms"' in body
                assert headers[b"x-request-id"]
            assert not prepared and gate.waiting == FLOOD

        assert [Answers().read(sock)[0][0] for sock in flood] == [200] * FLOOD == [200] * len(prepared)
        refused = server.server.app.service.metrics.values("refused_max_lag_ms")[0]
        assert refused == MORE == server.server.app.service.metrics.values(503)[0]
        wait_for(lambda: not gate.waiting)
        late[0].sendall(short)  # on a connection that got a 503
        assert Answers().read(late[0])[0][0] == 200


def test_work_alone_is_refused_for_load(folder, monkeypatch) -> None:
    """Requests that are answered by their head are not; probes may be posted, too."""
    probes = (b"/ping", b"/ping?a=/v1", b"/llm/ping", b"http://x/ping")
    expected = {
        **dict.fromkeys(probes, 200),
        b"/v1/models": 405,
        b"/pings": 404,
        b"/llm": 307,
        b"/%70ing": 400,
        b"/v1/completions": 503,
    }
    with FakeEngine() as engine, serving(engine, folder, root_path="/llm") as server:
        monkeypatch.setattr(server.server.app.service.gate, "late", lambda asker: True)
        for target, status in expected.items():
            answer = server.raw(b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}" % target)
            assert answer.startswith(b"HTTP/1.1 %d" % status), (target, answer)


def test_a_stream_keeps_its_pace_beside_requests_that_wait(folder, monkeypatch) -> None:
    """Each of them takes the event loop until the engine has made another token of the stream. The last one takes it until the
    client has the whole stream, which therefore must not wait for it."""
    tokens, whole, in_time = 100, threading.Event(), list[bool]()

    def prepares(engine: FakeEngine, number: int) -> None:
        if number == FLOOD - 1:
            in_time.append(whole.wait(20))
        elif number:
            streamed, begun = engine.submitted[0], engine.submitted[0].made
            time.sleep(PREPARE_S)
            wait_for(lambda: streamed.made > begun or streamed.made == tokens)

    with flooded_worker(folder, prepares) as (server, prepared), contextlib.ExitStack() as stack:
        monkeypatch.setattr(server.server.app.service.gate, "_lag_s", math.inf)
        stream, *flood = connected(stack, server, FLOOD)
        stream.sendall(completion_bytes(prompt=[7], max_tokens=tokens, stream=True))
        assert stream.recv(65536)
        for sock in flood:
            sock.sendall(completion_bytes(prompt=[7], max_tokens=1))
        received = b""
        while b"[DONE]" not in received:
            received += stream.recv(65536)
        whole.set()
        assert [Answers().read(sock)[0][0] for sock in flood] == [200] * len(flood)
    assert len(prepared) == FLOOD and in_time == [True], "the stream waits for all that came after it"


def test_a_refused_request_s_body_is_not_read_as_the_next_request(folder) -> None:
    """Whole or in pieces; the next request on the connection is served."""
    health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    body = b"GET /version HTTP/1.1\r\nhost: x\r\n\r\n" * 100
    with FakeEngine() as engine, serving(engine, folder) as server, contextlib.ExitStack() as stack:
        monkey = stack.enter_context(pytest.MonkeyPatch.context())
        monkey.setattr(server.server.app.service.gate, "late", lambda asker: True)
        head = COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n" % len(body)
        chunked = COMPLETIONS_HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        (sock,) = connected(stack, server, 1)
        answers = Answers()
        sock.sendall(head + body + health)
        assert [status for status, _, _ in answers.read(sock, 2)] == [503, 200]
        sock.sendall(chunked + health)
        assert [status for status, _, _ in answers.read(sock, 4)[2:]] == [503, 200]
        sock.sendall(head)
        answers.read(sock, 5)
        sock.sendall(body[:100])
        sock.sendall(body[100:] + health)
        assert [status for status, _, _ in answers.read(sock, 6)[4:]] == [503, 200]

        for last in (b"connection: close\r\n", b"expect: 100-continue\r\n"):  # no body may follow
            (sock,) = connected(stack, server, 1)
            sock.sendall(COMPLETIONS_HEAD + last + b"content-length: 2\r\n\r\n")
            ((status, headers, _),) = Answers().read(sock)
            assert (status, headers[b"connection"]) == (503, b"close")
            assert sock.recv(100) == b""
