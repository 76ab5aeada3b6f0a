"""Bodies before their submission: limits on their shape, bounded queues, and clients that disconnect."""

import asyncio
import contextlib
import gc
import json
import os
import secrets
import signal
import socket
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine
from support.front_end.http_server import COMPLETIONS_HEAD, RunningServer, completion_bytes, serving
from support.front_end.tenants import write_keys
from support.front_end.tiny_tokenizer import byte_fallback_json, word_piece_json, write_model
from support.waiting import BUSY_S, wait_for
from tokenizers import Tokenizer as Encoder
from tokenizers import normalizers, pre_tokenizers

from blinkpy.config import Config
from blinkpy.dpu.admission.gate import Asker
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.preparation import preparation_queue, request_jobs
from blinkpy.dpu.http.preparation.request_jobs import EngineLimits, check_shape
from blinkpy.dpu.http.wire.byte_budget import ByteBudget
from blinkpy.dpu.http.wire.connections import too_many_bodies
from blinkpy.dpu.http.wire.exchange import Exchange
from blinkpy.dpu.metrics import Metrics
from blinkpy.dpu.text.tokenizer import Tokenizer

LARGE = 3 * preparation_queue.THREAD_BYTES
ANY: Any = None
ASKER = Asker("tenant")
JSON = {"content-type": "application/json"}


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    sizes = replace(SIZES, prompt_tokens=1 << 18, hash_entries=1 << 17)
    with FakeEngine(sizes=sizes, facts=FACTS._replace(max_model_len=1 << 17, num_pages=1 << 17)) as engine:
        yield engine


def code(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


# ---- the shape of JSON -----------------------------------------------------------------------------------------------


def random_json(rng: np.random.Generator, depth: int) -> object:
    kind = rng.integers(0, 7 if depth else 4)
    texts = ['"', "\\", '\\"', "[{", "},", "a", "\n", "é", "]"]
    if kind == 0:
        return int(rng.integers(0, 100))
    if kind < 3:
        return "".join(rng.choice(texts, int(rng.integers(0, 6))))
    if kind == 3:
        return None
    inside = [random_json(rng, depth - 1) for _ in range(rng.integers(0, 4))]
    return inside if kind < 6 else {f'k{i}"\\,[': value for i, value in enumerate(inside)}


def values_and_depth(value: object) -> tuple[int, int]:
    """Values as the limit counts them, an empty container's inside as one, and nesting."""
    if not isinstance(value, list | dict):
        return 1, 0
    below = [values_and_depth(one) for one in (value.values() if isinstance(value, dict) else value)]
    return 1 + max(1, sum(count for count, _ in below)), 1 + max([depth for _, depth in below], default=0)


@pytest.mark.parametrize(
    ("body", "brief"),
    [
        ({"prompt": "x" * 1900}, True),
        ({"prompt": [7] * 500}, True),
        ({"prompt": "x" * 2100}, False),
        ({"prompt": ["a"] * 100}, False),
        ({"prompt": "a", "bad_words": ["b"] * 100}, False),
        ({"messages": [{"role": "user", "content": "a"}] * 20}, False),
        ({"messages": [{"role": "user", "content": "a"}] * 4, "temperature": 0}, True),
        ({"messages": [{"role": "user", "content": "a"}], "tools": []}, False),
    ],
)
def test_what_takes_longer_than_a_millisecond_leaves_the_loop(body: dict[str, Any], brief: bool) -> None:
    """By the most expensive part of a body's bytes (benchmarks/parts/request_costs.py), however its fields are
    spelled."""
    assert request_jobs.is_brief(bytearray(orjson.dumps(body))) == brief
    hidden = orjson.dumps(body).replace(b'"tools"', b'"\\u0074ools"')
    assert request_jobs.is_brief(bytearray(hidden)) == brief


def test_values_and_nesting_are_counted_as_a_parser_does(rng) -> None:
    for _ in range(300):
        value = [random_json(rng, int(rng.integers(0, 7)))]
        values, depth = values_and_depth(value)
        body = json.dumps(value, ensure_ascii=bool(rng.integers(2)), indent=rng.choice([None, 1])).encode()
        check_shape(body, values, depth)
        with pytest.raises(ApiError) as few:
            check_shape(body, values - 1, 0)
        with pytest.raises(ApiError) as shallow:
            check_shape(body, values, depth - 1)
        assert (few.value.status, few.value.code) == (413, "too_many_values"), body
        assert (shallow.value.status, shallow.value.code) == (400, "too_deep"), body


def test_invalid_json_is_scanned_once() -> None:
    """Strings without an end, and quotes behind backslashes: a search that began again at each of them would take hours."""
    for body in (b'"' + b'\\"' * 2_000_000, b'{"' * 2_000_000, b"\\" * 4_000_000, b'"\\' * 2_000_000 + b"["):
        with pytest.raises(ApiError):
            check_shape(b"[" * 9 + body, 9, 8)


def test_requests_beyond_the_shape_are_refused_in_place_and_in_processes(engine, folder) -> None:
    with serving(engine, folder, max_body_values=2000, max_body_depth=9) as server:
        for length in (0, LARGE):
            padding = "x" * length
            assert code(server.complete(metadata={"a": [[]] * 2000, "b": padding})) == (413, "too_many_values")
            deep: object = 1
            for _ in range(9):
                deep = [deep]
            assert code(server.complete(metadata={"a": deep, "b": padding})) == (400, "too_deep")
            assert server.complete([7] * 900, max_tokens=1, user=padding).status_code == 200


# ---- large and middling requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, preparation_queue.THREAD_BYTES // 2, LARGE], ids=["in place", "in a thread", "in a process"])
def test_a_request_is_equal_for_every_way_of_preparation(engine, folder, size) -> None:
    """Prompt, parameters and answer: `user` has no effect, and only decides by its length where the request is prepared."""
    user, tokenizer = "u" * size, Tokenizer(folder)
    with serving(engine, folder) as server:
        assert server.complete("the lazy dog", max_tokens=3, seed=5, user=user).status_code == 200
        assert engine.submitted[-1].prompt == tokenizer.encode("the lazy dog").tolist()
        assert engine.submitted[-1].entry["seed"] == 5
        assert server.chat("the lazy dog", max_tokens=3, user=user).json()["choices"][0]["message"]["role"] == "assistant"
        with server.client.stream(
            "POST", "/v1/completions", json={"prompt": [7], "max_tokens": 3, "stream": True, "user": user}
        ) as stream:
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
        answer = server.client.post("/v1/responses", json={"input": "dog", "max_output_tokens": 3, "user": user, "store": False})
        assert answer.json()["object"] == "response"
        for problem in (
            server.complete(model="other", user=user),
            server.complete(nonsense=1, user=user),
            server.chat("refuse", user=user),
            server.client.post("/v1/completions", content=b'{"prompt": "' + user.encode(), headers=JSON),
            server.complete([7, 600], user=user),
        ):
            error = problem.json()["error"]
            expected = {"model_not_found": 404}.get(error["code"], 400)
            assert problem.status_code == expected, problem.text
        text = "the lazy dog " * (1 + size // 13)
        tokens = server.client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
        assert tokens["tokens"] == tokenizer.encode(text).tolist()
        assert len(tokens["token_strs"]) == tokens["count"] == len(tokens["tokens"])
        assert server.client.post("/detokenize", json={"tokens": tokens["tokens"]}).json()["prompt"] == "<s>" + text


def gate(monkeypatch: pytest.MonkeyPatch, fifo: Path) -> None:
    """Jobs of completions wait until the test opens the other end of this pipe; other kinds continue."""
    os.mkfifo(fifo)
    inner = request_jobs.JOBS["completion"]

    def gated(*arguments: object) -> object:
        fifo.read_bytes()
        return inner(*arguments)  # type: ignore[arg-type]

    monkeypatch.setitem(request_jobs.JOBS, "completion", gated)


def test_the_line_of_middling_requests_is_bounded_and_clients_that_leave_leave_it(engine, folder, monkeypatch, tmp_path) -> None:
    gate(monkeypatch, tmp_path / "gate")
    at_once, most = preparation_queue.AT_ONCE, preparation_queue.AT_ONCE + 3
    text = "x" * 4096
    with serving(engine, folder, max_preparing=most) as server:
        queue = server.server.app.service._queue
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) for _ in range(most)]
        for number, sock in enumerate(clients, 1):  # the first ones get the places
            sock.sendall(completion_bytes(prompt=text, max_tokens=1))
            wait_for(lambda number=number: queue.waiting == number)
        refused = server.complete(text, max_tokens=1)
        assert code(refused) == (429, "too_many_prompts")
        assert refused.headers["retry-after"]
        assert server.chat("short ones need no line", max_tokens=1).status_code == 200
        for sock in clients[at_once:]:
            sock.close()
        wait_for(lambda: queue.waiting == at_once)
        for sock in clients[:at_once]:
            sock.close()

        def pass_the_gate() -> bool:
            """One opening may let several pass, or none."""
            with contextlib.suppress(OSError):
                os.close(os.open(tmp_path / "gate", os.O_WRONLY | os.O_NONBLOCK))
            return queue.waiting == 0

        wait_for(pass_the_gate, 60)
        server.idle()
        assert engine.submitted[-1].entry["max_tokens"] == 1
        assert len(engine.submitted) == 1, "of the chat"
        metrics = server.client.get("/metrics").text
        assert 'blinkpy_preparations_refused_total{worker="0"} 1' in metrics


def forks(server: RunningServer) -> list[int]:
    """Processes that prepare requests of this server."""
    process = server.server.app.service._queue._forks._forks.process
    if process is None:
        return []
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def computed(pid: int) -> float:
    """CPU time of a process, in seconds."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


SLOW = secrets.token_urlsafe(6 << 20)  # seconds of a tokenizer: no word comes twice


def test_clients_that_leave_end_the_processes_that_work_for_them(folder) -> None:
    """H5: they leave the queue and take no more time."""
    facts = FACTS._replace(max_model_len=1 << 22, num_pages=1 << 22)
    with FakeEngine(facts=facts) as engine, serving(engine, folder, max_body_bytes=1 << 24) as server:
        queue, request = server.server.app.service._queue, completion_bytes(prompt=SLOW, max_tokens=1)
        clients = [socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) for _ in range(6)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda sock: sock.sendall(request), clients))
        working = list[int]()

        def stand() -> bool:
            """Whether all places have a process that is stopped within its work. The first ones may have ended."""
            working[:] = forks(server)
            with contextlib.suppress(ProcessLookupError):
                for pid in working:
                    os.kill(pid, signal.SIGSTOP)
            return len(working) == preparation_queue.AT_ONCE and forks(server) == working

        wait_for(stand)
        assert queue.waiting >= preparation_queue.AT_ONCE
        for sock in clients:
            sock.close()
        wait_for(lambda: queue.waiting == 0)
        before = sum(map(computed, working))
        for pid in working:
            os.kill(pid, signal.SIGCONT)

        def ended() -> bool:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                assert sum(map(computed, working)) < before + 0.5, "they go on"
            return not forks(server)

        wait_for(ended)
        assert server.complete([7], max_tokens=1, user="u" * LARGE).status_code == 200, "the next one is served"


@pytest.mark.parametrize("limit", [{"prepare_ms": 300, "prepare_mib": 1 << 14}, {"prepare_mib": 64}], ids=["time", "memory"])
def test_a_request_that_exceeds_its_resources_is_ended(folder, limit) -> None:
    facts = FACTS._replace(max_model_len=1 << 22, num_pages=1 << 22)
    with FakeEngine(facts=facts) as engine, serving(engine, folder, max_body_bytes=1 << 24, **limit) as server:
        assert code(server.complete(SLOW)) == (413, "too_costly")
        assert server.complete([7], max_tokens=1, user="u" * LARGE).status_code == 200


def test_a_dead_process_for_jobs_is_replaced(engine, folder) -> None:
    with serving(engine, folder) as server:
        for _ in range(2):
            assert server.complete([7], max_tokens=1, user="u" * LARGE).status_code == 200
            process = server.server.app.service._queue._forks._forks.process
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.parametrize("kills", [1, 2])
def test_a_preparation_that_the_kernel_kills_runs_once_more(folder, kills: int) -> None:
    """As it does when memory runs out. After a second time the client may try later: the request is not at fault."""
    facts = FACTS._replace(max_model_len=1 << 22, num_pages=1 << 22)
    with (
        FakeEngine(facts=facts) as engine,
        serving(engine, folder, max_body_bytes=1 << 24) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(server.client.post, "/tokenize", json={"prompt": secrets.token_urlsafe(1 << 20)})
        killed = set[int]()
        for _ in range(kills):
            wait_for(lambda: set(forks(server)) - killed)
            (fork,) = set(forks(server)) - killed
            os.kill(fork, signal.SIGKILL)
            killed.add(fork)
        answer = asked.result(60)
        assert answer.status_code == (200 if kills == 1 else 503)
        assert kills == 1 or answer.json()["error"]["code"] == "out_of_resources"
        assert server.complete([7], max_tokens=1, user="u" * LARGE).status_code == 200


def test_large_bodies_leave_the_event_loop_alone(folder) -> None:
    """H4: bodies of many empty lists, which take seconds in all. A parser on the loop would make them its own."""
    body = b'{"metadata":{"a":[' + b"[]," * 800_000 + b"[]]}}"
    with (
        FakeEngine(facts=FACTS._replace(lease_ms=30_000)) as engine,  # a busy machine alone exceeds a short lease
        serving(engine, folder, max_body_values=1 << 30) as server,
        ThreadPoolExecutor(4) as pool,
    ):
        url = f"{server.url}/v1/completions"
        before = thread_seconds(server)
        answers = [pool.submit(httpx.post, url, content=body, headers=JSON, timeout=120) for _ in range(3)]
        assert server.complete([7], max_tokens=60).status_code == 200
        assert [code(answer.result(120)) for answer in answers] == [(400, "missing_required_parameter")] * 3
        assert engine.pairs[0].epoch == 1, "the lease held"
        computed, parsed = thread_seconds(server) - before, -time.thread_time()
        for _ in answers:
            orjson.loads(body)
        parsed += time.thread_time()
        assert computed < parsed * 2 / 3, "what the loop takes to receive them is far less"


def thread_seconds(server: RunningServer) -> float:
    """CPU time of the thread with the server's event loop so far."""
    done: Future[float] = Future()
    server.engine_client._loop.call_soon_threadsafe(lambda: done.set_result(time.thread_time()))
    return done.result(60)


# ---- bodies that do not end ------------------------------------------------------------------------------------------


def test_space_is_shared_among_changing_holders() -> None:
    made, gone = [], []
    budget = ByteBudget(100, lambda: (made.append(ApiError(503, "full")), made[-1])[1])
    for name in "abc":
        budget.hold(name, 30, lambda error, name=name: gone.append((name, error)))
    budget.hold("b", 35, lambda error: gone.append(("b", error)))
    assert (budget.used, gone) == (95, [])
    budget.hold("d", 10, lambda error: gone.append(("d", error)))
    assert (budget.used, budget.given_up, gone) == (75, 1, [("a", made[0])])
    budget.release("b")
    budget.release("b")
    assert budget.used == 40
    budget.hold("c", 200, lambda error: gone.append(("c", error)))
    assert (budget.used, budget.given_up, gone[-1]) == (10, 2, ("c", made[1]))
    assert made[0] is not made[1], "an error that is raised twice keeps what both had"
    closing = ApiError(503, "closing")
    budget.clear(lambda: closing)
    assert (budget.used, budget.given_up, gone[-1]) == (0, 2, ("d", closing)), "that one did not give way for want of room"


@pytest.mark.parametrize("largest", [False, True])
def test_a_growing_holder_keeps_its_age(largest: bool, rng: np.random.Generator) -> None:
    """A budget, compared with a list of its holders in the order in which they began."""
    budget, gone = ByteBudget(100, lambda: ApiError(503, "full"), largest), list[int]()
    held = list[tuple[int, int]]()  # name, size
    for _ in range(1000):
        name, size = int(rng.integers(8)), int(rng.integers(1, 60))
        if rng.random() < 0.2:
            budget.release(name)
            held = [one for one in held if one[0] != name]
            continue
        budget.hold(name, size, lambda error, name=name: gone.append(name))
        known = [(other, size if other == name else its) for other, its in held]
        held = known if name in dict(held) else [*held, (name, size)]
        wanted = list[int]()
        while sum(its for _, its in held) > 100:
            out = max(held, key=lambda one: one[1]) if largest else held[0]
            held.remove(out)
            wanted.append(out[0])
        assert (gone, budget.used) == (wanted, sum(its for _, its in held))
        gone.clear()


def test_a_line_is_empty_again_however_its_bodies_leave_it(folder: Path, rng: np.random.Generator) -> None:
    """Prepared, refused, failed or given up: the next ones find as much room as the first."""
    queue = preparation_queue.PreparationQueue(ANY, Config(), folder, Metrics())
    limits = EngineLimits(1000, 1000)

    async def job(kind: str, body: bytearray, limits: EngineLimits) -> str:
        if kind == "fails":
            raise ApiError(400, "no")
        await asyncio.sleep(60 if kind == "stays" else 0)
        return kind

    async def main() -> None:
        queue._in_thread = queue._forks.run = job  # type: ignore[method-assign,assignment]
        for line, size in ((queue._middling, 1), (queue._large, preparation_queue.THREAD_BYTES + 1)):
            for _ in range(5):
                kinds = rng.choice(["fine", "fails", "stays"], 12).tolist()
                tasks = [asyncio.ensure_future(queue.run(kind, bytearray(size), limits, ASKER)) for kind in kinds]
                await asyncio.sleep(0.01)
                assert line.bytes == size * line.waiting
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                assert (line.used, line.bytes, queue.waiting) == (0, 0, 0)
            line.most_bytes = size
            assert await queue.run("fine", bytearray(size), limits, ASKER) == "fine"
            line.most_bytes = size - 1
            with pytest.raises(ApiError, match="busy"):
                await queue.run("fine", bytearray(size), limits, ASKER)
            assert (line.waiting, line.bytes) == (0, 0)

    try:
        asyncio.run(main())
    finally:
        queue.close()


def test_in_processes_one_owner_leaves_places_to_others(folder: Path) -> None:
    """However many large bodies it sends: their preparation takes long."""
    queue = preparation_queue.PreparationQueue(ANY, Config(), folder, Metrics())
    limits, inside, free = EngineLimits(1000, 1000), list[str](), asyncio.Event()

    async def job(kind: str, body: bytearray, limits: EngineLimits) -> None:
        inside.append(kind)
        await free.wait()

    async def main() -> None:
        queue._forks.run = job  # type: ignore[method-assign,assignment]
        body = bytearray(preparation_queue.THREAD_BYTES + 1)
        owners = ["greedy"] * 3 * queue._large._count + ["honest"] * 2
        tasks = [asyncio.ensure_future(queue.run(name, body, limits, Asker(name))) for name in owners]
        await asyncio.sleep(0.01)
        half = queue._large._count // 2
        assert inside.count("greedy") == half and inside.count("honest") == min(2, half)
        free.set()
        await asyncio.gather(*tasks)

    try:
        asyncio.run(main())
    finally:
        queue.close()


def test_unfinished_bodies_share_a_budget(engine, folder) -> None:
    """The slowest request is dropped, and clients that send whole requests are served."""
    head = COMPLETIONS_HEAD + b"content-length: 400000\r\n\r\n"
    with serving(engine, folder, body_budget_mib=2, max_body_bytes=1 << 20) as server:
        socks = [socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S) for _ in range(5)]
        budget = server.server.connections.bodies
        for i, sock in enumerate(socks):
            sock.sendall(head + b" " * 300_000)
            wait_for(lambda i=i: budget.used + 300_000 * budget.given_up == 300_000 * (i + 1))
            assert server.complete([7], max_tokens=1).status_code == 200
        for sock in socks[:2]:
            answer = sock.recv(65536)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after" in answer
            assert b"too_many_bodies" in answer
        assert budget.used == 900_000
        wait_for(lambda: 'blinkpy_bodies_given_up_total{worker="0"} 2' in server.client.get("/metrics").text)
        socks[4].sendall(b" " * 100_000)
        assert socks[4].recv(65536).startswith(b"HTTP/1.1 400"), "it has arrived: an empty body"
        for sock in socks:
            sock.close()
        wait_for(lambda: budget.used == 0)


def test_a_dropped_body_is_not_counted_again() -> None:
    """Its next bytes have arrived already. Counted, they would drop a younger body of its key."""

    async def main() -> None:
        exchange, budget, gone = object.__new__(Exchange), ByteBudget(10, too_many_bodies), list[ApiError]()
        connections = SimpleNamespace(bodies=budget)
        exchange.connection = SimpleNamespace(all=connections, options=SimpleNamespace(body_timeout_s=60))  # type: ignore[assignment]
        exchange.asker, pieces = Asker("a"), iter([True, True, False])

        async def read_piece(body: bytearray, limit: int) -> bool:
            if body:
                budget.hold("younger", 5, gone.append, "a")
            body += b"x" * 6
            return next(pieces)

        exchange._read_piece = read_piece  # type: ignore[method-assign]
        with pytest.raises(ApiError, match="Too many request bodies"):
            await exchange._read_slowly(bytearray(), 100)
        assert (gone, budget.used, budget.given_up) == ([], 5, 1)

    asyncio.run(main())


def test_bodies_of_one_key_leave_room_to_the_oldest_body_of_another(engine, folder, tmp_path: Path) -> None:
    """Each byte counts for its key, and the key with the most bytes loses a body."""
    keys, options = write_keys(tmp_path / "keys.toml", greedy={}, honest={}), {"body_budget_mib": 2, "max_body_bytes": 1 << 20}
    with serving(engine, folder, api_keys=str(keys), body_timeout_s=600, **options) as server, contextlib.ExitStack() as stack:
        budget = server.server.connections.bodies

        def send(name: str, size: int) -> socket.socket:
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            head = COMPLETIONS_HEAD + f"authorization: Bearer key-of-{name}\r\ncontent-length: 400000\r\n\r\n".encode()
            sock.sendall(head + b" " * size)
            return sock

        honest = send("honest", 200_000)
        wait_for(lambda: budget.used == 200_000)
        for _ in range(4):
            send("greedy", 300_000)
        wait_for(lambda: (budget.given_up, budget.used) == (2, 800_000))
        honest.sendall(b" " * 200_000)
        assert honest.recv(65536).startswith(b"HTTP/1.1 400"), "it has arrived: an empty body"


@pytest.mark.parametrize("fate", ["too large", "no JSON", "too many"])
def test_failed_bodies_are_not_retained(engine, folder, fate) -> None:
    """No error and no frame of one: with the collector off, refused bodies leave less memory behind than a third of them have."""
    size, count = 900_000, 16
    body = b"x" * size
    head = COMPLETIONS_HEAD + b"content-length: %d\r\n\r\n" % size
    if fate == "too large":
        head, body = COMPLETIONS_HEAD + b"transfer-encoding: chunked\r\n\r\n", b"%x\r\n" % (1 << 21) + b" " * ((1 << 20) + 70_000)

    def one(_: int) -> bytes:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            with contextlib.suppress(OSError):
                sock.sendall(head + body)
                return sock.recv(1000)
            return b""

    with serving(engine, folder, body_budget_mib=64, max_body_bytes=1 << 20) as server, ThreadPoolExecutor(4) as pool:
        if fate == "too many":
            server.server.app.service._queue._large.most_waiting = 0
        list(pool.map(one, range(4)))
        gc.collect()
        gc.disable()
        tracemalloc.start()
        try:
            answers = list(pool.map(one, range(count)))
            wait_for(lambda: server.server.app.running == 0, 60)
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
            gc.enable()
    assert not any(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    assert kept < count * size / 3, kept


def test_an_abandoned_body_is_freed(engine, folder) -> None:
    """Its error keeps no frame that has it; and each error is a new one."""
    errors: list[ApiError] = []

    class Seen(ByteBudget):
        def hold(self, holder, size, give_up, owner="") -> None:
            super().hold(holder, size, lambda error: (errors.append(error), give_up(error)), owner)

    with serving(engine, folder, body_budget_mib=1, max_body_bytes=1 << 20) as server:
        budget = server.server.connections
        budget.bodies = Seen(500_000, budget.bodies.error)
        head = COMPLETIONS_HEAD + b"content-length: 1000000\r\n\r\n"
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=BUSY_S))
                sock.sendall(head + b" " * 300_000)
            wait_for(lambda: len(errors) >= 3, 30)
        wait_for(lambda: server.server.app.running == 0, 30)
    assert len({id(error) for error in errors}) == len(errors)
    assert [error.__traceback__ for error in errors] == [None] * len(errors)


# ---- lengths before the tokenizer ------------------------------------------------------------------------------------


def test_the_least_number_of_tokens_is_one(rng, folder, tmp_path) -> None:
    """Never more than the encoder finds, and near to it for texts of long tokens."""
    pieces = ["the", " lazy", " dog", "é", "日本", "😀", " ", "  ", "\n", "<s>", "<|start|>", "a\u0301", "ᄀ", "ᅡ", "ᆨ"]
    fallback = Tokenizer(write_model(tmp_path / "fallback", byte_fallback_json()))
    composing = Encoder.from_file(str(folder / "tokenizer.json"))
    composing.normalizer = normalizers.Sequence([normalizers.NFC()])
    composed = Tokenizer(write_model(tmp_path / "composed", composing.to_str()))
    for tokenizer in (Tokenizer(folder), fallback, composed):
        for _ in range(100):
            text = "".join(rng.choice(pieces, int(rng.integers(1, 60))))
            for parse_special in (False, True):
                encoded = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
                assert tokenizer.least_tokens(text) <= len(encoded), text
        assert tokenizer.least_tokens("x" * 10_000) >= 100


def test_nothing_is_known_of_encoders_that_drop_text(folder, tmp_path) -> None:
    assert Tokenizer(write_model(tmp_path / "words", word_piece_json())).least_tokens("x" * 10_000) == 0
    for name, value in (("normalizer", normalizers.Strip()), ("pre_tokenizer", pre_tokenizers.WhitespaceSplit())):
        encoder = Encoder.from_file(str(folder / "tokenizer.json"))
        setattr(encoder, name, value)
        assert Tokenizer(write_model(tmp_path / name, encoder.to_str())).least_tokens("x" * 10_000) == 0


def test_a_text_beyond_the_context_is_refused_before_it_is_encoded(engine, folder, monkeypatch) -> None:
    with FakeEngine() as small, serving(small, folder) as server:
        monkeypatch.setattr(server.server.app.service.tokenizer, "encode", lambda *arguments, **options: 1 // 0)
        for answer in (server.complete("x" * 60_000), server.chat("x" * 60_000)):
            assert code(answer) == (400, "context_length_exceeded")
            assert "at least" in answer.json()["error"]["message"]
