"""The checks of the scheduler's state find what is broken in it: each fault, in a state that has something of everything."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import Case, make_case, tokens

from blinkpy.device.array_trees import as_memoryviews
from blinkpy.device.expect import FAULT_TEXTS
from blinkpy.kv import state as S
from blinkpy.kv.invariants import batch_invariants, page_invariants, request_invariants
from blinkpy.kv.invariants.batch_invariants import check_batch
from blinkpy.kv.invariants.check_state import check_state, state_faults
from blinkpy.kv.state import State

A, SHARING, LONG, NEXT, LAST = range(5)  # slots: two that decode, a prompt in chunks, and two that wait
PAGES = 24
CODES = {
    code: name
    for module in (batch_invariants, page_invariants, request_invariants)
    for name, code in vars(module).items()
    if name.isupper() and code in FAULT_TEXTS
}


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
    assert case.state.requests.status[: LAST + 1].tolist() == [S.RUNNING] * 3 + [S.WAITING] * 2
    assert case.state.requests.status[6] == S.FINISHING
    assert case.state.batch.counts[[S.ROWS, S.TOKENS, S.DECODE_ROWS]].tolist() == [3, 8, 2]
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


# The fault, and one array's element that is changed: the index, or where to find it; the value, or how to get it.
STATE_FAULTS = [
    ("UNRANKED", "counts", S.UNRANKED_COUNT, 1),
    ("NO_STATUS", "requests.status", 5, 9),
    ("RUNNING_LIST", "requests.status", 5, S.RUNNING),
    ("RUNNING_LIST", "running", 1, A),
    ("RUNNING_LIST", "counts", S.RUNNING_COUNT, -1),
    ("WAITING_LIST", "waiting", 0, A),
    ("FINISHING_LIST", "finishing", 0, A),
    ("UNSORTED", "requests.rank", NEXT, 1 << 40),
    ("PROMPT_LONGER", "requests.prompt_length", A, 99),
    ("CONTEXT_EXCEEDED", "requests.length", NEXT, 33),
    ("NOTHING_TO_COMPUTE", "requests.computed", A, plus(50)),
    ("IDLE_CACHE", "requests.computed", NEXT, 1),
    ("IDLE_PAGES", "requests.num_pages", NEXT, 1),
    ("MORE_COMPUTED", "requests.num_pages", A, 0),
    ("TABLE_END", "requests.num_pages", A, plus(1)),
    ("TABLE_RANGE", "requests.page_table", (A, 0), PAGES),
    ("INDEXED_HELD", "requests.indexed", A, 8),
    ("INDEXED_COMPUTED", "requests.indexed", LONG, 1),
    ("IDLE_STALLED", "requests.stalled", NEXT, 1),
    ("STALLED_WRONG", "requests.stalled", A, 1),
    ("VOCABULARY", "requests.tokens", (NEXT, 0), 50),
    ("HELD_TWICE", "requests.page_table", (LONG, 1), lambda s, v: s.requests.page_table[LONG, 0]),
    ("REFERENCES", "pages.refcount", 0, plus(1)),
    ("SHARED_UNINDEXED", "pages.key", shared, -1),
    ("FREE_WRONG", "counts", S.FREE_COUNT, -1),
    ("FREE_RANGE", "pages.free", 0, PAGES),
    ("FREE_TWICE", "pages.free", 0, lambda s, v: s.pages.free[1]),
    ("FREE_INDEXED", "pages.key", lambda s: s.pages.free[0], 5),
    ("CACHED_UNINDEXED", "pages.key", cached, -1),
    ("ONE_OF", "counts", S.FREE_COUNT, plus(-1)),
    ("ONE_OF", "pages.free", 0, lambda s, v: s.requests.page_table[LONG, 0]),
    ("CACHED_WRONG", "counts", S.CACHED_COUNT, 0),
    ("RING_LONG", "counts", S.RING_TAIL, 1 << 40),
    ("RING_OUTSIDE", "pages.ring_position", cached, 1 << 20),
    ("RING_ENTRY", "pages.ring_position", cached, lambda s, v: s.pages.ring_position[cached(s, 1)]),
    ("CHAIN_TWICE", "pages.bucket_next", shared, lambda s, v: shared(s)),
    ("CHAIN_BUCKET", "pages.key", shared, lambda s, v: v ^ 1),
    ("CHAIN_LINKS", "pages.bucket_previous", shared, 7),
    ("KEY_UNINDEXED", "pages.bucket_head", bucket_of_shared, -1),
    ("PARENT_RANGE", "pages.parent", 0, PAGES),
    ("CANONICAL", "requests.canonical", A, PAGES),
    ("CANONICAL", "requests.canonical", A, lambda s, v: s.requests.page_table[LONG, 0]),
    ("CANONICAL", "pages.tokens", lambda s: (shared(s), 0), plus(1)),
    ("", "requests.canonical_generation", A, plus(1)),  # evicted meanwhile: the next turn sees that
    ("SUBMISSIONS", "pairs.sq_tail", 0, 1 << 20),
    ("COMPLETIONS", "pairs.cq_tail", 0, 1 << 20),
    ("OWNERLESS", "pairs.attached", 0, 0),
]
# These are shown to the batch's checks alone: the others would find them first.
BATCH_FAULTS = [
    ("BATCH_SIZE", "batch.counts", S.ROWS, 99),
    ("TWO_ROWS", "batch.row_slots", 1, A),
    ("ROW_IDLE", "batch.row_slots", 0, NEXT),
    ("ROW_STALLED", "requests.stalled", A, 1),
    ("ROW_EMPTY", "batch.query_starts", 1, 0),
    ("DECODE_LONG", "batch.query_starts", 1, 2),
    ("UNCOVERED", "batch.counts", S.TOKENS, 7),
    ("CONTEXT_WRONG", "batch.context_lengths", 0, plus(1)),
    ("EMITS_WRONG", "batch.emits", 0, 0),
    ("TOKEN_ROW", "batch.token_rows", 0, 1),
    ("TOKEN_POSITION", "batch.positions", 0, 31),
    ("TOKEN_WRONG", "batch.token_ids", 0, plus(1)),
    ("TOKEN_PAGELESS", "requests.page_table", written, -1),
    ("CACHE_SLOT", "batch.cache_slots", 0, plus(1)),
    ("SHARED_WRITE", "pages.refcount", lambda s: s.requests.page_table[written(s)], 2),
]


def damage(state: State, name: str, index: Any, value: Any) -> None:
    array: Any = state
    for part in name.split("."):
        array = getattr(array, part)
    index = index(state) if callable(index) else index
    array[index] = value(state, array[index]) if callable(value) else value


def name_of(fault: int) -> str:
    return CODES[fault & 0xFFFFFFFF] if fault else ""


@pytest.mark.parametrize(("fault", "name", "index", "value"), STATE_FAULTS)
def test_faults_of_the_state_are_found(fault: str, name: str, index: Any, value: Any, case: Case) -> None:
    damage(case.state, name, index, value)
    scratch = (np.zeros(PAGES, np.int64).data for _ in range(2))
    assert name_of(check_state(case.limits, as_memoryviews(case.state), *scratch)) == fault
    with contextlib.suppress(IndexError):  # which says it, too
        assert bool(state_faults(case.limits, case.state)) == bool(fault)


@pytest.mark.parametrize(("fault", "name", "index", "value"), BATCH_FAULTS)
def test_faults_of_the_batch_are_found(fault: str, name: str, index: Any, value: Any, case: Case) -> None:
    damage(case.state, name, index, value)
    assert name_of(check_batch(case.limits, as_memoryviews(case.state), np.zeros(PAGES, np.int64).data)) == fault
    assert state_faults(case.limits, case.state)


def test_a_prompt_that_waits_although_the_step_has_room_is_found(case: Case) -> None:
    limits = case.limits._replace(tokens=9, mixed_tokens=9, burst_step_tokens=9)
    assert name_of(check_batch(limits, as_memoryviews(case.state), np.zeros(PAGES, np.int64).data)) == "ROOM_LEFT"


def test_every_fault_has_its_damage() -> None:
    assert {*CODES.values()} == {row[0] for row in (*STATE_FAULTS, *BATCH_FAULTS) if row[0]} | {"ROOM_LEFT"}
