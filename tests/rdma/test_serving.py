"""HTTP request -> front end -> RDMA write -> engine -> RDMA read -> stream: the same bytes as over shared memory."""

from __future__ import annotations

import json
import signal
import time

import httpx
import numpy as np
import pytest
from rdma.processes import Command, engine, frontend, serving, wait_until

WORDS = ["whale", "sea", "harpoon", "London", "fog", "lamp", "garden", "letter", "captain", "winter"]


def requests(rng: np.random.Generator, count: int, words: int) -> list[dict]:
    """Bodies of completion requests of less than so many words: lengths, sampling and log probabilities at random."""
    made = []
    for i in range(count):
        body = {
            "model": "demo",
            "prompt": " ".join(rng.choice(WORDS, int(rng.integers(1, words)))),
            "max_tokens": int(rng.integers(1, 24)),
            "temperature": float(rng.choice([0.0, 0.8])),
            "seed": int(rng.integers(0, 2**31)),
            "stream": bool(i % 2),
        }
        if i % 3 == 0:
            body["logprobs"] = int(rng.integers(0, 6))
        made.append(body)
    return made


def said(answer: httpx.Response) -> list[object]:
    """What an answer says, without ids and times."""
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return [(choice["text"], choice["logprobs"], choice["finish_reason"]) for choice in answer.json()["choices"]]
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    choices = [choice for line in lines[:-1] for choice in json.loads(line)["choices"]]
    logprobs = [value for c in choices if c["logprobs"] for value in zip(*c["logprobs"].values(), strict=True)]
    return ["".join(c["text"] for c in choices), logprobs, choices[-1]["finish_reason"]]


ONE_BY_ONE, AT_ONCE = (("shm",), ("rdma",)), (("shm", "rdma"),)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("device", "count", "words", "order"), [("null", 24, 120, AT_ONCE), ("cpu", 3, 8, ONE_BY_ONE)])
def test_answers_are_the_same_as_over_shared_memory(device, count, words, order, rng) -> None:
    bodies = requests(rng, count, words)
    got = {}
    # A step of the model takes seconds in emulation.
    options = ("--device", device, "--threads", "1", "--max-model-len", "512", "--cq-entries", "256", "--lease-ms", "60000")
    for transports in order:
        with serving(transports, options, ("--engine-timeout-ms", "60000")) as clients:
            for way, client in clients.items():
                got[way] = [said(client.post("/v1/completions", json=body)) for body in bodies]
    assert got["rdma"] == got["shm"]
    assert any(any(answer) for answer in got["rdma"])


def health(client: httpx.Client) -> int:
    """The status, over a connection of its own: a kept one may just be ending."""
    return httpx.get(client.base_url.join("/health"), timeout=60).status_code


def test_front_ends_and_engines_come_and_go() -> None:
    """One engine, one pair: a killed front end's pair is free when its lease ends; a killed engine is noticed, and replaced."""
    body = {"model": "demo", "prompt": "fog", "max_tokens": 4}
    options = ("--device", "null", "--lease-ms", "2000", "--null-step-us", "2000")
    with engine(*options) as (first, way):
        address = way[-1]
        with frontend(*way, "--log-level", "warning") as (front, client):
            assert client.post("/v1/completions", json=body).status_code == 200
            front.kill()
        with frontend(*way) as (front, client):
            took = wait_until(lambda: health(client) == 200, 20, "a pair of the killed front end")
            print(f"the pair of a killed front end was given again after {took:.1f} s")
            with client.stream("POST", "/v1/completions", json=body | {"max_tokens": 500, "stream": True}) as answer:
                lines = answer.iter_lines()
                next(lines)
                first.kill()
                rest = "".join(lines)
            assert '"error"' in rest, rest
            took = wait_until(lambda: health(client) == 503, 10, "the loss of the engine")
            assert client.post("/v1/completions", json=body).status_code == 503
            with engine(*options, listen=address):
                took = wait_until(lambda: health(client) == 200, 20, "the new engine")
                assert client.post("/v1/completions", json=body).status_code == 200


def test_a_stopped_front_end_loses_its_lease_and_comes_back() -> None:
    options = ("--device", "null", "--lease-ms", "1000", "--null-step-us", "5000")
    with engine(*options) as (_, way), frontend(*way) as (front, client):
        body = {"model": "demo", "prompt": "fog", "max_tokens": 400, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            next(lines)
            front.send(signal.SIGSTOP)
            time.sleep(3)  # three leases
            front.send(signal.SIGCONT)
            assert '"error"' in "".join(lines)
        wait_until(lambda: health(client) == 200, 20, "the front end is back")
        assert client.post("/v1/completions", json=body | {"max_tokens": 3, "stream": False}).status_code == 200


def test_what_can_not_work_is_said_in_one_line() -> None:
    command = Command("engine", "--transport", "rdma", "--listen", "127.0.0.1:0", "--rdma-device", "mlx5_9", "--device", "null")
    assert command.wait(60) == 2
    assert any("blinkpy: error: there is no RDMA device 'mlx5_9'; this machine has rxe0" in line for line in command.said)


def test_doctor_finds_this_machine_ready() -> None:
    command = Command("doctor")
    assert command.wait(60) == 0
    said = "".join(command.said)
    assert "RDMA port" in said
    assert "RoCE v2" in said
    assert "Ready for --transport rdma." in said
