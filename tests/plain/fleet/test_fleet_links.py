"""A fleet's knowledge of its engines when it chooses one: the load words, and the prompts that this worker just placed
there."""

import asyncio
import dataclasses
import random
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from blinkpy.dpu import engine_link
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.engine_link import EngineLink
from blinkpy.dpu.engine_starts import EngineEntry
from blinkpy.dpu.fleet import moves
from blinkpy.dpu.fleet.engine_load import LOAD_S, EngineLoad
from blinkpy.dpu.fleet.engines import Engines
from blinkpy.dpu.generation import Flight
from blinkpy.dpu.link.queue_pair import EngineLostError
from blinkpy.dpu.metrics import Metrics
from blinkpy.queues.layout import BLOCK_WORDS
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER, ENGINE_STATE, GAUGE, STATE_NAMES, STATE_READY

ANY: Any = None
THREAD: Any = SimpleNamespace(add=lambda *_: None, remove=lambda _: None)


def no_engine() -> Any:
    raise EngineLostError("there is no engine")


def made_link() -> Any:
    owner: Any = SimpleNamespace(
        several=True, keeps_flights=True, metrics=SimpleNamespace(count=lambda *_: None), thread=THREAD, gauge=lambda *_: None,
        take_back=lambda *_: None, link_lost=lambda _: None,
    )  # fmt: skip
    return EngineLink(owner, 3, EngineEntry("first", no_engine, ANY))


def made_pair(free_slots: int, words: list[int] | None = None, instance: int = 1) -> Any:
    words = [0] * BLOCK_WORDS if words is None else words
    return SimpleNamespace(
        free_slots=free_slots, in_flight=0, facts=SimpleNamespace(page_size=4, num_pages=64, instance=instance),
        transport=SimpleNamespace(read_engine=lambda: list(words), read_engine_state=lambda: STATE_READY),
    )  # fmt: skip


def test_a_load_is_what_the_engine_published_last(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    draw, now = random.Random(seed), 50.0
    monkeypatch.setattr(engine_link, "time", SimpleNamespace(monotonic=lambda: now))
    link, words = made_link(), [0] * BLOCK_WORDS
    for _ in range(200):
        words[:] = [draw.randrange(1 << 20) for _ in words]
        words[COUNTER["requests_accepted"]] *= draw.random() < 0.5
        link.pair, link._deferred = made_pair(draw.randrange(9), words), [None] * draw.randrange(3)
        meter = link._load
        meter.outstanding, meter.unseen = draw.randrange(1000), draw.randrange(1000)
        unseen = meter.unseen * (words[COUNTER["requests_accepted"]] == meter.words[COUNTER["requests_accepted"]])
        now += 2 * LOAD_S
        spare = link.pair.free_slots - len(link._deferred)
        accepted = words[COUNTER["requests_accepted"]] or 1
        waiting = words[GAUGE["requests_waiting"]] * words[COUNTER["prompt_tokens"]] // accepted
        free, running = words[GAUGE["pages_free"]] + words[GAUGE["pages_cached"]], words[GAUGE["requests_running"]]
        for _ in range(2):  # words published since then do not count yet
            load = link.load()
            assert [getattr(load, name) for name in EngineLoad.__slots__] == [
                *(3, spare, waiting, running, free, meter.outstanding, unseen, spare > 0)
            ]
            words[:] = [0] * BLOCK_WORDS


def test_words_of_all_engines_are_sums_and_the_best_state(seed: int) -> None:
    """Ready before draining before starting; in other cases, the state of the first engine. An engine without a link counts
    nowhere.
    """
    draw, best = random.Random(seed), ["ready", "draining", "starting"]
    for _ in range(300):
        blocks = [[draw.randrange(1 << 20) for _ in range(BLOCK_WORDS)] for _ in range(draw.randint(0, 4))]
        names = [draw.choice(STATE_NAMES) for _ in blocks]
        for block, name in zip(blocks, names, strict=True):
            block[ENGINE_STATE] = STATE_NAMES.index(name)
        known = [*blocks, *[None] * draw.randrange(3)]
        draw.shuffle(known)
        order = [STATE_NAMES[block[ENGINE_STATE]] for block in known if block is not None]
        links = [SimpleNamespace(engine_words=lambda block=block: block) for block in known]
        found = Engines.engine_words(cast(Engines, SimpleNamespace(links=links)))
        if not blocks:
            assert found is None
            continue
        assert found is not None and STATE_NAMES[found[ENGINE_STATE]] == next((one for one in best if one in order), order[0])
        for word in range(BLOCK_WORDS):
            assert word == ENGINE_STATE or found[word] == sum(block[word] for block in blocks)


def test_prompts_are_unseen_until_the_engine_accepts_any(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """As of the last read: a link reads every LOAD_S seconds. Prompts lost with their engine do not count."""
    draw, now, looked_at = random.Random(seed), 50.0, 0.0
    monkeypatch.setattr(engine_link, "time", SimpleNamespace(monotonic=lambda: now))
    link, words, accepted, unseen = made_link(), [0] * BLOCK_WORDS, 0, 0
    pair = link.pair = made_pair(9, words)
    pair.submit, pair.abandon, pair.transport.close = lambda *_: SimpleNamespace(), list, list
    for _ in range(500):
        event = draw.random()
        if event < 0.4:
            prompt, sampling = np.arange(draw.randint(1, 50), dtype=np.int32), RequestParameters(max_tokens=1)
            generation = SimpleNamespace(
                grammar=None, rules=None, prediction=None, submitted=0.0, scoring=False, flight=Flight(prompt, sampling)
            )
            link._hand_over(pair, (generation, prompt, sampling))
            unseen += len(prompt)
        elif event < 0.6:
            words[COUNTER["requests_accepted"]] += draw.randint(1, 3)
        elif event < 0.65:
            link._lose(EngineLostError("it is gone"))
            link.pair, unseen, looked_at = pair, 0, 0.0
        else:
            now += draw.choice((0.1, 2)) * LOAD_S
        if now - looked_at > LOAD_S:
            unseen *= accepted == words[COUNTER["requests_accepted"]]
            accepted, looked_at = words[COUNTER["requests_accepted"]], now
        assert link.load().unseen_tokens == unseen


def test_an_engine_is_idle_without_running_and_waiting_requests() -> None:
    link = made_link()
    assert link.is_idle()
    link.pair = made_pair(4)
    assert link.is_idle()
    link._deferred = [None]
    assert not link.is_idle(), "requests that wait for space in the arenas would be forgotten"
    link._deferred, link.pair.in_flight = [], 1
    assert not link.is_idle()


def test_a_place_belongs_to_its_new_engine_as_a_whole() -> None:
    link, starts = made_link(), SimpleNamespace(restarts=7, retry_s=lambda: 42)
    link.vacate()
    assert (link.removed, link.vacant) == (True, True)
    link.occupy(EngineEntry("second", made_link, starts))
    assert (link.label, link._connect, link.removed, link.vacant) == ("second", made_link, False, False)
    assert (link.restarts(), link.unavailable("").retry_s) == (7, 42)


def test_a_busy_engine_that_is_listed_again_stays() -> None:
    """It was about to leave, with its requests."""
    metrics: Any = SimpleNamespace(count=lambda *_: None, gauge=lambda *_: None)
    entries = [EngineEntry("a", no_engine), EngineEntry("b", no_engine)]
    fleet = Engines(entries, metrics)
    (first, _), pair = fleet.links, made_pair(4)
    first.pair, pair.in_flight = pair, 1
    for listed, leaves in ((entries[1:], True), (entries, False), (entries[1:], True), (entries[::-1], False)):
        fleet.set_engines(listed)
        assert (first.removed, first.vacant, first.status() is None) == (leaves, False, not leaves)
        assert first in fleet.links


def connected() -> Any:
    pair = made_pair(4)
    pair.epoch, pair.transport.pair, pair.transport.close, pair.close, pair.abandon = 1, 0, list, list, list
    return pair


def test_gauges_are_sums_of_the_engines_that_are_there(seed: int) -> None:
    """Also when engines join, are lost, or leave and pass their places on."""
    draw, shown, there = random.Random(seed), dict[str, float](), dict[int, tuple[int, int]]()
    metrics: Any = SimpleNamespace(count=lambda *_: None, gauge=shown.__setitem__)
    fleet = Engines([EngineEntry(str(i), connected) for i in range(3)], metrics)

    async def storm() -> None:
        for number in range(150):
            link = draw.choice(fleet.links)
            if link.pair is None:
                assert await link._try_connect() is link.pair
                there[link.index] = 0, 0
            elif draw.random() < 0.5:  # as the keeper does
                there[link.index] = slots, in_flight = draw.randrange(1, 9), draw.randrange(9)
                link._gauge("slots", slots)
                link._gauge("requests_in_flight", in_flight)
            else:
                del there[link.index]
                if draw.random() < 0.5:
                    link._lose(EngineLostError("it is gone"))
                else:
                    link.vacate()
                    link.occupy(EngineEntry(f"new {number}", connected))
            sums = (len(there), *map(sum, zip((0, 0), *there.values(), strict=True)))
            assert tuple(shown.get(name, 0) for name in ("attached", "slots", "requests_in_flight")) == sums

    asyncio.run(storm())


def test_free_slots_are_announced_after_all_moves(seed: int) -> None:
    """Not while a move waits for an engine, since moves come first; then immediately, without a completion or a poll."""
    draw, received, timers = random.Random(seed), list[int](), list[Any]()
    metrics: Any = SimpleNamespace(count=lambda *_: None, gauge=lambda *_: None)
    for _ in range(50):
        fleet: Any = Engines([EngineEntry("a", no_engine)], metrics)
        fleet.on_space = lambda fleet=fleet: received.append(len(fleet.moves))
        fleet.moves._loop = SimpleNamespace(call_later=lambda _, move_all: timers.append(move_all))
        generations = [SimpleNamespace(open=draw.random() < 0.7, flight=Flight(ANY, ANY)) for _ in range(draw.randrange(1, 4))]
        fleet.moves._settle = lambda move: draw.random() < 0.5  # it has an engine, or has ended
        fleet.take_back(generations, ANY)
        while timers:
            fleet.slots_freed()  # as a link does, behind completions
            assert received == []
            timers.pop()()
        assert len(fleet.moves) == 0 and received == [0]
        received.clear()


def test_each_prompt_of_a_request_counts_for_the_next_one(seed: int) -> None:
    """Nothing is published in between."""
    draw, loads = random.Random(seed), list[list[EngineLoad]]()
    metrics: Any = SimpleNamespace(count=lambda *_: None, gauge=lambda *_: None)

    def choose(request: Any, engines: Any) -> EngineLoad:
        loads.append([dataclasses.replace(engine) for engine in engines])
        return draw.choice(engines)

    fleet = Engines([EngineEntry(label, no_engine) for label in "abc"], metrics, rule=choose)
    slots = [draw.randint(1, 4) for _ in fleet.links]
    for link, many in zip(fleet.links, slots, strict=True):
        link.pair = made_pair(many, [STATE_READY if i == ENGINE_STATE else 0 for i in range(BLOCK_WORDS)])
    work: Any = [
        (
            SimpleNamespace(leader=None),
            np.arange(draw.randint(1, 20), dtype=np.int32),
            RequestParameters(max_tokens=draw.randint(1, 90)),
        )
        for _ in range(sum(slots))
    ]
    placed = {id(one[0]): link.index for link, part in fleet._placed(work) for one in part}
    flying, unseen, free = [0] * 3, [0] * 3, list(slots)
    for (generation, prompt, sampling), seen in zip(work, [*loads, *[None] * len(work)], strict=False):
        if seen is not None:  # with one engine left there is no choice
            assert {load.index: (load.tokens_in_flight, load.unseen_tokens, load.free_slots) for load in seen} == {
                i: (flying[i], unseen[i], free[i]) for i in range(3) if free[i] > 0
            }
        engine = placed[id(generation)]
        flying[engine] += len(prompt) + sampling.max_tokens
        unseen[engine] += len(prompt)
        free[engine] -= 1
    assert free == [0, 0, 0]
    with pytest.raises(ApiError) as refused:
        fleet._placed([*work, work[0]])
    assert refused.value.status == 429


@pytest.mark.parametrize(("expected", "reported"), [((7, 3, 20), 3), ((7, None), 1), ((4,), 4), ((), 1)])
def test_refusals_state_when_the_first_engine_is_expected(expected: tuple[int | None, ...], reported: int) -> None:
    """None: no process here starts that engine, so it may be ready at any time."""
    starts: Any = [None if seconds is None else SimpleNamespace(retry_s=lambda s=seconds: s) for seconds in expected]
    metrics: Any = SimpleNamespace(count=lambda *_: None, gauge=lambda *_: None)
    fleet = Engines([EngineEntry(f"e{i}", no_engine, one) for i, one in enumerate(starts)], metrics)
    assert fleet.unavailable("None serves.").retry_s == reported
    with pytest.raises(ApiError) as caught:
        fleet.require()
    assert (caught.value.status, caught.value.retry_s) == (503, reported)


@pytest.mark.parametrize("granted", [0, 1, 3])
def test_a_start_waits_for_all_engines_and_serves_with_one(granted: int) -> None:
    links: list[Any] = [SimpleNamespace(pair=None) for _ in range(3)]
    engines: Any = Engines([], ANY)
    engines.links[:] = links

    async def start() -> tuple[bool, int]:
        for at, link in enumerate(links[:granted], 1):
            asyncio.get_running_loop().call_later(at * 0.02, setattr, link, "pair", object())
        serves = await engines.connected(20.0 if granted == len(links) else 0.3)
        return serves, sum(link.pair is not None for link in links)

    assert asyncio.run(start()) == (granted > 0, granted)


def test_a_request_may_pause_for_the_timeout_in_all(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """Over any moves, of which some fail at first: to the last tick of the clock."""
    clock, failed = [0.0], list[ApiError]()
    monkeypatch.setattr(moves, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    for _ in range(100):
        timeout_s, places = float(rng.integers(1, 60)), rng.random(40) < 0.7
        end, finds = ApiError(503, "lost"), iter(places.tolist())
        made: Any = moves.Moves(lambda *_, finds=finds: next(finds), lambda: None, Metrics(), 100, timeout_s, lambda: None)
        flight = SimpleNamespace(paused_at=clock[0], paused_s=0.0, moves=0)
        move: Any = moves.Move(SimpleNamespace(flight=flight, fail=failed.append), end, work=cast(Any, ("work",)))
        paused, total = 0.0, 0.0
        for found in places.tolist():
            pause = int(rng.integers(1, 20))
            clock[0], paused = clock[0] + pause, paused + pause
            settled = made._settle(move)
            if total + paused > timeout_s:
                assert settled and failed == [end], (total, paused, timeout_s)
                break
            assert (settled, failed) == (found, [])
            if found:
                clock[0] += int(rng.integers(1, 100))  # with an engine
                total, paused, flight.paused_at = total + paused, 0.0, clock[0]
        failed.clear()
