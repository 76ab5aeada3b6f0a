"""Two engines that one front end reaches over RDMA, killed and stopped during streams; the link of one is cut in each direction.
Each client must get the text of an undisturbed run, which is computed here independently: the null engine's tokens follow from
seed and position."""

import contextlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from rdma import disturbed_fleet, wire
from rdma.forked_engines import ForkedEngine
from rdma.limits import NIGHTLY, TEST_S
from rdma.processes import counter, engine, free_address, frontends, lives
from support.commands import ROOT, START_S, Command
from support.waiting import wait_for

from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.engine.devices.null_step import synthetic_token
from blinkpy.models.weights.model_folder import DEMO_FOLDER

pytestmark = pytest.mark.timeout(TEST_S)
STREAMS, TOKENS = 8, 120
LEASE_S = 10
ENGINE = ("--device", "null", "--null-step-us", "30000", "--max-model-len", "512", "--shutdown-s", "0")
FRONT_END = ("--transport", "rdma", "--no-access-log")
# The reason of a front end that gives up a link, its card's timeout (4.096 us * 2**n, seven times), and its own timeout, s. With
# the default of half a second, a busy emulator loses links that were not cut.
CARD_GIVES_UP, FRONT_END_GIVES_UP = ("does not answer", 18, 60), ("has made no progress for", 20, 10)
SOONEST_S = 2.0  # from a cut to its report: before an earlier report, a busy emulator had already lost the link
TRIES = 3

Answer = tuple[str, str]  # text and end
Body = dict[str, Any]


def streamed(url: str, body: Body, events: list[int]) -> Answer:
    """Text and end of a stream, or an error and its kind. events: gets an entry for each of the stream's events."""
    text, end = "", "none"
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=200) as answer:
        if answer.status_code != 200:
            return answer.read().decode(), f"status {answer.status_code}"
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return json.dumps(event), "error"
                events.append(1)
                text += event["choices"][0]["text"]
                end = event["choices"][0]["finish_reason"] or end
    return text, end


def random_requests(rng: np.random.Generator) -> tuple[list[Body], list[Answer]]:
    """Random requests, and the expected answer of each."""
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
    return bodies, expected


@dataclass
class Fleet:
    """A front end and its engines."""

    front: Command
    url: str
    engines: list[ForkedEngine]

    def metric(self, name: str) -> list[int]:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        return [int(value) for value in re.findall(rf"^blinkpy_{name}(?:\{{[^}}]*\}})? (\d+)$", text, re.M)]

    def moves(self) -> int:
        return sum(self.metric("moves_total"))

    def up(self) -> list[int]:
        return self.metric("each_engine_up")

    def wait_until_up(self, *expected: int, timeout_s: float = START_S) -> None:
        wait_for(lambda: self.up() == list(expected), timeout_s, lambda: f"engines up: {expected}; {self.said()}")

    def said(self) -> str:
        return "".join(line for said in (self.front.said, *(engine.said for engine in self.engines)) for line in said[-20:])

    def play(self, bodies: list[Body], disturb: Callable[[], None] = lambda: None) -> list[Answer]:
        """The answers to all requests, sent at the same time; calls `disturb` after a third of the expected events."""
        answers, events = [("", "")] * len(bodies), list[int]()

        def ask(number: int) -> None:
            answers[number] = streamed(self.url, bodies[number], events)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(bodies))]
        for thread in threads:
            thread.start()
        while len(events) < STREAMS * TOKENS // 3 and any(thread.is_alive() for thread in threads):
            time.sleep(0.01)
        try:
            disturb()
        finally:
            for thread in threads:
                thread.join()
        return answers

    def play_undisturbed(self, bodies: list[Body], expected: list[Answer]) -> list[Answer]:
        """As play(). The answers must be the expected ones, except for the bytes of an incomplete last character."""
        calm = self.play(bodies)
        assert [(text.rstrip("\ufffd"), end) for text, end in calm] == [(text.rstrip("\ufffd"), end) for text, end in expected]
        return calm

    def check_nothing_is_left(self) -> None:
        assert self.metric("moves_refused_total") in ([], [0])
        wait_for(lambda: sum(self.metric("requests_in_flight")) == 0, 100, "all slots are free")


@contextlib.contextmanager
def fleet(engines: list[tuple[str, ...]], *options: str, env: dict[str, str] | None = None) -> Iterator[Fleet]:
    """Engines with these options, and a front end that reaches all of them. Each engine's options begin with its address. env:
    added to the front end's environment."""
    with contextlib.ExitStack() as stack:
        commands = [stack.enter_context(engine(*ENGINE, *own, listen=listen, wait=False))[0] for listen, *own in engines]
        names = (word for listen, *_ in engines for word in ("--engine", listen))
        ((front, client),) = stack.enter_context(frontends(1, *FRONT_END, *names, *options, env=env))
        made = Fleet(front, str(client.base_url).rstrip("/"), commands)
        made.wait_until_up(*(1 for _ in engines), timeout_s=1.5 * START_S)
        yield made


def test_streams_survive_engines_that_are_killed_stopped_and_cut_off(rng: np.random.Generator) -> None:
    """Each disturbance once, at random moments. `make fleet-kills-rdma` plays two hundred, with 64 streams."""
    disturbed_fleet.play(len(disturbed_fleet.KINDS), STREAMS, int(rng.integers(1 << 31)), print, calm_s=2.0)


def patient_card(folder: Path, timeout: int) -> dict[str, str]:
    """The environment of processes whose card resends lost packets for 4.096 us * 2**(timeout + 3), as hardware may."""
    (folder / "sitecustomize.py").write_text(f"from blinkpy.transport import verbs\n\nverbs.ACK_TIMEOUT = {timeout}\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])}


def test_streams_survive_a_link_that_is_cut(rng: np.random.Generator, tmp_path: Path, left_out: Callable[[str], None]) -> None:
    """Data to one engine, from it, or both, is lost, while all processes run. Once the wire is mended, the engine serves again.
    Only nightly: by day, the disturbed fleet has one cut."""
    if not wire.is_laid():
        left_out("a link that is cut: there is no wire. `make test-rdma` has one")
        return
    if not NIGHTLY:
        left_out("each way of a cut: the disturbed fleet cuts its link once")
        return
    bodies, expected = random_requests(rng)
    near, far = wire.ENDS
    name = f"test-{secrets.token_hex(4)}"
    common = ("--insecure-link", "--lease-ms", str(LEASE_S * 1000), "--cq-entries", "128")  # a ring that is soon full
    engines = [
        (free_address(near.address), "--rdma-device", near.device, *common),
        (free_address(far.address), "--rdma-device", far.device, "--name", name, *common),
    ]
    reason, card, timeout_s = (CARD_GIVES_UP, FRONT_END_GIVES_UP)[rng.integers(2)]
    options = "--rdma-device", near.device, "--insecure-link", "--engine-timeout-ms", str(timeout_s * 1000)
    with (
        fleet(engines, *options, env=patient_card(tmp_path, card)) as served,
        contextlib.ExitStack() as mended,
    ):
        mended.callback(wire.mend)
        calm = served.play_undisturbed(bodies, expected)
        for ends in rng.permutation(["01", "0", "1"]).tolist():
            play_over_a_cut_wire(served, bodies, calm, [int(end) for end in ends], name, reason)
            wire.mend()
            served.wait_until_up(1, 1)
        moves, accepted = served.moves(), counter(name, "requests_accepted")
        assert served.play(bodies) == calm, served.said()
        assert counter(name, "requests_accepted") > accepted, "the engine whose link was mended got no request"
        assert served.moves() == moves, f"requests moved without a disturbance; {served.said()}"
        served.check_nothing_is_left()


def play_over_a_cut_wire(served: Fleet, bodies: list[Body], calm: list[Answer], ends: list[int], name: str, reason: str) -> None:
    """Cut the wire once streams run. name: second engine, which the front end reaches over the wire. reason: why the front
    end gives up the link."""
    reported, noticed = f"a cut of what ends {ends} send", list[float]()

    def cut() -> None:
        wait_for(lambda: all(wire.carried(end) > carried[end] + TOKENS for end in range(2)), what="the link goes over the wire")
        seen = len(served.front.said)
        wire.cut(*ends)
        after_s = wait_for(
            lambda: any("queue pair lost" in line and reason in line for line in served.front.said[seen:]),
            timeout_s=100,
            what=lambda: f"{reported} is noticed ({reason!r}); {served.said()}",
        )
        print(f"{reported} was noticed after {after_s:.2f} s: {reason}")
        noticed.append(after_s)

    for _ in range(TRIES):
        moves, carried, expired = served.moves(), [wire.carried(end) for end in range(2)], counter(name, "leases_expired")
        assert served.play(bodies, cut) == calm, f"{reported}; {served.said()}"
        if noticed[-1] >= SOONEST_S and served.moves() > moves:  # otherwise the streams had ended before the cut
            break
        wire.mend()
        served.wait_until_up(1, 1)
    assert noticed[-1] >= SOONEST_S, f"{reported}: the link was lost before each cut; {served.said()}"
    assert served.moves() > moves, f"{reported}: no request was left to move; {served.said()}"
    moves = served.moves()
    if len(ends) == 2:  # otherwise the engine may still hold its old requests when the front end is back
        assert served.play(bodies) == calm, f"with one engine; {served.said()}"
        wait_for(lambda: counter(name, "leases_expired") > expired, LEASE_S + 100, "the lease ends in the engine without a link")
        held = ("requests_running", "requests_waiting", "pages_held")
        wait_for(lambda: not any(counter(name, what) for what in held), 100, "the engine without a link gives all back")
    assert (served.up(), served.moves()) == ([1, 0], moves), f"{reported}; {served.said()}"
    assert all(lives(command) for command in (served.front, *served.engines)), served.said()
