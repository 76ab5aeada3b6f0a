"""Two engines with one front end and running streams, while engines are killed or stopped repeatedly. Each client must get
exactly the answer of an undisturbed run."""

import contextlib
import json
import random
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from support.commands import START_S, Command
from support.waiting import BUSY_S, wait_for

from benchmarks.serving.systems import alive, tree
from blinkpy.transport.segment import unlink_stale

ENGINE = (
    *("--dtype", "float32", "--batch-invariant", "--num-pages", "512", "--max-model-len", "512"),
    *("--log-level", "warning", "--record-steps", "0", "--shutdown-s", "0"),
)
CPU = ("--device", "cpu", "--threads", "1")
GPU = ("--device", "cuda", "--max-num-batched-tokens", "1024")  # few graphs, so that it starts soon
END_S = 40.0  # beyond a front end's own bound, at which it logs the stacks of its threads
REPORT_LINES = 80  # of a process that does not shut down in order
READY, SERVES = re.compile("is ready after"), re.compile(r"blinkpy serves \S+ on (http://\S+) ")
SCHEMA = {
    "type": "object", "properties": {"name": {"type": "string", "maxLength": 40}, "year": {"type": "integer"}},
    "required": ["name", "year"], "additionalProperties": False,
}  # fmt: skip
Answer = tuple[Any, ...]
Disturbance = tuple[int, int, int]  # an engine, its signal, and the number of events of all streams before it


def bodies(draw: random.Random, count: int, tokens: int) -> list[dict[str, Any]]:
    """Requests for streams of all kinds that can continue in another engine."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0}, {"logprobs": 2}, {"stop": ["and", "."]}, {"n": 2}, {"repetition_penalty": 1.3}, {"echo": True},
        {"min_tokens": tokens // 2, "ignore_eos": False}, {"logit_bias": {"11": -3.0, "12": 2.0}}, {"response_format": schema},
        {"top_k": 20, "top_p": 0.9, "min_p": 0.02}, {"echo": True, "logprobs": 1, "stream": False},
        {"prompt": ["The sea was", "In the morning the old ship"]},
        {"presence_penalty": 1.5, "frequency_penalty": 0.5}, {"bad_words": [" the old", "ing to", "in the"]},
    ]  # fmt: skip
    shuffled = draw.sample(kinds, len(kinds))
    common = {"model": "demo", "max_tokens": tokens, "stream": True, "ignore_eos": True}
    return [
        {**common, "prompt": f"It was a dark night {number}, and", "seed": draw.getrandbits(40), **shuffled[number % len(kinds)]}
        for number in range(count)
    ]


def streamed(url: str, body: dict[str, Any], gaps: list[float], events: list[int]) -> Answer:
    """Text, finish reason and log probabilities of each choice, or the error. gaps: gets the longest silence, s; events: gets an
    entry for each event."""
    texts, ends, logprobs, longest, last = dict[int, str](), dict[int, str](), dict[int, list[Any]](), 0.0, 0.0
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        if response.status_code != 200:
            return (response.status_code, response.read().decode())
        if not body["stream"]:
            return ("whole", json.loads(response.read())["choices"], "")
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event, now = json.loads(line[6:]), time.monotonic()
            longest, last = max(longest, now - (last or now)), now
            if "error" in event:
                return ("error", event["error"]["message"])
            events.append(1)
            for choice in event["choices"]:
                index = choice["index"]
                texts[index] = texts.get(index, "") + choice["text"]
                ends[index] = choice["finish_reason"] or ends.get(index, "")
                logprobs.setdefault(index, []).extend((choice["logprobs"] or {}).get("token_logprobs") or [])
    gaps.append(longest)
    return (texts, ends, logprobs)


class Fleet:
    """Two engines and a front end, as commands. draw: source of all random numbers. gpus: numbers of the engines' GPUs; empty:
    they run on the CPU."""

    def __init__(self, draw: random.Random, gpus: Sequence[str] = ()):
        self.draw, self._gpus = draw, gpus
        self._names = [f"test-{secrets.token_hex(6)}" for _ in range(2)]
        self.engines = [self._engine(number) for number in range(2)]
        names = (argument for name in self._names for argument in ("--engine", name))
        quick = ("--engine-timeout-ms", "1000", "--log-level", "warning", "--no-access-log")
        self.front = Command("frontend", "demo", *names, "--port", "0", *quick)
        self.url = self.front.find(SERVES)[1]
        for engine in self.engines:
            engine.find(READY)
        self.both()

    def _engine(self, number: int) -> Command:
        env = {"CUDA_VISIBLE_DEVICES": self._gpus[number]} if self._gpus else {}
        return Command("engine", "demo", "--name", self._names[number], *ENGINE, *(GPU if self._gpus else CPU), env=env)

    def both(self) -> None:
        """Wait until both engines serve."""
        wait_for(lambda: httpx.get(f"{self.url}/metrics", timeout=BUSY_S).text.count('_engine_up{engine="test-') == 2, 20)
        wait_for(lambda: len(re.findall(r'engine_up{engine="[^"]+"} 1', httpx.get(f"{self.url}/metrics").text)) == 2, START_S)

    def moves(self) -> int:
        """Requests that have continued in another engine so far."""
        found = re.search(r'^blinkpy_moves_total{worker="0"} (\d+)$', httpx.get(f"{self.url}/metrics").text, re.M)
        assert found
        return int(found[1])

    def play(self, asked: list[dict[str, Any]], disturb: Disturbance | None = None) -> tuple[list[Answer], float, int]:
        """The answers to all requests, sent at the same time; the longest gap in a stream, s; and the number of events."""
        answers: list[Answer] = [()] * len(asked)
        gaps, events = list[float](), list[int]()

        def ask(number: int) -> None:
            answers[number] = streamed(self.url, asked[number], gaps, events)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(asked))]
        for thread in threads:
            thread.start()
        if disturb is not None:
            victim, how, after = disturb
            while len(events) < after and any(thread.is_alive() for thread in threads):
                time.sleep(0.001)
            self.engines[victim].send(how)
        for thread in threads:
            thread.join()
        return answers, max(gaps, default=0.0), len(events)

    def replace(self, number: int) -> None:
        """Kill an engine if it lives, start another, and wait until both serve."""
        self.engines[number].kill()
        self.engines[number] = self._engine(number)
        self.engines[number].find(READY)
        self.both()

    def finish(self) -> None:
        """Check that all is idle and no request is lost; then shut down in order, and check that nothing is left behind."""
        text = httpx.get(f"{self.url}/metrics", timeout=BUSY_S).text
        counts = "requests_in_flight|stray_completions_total|moves_refused_total"
        left = re.findall(rf"^blinkpy_(?:{counts})\S* [1-9].*", text, re.M)
        assert not left, left
        processes = {pid for command in (self.front, *self.engines) for pid in (command.process.pid, *tree(command.process.pid))}
        for command in (self.front, *self.engines):
            try:
                assert command.end(END_S) == 0, "".join(command.said[-REPORT_LINES:])
            except subprocess.TimeoutExpired as error:
                raise AssertionError(f"it does not end: {''.join(command.said[-REPORT_LINES:])}") from error
        assert not any(map(alive, processes))
        segments = [path.name for path in Path("/dev/shm").glob("blinkpy*") if any(name in path.name for name in self._names)]
        assert not segments

    def close(self) -> None:
        for command in (self.front, *self.engines):
            command.kill()
        for name in self._names:
            unlink_stale(name)


@contextlib.contextmanager
def running(draw: random.Random, gpus: Sequence[str]) -> Iterator[Fleet]:
    fleet = Fleet(draw, gpus)
    try:
        yield fleet
    finally:
        fleet.close()


@dataclass(frozen=True)
class Kill:
    """The outcome of one kill. how: the signal's name; silence_s: longest gap in a stream; calm_s: the same undisturbed."""

    how: str
    silence_s: float
    calm_s: float


def survive(
    draw: random.Random,
    kills: int,
    streams: int,
    tokens: int,
    signals: Sequence[int] = (signal.SIGKILL,),
    moments: tuple[float, float] = (0.0, 1.0),
    repeats: int = 1,
    on_kill: Callable[[int, int], None] = lambda number, moves: None,
    deadline: float = float("inf"),
    gpus: Sequence[str] = (),
) -> tuple[list[Kill], int]:
    """moments: range of the kill's moment, as a share of all events. repeats: kills for each drawn set of streams. on_kill:
    callback after each kill, with its number and all moves so far. deadline: time of the monotonic clock after which no kill
    begins. gpus: see Fleet. Returns the kills, and the number of moved requests. Raises AssertionError if an answer differs from
    the undisturbed answer, and for leftovers."""
    done = list[Kill]()
    with running(draw, gpus) as fleet:
        for number in range(kills):
            if time.monotonic() > deadline:
                break
            if number % repeats == 0:
                asked = bodies(draw, streams, tokens)
                expected, calm, events = fleet.play(asked)
                assert all(len(answer) == 3 for answer in expected), expected
            victim, how, moment = draw.randrange(2), draw.choice(signals), int(draw.uniform(*moments) * events)
            found, silence, _ = fleet.play(asked, (victim, how, moment))
            for body, answer, wanted in zip(asked, found, expected, strict=True):
                assert answer == wanted, (
                    f"kill {number}, after {moment} of {events} events: {body}\n{answer}\ninstead of\n{wanted}"
                )
            done.append(Kill(signal.Signals(how).name, silence, calm))
            fleet.replace(victim)
            on_kill(number, fleet.moves())
        moves = fleet.moves()
        fleet.finish()
        return done, moves
