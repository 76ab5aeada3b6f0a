"""The scheduler's batches, pages, order, ends of requests and host commands, one behaviour at a time, in plain Python."""

from __future__ import annotations

from typing import Any

import pytest
from support.scheduler_cases import VOCAB, Case, make_case, tokens

from blinkpy.kv import state as S
from blinkpy.queues import words as W
from blinkpy.queues.completion import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from blinkpy.scheduler.policies import SHIPPED, priority

# ---- batches: rows, tokens and decoding rows ----------------------------------------------------------------------------


PROMPTS = {  # sizes; then, in order, prompts (tokens, max_tokens) that arrive, and the batches of the next turns
    "in chunks, mixed with decodes": (
        {"tokens": 8},
        [([(4, 10)], [[1, 4, 0]]), ([(17, 3)], [[2, 8, 1], [2, 8, 1], [2, 4, 1], [2, 2, 2]])],  # 7 + 7 + 3 tokens of the prompt
    ),
    "few ones in smaller steps beside decodes": (
        {"mixed_step_tokens": 8, "burst_tokens": 12, "rows": 3},
        [
            ([(10, 12)], [[1, 10, 0]]),  # nobody decodes
            ([(12, 12)], [[2, 8, 1], [2, 6, 1], [2, 2, 2]]),  # 7 + 5 tokens
            ([(13, 12)], [[3, 15, 2]]),  # more than burst_tokens
        ],
    ),
    "a burst of long ones in larger steps, and one of short ones in the largest": (
        {"tokens": 20, "mixed_step_tokens": 8, "burst_step_tokens": 12, "burst_tokens": 16},
        [
            ([(2, 12)], [[1, 2, 0]]),
            ([(20, 8)], [[2, 12, 1], [2, 8, 1], [2, 3, 1]]),  # 20, then 9, then 2 lack
            ([(8, 8)] * 3, [[4, 18, 2]]),  # 24 tokens of three prompts, of which there are rows for two
        ],
    ),
    "those that can't run yet count as waiting": (
        {"mixed_step_tokens": 4, "burst_tokens": 12, "rows": 2},
        [([(4, 12)], [[1, 4, 0]]), ([(7, 12)] * 2, [[2, 8, 1]])],  # 14 tokens wait, though there is a row for 7 of them
    ),
}


def batches(case: Case, turns: int) -> list[list[int]]:
    counts = case.state.batch.counts
    return [counts[[S.ROWS, S.TOKENS, S.DECODE_ROWS]].tolist() for _ in range(turns) if case.turn() >= 0]


@pytest.mark.parametrize("how", PROMPTS)
def test_prompts_are_computed(how: str) -> None:
    sizes, arrivals = PROMPTS[how]
    case = make_case(slots=5, pages=64, prefix_caching=False, **sizes)
    requests: list[Any] = []
    for prompts, expected in arrivals:
        requests += [case.submit(tokens(n, len(requests) + i), most) for i, (n, most) in enumerate(prompts)]
        assert batches(case, len(expected)) == expected
    case.finish()
    assert all(request.ended == FINISH_LENGTH for request in requests)


def test_the_bucket_is_the_smallest_that_fits() -> None:
    case = make_case(tokens=16, prefix_caching=False)
    assert case.state.buckets.tokens.tolist() == [1, 2, 4, 8, 16]
    for length, bucket in ((1, 0), (3, 2), (8, 3), (9, 4)):
        case.submit(tokens(length), 1)
        assert case.turn() == bucket == case.state.batch.counts[S.BUCKET]
        case.finish()


def test_a_step_takes_no_more_rows_and_tokens_than_allowed() -> None:
    case = make_case(pairs=1, slots=8, rows=3, tokens=5, pages=64, intake_entries=8)
    for _ in range(8):
        case.submit(tokens(2), 4)
    seen = []
    for _ in range(40):
        seen += batches(case, 1)
        case.read(0)
    assert (max(rows for rows, _, _ in seen), max(count for _, count, _ in seen)) == (3, 5)
    assert [request.ended for request in case.done] == [FINISH_LENGTH] * 8


# ---- ends of a request --------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_a_request_once_min_tokens_are_generated() -> None:
    case = make_case()
    expected = case.submit(tokens(5), 9).expected
    case.finish()
    stop = expected[2]
    first = expected.index(stop)
    request = case.submit(tokens(5), 9, stop_ids=(stop,))
    case.finish()
    assert (request.got, request.ended) == (expected[: first + 1], FINISH_STOP)
    request = case.submit(tokens(5), 9, stop_ids=(stop,), min_tokens=first + 1)
    case.finish()
    assert len(request.got) > first + 1


def test_the_context_ends_a_request() -> None:
    case = make_case(max_model_len=16)
    request = case.submit(tokens(6), 10)
    case.finish()
    assert (len(request.got), request.ended) == (10, FINISH_LENGTH)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
@pytest.mark.parametrize("turns", [1, 3], ids=["prefill", "steady"])
def test_a_sampled_token_outside_the_vocabulary_is_an_error(token: int, turns: int) -> None:
    case = make_case()
    bad, good = case.submit(tokens(3), 5), case.submit(tokens(4), 5, pair=1)
    case.turn(turns)
    case.state.batch.sampled[0], bad.finish = token, FINISH_ERROR
    case.finish()
    assert (bad.ended, bad.got) == (FINISH_ERROR, bad.expected[: turns - 1])
    assert good.ended == FINISH_LENGTH


# ---- pages --------------------------------------------------------------------------------------------------------------


def test_preempted_requests_are_computed_again() -> None:
    case = make_case(pages=8, max_model_len=30, tokens=32, prefix_caching=False)
    for pair in (0, 0, 1):
        case.submit(tokens(7, pair), 16, pair)
    case.finish()
    assert case.counter("preemptions") > 0
    assert case.counter("requests_finished") == 3
    assert case.counter("computed_tokens") > 3 * (7 + 16) - 3


def test_the_last_in_rank_is_preempted_and_the_first_never() -> None:
    case = make_case(priority, pages=8, max_model_len=30, tokens=32, slots=3, pairs=1)
    urgent = case.submit(tokens(7), 20, priority=-5)
    for start in (1, 2):
        case.submit(tokens(7, start), 20, priority=3)
    for _ in range(25):
        case.turn()
        case.read(0)
    assert urgent.ended == FINISH_LENGTH
    assert case.state.requests.preemptions[0] == 0
    assert case.counter("preemptions") > 0
    case.finish()


def test_a_request_may_use_the_whole_pool() -> None:
    case = make_case(pages=6)
    big, small = case.submit(tokens(13), 12), case.submit(tokens(3), 12, pair=1)  # 24 tokens in the cache, 6 pages
    case.finish()
    assert big.ended == small.ended == FINISH_LENGTH


def test_a_better_request_that_does_not_fit_is_not_overtaken() -> None:
    case = make_case(pages=6, tokens=32)
    first, second, third = (case.submit(tokens(n, n), 4) for n in (15, 16, 2))
    case.turn()
    assert case.state.requests.status[:3].tolist() == [S.RUNNING, S.WAITING, S.WAITING]
    while not first.ended:
        case.turn()
        case.read(0)
    case.turn()
    assert case.state.requests.status[1] == S.RUNNING
    case.finish()
    assert second.ended == third.ended == FINISH_LENGTH


# ---- order --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", [0, 1, 2]), ("priority", [1, 2, 0]), ("shortest-first", [2, 0, 1]), ("short-prompts", [2, 0, 1])],
)
def test_policies_decide_the_order(policy: str, order: list[int]) -> None:
    case = make_case(SHIPPED[policy], pairs=1, rows=1)
    requests = [case.submit(tokens(n), 2, priority=p) for n, p in ((5, 9), (9, 1), (2, 1))]
    case.finish()
    assert [requests.index(request) for request in case.done] == order


# ---- what the host asks for, and is told --------------------------------------------------------------------------------


def test_drain_ends_what_was_accepted_and_takes_nothing_new() -> None:
    case = make_case(pairs=1, rows=1)
    accepted = [case.submit(tokens(3), 3) for _ in range(2)]
    case.turn()
    case.views.control[W.CONTROL_COMMAND] = W.COMMAND_DRAIN
    case.submit(tokens(3), 3)
    for _ in range(20):
        case.turn()
        case.read(0)
    assert case.bucket == S.DRAINED
    assert [request.ended for request in accepted] == [FINISH_LENGTH] * 2
    assert case.counter("requests_accepted") == 2


def test_stop_publishes_what_was_computed_and_returns_at_once() -> None:
    case = make_case()
    case.submit(tokens(3), 9)
    case.turn()
    case.views.control[W.CONTROL_COMMAND] = W.COMMAND_STOP
    assert case.turn() == case.turn() == S.STOPPED
    assert case.state.inbox.command[0] == W.COMMAND_STOP
    assert case.word(W.PAIR_CQ_TAIL) == 1


def test_the_engine_reports_gauges_and_its_heartbeat() -> None:
    case = make_case(pairs=1)
    engine = case.views.engine
    calls = int(engine[W.ENGINE_HEARTBEAT])
    assert case.turn() == S.NO_BATCH
    case.submit(tokens(6), 2)
    case.turn()
    assert {name: int(engine[index]) for name, index in W.GAUGE.items()} == {
        "requests_running": 1,
        "requests_waiting": 0,
        "pages_free": 14,
        "pages_cached": 0,
        "pages_held": 2,
        "batch_rows": 1,
        "batch_tokens": 6,
    }
    assert (engine[W.ENGINE_HEARTBEAT], engine[W.ENGINE_STEPS], engine[W.ENGINE_TIME_NS]) == (calls + 2, 1, case.now)
