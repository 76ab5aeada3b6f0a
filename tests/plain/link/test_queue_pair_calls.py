"""The queue pair's client, call by call, over a transport that notes them and whose memory and clock a test sets."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from support.automata import random_automaton
from support.front_end.fake_engine import FACTS

from blinkpy.dpu.link import queue_pair
from blinkpy.dpu.link.queue_pair import EngineLostError, EngineUnavailableError, NoSpaceError, QueuePair
from blinkpy.queues import words as W
from blinkpy.queues.layout import BLOCK_WORDS, QueueLayout, QueueSizes
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import SQ_ENTRY
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import (
    FINISH_LENGTH,
    HAS_LOGPROBS,
    HAS_TOKEN,
    LOGPROB_ENTRIES,
    LOGPROB_ENTRY,
    lap_of,
    pack_completion,
    pack_hits,
)
from blinkpy.transport.contract import EngineWords, TransportError

SIZES = QueueSizes(pairs=1, slots=4, sq_entries=4, cq_entries=512, prompt_tokens=64, hash_entries=12)


class Noted:
    """A transport. calls: the writes and reads. ring, records: of completions. hits: hit words."""

    def __init__(self, sizes: QueueSizes = SIZES, facts: Any = FACTS) -> None:
        self.layout, self.facts, self.pair, self.calls = QueueLayout(sizes), facts, 0, list[Any]()
        self.engine, self.words, self.fault, self.is_lost = [0] * BLOCK_WORDS, EngineWords(0, 0, 4, 0), 0, False
        self.engine[W.ENGINE_STATE] = W.STATE_READY
        self.ring, self.hits = [0] * sizes.cq_entries, [0] * sizes.slots
        self.read_pair, self.read_engine, self.lost = lambda: self.words, lambda: list(self.engine), lambda: self.is_lost
        self.read_fault, self.read_engine_state = lambda: self.fault, lambda: self.engine[W.ENGINE_STATE]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith(("write_", "ring_", "close")):
            raise AttributeError(name)
        return lambda *arguments: self.calls.append((name, *arguments))

    def read_completions(self, position: int, limit: int) -> list[int]:
        self.calls.append(("read_completions", position, limit))
        return self.ring[position % 512 :][:limit]

    def read_logprobs(self, position: int, count: int) -> Any:
        self.calls.append(("read_logprobs", position, count))
        found = np.zeros((count, LOGPROB_ENTRIES), LOGPROB_ENTRY)
        found["token"] = np.arange(position, position + count)[:, None]
        return found

    def read_hits(self, slot: int) -> int:
        self.calls.append(("read_hits", slot))
        return self.hits[slot]

    def taken(self) -> list[Any]:
        found = self.calls[:]
        self.calls.clear()
        return found


class Time:
    """Each sleep is what a test makes of it."""

    def __init__(self) -> None:
        self.now, self.sleeps, self.then = 50.0, list[float](), lambda: None
        self.monotonic = lambda: self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.then()


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr(queue_pair, "time", made)
    return made


def attached(transport: Noted, timeout_s: float = 2.0) -> QueuePair:
    pair = QueuePair(transport, timeout_s)
    claim = transport.words.epoch + 1
    read = [transport.words, transport.words._replace(epoch=claim, attached=1)]
    transport.words = read[1]
    transport.read_pair = lambda: read.pop(0) if read else transport.words
    pair.attach(1.0)
    transport.taken()
    return pair


def stamp(position: int, epoch: int = 5) -> int:
    return epoch << 32 | position


def test_a_claim_is_followed_by_heartbeats_until_it_is_granted(time: Time) -> None:
    transport = Noted()
    pair = QueuePair(transport)
    assert (pair.poll(), pair.epoch, pair.live(), pair.in_flight, pair.free_slots) == ([], 0, [], 0, 4)
    with pytest.raises(EngineLostError, match="no queue pair is attached"):
        pair.submit(np.ones(1, np.int32), RequestParameters())
    pair.heartbeat()
    assert transport.taken() == [("write_word", W.FRONT_HEARTBEAT, 1)], "and no doorbell"
    answers = [EngineWords(2, 8, 5, 0), EngineWords(3, 9, 4, 1), EngineWords(7, 510, 5, 1)]

    def then() -> None:
        transport.words = answers.pop(0)

    time.then = then
    pair.attach(1.0)
    beats = [("write_word", W.FRONT_HEARTBEAT, beat) for beat in (2, 3, 4, 5, 6)]
    reported = [("ring_doorbell", stamp(7)), ("write_word", W.FRONT_CQ_HEAD, stamp(510))]
    assert transport.taken() == [("write_word", W.FRONT_CLAIM, 5), *beats, *reported]
    assert (pair.epoch, time.sleeps) == (5, [queue_pair.CLAIM_POLL_S] * 3)
    pair.heartbeat()
    assert transport.taken() == [("write_word", W.FRONT_HEARTBEAT, 7), *reported]
    answers.append(EngineWords(8, 511, 6, 1))
    pair.attach(1.0)
    beats = [("write_word", W.FRONT_HEARTBEAT, beat) for beat in (8, 9, 10)]
    reported = [("ring_doorbell", stamp(8, 6)), ("write_word", W.FRONT_CQ_HEAD, stamp(511, 6))]
    assert transport.taken() == [("write_word", W.FRONT_CLAIM, 6), *beats, *reported], "nothing more of the epoch before"


def test_a_claim_that_is_not_granted_fails_in_time(time: Time) -> None:
    transport = Noted()
    time.then = lambda: setattr(time, "now", time.now + 0.25)
    transport.engine[W.ENGINE_STATE] = W.STATE_STARTING
    with pytest.raises(EngineLostError, match=r"the engine \(starting\) did not grant the queue pair within 1 s"):
        QueuePair(transport).attach(1.0)
    assert len(time.sleeps) == 4
    time.then = lambda: setattr(transport, "words", EngineWords(0, 0, 6, 1))
    with pytest.raises(EngineLostError, match="the engine granted epoch 6, but this front end claimed 5"):
        QueuePair(transport).attach(1.0)
    transport.words = EngineWords(0, 0, W.EPOCH_LIMIT, 0)
    with pytest.raises(EngineLostError, match="used up its epochs"):
        QueuePair(transport).attach(1.0)
    transport.words = EngineWords(0, 0, W.EPOCH_LIMIT - 1, 0)
    assert attached(transport).epoch == W.EPOCH_LIMIT


LOSSES: dict[str, tuple[Any, str]] = {
    "fault": (lambda transport: setattr(transport, "fault", 1), "the host reports that the engine died"),
    "stopped": (lambda transport: transport.engine.__setitem__(W.ENGINE_STATE, W.STATE_STOPPED), "the engine is stopped"),
    "faulted": (lambda transport: transport.engine.__setitem__(W.ENGINE_STATE, W.STATE_FAULTED), "the engine is faulted"),
    "revoked": (lambda t: setattr(t, "words", t.words._replace(attached=0)), r"epoch 5 of .* revoked \(now 5\): the lease"),
    "replaced": (lambda t: setattr(t, "words", t.words._replace(epoch=6)), r"epoch 5 of .* revoked \(now 6\): the lease"),
    "gone": (lambda transport: setattr(transport, "is_lost", True), "the engine is gone"),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_is_detected_by_a_check(time: Time, loss: str) -> None:
    transport = Noted()
    pair = attached(transport)
    pair.check()
    LOSSES[loss][0](transport)
    with pytest.raises(EngineLostError, match=LOSSES[loss][1]):
        pair.check()
    pair.abandon()
    if loss in ("revoked", "replaced"):
        pair.check()  # it has no epoch to lose


def test_a_stalled_heartbeat_is_detected_after_its_deadline(time: Time) -> None:
    transport = Noted()
    time.now = 40.0
    pair = QueuePair(transport, 2.0)
    transport.engine[W.ENGINE_HEARTBEAT] = -1
    time.now = 42.0
    pair.check()
    for word, beat in ((W.ENGINE_HEARTBEAT, 0), (W.ENGINE_PROGRESS, 1), (W.ENGINE_PROGRESS, 2), (W.ENGINE_HEARTBEAT, -1)):
        transport.engine[word] = beat
        time.now += 3.0
        pair.check()
        time.now += 2.0
        pair.check()
    time.now += 0.25
    with pytest.raises(EngineLostError, match=r"the engine has made no progress for 2\.2 s"):
        pair.check()
    time.then = lambda: setattr(transport, "words", EngineWords(0, 0, 5, 1))
    pair.attach(1.0)  # the time begins again, whenever it last moved
    time.now += 2.0
    pair.check()


@pytest.mark.parametrize(
    ("state", "name"), [*enumerate(W.STATE_NAMES), (-1, "in the unknown state -1"), (5, "in the unknown state 5")]
)
def test_states_have_names(state: int, name: str) -> None:
    transport = Noted()
    pair = attached(transport)
    transport.engine[W.ENGINE_STATE] = state
    assert pair.state_name() == name
    if name != "ready":
        more = " and accepts no new requests" if name == "draining" else ""
        with pytest.raises(EngineUnavailableError, match=f"the engine is {name}{more}$"):
            pair.submit(np.ones(1, np.int32), RequestParameters())


def test_a_submission_that_can_not_be_sent_is_not_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller of submit gets the error; abandon() would report it once more, and it would continue twice."""
    transport = Noted()
    pair = attached(transport)
    first = pair.submit(np.ones(1, np.int32), RequestParameters())

    def fail(doorbell: int) -> None:
        raise TransportError("the card fell out")

    monkeypatch.setattr(transport, "ring_doorbell", fail, raising=False)
    with pytest.raises(TransportError, match="the card fell out"):
        pair.submit(np.ones(1, np.int32), RequestParameters())
    assert (pair.in_flight, pair.free_slots, pair.live()) == (1, 3, [first])
    assert pair.abandon() == [first]


def test_what_a_submission_writes_in_which_order() -> None:
    transport = Noted()
    transport.words = EngineWords(2**40 + 6, 0, 4, 0)
    pair = attached(transport)
    offsets, hashed = [0, 10, 13], [0, 2]
    for number, length in enumerate((10, 3, 8)):
        prompt = np.arange(length, dtype=np.int32)
        request = pair.submit(prompt, RequestParameters(max_tokens=7 + number), owner=f"o{number}")
        names = ["write_prompt", *["write_hashes"] * (length >= 4), "write_entry", "ring_doorbell"]
        calls = dict(zip(names, transport.taken(), strict=True))
        assert [call[0] for call in calls.values()] == names
        assert calls["write_prompt"][1:2] == (offsets[number],)
        assert calls["write_prompt"][2] is prompt
        assert calls["write_entry"][1] == (2 + number) % 4
        entry = np.frombuffer(calls["write_entry"][2], SQ_ENTRY)[0]
        head = [
            int(entry[name])
            for name in ("request_id", "epoch", "slot", "prompt_offset", "prompt_length", "hash_count", "max_tokens")
        ]
        assert head == [stamp(number + 1), 5, number, offsets[number], length, length // 4, 7 + number]
        if length >= 4:
            assert entry["hash_offset"] == calls["write_hashes"][1] == hashed.pop(0)
            assert len(calls["write_hashes"][2]) == length // 4
        assert calls["ring_doorbell"] == ("ring_doorbell", stamp(7 + number))
        assert (request.slot, request.owner, request.request_id) == (number, f"o{number}", stamp(number + 1))
        assert (pair.in_flight, pair.free_slots, pair.live()[-1]) == (number + 1, 3 - number, request)
    requests = pair.live()
    pair.cancel(requests[1])
    pair.cancel(requests[1])
    assert transport.taken() == [("write_cancel", 1, stamp(2))]
    pair.close()
    assert transport.taken() == [*(("write_cancel", i, stamp(i + 1)) for i in range(3)), ("close",)]
    assert (pair.in_flight, pair.live()) == (0, [])
    broken: Any = Noted()
    lost = attached(broken)
    lost.submit(np.ones(1, np.int32), RequestParameters())

    def fail(*_: Any) -> None:
        raise TransportError("gone")

    setattr(broken, "write_cancel", fail)  # noqa: B010 - it is found by name
    broken.taken()
    lost.close()
    assert broken.taken() == [("close",)]


@pytest.mark.parametrize(("tokens", "entries", "longest"), [(64, 12, 51), (40, 12, 40), (64, 1, 7)])
def test_the_longest_prompt_fits_and_its_space_is_freed_after_reading(tokens: int, entries: int, longest: int) -> None:
    transport = Noted(QueueSizes(1, 4, 4, 512, tokens, entries))
    pair = attached(transport)
    assert pair.longest_prompt == longest
    for length in (0, longest + 1):
        with pytest.raises(ValueError, match=f"a prompt has 1 to {longest} tokens, not {length}"):
            pair.submit(np.zeros(length, np.int32), RequestParameters())
    pair.submit(np.zeros(longest, np.int32), RequestParameters())
    pair.submit(np.zeros(1, np.int32), RequestParameters()) if tokens > longest else None
    with pytest.raises(NoSpaceError, match="arena is full"):
        pair.submit(np.zeros(longest, np.int32), RequestParameters())
    transport.words = transport.words._replace(sq_head=pair._sq_tail)
    pair.submit(np.zeros(longest, np.int32), RequestParameters())
    for head in (pair._sq_tail + 1, pair._sq_tail - 2):
        transport.words = transport.words._replace(sq_head=head)
        words = f"the engine reports {head} consumed entries, but {pair._sq_head} to {pair._sq_tail} are possible"
        with pytest.raises(EngineLostError, match=words):
            pair.submit(np.zeros(1, np.int32), RequestParameters())


def test_an_ended_request_frees_its_arena_space_at_once() -> None:
    """The engine has read its entry, even where the transport's words are older than the completion."""
    transport = Noted(QueueSizes(1, 4, 4, 512, 40, 12))
    pair = attached(transport)
    request = pair.submit(np.zeros(40, np.int32), RequestParameters())
    with pytest.raises(NoSpaceError, match="arena is full"):
        pair.submit(np.zeros(40, np.int32), RequestParameters())
    at = pair._cq_position
    transport.ring[at % 512] = pack_completion(request.slot, 1, HAS_TOKEN | FINISH_LENGTH, lap_of(at, 512))
    assert len(pair.poll()) == 1 and transport.words.sq_head < request.after
    pair.submit(np.zeros(40, np.int32), RequestParameters())


def test_hashes_run_short_and_undo_what_was_taken() -> None:
    transport = Noted(QueueSizes(1, 4, 4, 512, 4096, 12))
    pair = attached(transport)
    pair.submit(np.zeros(40, np.int32), RequestParameters())
    before = pair._prompts.tail, pair._hashes.tail
    assert before == (40, 10)
    for refused, error in ((RequestParameters(), NoSpaceError), (RequestParameters(seed=2**70), ValueError)):
        with pytest.raises(error, match="the hash arena is full" if error is NoSpaceError else "does not fit"):
            pair.submit(np.zeros(12 if error is NoSpaceError else 8, np.int32), refused)
        assert (pair._prompts.tail, pair._hashes.tail, pair.in_flight) == (*before, 1)


def test_ids_end_and_slots_run_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = attached(Noted())
    for _ in range(4):
        pair.submit(np.ones(1, np.int32), RequestParameters())
    with pytest.raises(NoSpaceError, match="all slots are in use"):
        pair.submit(np.ones(1, np.int32), RequestParameters())
    monkeypatch.setattr(queue_pair, "REQUEST_LIMIT", 4)
    with pytest.raises(EngineLostError, match="the request ids of this epoch are used up"):
        pair.submit(np.ones(1, np.int32), RequestParameters())


@pytest.mark.parametrize(("longest", "pages", "context"), [(128, 64, 128), (300, 64, 256)])
def test_the_context_is_what_fits(longest: int, pages: int, context: int) -> None:
    transport = Noted(facts=FACTS._replace(max_model_len=longest, num_pages=pages))
    assert QueuePair(transport).context == context


@pytest.mark.parametrize("word", [0, 7, 8, 9, 500, 1 << 62])
def test_no_hit_word_makes_a_poll_read_again_or_less(word: int) -> None:
    """Whatever the word is, also the ring's position itself, each completion is taken once."""
    transport = Noted()
    pair = attached(transport)
    request = pair.submit(np.ones(1, np.int32), RequestParameters())
    transport.hits[request.slot] = word
    for position in range(8):
        transport.ring[position] = pack_completion(request.slot, position, HAS_TOKEN, lap_of(position, 512))
    assert [token for _, token, _ in pair.poll()] == list(range(8))
    assert pair.poll() == []
    request.silent, pair._cq_position = True, 490  # a later start, with more than one window behind it
    for position in range(490, 512):
        transport.ring[position] = pack_completion(request.slot, position, HAS_TOKEN, lap_of(position, 512))
    assert [token for _, token, _ in pair.poll()] == list(range(490, 512))
    assert pair.poll() == []


def test_a_poll_takes_at_most_its_limit(rng: np.random.Generator) -> None:
    transport = Noted()
    transport.words = EngineWords(0, 500, 4, 0)
    pair = attached(transport)
    request = pair.submit(np.ones(1, np.int32), RequestParameters())
    for position in range(500, 900):
        transport.ring[position % 512] = pack_completion(0, position, HAS_TOKEN, lap_of(position, 512))
    position = 500
    while position < 900:
        most = int(rng.integers(1, 60))
        transport.taken()
        until = min(900, position + most)
        assert pair.poll(most) == [(request, token, HAS_TOKEN) for token in range(position, until)]
        calls = transport.taken()
        assert all(call[1] + call[2] <= position + most for call in calls if call[0] == "read_completions")
        position = until
        assert calls[-1] == ("write_word", W.FRONT_CQ_HEAD, stamp(position))


def test_a_poll_that_has_all_ends_that_it_may_take_reads_no_further(rng: np.random.Generator) -> None:
    """The last one may be anywhere in a window, as far as most_final allows, also its last word. Then it has stopped
    early; a call that takes nothing, since no engine is there, has not, whatever the call before did."""
    for last in (int(rng.integers(1, queue_pair.FIRST_WINDOW - 1)), queue_pair.FIRST_WINDOW - 1):
        transport = Noted()
        pair = attached(transport)
        assert not pair.stopped_early, "nothing was polled yet"
        for _ in range(4):
            pair.submit(np.ones(1, np.int32), RequestParameters())
        ends = {int(rng.integers(last)): 1, last: 3, last + 1: 0}
        for position in range(last + 3):
            flags = HAS_TOKEN | (FINISH_LENGTH if position in ends else 0)
            transport.ring[position] = pack_completion(ends.get(position, 2), position, flags, lap_of(position, 512))
        transport.taken()
        assert [token for _, token, _ in pair.poll(most_final=2)] == list(range(last + 1))
        assert [call for call in transport.taken() if call[0] == "read_completions"] == [("read_completions", 0, 16)]
        assert pair.stopped_early
        assert [token for _, token, _ in pair.poll(1, 2)] == [last + 1] and pair.stopped_early
        pair.abandon()
        assert pair.poll() == [] and not pair.stopped_early


def test_polls_read_windows_and_publish_one_head() -> None:
    """A small window first, then large ones, at most a ring; records in one piece from the first to the last that has one."""
    transport = Noted()
    transport.words = EngineWords(0, 500, 4, 0)
    pair = attached(transport)
    requests = [pair.submit(np.ones(1, np.int32), RequestParameters()) for _ in range(3)]
    assert [request.after for request in requests] == [1, 2, 3]
    transport.hits = [pack_hits(requests[0].request_id, 3), pack_hits(requests[0].request_id, 5), 0, 0]
    transport.taken()
    assert pair.poll() == []
    assert transport.taken() == [("read_completions", 500, 16)]
    expected = []
    for position in range(500, 500 + 300):
        slot, flags = position % 3, HAS_TOKEN | (HAS_LOGPROBS if position in (503, 505, 520) else 0)
        slot = {502: 3, 504: 60000, 506: 4}.get(position, slot)  # slots without such a request
        transport.ring[position % 512] = pack_completion(slot, position, flags, lap_of(position, 512))
        if slot < 3:
            expected.append((requests[slot], position, flags))
    assert pair.poll() == expected
    reads = [("read_completions", 500, 16), ("read_completions", 512, 256), ("read_completions", 768, 244)]
    records = [("read_logprobs", 503, 3), ("read_logprobs", 520, 1)]
    head = ("write_word", W.FRONT_CQ_HEAD, stamp(800))
    hits = [("read_hits", slot) for slot in (2, 0, 1)]  # once for each, with its first word
    assert transport.taken() == [reads[0], *hits, records[0], reads[1], records[1], reads[2], head]
    assert [request.cached_tokens for request in requests] == [3 * FACTS.page_size, 0, 0]
    assert sorted(record[0][0] for request in requests for record in request.records) == [503, 505, 520]
    assert pair.stray_completions == 3
    pair._cq_position = 1024
    for position in range(1024, 1536):
        finish = FINISH_LENGTH if position == 1535 else 0
        transport.ring[position % 512] = pack_completion(0, 1, HAS_TOKEN | finish, lap_of(position, 512))
    assert len(pair.poll()) == 512
    assert [call[1] for call in transport.taken() if call[0] == "read_completions"] == [1024, 1040, 1296], "no more than a ring"
    assert (pair.in_flight, pair._free[-1], pair.live()) == (2, 0, requests[1:])
    pair.cancel(requests[0])
    assert transport.taken() == [], "it has ended"
    # Its entry, and those before it, were consumed, whatever the transport knows yet.
    assert pair._ended == requests[0].after
    for position, slot in ((1536, 2), (1537, 1)):
        transport.ring[position % 512] = pack_completion(slot, 1, HAS_TOKEN | FINISH_LENGTH, lap_of(position, 512))
    assert len(pair.poll()) == 2
    assert pair._ended == requests[2].after


def test_submissions_beyond_the_engines_bounds_are_refused_before_writing(rng: np.random.Generator) -> None:
    """Each bound to the word: of one piece, the engine's slots or this client's arena, whichever is less; of two, the arena."""
    grammar = random_automaton(rng, states=6, classes=2)
    rules = TokenRules(FACTS.vocab_size, dict.fromkeys(range(int(rng.integers(1, 20))), 1.0))
    words, more = len(grammar.words()), len(rules.words())

    def refused(share: int, slot: int, arena: int, *parts: Any) -> str:
        sizes = dataclasses.replace(SIZES, prompt_tokens=512)
        facts = FACTS._replace(grammar_share=share, grammar_words=slot, grammar_arena=arena)
        try:
            QueuePair(Noted(sizes, facts)).require_space(*parts)
        except ValueError as error:
            return str(error)
        return ""

    limit = "but the engine's limit is"
    for slot, arena in ((0, 400), (400, 0)):
        for parts, size, what in (
            ((grammar,), words, "grammar takes {} bytes as an automaton"),
            ((None, rules), more, "token rules take {} bytes"),
        ):
            assert refused(2, slot or size, arena or size, *parts) == ""
            reported = f"the {what.format(4 * size)}, {limit} {4 * size - 4}"
            assert refused(2, slot or size - 1, arena or size - 1, *parts) == reported
    assert refused(2, 400, words + more, grammar, rules) == ""
    reported = f"the grammar and the token rules take {4 * (words + more)} bytes, {limit} {4 * (words + more) - 4}"
    assert refused(2, 400, words + more - 1, grammar, rules) == reported
    assert refused(1, 400, 400, grammar, rules) == "the engine has memory for a grammar or token rules, but not for both"
    assert refused(1, 400, 400, grammar) == refused(1, 400, 400, None, rules) == refused(0, 0, 0, None) == ""
    assert refused(0, 400, 400, grammar) == "the engine does not support grammars"
    assert refused(0, 400, 400, None, rules) == "the engine does not support token rules"
    other = TokenRules(FACTS.vocab_size + 1, {1: 1.0})
    reported = f"the token rules are for {FACTS.vocab_size + 1} tokens, but the model has {FACTS.vocab_size}"
    assert refused(2, 400, 400, None, other) == reported


def test_an_engine_that_has_ended_is_lost_at_once_and_a_claim_that_fails_leaves_no_pair(time: Time) -> None:
    for state, name in ((W.STATE_STOPPED, "stopped"), (W.STATE_FAULTED, "faulted")):
        transport = Noted()
        pair = attached(transport)
        transport.engine[W.ENGINE_STATE] = state
        with pytest.raises(EngineLostError, match=f"the engine is {name}"):
            pair.check()
    transport = Noted()
    pair = attached(transport)
    time.then = lambda: setattr(time, "now", time.now + 1.0)
    with pytest.raises(EngineLostError, match="did not grant"):
        pair.attach(1.0)
    with pytest.raises(EngineLostError, match="no queue pair is attached"):
        pair.submit(np.ones(1, np.int32), RequestParameters())


def test_equal_heartbeat_and_progress_words_prove_life(time: Time) -> None:
    transport = Noted()
    pair = attached(transport, 2.0)
    for beat in range(3):
        transport.engine[W.ENGINE_HEARTBEAT] = transport.engine[W.ENGINE_PROGRESS] = beat
        pair.check()
        time.now += 2.5
