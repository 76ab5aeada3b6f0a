"""The scheduler's batches, pages, order and ends of requests, one behaviour at a time, in plain Python."""

from __future__ import annotations

import pytest
from support.scheduler_cases import VOCAB, Case, make_case, tokens

from blinkpy.kv.state import BUCKET, RUNNING, WAITING
from blinkpy.queues.completion import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP
from blinkpy.scheduler.policies import SHIPPED, priority

# ---- batches: rows, tokens and decoding rows ----------------------------------------------------------------------------


def batches(case: Case, turns: int) -> list[list[int]]:
    """Of the next turns."""
    return [case.batch() for _ in range(turns) if case.turn() >= 0]


def test_prefill_is_chunked_and_mixed_with_decode() -> None:
    case = make_case(tokens=8)
    first = case.submit(tokens(4), 10)
    assert batches(case, 1) == [[1, 4, 0]]
    second = case.submit(tokens(17, 1), 3)
    assert batches(case, 4) == [[2, 8, 1], [2, 8, 1], [2, 4, 1], [2, 2, 2]]  # 7 + 7 + 3 tokens of the prompt
    case.finish()
    assert [len(request.got) for request in (first, second)] == [10, 3]


def test_few_waiting_prompts_ride_beside_decodes_in_smaller_steps() -> None:
    case = make_case(tokens=16, mixed_step_tokens=8, burst_tokens=12, rows=3, pages=32, prefix_caching=False)
    case.submit(tokens(10), 12)
    assert batches(case, 1) == [[1, 10, 0]]  # nobody decodes
    case.submit(tokens(12, 1), 12)
    assert batches(case, 3) == [[2, 8, 1], [2, 6, 1], [2, 2, 2]]  # 7 + 5 tokens
    case.submit(tokens(13, 2), 12)
    assert batches(case, 1) == [[3, 15, 2]]  # more than burst_tokens
    case.finish()


def test_a_burst_of_long_prompts_gets_larger_steps_and_one_of_short_prompts_the_largest() -> None:
    sizes = {"mixed_step_tokens": 8, "burst_step_tokens": 12, "burst_tokens": 16, "rows": 4, "slots": 5, "pages": 64}
    case = make_case(tokens=20, prefix_caching=False, **sizes)
    case.submit(tokens(2), 12)
    case.turn()
    case.submit(tokens(20, 1), 8)
    assert batches(case, 3) == [[2, 12, 1], [2, 8, 1], [2, 3, 1]]  # 20, then 9, then 2 lack
    for start in (2, 3, 4):
        case.submit(tokens(8, start), 8)
    assert batches(case, 1) == [[4, 18, 2]]  # 24 tokens of three prompts, of which there are rows for two
    case.finish()


def test_prompts_that_can_not_run_yet_count_as_waiting() -> None:
    case = make_case(tokens=16, mixed_step_tokens=4, burst_tokens=12, rows=2, pages=32, prefix_caching=False)
    case.submit(tokens(4), 12)
    case.turn()
    for start in (1, 2):
        case.submit(tokens(7, start), 12)
    assert batches(case, 1) == [[2, 8, 1]]  # 14 tokens wait, though there is a row for 7 of them
    case.finish()


def test_the_bucket_is_the_smallest_that_fits() -> None:
    case = make_case(tokens=16, prefix_caching=False)
    assert case.state.buckets.tokens.tolist() == [1, 2, 4, 8, 16]
    for length, bucket in ((1, 0), (3, 2), (8, 3), (9, 4)):
        case.submit(tokens(length), 1)
        assert case.turn() == bucket == case.state.batch.counts[BUCKET]
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
    assert case.statuses()[:3] == [RUNNING, WAITING, WAITING]
    while not first.ended:
        case.turn()
        case.read(0)
    case.turn()
    assert case.statuses()[1] == RUNNING
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
