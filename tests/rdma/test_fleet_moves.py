"""Two engines that one front end reaches over RDMA: one is stopped, then the other one killed, under streams. Each client gets
what it gets undisturbed, which is computed here once more: the null engine's tokens follow from seed and position."""

import json
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import numpy as np
import pytest
from rdma.processes import engine, free_address, frontends
from support.commands import START_S
from support.waiting import wait_for

from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.engine.devices.null_step import synthetic_token
from blinkpy.models.weights.model_folder import DEMO_FOLDER

pytestmark = pytest.mark.timeout(1200)
STREAMS, TOKENS = 8, 120
ENGINE = ("--device", "null", "--null-step-us", "30000", "--max-model-len", "512", "--shutdown-s", "0", "--lease-ms", "60000")


def streamed(url: str, body: dict[str, Any], events: list[int]) -> tuple[str, str]:
    """Text and end of a stream; events: gets an entry for each of its events."""
    text, end = "", "none"
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=200) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                events.append(1)
                text += event["choices"][0]["text"]
                end = event["choices"][0]["finish_reason"] or end
    return text, end


def play(url: str, bodies: list[dict[str, Any]], disturb: Callable[[], None] = lambda: None) -> list[tuple[str, str]]:
    """The answers to all at once; disturb is called after a third of what comes."""
    answers, events = [("", "")] * len(bodies), list[int]()

    def ask(number: int) -> None:
        answers[number] = streamed(url, bodies[number], events)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    while len(events) < STREAMS * TOKENS // 3 and any(thread.is_alive() for thread in threads):
        time.sleep(0.01)
    disturb()
    for thread in threads:
        thread.join()
    return answers


def test_streams_survive_engines_that_are_stopped_and_killed(rng: np.random.Generator) -> None:
    vocabulary = json.loads((DEMO_FOLDER / "config.json").read_text())["vocab_size"]
    decode, low = Tokenizer(DEMO_FOLDER).decode, vocabulary // 16
    bodies = [
        {
            "model": "demo", "prompt": rng.integers(low, vocabulary, int(rng.integers(1, 60))).tolist(), "max_tokens": TOKENS,
            "stream": True, "ignore_eos": True, "seed": int(rng.integers(1 << 31)),
        }
        for _ in range(STREAMS)
    ]  # fmt: skip
    expected = [
        (decode([synthetic_token(body["seed"], len(body["prompt"]) + i, low, vocabulary) for i in range(TOKENS)]), "length")
        for body in bodies
    ]
    addresses = [free_address() for _ in range(2)]
    names = (word for address in addresses for word in ("--engine", address))
    quick = ("--engine-timeout-ms", "10000", "--no-access-log")
    with (
        engine(*ENGINE, listen=addresses[0], wait=False) as (first, _),
        engine(*ENGINE, listen=addresses[1], wait=False) as (second, _),
        frontends(1, "--transport", "rdma", *names, *quick) as ((front, client),),
    ):
        url = str(client.base_url).rstrip("/")

        def metric(name: str) -> list[int]:
            text = httpx.get(f"{url}/metrics", timeout=60).text
            return [int(value) for value in re.findall(rf"^blinkpy_{name}(?:\{{[^}}]*\}})? (\d+)$", text, re.M)]

        def both() -> bool:
            return metric("each_engine_up") == [1, 1]

        def said() -> str:
            return "".join(line for command in (front, first, second) for line in command.said[-20:])

        wait_for(both, 1.5 * START_S, said)
        calm = play(url, bodies)
        assert [(text.rstrip("\ufffd"), end) for text, end in calm] == [(text.rstrip("\ufffd"), end) for text, end in expected]
        assert play(url, bodies, lambda: first.send(signal.SIGSTOP)) == calm
        after_stop = metric("moves_total")
        assert sum(after_stop) > 0, "nothing was there to move"
        first.send(signal.SIGCONT)
        wait_for(both, START_S, said)
        assert play(url, bodies, second.kill) == calm
        assert sum(metric("moves_total")) > sum(after_stop), "nothing was there to move"
        assert metric("moves_refused_total") in ([], [0])
        wait_for(lambda: sum(metric("requests_in_flight")) == 0, 20, "all slots are free")
