"""What the scheduler takes back: cancels, slow readers, leases, claims and broken protocols."""

from __future__ import annotations

import numpy as np
import pytest
from support.scheduler_cases import make_case, tokens

from blinkpy.kv import state as S
from blinkpy.queues import completion as C
from blinkpy.queues import words as W
from blinkpy.queues.submission import neutral_entries

# ---- cancel -------------------------------------------------------------------------------------------------------------


def test_cancel_before_the_entry_is_read_and_while_waiting() -> None:
    case = make_case(rows=1)
    running, waiting = case.submit(tokens(3), 20), case.submit(tokens(3), 20)
    case.cancel(waiting)
    case.turn(2)
    case.read(0)
    assert (waiting.ended, waiting.got) == (C.FINISH_CANCELLED, [])
    case.finish()
    assert running.ended == C.FINISH_LENGTH


@pytest.mark.parametrize("turns", [1, 2, 3, 6])
def test_cancel_in_prefill_and_decode_gives_everything_back_at_once(turns: int) -> None:
    case = make_case(tokens=4, rows=2, prefix_caching=False)
    request = case.submit(tokens(11), 12)
    case.turn(turns)
    case.cancel(request)
    case.turn()
    assert case.state.counts[S.FREE_COUNT] == case.limits.pages
    case.read(0)
    assert request.ended == C.FINISH_CANCELLED
    assert case.state.requests.status[0] == S.EMPTY


def test_a_cancel_after_the_end_means_nothing() -> None:
    case = make_case()
    case.submit(tokens(3), 1)
    first = case.clients[0].live()[0]
    case.finish()
    case.views.cancel[0, first.slot] = first.request_id
    second = case.submit(tokens(4), 3)
    assert case.clients[0].live()[0].slot == first.slot
    case.finish()
    assert second.ended == C.FINISH_LENGTH
    assert case.counter("requests_cancelled") == 0


# ---- readers ------------------------------------------------------------------------------------------------------------


def test_a_slow_reader_stops_itself_alone_and_loses_nothing() -> None:
    case = make_case(cq_entries=4, slots=3, rows=6, pages=32)
    slow, fast = ([case.submit(tokens(3), 8, pair) for _ in range(3)] for pair in range(2))
    for _ in range(40):
        case.turn()
        case.read(1)
    assert case.done and {id(request) for request in case.done} == {id(request) for request in fast}
    assert case.word(W.PAIR_CQ_TAIL) == 4
    assert case.counter("reader_stalls") > 0
    case.finish()
    assert [len(request.got) for request in slow] == [8] * 3


@pytest.mark.parametrize(("rows", "pages"), [(2, 64), (8, 7)])
def test_requests_of_a_slow_reader_give_way(rows: int, pages: int) -> None:
    """A reader that never reads can't keep rows or pages from others."""
    case = make_case(cq_entries=2, slots=2, rows=rows, pages=pages, max_model_len=28, tokens=32)
    slow = [case.submit(tokens(9), 12) for _ in range(2)]
    case.turn(3)
    others = [case.submit(tokens(9, 5), 12, pair=1) for _ in range(2)]
    for _ in range(60):
        case.turn()
        case.read(1)
    assert [request.ended for request in others] == [C.FINISH_LENGTH] * 2
    case.finish()
    assert [request.ended for request in slow] == [C.FINISH_LENGTH] * 2


def test_a_cancel_is_told_when_the_reader_has_room_again() -> None:
    case = make_case(cq_entries=2, slots=2)
    request = case.submit(tokens(3), 9)
    case.turn(4)
    case.cancel(request)
    case.turn(3)
    assert case.state.requests.status[0] == S.FINISHING
    assert case.state.requests.num_pages[0] == 0
    case.finish()
    assert (len(request.got), request.ended) == (2, C.FINISH_CANCELLED)


# ---- epochs and leases --------------------------------------------------------------------------------------------------


def test_a_silent_front_end_loses_its_requests_and_nobody_else_does() -> None:
    case = make_case(lease_ms=1)
    lost, other = case.submit(tokens(5), 20), case.submit(tokens(5), 25, pair=1)
    case.silent.add(0)
    for _ in range(30):  # 1.5 ms
        case.turn()
        case.read(1)
    assert case.word(W.PAIR_ATTACHED) == 0
    assert not case.state.requests.status[:4].any()
    assert case.counter("leases_expired") == 1
    assert case.word(W.PAIR_CQ_TAIL) < 25
    case.awaited.remove(lost)
    case.finish()
    assert other.ended == C.FINISH_LENGTH


def test_a_claim_fences_the_owner_before_it() -> None:
    case = make_case()
    for n in (5, 3):
        case.submit(tokens(n), 9)
    case.turn(3)
    late = case.clients[0].live()[0].request_id
    assert case.claim(0).epoch == 2
    assert not case.state.requests.status[:4].any()
    # What the owner before it still sends: a doorbell, completions read, a cancel, and an entry under the new doorbell.
    case.views.front[0, W.FRONT_DOORBELL] = 1 << 32 | 3
    case.views.front[0, W.FRONT_CQ_HEAD] = 1 << 32 | 1000
    case.views.cancel[0, :] = late
    case.silent.add(0)  # else its heartbeat would cover them
    case.turn()
    case.silent.clear()
    assert case.counter("stale_entries") == 0
    assert case.word(W.PAIR_SQ_HEAD) == 2
    case.submit(tokens(3), 2, entry={"epoch": 1})
    good = case.submit(tokens(3), 2)
    case.finish()
    assert case.counter("stale_entries") == 1
    assert good.ended == C.FINISH_LENGTH


@pytest.mark.parametrize(
    ("word", "value"),
    [(W.FRONT_DOORBELL, 5), (W.FRONT_DOORBELL, W.POSITION_MASK), (W.FRONT_CQ_HEAD, 1), (W.FRONT_CQ_HEAD, 1 << 31)],
)
def test_a_broken_protocol_fences_that_pair_alone(word: int, value: int) -> None:
    case = make_case()
    other = case.submit(tokens(3), 5, pair=1)
    case.views.front[0, word] = 1 << 32 | value
    case.silent.add(0)
    case.world.sim.fronts.broke[0] = 1  # what the checks know of it
    case.turn()
    case.silent.clear()
    assert [case.word(W.PAIR_ATTACHED, pair) for pair in range(2)] == [0, 1]
    assert case.counter("stale_entries") == 1
    case.claim(0)
    again = case.submit(tokens(3), 5)
    case.finish()
    assert again.ended == other.ended == C.FINISH_LENGTH


def test_entries_that_were_announced_before_a_fence_are_skipped() -> None:
    case = make_case(intake_entries=1, pairs=1)
    for _ in range(4):
        case.submit(tokens(3), 2)
    case.turn()
    case.claim(0)
    accepted = case.counter("requests_accepted")
    assert 1 <= accepted < 4
    assert case.word(W.PAIR_SQ_HEAD) == 4
    request = case.submit(tokens(4), 2)
    case.finish()
    assert case.counter("requests_accepted") == accepted + 1
    assert request.ended == C.FINISH_LENGTH


def test_only_the_next_epoch_can_be_claimed_and_epochs_end() -> None:
    case = make_case(pairs=1)
    for claim in (0, 1, 3, 1 << 40):
        case.views.front[0, W.FRONT_CLAIM] = claim
        case.turn()
        assert case.word(W.PAIR_EPOCH) == 1
    case.state.pairs.epoch[0], case.judged = W.EPOCH_LIMIT, False
    case.views.front[0, W.FRONT_CLAIM] = W.EPOCH_LIMIT + 1
    case.turn()
    assert case.state.pairs.epoch[0] == W.EPOCH_LIMIT


def test_positions_wrap_at_32_bits() -> None:
    case = make_case(pairs=1, attached=False)
    case.judged, start = False, (1 << 32) - 3
    for name in ("sq_head", "sq_tail", "cq_head", "cq_tail"):
        getattr(case.state.pairs, name)[0] = start
    case.views.pair[0, W.PAIR_SQ_HEAD] = case.views.pair[0, W.PAIR_CQ_TAIL] = start
    case.claim(0)
    for _ in range(6):
        case.submit(tokens(3), 2)
        case.finish()
    assert case.word(W.PAIR_CQ_TAIL) == start + 12


def test_a_front_end_without_a_claim_is_not_served() -> None:
    case = make_case(pairs=1, attached=False)
    case.views.sq[0, 0] = neutral_entries(1).view(np.int32)
    case.views.front[0, W.FRONT_DOORBELL] = 1
    case.turn(3)
    assert case.counter("requests_accepted") == case.word(W.PAIR_SQ_HEAD) == 0
