"""A second implementation of the scheduler's invariants, over lists and sets; tests compare it with kv/invariants."""

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np

from blinkpy.device.tables import map_arrays
from blinkpy.kv import state as S
from blinkpy.kv.invariants import batch_invariants as B
from blinkpy.kv.invariants import page_invariants as P
from blinkpy.kv.invariants import request_invariants as R
from blinkpy.kv.invariants import snapshot_invariants as N
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.queues import byte_automaton as A
from blinkpy.queues.submission import SQ_ENTRY, SUBMIT_NO_PREFIX_CACHE, SUBMIT_SCORE_PROMPT, WORD_BEST_EFFORT
from blinkpy.queues.token_rules import MARK, MARK_WORD
from blinkpy.verify.oracle.grammar_rules import positions_after
from blinkpy.verify.oracle.oracle_state import Request

Wrong = Iterator[tuple[int, int]]  # (fault code, place)


def wrong(limits: Limits, state: State) -> Wrong:
    """All violations, the worst first. Later checks rely on earlier ones, so after a violation they may be meaningless or
    raise."""
    unchecked = dict.fromkeys(("inbox", "forecast", "recorder", "scratch", "fault"), ())
    plain = map_arrays(lambda array: np.asarray(array).tolist(), state._replace(**unchecked))
    for group in (_lists, _requests, _pages, _ring, _index, _snapshots, _pairs, _batch):
        yield from group(limits, plain)


def _lists(limits: Limits, state: Any) -> Wrong:
    r, counts = state.requests, state.counts
    if counts[S.UNRANKED_COUNT]:
        yield R.UNRANKED, 0
    for slot, status in enumerate(r.status):
        if status not in (S.EMPTY, S.WAITING, S.RUNNING, S.FINISHING):
            yield R.NO_STATUS, slot
    for code, listed, n, most, status in (
        (R.RUNNING_LIST, state.running, counts[S.RUNNING_COUNT], limits.rows, S.RUNNING),
        (R.WAITING_LIST, state.waiting, counts[S.WAITING_COUNT], limits.slots, S.WAITING),
        (R.FINISHING_LIST, state.finishing, counts[S.FINISHING_COUNT], limits.slots, S.FINISHING),
    ):
        if not 0 <= n <= most or sorted(listed[:n]) != [slot for slot, its in enumerate(r.status) if its == status]:
            yield code, 0
    order = [(r.rank[slot], r.arrival[slot]) for slot in state.waiting[: counts[S.WAITING_COUNT]]]
    for i, (before, after) in enumerate(pairwise(order), 1):
        if before > after:
            yield R.UNSORTED, i


def _requests(limits: Limits, state: Any) -> Wrong:
    r, total, page = state.requests, limits.pages_per_sequence, limits.page_size
    entries = np.array(r.entry, np.int32).view(SQ_ENTRY).reshape(-1)
    for slot, status in enumerate(r.status):
        running, waiting = status == S.RUNNING, status == S.WAITING
        computed, length, held, table = r.computed[slot], r.length[slot], r.num_pages[slot], r.page_table[slot]
        scored, prompt = bool(entries["flags"][slot] & SUBMIT_SCORE_PROMPT), r.prompt_length[slot]
        live_tokens = set(r.tokens[slot][: max(0, length, prompt)]) if running or waiting else set()
        for code, broken in {
            R.PROMPT_LONGER: (running or waiting) and (prompt < 1 or length < 1 or (prompt > length and not scored)),
            R.CONTEXT_EXCEEDED: (running or waiting) and (length > limits.max_model_len or prompt > limits.max_model_len),
            R.NOTHING_TO_COMPUTE: computed < 0 or (running and computed >= length),
            R.IDLE_CACHE: computed != 0 and status in (S.WAITING, S.FINISHING),
            R.IDLE_PAGES: held != 0 and not running,
            R.MORE_COMPUTED: computed > held * page,
            R.TABLE_END: [entry >= 0 for entry in table] != [True] * held + [False] * (total - held),
            R.TABLE_RANGE: not set(table) <= set(range(-1, limits.pages)),
            R.INDEXED_BEYOND: running and r.indexed[slot] > held,
            R.INDEXED_COMPUTED: running and r.indexed[slot] * page > computed,
            R.IDLE_STALLED: r.stalled[slot] != 0 and not running,
            R.TENANT_ROW: (running or waiting) and r.tenant_row[slot] not in range(limits.slots),
            R.VOCABULARY: not live_tokens <= set(range(limits.vocab_size)),
        }.items():
            if broken:
                yield code, slot
        if running or waiting:
            yield from _grammar(limits, state, slot, entries[slot])
            yield from _rules(limits, state, slot, entries[slot])
    if sum(map(bool, r.stalled)) != state.counts[S.STALLED_COUNT]:
        yield R.STALLED_WRONG, 0
    flexible = [slot for slot, status in enumerate(r.status) if status == S.RUNNING and r.entry[slot][WORD_BEST_EFFORT]]
    bound = limits.best_effort_pages
    if len(flexible) > 1 and bound < limits.pages and sum(r.num_pages[slot] for slot in flexible) > bound:
        yield R.BEST_EFFORT_PAGES, 0


def _grammar(limits: Limits, state: Any, slot: int, entry: Any) -> Wrong:
    r, own = state.requests, state.requests.grammar[slot]
    if (own == -1) != (entry["grammar_words"] == 0):
        yield R.GRAMMAR_LOST, slot
    if own == -1:
        return
    if not _owns(limits, state, slot, own, entry["grammar_digest"]):
        yield R.GRAMMAR_FOREIGN, slot
    if not _is_position(list(state.grammars.words[own]), int(r.grammar_state[slot])):
        yield R.GRAMMAR_STATE, slot


def _is_position(words: list[int], position: int) -> bool:
    state, count = position % (1 << A.COUNT_SHIFT), position >> A.COUNT_SHIFT
    if position < 0 or state not in range(words[A.STATES_WORD]):
        return False
    if A.packed_words(words[A.STATES_WORD], words[A.CLASSES_WORD], words[A.STATES_WORD] - words[A.COUNTED_WORD]) > len(words):
        return False
    if state < words[A.COUNTED_WORD]:
        return count == 0
    loops = words[A.packed_words(words[A.STATES_WORD], words[A.CLASSES_WORD]) :]
    most = loops[A.LOOP_WORDS * (state - words[A.COUNTED_WORD]) + A.LOOP_MOST]
    return count <= most if state >= words[A.HUBS_WORD] else count < most


def _rules(limits: Limits, state: Any, slot: int, entry: Any) -> Wrong:
    own = state.requests.rules[slot]
    if (own == -1) != (entry["rules_words"] == 0):
        yield R.RULES_LOST, slot
    if own == -1:
        return
    if not _owns(limits, state, slot, own, entry["rules_digest"]) or state.grammars.words[own][MARK_WORD] != MARK:
        yield R.RULES_FOREIGN, slot


def _owns(limits: Limits, state: Any, slot: int, own: int, digest: int) -> bool:
    """Whether a grammar slot of the request's queue pair holds an entry with this digest."""
    g, share, pair = state.grammars, limits.grammar_share, state.requests.pair[slot]
    return own in range(pair * share, (pair + 1) * share) and (g.epoch[own], g.digest[own]) == (state.pairs.epoch[pair], digest)


def _pages(limits: Limits, state: Any) -> Wrong:
    pages, tables = state.pages, [[page for page in table if page >= 0] for table in state.requests.page_table]
    for slot, table in enumerate(tables):
        if len(set(table)) < len(table):
            yield P.HELD_TWICE, slot
    holders = Counter(page for table in tables for page in table)
    for page, key in enumerate(pages.key):
        if pages.refcount[page] != holders[page]:
            yield P.REFERENCES, page
        if holders[page] > 1 and key < 0:
            yield P.SHARED_UNINDEXED, page
    n = state.counts[S.FREE_COUNT]
    if n not in range(limits.pages + 1):
        yield P.FREE_WRONG, 0
    free = pages.free[:n]
    for i, page in enumerate(free):
        if page not in range(limits.pages):
            yield P.FREE_RANGE, i
        if page in free[:i]:
            yield P.FREE_TWICE, page
        if pages.key[page] >= 0:
            yield P.FREE_INDEXED, page
    cached = {page for page, position in enumerate(pages.ring_position) if position >= 0}
    for page, key in enumerate(pages.key):
        if page in cached and key < 0:
            yield P.CACHED_UNINDEXED, page
        if [page in free, page in cached, page in holders].count(True) != 1:
            yield P.ONE_OF, page
    if len(cached) != state.counts[S.CACHED_COUNT]:
        yield P.CACHED_WRONG, 0


def _ring(limits: Limits, state: Any) -> Wrong:
    pages, (head, tail) = state.pages, (state.counts[S.RING_HEAD], state.counts[S.RING_TAIL])
    if head < 0 or tail - head not in range(limits.ring_entries + 1):
        yield P.RING_LONG, 0
    for page, position in enumerate(pages.ring_position):
        if position >= 0 and position not in range(head, tail):
            yield P.RING_OUTSIDE, page
        if position >= 0 and pages.ring[position % limits.ring_entries] != page:
            yield P.RING_ENTRY, page


def _index(limits: Limits, state: Any) -> Wrong:
    pages, r, indexed = state.pages, state.requests, set[int]()
    for bucket, page in enumerate(pages.bucket_head):
        before = -1
        while page >= 0:
            if page >= limits.pages or page in indexed:
                yield P.CHAIN_TWICE, bucket
            if pages.key[page] < 0 or pages.key[page] % limits.index_buckets != bucket:
                yield P.CHAIN_BUCKET, page
            if pages.bucket_previous[page] != before:
                yield P.CHAIN_LINKS, page
            indexed.add(page)
            before, page = page, pages.bucket_next[page]
    for page, key in enumerate(pages.key):
        if (page in indexed) != (key >= 0):
            yield P.KEY_UNINDEXED, page
        if pages.parent[page] not in {*range(-1, limits.pages)} - {page}:
            yield P.PARENT_RANGE, page
    for slot in (slot for slot, status in enumerate(r.status) if status == S.RUNNING and r.indexed[slot] > 0):
        page, end = r.canonical[slot], r.indexed[slot] * limits.page_size
        stands = page in range(limits.pages) and pages.generation[page] == r.canonical_generation[slot]
        same = stands and pages.key[page] >= 0 and pages.tokens[page] == r.tokens[slot][end - limits.page_size : end]
        if page not in {*range(limits.pages), S.CHAIN_EVICTED} or (stands and not same):
            yield P.CANONICAL, slot


def _snapshots(limits: Limits, state: Any) -> Wrong:
    n, pages, r, places = state.snapshots, state.pages, state.requests, range(limits.snapshots)
    for place in places:
        if n.page[place] not in range(-1, limits.pages):
            yield N.SNAPSHOT_RANGE, place
    for page, place in enumerate(n.of_page if places else []):
        if place not in (-1, *places):
            yield N.PAGE_SNAPSHOT, page
    valid = {place for place in places if n.page[place] >= 0 and n.generation[place] == pages.generation[n.page[place]]}
    pending = Counter[int]()
    for slot, (source, target) in enumerate(zip(r.snapshot_source, r.snapshot_target, strict=True)):
        pending.update([source, target])
        if not {source, target} <= {-1, *places}:
            yield N.COPY_RANGE, slot
        if (source, target) != (-1, -1) and r.status[slot] != S.RUNNING:
            yield N.COPY_IDLE, slot
        last, rest = divmod(r.computed[slot], limits.page_size)
        if source >= 0 and (source not in valid or rest or last == 0 or n.page[source] != r.page_table[slot][last - 1]):
            yield N.SOURCE_WRONG, slot
        if target >= 0 and (n.page[target], n.pins[target]) != (-1, 1):
            yield N.TARGET_USED, slot
    for place in places:
        if place in valid and (pages.key[n.page[place]] < 0 or n.of_page[n.page[place]] != place):
            yield N.SNAPSHOT_UNINDEXED, place
        if n.pins[place] != pending[place]:
            yield N.SNAPSHOT_PINS, place


def _next_end(limits: Limits, r: Any, slot: int) -> int:
    """The position at which a request's chunk must end."""
    length, computed, size = r.length[slot], r.computed[slot], limits.page_size
    cached = not np.array(r.entry[slot], np.int32).view(SQ_ENTRY)[0]["flags"] & SUBMIT_NO_PREFIX_CACHE
    if not (limits.snapshots and limits.prefix_caching and cached) or r.canonical[slot] == S.CHAIN_EVICTED:
        return int(length)
    distance = limits.snapshot_tokens
    early = {end for end in ((length - 2) // size * size, r.snapshot_branch[slot]) if computed < end >= distance // 16}
    return int(min(length, *early, computed + distance - computed % distance))


def _pairs(limits: Limits, state: Any) -> Wrong:
    p, r = state.pairs, state.requests
    for pair in range(limits.pairs):
        if p.sq_tail[pair] - p.sq_head[pair] not in range(limits.sq_entries + 1):
            yield R.SUBMISSIONS, pair
        if p.cq_tail[pair] - p.cq_head[pair] not in range(limits.cq_entries + 1):
            yield R.COMPLETIONS, pair
    for slot, status in enumerate(r.status):
        if status != S.EMPTY and p.attached[r.pair[slot]] != 1:
            yield R.OWNERLESS, slot


def _legal_draft(limits: Limits, state: Any, slot: int, ahead: int) -> bool:
    """Whether a request's grammar allows draft number `ahead` after the previous drafts, and leads to the stored position.
    TOKEN_WRONG covers drafts outside the vocabulary."""
    r, g, own, length = state.requests, state.grammars, state.requests.grammar[slot], state.requests.length[slot]
    draft, places = r.tokens[slot][length + ahead - 1], r.draft_states[slot]
    if own < 0 or draft not in range(limits.vocab_size):
        return True
    words, memory = g.words[own], np.array(g.token_bytes, np.int32).tobytes()
    size = A.packed_words(words[A.STATES_WORD], words[A.CLASSES_WORD], words[A.STATES_WORD] - words[A.COUNTED_WORD])
    grammar = A.ByteAutomaton.of_words(np.array(words[:size], np.int32))
    before = r.grammar_state[slot] if ahead == 1 else places[(length + ahead - 1) % S.DRAFT_PLACES]
    request = Request(slot, 0, 0, grammar=grammar, grammar_state=before)
    pieces = [memory[4 * first : 4 * first + count] for first, count in g.token_place]
    found = positions_after(SimpleNamespace(pieces=pieces), request, [draft])  # type: ignore[arg-type]
    return found == [places[(length + ahead) % S.DRAFT_PLACES]]


def _ahead(b: Any, row: int) -> int:
    """The number of drafts between a row and the row of its request."""
    return next(n for n in range(row + 1) if n == row or b.emits[row - n] != S.DRAFT)


def _lacks_several(r: Any, slot: int) -> bool:
    return int(r.length[slot] - r.computed[slot]) > 1


def _input(limits: Limits, state: Any, b: Any, stalled: int) -> Wrong:
    """The input of the next step, or of a suspended step."""
    r, (rows, tokens, decodes) = state.requests, b.counts[: S.DECODE_ROWS + 1]
    ranges = [range(*b.query_starts[row : row + 2]) for row in range(rows)]
    for row, (slot, places) in enumerate(zip(b.row_slots[:rows], ranges, strict=True)):
        if slot not in range(limits.slots) or r.status[slot] != S.RUNNING:
            yield B.ROW_IDLE, row
        ahead = _ahead(b, row)
        if b.emits[row] == S.DRAFT:
            first = row - ahead
            own = ahead > 0 and first >= decodes and b.emits[first] == 1 and {*b.row_slots[row - 1 : row]} == {slot}
            known = ahead in range(1, limits.draft_tokens + 1) and r.length[slot] + ahead < limits.max_model_len
            if not (own and known and tokens == rows and b.counts[S.GROUPS] == 1):
                yield B.DRAFT_WRONG, row
            if not _legal_draft(limits, state, slot, ahead):
                yield B.DRAFT_ILLEGAL, row
        if slot in b.row_slots[:row] and not ahead:
            yield B.TWO_ROWS, row
        if r.stalled[slot] != stalled:
            yield B.ROW_STALLED, row
        if places.start < 0 or not places:
            yield B.ROW_EMPTY, row
        if row < decodes and len(places) > 1:
            yield B.DECODE_LONG, row
        if b.context_lengths[row] != r.computed[slot] + len(places) + ahead:
            yield B.CONTEXT_WRONG, row
    if ranges[-1].stop != tokens:
        yield B.UNCOVERED, 0
    for row, (slot, places) in enumerate(zip(b.row_slots[:rows], ranges, strict=True)):
        left = r.length[slot] - b.context_lengths[row]
        if b.emits[row] != S.DRAFT and (left < 0 or b.emits[row] != int(left == 0)):
            yield B.EMITS_WRONG, row
        if b.emits[row] != S.DRAFT and b.context_lengths[row] > _next_end(limits, r, slot):
            yield B.CHUNK_BEYOND, row
        for i, position in zip(places, range(r.computed[slot] + _ahead(b, row), b.context_lengths[row]), strict=True):
            page, offset = r.page_table[slot][position // limits.page_size], position % limits.page_size
            for code, broken in {
                B.TOKEN_ROW: b.token_rows[i] != row,
                B.TOKEN_POSITION: b.positions[i] != position,
                B.TOKEN_WRONG: b.token_ids[i] != r.tokens[slot][position] or b.token_ids[i] not in range(limits.vocab_size),
                B.TOKEN_PAGELESS: page < 0,
                B.CACHE_SLOT: b.cache_slots[i] != page * limits.page_size + offset,
                B.SHARED_WRITE: state.pages.refcount[page] != 1,
            }.items():
                if broken:
                    yield code, i


def _groups_of(limits: Limits, buckets: Any, batch: Any) -> int:
    """Groups of a cut step: in proportion to its bucket, rounded up."""
    rows, tokens = batch.counts[:2]
    sizes = zip(buckets.tokens, buckets.rows, strict=True)
    return math.ceil(limits.step_groups * min(most for most, many in sizes if most >= tokens and many >= rows) / limits.tokens)


def _groups(limits: Limits, state: Any) -> Wrong:
    """Cut steps, the suspended step, and the requests in flight."""
    r, b, kept, (rows, tokens, decodes) = state.requests, state.batch, state.suspended, state.batch.counts[: S.DECODE_ROWS + 1]
    interrupted = kept.row_slots[: kept.counts[S.ROWS]]
    in_flight = [*interrupted, *(b.row_slots[:rows] if b.counts[S.GROUPS] > 1 else [])]
    if r.stalled.count(S.IN_FLIGHT) != len(in_flight):
        yield B.FLIGHT_WRONG, 0
    flexible = any(r.entry[slot][WORD_BEST_EFFORT] and _lacks_several(r, slot) for slot in b.row_slots[decodes:rows])
    groups = _groups_of(limits, state.buckets, b) if flexible and tokens > limits.cut_tokens and not interrupted else 1
    if rows and (b.counts[S.GROUPS] != groups or b.counts[S.GROUP] not in range(groups)):
        yield B.GROUPS_WRONG, 0
    if interrupted:
        groups = _groups_of(limits, state.buckets, kept)
        if kept.counts[S.GROUPS] != groups or kept.counts[S.GROUP] not in range(1, groups):
            yield B.GROUPS_WRONG, 0
        if not rows or b.counts[S.GROUPS] != 1 or state.counts[S.INTERRUPTIONS] not in range(1, limits.suspend_steps + 1):
            yield B.NESTED, 0
    for pair, reserved in enumerate(state.pairs.reserved):
        emits = zip(interrupted, kept.emits, strict=False)
        taken = sum(emit for slot, emit in emits if r.pair[slot] == pair)
        if reserved != taken or state.pairs.cq_tail[pair] - state.pairs.cq_head[pair] + taken > limits.cq_entries:
            yield B.RESERVED_WRONG, pair


def _batch(limits: Limits, state: Any) -> Wrong:
    b, r, (rows, tokens, decodes) = state.batch, state.requests, state.batch.counts[: S.DECODE_ROWS + 1]
    suspended = state.suspended.counts[S.ROWS] > 0
    for own in b.counts[:3], state.suspended.counts[:3]:
        if not (own[2] in range(own[0] + 1) and own[0] in range(limits.rows + 1) and own[1] in range(own[0], limits.tokens + 1)):
            yield B.BATCH_SIZE, 0
    if suspended and limits.step_groups == 1:
        yield B.BATCH_SIZE, 0
    part = S.IN_FLIGHT if b.counts[S.GROUPS] > 1 else 0
    if rows:
        yield from _input(limits, state, b, part)
    if suspended:
        yield from _input(limits, state, state.suspended, S.IN_FLIGHT)
    yield from _groups(limits, state)
    if rows == 0:
        return
    ranges = [range(*b.query_starts[row : row + 2]) for row in range(rows)]
    chunks = b.row_slots[decodes:rows]
    yielding = set[int]()
    prompts = [slot for slot in chunks if _lacks_several(r, slot)]
    yields = state.counts[S.YIELDED_TURNS] > 0 and not all(r.entry[slot][WORD_BEST_EFFORT] for slot in prompts)
    if suspended or yields:
        active = [slot for slot in state.running[: state.counts[S.RUNNING_COUNT]] if not r.stalled[slot]]
        yielding = {slot for slot in active if r.entry[slot][WORD_BEST_EFFORT] and r.length[slot] - r.computed[slot] > 1}
        for row, slot in enumerate(chunks, decodes):
            if r.entry[slot][WORD_BEST_EFFORT] and _lacks_several(r, slot):
                yield B.YIELDS_NOT, row
    if b.counts[S.GROUP]:
        return
    running = state.running[: state.counts[S.RUNNING_COUNT]]
    lacks = {slot: r.length[slot] - r.computed[slot] for slot in running if r.stalled[slot] in (0, part)}
    flexible = {slot for slot, missing in lacks.items() if missing > 1 and r.entry[slot][WORD_BEST_EFFORT]}
    filled = decodes + sum(len(places) for slot, places in zip(b.row_slots, ranges, strict=False) if slot in flexible)
    if filled > max(decodes, limits.best_effort_step_tokens):
        yield B.BEST_EFFORT_BEYOND, 0
    ended = {slot for row, slot in enumerate(b.row_slots[:rows]) if b.context_lengths[row] == _next_end(limits, r, slot)}
    ended |= {slot for row, slot in enumerate(b.row_slots[:rows]) if b.emits[row]}
    barred = flexible if yielding or filled == limits.best_effort_step_tokens else set()
    full = {limits.tokens} | ({limits.mixed_tokens, limits.burst_step_tokens} if decodes else set())
    if suspended or state.counts[S.YIELDED_TURNS] > 0:
        full.update(range(limits.sensitive_step_tokens, limits.tokens))
        if chunks and b.context_lengths[decodes] == _next_end(limits, r, chunks[0]):
            full.update(range(decodes + limits.sensitive_step_tokens // 2, limits.tokens))
    if set(lacks) - ended - barred and tokens not in full:
        yield B.SPACE_LEFT, 0
