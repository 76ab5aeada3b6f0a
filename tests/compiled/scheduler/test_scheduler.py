"""Properties of the scheduler that the simulator can't check or never reaches: sizes of batches, words for the host, rare
ends."""

import itertools
import random

import numpy as np
import pytest
from support.expected_request import ExpectedRequest
from support.scheduler_cases import VOCAB, Case, case_sizes, make_case, tokens

from blinkpy.kv import state as S
from blinkpy.queues import words as W
from blinkpy.queues.submission import neutral_entries
from blinkpy.queues.words import FINISH_CANCELLED, FINISH_ERROR, FINISH_LENGTH
from blinkpy.scheduler import cycle
from blinkpy.scheduler.phases.fast_path import take_fast_path
from blinkpy.scheduler.phases.forecast import forecast
from blinkpy.scheduler.policies import SHIPPED, fcfs, priority
from blinkpy.verify.sim.world import TICK_NS, make_world

PROMPTS = {  # sizes; then, in order, arriving prompts (tokens, max_tokens), and the batches of the next turns
    "in chunks, mixed with decodes": (
        {"tokens": 8},
        [([(4, 10)], [[1, 4, 0]]), ([(17, 3)], [[2, 8, 1], [2, 8, 1], [2, 4, 1], [2, 2, 2]])],  # 7 + 7 + 3 tokens of the prompt
    ),
    "few prompts in smaller steps next to decodes": (
        {"mixed_step_tokens": 8, "burst_tokens": 12, "rows": 3},
        [
            ([(10, 12)], [[1, 10, 0]]),  # no request decodes
            ([(12, 12)], [[2, 8, 1], [2, 6, 1], [2, 2, 2]]),  # 7 + 5 tokens
            ([(13, 12)], [[3, 15, 2]]),  # more than burst_tokens
        ],
    ),
    "a burst of long ones in larger steps, and one of short ones in the largest": (
        {"tokens": 20, "mixed_step_tokens": 8, "burst_step_tokens": 12, "burst_tokens": 16},
        [
            ([(2, 12)], [[1, 2, 0]]),
            ([(20, 8)], [[2, 12, 1], [2, 8, 1], [2, 3, 1]]),  # 20, then 9, then 2 are missing
            ([(8, 8)] * 3, [[4, 18, 2]]),  # 24 tokens of three prompts, with rows for two
        ],
    ),
}


def batches(case: Case, turns: int) -> list[list[int]]:
    counts = case.state.batch.counts
    return [counts[[S.ROWS, S.TOKENS, S.DECODE_ROWS]].tolist() for _ in range(turns) if case.turn() >= 0]


@pytest.mark.parametrize("how", PROMPTS)
def test_prompts_are_computed(how: str) -> None:
    sizes, arrivals = PROMPTS[how]
    case = make_case(slots=5, pages=64, prefix_caching=False, **sizes)
    requests: list[ExpectedRequest] = []
    for prompts, expected in arrivals:
        requests += [case.submit(tokens(n, len(requests) + i), most) for i, (n, most) in enumerate(prompts)]
        assert batches(case, len(expected)) == expected
    case.finish()
    assert all(request.ended == FINISH_LENGTH for request in requests)
    assert case.counter("computed_tokens") == sum(n + most - 1 for prompts, _ in arrivals for n, most in prompts)


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


def test_no_request_is_preempted_while_pages_suffice() -> None:
    """Two decodes need a page each; one page is free, and the third request frees another with its last token."""
    case = make_case(pages=4, pairs=1)
    requests = [case.submit(tokens(n, n), most) for n, most in ((4, 4), (4, 4), (2, 1))]
    case.turn(2)
    assert case.state.counts[[S.RUNNING_COUNT, S.FREE_COUNT]].tolist() == [2, 0]
    case.finish()
    assert case.counter("preemptions") == 0
    assert all(request.ended == FINISH_LENGTH for request in requests)


def test_many_that_lack_pages_at_once_and_were_preempted_before(seed: int) -> None:
    """Pages of one token: every decoding request lacks one in each turn. The oracle determines the preempted requests."""
    draw, preempted, again = random.Random(seed), 0, 0
    for _ in range(30):
        case = make_case(lanes=1, pairs=1, slots=10, rows=10, page_size=1, pages=32, intake_entries=10, prefix_caching=False)
        requests = [case.submit(tokens(draw.randint(1, 4), draw.randrange(VOCAB)), draw.randint(8, 16)) for _ in range(10)]
        most = case.state.requests.preemptions
        while not all(request.ended for request in requests):
            case.read(0)
            case.turn()
            again = max(again, int(most.max()))
        preempted += case.counter("preemptions")
    print(preempted, again)
    assert preempted > 150 and again > 1, (preempted, again)


def test_words_without_log_probabilities_leave_the_records_alone() -> None:
    case = make_case()
    case.state.batch.logprobs[:] = 7
    for prompt in (tokens(3), tokens(6)):
        case.submit(prompt, 6)
    case.finish()
    assert not case.views.records.any()


def test_a_better_request_is_sorted_in_before_many_others() -> None:
    case = make_case(SHIPPED["shortest-first"], pairs=1, slots=12, rows=1, intake_entries=12, pages=64)
    for n in range(12):
        case.submit(tokens(3, n), 14 - n)
    case.turn()
    assert case.state.waiting[:11].tolist() == sorted(range(12), reverse=True)[1:]
    case.finish()


def test_more_queue_pairs_than_a_scan_counts() -> None:
    """Four pairs fit the 64 bits of a scan."""
    case = make_case(pairs=6, slots=2, rows=8)
    requests = [case.submit(tokens(3, pair), 3, pair=pair) for pair in (5, 0, 4, 5)]
    case.finish()
    assert all(request.ended == FINISH_LENGTH for request in requests)


FAST = {  # (prompts (tokens, max_tokens) that arrive, other event, whether the next turn's forecast is certain)
    "all decode": ([(3, 9), (4, 9)], "", 1),
    "all rows decode, and one waits": ([(3, 9), (4, 9), (5, 9), (2, 9)], "", 1),
    "one waits for pages": ([(3, 9), (20, 4), (22, 4)], "", 0),
    "one computes its prompt": ([(3, 9), (24, 4)], "", 0),
    "one is cancelled": ([(3, 9), (4, 9)], "cancel", 0),
    "a waiting request is cancelled": ([(3, 9), (4, 9), (5, 9), (2, 9)], "cancel", 0),
    "the engine drains": ([(3, 9), (4, 9)], "drain", 0),
    "a reader may be behind": ([(3, 12), (4, 12)], "silence", 0),
    "a reader is never behind": ([(3, 12), (4, 12)], "short silence", 1),
}


@pytest.mark.parametrize("how", FAST)
def test_the_fast_path_is_taken_where_all_is_certain(how: str) -> None:
    prompts, more, certain = FAST[how]
    case = make_case(rows=3, pages=12, tokens=24, max_model_len=32)
    requests = [case.submit(tokens(n, n), most) for n, most in prompts]
    for _ in range({"silence": 7, "short silence": 5}.get(more, 2)):  # two rows publish 2 of 16 entries in each, except the first
        case.turn()
        if "silence" not in more:
            case.read(0)
    if more == "cancel":
        case.cancel(requests[-1])
    if more == "drain":
        case.views.control[W.CONTROL_COMMAND] = W.COMMAND_DRAIN
    case.turn()
    assert case.state.counts[S.FAST_PATH] == certain
    case.views.control[W.CONTROL_COMMAND] = W.COMMAND_RUN
    case.finish()


@pytest.mark.parametrize("most_rows", [2, 3])
def test_what_ends_the_fast_path_does_so_beside_all_else(most_rows: int) -> None:
    """All combinations: no reason cancels another."""
    case = make_case(lanes=1, rows=most_rows, pages=12, tokens=24)
    for n in (4, 5):  # their next tokens need no page
        case.submit(tokens(n, n), 9)
    case.turn(2)
    state, counts, decode_rows = case.state, case.state.counts, case.state.batch.counts
    before, certain = counts.copy(), 0
    commands = (W.COMMAND_RUN, W.COMMAND_DRAIN, W.COMMAND_STOP)
    reasons = itertools.product([0, 1, 2], [0, 1], [0, 1, 2], [0, 1], [2, 3], [2, 1], commands, [True, False], [0, 1])
    for finishing, stalled, verdicts, waiting, running, decoding, command, grown, drafting in reasons:
        counts[:] = before
        counts[[S.FINISHING_COUNT, S.STALLED_COUNT, S.VERDICT_COUNT]] = finishing, stalled, verdicts
        counts[[S.WAITING_COUNT, S.RUNNING_COUNT]] = waiting, running
        decode_rows[S.DECODE_ROWS], state.inbox.command[0] = decoding, command
        forecast(case.limits, state, grown, drafting, 0, 1)
        nothing = (finishing, stalled, verdicts, running, decoding, command) == (0, 0, 0, 2, 2, W.COMMAND_RUN)
        expected = nothing and grown and not drafting and (waiting == 0 or most_rows == 2)
        assert counts[S.FAST_PATH] == expected, (
            finishing,
            stalled,
            verdicts,
            waiting,
            running,
            decoding,
            command,
            grown,
            drafting,
        )
        certain += expected
    assert certain == (2 if most_rows == 2 else 1)


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
    expected = {"requests_running": 1, "pages_free": 14, "pages_held": 2, "batch_rows": 1, "batch_tokens": 6}
    assert {name: int(engine[index]) for name, index in W.GAUGE.items() if engine[index]} == expected
    assert (engine[W.ENGINE_HEARTBEAT], engine[W.ENGINE_STEPS], engine[W.ENGINE_TIME_NS]) == (calls + 2, 1, case.now)


@pytest.mark.parametrize("turns", [1, 2, 3, 6])
def test_cancel_in_prefill_and_decode_gives_everything_back_at_once(turns: int) -> None:
    case = make_case(tokens=4, rows=2, prefix_caching=False)
    request = case.submit(tokens(11), 12)
    case.turn(turns)
    case.cancel(request)
    case.turn()
    assert case.state.counts[S.FREE_COUNT] == case.limits.pages
    case.read(0)
    assert request.ended == FINISH_CANCELLED
    assert case.state.requests.status[0] == S.EMPTY


# ---- readers that are behind --------------------------------------------------------------------------------------------


def behind(**sizes: int) -> tuple[Case, ExpectedRequest]:
    """A stalled request of pair 0, whose ring is full."""
    case = make_case(**{"cq_entries": 2, "pages": 4, "rows": 3} | sizes)
    request = case.submit(tokens(9), 8)
    case.turn(6)
    assert case.state.counts[[S.RUNNING_COUNT, S.STALLED_COUNT]].tolist() == [1, 1]
    return case, request


def test_a_stalled_request_is_preempted_for_a_request_without_pages() -> None:
    case, stalled = behind(pages=6, cq_entries=4)
    other = case.submit(tokens(3), 12, pair=1)
    case.turn()
    last = case.submit(tokens(7, 3), 2, pair=1)
    case.read(1)
    case.turn()
    assert case.state.requests.preemptions.tolist() == [1, 0, 0, 0, 0, 0, 0, 0]
    assert case.state.counts[[S.RUNNING_COUNT, S.STALLED_COUNT]].tolist() == [2, 0]
    case.finish()
    assert stalled.ended == other.ended == last.ended == FINISH_LENGTH


def test_a_last_completion_waits_for_space_and_ends_with_its_owner() -> None:
    for owner in ("reads", "claims", "dies"):
        case, request = behind()
        case.cancel(request)
        case.turn()
        assert case.state.counts[[S.FINISHING_COUNT, S.STALLED_COUNT]].tolist() == [1, 0]
        if owner == "claims":
            case.claim(0)
            assert case.state.counts[S.FINISHING_COUNT] == 0
        elif owner == "dies":
            case.silent.add(0)
            case.turn(case.limits.lease_ns // TICK_NS + 1)
            assert (case.word(W.PAIR_ATTACHED), case.state.counts[S.FINISHING_COUNT]) == (0, 0)
            case.awaited.remove(request)
        case.finish()
        assert request.ended == (FINISH_CANCELLED if owner == "reads" else 0)
        assert case.word(W.PAIR_CQ_TAIL) == (3 if owner == "reads" else 2)


def test_a_drain_waits_for_last_completions() -> None:
    case, request = behind()
    case.cancel(request)
    case.views.control[W.CONTROL_COMMAND] = W.COMMAND_DRAIN
    assert [case.turn(), case.turn()] == [S.NO_BATCH] * 2
    case.read(0)
    assert case.turn() == S.DRAINED
    case.read(0)
    assert request.ended == FINISH_CANCELLED


def test_a_stop_drops_stalled_cancelled_requests() -> None:
    case, request = behind()
    case.cancel(request)
    case.views.control[W.CONTROL_COMMAND] = W.COMMAND_STOP
    assert case.turn() == S.STOPPED
    assert case.state.counts[[S.RUNNING_COUNT, S.STALLED_COUNT]].tolist() == [0, 0]


# ---- the words of front ends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (W.FRONT_DOORBELL, 5),
        (W.FRONT_DOORBELL, 1 << 31),
        (W.FRONT_DOORBELL, W.POSITION_MASK),
        (W.FRONT_CQ_HEAD, 1),
        (W.FRONT_CQ_HEAD, 1 << 31),
    ],
)
def test_a_protocol_violation_fences_only_its_pair(word: int, value: int) -> None:
    case = make_case()
    other = case.submit(tokens(3), 5, pair=1)
    case.views.front[0, word] = 1 << 32 | value
    case.silent.add(0)
    case.world.sim.fronts.broke[0] = 1  # for the checks: it broke the protocol
    case.turn()
    case.silent.clear()
    assert [case.word(W.PAIR_ATTACHED, pair) for pair in range(2)] == [0, 1]
    assert case.counter("stale_entries") == 1
    case.claim(0)
    again = case.submit(tokens(3), 5)
    case.finish()
    assert again.ended == other.ended == FINISH_LENGTH


@pytest.mark.parametrize("back", [1, 3])
def test_a_decreasing_completion_head_fences_the_pair(back: int) -> None:
    case = make_case()
    first = case.submit(tokens(3), 3)
    case.finish()
    case.turn()
    assert first.ended and case.state.pairs.cq_head[0] == case.state.pairs.cq_tail[0] == 3
    case.views.front[0, W.FRONT_CQ_HEAD] -= back
    case.silent.add(0)
    case.world.sim.fronts.broke[0] = 1  # for the checks: it broke the protocol
    case.turn()
    case.silent.clear()
    assert [case.word(W.PAIR_ATTACHED, pair) for pair in range(2)] == [0, 1]


def test_a_better_request_waits_for_budget_used_by_a_worse_one() -> None:
    """A running request continues: a better rank overtakes only in the queue."""
    for length, running in ((28, 1), (13, 2)):  # 20 or 5 are missing after the first step
        case = make_case(priority, pairs=1, tokens=8, pages=40)
        requests = [case.submit(tokens(length), 2, priority=9)]
        case.turn()
        requests += [case.submit(tokens(3, n), 2, priority=n) for n in (1, 2)]
        case.turn()
        assert case.state.counts[[S.RUNNING_COUNT, S.WAITING_COUNT]].tolist() == [running, 3 - running]
        case.finish()
        assert all(request.ended == FINISH_LENGTH for request in requests)


def test_a_drain_ends_with_the_last_completion() -> None:
    """In the same turn, if the ring has space."""
    case = make_case(pairs=1)
    request = case.submit(tokens(3), 8)
    case.turn(2)
    case.cancel(request)
    case.views.control[W.CONTROL_COMMAND] = W.COMMAND_DRAIN
    assert case.turn() == S.DRAINED
    case.read(0)
    assert request.ended == FINISH_CANCELLED


@pytest.mark.parametrize("fast", [False, True])
def test_the_fast_path_is_taken_where_it_may_be_unless_it_is_switched_off(monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    """Only this test shows the path: both paths leave the same state."""
    taken = list[int]()
    monkeypatch.setattr(cycle, "take_fast_path", lambda *given: taken.append(1) or take_fast_path(*given))
    turn = cycle.make_phases(fcfs, fast_path=fast).turn
    case, may = Case(make_world(1, 1, chosen=case_sizes(pairs=1, cq_entries=64)), turn, fcfs), 0
    case.claim(0)
    case.submit(tokens(3), 12)
    for _ in range(20):
        case.turn()
        may += int(case.state.counts[S.FAST_PATH])
    assert may > 8 and len(taken) == (may if fast else 0)


@pytest.mark.parametrize("turns", [0, 1])
def test_entries_that_were_announced_before_a_fence_are_skipped(turns: int) -> None:
    """Even if no entry of the pair was ever consumed."""
    case = make_case(intake_entries=1, pairs=1)
    case.turn(10)  # a claim is granted immediately
    for _ in range(4):
        case.submit(tokens(3), 2)
    case.turn(turns)
    case.views.front[0, W.FRONT_CLAIM] = 2  # another front end's
    case.turn()
    assert (case.counter("requests_accepted"), case.word(W.PAIR_SQ_HEAD)) == (turns, 4)
    case.claim(0)
    request = case.submit(tokens(4), 2)
    case.finish()
    assert case.counter("requests_accepted") == turns + 1
    assert request.ended == FINISH_LENGTH


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
