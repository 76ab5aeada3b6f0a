"""The scheduler's phases, one behaviour at a time, in plain Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from scheduler_world import Front, Sizes, World

from blinkpy import queues as q
from blinkpy.config import ConfigError
from blinkpy.kernels.policies import SHIPPED
from blinkpy.kernels.scheduler import Scheduler, made_up_token
from blinkpy.kv.integrity import check_integrity
from blinkpy.kv.limits import make_limits
from blinkpy.kv.memory import make_state
from blinkpy.kv.state import (
    BUCKET,
    DECODE_ROWS,
    DRAINED,
    EMPTY,
    FINISHING,
    FREE_COUNT,
    NOTHING,
    RING_TAIL,
    ROWS,
    RUNNING,
    STOPPED,
    TOKENS,
    WAITING,
)


def world(policy: str = "fcfs", **sizes: Any) -> World:
    made = World(Sizes(**sizes), "python", SHIPPED[policy])
    made.attach()
    return made


def prompt(n: int, start: int = 0) -> list[int]:
    return [(start + 3 * i) % 50 for i in range(n)]


def counts(made: World) -> list[int]:
    return [int(made.state.batch.counts[i]) for i in (ROWS, TOKENS, DECODE_ROWS)]


def statuses(made: World, pair: int = 0) -> list[int]:
    slots = made.sizes.slots
    return made.state.requests.status[pair * slots : (pair + 1) * slots].tolist()


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
    assert (sent.got, sent.ended) == (expected[: first + 1], q.FINISH_STOP)
    sent = made.fronts[0].submit(prompt(5), 9, stop_ids=(stop,), min_tokens=first + 1)
    made.finish()
    assert len(sent.got) > first + 1


def test_the_context_ends_a_request() -> None:
    made = world(max_model_len=16)
    sent = made.fronts[0].submit(prompt(6), 10)
    made.finish()
    assert (len(sent.got), sent.ended) == (10, q.FINISH_LENGTH)


@pytest.mark.parametrize("token", [-1, 50, 2**31 - 1])
@pytest.mark.parametrize("steps", [1, 3], ids=["prefill", "steady"])
def test_a_sampled_token_outside_the_vocabulary_is_an_error(token: int, steps: int) -> None:
    made = world()
    bad, good = made.fronts[0].submit(prompt(3), 5), made.fronts[1].submit(prompt(4), 5)
    for _ in range(steps):
        made.step()
    made.state.batch.sampled[0] = token
    made.finish()
    assert (bad.ended, bad.got) == (q.FINISH_ERROR, bad.expected[: steps - 1])
    assert good.ended == q.FINISH_LENGTH


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
    assert urgent.ended == q.FINISH_LENGTH
    assert made.state.requests.preemptions[0] == 0
    assert made.counter("preemptions") > 0
    made.finish()


def test_a_request_may_use_the_whole_pool() -> None:
    made = world(pages=6, page_size=4, max_model_len=32)
    big = made.fronts[0].submit(prompt(13), 12)  # 24 tokens in the cache, 6 pages
    small = made.fronts[1].submit(prompt(3), 12)
    made.finish()
    assert big.ended == small.ended == q.FINISH_LENGTH


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
    assert second.ended == third.ended == q.FINISH_LENGTH


# ---- order --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "order"), [("fcfs", [0, 1, 2]), ("priority", [1, 2, 0]), ("shortest-first", [2, 0, 1])])
def test_policies_decide_the_order(policy: str, order: list[int]) -> None:
    made = world(policy, pairs=1, rows=1, tokens=16)
    front = made.fronts[0]
    sent = [front.submit(prompt(n), 2, priority=p) for n, p in ((5, 9), (9, 1), (2, 1))]
    made.finish()
    assert [front.done.index(request) for request in (sent[i] for i in order)] == [0, 1, 2]


def test_intake_is_bounded_and_takes_turns() -> None:
    made = world(pairs=3, slots=4, intake_entries=2, rows=12, tokens=32)
    for front in made.fronts:
        for _ in range(4):
            front.submit(prompt(2), 1)
    heads = []
    for _ in range(6):
        made.step()
        heads.append([front.word(q.PAIR_SQ_HEAD) for front in made.fronts])
    assert heads == [[1, 1, 0], [2, 1, 1], [2, 2, 2], [3, 3, 2], [4, 3, 3], [4, 4, 4]]
    made.finish()


def test_a_full_submission_queue_holds_the_front_end_back() -> None:
    made = world(pairs=1, slots=4, intake_entries=1)
    front = made.fronts[0]
    for _ in range(4):
        front.submit(prompt(2), 1)
    assert front.free_slot() is None
    made.finish()
    assert front.free_slot() is not None


# ---- cancel -------------------------------------------------------------------------------------------------------------


def test_cancel_before_the_entry_is_read_and_while_waiting() -> None:
    made = world(rows=1)
    running, waiting = made.fronts[0].submit(prompt(3), 20), made.fronts[0].submit(prompt(3), 20)
    made.fronts[0].cancel(1)
    made.step()
    made.step()
    made.fronts[0].poll()
    assert (waiting.ended, waiting.got) == (q.FINISH_CANCELLED, [])
    made.finish()
    assert running.ended == q.FINISH_LENGTH


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
    assert sent.ended == q.FINISH_CANCELLED
    assert statuses(made)[0] == EMPTY


def test_a_cancel_after_the_end_means_nothing() -> None:
    made = world()
    front = made.fronts[0]
    first = front.submit(prompt(3), 1)
    made.finish()
    made.views.cancel[0, 0] = first.request_id
    second = front.submit(prompt(4), 3, slot=0)
    made.finish()
    assert second.ended == q.FINISH_LENGTH
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
    assert slow.word(q.PAIR_CQ_TAIL) == 4
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
    assert [sent.ended for sent in others] == [q.FINISH_LENGTH] * 2
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
    assert (len(sent.got), sent.ended) == (2, q.FINISH_CANCELLED)


# ---- the door -----------------------------------------------------------------------------------------------------------

BAD_ENTRIES = [
    (q.REJECT_PROMPT, {"prompt_length": 0}),
    (q.REJECT_PROMPT, {"prompt_length": -1}),
    (q.REJECT_PROMPT, {"prompt_offset": -1}),
    (q.REJECT_PROMPT, {"prompt_offset": 1 << 30}),
    (q.REJECT_PROMPT, {"prompt_offset": 2**31 - 1, "prompt_length": 2**31 - 1}),
    (q.REJECT_LENGTH, {"max_tokens": 28}),
    (q.REJECT_LENGTH, {"max_tokens": 2**31 - 1}),
    (q.REJECT_PAGES, {"max_tokens": 22}),
    (q.REJECT_HASHES, {"hash_count": 0}),
    (q.REJECT_HASHES, {"hash_count": 2}),
    (q.REJECT_HASHES, {"hash_offset": -1}),
    (q.REJECT_HASHES, {"hash_offset": 2**31 - 1}),
    (q.REJECT_PARAMETER, {"max_tokens": 0}),
    (q.REJECT_PARAMETER, {"min_tokens": -1}),
    (q.REJECT_PARAMETER, {"temperature": -0.1}),
    (q.REJECT_PARAMETER, {"temperature": np.nan}),
    (q.REJECT_PARAMETER, {"temperature": np.inf}),
    (q.REJECT_PARAMETER, {"top_p": 0}),
    (q.REJECT_PARAMETER, {"top_p": 1.01}),
    (q.REJECT_PARAMETER, {"min_p": -0.5}),
    (q.REJECT_PARAMETER, {"min_p": 1.5}),
    (q.REJECT_PARAMETER, {"top_k": -1}),
    (q.REJECT_PARAMETER, {"repetition_penalty": 0}),
    (q.REJECT_PARAMETER, {"presence_penalty": -np.nan}),
    (q.REJECT_PARAMETER, {"frequency_penalty": -np.inf}),
    (q.REJECT_PARAMETER, {"logprobs": 21}),
    (q.REJECT_PARAMETER, {"cache_salt": -1}),
    (q.REJECT_PARAMETER, {"flags": 2}),
    (q.REJECT_PARAMETER, {"request_id": 7}),
]


@pytest.mark.parametrize(("reason", "fields"), BAD_ENTRIES)
def test_bad_entries_are_rejected_and_harm_nobody(reason: int, fields: dict[str, Any]) -> None:
    made = world(pages=6, page_size=4, max_model_len=32)
    other = made.fronts[0].submit(prompt(3), 4)
    bad = made.fronts[0].submit(prompt(5), **{"max_tokens": 3, "ring": False, **fields})
    made.fronts[0].ring()
    made.finish()
    assert (bad.ended, bad.reason, bad.got) == (q.FINISH_REJECTED, reason, [])
    assert other.ended == q.FINISH_LENGTH
    assert made.counter("requests_rejected") == 1
    assert made.counter("requests_accepted") == 1


@pytest.mark.parametrize("fields", [{"temperature": -0.0}, {"temperature": 2}, {"min_p": 1}, {"logprobs": 20}, {"top_k": 9}])
def test_parameters_at_their_bounds_are_accepted(fields: dict[str, Any]) -> None:
    made = world()
    sent = made.fronts[0].submit(prompt(3), 2, **fields)
    made.finish()
    assert sent.ended == q.FINISH_LENGTH


@pytest.mark.parametrize("token", [-1, 50])
def test_a_prompt_token_outside_the_vocabulary_is_rejected(token: int) -> None:
    made = world()
    front = made.fronts[0]
    sent = front.submit(prompt(6), 2, ring=False)
    made.views.prompt[0, 4] = token
    front.ring()
    made.finish()
    assert (sent.ended, sent.reason) == (q.FINISH_REJECTED, q.REJECT_TOKEN)


@pytest.mark.parametrize("key", [-1, 1 << 62])
def test_a_page_hash_out_of_range_is_rejected(key: int) -> None:
    made = world()
    sent = made.fronts[0].submit(prompt(6), 2, ring=False)
    made.views.hashes[0, 0] = key
    made.fronts[0].ring()
    made.finish()
    assert (sent.ended, sent.reason) == (q.FINISH_REJECTED, q.REJECT_HASHES)


@pytest.mark.parametrize("slot", [-1, 4, 2**31 - 1])
def test_an_entry_for_a_slot_that_is_none_is_counted_and_skipped(slot: int) -> None:
    made = world()
    made.fronts[0].submit(prompt(3), 2, slot=slot)
    good = made.fronts[0].submit(prompt(3), 2)
    made.finish()
    assert good.ended == q.FINISH_LENGTH
    assert made.counter("requests_rejected") == 1


def test_an_entry_for_a_busy_slot_has_no_effect_on_its_owner() -> None:
    made = world()
    owner = made.fronts[0].submit(prompt(3), 6)
    made.step()
    made.fronts[0].submit(prompt(7, 2), 2, slot=0)
    made.finish()
    assert owner.ended == q.FINISH_LENGTH
    assert made.counter("requests_rejected") == 1


def test_hashes_may_be_left_out_by_those_that_do_not_share() -> None:
    made = world()
    sent = made.fronts[0].submit(prompt(9), 2, flags=q.SUBMIT_NO_PREFIX_CACHE, hash_count=0)
    made.finish()
    assert sent.ended == q.FINISH_LENGTH


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
    assert dead.word(q.PAIR_CQ_TAIL) < 25
    made.finish()
    assert other.ended == q.FINISH_LENGTH


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
    made.views.front[0, q.FRONT_DOORBELL] = 1 << 32 | tail + 1
    made.views.front[0, q.FRONT_CQ_HEAD] = 1 << 32 | 1000
    made.views.cancel[0, :] = late_id
    made.step()
    assert made.counter("stale_entries") == 0
    assert front.word(q.PAIR_SQ_HEAD) == tail
    front.submit(prompt(3), 2, epoch=1)
    front.slots[0] = None
    good = front.submit(prompt(3), 2, slot=1)
    made.finish()
    assert made.counter("stale_entries") == 1
    assert good.ended == q.FINISH_LENGTH


@pytest.mark.parametrize(
    ("word", "value"),
    [(q.FRONT_DOORBELL, 5), (q.FRONT_DOORBELL, q.POSITION_MASK), (q.FRONT_CQ_HEAD, 1), (q.FRONT_CQ_HEAD, 1 << 31)],
)
def test_a_broken_protocol_fences_that_pair_alone(word: int, value: int) -> None:
    made = world()
    broken, fine = made.fronts
    other = fine.submit(prompt(3), 5)
    made.views.front[0, word] = 1 << 32 | value
    made.step()
    assert broken.word(q.PAIR_ATTACHED) == 0
    assert made.counter("stale_entries") == 1
    broken.claim()
    made.step()
    assert broken.settle()
    sent = broken.submit(prompt(3), 5)
    made.finish()
    assert sent.ended == other.ended == q.FINISH_LENGTH


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
    assert sent.ended == q.FINISH_LENGTH


def test_only_the_next_epoch_can_be_claimed_and_epochs_end() -> None:
    made = world(pairs=1)
    for claim in (0, 1, 3, 1 << 40):
        made.views.front[0, q.FRONT_CLAIM] = claim
        made.step()
        assert made.fronts[0].word(q.PAIR_EPOCH) == 1
    made.state.pairs.epoch[0] = q.EPOCH_LIMIT
    made.views.front[0, q.FRONT_CLAIM] = q.EPOCH_LIMIT + 1
    made.step()
    assert made.state.pairs.epoch[0] == q.EPOCH_LIMIT


def test_positions_wrap_at_32_bits() -> None:
    made = World(Sizes(pairs=1, cq_entries=16))
    start = (1 << 32) - 3
    for name in ("sq_head", "sq_tail", "cq_head", "cq_tail"):
        getattr(made.state.pairs, name)[0] = start
    made.views.pair[0, q.PAIR_SQ_HEAD] = made.views.pair[0, q.PAIR_CQ_TAIL] = start
    made.attach()
    for _ in range(6):
        made.fronts[0].submit(prompt(3), 2)
        made.finish()
    assert made.fronts[0].cq_head == start + 12


# ---- host ---------------------------------------------------------------------------------------------------------------


def test_drain_ends_what_was_accepted_and_takes_nothing_new() -> None:
    made = world(pairs=1, rows=1)
    sent = [made.fronts[0].submit(prompt(3), 3) for _ in range(2)]
    made.step()
    made.views.control[q.CONTROL_COMMAND] = q.COMMAND_DRAIN
    made.fronts[0].submit(prompt(3), 3)
    for _ in range(20):
        made.step()
        made.fronts[0].poll()
    assert made.bucket == DRAINED
    assert [request.ended for request in sent] == [q.FINISH_LENGTH] * 2
    assert made.counter("requests_accepted") == 2


def test_stop_publishes_what_was_computed_and_returns_at_once() -> None:
    made = world()
    made.fronts[0].submit(prompt(3), 9)
    made.step()
    made.views.control[q.CONTROL_COMMAND] = q.COMMAND_STOP
    assert made.step() == made.step() == STOPPED
    assert made.state.inbox.command[0] == q.COMMAND_STOP
    assert made.fronts[0].word(q.PAIR_CQ_TAIL) == 1


def test_the_engine_reports_gauges_and_its_heartbeat() -> None:
    made = world(pairs=1)
    assert made.step() == NOTHING
    made.fronts[0].submit(prompt(6), 2)
    made.step()
    engine = made.views.engine
    gauges = {name: int(engine[index]) for name, index in q.GAUGE.items()}
    assert gauges == {
        "requests_running": 1,
        "requests_waiting": 0,
        "pages_free": 14,
        "pages_cached": 0,
        "pages_held": 2,
        "batch_rows": 1,
        "batch_tokens": 6,
    }
    assert (engine[q.ENGINE_HEARTBEAT], engine[q.ENGINE_STEPS], engine[q.ENGINE_TIME_NS]) == (3, 1, made.now)


def test_the_null_engine_serves_made_up_tokens() -> None:
    made = World(Sizes(lease_ms=4_000_000_000), "njit")  # the loop has another clock
    made.attach()
    front = made.fronts[0]
    front.submit(prompt(6), 5, seed=-(2**62))
    scheduler = Scheduler(made.limits, made.state)
    scheduler.attach(made.views)
    assert scheduler.run_null(range(10, 40), 0, 5_000_000, 1 << 62) == NOTHING
    words = [q.unpack_completion(int(word)) for word in made.views.cq[0, :5]]
    expected = [made_up_token(-(2**62), position, 10, 40) for position in range(6, 11)]
    assert [word.token for word in words] == expected
    assert all(10 <= token < 40 for token in expected)
    assert words[-1].finish == q.FINISH_LENGTH
    made.views.control[q.CONTROL_COMMAND] = q.COMMAND_STOP
    assert scheduler.run_null(range(10, 40), 0, 5_000_000, 1 << 62) == STOPPED


@pytest.mark.parametrize(
    ("changes", "tokens", "message"),
    [
        ({"rows": 5000}, 8192, "max_num_seqs must be 1 to 4096"),
        ({"page_size": 3}, 16, "page_size must be a power of two"),
        ({"pages": 0}, 16, "num_pages must be at least 1"),
        ({"rows": 8}, 7, r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"),
    ],
)
def test_limits_that_clash_are_named(changes: dict[str, int], tokens: int, message: str) -> None:
    sizes = Sizes(**changes)
    with pytest.raises(ConfigError, match=message):
        make_limits(Sizes().queue_sizes(), sizes.facts(), max_num_batched_tokens=tokens)


@pytest.mark.parametrize("buckets", [[(4, 4)], [(8, 4), (4, 4), (16, 4)], [(0, 0), (16, 4)]])
def test_buckets_must_hold_the_largest_batch(buckets: list[tuple[int, int]]) -> None:
    limits = make_limits(Sizes().queue_sizes(), Sizes().facts(), max_num_batched_tokens=16)
    with pytest.raises(ConfigError, match="bucket"):
        make_state(limits, buckets)


# ---- the integrity check itself -----------------------------------------------------------------------------------------


def _break(name: str, index: Any, value: Any) -> Any:
    def change(made: World) -> None:
        tree: Any = made.state
        for part in name.split("."):
            tree = getattr(tree, part)
        tree[index] = value(tree[index]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("requests.status", 3, RUNNING, "running lists"),
        ("requests.status", 0, 9, "no legal status"),
        ("running", 1, 0, "running lists"),
        ("requests.computed", 0, lambda v: v + 50, "nothing to compute"),
        ("requests.page_table", (0, 1), lambda v: v + 1, "page"),
        ("requests.num_pages", 0, lambda v: v + 1, "page table"),
        ("pages.refcount", 0, lambda v: v + 1, "reference count"),
        ("pages.free", 0, 0, "exactly one of"),
        ("counts", FREE_COUNT, lambda v: v - 1, "exactly one of"),
        ("counts", RING_TAIL, 1 << 40, "ring"),
        ("pages.key", 0, lambda v: v ^ 1, "bucket"),
        ("pages.bucket_next", 0, 0, "twice in the index"),
        ("pages.tokens", (0, 0), lambda v: v + 1, "canonical"),
        ("pairs.attached", 0, 0, "owner is gone"),
        ("pairs.cq_tail", 0, 1 << 20, "overflowed"),
        ("requests.tokens", (0, 0), 50, "vocabulary"),
        ("batch.cache_slots", 0, lambda v: v + 1, "cache slot"),
        ("batch.positions", 0, 9, "wrong position"),
        ("batch.emits", 0, 0, "emits"),
        ("batch.row_slots", 1, lambda v: v - 1, "two rows"),
    ],
)
def test_the_integrity_check_finds_what_is_broken(name: str, index: Any, value: Any, message: str) -> None:
    made = world(pairs=1)
    for start in (0, 1):
        made.fronts[0].submit(prompt(4, start), 9)
    for _ in range(2):
        made.step()
    assert made.state.requests.indexed[0] == 1
    _break(name, index, value)(made)
    problems = check_integrity(made.limits, made.state)
    assert any(message in problem for problem in problems), problems


def test_a_front_end_without_a_claim_is_not_served() -> None:
    made = World(Sizes(pairs=1))
    front = Front(made, 0)
    front.sq_tail = 0
    front.submit(prompt(3), 2)
    for _ in range(3):
        made.step()
    assert made.counter("requests_accepted") == 0
