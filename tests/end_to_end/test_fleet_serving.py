"""Several engines with one front end, as users start them.

Supports claim fleet/moves.
"""

import os
import random
import re
import signal

import httpx
import pytest
from support.commands import START_S, Command
from support.fleet_kills import survive
from support.served import serving
from support.waiting import BUSY_S, wait_for

NULL = ("--device", "null", "--max-model-len", "512", "--num-pages", "64")
STREAMS, TOKENS = 13, 60


@pytest.mark.timeout(900)
def test_streams_survive_an_engine(seed: int) -> None:
    """CPU engines are killed, stopped or ended at a random moment: every client gets the undisturbed answer, bit for bit."""
    draw = random.Random(seed)
    _, moves = survive(draw, 1, STREAMS, TOKENS, (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM), moments=(0.1, 0.3))
    assert moves > 0, "no request was left to move"


@pytest.mark.timeout(900)
def test_engines_of_one_command_share_requests_and_restart() -> None:
    with serving("demo", *NULL, "--data-parallel-size", "2", "--log-level", "warning") as server:

        def metric(name: str) -> list[int]:
            text = httpx.get(f"{server.url}/metrics", timeout=BUSY_S).text
            return [int(value) for value in re.findall(rf'^blinkpy_{name}{{engine="[^"]+"}} (\d+)$', text, re.M)]

        wait_for(lambda: metric("each_engine_up") == [1, 1], START_S, "both engines")
        texts = [server.chat(seed=number) for number in range(2)]
        assert len(server.segments()) == 2
        os.kill(server.child("engine"), signal.SIGKILL)
        assert [server.chat(seed=number) for number in range(2)] == texts
        wait_for(lambda: "restart 1 in" in "".join(server.said), 60, lambda: "".join(server.said))
        wait_for(lambda: metric("each_engine_up") == [1, 1], START_S, "both engines again")
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        assert not server.segments()


def test_an_engine_of_another_context_is_refused_by_name() -> None:
    names = [f"test-context-{random.getrandbits(48):x}" for _ in range(2)]
    commands = [
        Command("engine", "demo", "--device", "null", "--num-pages", "64", "--name", name, "--max-model-len", str(context))
        for name, context in zip(names, (512, 256), strict=True)
    ]
    try:
        for command in commands:
            command.find(re.compile("is ready after"))
        commands.append(Command("frontend", "demo", "--port", "0", *(word for name in names for word in ("--engine", name))))
        refusal = r"Engine (\S+) is refused: it differs from engine (\S+) in context \((\d+), not (\d+)\)"
        said = commands[-1].find(re.compile(refusal), 60)
        assert said.groups() in ((names[1], names[0], "256", "512"), (names[0], names[1], "512", "256"))
        address = commands[-1].find(re.compile(r"blinkpy serves \S+ on (http://\S+) "))[1]
        assert httpx.get(f"{address}/health", timeout=BUSY_S).status_code == 200
    finally:
        for command in reversed(commands):
            command.end()
