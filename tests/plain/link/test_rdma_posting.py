"""The RDMA front end's postings, compared with a stand-in for the card that reads memory as late as a card may:
at the completion."""

import secrets
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benchmarks.parts.rdma_cpu import FACTS, SIZES, Card, connect
from blinkpy.dpu.link import connect_rdma, rdma_writes
from blinkpy.dpu.link.connect_rdma import RdmaTransport
from blinkpy.queues.submission import SQ_ENTRY_BYTES, SQ_ENTRY_WORDS, WORD_SLOT
from blinkpy.queues.words import (
    ENGINE_HEARTBEAT,
    FRONT_CQ_HEAD,
    FRONT_DOORBELL,
    FRONT_HEARTBEAT,
    HAS_LOGPROBS,
    HAS_TOKEN,
    LOGPROB_ENTRIES,
    PAIR_ATTACHED,
    PAIR_EPOCH,
    PAIR_SQ_HEAD,
    pack_completion,
)
from blinkpy.transport.contract import EngineWords, TransportError
from blinkpy.transport.segment import Segment, create_segment
from blinkpy.transport.verbs import INLINE_LEAST, INLINE_WANTED


class LateCard(Card):
    """Takes inline data immediately, as it must, and all other data at the request for completions."""

    def __init__(self) -> None:
        super().__init__()
        self._late: list[tuple[bool, int, int, int, int, int]] = []

    def wr_set_sge(self, sge: Any) -> None:
        self._late.append((self._read, self._remote, self.wr_id, self.wr_flags, sge.addr, sge.length))

    def poll(self, most: int) -> tuple[int, list[Any]]:
        for read, remote, number, flags, local, length in self._late:
            self._read, self._remote, self.wr_id, self.wr_flags = read, remote, number, flags
            self.wr_set_inline_data(local, length)
        self._late.clear()
        return super().poll(most)


@pytest.fixture
def wired(monkeypatch) -> Iterator[tuple[RdmaTransport, Segment]]:
    for module, name in ((rdma_writes, "module"), (rdma_writes, "constants"), (connect_rdma, "constants")):
        monkeypatch.setattr(module, name, getattr(module, name))  # the replaced modules return afterwards
    segment = create_segment(f"test-{secrets.token_hex(6)}", SIZES, FACTS)
    try:
        yield connect(segment, LateCard()), segment
    finally:
        segment.close()


def test_words_are_taken_when_they_are_posted(wired) -> None:
    """They change with the next call, which does not wait for the card."""
    transport, segment = wired
    front = segment.views().front[0]
    for value in (7, 8, 9):
        transport.ring_doorbell(value)
        assert front[FRONT_DOORBELL] == value
        transport.write_word(FRONT_HEARTBEAT, 10 * value)
        assert front[FRONT_HEARTBEAT] == 10 * value
        transport.write_word(FRONT_CQ_HEAD, value << 32)
        assert front[FRONT_CQ_HEAD] == value << 32
        transport.write_cancel(3, 100 * value)
        assert segment.views().cancel[0, 3] == 100 * value


@pytest.mark.parametrize("inline", [INLINE_LEAST, INLINE_WANTED])
def test_what_is_not_inline_stays_in_the_copy_until_the_card_has_read_it(wired, rng, inline: int) -> None:
    transport, segment = wired
    transport.queue._inline_bytes = inline
    prompts = [rng.integers(0, 4096, 1000, dtype=np.int32) for _ in range(3)]
    given = np.empty(1000, np.int32)  # the caller's, which uses it again
    for i, prompt in enumerate(prompts):
        given[:] = prompt
        transport.write_prompt(1000 * i, given)
        transport.write_entry(i, bytes([i]) * SQ_ENTRY_BYTES)
        transport.ring_doorbell(i + 1)
    transport.lost()  # the card reads now
    views = segment.views()
    assert (views.prompt[0, :3000] == np.concatenate(prompts)).all()
    assert (views.sq[0, :3] == 0x01010101 * np.arange(3)[:, None]).all()


def test_completions_come_as_they_are_when_the_card_reads(wired) -> None:
    """A look's words count once its read is complete, and not before."""
    transport, segment = wired
    views = segment.views()
    assert transport.read_completions(0, 16) == []
    views.cq[0, :2] = [1 << 48, 1 << 48 | 5]
    assert transport.read_completions(0, 16) == [1 << 48, 1 << 48 | 5]
    assert transport.read_completions(2, 16) == []


@pytest.mark.parametrize("silent", [False, True])
def test_a_look_waits_for_what_its_words_need(wired, rng, silent: bool) -> None:
    """Records of log probabilities, and the hit words at a request's first completion: read once the words are there."""
    transport, segment = wired
    views, slot = segment.views(), 5
    if silent:
        entry = np.zeros(SQ_ENTRY_WORDS, np.int32)
        entry[WORD_SLOT] = slot
        transport.write_entry(0, entry.tobytes())
        transport.ring_doorbell(1)
    words = [pack_completion(slot, token, HAS_TOKEN | HAS_LOGPROBS * (not silent), 1) for token in (7, 9)]
    records = rng.integers(0, 2**62, (2, LOGPROB_ENTRIES))
    views.cq[0, :2], views.records[0, :2], views.hits[0, slot] = words, records, 77
    assert transport.read_completions(0, 16) == words
    if silent:
        assert transport.read_hits(slot) == 77
    else:
        assert transport.read_logprobs(0, 2).view(np.int64).tolist() == records.tolist()


def test_hit_words_are_read_for_the_first_completion_of_a_request_alone(wired) -> None:
    """Each read is one more round trip to the engine for its data."""
    transport, segment = wired
    views, entry, posted = segment.views(), np.zeros(SQ_ENTRY_WORDS, np.int32), list[int]()
    entry[WORD_SLOT] = 5
    transport.write_entry(0, entry.tobytes())
    transport.ring_doorbell(1)
    for position in range(3):
        before = transport.queue.posted
        views.cq[0, position] = word = pack_completion(5, position, HAS_TOKEN, 1)
        assert next(words for _ in range(10) if (words := transport.read_completions(position, 16))) == [word]
        posted.append(transport.queue.posted - before)
    assert posted == [2, 1, 1]


def test_hit_words_of_silent_requests_are_read_in_one_batch(wired) -> None:
    """While another request still has no word: data of a request that has had its first word costs no such read."""
    transport, segment = wired
    views, entry, read = segment.views(), np.zeros(SQ_ENTRY_WORDS, np.int32), list[tuple[int, int]]()
    for slot in (5, 6):
        entry[WORD_SLOT] = slot
        transport.write_entry(slot, entry.tobytes())
    transport.ring_doorbell(2)
    posting = transport._read
    transport._read = lambda tag, offset, length: (read.append((tag, length)), posting(tag, offset, length))
    expected = []
    for position, slot in enumerate((5, 5, 6, 5)):
        views.cq[0, position] = word = pack_completion(slot, position, HAS_TOKEN, 1)
        assert next(words for _ in range(10) if (words := transport.read_completions(position, 16))) == [word]
        hits = [length for tag, length in read if tag == connect_rdma.HITS]
        expected += [8 * SIZES.slots] if position in (0, 2) else []
        assert hits == expected, "a word for each slot"


def test_records_that_were_read_stay_as_they_are_while_the_next_ones_land(wired, rng) -> None:
    """Reads of records arrive in one place, which the caller of the previous read does not see."""
    transport, segment = wired
    views = segment.views()
    records = rng.integers(0, 2**62, (4, LOGPROB_ENTRIES))
    views.cq[0, :4] = [pack_completion(5, token, HAS_TOKEN | HAS_LOGPROBS, 1) for token in range(4)]
    given, views.records[0, :4] = views.cq[0, :4].tolist(), records
    later, views.cq[0, 2:4] = given[2:], 0
    assert transport.read_completions(0, 16) == given[:2]
    first = transport.read_logprobs(0, 2)
    views.cq[0, 2:4] = later
    words = next(words for _ in range(10) if (words := transport.read_completions(2, 16)))
    assert words == later and transport.read_logprobs(2, 2).view(np.int64).tolist() == records[2:].tolist()
    assert first.view(np.int64).tolist() == records[:2].tolist()


def test_records_are_those_of_words_that_went_out_alone(wired) -> None:
    transport, segment = wired
    segment.views().cq[0, :2] = [pack_completion(5, token, HAS_TOKEN | HAS_LOGPROBS, 1) for token in range(2)]
    assert len(transport.read_completions(0, 1)) == 1
    assert len(transport.read_logprobs(0, 1)) == 1
    for position, count in ((0, 2), (1, 1), (-1, 1)):
        with pytest.raises(TransportError, match=f"log probabilities of {count} completions from position {position}"):
            transport.read_logprobs(position, count)
    assert len(transport.read_completions(1, 1)) == 1 and len(transport.read_logprobs(0, 2)) == 2


@pytest.mark.parametrize("written", [SIZES.sq_entries // 4, SIZES.sq_entries // 4 + 1])
def test_entries_that_are_written_while_a_read_of_the_head_is_on_its_way_count_behind_it(wired, written: int) -> None:
    """The read may be older than they are, so it does not show their free space."""
    transport, segment = wired
    transport.read_engine()  # asks for the head, too
    for index in range(written):
        transport.write_entry(index, bytes(SQ_ENTRY_BYTES))
    transport.lost()  # the card reads now
    segment.views().pair[0, PAIR_SQ_HEAD] = 9
    transport.read_pair()  # asks again where room seems short
    assert transport.read_pair().sq_head == (9 if 4 * written > SIZES.sq_entries else 0)


def test_the_head_is_asked_for_when_a_quarter_of_the_room_for_prompts_is_used(wired) -> None:
    """That is what the part for automata leaves of the arena."""
    transport, _ = wired
    transport.facts = transport.facts._replace(grammar_arena=SIZES.prompt_tokens // 2)
    quarter = (SIZES.prompt_tokens - transport.facts.grammar_arena) // 4
    for written, asks in ((quarter, 0), (1, 1)):
        before = transport.queue.reads
        transport.write_prompt(0, np.zeros(written, np.int32))
        transport.read_pair()
        assert transport.queue.reads - before == asks


def test_a_completion_head_waits_for_other_words_or_an_eighth_of_the_ring(wired) -> None:
    transport, segment = wired
    front, step = segment.views().front[0], SIZES.cq_entries // 8
    transport.write_word(FRONT_CQ_HEAD, 1 << 32)
    transport.write_word(FRONT_CQ_HEAD, 1 << 32 | step - 1)
    assert front[FRONT_CQ_HEAD] == 1 << 32
    transport.write_word(FRONT_HEARTBEAT, 7)
    assert front[FRONT_CQ_HEAD] == 1 << 32 | step - 1
    transport.write_word(FRONT_CQ_HEAD, 1 << 32 | 2 * step - 1)
    assert front[FRONT_CQ_HEAD] == 1 << 32 | 2 * step - 1


def test_an_epoch_counts_once_all_else_was_read_after_it(wired) -> None:
    transport, segment = wired
    pair = segment.views().pair[0]

    def read_again() -> EngineWords:
        transport.read_engine()
        transport.lost()  # the card reads now
        return transport.read_pair()

    pair[PAIR_EPOCH], pair[PAIR_ATTACHED], pair[PAIR_SQ_HEAD] = 1, 1, 3  # a read may see this of a grant
    assert read_again().epoch == 0
    transport.lost()  # and the words that the look has requested
    pair[PAIR_ATTACHED], pair[PAIR_SQ_HEAD] = 0, 5
    assert read_again() == EngineWords(5, 0, 1, 0)


def test_cancels_and_reads_alone_also_reap_completions(wired) -> None:
    """Otherwise the queue would be full although the card has finished, and the engine's words would not change."""
    transport, segment = wired
    for slot in range(3 * transport.queue._depth):
        transport.write_cancel(slot % SIZES.slots, slot)
    views = segment.views()
    for value in (7, 9):
        views.engine[ENGINE_HEARTBEAT] = value
        assert value in [transport.read_engine()[ENGINE_HEARTBEAT] for _ in range(3)]


def test_records_cost_one_more_read_and_no_hit_words(wired) -> None:
    transport, segment = wired
    segment.views().cq[0, 0] = pack_completion(5, 7, HAS_TOKEN | HAS_LOGPROBS, 1)
    before = transport.queue.reads
    assert len(next(words for _ in range(10) if (words := transport.read_completions(0, 16)))) == 1
    assert transport.queue.reads - before == 2
