"""The fast path: the conditions that leave it, the order of rows, and the effect of errors and stop ids."""

from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import VOCAB, make_case, tokens

from blinkpy.kv import state as S
from blinkpy.queues.submission import STOP_IDS, WORD_MAX_TOKENS, WORD_STOP_IDS
from blinkpy.queues.words import FINISH_ERROR, FINISH_LENGTH, FINISH_MASK, FINISH_STOP
from blinkpy.scheduler import cycle
from blinkpy.scheduler.phases.fast_path import NOT_FAST, judge_token, take_fast_path
from blinkpy.scheduler.phases.forecast import forecast_rows


def test_fast_path_is_left_only_if_a_request_ended_and_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither ends nor waiting requests without a row leave it."""
    seen = list[tuple[bool, bool, bool]]()

    def noting(limits: Any, queues: Any, state: Any, lane: int, lanes: int) -> int:
        requests, waiting = state.requests, state.counts[S.WAITING_COUNT] > 0
        running = [state.running[i] for i in range(state.counts[S.RUNNING_COUNT])]
        left = [requests.entry[i, WORD_MAX_TOKENS] + requests.prompt_length[i] - requests.length[i] for i in running]
        bucket = take_fast_path(limits, queues, state, lane, lanes)
        seen.append((bucket != NOT_FAST, min(left) == 1, waiting))
        return bucket

    monkeypatch.setattr(cycle, "take_fast_path", noting)
    case = make_case(lanes=1, pairs=1, slots=8, rows=3, pages=60)
    for requests in (3, 6):
        for n in range(requests):
            case.submit(tokens(4, n), 3 + 2 * n)
        case.finish()
    assert all(fast == (not (ended and waiting)) for fast, ended, waiting in seen), seen
    assert {(ended, waiting) for _, ended, waiting in seen} == {(a, b) for a in (False, True) for b in (False, True)}


def test_fast_path_is_barred_while_admission_may_reset_the_overtake_count() -> None:
    """Even without a free row: best effort that waits for its class is still passed over (R12, R16)."""
    case = make_case(lanes=1, pairs=1, slots=8, rows=2, pages=60)
    for n in range(3):
        case.submit(tokens(4, n), 12)
    for passed in (0, 1, 0):
        assert case.opinion is not None
        case.state.counts[S.PASSED] = case.opinion.oracle.passed = passed
        for _ in range(3):
            case.turn()
            case.read(0)
        assert case.state.counts[S.WAITING_COUNT] == 1 and case.state.batch.counts[S.ROWS] == 2
        assert case.state.counts[S.FAST_PATH] == (passed == 0)
    case.finish()


def test_rows_that_go_on_are_kept_in_their_places_in_one_tile_of_lanes() -> None:
    """More lanes than rows, and the maximum number of rows; one request ends, and later rows move up."""
    case = make_case(lanes=5, pairs=1, slots=4, rows=4, pages=40)
    requests, fast = [case.submit(tokens(4 + n, n), most) for n, most in enumerate((3, 9, 5, 7))], list[bool]()
    while case.state.requests.status.any() or not fast:
        before = int(case.state.counts[S.RUNNING_COUNT])
        case.turn()
        case.read(0)
        if case.state.counts[S.RUNNING_COUNT] < before:
            fast.append(bool(case.state.counts[S.FAST_PATH]))
    assert any(fast)
    assert [request.ended for request in requests] == [FINISH_LENGTH] * 4


@pytest.mark.parametrize("wrong", [-1, VOCAB])
def test_an_absent_token_is_neither_completed_nor_counted(wrong: int) -> None:
    case = make_case(lanes=1, pairs=1, rows=2, pages=40)
    for n in range(2):
        case.submit(tokens(4, n), 9)
    for _ in range(3):
        case.turn()
        case.read(0)
    case.judged = False
    generated, slot = case.counter("generated_tokens"), int(case.state.batch.row_slots[0])
    (owner,) = (sent.owner for sent in case.clients[0].live() if sent.slot == slot)
    owner.finish, case.state.batch.sampled[0] = FINISH_ERROR, wrong
    case.turn()
    assert case.state.counts[S.FAST_PATH] == 1
    case.read(0)
    assert (owner.ended, owner.reason) == (FINISH_ERROR, 0), "only the flags"
    assert case.counter("generated_tokens") - generated == 1, "the other request's"
    case.finish()


def test_each_stop_id_ends_a_request_and_no_word_behind_them(rng: np.random.Generator) -> None:
    """Also in the forecast for the fast path: token 0 may be a stop id, and all or some places may be in use."""
    case = make_case(lanes=1, rows=2, pages=12, tokens=24)
    for n in (4, 5):
        case.submit(tokens(n, n), 9)
    case.turn(2)
    limits, state = case.limits, case.state
    stop_ids = state.requests.entry[int(state.batch.row_slots[0])][WORD_STOP_IDS : WORD_STOP_IDS + STOP_IDS]
    for count in range(STOP_IDS + 1):
        for _ in range(3):
            ids = [0, *(1 + rng.permutation(VOCAB - 1)).tolist()][:count]
            state.forecast.rows[:] = rng.integers(0, VOCAB)  # of an earlier turn
            stop_ids[:] = rng.permutation(ids + [-1] * (STOP_IDS - count))
            forecast_rows(limits, state, 2, 0, 1)
            found = [t for t in range(VOCAB) if judge_token(limits, state, 0, t)[0] & FINISH_MASK == FINISH_STOP]
            assert found == sorted(ids)
