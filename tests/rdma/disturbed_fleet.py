"""Two engines that one front end reaches over RDMA, under streams that never pause. At random moments the test kills or stops an
engine, or cuts its link, repeatedly. Each client must get the text of an undisturbed run, which is computed here independently.

    python -m rdma.disturbed_fleet --count 200 --streams 64 --seed 7 --output FILE

This runs in the virtual machine; `make fleet-kills-rdma` starts it there. FILE gets a line of JSON for each disturbance, and a
last line with totals.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from rdma import wire
from rdma.forked_engines import ForkedEngine
from rdma.processes import ADDRESS, counter, free_address, frontends
from support.commands import START_S, Command
from support.waiting import wait_for

from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.engine.devices.null_step import synthetic_token
from blinkpy.models.weights.model_folder import DEMO_FOLDER

TOKENS = 30, 100  # of a stream: minimum and maximum
PROMPT = 1, 60
PAUSE_S = 0.5, 4.0  # between two disturbances, with both engines up
CALM_S = 20.0  # before the first disturbance: the longest silence of an undisturbed run
ENGINE_TIMEOUT_S, LEASE_S, ANSWER_S, REST_S = 10, 10, 240, 60
ENGINE = (
    "--transport", "rdma", "--device", "null", "--null-step-us", "100000", "--max-model-len", "512", "--shutdown-s", "0",
    "--lease-ms", str(LEASE_S * 1000), "--insecure-link",
)  # fmt: skip
FRONT_END = (
    "--transport", "rdma", "--engine-timeout-ms", str(ENGINE_TIMEOUT_S * 1000), "--insecure-link", "--no-access-log",
)  # fmt: skip
KINDS = "SIGKILL", "SIGSTOP", "cut link"
LOST = "queue pair lost"
HALF = "\ufffd"  # the replacement for the bytes of an incomplete character


@dataclass(frozen=True)
class Gap:
    """Between two events of a stream; times of the monotonic clock, s."""

    begin: float
    end: float


@dataclass(frozen=True)
class Disturbance:
    """The outcome of a disturbance. running: streams that had begun. moved: requests that continued in the other engine.
    noticed_s: until the front end gave up the engine. silence_s: longest gap between two events of a stream. up_s: until the
    engine served again."""

    kind: str
    running: int
    moved: int
    noticed_s: float
    silence_s: float
    up_s: float


class Streams:
    """Clients in a separate thread. Each requests one stream after another and compares it with the expected text."""

    def __init__(self, url: httpx.URL, count: int, draw: random.Random):
        self.answered, self.wrong, self.gaps = 0, list[str](), list[Gap]()
        self._host, self._port, self._draw = url.host, url.port, draw
        self._vocabulary = json.loads((DEMO_FOLDER / "config.json").read_text())["vocab_size"]
        self._decode = Tokenizer(DEMO_FOLDER).decode
        self._last = [0.0] * count  # time of each client's last event; 0 before the first
        self._over = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._all()))
        self._thread.start()

    def running(self) -> int:
        return sum(last > 0 for last in self._last)

    def silence(self, begin: float) -> float:
        """The longest gap of any stream since `begin`, s."""
        now = time.monotonic()
        open_gaps = [now - last for last in self._last if last]
        return max([gap.end - gap.begin for gap in self.gaps if gap.end > begin] + open_gaps, default=0.0)

    def finish(self) -> None:
        """Wait until the running streams end; no client begins another."""
        self._over = True
        self._thread.join(ANSWER_S)
        assert not self._thread.is_alive(), "a stream does not end"

    async def _all(self) -> None:
        await asyncio.gather(*(self._client(number) for number in range(len(self._last))))

    async def _client(self, number: int) -> None:
        while not self._over:
            body, expected = self._request()
            try:
                found = await self._ask(number, body)
            except (OSError, TimeoutError, ValueError) as error:
                found = (repr(error), "")
            self._last[number] = 0.0
            self.answered += 1
            if found != expected:
                self.wrong.append(f"{body}\n{found}\ninstead of\n{expected}")

    def _request(self) -> tuple[dict[str, Any], tuple[str, str]]:
        """A random request, and its expected text and finish reason."""
        low, high, draw = self._vocabulary // 16, self._vocabulary, self._draw
        prompt = [draw.randrange(low, high) for _ in range(draw.randint(*PROMPT))]
        seed, tokens = draw.getrandbits(31), draw.randint(*TOKENS)
        made = [synthetic_token(seed, len(prompt) + i, low, high) for i in range(tokens)]
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "stream": True, "ignore_eos": True, "seed": seed}
        return body, (self._decode(made).rstrip(HALF), "length")

    async def _ask(self, number: int, body: dict[str, Any]) -> tuple[str, str]:
        """Text and finish reason. Raises ValueError if the answer is not a whole stream."""
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\nConnection: close\r\n"
        async with asyncio.timeout(ANSWER_S):
            reader, writer = await asyncio.open_connection(self._host, self._port)
            with contextlib.closing(writer):
                writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
                text, end, status = "", "", await reader.readline()
                if b" 200 " not in status:
                    raise ValueError(status + await reader.read())
                async for line in reader:
                    if line.startswith(b"data: {"):
                        self._note_event(number)
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise ValueError(event)
                        text += event["choices"][0]["text"]
                        end = event["choices"][0]["finish_reason"] or end
                    elif line == b"data: [DONE]\n":
                        return text.rstrip(HALF), end
        raise ValueError(f"no end after {text!r}")

    def _note_event(self, number: int) -> None:
        now, last = time.monotonic(), self._last[number]
        if last:
            self.gaps.append(Gap(last, now))
        self._last[number] = now


class DisturbedFleet:
    """The front end and the two engines, the second one over a wire. Once it is ready, both serve."""

    def __init__(
        self, front: Command, url: httpx.URL, options: list[tuple[str, ...]], names: list[str], engines: list[ForkedEngine]
    ):
        self.names, self.engines = names, engines
        self._front, self._url, self._options = front, url, options

    def metric(self, name: str) -> list[int]:
        text = httpx.get(self._url.join("/metrics"), timeout=60).text
        return [int(value) for value in re.findall(rf"^blinkpy_{name}(?:\{{[^}}]*\}})? (\d+)$", text, re.M)]

    def said(self) -> str:
        return "".join(self._front.said[-30:]) + "".join("".join(engine.said[-20:]) for engine in self.engines)

    def wait_until_up(self) -> None:
        wait_for(lambda: self.metric("each_engine_up") == [1, 1], START_S, self.said)

    def replace(self, number: int) -> None:
        self.engines[number] = ForkedEngine(*self._options[number])
        self.engines[number].find(ADDRESS)

    def disturb(self, kind: str, draw: random.Random, streams: Streams) -> Disturbance:
        """Disturb an engine, then repair it; returns once both serve again."""
        victim = 1 if kind == "cut link" else draw.randrange(2)
        seen, moves, running, began = len(self._front.said), sum(self.metric("moves_total")), streams.running(), time.monotonic()
        self._hurt(kind, victim, draw)
        noticed_s = wait_for(lambda: any(LOST in line for line in self._front.said[seen:]), 4 * ENGINE_TIMEOUT_S, self.said)
        self._mend(kind, victim)
        self.wait_until_up()
        moved = sum(self.metric("moves_total")) - moves
        return Disturbance(kind, running, moved, noticed_s, streams.silence(began), time.monotonic() - began)

    def _hurt(self, kind: str, victim: int, draw: random.Random) -> None:
        if kind == "cut link":
            wire.cut(*draw.choice([(0, 1), (0,), (1,)]))
        else:
            self.engines[victim].send(signal.Signals[kind])

    def _mend(self, kind: str, victim: int) -> None:
        if kind == "cut link":
            wire.mend()
        elif kind == "SIGSTOP":
            self.engines[victim].send(signal.SIGCONT)
        else:
            self.engines[victim].kill()
            self.replace(victim)

    def check_rest(self) -> None:
        """Wait until the front end and both engines hold no request and no page; raises AssertionError if they do not."""
        held = "requests_running", "requests_waiting", "pages_held"
        for name in self.names:
            wait_for(lambda name=name: not any(counter(name, what) for what in held), REST_S, f"{name} gives all back")
        wait_for(lambda: not sum(self.metric("requests_in_flight")), REST_S, "the front end gives all back")
        for what in ("moves_refused_total", "stray_completions_total"):
            assert not sum(self.metric(what)), f"{what}: {self.metric(what)}"


@contextlib.contextmanager
def running() -> Iterator[tuple[DisturbedFleet, httpx.URL]]:
    near, far = wire.ENDS
    names = [f"test-{secrets.token_hex(6)}" for _ in range(2)]
    addresses = [free_address(near.address), free_address(far.address)]
    options = [
        ("--listen", address, "--name", name, "--rdma-device", end.device, *ENGINE)
        for address, name, end in zip(addresses, names, wire.ENDS, strict=True)
    ]
    engines = [ForkedEngine(*own) for own in options]
    try:
        reached = (word for address in addresses for word in ("--engine", address))
        with frontends(1, *FRONT_END, "--rdma-device", near.device, *reached) as ((front, client),):
            for engine in engines:
                engine.find(ADDRESS)
            fleet = DisturbedFleet(front, client.base_url, options, names, engines)
            fleet.wait_until_up()
            yield fleet, client.base_url
        assert [engine.end() for engine in engines] == [0, 0], "".join(line for engine in engines for line in engine.said)
        left = [path.name for path in Path("/dev/shm").glob("blinkpy*") if any(name in path.name for name in names)]
        assert not left, left
    finally:
        wire.mend()
        for engine in engines:
            engine.kill()


def play(count: int, streams: int, seed: int, report: Callable[[dict[str, Any]], None], calm_s: float = CALM_S) -> None:
    """Disturb engines until `count` disturbances have moved requests. report: callback for each outcome, and for the totals at
    the end. Raises AssertionError for a wrong answer or for leftovers."""
    draw = random.Random(seed)
    kinds, done = list[str](), list[Disturbance]()
    with running() as (fleet, url):
        clients = Streams(url, streams, random.Random(draw.getrandbits(64)))
        try:
            began = time.monotonic()
            time.sleep(calm_s)
            report({"calm_silence_s": clients.silence(began)})
            while len(done) < count:
                clients.gaps.clear()
                kinds = kinds or draw.sample(KINDS, len(KINDS))
                time.sleep(draw.uniform(*PAUSE_S))
                found = fleet.disturb(kinds[-1], draw, clients)
                assert not clients.wrong, clients.wrong[0]
                report(asdict(found))
                if found.moved:
                    done.append(found)
                    kinds.pop()
        finally:
            clients.finish()
        assert not clients.wrong, clients.wrong[0]
        fleet.check_rest()
        report({"answered": clients.answered, "moved": sum(one.moved for one in done)})


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m rdma.disturbed_fleet")
    for name, default in (("count", 200), ("streams", 64), ("seed", 0)):
        options.add_argument(f"--{name}", type=int, default=default)
    options.add_argument("--output", type=Path, required=True)
    given = options.parse_args()

    def report(what: dict[str, Any]) -> None:
        line = json.dumps({key: round(value, 3) if isinstance(value, float) else value for key, value in what.items()})
        print(line, flush=True)
        with given.output.open("a") as file:
            print(line, file=file, flush=True)

    play(given.count, given.streams, given.seed or secrets.randbelow(1 << 31), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
