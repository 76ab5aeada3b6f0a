"""The order of admission, yielding and preemption, function by function: random states, compared with short rules."""

from pathlib import Path

import numpy as np
import pytest
from support.scheduler_cases import make_case

from blinkpy.device.lanes import in_lanes
from blinkpy.device.tables import as_memoryviews
from blinkpy.kv import state as S
from blinkpy.queues.submission import WORD_BEST_EFFORT, WORD_MAX_TOKENS, WORD_PRIORITY, WORD_TENANT
from blinkpy.scheduler.guarded_arithmetic import MOST_ROUNDS, WORST_RANK
from blinkpy.scheduler.phases.admit import budget_left, tokens_ahead
from blinkpy.scheduler.phases.preempt import WATERMARK_SHIFT, page_demand, preemption_victim, spare_pages
from blinkpy.scheduler.phases.waiting_list import insert_by_rank, make_rank_of, make_rank_waiting
from blinkpy.scheduler.policies import RequestFields, read_policy
from blinkpy.scheduler.yielding import best_effort_prompt, has_best_effort, next_to_pass, sensitive_prompt_runs


def test_states_at_random(rng: np.random.Generator) -> None:
    """Many requests have equal ranks and equal microseconds of arrival, and the order of slots differs from that of arrivals."""
    case = make_case(pairs=3, slots=4, rows=6, tokens=24, best_effort_step_tokens=12, yield_steps=3)
    limits, state, seen = case.limits, case.state, set[object]()
    r, counts, views = state.requests, state.counts, as_memoryviews(state)
    for _ in range(1500):
        slots = rng.permutation(limits.slots)
        n, waiting, unranked = (int(rng.integers(most)) for most in (7, 4, 3))
        state.running[:n], state.waiting[: waiting + unranked] = slots[:n], slots[n : n + waiting + unranked]
        counts[[S.RUNNING_COUNT, S.WAITING_COUNT, S.UNRANKED_COUNT]] = n, waiting, unranked
        r.status[:], r.status[slots[:n]] = S.WAITING, S.RUNNING
        r.computed[:] = rng.integers(0, 5, limits.slots)
        r.length[:] = r.computed + rng.integers(1, 7, limits.slots)
        r.stalled[:] = rng.choice((0, 0, S.STALLED, S.IN_FLIGHT), limits.slots)
        r.entry[:, WORD_BEST_EFFORT] = rng.random(limits.slots) < rng.choice((0.1, 0.5, 0.9))
        r.rank[:], r.arrival[:], r.arrival_us[:] = rng.integers(0, 3, limits.slots), rng.permutation(limits.slots), 7
        state.pairs.unclaimed_entries[:] = rng.integers(0, 3, limits.pairs)
        effort, missing = r.entry[:, WORD_BEST_EFFORT] != 0, r.length - r.computed
        running, line = slots[:n].tolist(), slots[n : n + waiting + unranked].tolist()
        free = [slot for slot in running if r.stalled[slot] == 0]

        for slot in range(limits.slots):
            assert best_effort_prompt(views.requests, slot) == (effort[slot] and missing[slot] > 1)
        assert sensitive_prompt_runs(views, 0, 1) == any(missing[slot] > 1 and not effort[slot] for slot in free)
        there = has_best_effort(views, 0, 1)
        assert there == any(effort[slot] for slot in running + line)
        r.status[line[:waiting]] = rng.choice(
            (S.WAITING, S.RUNNING), waiting, p=(0.8, 0.2)
        )  # like the request that was just admitted
        left = [slot for slot in line[:waiting] if r.status[slot] == S.WAITING and state.pairs.unclaimed_entries[r.pair[slot]]]
        passed, enters = int(rng.integers(5)), [slot for slot in left if not effort[slot]][:1]
        passes = bool(enters) and any(effort[slot] for slot in left[: left.index(enters[0])])
        enters = [] if passes and passed >= limits.yield_steps else enters
        slot, reported = next_to_pass(limits, views, passed, 0, 1)
        assert (slot, reported and slot >= 0) == (enters[0] if enters else -1, passes and bool(enters))
        if line:
            own = (r.rank[line[0]], r.arrival[line[0]])
            first = [slot for slot in free if not effort[slot] and (r.rank[slot], r.arrival[slot]) < own]
            ahead = {*first, *(slot for slot in free if missing[slot] == 1)}
            assert tokens_ahead(views, line[0], 0, 1) == sum(missing[slot] for slot in ahead)
        apart = [slot for slot in free if effort[slot] and missing[slot] > 1]
        prompts, space = sum(missing[slot] for slot in apart), 12 - sum(missing[slot] == 1 for slot in free)
        others = sum(missing[slot] for slot in free) - prompts
        assert budget_left(limits, views, 24, 0, 1) == (24 - others - min(prompts, space), space - prompts)
        for paused, only in ((False, False), (False, True), (True, False), (True, True)):
            able = [s for s in running if r.stalled[s] != S.IN_FLIGHT and (r.stalled[s] == S.STALLED or not paused)]
            able = [slot for slot in able if effort[slot] or not only]
            key = {s: (r.stalled[s], 0 if r.stalled[s] else r.rank[s], r.arrival[s]) for s in able}
            assert preemption_victim(views, paused, only, 0, 1) == max(able, key=key.__getitem__, default=-1)
            seen.add((paused, only, bool(able)))
        seen |= {("there", there), ("enters", bool(enters), passes), ("apart", prompts > space)}
    assert len(seen) == 16


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_list_is_sorted_by_rank_then_by_arrival(rng: np.random.Generator, lanes: int) -> None:
    """Ranks, arrivals and places are small numbers, so that each is often equal to another kind of number."""
    state = make_case(pairs=1, slots=7).state
    r, views = state.requests, as_memoryviews(state)
    insert = insert_by_rank if lanes == 1 else in_lanes(insert_by_rank, lanes, races=True)
    for _ in range(300):
        r.rank[:], r.arrival[:] = rng.integers(0, 5, 7), rng.permutation(7)
        state.waiting[:] = rng.permutation(7)
        line = state.waiting.tolist()
        for n, slot in enumerate(line):
            insert(views.requests, views.waiting, n, slot, 0, 1)
            expected = sorted(line[: n + 1], key=lambda slot: (r.rank[slot], r.arrival[slot]))
            assert state.waiting.tolist() == expected + line[n + 1 :]


@pytest.mark.parametrize("field", RequestFields._fields)
def test_a_policy_sees_each_field(tmp_path: Path, rng: np.random.Generator, field: str) -> None:
    """For a request that begins to wait, in any state; a scored request has generated no token yet."""
    (tmp_path / "mine.py").write_text(f"def rank(request):\n    return request.{field}\n")
    case = make_case(pairs=2, slots=3)
    state, views, queues = case.state, as_memoryviews(case.state), as_memoryviews(case.views)
    r, rank_waiting = state.requests, make_rank_waiting(read_policy(f"{tmp_path}/mine.py:rank"))
    words = {"max_tokens": WORD_MAX_TOKENS, "priority": WORD_PRIORITY, "tenant": WORD_TENANT, "best_effort": WORD_BEST_EFFORT}
    for _ in range(20):
        for array in (r.arrival_us, r.prompt_length, r.length, r.preemptions, r.service, r.computed, r.num_pages, r.hashed):
            array[:] = rng.integers(0, 30, 6)
        r.arrival[:], state.counts[S.ARRIVALS] = rng.permutation(6), 6
        r.entry[:], r.status[:] = rng.integers(0, 30, r.entry.shape), S.WAITING
        state.waiting[:], n = rng.permutation(6), int(rng.integers(1, 7))
        line = state.waiting[:n].tolist()
        state.counts[[S.WAITING_COUNT, S.UNRANKED_COUNT]] = 0, n
        rank_waiting(queues, views, 0, 1)
        for slot in line:
            if field in words:
                expected = r.entry[slot, words[field]]
            elif field == "generated":
                expected = max(0, r.length[slot] - r.prompt_length[slot])
            else:
                expected = getattr(r, {"tenant_service": "service"}.get(field, field))[slot]
            assert r.rank[slot] == expected
        assert state.counts[[S.WAITING_COUNT, S.UNRANKED_COUNT]].tolist() == [n, 0]
        assert state.waiting[:n].tolist() == sorted(line, key=lambda slot: (r.rank[slot], r.arrival[slot]))


@pytest.mark.parametrize("more", [0, 1])
def test_a_policy_has_all_its_rounds_for_each_request(tmp_path: Path, more: int) -> None:
    source = f"def rank(request):\n    n = 0\n    for i in range({MOST_ROUNDS + more}):\n        n = 7\n    return n\n"
    (tmp_path / "mine.py").write_text(source)
    rank_of, faults = make_rank_of(read_policy(f"{tmp_path}/mine.py:rank")), memoryview(np.array([5, 6], np.int64))
    for at in (0, 1, 0):
        assert rank_of(RequestFields(*range(11)), faults, at) == (WORST_RANK if more else 7)


def test_no_request_is_admitted_if_all_wait_for_their_readers() -> None:
    """Even if the list has no place after the last request: no code reads beyond it."""
    case = make_case(pairs=2, slots=3)
    state, views = case.state, as_memoryviews(case.state)
    state.waiting[:], state.counts[S.WAITING_COUNT], state.pairs.unclaimed_entries[:] = range(6), 6, 0
    state.requests.status[:] = S.WAITING
    assert next_to_pass(case.limits, views, 0, 0, 1)[0] == -1
    state.pairs.unclaimed_entries[1] = 1
    assert next_to_pass(case.limits, views, 0, 0, 1) == (3, False)


def test_page_shortages_and_victims_match_the_rules(rng: np.random.Generator) -> None:
    """Some requests in `running` were already preempted in this turn. Stalled requests and those in flight lack
    nothing."""
    case = make_case(pairs=3, slots=4, rows=12, pages=48, best_effort_pages=0.25, attached=False)
    limits, state, seen = case.limits, case.state, set[object]()
    r, counts, views = state.requests, state.counts, as_memoryviews(state)
    for _ in range(400):
        n, slots = int(rng.integers(limits.slots + 1)), rng.permutation(limits.slots)
        state.running[:n], counts[S.RUNNING_COUNT] = slots[:n], n
        r.status[:] = rng.choice((S.RUNNING, S.RUNNING, S.WAITING), limits.slots)
        r.stalled[:] = np.where(r.status == S.RUNNING, rng.choice((0, 0, S.STALLED, S.IN_FLIGHT), limits.slots), 0)
        r.num_pages[:] = np.where(r.status == S.RUNNING, rng.integers(1, 4, limits.slots), 0)
        r.length[:] = np.maximum(1, 4 * r.num_pages + rng.integers(-3, 2, limits.slots))
        r.entry[:, WORD_BEST_EFFORT], r.rank[:] = rng.integers(0, 2, limits.slots), rng.integers(0, 3, limits.slots)
        r.arrival[:], counts[[S.FREE_COUNT, S.CACHED_COUNT]] = rng.permutation(limits.slots), rng.integers(0, 9, 2)

        runs = [slot for slot in slots[:n].tolist() if r.status[slot] == S.RUNNING]
        lacks = {slot: int(r.length[slot] > 4 * r.num_pages[slot]) for slot in runs if r.stalled[slot] == 0}
        demand, flexible = sum(lacks.values()), [slot for slot in runs if r.entry[slot, WORD_BEST_EFFORT]]
        would = sum(int(r.num_pages[slot]) + lacks.get(slot, 0) for slot in flexible)
        crowded = demand > 0 and len(flexible) > 1 and would > 12
        assert page_demand(limits, views, 0, 1) == (demand, crowded), (lacks, flexible, would)
        able = [slot for slot in runs if r.stalled[slot] != S.IN_FLIGHT]
        key = {s: (r.stalled[s], 0 if r.stalled[s] else r.rank[s], r.arrival[s]) for s in able}
        assert preemption_victim(views, False, False, 0, 1) == max(able, key=key.__getitem__, default=-1)
        kept = min(n, limits.pages >> WATERMARK_SHIFT)
        assert spare_pages(limits, counts) == counts[S.FREE_COUNT] + counts[S.CACHED_COUNT] - kept
        seen |= {("crowded", crowded), ("stalls", len(lacks) < len(runs)), ("was preempted", len(runs) < n), ("kept", kept)}
    assert len(seen) == 13, seen
