"""The link thread: its heartbeats, their end, and that two threads can share a queue pair."""

import importlib
import secrets
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.seeded_bugs import Bug, planted
from support.waiting import wait_for

from benchmarks.parts import rdma_cpu
from blinkpy.queues import words as W
from blinkpy.queues.layout import BLOCK_WORDS
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.transport.contract import EngineWords, TransportError
from blinkpy.transport.segment import create_segment

LEASE_S, LIMIT_S = 2.0, 10.0
BEAT, CHECK = "beat", "check"


class Notes:
    """Instead of a QueuePair: notes heartbeats and checks. error: the exception of a check."""

    def __init__(self, clock: list[float], error: Exception | None = None) -> None:
        self.clock, self.error = clock, error
        self.facts = SimpleNamespace(lease_ms=1000 * LEASE_S)
        self.calls: list[tuple[str, float]] = []

    def beat(self) -> None:
        self.calls.append((BEAT, self.clock[0]))

    def check(self) -> None:
        self.calls.append((CHECK, self.clock[0]))
        if self.error is not None:
            raise self.error


def made(monkeypatch: pytest.MonkeyPatch, clock: list[float]) -> tuple[Any, Any]:
    """The module as it is now, maybe with a bug, and a thread that was not started, by a clock of the test's."""
    module: Any = importlib.import_module("blinkpy.dpu.link.link_thread")
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    return module, module.LinkThread(None, LIMIT_S)


def rounds(thread: Any, clock: list[float], seconds: float, loop_runs: bool) -> None:
    for _ in range(round(seconds / 0.1)):
        clock[0] += 0.1
        if loop_runs:
            thread.progress()
        thread.round()


def beats_go_on_while_the_loop_stands_and_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Within a lease each, up to the stall limit, and again once the loop runs."""
    clock = [50.0]
    module, thread = made(monkeypatch, clock)
    pair = Notes(clock)
    thread.progress()
    thread.add(pair, lambda *_: pytest.fail("nothing is lost"))
    rounds(thread, clock, 3.0, loop_runs=True)
    rounds(thread, clock, LIMIT_S - 0.5, loop_runs=False)
    beats = [when for call, when in pair.calls if call == BEAT]
    assert max(np.diff([50.0, *beats, clock[0]])) < LEASE_S / 2, "the lease would end"
    assert [call for call, _ in pair.calls] == [BEAT, CHECK] * len(beats)
    rounds(thread, clock, LIMIT_S, loop_runs=False)
    stopped, words = len(pair.calls), list(thread._words)
    rounds(thread, clock, LIMIT_S, loop_runs=False)
    assert len(pair.calls) == stopped, "a worker without an event loop keeps its slots"
    assert thread._words[module.ALIVE] > words[module.ALIVE] and thread._words[module.PROGRESS] == words[module.PROGRESS]
    rounds(thread, clock, 1.0, loop_runs=True)
    assert len(pair.calls) > stopped
    assert thread.checked(pair) == clock[0]


def a_loss_is_reported_once_and_affects_no_other_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, lost = [50.0], list[tuple[Any, Exception]]()
    module, thread = made(monkeypatch, clock)
    good = Notes(clock)
    errors = [module.EngineLostError("the engine is gone"), TransportError("the card fell out")]
    bad = [Notes(clock, error) for error in errors]
    for pair in (bad[0], good, bad[1]):
        thread.add(pair, lambda pair, error: lost.append((pair, error)))
    rounds(thread, clock, 1.0, loop_runs=True)
    assert lost == list(zip(bad, errors, strict=True))
    assert [len(pair.calls) for pair in (*bad, good)] == [2, 2, 20]
    assert [thread.checked(pair) for pair in bad] == [0.0, 0.0]
    thread.remove(good)
    rounds(thread, clock, 1.0, loop_runs=True)
    assert len(good.calls) == 20


class OneThread:
    """A transport in which a second thread acts between any two calls of the first; it does no more than it may."""

    def __init__(self, draw: np.random.Generator) -> None:
        self.layout: Any = SimpleNamespace(sizes=rdma_cpu.SIZES)
        self.facts, self.pair = rdma_cpu.FACTS, 0
        self.front, self.meanwhile = dict[int, int](), lambda: None
        self._draw, self._within = draw, False

    def _between(self) -> None:
        if not self._within and self._draw.random() < 0.5:
            self._within = True
            self.meanwhile()
            self._within = False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*_: Any) -> Any:
            self._between()
            return {"read_pair": EngineWords(0, 0, 1, 1), "read_completions": []}.get(name, 0)

        return call

    def ring_doorbell(self, doorbell: int) -> None:
        self._between()
        assert not self._within, "the second thread rings with a position that may be old when it is stored"
        self.front[W.FRONT_DOORBELL] = doorbell

    def write_word(self, index: int, value: int) -> None:
        self._between()
        assert not (self._within and index != W.FRONT_HEARTBEAT), "the second thread writes a word of the first"
        self.front[index] = value

    def read_engine(self) -> list[int]:
        self._between()
        return [W.STATE_READY] + [0] * BLOCK_WORDS

    def read_engine_state(self) -> int:
        self._between()
        return W.STATE_READY

    def lost(self) -> bool:
        return False


def a_second_thread_leaves_doorbell_and_head_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may run between any two accesses, so a position that it stored could be an old one."""
    module: Any = importlib.import_module("blinkpy.dpu.link.queue_pair")
    transport = OneThread(np.random.default_rng(1))
    words = iter([EngineWords(0, 0, 0, 0)])
    vars(transport)["read_pair"] = lambda: next(words, EngineWords(0, 0, 1, 1))
    pair = module.QueuePair(transport, 1e9)
    pair.attach(1.0)
    beats = list[int]()

    def meanwhile() -> None:
        pair.beat()
        pair.check()
        beats.append(transport.front[W.FRONT_HEARTBEAT])

    transport.meanwhile = meanwhile
    for number in range(rdma_cpu.SIZES.slots):
        pair.submit(np.arange(1 + number % 40, dtype=np.int32), RequestParameters(max_tokens=1))
        pair.poll()
        pair.refresh()
        assert transport.front[W.FRONT_DOORBELL] == 1 << W.EPOCH_SHIFT | number + 1
    assert len(beats) > 50 and beats == sorted(set(beats)), "each heartbeat is another one"


class OneAtATime(rdma_cpu.Card):
    """A card whose verbs are for one thread at a time, between wr_start and wr_complete, and in poll. It gives way in both."""

    def __init__(self) -> None:
        super().__init__()
        self._user, self.misused = 0, False

    def _enter(self) -> None:
        self.misused |= self._user not in (0, threading.get_ident())
        self._user = threading.get_ident()
        time.sleep(0)

    def wr_start(self) -> None:
        self._enter()

    def wr_complete(self) -> None:
        self.misused |= self._user != threading.get_ident()
        self._user = 0

    def wr_set_inline_data(self, local: int, length: int) -> None:
        time.sleep(0)
        super().wr_set_inline_data(local, length)

    def poll(self, most: int) -> tuple[int, list[Any]]:
        self._enter()
        done = super().poll(most)
        self._user = 0
        return done


def verbs_are_used_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real threads: one submits and polls, one gives heartbeats and checks. All that is posted is completed, and arrives."""
    rdma, writes = (importlib.import_module(f"blinkpy.dpu.link.{name}") for name in ("connect_rdma", "rdma_writes"))
    for module, name in ((writes, "module"), (writes, "constants"), (rdma, "constants")):
        monkeypatch.setattr(module, name, getattr(module, name), raising=False)
    monkeypatch.setattr(rdma_cpu, "rdma_writes", writes)
    monkeypatch.setattr(rdma_cpu, "connect_rdma", rdma)
    monkeypatch.setattr(rdma_cpu, "RdmaTransport", rdma.RdmaTransport)
    pairs: Any = importlib.import_module("blinkpy.dpu.link.queue_pair")
    segment, card = create_segment(f"test-{secrets.token_hex(6)}", rdma_cpu.SIZES, rdma_cpu.FACTS), OneAtATime()
    interval, ended, raised = sys.getswitchinterval(), threading.Event(), list[Exception]()
    sys.setswitchinterval(1e-5)
    try:
        answers, transport = rdma_cpu.Answers(segment), rdma_cpu.connect(segment, card)
        answers.grant()
        pair = pairs.QueuePair(transport, 1e9)
        pair.attach(1.0)

        def beat() -> None:
            while not ended.is_set():
                try:
                    pair.beat()
                    pair.check()
                except Exception as error:
                    raised.append(error)
                    return

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            for number in range(400):
                prompt = np.full(1 + number % 50, number, np.int32)
                request = pair.submit(prompt, RequestParameters(max_tokens=1, seed=1))
                answers.one(request.slot, prompt)  # compares the prompt
                wait_for(lambda number=number: [token for _, token, _ in pair.poll()] == [number])
                pair.refresh()
        finally:
            ended.set()
            thread.join()
        transport.lost()
        assert (card.misused, raised, transport.queue.done) == (False, [], transport.queue.posted)
    finally:
        sys.setswitchinterval(interval)
        segment.close()


SCENARIOS = [
    beats_go_on_while_the_loop_stands_and_end_with_it,
    a_loss_is_reported_once_and_affects_no_other_pair,
    a_second_thread_leaves_doorbell_and_head_alone,
    verbs_are_used_by_one_thread_at_a_time,
]
BUGS = [
    Bug("heartbeats go on without an event loop", "link_thread", "        if self._loop_is_dead():\n            return\n", ""),
    Bug("the lease is taken by the event loop's word",
        "link_thread", "                one.pair.beat()\n",
        "                if time.monotonic() - self.progressed < CHECK_S:\n                    one.pair.beat()\n"),
    Bug("the watch over the event loop looks at the link thread's word",
        "link_thread", "is_over(self._words[PROGRESS]", "is_over(self._words[ALIVE]"),
    Bug("one engine that is lost ends the heartbeats of the others",
        "link_thread", "            one.on_loss(one.pair, error)\n",
        "            one.on_loss(one.pair, error)\n            raise error\n"),
    Bug("a queue pair that is lost goes on", "link_thread", "                del self._pairs[id(one.pair)]\n", ""),
    Bug("a queue pair that was given up goes on",
        "link_thread", "            self._pairs.pop(id(pair), None)\n", "            pass\n"),
    Bug("the engine is not checked", "link_thread", "                one.pair.check()\n", ""),
    Bug("a heartbeat repeats the doorbell",
        "queue_pair", "        self._beat += 1\n",
        "        self._beat += 1\n        if self._attached:\n            self._ring()\n"),
    Bug("all heartbeats are the same", "queue_pair", "        self._beat += 1\n", ""),
    Bug("a heartbeat is posted without the lock",
        "connect_rdma", "        with self._lock:\n            self._words[index] = value\n",
        "        if True:\n            self._words[index] = value\n"),
    Bug("the engine's words are read without the lock",
        "connect_rdma", "        with self._lock:\n            self._reap()\n            if not self._in_flight[HEALTH]:",
        "        if True:\n            self._reap()\n            if not self._in_flight[HEALTH]:"),
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda one: one.__name__)
def test_the_link_thread(scenario: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    scenario(monkeypatch)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_seeded_bug_is_found(bug: Bug) -> None:
    with planted(bug):
        for scenario in SCENARIOS:
            with pytest.MonkeyPatch.context() as monkeypatch:
                try:
                    scenario(monkeypatch)
                except BaseException:  # whatever it is, it was noticed
                    return
    pytest.fail(f"no scenario finds that {bug.what}")


def test_removing_a_queue_pair_waits_for_its_running_heartbeat() -> None:
    """It is closed next."""
    module: Any = importlib.import_module("blinkpy.dpu.link.link_thread")
    pair, within, go = Notes([0.0]), threading.Event(), threading.Event()
    vars(pair)["check"] = lambda: (within.set(), go.wait(30))
    thread = module.LinkThread()
    thread.add(pair, lambda *_: None)
    thread.start()
    removing = threading.Thread(target=thread.remove, args=(pair,))
    try:
        assert within.wait(30)
        removing.start()
        removing.join(0.2)
        assert removing.is_alive()
    finally:
        go.set()
        removing.join(30)
        thread.close()
    assert not removing.is_alive()


def test_a_short_lease_shortens_the_rounds() -> None:
    module: Any = importlib.import_module("blinkpy.dpu.link.link_thread")
    thread, pair = module.LinkThread(), Notes([0.0])
    assert thread._pause_s() == module.CHECK_S
    pair.facts.lease_ms = 100
    thread.add(pair, lambda *_: None)
    assert thread._pause_s() == pytest.approx(0.025)


def test_a_proof_of_life_is_as_old_as_half_a_lease_and_no_older(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the link thread, and of the event loop."""
    beat, loop = "The queue pair has had no heartbeat for half its lease.", "The event loop has not run for half a lease."
    for checked, progressed, problem in ((0.0, 0.0, beat), (9.0, 0.0, loop), (0.0, 9.0, beat), (9.0, 9.0, None)):
        clock = [checked]
        _, thread = made(monkeypatch, clock)
        pair, thread.progressed = Notes(clock), progressed
        thread.add(pair, lambda *_: None)
        clock[0] = LEASE_S / 2
        assert thread.problem_of(pair) is None
        clock[0] += 1e-4
        assert thread.problem_of(pair) == problem
        thread.remove(pair)
        assert thread.problem_of(pair) == beat


def test_an_unexpected_exception_is_reported() -> None:
    module: Any = importlib.import_module("blinkpy.dpu.link.link_thread")
    found, failed = list[BaseException](), threading.Event()
    thread = module.LinkThread(on_failure=lambda error: (found.append(error), failed.set()))
    thread.add(Notes([0.0], ZeroDivisionError("unexpected")), lambda *_: None)
    thread.start()
    assert failed.wait(30)
    thread.close()
    assert [type(error) for error in found] == [ZeroDivisionError]


def test_the_log_shows_where_the_loop_stands(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = [50.0]
    module, thread = made(monkeypatch, clock)
    thread._loop_thread = threading.get_ident()
    thread.progress()
    rounds(thread, clock, 2 * module.STALL_SHOWN_S, loop_runs=False)
    (line,) = caplog.messages
    assert f"been blocked for {module.STALL_SHOWN_S:.0f} s" in line and "test_the_log_shows_where_the_loop_stands" in line
    rounds(thread, clock, 1.0, loop_runs=True)
    assert caplog.messages[1:] == ["the event loop is running again"]
