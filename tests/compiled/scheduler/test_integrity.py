"""The checks of the scheduler's state find what is broken in it: each fault, in a state that has something of everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import Case, make_case, tokens

from blinkpy.device.array_trees import as_memoryviews
from blinkpy.device.expect import PROBLEMS
from blinkpy.kv import state as S
from blinkpy.kv.integrity import check_integrity
from blinkpy.kv.invariants.batch_invariants import check_batch
from blinkpy.kv.invariants.check_state import find_problem
from blinkpy.kv.state import State

A, SHARING, LONG, NEXT, LAST = range(5)  # slots: two that decode, a prompt in chunks, and two that wait
PAGES = 24


@pytest.fixture
def case() -> Case:
    """Pages are free, cached, held by one request and by two; and a batch with decodes and a cut prompt."""
    case = make_case(slots=6, rows=3, tokens=8, pages=PAGES, cq_entries=8)
    ended = case.submit(tokens(5, 40), 20, pair=1)
    case.turn(11)  # its reader does not read: its ring is full
    case.cancel(ended)
    case.submit(tokens(9, 30), 1)
    turns(case, 4)
    case.submit(tokens(5), 12)
    turns(case, 2)
    case.submit(tokens(4) + [9], 12)
    turns(case, 2)
    for start, length in ((20, 20), (2, 3), (3, 3)):
        case.submit(tokens(length, start), 3)
    turns(case, 1)
    assert case.statuses()[: LAST + 1] == [S.RUNNING] * 3 + [S.WAITING] * 2
    assert case.statuses(1)[0] == S.FINISHING
    assert case.batch() == [3, 8, 2]
    return case


def turns(case: Case, n: int) -> None:
    for _ in range(n):
        case.turn()
        case.read(0)


def plus(n: int) -> Callable[[State, Any], Any]:
    return lambda state, value: value + n


def cached(state: State, which: int = 0) -> int:
    """A page in line for eviction."""
    return int(np.flatnonzero(state.pages.ring_position >= 0)[which])


def shared(state: State) -> int:
    """The page that two requests hold."""
    return int(state.requests.page_table[A, 0])


def written(state: State) -> tuple[int, int]:
    """Where the page table has the page that the next token of A is written to."""
    return A, int(state.requests.computed[A]) // 4


def bucket_of_shared(state: State) -> int:
    return int(state.pages.key[shared(state)]) & (len(state.pages.bucket_head) - 1)


# What is said, and one array's element that is changed: the index, or where to find it; the value, or how to get it.
STATE_FAULTS = [
    ("requests without a rank are left over", "counts", S.UNRANKED_COUNT, 1),
    ("a request has no legal status", "requests.status", 5, 9),
    ("running lists the slots", "requests.status", 5, S.RUNNING),
    ("running lists the slots", "running", 1, A),
    ("running lists the slots", "counts", S.RUNNING_COUNT, -1),
    ("waiting lists the slots", "waiting", 0, A),
    ("finishing lists the slots", "finishing", 0, A),
    ("waiting is not sorted by (rank, arrival)", "requests.rank", NEXT, 1 << 40),
    ("a prompt is longer than its request", "requests.prompt_length", A, 99),
    ("a request is longer than the context", "requests.length", NEXT, 33),
    ("a running request has nothing to compute", "requests.computed", A, plus(50)),
    ("a request that does not run has a cache", "requests.computed", NEXT, 1),
    ("a request that does not run holds pages", "requests.num_pages", NEXT, 1),
    ("more is computed than the pages hold", "requests.num_pages", A, 0),
    ("a page table does not end with its pages", "requests.num_pages", A, plus(1)),
    ("a page table names a page that is none", "requests.page_table", (A, 0), PAGES),
    ("more pages are indexed than held", "requests.indexed", A, 8),
    ("a page is indexed that is not computed", "requests.indexed", LONG, 1),
    ("a request is paused that does not run", "requests.stalled", NEXT, 1),
    ("the number of paused requests is wrong", "requests.stalled", A, 1),
    ("a token is outside the vocabulary", "requests.tokens", (NEXT, 0), 50),
    ("a request holds a page twice", "requests.page_table", (LONG, 1), lambda s, v: s.requests.page_table[LONG, 0]),
    ("a reference count is not the number of page tables with the page", "pages.refcount", 0, plus(1)),
    ("a page is shared that is not indexed", "pages.key", shared, -1),
    ("the number of free pages is wrong", "counts", S.FREE_COUNT, -1),
    ("the free stack names a page that is none", "pages.free", 0, PAGES),
    ("a page is twice on the free stack", "pages.free", 0, lambda s, v: s.pages.free[1]),
    ("a free page is indexed", "pages.key", lambda s: s.pages.free[0], 5),
    ("a cached page is not indexed", "pages.key", cached, -1),
    ("a page is not exactly one of free, cached and held", "counts", S.FREE_COUNT, plus(-1)),
    ("a page is not exactly one of free, cached and held", "pages.free", 0, lambda s, v: s.requests.page_table[LONG, 0]),
    ("the number of cached pages is wrong", "counts", S.CACHED_COUNT, 0),
    ("the eviction ring is longer than its memory", "counts", S.RING_TAIL, 1 << 40),
    ("a cached page is outside the eviction ring", "pages.ring_position", cached, 1 << 20),
    ("a ring entry is another page's", "pages.ring_position", cached, lambda s, v: s.pages.ring_position[cached(s, 1)]),
    ("is twice in the index", "pages.bucket_next", shared, lambda s, v: shared(s)),
    ("where its key does not belong", "pages.key", shared, lambda s, v: v ^ 1),
    ("is not doubly linked", "pages.bucket_previous", shared, 7),
    ("a page with a key is not in the index, or the other way round", "pages.bucket_head", bucket_of_shared, -1),
    ("a parent is no page", "pages.parent", 0, PAGES),
    ("does not hold the tokens of page", "requests.canonical", A, PAGES),
    ("does not hold the tokens of page", "requests.canonical", A, lambda s, v: s.requests.page_table[LONG, 0]),
    ("does not hold the tokens of page", "pages.tokens", lambda s: (shared(s), 0), plus(1)),
    ("", "requests.canonical_generation", A, plus(1)),  # evicted meanwhile: the next turn sees that
    ("a submission queue overflowed", "pairs.sq_tail", 0, 1 << 20),
    ("a completion queue overflowed", "pairs.cq_tail", 0, 1 << 20),
    ("a request's owner is gone", "pairs.attached", 0, 0),
]
# These are shown to the batch's checks alone: the others would find them first.
BATCH_FAULTS = [
    ("the batch's size is wrong", "batch.counts", S.ROWS, 99),
    ("a request has two rows", "batch.row_slots", 1, A),
    ("a row's request does not run", "batch.row_slots", 0, NEXT),
    ("a row's request is paused", "requests.stalled", A, 1),
    ("a row has no tokens", "batch.query_starts", 1, 0),
    ("a decode row has several tokens", "batch.query_starts", 1, 2),
    ("the rows do not cover the batch's tokens", "batch.counts", S.TOKENS, 7),
    ("a context length is wrong", "batch.context_lengths", 0, plus(1)),
    ("a row emits and should not, or the other way", "batch.emits", 0, 0),
    ("a token has the wrong row", "batch.token_rows", 0, 1),
    ("a token has the wrong position", "batch.positions", 0, 31),
    ("a token is wrong", "batch.token_ids", 0, plus(1)),
    ("a token has no page", "requests.page_table", written, -1),
    ("a token has the wrong cache slot", "batch.cache_slots", 0, plus(1)),
    ("a step writes into a shared page", "pages.refcount", lambda s: s.requests.page_table[written(s)], 2),
]


def damage(state: State, name: str, index: Any, value: Any) -> None:
    array: Any = state
    for part in name.split("."):
        array = getattr(array, part)
    index = index(state) if callable(index) else index
    array[index] = value(state, array[index]) if callable(value) else value


@pytest.mark.parametrize(("message", "name", "index", "value"), STATE_FAULTS)
def test_faults_of_the_state_are_found(message: str, name: str, index: Any, value: Any, case: Case) -> None:
    damage(case.state, name, index, value)
    scratch = (np.zeros(PAGES, np.int64).data for _ in range(2))
    fault = find_problem(case.limits, as_memoryviews(case.state), *scratch)
    assert (PROBLEMS[fault] if fault else "") == message
    with contextlib.suppress(IndexError):  # which says it, too
        problems = check_integrity(case.limits, case.state)
        assert any(message in problem for problem in problems) if message else not problems, problems


@pytest.mark.parametrize(("message", "name", "index", "value"), BATCH_FAULTS)
def test_faults_of_the_batch_are_found(message: str, name: str, index: Any, value: Any, case: Case) -> None:
    damage(case.state, name, index, value)
    fault = check_batch(case.limits, as_memoryviews(case.state), np.zeros(PAGES, np.int64).data)
    assert PROBLEMS[fault] == message
    assert check_integrity(case.limits, case.state)


def test_a_prompt_that_waits_although_the_step_has_room_is_found(case: Case) -> None:
    limits = case.limits._replace(tokens=9, mixed_tokens=9, burst_step_tokens=9)
    fault = check_batch(limits, as_memoryviews(case.state), np.zeros(PAGES, np.int64).data)
    assert PROBLEMS[fault] == "a prompt waits although the step has room"
