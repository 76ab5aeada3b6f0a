"""One engine on this machine, two front ends: this machine's, and one on an emulated aarch64. Their answers are the same.

Prompts, page hashes and sampling parameters go from aarch64 to x86 through shared memory, and completions back.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator

import httpx
import pytest
from aarch64.suite import PYTHON_HERE
from completion_requests import requests, said
from rdma.processes import START_S, URL, Command, counter, health, wait_until

PYTHON = os.environ.get(PYTHON_HERE)
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(PYTHON is None, reason="needs an emulated Python: `make test-aarch64` makes one"),
]


@pytest.fixture(params=["null", "cpu"])
def clients(request: pytest.FixtureRequest) -> Iterator[tuple[httpx.Client, httpx.Client, str]]:
    """Clients of the two front ends, and the name of their engine."""
    assert PYTHON is not None
    name = f"test-{secrets.token_hex(4)}"
    options = ("--workers", "2", "--max-model-len", "512", "--lease-ms", "60000", "--threads", "1")
    way = ("--name", name, "--port", "0", "--engine-timeout-ms", "60000")
    commands = [
        Command("engine", "demo", "--device", request.param, "--name", name, *options),
        Command("frontend", "demo", *way),
        Command("frontend", "demo", *way, python=PYTHON),
    ]
    try:
        with httpx.Client(timeout=120) as here, httpx.Client(timeout=120) as emulated:
            for client, command in ((here, commands[1]), (emulated, commands[2])):
                client.base_url = command.find(URL)[1]
                wait_until(lambda client=client: health(client) == 200, START_S, "the engine")
            yield here, emulated, name
    finally:
        for command in commands:
            command.end()


def test_answers_are_those_of_a_front_end_on_this_processor(clients, rng) -> None:
    here, emulated, name = clients
    bodies = requests(rng, 24, 120, 24)
    answers = [said(emulated.post("/v1/completions", json=body)) for body in bodies]
    assert answers == [said(here.post("/v1/completions", json=body)) for body in bodies]
    assert any(any(answer) for answer in answers)
    # The engine found pages of the one's prompts by the hashes of the other's.
    assert counter(name, "prefix_hit_tokens") > 0
