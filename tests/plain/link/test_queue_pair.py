"""The queue pair's client against an engine in plain Python: requests, room, cancels, epochs, loss.

Claim front-ends/client: The client reuses no memory that is in use, and trusts no data of an earlier epoch.
Automata and token rules are not overwritten while an unconsumed entry refers to them.
"""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine, drain
from support.front_end.hash_reference import page_hashes
from support.waiting import wait_for

from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.grammar_arena import Arena
from blinkpy.dpu.link.queue_pair import EngineLostError, InFlightRequest, NoSpaceError, QueuePair
from blinkpy.queues import words as completion
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_CANCELLED, FINISH_LENGTH, FINISH_MASK

RELAXED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy


@pytest.fixture
def engine():
    with FakeEngine() as engine:
        yield engine


@pytest.fixture
def pair(engine):
    pair = attached(engine)
    yield pair
    pair.close()


def submit(pair: QueuePair, prompt: list[int], **sampling: object) -> InFlightRequest:
    return pair.submit(np.array(prompt, np.int32), RequestParameters(**sampling))


def attached(engine: FakeEngine, engine_timeout_s: float = 2.0) -> QueuePair:
    pair = QueuePair(attach_segment(engine.segment_name, 0), engine_timeout_s)
    pair.attach(5)
    return pair


@RELAXED
@given(size=st.integers(1, 40), data=st.data())
def test_arena_never_allocates_space_in_use(size, data) -> None:
    arena = Arena(size)
    pieces: list[tuple[int, range]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if pieces and data.draw(st.booleans()):
            tail, _ = pieces.pop(0)
            arena.give_back(tail)
            continue
        count = data.draw(st.integers(0, size))
        before = arena.tail
        offset = arena.take(count)
        if offset is None:
            assert pieces, "an empty arena has room for anything"
            continue
        if data.draw(st.integers(0, 5)) == 0:
            arena.undo(before)
            continue
        assert arena.tail - before <= 2 * size, "positions grow with what is taken"
        mine = range(offset, offset + count)
        assert 0 <= mine.start <= mine.stop <= size, "a piece never wraps"
        assert not any(set(mine) & set(other) for _, other in pieces)
        pieces.append((arena.tail, mine))


def test_arena_skips_an_end_that_is_too_small() -> None:
    arena = Arena(10)
    assert [arena.take(6), arena.take(3)] == [0, 6]
    arena.give_back(6)
    assert arena.take(2) == 0, "of the two units one would be outside"
    assert arena.take(5) is None
    assert arena.take(4) == 2


def test_arena_refuses_invalid_sizes() -> None:
    arena = Arena(8)
    with pytest.raises(ValueError, match="exceed the arena"):
        arena.take(9)
    with pytest.raises(ValueError, match="outside"):
        arena.give_back(1)


def test_many_requests_complete_in_order(engine, pair, rng, monkeypatch) -> None:
    """Random lengths, more requests than slots, and rings and a count of laps that wrap. The engine gets each prompt, its page
    hashes and its parameters. Each answer, and each record of log probabilities, is exactly as expected."""
    monkeypatch.setattr(completion, "LAPS", 3)  # words of the lap before never look new
    facts = engine.facts
    multipliers = facts.hash_multiplier_1, facts.hash_multiplier_2
    sent: list[tuple[InFlightRequest, np.ndarray, RequestParameters]] = []
    got: dict[InFlightRequest, list[tuple[int, int]]] = {}

    def done() -> bool:
        while len(sent) < 120:
            prompt = rng.integers(0, FACTS.vocab_size, rng.integers(1, 100)).astype(np.int32)
            parameters = RequestParameters(
                max_tokens=int(rng.integers(1, 20)),
                logprobs=int(rng.integers(-1, 2)),
                cache_salt=int(rng.integers(0, 2)) * 77,
                temperature=float(rng.choice([0.25, 1])),
            )
            try:
                sent.append((pair.submit(prompt, parameters), prompt, parameters))
            except NoSpaceError:
                break
        for request, token, flags in pair.poll():
            got.setdefault(request, []).append((token, flags))
        return len(sent) == 120 and not pair.in_flight

    wait_for(done)
    for taken, (request, prompt, parameters) in zip(engine.submitted, sent, strict=True):
        assert taken.prompt == prompt.tolist()
        assert taken.hashes == page_hashes(prompt, facts.page_size, multipliers, parameters.cache_salt)
        assert taken.entry["temperature"] == parameters.temperature
        tokens, flags = zip(*got[request], strict=True)
        assert list(tokens) == [prompt[i % len(prompt)] for i in range(parameters.max_tokens)]
        assert [flag & FINISH_MASK for flag in flags] == [0] * (len(flags) - 1) + [FINISH_LENGTH]
        asked = tokens if parameters.logprobs >= 0 else ()
        assert list(request.records) == [list(zip(*engine.likely(token), strict=True)) for token in asked]
    assert len({request.request_id for request in got}) == 120
    assert all(request.request_id >> 32 == pair.epoch for request in got)
    assert pair.free_slots == SIZES.slots
    assert pair.stray_completions == 0


def test_a_poll_stops_at_its_limits_and_reports_it(engine, pair, rng) -> None:
    """Of all completions, and of final ones: a reader that continues after it stopped early misses none, and
    gets them in order."""
    lengths = {submit(pair, [i + 1], max_tokens=int(rng.integers(1, 5))): i for i in range(SIZES.slots)}
    got: dict[InFlightRequest, list[int]] = {request: [] for request in lengths}

    def done() -> bool:
        most, most_final = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        events = pair.poll(most, most_final)
        final = sum(flags & FINISH_MASK > 0 for _, _, flags in events)
        assert len(events) <= most and final <= most_final
        assert pair.stopped_early == (len(events) == most or final == most_final)
        for request, token, _ in events:
            got[request].append(token)
        return not pair.in_flight

    wait_for(done)
    for request, i in lengths.items():
        assert set(got[request]) == {i + 1}, "the engine repeats the prompt"
    assert sorted(map(len, got.values())) == sorted(taken.entry["max_tokens"] for taken in engine.submitted)
    assert pair.poll() == [] and not pair.stopped_early


def test_busy_when_the_arenas_are_full_and_nothing_is_overwritten(engine, pair) -> None:
    engine.consume_nothing = True
    longest = FACTS.max_model_len - 1
    for i in range(SIZES.prompt_tokens // longest):
        pair.submit(np.full(longest, i, np.int32), RequestParameters(max_tokens=1))
    with pytest.raises(NoSpaceError, match="arena"):
        pair.submit(np.full(longest, 99, np.int32), RequestParameters(max_tokens=1))
    engine.consume_nothing = False
    drain(pair)
    assert [set(request.prompt) for request in engine.submitted] == [{0}, {1}, {2}, {3}]


def test_refused_sampling_takes_no_space(engine, pair) -> None:
    for _ in range(50):
        with pytest.raises(ValueError, match="fit"):
            pair.submit(np.zeros(100, np.int32), RequestParameters(seed=2**70))
    assert pair.in_flight == 0
    pair.submit(np.zeros(120, np.int32), RequestParameters(max_tokens=1))
    drain(pair)


def test_late_cancel_does_not_undo_anothers(engine, pair) -> None:
    old = submit(pair, [4], max_tokens=1)
    drain(pair)
    engine.hold = True
    new = submit(pair, [4], max_tokens=50)
    assert new.slot == old.slot
    wait_for(lambda: bool(engine.pairs[0].requests))
    engine.pause()
    pair.cancel(new)
    pair.cancel(new)
    pair.cancel(old)
    engine.paused = False
    assert [flags for _, flags in drain(pair)[new]] == [FINISH_CANCELLED]
    assert engine.cancels == 1


def test_a_stopped_engine_loses_everything_at_once(engine) -> None:
    pair = attached(engine, engine_timeout_s=60)
    engine.hold = True
    request = submit(pair, [1])
    pair.check()
    engine.pause()
    pair.engine_timeout_s = 0.05
    with pytest.raises(EngineLostError, match="no progress"):
        wait_for(pair.check)
    assert pair.abandon() == [request]
    with pytest.raises(EngineLostError):
        submit(pair, [1])
    with pytest.raises(EngineLostError, match="grant"):
        pair.attach(0.05)
    engine.paused = False
    pair.attach(5)
    pair.close()
