"""Requests for many slots, and for places of the engine that are all taken, hold up nothing that does not need them."""

import contextlib
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.front_end.fake_engine import FACTS, FakeEngine
from support.front_end.fake_engine import SIZES as BASE
from support.front_end.http_server import RunningServer, completion_bytes, serving
from support.front_end.tenants import bearer, write_keys
from support.waiting import wait_for

from blinkpy.dpu.admission import admission

SIZES = replace(BASE, prompt_tokens=4096)
WORDS = FACTS._replace(grammar_share=2, grammar_words=512, grammar_arena=1024, max_model_len=4096, num_pages=2048)


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(sizes=SIZES, facts=WORDS, step_s=0.002) as engine:
        yield engine


def stream(stack: contextlib.ExitStack, server: RunningServer, **fields: object) -> socket.socket:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
    sock.sendall(completion_bytes(prompt=[7], stream=True, ignore_eos=True, **fields))
    return sock


@pytest.mark.parametrize("streamed", [True, False])
def test_a_request_for_all_slots_gets_them_one_by_one(engine, folder, streamed: bool) -> None:
    """Next to streams that hold most of them: other requests are served meanwhile, and all its choices come in
    the end."""
    slots = engine.sizes.slots
    with serving(engine, folder) as server, contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        held = [stream(stack, server, max_tokens=4000) for _ in range(slots - 1)]
        for sock in held:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        large = pool.submit(server.complete, [8], n=slots, max_tokens=3, stream=streamed, temperature=0)
        for _ in range(5):
            assert server.complete([9], max_tokens=1).status_code == 200, "it waits for the one of many slots"
        answer = large.result(60)
        assert answer.status_code == 200
        assert sum(one.entry["max_tokens"] == 3 for one in engine.submitted) == slots, "each choice ran once"
        if not streamed:
            assert [choice["index"] for choice in answer.json()["choices"]] == list(range(slots))
            assert answer.json()["usage"]["completion_tokens"] == 3 * slots
        for sock in held:
            sock.close()
        server.idle()
        assert server.server.app.service.admission._reserved == 0


def test_a_tenant_s_request_for_all_slots_completes_though_some_are_for_others(engine, folder, tmp_path, monkeypatch) -> None:
    """It gets the slots of its ended choices, and another tenant enters meanwhile."""
    monkeypatch.setattr(admission, "RESERVED", 4)
    slots, keys = engine.sizes.slots, write_keys(tmp_path / "keys.toml", a={}, b={})
    with serving(engine, folder, api_keys=str(keys)) as server, ThreadPoolExecutor(2) as pool:
        ask = {"prompt": [8], "n": slots, "max_tokens": 20, "ignore_eos": True}
        large = [pool.submit(server.client.post, "/v1/completions", json=ask, headers=bearer("a")) for _ in range(2)]
        wait_for(lambda: engine.submitted)
        small = server.client.post("/v1/completions", json={"prompt": [9], "max_tokens": 1}, headers=bearer("b"))
        assert small.status_code == 200
        answers = [one.result(50) for one in large]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert all(len(answer.json()["choices"]) == slots for answer in answers)
        server.idle()
        assert server.server.app.service.admission._used_slots == {}


def test_a_disconnect_before_all_slots_arrive_frees_them_all(engine, folder) -> None:
    slots = engine.sizes.slots
    with serving(engine, folder) as server, contextlib.ExitStack() as stack:
        held = [stream(stack, server, max_tokens=4000) for _ in range(slots - 2)]
        for sock in held:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        large = stream(stack, server, n=slots, max_tokens=3000)
        assert large.recv(100).startswith(b"HTTP/1.1 200")
        large.close()
        for sock in held:
            sock.close()
        server.idle()
        entered = server.server.app.service.admission
        wait_for(lambda: not entered._running)
        assert (entered._reserved, entered._queue.requests, entered._waiting) == (0, 0, {})
        assert server.client.get("/load").json() == {"server_load": 0}
        assert sum(one.entry["max_tokens"] == 3000 for one in engine.submitted) <= 4, "choices without a slot never run"
        assert server.complete([9], max_tokens=1).status_code == 200


def test_token_rules_that_lack_a_place_hold_back_no_plain_request(engine, folder) -> None:
    with serving(engine, folder) as server, contextlib.ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        held = [stream(stack, server, max_tokens=4000, logit_bias={str(token): 1}) for token in (70, 71)]
        for sock in held:
            assert sock.recv(100).startswith(b"HTTP/1.1 200")
        waits = pool.submit(server.complete, [7], max_tokens=1, logit_bias={"72": 1})
        metrics = server.server.app.service.metrics
        wait_for(lambda: metrics.gauge_of_all("waiting_requests") == 1)
        for fields in ({}, {"logit_bias": {"70": 1}}):
            assert server.complete([7], max_tokens=1, **fields).status_code == 200
        assert not waits.done()
        held[0].close()
        assert waits.result(60).status_code == 200
