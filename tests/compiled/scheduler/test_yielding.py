"""Classes in the scheduler: best-effort prompts yield to latency-sensitive prompts for a bounded time; a single class has no
effect.

Claim decisions/classes (simulator): A latency-sensitive prompt uses the next step. Best-effort prompts keep
their pages, wait for a bounded number of turns, and are overtaken a bounded number of times. Limits of best
effort hold, and limit no other class.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import Case, case_sizes, make_case, tokens

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.queues.submission import WORD_BEST_EFFORT
from blinkpy.scheduler.policies import BEST_EFFORT_US, SHIPPED, RequestFields, fcfs, load_policy, priority, short_prompts
from blinkpy.verify.sim.simulation import Simulation
from blinkpy.verify.sim.world import make_world

SPACE = {"pairs": 1, "slots": 12, "rows": 6, "tokens": 8, "pages": 120, "max_model_len": 200, "intake_entries": 8}
LIMITS = {"best_effort_pages": 0.4}  # limits of a storm, in addition to the smallest share of a step


def step(case: Case) -> dict[int, int]:
    """Make a turn; returns the tokens of each request in its step, by its number in order of arrival."""
    case.turn()
    case.read(0)
    batch, arrival = case.state.batch, case.state.requests.arrival
    rows = range(batch.counts[S.ROWS])
    return {int(arrival[batch.row_slots[i]]): int(batch.query_starts[i + 1] - batch.query_starts[i]) for i in rows}


def test_a_latency_sensitive_prompt_takes_the_next_step_and_best_effort_ones_keep_their_pages() -> None:
    case = make_case(fcfs, **SPACE)
    case.submit(tokens(3), 30)
    assert step(case) == {0: 3}
    case.submit(tokens(60), 2, best_effort=1)
    assert [step(case) for _ in range(2)] == [{0: 1, 1: 7}] * 2
    slot = int(np.flatnonzero(case.state.requests.arrival == 1)[0])
    pages = case.state.requests.page_table[slot].copy()
    case.submit(tokens(10, 5), 2)
    case.submit(tokens(20, 3), 2, best_effort=1)
    assert [step(case) for _ in range(2)] == [{0: 1, 2: 7}, {0: 1, 2: 3}], "it has the steps alone, except for decodes"
    assert (case.state.requests.page_table[slot] == pages).all()
    assert case.state.requests.computed[slot] == 14
    assert step(case) == {0: 1, 2: 1, 1: 6}
    case.finish()
    assert case.counter("preemptions") == 0


def test_the_ring_entry_of_a_preempted_request_is_free_in_the_next_turn() -> None:
    """The ring has as many free entries as rows, and all rows run, so no entry is left, even after a preemption. The oracle
    agrees."""
    case = make_case(lanes=1, pairs=1, cq_entries=4, rows=2, pages=3, max_model_len=8, prefix_caching=False)
    for n in range(3):
        case.submit(tokens(4, n), 4, best_effort=int(n == 2))
    case.turn()
    assert case.state.counts[[S.RUNNING_COUNT, S.WAITING_COUNT, S.YIELDED_TURNS]].tolist() == [2, 1, 1]
    case.turn()
    assert case.counter("preemptions") == 1 and case.state.pairs.unclaimed_entries[0] == 0
    assert case.state.counts[[S.RUNNING_COUNT, S.WAITING_COUNT, S.YIELDED_TURNS]].tolist() == [1, 2, 0]
    case.finish()


def test_a_short_prompt_overtakes_a_begun_long_one_while_best_effort_waits() -> None:
    """Each step has sensitive_step_tokens for these prompts in addition to decodes; the best rank gets the first of them.

    Chunks of a long prompt after the first get half of it: 4 tokens.
    """
    case = make_case(short_prompts, sensitive_step_tokens=8, **SPACE | {"tokens": 24})
    case.submit(tokens(3), 30, best_effort=1)
    assert step(case) == {0: 3}
    case.submit(tokens(150, 1), 2)
    assert step(case) == {0: 1, 1: 8}
    case.submit(tokens(3, 2), 2)
    assert step(case) == {0: 1, 2: 3, 1: 1}
    case.submit(tokens(5, 3), 2)
    assert step(case) == {0: 1, 2: 1, 3: 5}
    case.submit(tokens(20, 4), 2)
    assert step(case) == {0: 1, 3: 1, 4: 8}, "the long one waits for the budget"
    case.submit(tokens(4, 5), 2)
    case.submit(tokens(4, 6), 2)
    assert step(case) == {0: 1, 5: 4, 6: 4}, "a request that ends gets the whole budget"
    case.finish()


def test_best_effort_that_waits_is_passed_by_the_others_and_by_none_of_its_class() -> None:
    """For any rank: here, first come, first served."""
    case = make_case(fcfs, **SPACE | {"tokens": 64})
    for n, best_effort in enumerate((0, 1, 0, 1, 0)):
        case.submit(tokens(4, n), 3, best_effort=best_effort)
    assert [step(case) for _ in range(2)] == [{0: 4, 2: 4, 4: 4}, {0: 1, 2: 1, 4: 1, 1: 4, 3: 4}]
    case.finish()


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_best_effort_that_waits_is_passed_by_as_many_as_yield_steps(bound: int) -> None:
    """Then no request enters before it, despite free slots, until best-effort prompts stop yielding."""
    case = make_case(fcfs, 1, yield_steps=bound, **SPACE | {"tokens": 64, "rows": 8})
    case.submit(tokens(4), 30)
    assert step(case) == {0: 4}
    waits = case.submit(tokens(4, 1), 3, best_effort=1)
    for n in range(2, 7):
        case.submit(tokens(4, n), 30)
    passing = list(range(2, 2 + bound))
    expected: list[dict[int, int]] = [{0: 1} | dict.fromkeys(passing, 4)] if bound else []
    expected += [{0: 1} | dict.fromkeys(passing, 1) | {1: 4} | dict.fromkeys(range(2 + bound, 7), 4)]
    assert [step(case) for _ in expected] == expected
    assert case.state.counts[S.PASSED] == 0
    case.finish()
    assert waits.ended


def test_best_effort_that_waits_for_its_class_blocks_no_other_request() -> None:
    """It has its pages, so it waits only for its own class."""
    case = make_case(fcfs, 1, yield_steps=1, best_effort_pages=0.06, **SPACE | {"tokens": 64})
    case.submit(tokens(20), 9, best_effort=1)
    assert step(case) == {0: 20}
    for n, best_effort in ((1, 1), (2, 0), (3, 0)):
        case.submit(tokens(20, n), 9, best_effort=best_effort)
    assert step(case) == {0: 1, 2: 20} and case.state.counts[S.PASSED] == 1
    assert step(case) == {0: 1, 2: 1, 3: 20} and case.state.counts[S.PASSED] == 0
    case.submit(tokens(20, 4), 9)
    assert step(case) == {0: 1, 2: 1, 3: 1, 4: 20} and case.state.counts[S.YIELDED_TURNS] == 1
    case.finish()


def test_a_flood_of_latency_sensitive_requests_lets_best_effort_enter(rng: np.random.Generator) -> None:
    """A best-effort request waits at all times, with the best rank; at most yield_steps other requests enter before it. Rows are
    few."""
    bound, longest = int(rng.integers(1, 5)), int(rng.integers(4, 30))
    case = make_case(priority, 1, yield_steps=bound, **SPACE | {"rows": int(rng.integers(2, 6))})
    kinds, entered, passed = list[int](), set[int](), [0]
    while len(passed) < 8:
        waiting = case.state.requests.entry[case.state.requests.status == S.WAITING, WORD_BEST_EFFORT].tolist()
        for kind in (1 - waiting.count(1)) * [1] + (4 - waiting.count(0)) * [0]:
            case.submit(tokens(int(rng.integers(1, longest)), len(kinds)), 3, best_effort=kind, priority=-kind)
            kinds.append(kind)
        step(case)
        running = case.state.requests.arrival[case.state.running[: case.state.counts[S.RUNNING_COUNT]]].tolist()
        fresh = set(running) - entered
        entered |= fresh
        if any(kinds[number] for number in fresh):
            passed.append(0)  # a later request overtakes no request
        else:
            passed[-1] += len(fresh)
        assert len(kinds) < 400
    assert max(passed) == bound, passed
    case.finish()


def test_without_best_effort_the_order_and_the_size_of_steps_are_the_usual_ones() -> None:
    case = make_case(short_prompts, 1, sensitive_step_tokens=8, **SPACE | {"tokens": 24})
    case.submit(tokens(3), 30)
    assert step(case) == {0: 3}
    case.submit(tokens(40, 1), 2)
    assert step(case) == {0: 1, 1: case.limits.tokens - 1}
    assert case.state.counts[S.YIELDED_TURNS] == 0
    case.finish()


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_best_effort_prompts_wait_at_most_yield_steps_turns_in_a_row(bound: int) -> None:
    """Latency-sensitive prompts keep arriving. Best-effort prompts have a part in one of bound + 1 steps, and both end."""
    case = make_case(short_prompts, 1, yield_steps=bound, **SPACE)
    case.submit(tokens(40), 2, best_effort=1)
    case.submit(tokens(30, 1), 2, best_effort=1)
    step(case)
    parts = list[int]()
    for _ in range(24):
        if sum(case.state.requests.status != S.EMPTY) < 6:
            case.submit(tokens(20, len(parts)), 1)
        parts.append(sum(count for request, count in step(case).items() if request in (0, 1)))
    while parts and not parts[-1]:
        parts.pop()
    waits = "".join("x" if count else "." for count in parts).split("x")
    assert max(map(len, waits)) == bound, parts
    case.finish()


def test_a_stream_of_one_token_requests_starves_no_request() -> None:
    """Running requests are no longer prompts, and still no other request is admitted."""
    case, turns = make_case(short_prompts, 1, yield_steps=2, **SPACE), 0
    waits = case.submit(tokens(1), 1, best_effort=1)
    while not waits.ended:
        case.submit(tokens(1, turns), 1)
        case.turn()
        case.read(0)
        turns += 1
        assert turns <= 4, "two turns of yielding, a turn that admits it, and a turn that commits its token"
    assert turns == 4
    case.finish()


def test_a_step_of_best_effort_prompts_is_short_and_a_latency_sensitive_one_has_its_own_size(rng: np.random.Generator) -> None:
    """Best effort always has more to compute than a step holds. Latency-sensitive requests wait for a short step."""
    rows = int(rng.integers(3, 7))
    share = int(rng.integers(2 * rows, 3 * rows))
    sizes = {"pairs": 1, "slots": 12, "rows": rows, "pages": 200, "max_model_len": 200, "intake_entries": 8}
    case = make_case(short_prompts, 1, tokens=64, best_effort_step_tokens=share, prefix_caching=False, **sizes)
    decoding = int(rng.integers(0, 2))
    for n in range(decoding):
        case.submit(tokens(1, n), 60, best_effort=int(rng.integers(2)))
    case.turn()
    for n in range(2):
        case.submit(tokens(int(rng.integers(4 * share, 180)), n), 2, best_effort=1)
    assert [sum(step(case).values()) for _ in range(3)] == [share] * 3
    urgent = case.submit(tokens(int(rng.integers(share, 64 - rows)), 7), 2)
    number = decoding + 2
    assert step(case) == dict.fromkeys(range(decoding), 1) | {number: len(urgent.prompt)}
    after = step(case)
    assert after[number] == 1 and sum(after.values()) == share
    case.finish()


def test_in_a_step_of_both_classes_best_effort_has_its_share_and_the_others_the_rest() -> None:
    """In one of yield_steps + 1 turns, which best effort needs to progress. Shares, in order of arrival."""
    case = make_case(fcfs, 1, yield_steps=0, best_effort_step_tokens=12, **SPACE | {"tokens": 40})
    case.submit(tokens(2), 40)
    assert step(case) == {0: 2}
    case.submit(tokens(30, 1), 2, best_effort=1)
    case.submit(tokens(50, 2), 2)
    assert step(case) == {0: 1, 1: 11, 2: 28}
    case.submit(tokens(30, 3), 2, best_effort=1)
    assert step(case) == {0: 1, 1: 11, 2: 22}, "no further best-effort request enters"
    assert step(case) == {0: 1, 2: 1, 1: 8, 3: 2}, "two rows decode, so 10 tokens are left"
    case.finish()


def test_a_long_best_effort_prompt_leaves_the_rest_of_the_step_to_others() -> None:
    """Both are admitted in one turn. The first lacks more than a whole step, but takes only its share."""
    case = make_case(fcfs, 1, best_effort_step_tokens=12, yield_steps=0, **SPACE | {"tokens": 24})
    case.submit(tokens(40), 2, best_effort=1)
    case.submit(tokens(6, 2), 2)
    assert step(case) == {0: 12, 1: 6}
    case.finish()


def test_best_effort_prompts_share_what_best_effort_has_of_the_step() -> None:
    """Later requests get the pages that the first requests leave, for any number of requests considered together."""
    case = make_case(fcfs, best_effort_step_tokens=12, yield_steps=0, **SPACE | {"tokens": 40})
    for n, length in enumerate((4, 5, 30)):
        case.submit(tokens(length, n), 2, best_effort=1)
    assert [step(case) for _ in range(2)] == [{0: 4, 1: 5, 2: 3}, {0: 1, 1: 1, 2: 10}]
    case.finish()


def test_best_effort_with_a_full_share_blocks_no_other_request() -> None:
    case = make_case(fcfs, 1, best_effort_step_tokens=12, **SPACE | {"tokens": 40})
    for n in range(3):
        case.submit(tokens(30, n), 2, best_effort=1)
    assert step(case) == {0: 12}
    case.submit(tokens(20, 3), 2)
    assert step(case)[3] == 20, "the last two best-effort requests wait before it"
    assert case.state.counts[S.WAITING_COUNT] == 2
    case.finish()


def test_a_share_of_the_step_that_holds_too_little_or_too_much_is_refused() -> None:
    for share, what in ((11, "at least twice max_num_seqs"), (41, "at most max_num_batched_tokens")):
        with pytest.raises(ConfigError, match=what):
            make_case(fcfs, 1, best_effort_step_tokens=share, **SPACE | {"tokens": 40})


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_latency_sensitive_request_finds_pages_without_preemption(share: float, rng: np.random.Generator) -> None:
    """Best effort would fill the pool of 40 pages. Its requests hold 3 or 4 pages each, from their start."""
    sizes = {"pairs": 1, "slots": 20, "rows": 16, "tokens": 64, "pages": 40, "max_model_len": 64, "intake_entries": 16}
    case = make_case(short_prompts, 1, best_effort_pages=share, prefix_caching=False, **sizes)
    lengths = rng.choice((9, 13), 14).tolist()
    for n, length in enumerate(lengths):
        case.submit(tokens(length, n), 3, best_effort=1)
    held = [held_by_best_effort(case) for _ in range(5) if step(case)]
    urgent = case.submit(tokens(50, 9), 2)
    part = step(case)
    assert (max(held) > 20) == (share == 1.0)
    if share < 1.0:
        assert part[len(lengths)] == len(urgent.prompt) and case.counter("preemptions") == 0
    case.finish()


def test_best_effort_that_outgrows_its_pages_preempts_its_own_and_one_alone_may_have_more() -> None:
    sizes = {"pairs": 1, "slots": 8, "rows": 4, "tokens": 40, "pages": 100, "max_model_len": 120, "intake_entries": 8}
    case = make_case(SHIPPED["priority"], 1, best_effort_pages=0.1, prefix_caching=False, **sizes)
    flexible = [case.submit(tokens(8 - 2 * n, n), 60, best_effort=1) for n in range(2)]  # they lack pages in different turns
    urgent = case.submit(tokens(21), 60)  # of the same rank, and the latest
    most = 0
    while not flexible[1].ended:
        case.turn()
        case.read(0)
        most = max(most, held_by_best_effort(case))
    assert case.counter("preemptions") > 0 and most == 17, "68 tokens are 17 pages"
    assert urgent.ended and (case.state.requests.preemptions[case.state.requests.entry[:, WORD_BEST_EFFORT] == 0] == 0).all()
    case.finish()


@pytest.mark.parametrize(("pages", "enters"), [(22, True), (23, False)])
def test_best_effort_keeps_a_page_for_each_of_it_that_runs_however_many_others_do(pages: int, enters: bool) -> None:
    """Best effort may have 40 pages; its running request has 17."""
    sizes = {"pairs": 1, "slots": 12, "rows": 12, "tokens": 400, "pages": 160, "max_model_len": 120, "intake_entries": 16}
    case = make_case(fcfs, 1, best_effort_pages=0.25, prefix_caching=False, **sizes)
    for n in range(6):
        case.submit(tokens(4, n), 9)
    case.submit(tokens(66, 6), 9, best_effort=1)
    for _ in range(2):  # behind the others
        case.turn()
        case.read(0)
    assert held_by_best_effort(case) == 17
    case.submit(tokens(4 * pages, 7), 9, best_effort=1)
    case.turn()
    assert (held_by_best_effort(case) == 17 + pages) == enters
    case.finish()


def test_pages_that_others_lack_are_none_of_best_effort() -> None:
    """The pool is too small. Best effort has less than its share, and the latest request gives way, as without classes."""
    sizes = {"pairs": 1, "slots": 8, "rows": 5, "tokens": 40, "pages": 10, "max_model_len": 32, "intake_entries": 8}
    case = make_case(fcfs, 1, best_effort_pages=0.6, prefix_caching=False, **sizes)
    for n in range(4):  # all lack a third page at the same time
        case.submit(tokens(7, n), 5, best_effort=int(n < 2))
    while case.counter("preemptions") == 0:
        case.turn()
        case.read(0)
    requests = case.state.requests
    assert requests.preemptions[:4].tolist() == [0, 0, 0, 1] and held_by_best_effort(case) == 6
    case.finish()


def test_others_keep_the_fast_path_when_best_effort_has_its_pages() -> None:
    sizes = {"pairs": 1, "slots": 8, "rows": 4, "tokens": 40, "pages": 100, "max_model_len": 40, "intake_entries": 8}
    case = make_case(fcfs, 1, best_effort_pages=0.06, yield_steps=0, prefix_caching=False, **sizes)
    for n in range(2):
        case.submit(tokens(9, n), 4, best_effort=1)
    case.submit(tokens(7, 2), 9)
    for pages, fast in ((2, 0), (2, 0), (3, 1), (3, 1)):
        case.turn()
        case.read(0)
        assert held_by_best_effort(case) == case.limits.best_effort_pages == 6
        assert (case.state.requests.num_pages[2], case.state.counts[S.FAST_PATH]) == (pages, fast)
    case.finish()


def test_best_effort_without_pages_preempts_no_request_with_a_live_reader() -> None:
    """Neither in its class nor in the other, although a latency-sensitive request stalls."""
    sizes = {"slots": 8, "rows": 5, "tokens": 40, "pages": 100, "max_model_len": 120, "intake_entries": 8, "cq_entries": 4}
    case = make_case(fcfs, 2, best_effort_pages=0.1, prefix_caching=False, pairs=3, **sizes)
    case.submit(tokens(9), 30, pair=1)
    for n in range(2):
        case.submit(tokens(12, n), 12, best_effort=1)
    for turn in range(8):
        if turn == 6:
            assert case.state.counts[S.STALLED_COUNT] == 1
            case.submit(tokens(20), 2, best_effort=1, pair=2)
        case.turn()
        case.read(0)
    assert case.state.counts[S.RUNNING_COUNT] == 3 and case.state.counts[S.WAITING_COUNT] == 1
    assert case.counter("preemptions") == 0
    for pair in 1, 2:
        case.read(pair)
    case.finish()


def test_where_best_effort_may_have_all_pages_none_is_counted_twice() -> None:
    """Six requests share the pages of their prompt: together they hold more than the pool has, and no request waits
    for it."""
    sizes = {"pairs": 1, "slots": 8, "rows": 6, "tokens": 40, "pages": 28, "max_model_len": 40, "intake_entries": 8}
    case = make_case(fcfs, 1, **sizes)
    flexible = [case.submit(tokens(25), 12, best_effort=1)]
    case.turn(2)
    flexible += [case.submit(tokens(25), 10, best_effort=1) for _ in range(5)]
    case.turn(2)
    assert case.state.counts[S.RUNNING_COUNT] == 6 and held_by_best_effort(case) > 28
    case.finish()
    assert case.counter("preemptions") == 0 and all(request.ended for request in flexible)


def held_by_best_effort(case: Case) -> int:
    requests = case.state.requests
    return int(requests.num_pages[requests.entry[:, WORD_BEST_EFFORT] != 0].sum())


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01])
def test_a_share_of_the_pages_is_above_0_and_at_most_1(share: float) -> None:
    with pytest.raises(ConfigError, match="best_effort_pages must be"):
        make_case(fcfs, 1, best_effort_pages=share)


WORLDS = 80  # at most, if classes make a difference: with `priority`, in three worlds of ten


def one_class(
    seed: int, policy: str, kind: int | None, yield_steps: int, rounds: int = 120, **limits: float
) -> tuple[list[Any], int]:
    """The scheduler's decisions in a storm, turn by turn, with all requests of one class (None: unchanged), and the
    number of turns with yielding. limits: limits of best effort."""
    draw = random.Random(seed)
    rows, tight = draw.randint(2, 5), draw.choice((12, 20, 60))
    sizes = case_sizes(pairs=2, slots=5, rows=rows, tokens=2 * rows + draw.randint(1, 8), pages=tight, yield_steps=yield_steps)
    sizes[2].update(limits, best_effort_step_tokens=2 * rows) if limits else None
    world = make_world(seed, rounds, chosen=sizes)
    if kind is not None:
        world.sim.good[:, WORD_BEST_EFFORT] = kind
    storm, decisions, yielded = Simulation(seed, rounds, SHIPPED[policy], world=world, mode="python"), [], 0
    state = world.state
    for _ in range(rounds):
        assert storm.advance()
        rows_used = int(state.batch.counts[S.ROWS])
        batch = state.batch.row_slots[:rows_used].tolist(), state.batch.query_starts[: rows_used + 1].tolist()
        decisions.append((batch, state.requests.status.tolist(), state.pages.refcount.tolist(), storm.counters()))
        yielded += int(state.counts[S.YIELDED_TURNS] > 0)
    assert storm.calm().failure is None
    return decisions, yielded


@pytest.mark.parametrize("policy", sorted(SHIPPED))
def test_one_class_alone_is_served_as_without_classes(policy: str, seed: int) -> None:
    differ = yielded = 0
    for number in range(WORLDS):
        if number >= 8 and differ and yielded:
            break
        without, turns = one_class(seed + number, policy, 0, 0)
        assert turns == 0
        assert one_class(seed + number, policy, 0, 4)[0] == without
        assert one_class(seed + number, policy, 1, 4) == (without, 0)
        mixed, turns = one_class(seed + number, policy, None, 4)
        differ, yielded = differ + (mixed != without), yielded + turns
    assert differ > 0
    assert yielded > 0


@pytest.mark.parametrize("policy", sorted(SHIPPED))
def test_best_effort_limits_apply_only_to_best_effort(policy: str, seed: int) -> None:
    differ = 0
    for number in range(WORLDS):
        if number >= 4 and differ:
            break
        assert one_class(seed + number, policy, 0, 4, **LIMITS) == one_class(seed + number, policy, 0, 4)
        differ += one_class(seed + number, policy, 1, 4, **LIMITS) != one_class(seed + number, policy, 1, 4)
    assert differ > 0


def test_a_policy_sees_the_class(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "mine.py").write_text("def rank(request):\n    return 7 if request.best_effort else 3\n")
    case = make_case(load_policy(f"{tmp_path}/mine.py:rank"), pairs=1, rows=1, slots=6, intake_entries=6)
    classes = rng.permutation([0, 0, 0, 1, 1, 1]).tolist()
    requests = [case.submit(tokens(n), 2, best_effort=kind) for n, kind in enumerate(classes, 3)]
    case.finish()
    assert [classes[requests.index(request)] for request in case.done] == [0, 0, 0, 1, 1, 1]


def test_the_default_policy_prefers_latency_sensitive_requests_within_a_bound() -> None:
    def rank(at_us: int, best_effort: int) -> int:
        return short_prompts(RequestFields(0, at_us, 100, 10, 0, 0, 0, 0, 0, best_effort, 0))

    assert rank(BEST_EFFORT_US - 1, 0) < rank(0, 1) < rank(BEST_EFFORT_US + 1, 0)


def test_a_smaller_request_does_not_overtake_best_effort_without_pages() -> None:
    case = make_case(fcfs, 1, best_effort_pages=0.25, **SPACE | {"tokens": 40, "pages": 40, "max_model_len": 40})
    for length in (24, 22, 3):
        case.submit(tokens(length, length), 3, best_effort=1)
    assert step(case) == {0: 24}
    case.finish()


def test_the_last_best_effort_token_of_a_step_is_always_used() -> None:
    """The begun request lacks 7 of its 8 tokens; the next one gets the last."""
    case = make_case(fcfs, 1, best_effort_step_tokens=8, yield_steps=0, **SPACE | {"tokens": 24, "rows": 4})
    case.submit(tokens(15), 2, best_effort=1)
    assert step(case) == {0: 8}
    case.submit(tokens(5, 1), 2)
    case.submit(tokens(5, 2), 2, best_effort=1)
    assert step(case) == {0: 7, 1: 5, 2: 1}
    case.finish()


def test_the_first_request_may_use_the_whole_budget() -> None:
    case = make_case(fcfs, 1, sensitive_step_tokens=8, **SPACE | {"tokens": 24})
    case.submit(tokens(3), 30, best_effort=1)
    assert step(case) == {0: 3}
    case.submit(tokens(16, 1), 2)
    assert step(case) == {0: 1, 1: 8}
    case.submit(tokens(5, 2), 2)
    assert step(case) == {0: 1, 1: 8}
    assert case.state.counts[S.RUNNING_COUNT] == 2
    case.finish()
