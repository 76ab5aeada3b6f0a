"""The scheduler's batches, pages, order and ends of requests, one behaviour at a time, in plain Python."""

from __future__ import annotations

import pytest
from support.attached_world import counts, prompt, statuses, world

from blinkpy.kv.state import BUCKET, ROWS, RUNNING, TOKENS, WAITING
from blinkpy.queues.completion import FINISH_ERROR, FINISH_LENGTH, FINISH_STOP

# ---- batches ------------------------------------------------------------------------------------------------------------


def test_prefill_is_chunked_and_mixed_with_decode() -> None:
    made = world(tokens=8)
    front = made.fronts[0]
    front.submit(prompt(4), 10)
    made.step()
    assert counts(made) == [1, 4, 0]
    front.submit(prompt(17, 1), 3)
    sizes = [(made.step(), *counts(made)) for _ in range(4)]
    assert [s[1:] for s in sizes] == [(2, 8, 1), (2, 8, 1), (2, 4, 1), (2, 2, 2)]  # 7 + 7 + 3 tokens of the prompt
    made.finish()
    assert [len(sent.got) for sent in front.done] == [3, 10]


def test_few_waiting_prompts_ride_beside_decodes_in_smaller_steps() -> None:
    made = world(tokens=16, mixed_tokens=8, burst_tokens=12, rows=3, pages=32, prefix_caching=False, slots=4)
    front = made.fronts[0]
    front.submit(prompt(10), 12)
    made.step()
    assert counts(made) == [1, 10, 0]  # nobody decodes
    front.submit(prompt(12, 1), 12)
    assert [(made.step(), *counts(made))[1:] for _ in range(3)] == [(2, 8, 1), (2, 6, 1), (2, 2, 2)]  # 7 + 5 tokens
    front.submit(prompt(13, 2), 12)
    made.step()
    assert counts(made) == [3, 15, 2]  # more than burst_tokens
    made.finish()


def test_a_burst_of_long_prompts_gets_larger_steps_and_one_of_short_prompts_the_largest() -> None:
    sizes = {"mixed_tokens": 8, "burst_step_tokens": 12, "burst_tokens": 16, "rows": 4, "slots": 5, "pages": 64}
    made = world(tokens=20, prefix_caching=False, **sizes)
    front = made.fronts[0]
    front.submit(prompt(2), 12)
    made.step()
    front.submit(prompt(20, 1), 8)
    assert [(made.step(), *counts(made))[1:] for _ in range(3)] == [(2, 12, 1), (2, 8, 1), (2, 3, 1)]  # 20, then 9, then 2 lack
    for salt in (2, 3, 4):
        front.submit(prompt(8, salt), 8)
    assert (made.step(), *counts(made))[1:] == (4, 18, 2)  # 24 tokens of three prompts, of which there are rows for two
    made.finish()


def test_prompts_that_can_not_run_yet_count_as_waiting() -> None:
    made = world(tokens=16, mixed_tokens=4, burst_tokens=12, rows=2, pages=32, prefix_caching=False, slots=4)
    front = made.fronts[0]
    front.submit(prompt(4), 12)
    made.step()
    for salt in (1, 2):
        front.submit(prompt(7, salt), 12)
    made.step()
    assert counts(made) == [2, 8, 1]  # 14 tokens wait, though there is a row for 7 of them
    made.finish()


def test_the_bucket_is_the_smallest_that_fits() -> None:
    made = world(tokens=16, prefix_caching=False)
    assert made.state.buckets.tokens.tolist() == [1, 2, 4, 8, 16]
    for length, bucket in ((1, 0), (3, 2), (8, 3), (9, 4)):
        made.fronts[0].submit(prompt(length), 1)
        assert made.step() == bucket == made.state.batch.counts[BUCKET]
        made.finish()


def test_a_step_takes_no_more_rows_and_tokens_than_allowed() -> None:
    made = world(pairs=1, slots=8, rows=3, tokens=5, pages=64, intake_entries=8)
    for _ in range(8):
        made.fronts[0].submit(prompt(2), 4)
    seen = set()
    for _ in range(40):
        made.step()
        made.fronts[0].poll()
        seen.add(int(made.state.batch.counts[ROWS]))
        assert made.state.batch.counts[ROWS] <= 3
        assert made.state.batch.counts[TOKENS] <= 5
    assert seen == {0, 1, 2, 3} or seen == {0, 2, 3} or seen == {0, 3}
    assert len(made.fronts[0].done) == 8


# ---- ends of a request --------------------------------------------------------------------------------------------------


def test_a_stop_id_ends_a_request_once_min_tokens_are_generated() -> None:
    made = world()
    expected = made.fronts[0].submit(prompt(5), 9).expected
    made.finish()
    stop = expected[2]
    first = expected.index(stop)
    sent = made.fronts[0].submit(prompt(5), 9, stop_ids=(stop,))
    made.finish()
    assert (sent.got, sent.ended) == (expected[: first + 1], FINISH_STOP)
    sent = made.fronts[0].submit(prompt(5), 9, stop_ids=(stop,), min_tokens=first + 1)
    made.finish()
    assert len(sent.got) > first + 1


def test_the_context_ends_a_request() -> None:
    made = world(max_model_len=16)
    sent = made.fronts[0].submit(prompt(6), 10)
    made.finish()
    assert (len(sent.got), sent.ended) == (10, FINISH_LENGTH)


@pytest.mark.parametrize("token", [-1, 50, 2**31 - 1])
@pytest.mark.parametrize("steps", [1, 3], ids=["prefill", "steady"])
def test_a_sampled_token_outside_the_vocabulary_is_an_error(token: int, steps: int) -> None:
    made = world()
    bad, good = made.fronts[0].submit(prompt(3), 5), made.fronts[1].submit(prompt(4), 5)
    for _ in range(steps):
        made.step()
    made.state.batch.sampled[0] = token
    made.finish()
    assert (bad.ended, bad.got) == (FINISH_ERROR, bad.expected[: steps - 1])
    assert good.ended == FINISH_LENGTH


# ---- pages --------------------------------------------------------------------------------------------------------------


def test_preempted_requests_are_computed_again() -> None:
    made = world(pages=8, page_size=4, max_model_len=30, rows=4, tokens=32, prefix_caching=False)
    for pair in (0, 0, 1):
        made.fronts[pair].submit(prompt(7, pair), 16)
    made.finish()
    assert made.counter("preemptions") > 0
    assert made.counter("requests_finished") == 3
    assert made.counter("computed_tokens") > 3 * (7 + 16) - 3


def test_the_last_in_rank_is_preempted_and_the_first_never() -> None:
    made = world("priority", pages=8, max_model_len=30, rows=4, tokens=32, slots=3, pairs=1)
    front = made.fronts[0]
    urgent = front.submit(prompt(7), 20, priority=-5)
    front.submit(prompt(7, 1), 20, priority=3)
    front.submit(prompt(7, 2), 20, priority=3)
    made.step()
    for _ in range(25):
        made.step()
        front.poll()
    assert urgent.ended == FINISH_LENGTH
    assert made.state.requests.preemptions[0] == 0
    assert made.counter("preemptions") > 0
    made.finish()


def test_a_request_may_use_the_whole_pool() -> None:
    made = world(pages=6, page_size=4, max_model_len=32)
    big = made.fronts[0].submit(prompt(13), 12)  # 24 tokens in the cache, 6 pages
    small = made.fronts[1].submit(prompt(3), 12)
    made.finish()
    assert big.ended == small.ended == FINISH_LENGTH


def test_a_better_request_that_does_not_fit_is_not_overtaken() -> None:
    made = world(pages=6, page_size=4, rows=4, tokens=32, max_model_len=32)
    first, second, third = ((made.fronts[0].submit(prompt(n, n), 4)) for n in (15, 16, 2))
    made.step()
    assert statuses(made)[:3] == [RUNNING, WAITING, WAITING]
    while not first.ended:
        made.step()
        made.fronts[0].poll()
    made.step()
    assert statuses(made)[1] == RUNNING
    made.finish()
    assert second.ended == third.ended == FINISH_LENGTH


# ---- order --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", [0, 1, 2]), ("priority", [1, 2, 0]), ("shortest-first", [2, 0, 1]), ("short-prompts", [2, 0, 1])],
)
def test_policies_decide_the_order(policy: str, order: list[int]) -> None:
    made = world(policy, pairs=1, rows=1, tokens=16)
    front = made.fronts[0]
    sent = [front.submit(prompt(n), 2, priority=p) for n, p in ((5, 9), (9, 1), (2, 1))]
    made.finish()
    assert [front.done.index(request) for request in (sent[i] for i in order)] == [0, 1, 2]
