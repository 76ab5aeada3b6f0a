"""Cut steps: latency-sensitive prompts interrupt a step between two groups, up to a bound, and change none of its data.

Claim decisions/suspension (simulator): A latency-sensitive prompt interrupts a cut step between two groups of
layers, for a bounded number of steps. Meanwhile the data of the suspended step stays unchanged, and its
requests end only after it.
"""

from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import Case, make_case, tokens

from blinkpy.kv import state as S
from blinkpy.kv.state_memory import snapshot
from blinkpy.queues.words import COMMAND_DRAIN, COMMAND_STOP, CONTROL_COMMAND, FINISH_LENGTH
from blinkpy.scheduler.policies import fcfs, short_prompts
from blinkpy.verify.policy_check.check_workload import Workload
from blinkpy.verify.policy_check.timed_server import ServerModel, TimedSimulation, serve

SPACE: dict[str, Any] = {
    "pairs": 1,
    "slots": 12,
    "rows": 6,
    "tokens": 24,
    "pages": 120,
    "max_model_len": 200,
    "intake_entries": 8,
}
CUT: dict[str, Any] = SPACE | {"step_groups": 4, "cut_step_tokens": 8}
NONE = ()


def step(case: Case) -> tuple[Any, ...]:
    """Make a turn: (group that runs, number of groups, tokens of each request by its number)."""
    case.turn()
    case.read(0)
    batch, arrival = case.state.batch, case.state.requests.arrival
    rows = range(batch.counts[S.ROWS])
    if not rows:
        return NONE
    shares = {int(arrival[batch.row_slots[i]]): int(batch.query_starts[i + 1] - batch.query_starts[i]) for i in rows}
    return int(batch.counts[S.GROUP]), int(batch.counts[S.GROUPS]), shares


def whole(**shares: int) -> tuple[Any, ...]:
    return 0, 1, {int(name[1:]): count for name, count in shares.items()}


def test_a_latency_sensitive_prompt_interrupts_a_step_between_two_groups() -> None:
    """The prompt's step is next; then the suspended step resumes at the same group, with the same input; its decodes wait."""
    case = make_case(fcfs, **CUT)
    case.submit(tokens(3), 30)
    assert step(case) == whole(r0=3)
    case.submit(tokens(60), 2, best_effort=1)
    assert step(case) == (0, 4, {0: 1, 1: 23})
    assert step(case) == (1, 4, {0: 1, 1: 23})
    before = {name: array for name, array in snapshot(case.state).items() if name.startswith("batch.") and "sampled" not in name}
    case.submit(tokens(10, 5), 2)
    assert step(case) == whole(r2=10)
    assert case.state.suspended.counts[[S.ROWS, S.GROUP]].tolist() == [2, 2]
    assert step(case) == (2, 4, {0: 1, 1: 23}), "a request that only decodes does not interrupt"
    after = snapshot(case.state)
    assert case.state.counts[S.INTERRUPTIONS] == case.counter("suspensions") == 1
    after["batch.counts"][S.GROUP] = 1
    assert all(np.array_equal(before[name], after[name]) for name in before if "logprobs" not in name)
    assert step(case) == (3, 4, {0: 1, 1: 23})
    assert step(case) == (0, 4, {0: 1, 2: 1, 1: 22})
    case.finish()
    assert case.counter("preemptions") == 0


def test_the_recorder_waits_for_the_last_group_with_the_tokens_of_a_step() -> None:
    case = make_case(fcfs, record_turns=8, **CUT)
    for n in range(2):
        case.submit(tokens(30, n), 2, best_effort=1)
    for group in range(4):
        assert step(case)[:2] == (group, 4)
        rows = case.state.batch.counts[S.ROWS]
        assert rows > 0 and case.state.recorder.cursor[S.COMMITS] == (rows if group == 3 else 0)
    case.finish()


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_interruptions_of_a_step_are_bounded(bound: int) -> None:
    """Latency-sensitive prompts keep arriving. A cut step ends after its step_groups turns and `bound` further turns."""
    case = make_case(short_prompts, 1, yield_steps=2, suspend_steps=bound, **CUT)
    case.submit(tokens(90), 2, best_effort=1)
    for n in range(60):
        if sum(case.state.requests.status != S.EMPTY) < 6:
            case.submit(tokens(20, n), 1)
        own, groups, _ = step(case)
        if groups == 1:
            assert case.state.counts[S.INTERRUPTIONS] <= bound
        elif own == 3:
            assert case.state.counts[S.INTERRUPTIONS] == bound
    case.finish()


def test_short_steps_and_those_without_best_effort_prompts_are_not_cut() -> None:
    case = make_case(fcfs, 1, **CUT)
    case.submit(tokens(20), 3)
    assert step(case) == whole(r0=20)
    case.submit(tokens(7, 3), 3, best_effort=1)
    assert step(case) == whole(r0=1, r1=7)
    case.submit(tokens(8, 4), 3, best_effort=1)
    assert step(case) == (0, 3, {0: 1, 1: 1, 2: 8}), "of 16 tokens with padding; the largest step has 24, and 4 groups"
    case.finish()
    off = make_case(fcfs, 1, **SPACE)
    off.submit(tokens(60), 3, best_effort=1)
    assert step(off) == whole(r0=24)
    assert len(off.state.suspended.token_ids) == 1
    off.finish()


def test_a_cancel_of_a_request_in_flight_waits_for_the_end_of_its_step() -> None:
    case = make_case(fcfs, 1, **CUT)
    flexible = case.submit(tokens(40), 2, best_effort=1)
    assert step(case)[:2] == (0, 4)
    case.cancel(flexible)
    urgent = case.submit(tokens(5, 1), 6)
    assert step(case) == whole(r1=5)
    assert case.state.requests.num_pages[case.state.suspended.row_slots[0]] == 10
    assert step(case)[:2] == (1, 4)
    case.cancel(urgent)
    assert step(case)[:2] == (2, 4), "no request ends between two groups"
    assert step(case)[:2] == (3, 4)
    assert step(case) == NONE and not case.state.requests.num_pages.any()
    case.finish()
    assert case.counter("requests_cancelled") == 2


def test_a_cancel_of_a_request_not_in_flight_takes_effect_during_a_suspended_step() -> None:
    case = make_case(fcfs, 1, **CUT)
    case.submit(tokens(40), 2, best_effort=1)
    assert step(case)[:2] == (0, 4)
    urgent = case.submit(tokens(30, 1), 6)
    assert step(case) == whole(r1=24)
    case.cancel(urgent)
    assert step(case)[:2] == (1, 4)
    assert case.counter("requests_cancelled") == 1
    case.finish()


def test_a_begun_latency_sensitive_prompt_that_has_no_part_in_the_step_interrupts_it() -> None:
    """The turn in which no request yields plans a step of both requests, whose budget the older request uses."""
    case = make_case(fcfs, 1, yield_steps=0, suspend_steps=1, **CUT)
    case.submit(tokens(60), 2, best_effort=1)
    assert step(case)[:2] == (0, 4)
    case.submit(tokens(40, 1), 2)
    assert step(case) == whole(r1=24)
    for group in (1, 2, 3):
        assert step(case) == (group, 4, {0: 24}), "the bound is reached"
    assert step(case) == (0, 4, {0: 24})
    assert step(case) == whole(r1=16), "it runs without waiting"
    case.finish()


def test_best_effort_that_is_not_in_flight_has_no_part_in_a_step_that_interrupts() -> None:
    """The request's reader was behind when the other requests' step began, but has caught up. Decodes continue."""
    case = make_case(fcfs, 1, **CUT | {"pairs": 2, "slots": 4, "cq_entries": 4})
    case.submit(tokens(1, 1), 10, 1)
    assert step(case) == whole(r0=1)
    case.submit(tokens(100), 2, 1, best_effort=1)
    assert step(case) == (0, 4, {0: 1, 1: 23})
    while case.state.counts[S.STALLED_COUNT] < 2 or case.bucket >= 0:
        step(case)
    case.submit(tokens(40, 2), 2, best_effort=1)
    assert step(case) == (0, 4, {2: 24})
    case.read(1)
    case.submit(tokens(1, 3), 2)
    assert step(case) == whole(r0=1, r3=1), "the second request lacks a part of its prompt, and could run"
    assert case.state.requests.stalled.tolist().count(S.STALLED) == 0
    case.finish()


def test_no_queue_pair_is_revoked_during_a_cut_step() -> None:
    """A silent front end loses its pair only after the step, and its requests lose nothing until then."""
    case = make_case(fcfs, 1, **CUT | {"pairs": 2})
    case.submit(tokens(40), 2, 1, best_effort=1)
    assert step(case)[:2] == (0, 4)
    case.silent.add(1)
    case.now += 2 * case.limits.lease_ns
    case.judged = False  # time jumps for the other front end, too
    for group in (1, 2, 3):
        assert step(case)[0] == group
        assert case.state.pairs.attached.tolist() == [1, 1]
    assert step(case) == NONE
    assert case.state.pairs.attached.tolist() == [1, 0]
    assert case.counter("requests_cancelled") == 1


def test_a_front_end_that_is_late_between_two_groups_has_its_entries_consumed() -> None:
    """Its lease is checked after the step, when its heartbeats have resumed: no entry announced meanwhile is lost."""
    case = make_case(fcfs, 1, **CUT | {"pairs": 2})
    case.submit(tokens(40), 2, best_effort=1)
    assert step(case)[:2] == (0, 4)
    case.silent.add(1)
    case.now += 2 * case.limits.lease_ns
    late = case.submit(tokens(5, 1), 2, 1, best_effort=1)
    assert step(case)[0] == 1
    assert case.counter("requests_accepted") == 2
    case.silent.clear()
    case.finish()
    assert late.ended == FINISH_LENGTH and case.counter("leases_expired") == 0


@pytest.mark.parametrize("command", [COMMAND_DRAIN, COMMAND_STOP])
def test_an_end_of_the_service_waits_for_a_suspended_step(command: int) -> None:
    case = make_case(fcfs, 1, **CUT)
    flexible = case.submit(tokens(20), 1, best_effort=1)
    assert step(case)[:2] == (0, 4)
    urgent = case.submit(tokens(30, 1), 1)
    assert step(case) == whole(r1=24)
    case.views.control[CONTROL_COMMAND] = command
    rest = [whole(r1=6)] if command == COMMAND_DRAIN else []
    for expected in [*rest, *((group, 4, {0: 20}) for group in (1, 2, 3))]:
        assert step(case) == expected
    while case.bucket >= 0:
        case.turn()
        case.read(0)
    assert case.bucket == (S.DRAINED if command == COMMAND_DRAIN else S.STOPPED)
    assert flexible.ended
    assert bool(urgent.ended) == (command == COMMAND_DRAIN)


def test_a_request_that_may_no_longer_overtake_does_not_interrupt() -> None:
    """A best-effort request waits behind a long prompt, after the maximum number of overtakes: other requests wait for it,
    too."""
    case = make_case(fcfs, 1, yield_steps=1, **CUT)
    case.submit(tokens(90), 1, best_effort=1)
    assert step(case) == (0, 4, {0: 24})
    case.submit(tokens(9, 1), 1, best_effort=1)
    case.submit(tokens(10, 2), 1)
    assert step(case) == whole(r2=10)
    assert case.state.counts[S.PASSED] == 1
    assert [step(case)[:2] for _ in range(3)] == [(1, 4), (2, 4), (3, 4)]
    assert step(case) == (0, 4, {0: 24})
    assert (case.state.counts[S.PASSED], case.state.counts[S.INTERRUPTIONS]) == (1, 0)
    case.submit(tokens(11, 3), 1)
    assert [step(case)[:2] for _ in range(3)] == [(1, 4), (2, 4), (3, 4)]
    assert case.counter("suspensions") == 1
    case.finish()


def test_a_request_in_the_first_slot_interrupts_like_any_other() -> None:
    case = make_case(fcfs, 1, **CUT)
    case.submit(tokens(3), 1)
    case.submit(tokens(60, 1), 1, best_effort=1)
    while case.clients[0].in_flight == 2:
        step(case)
    while step(case)[:2] != (0, 4):
        pass
    urgent = case.submit(tokens(5, 2), 1)
    assert step(case) == whole(r2=5)
    batch = case.state.batch
    assert batch.row_slots[0] == 0 and case.state.requests.arrival[0] == 2
    case.finish()
    assert urgent.finish == FINISH_LENGTH


def test_a_latency_sensitive_request_that_finds_no_pages_suspends_nothing() -> None:
    case = make_case(fcfs, 1, **CUT | {"pages": 14, "prefix_caching": False})
    case.submit(tokens(48), 2, best_effort=1)
    assert step(case)[:2] == (0, 4)
    case.submit(tokens(9, 1), 2)
    assert [step(case)[0] for _ in range(3)] == [1, 2, 3]
    case.finish()


@pytest.mark.parametrize("groups", [1, 8])
def test_the_wait_of_a_latency_sensitive_prompt_in_simulated_time(groups: int) -> None:
    """It arrives in the middle of a step of 8,192 best-effort tokens, 223 ms, and waits for the end of the step or of a group."""
    model = ServerModel(
        8,
        8192,
        page_size=16,
        num_pages=4096,
        step_us=2000.0,
        row_us=22.0,
        token_us=27.0,
        step_groups=groups,
        cut_step_tokens=512,
        suspend_steps=4,
    )
    prompts = np.array([8192, 8192, 200])
    ones = np.ones(3, np.int64)
    work = Workload(np.array([0, 0, 50_000_000]), prompts, ones, ones, np.zeros(3, np.int64))
    server = TimedSimulation(short_prompts, model, work, {"best_effort": np.array([1, 1, 0])})
    outcome = serve(server)
    waited = outcome.waiting_s[2]
    assert waited <= 0.224 / groups
    assert (waited > 0.1) == (groups == 1)
    assert outcome.end_to_end_s[0] < 0.224 + 0.01
    assert outcome.steps == 3


def test_one_token_prompts_interrupt_in_the_smallest_bucket_if_a_row_is_free() -> None:
    for flexible in (1, 2):
        case = make_case(fcfs, 1, **CUT | {"rows": 2})
        for n in range(flexible):
            case.submit(tokens(20, n), 2, best_effort=1)
        assert step(case)[:2] == (0, 4)
        case.submit(tokens(1, 3), 1)
        assert step(case) == (whole(r1=1) if flexible == 1 else (1, 4, {0: 20, 1: 4}))
        assert (case.bucket == 0) == (flexible == 1)
        case.finish()


def test_no_queue_pair_is_revoked_during_a_suspended_step() -> None:
    """Not even after an interrupting step, in which requests may end."""
    case = make_case(fcfs, 1, **CUT | {"pairs": 2})
    case.submit(tokens(40), 2, best_effort=1)
    assert step(case)[:2] == (0, 4)
    case.submit(tokens(30, 1), 2, 1)
    assert step(case) == whole(r1=24)
    case.silent.add(1)
    case.now += 2 * case.limits.lease_ns
    case.judged = False  # time jumps for the other front end, too
    assert step(case) == whole(r1=6)
    assert case.state.pairs.attached.tolist() == [1, 1] and case.counter("requests_cancelled") == 0
