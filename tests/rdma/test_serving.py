"""HTTP request -> front end -> RDMA write -> engine -> RDMA read -> stream: the same bytes as over shared memory."""

import contextlib
import secrets
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest
from rdma.limits import NIGHTLY, TEST_S
from rdma.processes import counter, engine, free_address, frontends, health, serving
from support.commands import START_S, Command
from support.front_end.completion_requests import requests, said
from support.waiting import wait_for

PATIENT = ("--engine-timeout-ms", "20000")  # a busy machine keeps an engine waiting
pytestmark = pytest.mark.timeout(TEST_S)


ENGINES = {"null": (16, 100, 16), "cpu": (2, 6, 4)}  # requests, words and tokens; a step of a model takes seconds in emulation


def test_answers_are_the_same_as_over_shared_memory(rng: np.random.Generator, left_out: Callable[[str], None]) -> None:
    """Answers of null engines; nightly, also of engines with a model at the same addresses, which take ten minutes in
    emulation."""
    if not NIGHTLY:
        left_out("engines with a model: the null engine's answers use the same link")
    with serving("--engine-timeout-ms", "60000") as engines, ThreadPoolExecutor() as pool:
        for device in ENGINES if NIGHTLY else ("null",):
            bodies = requests(rng, *ENGINES[device])

            def answers(client: httpx.Client, bodies: list[dict] = bodies) -> list[list[object]]:
                return [said(client.post("/v1/completions", json=body)) for body in bodies]

            options = ("--threads", "1", "--max-model-len", "512", "--cq-entries", "256", "--lease-ms", "60000")
            with engines("--device", device, *options) as clients:
                over_shm, over_rdma = pool.map(answers, clients.values())
            assert over_rdma == over_shm, device
            assert any(any(answer) for answer in over_rdma)


def test_killed_front_ends_and_engines_are_replaced(tmp_path: Path, left_out: Callable[[str], None]) -> None:
    """One engine, one pair, one key: the pair of a killed front end is free once its lease ends; a killed engine is noticed, and
    replaced. Only nightly: by day, a stopped front end loses its lease, and engines of a fleet are killed and replaced."""
    if not NIGHTLY:
        left_out("a killed front end, and the only engine killed: four process starts, half a minute each in emulation")
        return
    body, address = {"model": "demo", "prompt": "fog", "max_tokens": 4}, free_address()
    keyed = ("--link-key-file", str(tmp_path / "link.key"))
    (tmp_path / "link.key").write_text(secrets.token_hex(32))
    (tmp_path / "link.key").chmod(0o600)
    options = ("--device", "null", "--lease-ms", "8000", "--null-step-us", "20000", *keyed)
    fronts = ("--log-level", "warning", *PATIENT, *keyed)
    with engine(*options, listen=address, wait=False) as (first, transport), frontends(2, *transport, *fronts) as both:

        def one_serves() -> bool:
            """Whether one front end has the pair, and the other reports that all pairs are in use. On a busy machine, it may
            report another reason for a moment."""
            both.sort(key=lambda front: health(front[1]))
            texts = [client.get("/health").text for _, client in both]
            return health(both[0][1]) == 200 and "all 1 queue pairs are in use" in texts[1]

        wait_for(one_serves, START_S, "a front end with the pair, and one without")
        (front, served), (_, client) = both
        assert served.post("/v1/completions", json=body).status_code == 200
        front.kill()
        took = wait_for(lambda: health(client) == 200, START_S, "the pair of the killed front end")
        print(f"the pair of a killed front end was given again after {took:.1f} s")
        with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 500, "stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            first.kill()
            rest = "".join(lines)
        assert '"error"' in rest, rest
        wait_for(lambda: health(client) == 503, START_S, "the loss of the engine")
        assert client.post("/v1/completions", json=body).status_code == 503
        with engine(*options, listen=address):
            wait_for(lambda: health(client) == 200, START_S, "the new engine")
            assert client.post("/v1/completions", json=body).status_code == 200


def test_a_stopped_front_end_loses_its_lease_and_reattaches() -> None:
    name, address = f"test-{secrets.token_hex(4)}", free_address()
    options = ("--name", name, "--device", "null", "--lease-ms", "15000", "--null-step-us", "20000")
    body = {"model": "demo", "prompt": "fog", "max_tokens": 1500, "stream": True}  # longer than the lease
    with (
        engine(*options, listen=address, wait=False) as (own, transport),
        frontends(1, *transport, *PATIENT) as ((front, client),),
        contextlib.ExitStack() as stack,
    ):

        def first_lines() -> Iterator[str]:
            """A stream's lines after its first token: only then the front end holds its lease, on a busy machine, too."""
            wait_for(lambda: health(client) == 200, START_S, "the engine")
            lines = stack.enter_context(client.stream("POST", "/v1/completions", json=body)).iter_lines()
            return lines if '"error"' not in next(lines) else first_lines()

        lines, before = first_lines(), counter(name, "leases_expired")
        front.send(signal.SIGSTOP)
        try:
            wait_for(
                lambda: counter(name, "leases_expired") > before, START_S, lambda: f"no lease ended: {own.said}, {front.said}"
            )
        finally:
            front.send(signal.SIGCONT)
        assert '"error"' in "".join(lines)
        wait_for(lambda: health(client) == 200, START_S, "the front end is back")
        assert client.post("/v1/completions", json=body | {"max_tokens": 3, "stream": False}).status_code == 200


def test_doctor_finds_this_machine_ready() -> None:
    command = Command("doctor")
    assert command.wait(START_S) == 0
    said = "".join(command.said)
    assert "RDMA port" in said
    assert "RoCE v2" in said
    assert "Ready for --transport rdma." in said
