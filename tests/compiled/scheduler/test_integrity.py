"""The check of the scheduler's state finds damage, names its place, and finds nothing where nothing is damaged."""

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from blinkpy.device.array_trees import as_memoryviews, named_arrays
from blinkpy.device.expect import CODE_MASK, describe_fault
from blinkpy.device.table_codegen import ArgumentTable
from blinkpy.kv import state as S
from blinkpy.kv.invariants import batch_invariants as B
from blinkpy.kv.invariants import page_invariants as P
from blinkpy.kv.invariants import request_invariants as R
from blinkpy.kv.invariants.check_state import check_state, compiled_check, state_faults
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.state_memory import differences, snapshot
from blinkpy.queues.byte_automaton import STATES_WORD
from blinkpy.verify.sim.simulation import Simulation

NAMES = {code: name for module in (B, P, R) for name, code in vars(module).items() if name.isupper() and isinstance(code, int)}
ARRAYS = (
    *("requests.", "pages.", "grammars.", "pairs.", "batch.", "forecast."),
    *("running", "waiting", "finishing", "counts", "counters"),
)
CONSTANT = "requests.pair", "requests.entry"
WORLDS, DAMAGES = 60, 1500  # enough to see every code but those of CRAFTED


class Damage(NamedTuple):
    """One word of a state: what it was, and what it is."""

    limits: Limits
    state: State
    place: tuple[int, ...]
    before: int
    after: int

    @property
    def first(self) -> int:
        return self.place[0]

    @property
    def runs(self) -> bool:
        return bool(self.state.requests.status[self.first] == S.RUNNING)

    @property
    def lives(self) -> bool:
        return bool(self.state.requests.status[self.first] in (S.RUNNING, S.WAITING))

    @property
    def indexed(self) -> bool:
        return bool(self.state.pages.key[self.first] >= 0)

    def request(self, field: str) -> int:
        return int(getattr(self.state.requests, field)[self.first])

    def below(self, count: int) -> bool:
        """Whether the word is one of the first ones of a list, as many as State.counts has at an index."""
        return self.first < int(self.state.counts[count])

    def in_batch(self, count: int, more: int = 0) -> bool:
        rows, listed = int(self.state.batch.counts[S.ROWS]), int(self.state.batch.counts[count])
        return rows > 0 and self.first < listed + more


def has_grammar(d: Damage, slot: int) -> bool:
    return bool(d.state.requests.status[slot] in (S.RUNNING, S.WAITING) and d.state.requests.grammar[slot] >= 0)


def state_is_wrong(d: Damage) -> bool:
    return has_grammar(d, d.first) and not 0 <= d.after < d.state.grammars.words[d.request("grammar"), STATES_WORD]


def grammar_is_used(d: Damage) -> bool:
    return any(has_grammar(d, slot) and d.state.requests.grammar[slot] == d.first for slot in range(d.limits.slots))


def epoch_is_used(d: Damage) -> bool:
    return any(has_grammar(d, slot) and d.state.requests.pair[slot] == d.first for slot in range(d.limits.slots))


def batch_size_is_wrong(d: Damage) -> bool | None:
    rows, tokens, decodes = (int(d.state.batch.counts[i]) for i in (S.ROWS, S.TOKENS, S.DECODE_ROWS))
    wrong = not (0 <= decodes <= rows <= d.limits.rows and rows <= tokens <= d.limits.tokens)
    return False if d.first > S.DECODE_ROWS else True if wrong else None


def count_is_wrong(d: Damage) -> bool | None:
    return True if d.first <= S.CACHED_COUNT else None if d.first <= S.RING_TAIL else False


def overflows(head: str, tail: str, entries: str) -> Callable[[Damage], bool]:
    def wrong(d: Damage) -> bool:
        pairs = d.state.pairs
        return not 0 <= getattr(pairs, tail)[d.first] - getattr(pairs, head)[d.first] <= getattr(d.limits, entries)

    return wrong


LISTS = {R.RUNNING_LIST, R.WAITING_LIST, R.FINISHING_LIST}
CHAINS = {P.CHAIN_BUCKET, P.CHAIN_LINKS, P.CHAIN_TWICE, P.KEY_UNINDEXED}
FREE = {P.FREE_RANGE, P.FREE_TWICE, P.FREE_INDEXED, P.ONE_OF}
# For each array: whether damage of one word must be found (None: it depends on more than this table looks at), and as what.
# Damage of an array that is not listed breaks nothing that is checked.
EXPECTED: dict[str, tuple[Callable[[Damage], bool | None], set[int]]] = {
    "requests.status": (lambda d: True, LISTS | {R.NO_STATUS}),
    "running": (lambda d: d.below(S.RUNNING_COUNT), {R.RUNNING_LIST}),
    "waiting": (lambda d: d.below(S.WAITING_COUNT), {R.WAITING_LIST}),
    "finishing": (lambda d: d.below(S.FINISHING_COUNT), {R.FINISHING_LIST}),
    "counts": (
        count_is_wrong,
        LISTS | FREE | {R.UNRANKED, R.STALLED_WRONG, P.FREE_WRONG, P.CACHED_WRONG, P.RING_LONG, P.RING_OUTSIDE},
    ),
    "requests.prompt_length": (lambda d: d.lives and not 1 <= d.after <= d.request("length"), {R.PROMPT_LONGER}),
    "requests.length": (
        lambda d: (not d.request("prompt_length") <= d.after <= d.limits.max_model_len or None) if d.lives else False,
        {R.PROMPT_LONGER, R.CONTEXT_EXCEEDED, R.NOTHING_TO_COMPUTE, R.VOCABULARY, B.EMITS_WRONG},
    ),
    "requests.computed": (
        lambda d: not d.runs or not 0 <= d.after < d.request("length") or None,
        {R.NOTHING_TO_COMPUTE, R.IDLE_CACHE, R.MORE_COMPUTED, R.INDEXED_COMPUTED, B.CONTEXT_WRONG},
    ),
    "requests.num_pages": (lambda d: True, {R.IDLE_PAGES, R.MORE_COMPUTED, R.TABLE_END}),
    "requests.page_table": (lambda d: True, {R.TABLE_END, R.TABLE_RANGE, P.HELD_TWICE, P.REFERENCES}),
    "requests.indexed": (
        lambda d: (d.runs and d.after > d.request("num_pages")) or (None if d.runs else False),
        {R.INDEXED_HELD, R.INDEXED_COMPUTED, P.CANONICAL},
    ),
    "requests.canonical": (
        lambda d: (d.runs and d.request("indexed") > 0 and d.after != S.CHAIN_EVICTED and not 0 <= d.after < d.limits.pages)
        or (None if d.runs else False),
        {P.CANONICAL},
    ),
    "requests.canonical_generation": (lambda d: None if d.runs else False, {P.CANONICAL}),
    "requests.stalled": (lambda d: True, {R.IDLE_STALLED, R.STALLED_WRONG}),
    "requests.tokens": (
        lambda d: (d.lives and d.place[1] < d.request("length") and not 0 <= d.after < d.limits.vocab_size)
        or (None if d.lives else False),
        {R.VOCABULARY, P.CANONICAL, B.TOKEN_WRONG},
    ),
    "requests.rank": (lambda d: None if d.lives else False, {R.UNSORTED}),
    "requests.arrival": (lambda d: None if d.lives else False, {R.UNSORTED}),
    "requests.grammar": (lambda d: d.lives, {R.GRAMMAR_LOST, R.GRAMMAR_FOREIGN}),
    "requests.grammar_state": (state_is_wrong, {R.GRAMMAR_STATE}),
    "grammars.epoch": (grammar_is_used, {R.GRAMMAR_FOREIGN}),
    "grammars.digest": (grammar_is_used, {R.GRAMMAR_FOREIGN}),
    "grammars.words": (lambda d: None if d.place[1] == STATES_WORD else False, {R.GRAMMAR_STATE}),
    "pairs.epoch": (epoch_is_used, {R.GRAMMAR_FOREIGN}),
    "pages.refcount": (lambda d: True, {P.REFERENCES}),
    "pages.free": (lambda d: d.below(S.FREE_COUNT), FREE),
    "pages.ring_position": (
        lambda d: d.before >= 0 > d.after or d.after >= 0 > d.before or (None if d.after >= 0 else False),
        {P.ONE_OF, P.CACHED_UNINDEXED, P.RING_OUTSIDE, P.RING_ENTRY},
    ),
    "pages.ring": (
        lambda d: any(p >= 0 and p & (d.limits.ring_entries - 1) == d.first for p in d.state.pages.ring_position.tolist()),
        {P.RING_ENTRY},
    ),
    "pages.bucket_head": (lambda d: d.before >= 0 or d.after >= 0, CHAINS),
    "pages.bucket_next": (lambda d: d.indexed and (d.before >= 0 or d.after >= 0), CHAINS),
    "pages.bucket_previous": (lambda d: d.indexed, {P.CHAIN_LINKS}),
    "pages.key": (
        lambda d: (d.before >= 0) != (d.after >= 0) or (None if d.after >= 0 else False),
        {*CHAINS, P.CACHED_UNINDEXED, P.FREE_INDEXED, P.SHARED_UNINDEXED},
    ),
    "pages.parent": (lambda d: not -1 <= d.after < d.limits.pages or d.after == d.first, {P.PARENT_RANGE}),
    "pages.tokens": (lambda d: None if d.indexed else False, {P.CANONICAL}),
    "pages.generation": (lambda d: None, {P.CANONICAL}),
    "pairs.attached": (
        lambda d: bool(((d.state.requests.pair == d.first) & (d.state.requests.status != S.EMPTY)).any()) and d.after != 1,
        {R.OWNERLESS},
    ),
    "pairs.sq_head": (overflows("sq_head", "sq_tail", "sq_entries"), {R.SUBMISSIONS}),
    "pairs.sq_tail": (overflows("sq_head", "sq_tail", "sq_entries"), {R.SUBMISSIONS}),
    "pairs.cq_head": (overflows("cq_head", "cq_tail", "cq_entries"), {R.COMPLETIONS}),
    "pairs.cq_tail": (overflows("cq_head", "cq_tail", "cq_entries"), {R.COMPLETIONS}),
    "batch.counts": (batch_size_is_wrong, {B.BATCH_SIZE, B.ROW_IDLE, B.TWO_ROWS, B.UNCOVERED, B.DECODE_LONG, B.ROOM_LEFT}),
    "batch.row_slots": (lambda d: d.in_batch(S.ROWS), {B.ROW_IDLE, B.TWO_ROWS, B.ROW_STALLED, B.CONTEXT_WRONG, B.EMITS_WRONG}),
    "batch.query_starts": (
        lambda d: d.in_batch(S.ROWS, more=1),
        {B.ROW_EMPTY, B.DECODE_LONG, B.CONTEXT_WRONG, B.UNCOVERED, B.TOKEN_ROW},
    ),
    "batch.context_lengths": (lambda d: d.in_batch(S.ROWS), {B.CONTEXT_WRONG}),
    "batch.emits": (lambda d: d.in_batch(S.ROWS), {B.EMITS_WRONG}),
    "batch.token_rows": (lambda d: d.in_batch(S.TOKENS), {B.TOKEN_ROW}),
    "batch.positions": (lambda d: d.in_batch(S.TOKENS), {B.TOKEN_POSITION}),
    "batch.token_ids": (lambda d: d.in_batch(S.TOKENS), {B.TOKEN_WRONG}),
    "batch.cache_slots": (lambda d: d.in_batch(S.TOKENS), {B.CACHE_SLOT}),
}


def in_python(limits: Limits, state: State) -> int:
    scratch = np.zeros((2, max(limits.slots, limits.pages)), np.int64)
    return int(check_state(limits, as_memoryviews(state), *(row.data for row in scratch)))


def compiled(limits: Limits, state: State) -> Callable[[], int]:
    tables, scratch = (ArgumentTable(limits), ArgumentTable(state)), np.zeros((2, max(limits.slots, limits.pages)), np.int64)
    check = compiled_check(tuple(table.kind for table in tables))
    return lambda: int(check(*tables, *scratch))


def test_random_damage_is_found(seed: int) -> None:
    """Random states of random worlds, one word of each damaged; compiled, and the first of each kind in plain Python too."""
    draw, found = random.Random(seed), set()
    for number in range(WORLDS):
        simulation = Simulation(seed + number, 400)
        for _ in range(draw.randint(20, 400)):
            assert simulation.advance()
        limits, state = simulation.world.limits, simulation.world.state
        check = compiled(limits, state)
        assert check() == in_python(limits, state) == 0
        arrays = [(n, a) for n, a in named_arrays(state) if a.size and n.startswith(ARRAYS) and not n.startswith(CONSTANT)]
        for _ in range(DAMAGES):
            name, array = draw.choice(arrays)
            index = tuple(draw.randrange(n) for n in array.shape)
            before = int(array[index])
            after = draw.choice((before + 1, before - 1, before ^ 1, 0, -1, draw.randrange(limits.pages)))
            if after == before:
                continue
            array[index] = after
            fault = check()
            must, codes = EXPECTED.get(name, (lambda d: False, set()))
            wanted = must(Damage(limits, state, index, before, after))
            where = f"seed {seed + number}: {name}{list(index)} {before} -> {after}: {NAMES.get(fault & CODE_MASK)}"
            assert wanted is None or bool(fault) == wanted, where
            assert not fault or fault & CODE_MASK in codes, where
            if fault and (name, fault & CODE_MASK) not in found:
                found.add((name, fault & CODE_MASK))
                assert in_python(limits, state) == fault
            array[index] = before
    assert {NAMES[code] for _, code in found} >= set(NAMES.values()) - {damage.__name__.upper() for damage in CRAFTED}


# ---- what one random word hardly breaks: each changes a state that has what it damages, and leaves others as they are --------


def free_wrong(limits: Limits, state: State) -> None:
    state.counts[S.FREE_COUNT] = limits.pages + 1


def context_exceeded(limits: Limits, state: State) -> None:
    state.requests.length[state.running[: state.counts[S.RUNNING_COUNT]][:1]] = limits.max_model_len + 1


def held_twice(limits: Limits, state: State) -> None:
    slots = np.flatnonzero(state.requests.num_pages > 1)[:1]
    state.requests.page_table[slots, 1] = state.requests.page_table[slots, 0]


def shared_unindexed(limits: Limits, state: State) -> None:
    state.pages.key[np.flatnonzero(state.pages.refcount > 1)[:1]] = -1


def row_stalled(limits: Limits, state: State) -> None:
    slots = state.batch.row_slots[: state.batch.counts[S.ROWS]][:1]
    state.requests.stalled[slots] = 1
    state.counts[S.STALLED_COUNT] += len(slots)


def room_left(limits: Limits, state: State) -> None:
    """The last one of several rows that decode is left out."""
    counts, full = state.batch.counts, (limits.tokens, limits.mixed_tokens, limits.burst_step_tokens)
    if 1 < counts[S.DECODE_ROWS] == counts[S.ROWS] and counts[S.TOKENS] - 1 not in full:
        counts[[S.ROWS, S.TOKENS, S.DECODE_ROWS]] -= 1


def last_own_page(limits: Limits, state: State) -> tuple[int, int]:
    """(slot, page) of the first row, whose last page no computed token is in; (-1, -1) where it is not so."""
    r, slot = state.requests, int(state.batch.row_slots[0])
    if not state.batch.counts[S.ROWS] or r.computed[slot] > (r.num_pages[slot] - 1) * limits.page_size:
        return -1, -1
    reached = int(state.batch.context_lengths[0]) > (int(r.num_pages[slot]) - 1) * limits.page_size
    return (slot, int(r.page_table[slot, r.num_pages[slot] - 1])) if reached else (-1, -1)


def token_pageless(limits: Limits, state: State) -> None:
    """A page that the step writes is given back."""
    slot, page = last_own_page(limits, state)
    if slot >= 0:
        state.requests.num_pages[slot] -= 1
        state.requests.page_table[slot, state.requests.num_pages[slot]] = -1
        state.pages.refcount[page] = 0
        state.pages.free[state.counts[S.FREE_COUNT]] = page
        state.counts[S.FREE_COUNT] += 1


def shared_write(limits: Limits, state: State) -> None:
    """A page that the step writes is indexed, and another request gets it."""
    slot, page = last_own_page(limits, state)
    r, pages = state.requests, state.pages
    others = np.flatnonzero((r.status == S.RUNNING) & (r.num_pages < limits.pages_per_sequence))
    others, empty = others[others != slot][:1], np.flatnonzero(pages.bucket_head < 0)[:1]
    if slot >= 0 and others.size and empty.size:
        r.page_table[others, r.num_pages[others]] = page
        r.num_pages[others] += 1
        pages.refcount[page] = 2
        pages.bucket_head[empty], pages.key[page] = page, empty[0]
        pages.bucket_next[page] = pages.bucket_previous[page] = pages.parent[page] = -1


CRAFTED = (free_wrong, context_exceeded, held_twice, shared_unindexed, row_stalled, room_left, token_pageless, shared_write)


@pytest.mark.parametrize("damage", CRAFTED, ids=lambda damage: damage.__name__)
def test_crafted_damage_is_found(damage: Callable[[Limits, State], None], seed: int) -> None:
    for number in range(1000):
        simulation = Simulation(seed + number, 200)
        for _ in range(30 + number % 100):
            assert simulation.advance()
        limits, state = simulation.world.limits, simulation.world.state
        before = snapshot(state)
        damage(limits, state)
        if differences(before, snapshot(state)):
            fault = compiled(limits, state)()
            assert NAMES.get(fault & CODE_MASK) == damage.__name__.upper(), seed + number
            assert in_python(limits, state) == fault
            return
    raise AssertionError("no world has what is damaged")


def test_messages_name_the_place(seed: int) -> None:
    simulation = Simulation(seed, 100)
    limits, state = simulation.world.limits, simulation.world.state
    page, slot = int(state.pages.free[2]), limits.slots - 1
    breaks: list[tuple[Any, Any, int, str]] = [
        (state.pages.refcount, page, 1, f"page {page}: its reference count is not the number of page tables that hold it"),
        (state.pages.free, 1, -1, "free stack: entry 1 is a page id out of range"),
        (state.requests.num_pages, slot, 1, f"slot {slot} does not run and holds pages"),
        (state.pairs.cq_tail, 0, 1 << 20, "queue pair 0: its completion ring overflowed"),
        (state.counts, S.FREE_COUNT, -1, "the number of free pages is wrong"),
    ]
    for array, index, value, message in breaks:
        before = array[index]
        array[index] = value
        assert state_faults(limits, state) == [message] == [describe_fault(in_python(limits, state))]
        array[index] = before
    assert state_faults(limits, as_memoryviews(state)) == []


def test_what_hardly_any_damage_reaches() -> None:
    """Counts beyond their lists, a canonical page that left the index under its old generation, more pages than a table has."""
    assert R.check_list([0], 1, 1, [S.RUNNING], S.RUNNING, [0])
    assert not R.check_list([0], -1, 1, [S.RUNNING], S.RUNNING, [0])
    assert not R.check_list([0, 0], 2, 1, [S.RUNNING], S.RUNNING, [0])
    limits = SimpleNamespace(pages=1, page_size=1, pages_per_sequence=1, max_model_len=9)
    requests = SimpleNamespace(canonical=[0], indexed=[1], canonical_generation=[4], tokens=np.array([[7]]))
    for key, fine in ((5, True), (-1, False)):
        pages = SimpleNamespace(generation=[4], key=[key], tokens=np.array([[7]]))
        assert P.canonical_fine(limits, SimpleNamespace(pages=pages, requests=requests), 0) == fine
    fields = {"status": S.RUNNING, "computed": 1, "length": 2, "num_pages": 2, "prompt_length": 1}
    request = SimpleNamespace(**{name: [value] for name, value in fields.items()})
    assert R.check_request(limits, request, 0) & CODE_MASK == R.TABLE_END
