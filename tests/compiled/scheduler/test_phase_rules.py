"""The effect of words on single phases that storms rarely produce: positions beyond half of the range, stale slots, last
pages."""

from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import make_case, tokens

from blinkpy.device.lanes import Team
from blinkpy.device.tables import as_memoryviews
from blinkpy.kv import state as S
from blinkpy.queues import submission as E
from blinkpy.queues import words as W
from blinkpy.queues.words import FINISH_CANCELLED, FINISH_LENGTH, FINISH_REJECTED
from blinkpy.scheduler.phases.completions import free_entries
from blinkpy.scheduler.phases.forecast import grow_for_forecast
from blinkpy.scheduler.phases.intake import parameters_in_range
from blinkpy.scheduler.phases.ownership import validate_front_words
from blinkpy.scheduler.phases.plan import plan_batch, plan_decodes
from blinkpy.scheduler.phases.preempt import preempt
from blinkpy.scheduler.phases.recorder import record_words
from blinkpy.scheduler.phases.waiting_list import make_rank_waiting
from blinkpy.scheduler.policies import fcfs, short_prompts
from blinkpy.scheduler.suspension import can_interrupt

# ---- queue pairs ------------------------------------------------------------------------------------------------------------


def test_doorbells_and_heads_are_valid_up_to_a_ring_s_length_away(rng: np.random.Generator) -> None:
    """Announced or unread numbers of 32 bits, all of which count: half of the range is the farthest position."""
    case = make_case(lanes=1, pairs=1)
    state, pairs, inbox = case.state, case.state.pairs, case.state.inbox
    head, tail, unread = int(rng.integers(1, 1 << 32)), int(rng.integers(9, 1 << 32)), int(rng.integers(1, 9))
    half, most = 1 << 31, case.limits.sq_entries
    inbox.claim[0] = 0
    for word, good, bad in (
        (inbox.doorbell, (0, 1, most), (most + 1, half, half + 1, half + most, 2 * half - 1)),
        (inbox.cq_head, (0, 1, unread), (unread + 1, half, half + 1, half + unread, 2 * half - 1)),
    ):
        for move in (*good, *bad):
            pairs.sq_head[0] = pairs.sq_tail[0] = head
            pairs.cq_tail[0], pairs.cq_head[0] = tail, tail - unread
            inbox.doorbell[0], inbox.cq_head[0] = (int(pairs.epoch[0]) << W.EPOCH_SHIFT | at for at in (head, tail - unread))
            position = (head + move if word is inbox.doorbell else tail - move) & W.POSITION_MASK
            word[0] = int(pairs.epoch[0]) << W.EPOCH_SHIFT | position
            validate_front_words(case.limits, state, 0, 1)
            assert pairs.verdict[0] == (0 if move in good else S.REVOKE | S.BROKEN), move
            if move in good:
                sent, left = (move, unread) if word is inbox.doorbell else (0, move)
                assert (pairs.sq_tail[0] - pairs.sq_head[0], pairs.cq_tail[0] - pairs.cq_head[0]) == (sent, left)


@pytest.mark.parametrize("consumed", [0, 7])
def test_a_claim_revokes_only_the_attached_front_end(consumed: int) -> None:
    """For any number of consumed entries."""
    case = make_case(lanes=1, pairs=1)
    pairs, inbox = case.state.pairs, case.state.inbox
    inbox.claim[0] = pairs.epoch[0] + 1
    pairs.granted_ns[0] = inbox.now_ns[0] - case.limits.claim_ns
    pairs.sq_head[0] = pairs.sq_tail[0] = consumed
    inbox.doorbell[0] = int(pairs.epoch[0]) << W.EPOCH_SHIFT | consumed
    for attached in (1, 0):
        pairs.attached[0] = attached
        validate_front_words(case.limits, case.state, 0, 1)
        assert pairs.verdict[0] == (S.GRANT | S.REVOKE if attached else S.GRANT)


def test_the_ring_of_a_pair_that_was_revoked_is_empty() -> None:
    """Unread completions of its owner are dropped: all entries are free for the next owner."""
    case = make_case(lanes=1, pairs=2, pages=40)
    case.judged = False
    case.submit(tokens(3), 6, 1)
    case.turn(4)
    assert case.state.pairs.cq_tail[1] - case.state.pairs.cq_head[1] > 1
    case.silent.add(1)
    case.now += case.limits.lease_ns  # and one tick more
    for _ in range(2):
        case.turn()
    assert case.state.pairs.attached.tolist() == [1, 0]
    assert [free_entries(case.limits, case.state.pairs, pair) for pair in (0, 1)] == [case.limits.cq_entries] * 2


def test_pairs_take_turns_where_a_turn_takes_one_entry() -> None:
    """The rotation continues in the next turn."""
    case = make_case(lanes=1, pairs=3, pages=60, intake_entries=1)
    for pair in range(3):
        for n in range(3):
            case.submit(tokens(3, n), 9, pair)
    case.turn(9)
    requests = case.state.requests
    arrived = sorted(np.flatnonzero(requests.request_id).tolist(), key=lambda slot: requests.arrival[slot])
    assert requests.pair[arrived].tolist() == [0, 1, 2] * 3


def test_each_parameter_of_an_entry_lies_between_its_low_and_its_high_key() -> None:
    """Even if all other parameters are within their bounds. Keys of negative floats are below all other keys."""
    inf, most, penalties = float("inf"), 3.4e38, ("presence_penalty", "frequency_penalty")
    fine = dict.fromkeys(penalties, (-most, -0.5, -1e-44, 0.0, 1e-44, most)) | {"temperature": (0.0, most), "min_p": (0, 1)}
    wrong = {name: (-inf, inf, float("nan")) for name in penalties} | {"temperature": (-1e-44, -most, inf), "min_p": (-0.5, 1.01)}
    wrong |= {"max_tokens": (0, -1), "min_tokens": (-1,), "top_k": (-1,), "top_p": (0.0, 1.01), "best_effort": (-1, 2)}
    for values, in_range in ((fine, True), (wrong, False)):
        for name, value in ((name, value) for name, its in values.items() for value in its):
            entry = E.neutral_entries(1)
            entry[name] = value
            assert parameters_in_range(entry.view(np.int32).tolist()) == in_range, (name, value)


# ---- running and waiting ------------------------------------------------------------------------------------------------------


def test_running_prompts_use_the_budget_in_any_order() -> None:
    """No request yields here, so each admitted request leaves less of the step for the next, even after a longer one."""
    case = make_case(short_prompts, 1, pairs=1, pages=60, max_model_len=64)
    requests = [case.submit(tokens(28), 2)]
    case.turn()
    requests += [case.submit(tokens(5, n + 1), 2) for n in range(2)]
    case.turn()
    slots = {sent.owner: sent.slot for sent in case.clients[0].live()}
    status = [int(case.state.requests.status[slots[request]]) for request in requests]
    assert status == [S.RUNNING, S.RUNNING, S.WAITING], "the first request lacks 12 of 16 tokens, and the second takes the rest"
    case.finish()


def test_reported_ends_free_only_their_own_slots() -> None:
    """Together with a request whose reader is behind, and whose slot an outdated place of `running` still names."""
    case = make_case(lanes=1, pairs=2, slots=4, cq_entries=4, pages=40)
    case.submit(tokens(4), 1)
    behind = case.submit(tokens(5, 3), 20, 1)
    for _ in range(9):
        case.turn()
        case.read(0)
    assert case.state.counts[S.STALLED_COUNT] == 1
    slot = int(case.state.running[0])
    assert case.state.running[1] == slot, "the stale place"
    case.cancel(behind)
    case.turn()
    refused = case.submit(tokens(5), 3, rejected=True, entry={"output_tokens": 9})
    case.turn()
    case.read(0)
    assert refused.ended == FINISH_REJECTED
    assert case.state.requests.finish[slot] == FINISH_CANCELLED, "it gets its end once entries are free"
    case.finish()
    assert behind.ended == FINISH_CANCELLED


@pytest.mark.parametrize("spare", [0, 1])
def test_pages_for_the_next_tokens_may_be_the_last_ones(spare: int) -> None:
    """Free or cached: as many pages as the rows demand suffice, but one less does not."""
    case = make_case(lanes=1, pairs=1, rows=2, pages=6, prefix_caching=False)
    for n in range(2):
        case.submit(tokens(8, n), 9)
    case.turn()
    requests, counts = case.state.requests, case.state.counts
    slots = case.state.batch.row_slots[:2].tolist()
    assert requests.num_pages[slots].tolist() == [2, 2] and counts[S.FREE_COUNT] == 2
    counts[S.FREE_COUNT] -= 1 - spare
    assert grow_for_forecast(case.limits, case.state, 0, 1) == bool(spare)
    assert requests.num_pages[slots].tolist() == [2 + spare] * 2 and counts[S.FREE_COUNT] == 1 - spare


def test_requests_with_one_missing_token_get_rows_and_others_are_counted() -> None:
    case = make_case(lanes=1, pairs=1, slots=8, rows=8, tokens=16, pages=60)
    for n, length in enumerate((3, 4, 5, 9, 12)):
        case.submit(tokens(length, n), 4)
    case.turn(2)
    requests, running = case.state.requests, case.state.running[: case.state.counts[S.RUNNING_COUNT]]
    missing = requests.length[running] - requests.computed[running]
    for lacks in (missing, np.ones_like(missing), np.full_like(missing, 2), 1 + np.arange(len(missing)) % 3):
        requests.computed[running] = requests.length[running] - lacks
        rows, others, _ = plan_decodes(case.limits, case.state, len(running), 0, 1)
        assert (rows, others) == ((lacks == 1).sum(), (lacks > 1).sum())


def by_history(request: Any) -> Any:
    return request.generated * 1000 + request.preemptions


def test_policies_read_generated_tokens_and_preemptions() -> None:
    case = make_case(lanes=1, pairs=1, pages=40)
    case.submit(tokens(9), 12)
    for _ in range(6):
        case.turn()
        case.read(0)
    limits, state, slot = case.limits, case.state, int(case.state.running[0])
    state.requests.hit_tokens[slot] = 8
    generated = int(state.requests.length[slot]) - 9
    for times in (1, 2):
        state.requests.status[slot] = S.RUNNING
        preempt(limits, state, slot, 0, 1)
        make_rank_waiting(by_history)(case.views, state, 0, 1)
        assert generated > 2 and state.requests.rank[slot] == generated * 1000 + times
        state.counts[S.WAITING_COUNT] = 0


def test_a_shipped_policy_leaves_no_fault_whatever_lies_in_the_scratch(rng: np.random.Generator) -> None:
    case = make_case(lanes=1, pairs=1, rows=1)
    case.submit(tokens(3), 9)
    case.turn()
    case.submit(tokens(3, 1), 2)
    case.state.scratch.breaks[:] = rng.integers(1, 1 << 62, len(case.state.scratch.breaks))
    case.turn()
    assert case.state.counts[S.WAITING_COUNT] == 1
    assert (case.counter("policy_faults"), case.views.engine[W.ENGINE_POLICY_FAULT]) == (0, 0)


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_prompt_interrupts_only_if_all_its_pages_are_available(more: int) -> None:
    case = make_case(fcfs, 1, pairs=1, slots=8, rows=6, tokens=24, pages=120, max_model_len=200, step_groups=4, cut_step_tokens=8)
    case.submit(tokens(60), 2, best_effort=1)
    case.turn()
    limits, state, counts = case.limits, case.state, case.state.counts
    assert state.batch.counts[S.GROUPS] == 4 and not can_interrupt(limits, state, 0, 1), "nobody waits"
    case.submit(tokens(17, 5), 2)
    case.turn()  # it interrupts; a waiting request gets a copy of its entry
    slot = int(state.batch.row_slots[0])
    state.requests.status[slot], state.requests.num_pages[slot], counts[S.RUNNING_COUNT] = S.WAITING, 0, 1
    state.waiting[0], counts[S.WAITING_COUNT], counts[S.INTERRUPTIONS] = slot, 1, 0
    counts[S.FREE_COUNT], counts[S.CACHED_COUNT] = 5 + 1 + more, 0  # of 17 tokens in pages of 4, and one for the running request
    assert can_interrupt(limits, state, 0, 1) == (more >= 0)


@pytest.mark.parametrize("passed", [2, 3])
def test_a_request_that_may_not_overtake_best_effort_does_not_interrupt(passed: int) -> None:
    """Slot 0 waits behind slot 1, a best-effort request, which three may overtake."""
    case = make_case(lanes=1, pairs=1, slots=4, yield_steps=3)
    state, counts = case.state, case.state.counts
    state.waiting[:2], state.requests.status[:2], state.requests.length[:2] = (1, 0), S.WAITING, 5
    state.requests.entry[:2, E.WORD_BEST_EFFORT], state.pairs.unclaimed_entries[:] = (0, 1), 1
    counts[[S.WAITING_COUNT, S.PASSED, S.INTERRUPTIONS]] = 2, passed, 5 - passed
    assert can_interrupt(case.limits, as_memoryviews(state), 0, 1) == (passed < 3)


def test_stalled_requests_are_preempted_even_without_free_pages() -> None:
    """A request whose reader is behind holds all pages."""
    case = make_case(lanes=1, pairs=2, cq_entries=2, pages=6, prefix_caching=False)
    case.submit(tokens(21), 4, 1)
    for _ in range(4):
        case.turn()
    counts = case.state.counts
    assert counts[[S.STALLED_COUNT, S.FREE_COUNT]].tolist() == [1, 0]
    other = case.submit(tokens(3), 2)
    case.turn()
    assert (case.state.requests.pair[case.state.running[0]], counts[S.RUNNING_COUNT], counts[S.WAITING_COUNT]) == (0, 1, 1)
    case.finish()
    assert (other.ended, case.counter("preemptions")) == (FINISH_LENGTH, 1)


def test_prefix_lookup_is_skipped_without_available_pages() -> None:
    """At least one page is never a hit. The result of an earlier admission attempt is reset."""
    case = make_case(lanes=1, pairs=1, pages=4)
    case.submit(tokens(9), 7)
    while case.state.counts[S.FREE_COUNT]:
        case.turn()
        case.read(0)
    case.submit(tokens(9), 2)
    case.turn()
    slot, requests = int(case.state.waiting[0]), case.state.requests
    assert (requests.status[slot], requests.hit_tokens[slot]) == (S.WAITING, 0)
    while requests.status[slot] == S.WAITING:
        case.turn()
        case.read(0)
    assert requests.hit_tokens[slot] == 8
    case.finish()


def test_lanes_wait_until_all_prompts_are_in_their_order() -> None:
    """While best-effort prompts yield, the order of the other prompts is by rank, so a lane reads another place than in
    `running`."""
    case = make_case(lanes=1, pairs=1, slots=8, rows=8, tokens=60, pages=80, max_model_len=64, yield_steps=4)
    for n in range(5):
        case.submit(tokens(9 + n, n), 4)
    case.turn()
    limits, state, requests = case.limits, case.state, case.state.requests
    running = state.running[: state.counts[S.RUNNING_COUNT]]
    requests.computed[running], requests.rank[running] = 0, np.arange(len(running))[::-1]
    for lanes in (2, 3, 5):
        (bucket, *_) = Team(lanes, lanes, races=True).run(plan_batch, limits, as_memoryviews(state), 60, True)
        rows = state.batch.row_slots[: state.batch.counts[S.ROWS]].tolist()
        assert rows == running[::-1].tolist() and bucket >= 0


# ---- the recorder -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lanes", [1, 3])
def test_words_of_grammars_are_recorded_two_in_one(rng: np.random.Generator, lanes: int) -> None:
    """The words of one of several slots, padded with a 0 to an even number."""
    case = make_case(lanes=1, record_turns=4)
    recorder, mask = case.state.recorder, case.limits.record_words - 1
    given = rng.integers(-(1 << 31), 1 << 31, (3, 24)).astype(np.int32)
    for count in range(24):
        recorder.words[:] = -1
        first = int(rng.integers(1 << 40))
        for lane in range(lanes):
            record_words(recorder, mask, first, given.data, 1, count, lane, lanes)
        at = [(first + i) & mask for i in range((count + 1) // 2)]
        found = recorder.words[at].view(np.int32).tolist()
        assert found == given[1, :count].tolist() + [0] * (count % 2)
        assert (recorder.words == -1).sum() >= len(recorder.words) - len(at)


def test_records_of_a_cut_step_tell_its_group_and_whether_another_is_suspended() -> None:
    """Group, groups and SUSPENDED are in the record's sixth word; whole steps leave no trace."""
    case = make_case(
        fcfs,
        1,
        pairs=1,
        slots=8,
        rows=6,
        tokens=24,
        pages=120,
        max_model_len=200,
        step_groups=4,
        cut_step_tokens=8,
        record_turns=64,
    )
    state, recorder, seen = case.state, case.state.recorder, set[tuple[int, int, bool]]()
    case.submit(tokens(3), 9)
    for turn in range(12):
        if turn == 2:
            case.submit(tokens(60), 2, best_effort=1)
        if turn == 4:
            case.submit(tokens(10, 5), 2)
        position = int(recorder.cursor[S.POSITION])
        case.turn()
        case.read(0)
        group, groups = state.batch.counts[[S.GROUP, S.GROUPS]].tolist()
        suspended = bool(state.suspended.counts[S.ROWS])
        word = int(recorder.words[position + 5 & case.limits.record_words - 1]) >> 32
        reported = (word & 0xFF, word >> 8 & 0xFF, bool(word >> 16))
        assert reported == ((group, groups) if groups > 1 else (0, 0)) + (suspended,)
        seen.add(reported)
    assert seen >= {(0, 0, False), (0, 4, False), (1, 4, False), (0, 0, True)}
    case.finish()


def test_best_effort_without_budget_blocks_rows_for_later_requests() -> None:
    """The first of three prompts uses all of best effort's share of the step; the third prompt is latency-sensitive."""
    case = make_case(lanes=1, pairs=1, slots=4, rows=4, tokens=60, pages=80, max_model_len=64, yield_steps=0)
    for n in range(3):
        case.submit(tokens(15, n), 4)
    case.turn()
    state = case.state
    state.requests.computed[:3], state.requests.entry[:2, E.WORD_BEST_EFFORT] = 0, 1
    plan_batch(case.limits._replace(best_effort_step_tokens=12), as_memoryviews(state), 60, False, 0, 1)
    batch = state.batch
    slots = state.running[:3].tolist()
    assert batch.counts[[S.ROWS, S.TOKENS]].tolist() == [2, 27]
    assert batch.row_slots[:2].tolist() == [slots[0], slots[2]] and batch.query_starts[:3].tolist() == [0, 12, 27]
