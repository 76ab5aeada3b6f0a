"""What the scheduler takes back: cancels, slow readers, leases, claims and broken protocols."""

from __future__ import annotations

import pytest
from support.attached_world import prompt, statuses, world
from support.protocol_front import Front
from support.scheduler_world import Sizes, World

from blinkpy.kv.state import EMPTY, FINISHING, FREE_COUNT
from blinkpy.queues.completion import FINISH_CANCELLED, FINISH_LENGTH
from blinkpy.queues.words import (
    EPOCH_LIMIT,
    FRONT_CLAIM,
    FRONT_CQ_HEAD,
    FRONT_DOORBELL,
    PAIR_ATTACHED,
    PAIR_CQ_TAIL,
    PAIR_EPOCH,
    PAIR_SQ_HEAD,
    POSITION_MASK,
)

# ---- cancel -------------------------------------------------------------------------------------------------------------


def test_cancel_before_the_entry_is_read_and_while_waiting() -> None:
    made = world(rows=1)
    running, waiting = made.fronts[0].submit(prompt(3), 20), made.fronts[0].submit(prompt(3), 20)
    made.fronts[0].cancel(1)
    made.step()
    made.step()
    made.fronts[0].poll()
    assert (waiting.ended, waiting.got) == (FINISH_CANCELLED, [])
    made.finish()
    assert running.ended == FINISH_LENGTH


@pytest.mark.parametrize("steps", [1, 2, 3, 6])
def test_cancel_in_prefill_and_decode_gives_everything_back_at_once(steps: int) -> None:
    made = world(tokens=4, rows=2, prefix_caching=False)
    sent = made.fronts[0].submit(prompt(11), 12)
    for _ in range(steps):
        made.step()
    made.fronts[0].cancel(0)
    made.step()
    assert made.state.counts[FREE_COUNT] == made.sizes.pages
    made.fronts[0].poll()
    assert sent.ended == FINISH_CANCELLED
    assert statuses(made)[0] == EMPTY


def test_a_cancel_after_the_end_means_nothing() -> None:
    made = world()
    front = made.fronts[0]
    first = front.submit(prompt(3), 1)
    made.finish()
    made.views.cancel[0, 0] = first.request_id
    second = front.submit(prompt(4), 3, slot=0)
    made.finish()
    assert second.ended == FINISH_LENGTH
    assert made.counter("requests_cancelled") == 0


# ---- readers ------------------------------------------------------------------------------------------------------------


def test_a_slow_reader_stops_itself_alone_and_loses_nothing() -> None:
    made = world(cq_entries=4, slots=3, rows=6, pages=32)
    slow, fast = made.fronts
    for front in made.fronts:
        for _ in range(3):
            front.submit(prompt(3), 8)
    for _ in range(40):
        made.step()
        fast.poll()
    assert len(fast.done) == 3
    assert slow.word(PAIR_CQ_TAIL) == 4
    assert made.counter("reader_stalls") > 0
    made.finish()
    assert len(slow.done) == 3


@pytest.mark.parametrize(("rows", "pages"), [(2, 64), (8, 7)])
def test_requests_of_a_slow_reader_give_way(rows: int, pages: int) -> None:
    """A reader that never reads can't keep rows or pages from others."""
    made = world(cq_entries=2, slots=2, rows=rows, pages=pages, page_size=4, max_model_len=28, tokens=32)
    slow, fast = made.fronts
    for _ in range(2):
        slow.submit(prompt(9), 12)
    for _ in range(3):
        made.step()
    others = [fast.submit(prompt(9, 5), 12) for _ in range(2)]
    for _ in range(60):
        made.step()
        fast.poll()
    assert [sent.ended for sent in others] == [FINISH_LENGTH] * 2
    made.finish()
    assert len(slow.done) == 2


def test_a_cancel_is_told_when_the_reader_has_room_again() -> None:
    made = world(cq_entries=2, slots=2)
    front = made.fronts[0]
    sent = front.submit(prompt(3), 9)
    for _ in range(4):
        made.step()
    front.cancel(0)
    for _ in range(3):
        made.step()
    assert statuses(made)[0] == FINISHING
    assert made.state.requests.num_pages[0] == 0
    made.finish()
    assert (len(sent.got), sent.ended) == (2, FINISH_CANCELLED)


# ---- epochs and leases --------------------------------------------------------------------------------------------------


def test_a_silent_front_end_loses_its_requests_and_nobody_else_does() -> None:
    made = world(lease_ms=1)
    dead, alive = made.fronts
    dead.submit(prompt(5), 20)
    other = alive.submit(prompt(5), 25)
    dead.alive = False
    for _ in range(30):  # 1.5 ms
        made.step()
        alive.poll()
    assert not dead.attached
    assert statuses(made, 0) == [EMPTY] * 4
    assert made.counter("leases_expired") == 1
    assert dead.word(PAIR_CQ_TAIL) < 25
    made.finish()
    assert other.ended == FINISH_LENGTH


def test_a_claim_fences_the_owner_before_it() -> None:
    made = world()
    front = made.fronts[0]
    for n in (5, 3):
        front.submit(prompt(n), 9)
    for _ in range(3):
        made.step()
    late_id = front.slots[0].request_id  # type: ignore[union-attr]
    tail = front.sq_tail
    front.claim()
    made.step()
    assert front.settle()
    assert front.epoch == 2
    assert statuses(made) == [EMPTY] * 4
    # What the owner before it still sends: a doorbell, completions read, a cancel, and an entry under the new doorbell.
    made.views.front[0, FRONT_DOORBELL] = 1 << 32 | tail + 1
    made.views.front[0, FRONT_CQ_HEAD] = 1 << 32 | 1000
    made.views.cancel[0, :] = late_id
    made.step()
    assert made.counter("stale_entries") == 0
    assert front.word(PAIR_SQ_HEAD) == tail
    front.submit(prompt(3), 2, epoch=1)
    front.slots[0] = None
    good = front.submit(prompt(3), 2, slot=1)
    made.finish()
    assert made.counter("stale_entries") == 1
    assert good.ended == FINISH_LENGTH


@pytest.mark.parametrize(
    ("word", "value"),
    [(FRONT_DOORBELL, 5), (FRONT_DOORBELL, POSITION_MASK), (FRONT_CQ_HEAD, 1), (FRONT_CQ_HEAD, 1 << 31)],
)
def test_a_broken_protocol_fences_that_pair_alone(word: int, value: int) -> None:
    made = world()
    broken, fine = made.fronts
    other = fine.submit(prompt(3), 5)
    made.views.front[0, word] = 1 << 32 | value
    made.step()
    assert broken.word(PAIR_ATTACHED) == 0
    assert made.counter("stale_entries") == 1
    broken.claim()
    made.step()
    assert broken.settle()
    sent = broken.submit(prompt(3), 5)
    made.finish()
    assert sent.ended == other.ended == FINISH_LENGTH


def test_entries_that_were_announced_before_a_fence_are_skipped() -> None:
    made = world(intake_entries=1, pairs=1)
    front = made.fronts[0]
    for _ in range(4):
        front.submit(prompt(3), 2)
    made.step()
    front.claim()
    made.step()
    assert front.settle()
    assert front.sq_tail == 4
    sent = front.submit(prompt(4), 2)
    made.finish()
    assert made.counter("requests_accepted") == 2
    assert sent.ended == FINISH_LENGTH


def test_only_the_next_epoch_can_be_claimed_and_epochs_end() -> None:
    made = world(pairs=1)
    for claim in (0, 1, 3, 1 << 40):
        made.views.front[0, FRONT_CLAIM] = claim
        made.step()
        assert made.fronts[0].word(PAIR_EPOCH) == 1
    made.state.pairs.epoch[0] = EPOCH_LIMIT
    made.views.front[0, FRONT_CLAIM] = EPOCH_LIMIT + 1
    made.step()
    assert made.state.pairs.epoch[0] == EPOCH_LIMIT


def test_positions_wrap_at_32_bits() -> None:
    made = World(Sizes(pairs=1, cq_entries=16))
    start = (1 << 32) - 3
    for name in ("sq_head", "sq_tail", "cq_head", "cq_tail"):
        getattr(made.state.pairs, name)[0] = start
    made.views.pair[0, PAIR_SQ_HEAD] = made.views.pair[0, PAIR_CQ_TAIL] = start
    made.attach()
    for _ in range(6):
        made.fronts[0].submit(prompt(3), 2)
        made.finish()
    assert made.fronts[0].cq_head == start + 12


def test_a_front_end_without_a_claim_is_not_served() -> None:
    made = World(Sizes(pairs=1))
    front = Front(made, 0)
    front.sq_tail = 0
    front.submit(prompt(3), 2)
    for _ in range(3):
        made.step()
    assert made.counter("requests_accepted") == 0
