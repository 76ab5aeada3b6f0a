"""One engine on this machine, two front ends one after another, an emulated one and one on this processor: the same answers.

Prompts, page hashes and sampling parameters go from aarch64 to x86 through shared memory, and completions back.
"""

import os
import re
import secrets
import sys

import httpx
import pytest
from aarch64.suite import PYTHON_HERE
from rdma.processes import URL, counter, health
from support.commands import START_S, Command
from support.front_end.completion_requests import requests, said
from support.waiting import wait_for

READY = re.compile("is ready after")
PYTHON = os.environ.get(PYTHON_HERE)
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="needs an emulated Python: `make test-aarch64` makes one"),
]


def answers_of(python: str, name: str, bodies: list[dict]) -> list[list[object]]:
    """The answers of a front end on a given Python, from the engine with a name."""
    front = Command("frontend", "demo", "--name", name, "--port", "0", "--engine-timeout-ms", "60000", python=python)
    try:
        with httpx.Client(base_url=front.find(URL)[1], timeout=120) as client:
            wait_for(lambda: health(client) == 200, START_S, lambda: f"the engine; it was said: {front.said}")
            return [said(client.post("/v1/completions", json=body)) for body in bodies]
    finally:
        front.end()


# After a prefix hit, the model's numbers are rounded differently; synthetic tokens are not.
@pytest.mark.parametrize(("device", "prefixes"), [("null", True), ("cpu", False)])
def test_answers_equal_those_of_a_native_front_end(device, prefixes, rng) -> None:
    assert PYTHON is not None
    name, bodies = f"test-{secrets.token_hex(4)}", requests(rng, 24, 120, 24)
    options = ["--max-model-len", "512", "--lease-ms", "60000", "--threads", "1"]
    options += [] if prefixes else ["--no-enable-prefix-caching"]
    engine = Command("engine", "demo", "--device", device, "--name", name, *options)
    try:
        engine.find(READY)
        emulated = answers_of(PYTHON, name, bodies)
        found = counter(name, "prefix_hit_tokens")
        assert emulated == answers_of(sys.executable, name, bodies)
        assert any(any(answer) for answer in emulated)
        # The engine knew pages of the one's prompts by the hashes of the other's.
        assert (counter(name, "prefix_hit_tokens") > found) == prefixes
    finally:
        engine.end()
