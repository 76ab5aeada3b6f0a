"""`make rolling-upgrade`: repeatedly replace every engine and every front end of a fleet under load.

Each null engine is ended by SIGTERM, and restarted with its name after its end. Every second one gets no
time to finish its requests, so they move. Then a second front end takes over the address from the first
one (docs/fleet.md), which finishes its requests and ends. Clients request streams and whole answers of
text, tokens, several choices, grammars and scores. Half of them keep their connections, half open one for
each request; no client retries.

Each answer must be complete and equal to the null engine's expected answer (tools/soak). A 429, a 503, an
error, an early end and a wrong text are failures. Pauses are the times between two events of a stream,
and until an answer or its first event. Other processes may use the machine meanwhile.
"""

import asyncio
import json
import re
import secrets
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from soak.soak_requests import Answer, Judge, SoakRequest, draw
from support.commands import Command

from benchmarks.common.harness import Flag, Run, check, run_benchmark
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.transport.segment import unlink_stale

READY, SERVES = re.compile("is ready after"), re.compile(r"blinkpy serves \S+ on (http://\S+) ")
POOL, SAID_S, ANSWER_S, START_S, END_S, MOST_FAULTS = 200, 30.0, 120.0, 300.0, 120.0, 20
LOOKS = 12  # requests for metrics, on new connections, which must all show an engine
ENGINE = ("--device", "null", "--null-step-us", "2000", "--log-level", "warning", "--record-steps", "0")
FRONT = ("--log-level", "warning", "--no-access-log", "--port", "0", "--max-waiting-s", "60")


@dataclass
class Load:
    """The clients.

    faults: of failed requests.
    kept, opened: requests on connections of either kind.
    silences: the longest of each answer, s.
    """

    url: str
    pool: list[SoakRequest]
    judge: Judge
    rng: np.random.Generator
    faults: list[str] = field(default_factory=list)
    done: Counter[str] = field(default_factory=Counter)
    silences: list[float] = field(default_factory=list)
    ended: bool = False

    async def run(self, at_once: int) -> None:
        """Send requests until `ended` is set."""
        await asyncio.gather(*(self._client(kept=bool(number % 2)) for number in range(at_once)))

    @property
    def requests(self) -> int:
        return self.done["kept"] + self.done["opened"]

    async def _client(self, kept: bool) -> None:
        limits = httpx.Limits(max_keepalive_connections=1 if kept else 0)
        async with httpx.AsyncClient(base_url=self.url, timeout=ANSWER_S, limits=limits) as client:
            while not self.ended and len(self.faults) < MOST_FAULTS:
                number = int(self.rng.integers(len(self.pool)))
                fault = await self._ask(client, number)
                self.done["kept" if kept else "opened"] += 1
                self.done["streamed" if self.pool[number].stream else "whole"] += 1
                if fault:
                    self.faults.append(f"request {number}, {'kept' if kept else 'opened'}: {fault}")

    async def _ask(self, client: httpx.AsyncClient, number: int) -> str:
        """The fault of a request's answer, or ""."""
        request, answer, last, longest = self.pool[number], Answer(), time.monotonic(), 0.0
        try:
            async with client.stream("POST", request.path, json=request.body) as response:
                if response.status_code != 200:
                    return f"status {response.status_code}: {(await response.aread())[:200]!r}"
                if not request.stream:
                    answer.take(json.loads(await response.aread()))
                    answer.whole, longest = True, time.monotonic() - last
                else:
                    async for line in response.aiter_lines():
                        answer.whole = answer.whole or line == "data: [DONE]"
                        if not line.startswith("data: {"):
                            continue
                        longest, last = max(longest, time.monotonic() - last), time.monotonic()
                        event = json.loads(line[6:])
                        if "error" in event:
                            return f"an error in the stream: {event['error']}"
                        answer.take(event)
        except (httpx.HTTPError, httpx.StreamError) as error:
            return f"{type(error).__name__}: {error}"
        self.silences.append(longest)
        return self.judge.fault(number, answer) if answer.whole else "it ends early"


class Upgrades:
    """The fleet's commands, and their replacement.

    replaced: number of replaced engines and front ends.
    moves: requests that moved.
    """

    def __init__(self, folder: Path, engines: int, workers: int):
        self._workers, self._handover = workers, str(folder / "handover")
        self._names = [f"rolling-{secrets.token_hex(6)}" for _ in range(engines)]
        self.replaced, self.moves, self._starts = Counter[str](), 0, 0
        self._engines = {name: self._engine(name) for name in self._names}
        self._front = self._front_end("0")
        self.url = self._front.find(SERVES, START_S)[1]
        for command in self._engines.values():
            command.find(READY, START_S)

    def _engine(self, name: str) -> Command:
        self._starts += 1
        pairs, grace = str(2 * self._workers), "10" if self._starts % 2 else "0"
        return Command("engine", "demo", "--name", name, *ENGINE, "--workers", pairs, "--shutdown-s", grace)

    def _front_end(self, port: str) -> Command:
        names = (argument for name in self._names for argument in ("--engine", name))
        options = (*FRONT, "--port", port, "--workers", str(self._workers), "--handover", self._handover)
        return Command("frontend", "demo", *names, *options)

    async def all_up(self) -> None:
        """Wait until every worker has every engine."""
        deadline, well = time.monotonic() + START_S, 0
        while well < LOOKS:
            check(time.monotonic() < deadline, "an engine that was started again is not reached")
            async with httpx.AsyncClient(timeout=20) as client:
                text = (await client.get(f"{self.url}/metrics")).text
            well = well + 1 if len(re.findall(r'each_engine_up\{engine="[^"]+"\} 1', text)) == len(self._names) else 0
            if not well:
                await asyncio.sleep(0.2)

    async def replace_engine(self, name: str) -> None:
        """End the engine by SIGTERM, start one with the same name, and wait until it serves."""
        await self._end(self._engines[name], "engine")
        self._engines[name] = self._engine(name)
        await asyncio.to_thread(self._engines[name].find, READY, START_S)
        await self.all_up()
        self.replaced["engines"] += 1

    async def replace_front_end(self) -> None:
        """Start a front end that takes over. The old one must end by itself."""
        await self._count_moves()
        old, port = self._front, self.url.rpartition(":")[2]
        self._front = self._front_end(port)
        await asyncio.to_thread(self._front.find, SERVES, START_S)
        check(await asyncio.to_thread(old.wait, END_S) == 0, f"a front end did not end in order: {old.said[-20:]}")
        self._complaints(old)
        await self.all_up()
        self.replaced["front ends"] += 1

    async def _count_moves(self) -> None:
        async with httpx.AsyncClient(timeout=20) as client:
            text = (await client.get(f"{self.url}/metrics")).text
        self.moves += sum(int(count) for count in re.findall(r"^blinkpy_moves_total\{[^}]*\} (\d+)", text, re.M))

    async def _end(self, command: Command, what: str) -> None:
        command.process.send_signal(signal.SIGTERM)
        code = await asyncio.to_thread(command.wait, END_S)
        check(code == 0, f"an {what} ended with {code}: {command.said[-20:]}")
        self._complaints(command)

    @staticmethod
    def _complaints(command: Command) -> None:
        found = [line for line in command.said if "Traceback" in line or "stray" in line.lower()]
        check(not found, f"the log has {found[:5]}")

    async def run(self, wanted: Any) -> None:
        """Replace all parts, repeatedly until stopped, and at least once."""
        while not self.replaced["front ends"] or wanted():
            for name in self._names:
                await self.replace_engine(name)
            await self.replace_front_end()

    async def end(self) -> None:
        """Stop all processes in order."""
        await self._count_moves()
        await self._end(self._front, "front end")
        for command in self._engines.values():
            await self._end(command, "engine")
        check(not Path(self._handover).exists(), "the handover socket is left behind")

    def close(self) -> None:
        for command in (self._front, *self._engines.values()):
            command.kill()
        for name in self._names:
            unlink_stale(name)


async def roll(run: Run, upgrades: Upgrades) -> Load:
    """Run load and upgrades concurrently, until there were enough requests and the round has ended."""
    options = run.options
    rng = np.random.default_rng(options.seed)
    vocabulary = json.loads((DEMO_FOLDER / "config.json").read_text())["vocab_size"]
    pool = [draw(rng, vocabulary) for _ in range(POOL)]
    load = Load(upgrades.url, pool, Judge(pool), rng)
    await upgrades.all_up()
    asking = asyncio.create_task(load.run(options.streams))
    rolling = asyncio.create_task(upgrades.run(lambda: load.requests < options.requests))
    said = time.monotonic()
    while not rolling.done() and not load.faults:
        await asyncio.wait([rolling, asking], timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
        run.progress("requests", load.requests, options.requests)
        if time.monotonic() - said > SAID_S:
            said = time.monotonic()
            print(f"{load.requests:,} requests, {dict(upgrades.replaced)} replaced", flush=True)
    if rolling.done():
        rolling.result()
    while load.requests < options.requests and not load.faults:
        await asyncio.sleep(0.2)
    load.ended = True
    await asyncio.wait_for(asking, ANSWER_S)
    rolling.cancel()
    return load


def main(run: Run) -> None:
    options = run.options
    options.seed = options.seed or secrets.randbelow(1 << 31)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        upgrades = Upgrades(Path(folder), options.engines, options.workers)
        try:
            load = asyncio.run(_whole(run, upgrades))
        finally:
            upgrades.close()
    silences = np.array(load.silences)
    results = {
        "requests": load.requests,
        "of them": dict(load.done),
        "failed": len(load.faults),
        "replaced": dict(upgrades.replaced),
        "moved to another engine": upgrades.moves,
        "longest pause": {"value": round(float(silences.max()), 3), "unit": "s"},
        "longest pause of an answer, median": {"value": round(float(np.median(silences)), 3), "unit": "s"},
    }
    run.target("failed requests", len(load.faults), 0, "")
    run.target("requests", load.requests, 10_000, "", at_most=False)
    run.write(__doc__, results)


async def _whole(run: Run, upgrades: Upgrades) -> Load:
    load = await roll(run, upgrades)
    check(not load.faults, f"{len(load.faults)} of {load.requests} requests failed: " + "; ".join(load.faults[:MOST_FAULTS]))
    await upgrades.end()
    return load


if __name__ == "__main__":
    run_benchmark(
        "tools.rolling_upgrade",
        "All engines and front ends replaced under load.",
        main,
        requests=Flag(10_000, "at least", 300),
        streams=Flag(24, "requests at a time", 8),
        engines=Flag(3, "of the fleet", 2),
        workers=Flag(2, "of a front end"),
        seed=Flag(0, "of all; 0: a random one"),
    )
