"""The check of the scheduler's state finds the same damage as the reference, and reports nothing for a valid state.

Claim state/checks: The checks of the state find damage, in Python and compiled, on both sides of each bound.
The assumptions of each phase hold.
"""

import os
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import typeof
from support.invariant_reference import wrong

from blinkpy.device.expect import CODE_MASK, PLACE_SHIFT, describe_fault, fault_at
from blinkpy.device.tables import ArgumentTable, as_memoryviews, named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.invariants import batch_invariants as B
from blinkpy.kv.invariants import page_invariants as P
from blinkpy.kv.invariants import request_invariants as R
from blinkpy.kv.invariants import snapshot_invariants as N
from blinkpy.kv.invariants.check_state import check_scratch, check_state, compiled_check, state_faults
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.state_memory import differences, snapshot
from blinkpy.queues import submission as E
from blinkpy.queues.byte_automaton import STATES_WORD
from blinkpy.queues.words import DIGEST_BITS
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.verify.sim.simulation import Simulation

NAMES = {code: name for module in (B, P, R, N) for name, code in vars(module).items() if name.isupper() and isinstance(code, int)}
DAMAGED = (
    "requests.",
    "pages.",
    "snapshots.",
    "grammars.",
    "pairs.",
    "batch.",
    "suspended.",
    "running",
    "waiting",
    "finishing",
    "counts",
)
UNCHECKED = (
    *("requests.pair", "requests.page_hash", "grammars.used", "grammars.token_place", "grammars.token_bytes"),
    *("requests.service", "requests.charged", "snapshots.used"),
    *("batch.logprobs", "batch.sampled"),
)
CHECKED_WORDS = (  # words of an entry that are checked
    *(E.WORD_GRAMMAR_WORDS, E.WORD_GRAMMAR_DIGEST, E.WORD_GRAMMAR_DIGEST + 1),
    *(E.WORD_RULES_WORDS, E.WORD_RULES_DIGEST, E.WORD_RULES_DIGEST + 1, E.WORD_FLAGS),
    E.WORD_BEST_EFFORT,
)
NIGHTLY = os.environ.get("BLINKPY_PROFILE") == "nightly"  # continues until all codes have occurred
STATES, MOST_STATES, DAMAGES = 120 if NIGHTLY else 60, 6000, 60  # number of states, its maximum, and damages of each
RARE = 15  # codes that the states of a run may lack
FEW_STATES, MOST_LOOKED = 6, 40  # states, and looks after which any state is taken


def check_in_python(limits: Limits, state: State) -> Callable[[], int]:
    views, scratch = as_memoryviews(state), [row.data for row in np.zeros((2, max(limits.slots, limits.pages)), np.int64)]
    return lambda: int(check_state(limits, views, *scratch))


def check_compiled(limits: Limits, state: State) -> int:
    tables, scratch = (ArgumentTable(limits), ArgumentTable(state)), np.zeros((2, max(limits.slots, limits.pages)), np.int64)
    return int(compiled_check(tuple(table.kind for table in tables))(*tables, *scratch))


def states(draw: random.Random) -> Iterator[tuple[Limits, State]]:
    """States of storms in random worlds, some rounds apart, and whenever a step is suspended, which is rare."""
    for _ in range(MOST_STATES // 10):
        simulation = Simulation(draw.randrange(1 << 30), 200)
        for _ in range(10):
            for _ in range(draw.randint(1, 30)):
                assert simulation.advance()
                if simulation.world.state.suspended.counts[S.ROWS]:
                    break
            if simulation.world.state.batch.counts[S.ROWS] or draw.random() < 0.2:
                yield simulation.world.limits, simulation.world.state


def walked_grammars(state: State) -> set[int]:
    """Grammars of drafts. The check walks their words, which are meaningless once any of them is damaged."""
    walked = set[int]()
    for batch in (state.batch, state.suspended):
        rows = int(batch.counts[S.ROWS])
        walked |= {*state.requests.grammar[batch.row_slots[:rows][batch.emits[:rows] == S.DRAFT]].tolist()}
    return walked


def one_word(arrays: list[tuple[str, Any]], draw: random.Random, limits: Limits, state: State) -> None:
    """Change a word, usually a meaningful one, to a neighbour of another word's value, or to a bound."""
    name, array = draw.choice(arrays)
    r, counts = state.requests, state.counts
    rows, tokens = state.batch.counts[[S.ROWS, S.TOKENS]].tolist()
    listed = {"running": S.RUNNING_COUNT, "waiting": S.WAITING_COUNT, "finishing": S.FINISHING_COUNT, "pages.free": S.FREE_COUNT}
    index, page = [draw.randrange(n) for n in array.shape], limits.page_size
    values = [limits.slots, limits.pages, limits.rows, limits.tokens, *counts[[S.RING_HEAD, S.RING_TAIL]].tolist()]
    live = np.flatnonzero(r.status if draw.random() < 0.3 else r.status == S.RUNNING).tolist()
    if name.startswith("requests.") and live and draw.random() < 0.9:
        index[0] = slot = draw.choice(live)
        held, indexed, length = int(r.num_pages[slot]), int(r.indexed[slot]), int(r.length[slot])
        values = [held, indexed, length, int(r.computed[slot]), held * page, indexed * page]
        values += [limits.max_model_len, limits.vocab_size, limits.pages]
        if name.startswith(("requests.grammar", "requests.rules")):
            values = [(int(r.pair[slot]) + more) * limits.grammar_share for more in (0, 1)]
            values += [int(state.grammars.words[r.grammar[slot], STATES_WORD]), -1]
        index[1:] = [draw.randrange(min(n, (length if name == "requests.tokens" else held) + 1)) for n in array.shape[1:]]
        if name == "requests.entry":
            index[1] = draw.choice(CHECKED_WORDS)
    elif name.startswith("grammars."):
        walked = walked_grammars(state)
        if in_use := sorted({*r.grammar[live].tolist()} - {-1} - walked):
            index[0] = own = draw.choice(in_use)
            index[1:], values = [STATES_WORD] * (array.ndim - 1), r.grammar_state[r.grammar == own].tolist()
        elif unwalked := sorted({*range(len(array))} - walked):
            index[0] = draw.choice(unwalked)
        else:
            return
    elif name in listed or name.startswith(("batch.", "suspended.")):
        if name.startswith("suspended."):
            rows, tokens = state.suspended.counts[[S.ROWS, S.TOKENS]].tolist()
        used = int(counts[listed[name]]) if name in listed else tokens if len(array) == limits.tokens else rows
        index[0] = draw.randrange(min(len(array), used + 1))
    elif name.startswith("pairs."):
        entries = limits.sq_entries if "sq" in name else limits.cq_entries
        values = [int(other[index[0]]) + more for other in state.pairs[2:6] for more in (0, entries, -entries)]
    near = draw.choice((int(array[tuple(index)]), 0, draw.choice(values), int(draw.choice(array.reshape(-1)))))
    within = np.iinfo(array.dtype)
    array[tuple(index)] = min(max(near + draw.choice((-1, 0, 0, 1)), within.min), within.max)


# ---- damage that a random word hardly causes; a state without the damaged part stays unchanged ---------------------------


def list_longer(draw: random.Random, limits: Limits, state: State) -> None:
    state.counts[draw.choice((S.RUNNING_COUNT, S.WAITING_COUNT, S.FINISHING_COUNT))] += 1


def unsorted(draw: random.Random, limits: Limits, state: State) -> None:
    """A waiting request gets another rank and arrival, often equal to another request's."""
    for slot in state.waiting[: state.counts[S.WAITING_COUNT]]:
        state.requests.rank[slot], state.requests.arrival[slot] = draw.randint(0, 1), draw.randint(0, 1)


def two_rows(draw: random.Random, limits: Limits, state: State) -> None:
    if state.batch.counts[S.ROWS] > 1:
        state.batch.row_slots[1] = state.batch.row_slots[0]


def live_grammar(draw: random.Random, state: State) -> int:
    """The slot of a grammar that a live request has, or -1."""
    r = state.requests
    return draw.choice([*r.grammar[(r.status == S.RUNNING) | (r.status == S.WAITING)].tolist(), -1])


def grammar_foreign(draw: random.Random, limits: Limits, state: State) -> None:
    """Requests with a grammar get a copy of it, usually in another queue pair's share."""
    r, g, own = state.requests, state.grammars, live_grammar(draw, state)
    if own >= 0:
        copy = draw.randrange(len(g.epoch))
        for array in (g.epoch, g.digest, g.words):
            array[copy] = array[own]
        r.grammar[r.grammar == own] = copy


def grammar_renamed(draw: random.Random, limits: Limits, state: State) -> None:
    """Requests with a grammar, and the engine, use another name for it: the state stays valid."""
    r, own, digest = state.requests, live_grammar(draw, state), draw.randrange(1 << DIGEST_BITS)
    if own >= 0:
        state.grammars.digest[own] = digest
        r.entry.view(np.int64)[r.grammar == own, E.LONG_GRAMMAR_DIGEST] = digest


def rules_changed(draw: random.Random, limits: Limits, state: State) -> None:
    """A live request has an automaton instead of its token rules, another pair's rules, or another name of them."""
    r, g = state.requests, state.grammars
    live = np.flatnonzero((r.rules >= 0) & ((r.status == S.RUNNING) | (r.status == S.WAITING))).tolist()
    if live:
        slot, own = live[0], int(r.rules[live[0]])
        copy = draw.randrange(len(g.epoch))
        for array in (g.epoch, g.digest, g.words):
            array[copy] = array[own]
        r.rules[slot] = copy
        g.words[copy, STATES_WORD] = draw.choice((-1, -1, 7))
        g.digest[copy] ^= draw.choice((0, 0, 1))


def held_twice(draw: random.Random, limits: Limits, state: State) -> None:
    for slot in np.flatnonzero(state.requests.num_pages > 1)[:1]:
        state.requests.page_table[slot, 1] = state.requests.page_table[slot, 0]


def shared_unindexed(draw: random.Random, limits: Limits, state: State) -> None:
    state.pages.key[np.flatnonzero(state.pages.refcount > 1)[:1]] = -1


def row_stalled(draw: random.Random, limits: Limits, state: State) -> None:
    slots = state.batch.row_slots[: state.batch.counts[S.ROWS]][:1]
    state.requests.stalled[slots] = 1
    state.counts[S.STALLED_COUNT] += len(slots)


def kept_more(draw: random.Random, limits: Limits, state: State) -> None:
    """Change a word of a suspended step, of the data kept for it, or of the requests in flight."""
    if state.suspended.counts[S.ROWS]:
        words, word = draw.choice(
            ((state.suspended.counts, S.GROUP), (state.suspended.counts, S.GROUPS), (state.counts, S.INTERRUPTIONS))
        )
        words[word] = draw.choice((0, 1, limits.step_groups, limits.suspend_steps + 1))
        state.pairs.reserved[draw.randrange(limits.pairs)] += draw.choice((0, 0, 1))


def not_in_flight(draw: random.Random, limits: Limits, state: State) -> None:
    """One more request is in flight, or a stalled one."""
    r = state.requests
    idle = [slot for slot in state.running[: state.counts[S.RUNNING_COUNT]].tolist() if slot not in state.batch.row_slots]
    if idle:
        state.counts[S.STALLED_COUNT] += int(r.stalled[idle[0]] == 0)
        r.stalled[idle[0]] = S.IN_FLIGHT


def group_wrong(draw: random.Random, limits: Limits, state: State) -> None:
    if state.batch.counts[S.ROWS]:
        state.batch.counts[S.GROUP] = draw.choice((-1, state.batch.counts[S.GROUPS]))


def space_left(draw: random.Random, limits: Limits, state: State) -> None:
    """Drop the last of several decode rows."""
    counts = state.batch.counts
    if 1 < counts[S.DECODE_ROWS] == counts[S.ROWS]:
        counts[[S.ROWS, S.TOKENS, S.DECODE_ROWS]] -= 1


def shorter_chunk(draw: random.Random, limits: Limits, state: State) -> None:
    """The last row, a chunk, loses tokens: it keeps as many as a step with decode rows may have, or any number."""
    b, last = state.batch, int(state.batch.counts[S.ROWS]) - 1
    tokens, fewest = int(b.counts[S.TOKENS]), int(b.query_starts[last]) + 1 if last >= b.counts[S.DECODE_ROWS] else 0
    left = draw.choice((limits.mixed_tokens, limits.burst_step_tokens, tokens - 1))
    if 0 < fewest <= left < tokens:
        b.context_lengths[last] -= tokens - left
        b.query_starts[last + 1] = b.counts[S.TOKENS] = left
        b.emits[last] = 0


def yields_not(draw: random.Random, limits: Limits, state: State) -> None:
    """Best-effort prompts yield, and requests in the step, or other requests, change their classes."""
    state.counts[S.YIELDED_TURNS] = draw.randint(0, 1)
    slots = state.batch.row_slots[state.batch.counts[S.DECODE_ROWS] : state.batch.counts[S.ROWS]]
    for slot in slots if draw.random() < 0.5 else state.running[: state.counts[S.RUNNING_COUNT]]:
        state.requests.entry[slot, E.WORD_BEST_EFFORT] = draw.randint(0, 1)


def last_own_page(limits: Limits, state: State) -> tuple[int, int]:
    """(slot, page) of the first row with a last page without computed tokens; (-1, -1) without such a row."""
    r, slot = state.requests, int(state.batch.row_slots[0])
    if not state.batch.counts[S.ROWS] or r.computed[slot] > (r.num_pages[slot] - 1) * limits.page_size:
        return -1, -1
    reached = int(state.batch.context_lengths[0]) > (int(r.num_pages[slot]) - 1) * limits.page_size
    return (slot, int(r.page_table[slot, r.num_pages[slot] - 1])) if reached else (-1, -1)


def other_snapshots(draw: random.Random, limits: Limits, state: State) -> None:
    """A running request copies another snapshot, or a snapshot gets another page."""
    running, n = state.running[: state.counts[S.RUNNING_COUNT]].tolist(), state.snapshots
    place = draw.randrange(-1, limits.snapshots + 1)
    if running and draw.random() < 0.6:
        slot = draw.choice(running)
        draw.choice((state.requests.snapshot_source, state.requests.snapshot_target))[slot] = place
        if 0 <= place < limits.snapshots:
            n.pins[place] += draw.choice((0, 1))
    elif 0 <= place < limits.snapshots:
        page = n.page[place] = draw.randrange(limits.pages)
        n.generation[place] = state.pages.generation[page]
        n.of_page[page] = draw.choice((place, place, -1))


def snapshot_of_an_end(draw: random.Random, limits: Limits, state: State) -> None:
    """A request with full pages starts from a snapshot of its last page, sometimes with wrong pins."""
    r, n = state.requests, state.snapshots
    full = np.flatnonzero((r.status == S.RUNNING) & (r.computed > 0) & (r.computed % limits.page_size == 0)).tolist()
    if full and limits.snapshots:
        slot, place = draw.choice(full), draw.randrange(limits.snapshots)
        page = n.page[place] = r.page_table[slot, r.computed[slot] // limits.page_size - 1]
        n.generation[place], n.of_page[page], r.snapshot_source[slot] = state.pages.generation[page], place, place
        n.pins[place] = draw.choice((1, 1, 2))


def branch_before_the_end(draw: random.Random, limits: Limits, state: State) -> None:
    slots = state.batch.row_slots[: state.batch.counts[S.ROWS]]
    state.requests.snapshot_branch[slots] = state.batch.context_lengths[: len(slots)] - 1


def token_pageless(draw: random.Random, limits: Limits, state: State) -> None:
    """Free a page that the step writes."""
    slot, page = last_own_page(limits, state)
    if slot >= 0:
        state.requests.num_pages[slot] -= 1
        state.requests.page_table[slot, state.requests.num_pages[slot]] = -1
        state.pages.refcount[page] = 0
        state.pages.free[state.counts[S.FREE_COUNT]] = page
        state.counts[S.FREE_COUNT] += 1


def shared_write(draw: random.Random, limits: Limits, state: State) -> None:
    """Index a page that the step writes, and give it to another request, too."""
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


CRAFTED = (
    *(list_longer, unsorted, two_rows, grammar_foreign, grammar_renamed, rules_changed),
    *(held_twice, shared_unindexed, row_stalled, *[kept_more] * 8, not_in_flight, group_wrong),
    *(yields_not, space_left, shorter_chunk, token_pageless, shared_write),
    *(*[other_snapshots] * 6, *[snapshot_of_an_end] * 2, branch_before_the_end),
)


def test_damage_is_found(seed: int) -> None:
    """Compares the first fault in plain Python; and compiled, at the first occurrence of its code."""
    draw, found = random.Random(seed), {0}
    for number, (limits, state) in enumerate(states(draw)):
        assert check_compiled(limits, state) == 0
        check, before = check_in_python(limits, state), snapshot(state)
        arrays = [(name, array) for name, array in named_arrays(state) if name.startswith(DAMAGED) and name not in UNCHECKED]
        for damage in (*CRAFTED, *[partial(one_word, arrays)] * DAMAGES):
            damage(draw, limits, state)
            fault, (code, place) = check(), next(wrong(limits, state), (0, 0))
            reported = f"{NAMES.get(fault & CODE_MASK, fault)} {fault >> PLACE_SHIFT} for {NAMES.get(code)} {place}"
            assert fault == fault_at(code, place), f"{reported}: {differences(snapshot(state), before)}"
            if code not in found:
                found.add(code)
                assert check_compiled(limits, state) == fault
            for name, array in arrays:
                array[...] = before[name]
        if number >= STATES and (found > set(NAMES) or (not NIGHTLY and len(set(NAMES) - found) <= RARE)):
            return
    raise AssertionError(f"never seen: {[NAMES[code] for code in set(NAMES) - found]}")


@pytest.mark.parametrize("part", range(6))
def test_damage_of_a_few_states_is_found(seed: int, part: int) -> None:
    """As above, in the short time of `make mutants`: every second state has a suspended step."""
    draw = random.Random(f"{seed} {part}")
    some, looked = 0, 0
    for limits, state in states(draw):
        looked += 1
        if some % 2 and not state.suspended.counts[S.ROWS] and looked < MOST_LOOKED:
            continue
        some, looked = some + 1, 0
        check, before = check_in_python(limits, state), snapshot(state)
        arrays = [(name, array) for name, array in named_arrays(state) if name.startswith(DAMAGED) and name not in UNCHECKED]
        for damage in (*CRAFTED, *[partial(one_word, arrays)] * DAMAGES):
            damage(draw, limits, state)
            code, place = next(wrong(limits, state), (0, 0))
            assert check() == fault_at(code, place), f"{NAMES.get(code)} {place}: {differences(snapshot(state), before)}"
            for name, array in arrays:
                array[...] = before[name]
        if some == FEW_STATES:
            return


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
        assert state_faults(limits, state) == [message] == [describe_fault(check_in_python(limits, state)())]
        array[index] = before
    assert state_faults(limits, as_memoryviews(state)) == []


def test_a_schedulers_own_check_sees_its_memory_and_keeps_nothing(seed: int) -> None:
    """An idle engine makes a check each second for years, but CPython keeps tuples of several sizes that grew."""
    world = Simulation(seed, 100).world
    scheduler = Scheduler(world.limits, world.state)
    assert scheduler.check() == []
    blocks = sys.getallocatedblocks()
    for _ in range(500):
        scheduler.check()
    assert sys.getallocatedblocks() - blocks < 200
    page = int(world.state.pages.free[2])
    world.state.pages.refcount[page] = 1
    assert scheduler.check() == state_faults(world.limits, world.state) != []
    world.state.pages.refcount[page] = 0
    assert scheduler.check() == []


def test_what_hardly_any_damage_reaches() -> None:
    """Lists that are too long or have slots out of range; a canonical page with the key 0 or an outdated generation; more pages
    than a table has."""
    assert R.check_list([0], 1, 1, [S.RUNNING], S.RUNNING, [0])
    for slot in (-1, 1):
        assert not R.check_list([slot], 1, 1, [S.RUNNING], S.RUNNING, [0])
    assert not R.check_list([0], -1, 1, [S.RUNNING], S.RUNNING, [0])
    assert not R.check_list([0], 2, 1, [S.RUNNING], S.RUNNING, [0])
    limits = SimpleNamespace(pages=1, page_size=1, pages_per_sequence=1, max_model_len=9)
    requests = SimpleNamespace(canonical=[0], indexed=[1], canonical_generation=[4], tokens=np.array([[7]]))
    for key, fine in ((5, True), (0, True), (-1, False)):
        pages = SimpleNamespace(generation=[4], key=[key], tokens=np.array([[7]]))
        assert P.canonical_fine(limits, SimpleNamespace(pages=pages, requests=requests), 0) == fine
    fields = {"status": S.RUNNING, "computed": 1, "length": 2, "num_pages": 2, "prompt_length": 1}
    entry = np.zeros((1, E.SQ_ENTRY_WORDS), np.int32)
    request = SimpleNamespace(entry=entry, **{name: [value] for name, value in fields.items()})
    assert R.check_request(limits, request, 0) & CODE_MASK == R.TABLE_END


def test_a_check_is_compiled_for_what_it_is_called_with(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Compiled for the tables of limits and state, and an int64 vector for each row of its scratch: other types would need other
    code."""
    world, asked = Simulation(seed, 100).world, list[Any]()
    monkeypatch.setattr("blinkpy.kv.invariants.check_state.compiled_for", lambda function, kinds: asked.append(kinds))
    kinds = ArgumentTable(world.limits).kind, ArgumentTable(world.state).kind
    compiled_check.__wrapped__(kinds)
    assert asked == [(*kinds, *map(typeof, check_scratch(world.limits)))]


@pytest.mark.parametrize("left", [0, 1, 2])
def test_a_single_token_that_waits_beside_room_is_found(left: int) -> None:
    """A token of a best-effort prompt, in a step that is not full and leaves best effort its share."""
    simulation = Simulation(1, 100)
    changes = {"tokens": 16, "best_effort_step_tokens": 16, "mixed_tokens": 16, "burst_step_tokens": 16, "snapshots": 0}
    limits = simulation.world.limits._replace(**changes)
    state = simulation.world.state
    slot, requests = 0, state.requests
    requests.length[slot], requests.computed[slot], requests.stalled[slot] = 9 + left, 0, 0
    requests.entry[slot, E.WORD_BEST_EFFORT] = 1
    state.running[0], state.counts[S.RUNNING_COUNT], state.counts[S.YIELDED_TURNS] = slot, 1, 0
    state.batch.row_slots[0], state.batch.query_starts[:2], state.batch.counts[S.GROUPS] = slot, (0, 9), 1
    assert B.check_space(limits, state, 1, 9, 0, False) == (B.SPACE_LEFT if left else 0)
