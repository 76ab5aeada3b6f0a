"""Each clause of each invariant, on both sides of its bound: one valid state, and small changes of it.

In plain Python, with known changes; test_integrity.py has storms and the compiled check.

Supports claim state/checks.
"""

from typing import Any

import numpy as np
from support.invariant_reference import wrong
from support.scheduler_cases import case_sizes

from blinkpy.device.expect import fault_at
from blinkpy.device.tables import as_memoryviews
from blinkpy.kv import state as S
from blinkpy.kv.invariants import batch_invariants as B
from blinkpy.kv.invariants import page_invariants as P
from blinkpy.kv.invariants import request_invariants as R
from blinkpy.kv.invariants import snapshot_invariants as N
from blinkpy.kv.invariants.check_state import check_state
from blinkpy.kv.limits import Limits, make_limits_by_name
from blinkpy.kv.state_memory import make_state
from blinkpy.queues import submission as E
from blinkpy.queues.byte_automaton import (
    BYTES,
    COUNTED_WORD,
    DEAD,
    HUBS_WORD,
    LOOP_MOST,
    STATES_WORD,
    ByteAutomaton,
    packed_words,
    position_of,
)
from blinkpy.queues.token_rules import MARK

DIGEST = 0x5_8765_4321  # the sign of its low word is set
# Slots 0, 1, 2 and 7 run: one decodes, has a grammar and two full pages; one shares the first of these; one is stalled; the last
# one's chain was evicted. 4 and 5 wait, 4 with a grammar and token rules; 6 is finishing, the others are empty.
STATE = f"""
r.status[:8] = 2, 2, 2, 0, 1, 1, 3, 2
r.prompt_length[:8] = 5, 12, 3, 0, 4, 3, 3, 6
r.length[:8] = 9, 12, 9, 0, 4, 7, 5, 6
r.computed[:8] = 8, 4, 7, 0, 0, 0, 0, 4
r.num_pages[:8] = 3, 3, 2, 0, 0, 0, 0, 2
r.page_table[0, :3], r.page_table[1, :3], r.page_table[2, :2], r.page_table[7, :2] = (3, 4, 6), (3, 5, 7), (8, 9), (13, 12)
r.indexed[:2], r.canonical[:2], r.indexed[7], r.canonical[7] = (2, 1), (4, 3), 1, {S.CHAIN_EVICTED}
r.tokens[0, :9], r.tokens[1, :12], r.tokens[7, :6] = range(1, 10), range(1, 13), range(20, 26)
r.rank[4:6], r.arrival[4:6] = (7, 7), (1, 2)
r.stalled[2] = 1
r.entry[0, GRAMMAR_WORDS], longs[0, GRAMMAR_DIGEST], r.grammar[0], r.grammar_state[0] = 9, {DIGEST}, 1, 1
r.entry[4, GRAMMAR_WORDS], longs[4, GRAMMAR_DIGEST], r.grammar[4] = 9, {DIGEST}, 2
r.entry[4, RULES_WORDS], longs[4, RULES_DIGEST], r.rules[4] = 9, {DIGEST} + 1, 3
g.epoch[:4], g.digest[:4], g.words[:4, {STATES_WORD}] = (3, 3, 5, 5), {DIGEST}, (2, 2, 1, {MARK})
g.words[:3, {COUNTED_WORD}], g.words[:3, {HUBS_WORD}] = (2, 2, 1), (2, 2, 1)
g.digest[3] += 1
q.epoch[:], q.attached[:] = (3, 5, 9), (1, 1, 0)
q.sq_head[:], q.sq_tail[:], q.cq_head[:], q.cq_tail[:] = 7, (7, 11, 9), 20, (36, 20, 21)
p.free[:] = 0, 1, 2, 15, 14, *[-9] * 11
p.refcount[3:14] = 2, 1, 1, 1, 1, 1, 1, 0, 0, 1, 1
p.generation[:], r.canonical_generation[:2] = range(40, 56), (44, 43)
p.key[[3, 4, 10, 11]] = 0, 32, 7, 0
p.tokens[3], p.tokens[4] = range(1, 5), range(5, 9)
p.parent[[4, 10, 11]] = 3, 3, 10
p.bucket_head[0], p.bucket_next[[4, 3]], p.bucket_previous[[3, 11]], p.bucket_head[7] = 4, (3, 11), (4, 3), 10
p.ring[5:8], p.ring_position[10:12] = (4, 10, 11), (70, 71)
c[[RUNNING_COUNT, WAITING_COUNT, FINISHING_COUNT, STALLED_COUNT, FREE_COUNT, CACHED_COUNT]] = 4, 2, 1, 1, 5, 2
c[[RING_HEAD, RING_TAIL]] = 69, 72
state.running[:], state.waiting[:2], state.finishing[:1] = (1, 0, 2, 7), (4, 5), 6
rows(0, 7, 1)
"""
# For any pages of a request.
ALL_IS_WELL = """
0 0: pass
0 0: rename(0, 3)
0 0: rename(0, 7)
0 0: rename(0, 10)
0 0: rename(0, 11)
0 0: rename(0, 13)
0 0: rename(15, 3)
0 0: rename(15, 7)
0 0: rename(15, 11)
"""
LISTS = """
UNRANKED 0: c[UNRANKED_COUNT] = 1
NO_STATUS 3: r.status[3] = -1
NO_STATUS 6: r.status[6] = 4
RUNNING_LIST 0: state.running[3] = 0
RUNNING_LIST 0: c[RUNNING_COUNT] = 3
RUNNING_LIST 0: c[RUNNING_COUNT] = -1
RUNNING_LIST 0: state.running[3] = 4
RUNNING_LIST 0: state.running[3] = -1
RUNNING_LIST 0: state.running[3] = -5
RUNNING_LIST 0: state.running[3] = 12
WAITING_LIST 0: state.waiting[1] = 4
WAITING_LIST 0: c[WAITING_COUNT] = 13
WAITING_LIST 0: state.waiting[1] = 7
FINISHING_LIST 0: c[FINISHING_COUNT] = 0
FINISHING_LIST 0: state.finishing[0] = 3
0 0: r.rank[5] = 8; r.arrival[5] = 0
0 0: r.arrival[5] = 1
UNSORTED 1: r.rank[5] = 6
UNSORTED 1: r.arrival[5] = 0
"""
ONE_REQUEST = f"""
PROMPT_LONGER 4: r.prompt_length[4] = 0
PROMPT_LONGER 1: r.prompt_length[1] = 0
0 0: r.prompt_length[4] = 1
PROMPT_LONGER 4: r.prompt_length[4] = 5
PROMPT_LONGER 0: r.prompt_length[0] = 10
0 0: r.prompt_length[4] = 5; scored(4)
0 0: r.length[4] = 1; scored(4)
PROMPT_LONGER 4: r.length[4] = 0; scored(4)
0 0: r.prompt_length[6] = 9
0 0: r.length[5] = 16
CONTEXT_EXCEEDED 5: r.length[5] = 17
CONTEXT_EXCEEDED 4: r.prompt_length[4] = 17; scored(4)
0 0: r.prompt_length[4] = 16; scored(4)
CONTEXT_EXCEEDED 2: r.length[2] = 17
0 0: r.length[6] = 17
NOTHING_TO_COMPUTE 3: r.computed[3] = -1
NOTHING_TO_COMPUTE 4: r.computed[4] = -1
NOTHING_TO_COMPUTE 2: r.length[2] = 7
0 0: r.length[2] = 8
IDLE_CACHE 5: r.computed[5] = 7
IDLE_CACHE 6: r.computed[6] = 1
MORE_COMPUTED 3: r.computed[3] = 1
IDLE_PAGES 4: r.num_pages[4] = 1
IDLE_PAGES 6: r.num_pages[6] = -1
IDLE_PAGES 3: r.num_pages[3] = 1
0 0: r.computed[2] = 8
MORE_COMPUTED 2: r.computed[2] = 9; r.length[2] = 10
TABLE_END 2: r.num_pages[2] = 3
TABLE_END 1: longer(9); r.num_pages[1] = 5
TABLE_END 2: r.num_pages[2] = 1; r.computed[2] = 4
TABLE_END 3: r.page_table[3, 0] = 0
TABLE_RANGE 3: r.page_table[3, 3] = -2
TABLE_RANGE 2: r.page_table[2, 1] = 16
REFERENCES 9: r.page_table[2, 1] = 15
0 0: r.computed[2] = 8; r.indexed[2] = 2; r.canonical[2] = {S.CHAIN_EVICTED}
INDEXED_COMPUTED 2: r.indexed[2] = 2; r.canonical[2] = {S.CHAIN_EVICTED}
INDEXED_BEYOND 2: r.computed[2] = 8; r.indexed[2] = 3
0 0: r.indexed[4] = 3
IDLE_STALLED 4: r.stalled[4] = 1
IDLE_STALLED 3: r.stalled[3] = -1
STALLED_WRONG 0: c[STALLED_COUNT] = 0
STALLED_WRONG 0: c[STALLED_COUNT] = 2
TENANT_ROW 4: r.tenant_row[4] = 12
TENANT_ROW 7: r.tenant_row[7] = -1
0 0: r.tenant_row[4] = 11; r.tenant_row[6] = 12
VOCABULARY 4: r.tokens[4, 3] = 50
0 0: r.tokens[4, 3] = 49; r.tokens[4, 4] = 50
VOCABULARY 5: r.tokens[5, 6] = -1
VOCABULARY 2: r.tokens[2, 0] = 50
VOCABULARY 4: r.prompt_length[4] = 6; scored(4); r.tokens[4, 5] = 50
0 0: r.tokens[6] = 50; r.tokens[3] = -1
"""
GRAMMARS_AND_RULES = f"""
GRAMMAR_LOST 0: r.entry[0, GRAMMAR_WORDS] = 0
GRAMMAR_LOST 4: r.grammar[4] = -1
GRAMMAR_LOST 2: r.entry[2, GRAMMAR_WORDS] = -1
GRAMMAR_LOST 2: r.grammar[2] = 0
0 0: r.grammar[0] = 0
0 0: r.entry[6, GRAMMAR_WORDS] = 1; r.rules[3] = 1
GRAMMAR_FOREIGN 0: r.grammar[0] = 2; g.epoch[2] = 3
GRAMMAR_FOREIGN 0: r.grammar[0] = -2
GRAMMAR_FOREIGN 4: r.grammar[4] = 0; g.epoch[0] = 5
GRAMMAR_FOREIGN 4: g.epoch[2] = 3
GRAMMAR_FOREIGN 0: g.digest[1] += 1
GRAMMAR_FOREIGN 0: g.digest[1] ^= 1 << 33
0 0: r.grammar_state[0] = 0
GRAMMAR_STATE 0: r.grammar_state[0] = 2
GRAMMAR_STATE 4: r.grammar_state[4] = -1
GRAMMAR_STATE 0: r.grammar_state[0] = 1 << 15
GRAMMAR_STATE 0: r.grammar_state[0] = 1 << 16
0 0: string(1, 1); r.grammar_state[0] = 1 + (3 << 16)
GRAMMAR_STATE 0: string(1, 1); r.grammar_state[0] = 1 + (4 << 16)
GRAMMAR_STATE 0: string(1, 1); r.grammar_state[0] = 1 << 16
0 0: string(1, 2); r.grammar_state[0] = 1 + (2 << 16)
GRAMMAR_STATE 0: string(1, 2); r.grammar_state[0] = 1 + (3 << 16)
GRAMMAR_STATE 0: g.words[1, {COUNTED_WORD}] = -9999
GRAMMAR_STATE 4: r.grammar[4] = 3; longs[4, GRAMMAR_DIGEST] += 1
RULES_LOST 4: r.rules[4] = -1
RULES_LOST 0: r.entry[0, RULES_WORDS] = 1
RULES_LOST 5: r.rules[5] = 3
RULES_FOREIGN 4: r.rules[4] = 1
RULES_FOREIGN 4: g.epoch[3] = 3
RULES_FOREIGN 4: longs[4, RULES_DIGEST] = {DIGEST}
RULES_FOREIGN 4: g.words[3, {STATES_WORD}] = 1
RULES_FOREIGN 4: r.rules[4] = 2; longs[4, RULES_DIGEST] -= 1
0 0: best_effort(0, 1, 2, 7)
BEST_EFFORT_PAGES 0: best_effort(0, 1, 2, 7); longer(8)
0 0: best_effort(0, 2, 7); longer(9); rows(0, 7, 1)
"""
PAGES = """
HELD_TWICE 2: r.page_table[2, 1] = 8
REFERENCES 9: p.refcount[9] = 2
REFERENCES 0: p.refcount[0] = 1
REFERENCES 15: p.refcount[15] = -1
SHARED_UNINDEXED 3: p.key[3] = -1
FREE_WRONG 0: c[FREE_COUNT] = -1
FREE_WRONG 0: c[FREE_COUNT] = 17
FREE_RANGE 4: p.free[4] = 16
FREE_RANGE 0: p.free[0] = -1
FREE_TWICE 2: p.free[4] = 2
FREE_INDEXED 1: p.key[1] = 0
CACHED_UNINDEXED 10: p.key[10] = -1
CACHED_UNINDEXED 8: p.ring_position[8] = 0
ONE_OF 8: p.ring_position[8] = 0; p.key[8] = 9
ONE_OF 14: c[FREE_COUNT] = 4
0 0: hold_all()
ONE_OF 8: p.free[4] = 8
ONE_OF 11: p.ring_position[11] = -1
CACHED_WRONG 0: c[CACHED_COUNT] = 1
CACHED_WRONG 0: c[CACHED_COUNT] = 3
"""
RING = """
0 0: c[RING_TAIL] = 133
RING_LONG 0: c[RING_TAIL] = 134
RING_LONG 0: c[RING_HEAD] = -1
RING_LONG 0: c[RING_TAIL] = 68
0 0: c[RING_HEAD] = 70
0 0: c[RING_HEAD] = 0; c[RING_TAIL] = 2; p.ring_position[10:12] = 0, 1; p.ring[:2] = 10, 11
RING_OUTSIDE 10: c[RING_HEAD] = 71
RING_OUTSIDE 11: c[RING_TAIL] = 71
RING_OUTSIDE 10: p.ring_position[10] = 0
RING_ENTRY 10: p.ring[6] = 11
RING_ENTRY 11: p.ring_position[11] = 70
"""
PREFIX_INDEX = f"""
CHAIN_TWICE 0: p.bucket_next[11] = 16
CHAIN_TWICE 0: p.bucket_next[3] = 4
CHAIN_TWICE 7: p.bucket_next[10] = 3
CHAIN_BUCKET 10: p.key[10] = 8
CHAIN_BUCKET 5: p.bucket_head[9] = 5
CHAIN_BUCKET 3: p.key[3] = 48 + 1
CHAIN_BUCKET 5: p.bucket_head[15] = 5
CHAIN_LINKS 3: p.bucket_previous[3] = -1
CHAIN_LINKS 11: p.bucket_previous[11] = 10
KEY_UNINDEXED 5: p.key[5] = 5
KEY_UNINDEXED 3: p.bucket_next[4] = -1
PARENT_RANGE 15: p.parent[15] = 16
PARENT_RANGE 0: p.parent[0] = -2
PARENT_RANGE 9: p.parent[9] = 9
0 0: p.parent[9] = 15; p.parent[8] = 0
CANONICAL 0: r.canonical[0] = 3; r.canonical_generation[0] = 43
CANONICAL 0: r.canonical[0] = 16
CANONICAL 1: r.canonical[1] = -1
CANONICAL 1: r.canonical[1] = -3
0 0: r.canonical[1] = {S.CHAIN_EVICTED}
0 0: p.generation[4] += 1; p.tokens[4] = 0
CANONICAL 1: r.canonical[1] = 5; r.canonical_generation[1] = 45; p.tokens[5] = p.tokens[3]
CANONICAL 0: p.tokens[4, 0] = 0
CANONICAL 0: p.tokens[4, 3] = 0
CANONICAL 1: p.tokens[3, 3] = 0
0 0: r.indexed[5] = 1; r.canonical[5] = 16
0 0: r.canonical[2] = -1; r.indexed[2] = -1
CANONICAL 7: r.canonical[7] = -1
"""
QUEUE_PAIRS = """
SUBMISSIONS 1: q.sq_tail[1] = 12
SUBMISSIONS 0: q.sq_tail[0] = 6
COMPLETIONS 0: q.cq_tail[0] = 37
COMPLETIONS 2: q.cq_tail[2] = 19
OWNERLESS 4: q.attached[1] = 0
OWNERLESS 0: q.attached[0] = 2
OWNERLESS 8: r.status[8] = 3; c[FINISHING_COUNT] = 2; state.finishing[1] = 8
"""
ROWS_OF_A_BATCH = """
BATCH_SIZE 0: b.counts[DECODE_ROWS] = -1
BATCH_SIZE 0: b.counts[DECODE_ROWS] = 4
BATCH_SIZE 0: b.counts[ROWS] = 5
BATCH_SIZE 0: b.counts[TOKENS] = 2
BATCH_SIZE 0: b.counts[TOKENS] = 15
0 0: b.counts[[ROWS, TOKENS, DECODE_ROWS]] = 0
BATCH_SIZE 0: b.counts[[ROWS, TOKENS, DECODE_ROWS]] = 0, -1, 0
ROW_IDLE 1: b.row_slots[1] = -1
ROW_IDLE 1: b.row_slots[1] = 12
ROW_IDLE 1: b.row_slots[1] = -5
ROW_IDLE 1: b.row_slots[1] = 4
TWO_ROWS 1: b.row_slots[1] = 0
ROW_STALLED 1: b.row_slots[1] = 2
ROW_STALLED 0: r.stalled[:3] = 1, 0, 0
ROW_EMPTY 2: b.query_starts[3] = 3
ROW_EMPTY 0: b.query_starts[0] = -1
ROW_EMPTY 1: b.query_starts[2] = 0
DECODE_LONG 1: b.counts[DECODE_ROWS] = 2
DECODE_LONG 0: b.query_starts[1] = 2
0 0: b.counts[DECODE_ROWS] = 0
CONTEXT_WRONG 2: b.context_lengths[2] = 11
CONTEXT_WRONG 0: b.context_lengths[0] = 10
UNCOVERED 0: b.counts[TOKENS] = 12
UNCOVERED 0: b.counts[TOKENS] = 10
EMITS_WRONG 0: b.emits[0] = 0
EMITS_WRONG 1: b.emits[1] = 3
DRAFT_WRONG 0: b.emits[0] = 2
DRAFT_WRONG 1: b.emits[1] = 2
EMITS_WRONG 2: r.length[1] = 13
EMITS_WRONG 2: r.length[1] = r.prompt_length[1] = 11; b.emits[2] = 0
"""
TOKENS_OF_A_BATCH = """
TOKEN_ROW 0: b.token_rows[0] = 1
TOKEN_ROW 10: b.token_rows[10] = 1
0 0: b.token_rows[11] = 2
TOKEN_POSITION 2: b.positions[2] = 0
TOKEN_POSITION 10: b.positions[10] = 12
TOKEN_WRONG 0: b.token_ids[0] = 8
TOKEN_WRONG 10: r.tokens[1, 11] = 0
TOKEN_PAGELESS 7: r.num_pages[1] = 2; r.page_table[1, 2] = -1; p.refcount[7] = 0; p.free[5] = 7; c[FREE_COUNT] = 6
CACHE_SLOT 0: b.cache_slots[0] = 25
CACHE_SLOT 6: b.cache_slots[6] = 20
CACHE_SLOT 3: b.cache_slots[3] = -1
SHARED_WRITE 7: index(7); r.num_pages[2] = 3; r.page_table[2, 2] = 7; p.refcount[7] = 2
"""
CLASSES_AND_SPACE = """
0 0: best_effort(0, 1, 2, 7)
0 0: c[YIELDED_TURNS] = 1
0 0: c[YIELDED_TURNS] = 1; best_effort(0, 1, 2, 7)
0 0: c[YIELDED_TURNS] = 1; best_effort(0, 2)
0 0: c[YIELDED_TURNS] = 1; best_effort(1, 7)
YIELDS_NOT 2: c[YIELDED_TURNS] = 1; best_effort(1)
YIELDS_NOT 1: c[YIELDED_TURNS] = 2; best_effort(7)
0 0: c[YIELDED_TURNS] = 1; best_effort(0); b.counts[DECODE_ROWS] = 0
0 0: best_effort(1)
0 0: c[YIELDED_TURNS] = -1; best_effort(1)
SPACE_LEFT 0: rows(0, 7)
SPACE_LEFT 0: rows(0)
SPACE_LEFT 0: c[YIELDED_TURNS] = 1; rows(0, 7)
SPACE_LEFT 0: best_effort(1); rows(0, 7)
0 0: c[YIELDED_TURNS] = 1; best_effort(1); rows(0, 7)
0 0: c[YIELDED_TURNS] = 1; best_effort(7); rows(0, 1)
0 0: c[YIELDED_TURNS] = 1; best_effort(1, 2); rows(0, 7)
SPACE_LEFT 0: c[YIELDED_TURNS] = 1; best_effort(2); rows(0, 7)
SPACE_LEFT 0: c[YIELDED_TURNS] = 1; best_effort(0, 1); rows(7)
0 0: c[YIELDED_TURNS] = 1; best_effort(1); r.prompt_length[1] = r.length[1] = 6; rows(0, 7)
SPACE_LEFT 0: c[YIELDED_TURNS] = 1; best_effort(1); r.prompt_length[1] = r.length[1] = 5; rows(0, 7)
0 0: c[YIELDED_TURNS] = 1; longer(3); rows(0, 7, 1)
SPACE_LEFT 0: c[YIELDED_TURNS] = 1; longer(2); rows(0, 7, 1)
SPACE_LEFT 0: c[YIELDED_TURNS] = 1; longer(4); rows(0, 1, 7)
SPACE_LEFT 0: longer(3); rows(0, 7, 1)
0 0: longer(11); rows(0, 7, 1)
SPACE_LEFT 0: longer(10); rows(0, 7, 1)
0 0: longer(9); rows(0, 7, 1)
SPACE_LEFT 0: longer(8); rows(0, 7, 1)
0 0: longer(7); rows(0, 7, 1)
SPACE_LEFT 0: longer(6); rows(0, 7, 1)
0 0: longer(11); rows(0, 7, 1); b.counts[DECODE_ROWS] = 0
SPACE_LEFT 0: longer(9); rows(0, 7, 1); b.counts[DECODE_ROWS] = 0
SPACE_LEFT 0: longer(7); rows(0, 7, 1); b.counts[DECODE_ROWS] = 0
0 0: best_effort(1); longer(10); rows(0, 7, 1)
0 0: best_effort(1, 7); longer(8); rows(0, 7, 1)
SPACE_LEFT 0: best_effort(1); longer(8); rows(0, 7, 1)
SPACE_LEFT 0: best_effort(7); longer(8); rows(0, 7, 1)
SPACE_LEFT 0: best_effort(1); longer(10); rows(0, 1)
0 0: best_effort(1, 7); longer(10); rows(0, 1)
BEST_EFFORT_BEYOND 0: best_effort(1); longer(11); rows(0, 7, 1)
BEST_EFFORT_BEYOND 0: best_effort(1, 7); longer(9); rows(0, 7, 1)
0 0: longer(11); rows(0, 7, 1); best_effort(0, 7)
"""
# With 3 groups for steps of more than 9 tokens, and at most 2 interrupting steps.
CUT_STEPS = """
0 0: pass
0 0: cut(0, 7, 1)
SPACE_LEFT 0: cut(7, 1)
0 0: cut(0, 7, 1); b.counts[GROUP] = 2
GROUPS_WRONG 0: cut(0, 7, 1); b.counts[GROUP] = 3
GROUPS_WRONG 0: cut(0, 7, 1); b.counts[GROUP] = -1
GROUPS_WRONG 0: best_effort(1)
GROUPS_WRONG 0: cut(0, 7, 1); r.entry[1, WORD_BEST_EFFORT] = 0
GROUPS_WRONG 0: r.length[1] = r.prompt_length[1] = 11; cut(7, 1)
0 0: r.length[1] = r.prompt_length[1] = 11; best_effort(1); rows(7, 1); r.stalled[0] = 1; c[STALLED_COUNT] = 2
GROUPS_WRONG 0: b.counts[GROUP] = 1
FLIGHT_WRONG 0: r.stalled[2] = 2
FLIGHT_WRONG 0: cut(0, 7, 1); r.stalled[2] = 2
ROW_STALLED 1: cut(0, 7, 1); r.stalled[7] = 1
0 0: cut(7, 1); b.counts[GROUP] = 1
SPACE_LEFT 0: r.length[1] = r.prompt_length[1] = 11; best_effort(1); rows(7, 1)
0 0: suspend()
0 0: suspend(); state.suspended.counts[GROUP] = c[INTERRUPTIONS] = 2
NESTED 0: suspend(); c[INTERRUPTIONS] = 0
NESTED 0: suspend(); c[INTERRUPTIONS] = 3
NESTED 0: suspend(); b.counts[:] = 0
GROUPS_WRONG 0: suspend(); state.suspended.counts[GROUP] = 0
GROUPS_WRONG 0: suspend(); state.suspended.counts[GROUP] = 3
GROUPS_WRONG 0: suspend(); state.suspended.counts[GROUPS] = 2
GROUPS_WRONG 0: suspend(); b.counts[GROUP] = 1
RESERVED_WRONG 0: suspend(); q.reserved[0] = 0
RESERVED_WRONG 1: suspend(); q.reserved[1] = 2
RESERVED_WRONG 2: suspend(); q.reserved[2] = 1
RESERVED_WRONG 0: suspend(); q.cq_tail[0] = 36
0 0: suspend(); q.cq_tail[0] = 35
BATCH_SIZE 0: suspend(); state.suspended.counts[TOKENS] = 15
BATCH_SIZE 0: state.suspended.counts[ROWS] = -1
0 0: state.suspended.counts[TOKENS] = 3
0 0: cut(0, 7, 1); state.suspended.counts[TOKENS] = 3
ROW_STALLED 1: suspend(); r.stalled[1] = 1
CONTEXT_WRONG 0: suspend(); r.computed[7] = 5
UNCOVERED 0: suspend(); state.suspended.counts[TOKENS] = 9
EMITS_WRONG 1: suspend(); state.suspended.emits[1] = 0
CACHE_SLOT 3: suspend(); state.suspended.cache_slots[3] = 0
SHARED_WRITE 0: suspend(); r.page_table[2, 1] = 12; p.refcount[[9, 12]] = 0, 2; c[FREE_COUNT] = 6; p.free[5] = 9; index(12)
0 0: suspend(); best_effort(0); b.counts[DECODE_ROWS] = 0
"""
# Slot 0 has a string of at most three characters, "a" or "b", and drafts.
DRAFTS = """
0 0: drafts(6, 6)
DRAFT_WRONG 3: drafts(6, 6, 6)
DRAFT_WRONG 1: drafts(6, 6); b.counts[DECODE_ROWS] = 1
DRAFT_WRONG 1: drafts(6, 6); b.row_slots[1] = 7
DRAFT_WRONG 1: drafts(6, 6); b.counts[TOKENS] = 4
DRAFT_ILLEGAL 1: drafts(8, 6)
0 0: drafts(6, 7)
DRAFT_ILLEGAL 2: drafts(7, 6)
DRAFT_ILLEGAL 2: drafts(6, 8)
DRAFT_ILLEGAL 1: drafts(6, 6); r.draft_states[0, 10] = 1
DRAFT_ILLEGAL 2: drafts(6, 6); r.draft_states[0, 11] += 1 << 16
DRAFT_ILLEGAL 2: drafts(6, 6); r.draft_states[0, 11] = r.draft_states[0, 10]
"""
# With 3 snapshots; `kept` gives the first to page 4.
SNAPSHOTS = """
0 0: kept()
0 0: kept(); n.page[1], n.generation[1] = 4, 43
SNAPSHOT_RANGE 1: kept(); n.page[1] = 16
SNAPSHOT_RANGE 0: kept(); n.page[0] = -2
PAGE_SNAPSHOT 9: kept(); n.of_page[9] = 3
PAGE_SNAPSHOT 0: kept(); n.of_page[0] = -2
COPY_RANGE 0: kept(); r.snapshot_source[0] = 3
COPY_RANGE 7: kept(); r.snapshot_target[7] = -2
COPY_RANGE 7: kept(); r.snapshot_target[7] = 3
COPY_RANGE 1: kept(); r.snapshot_source[1] = -2
COPY_IDLE 4: kept(); r.snapshot_source[4] = 0
COPY_IDLE 3: kept(); r.snapshot_target[3] = 1
SOURCE_WRONG 0: kept(); n.generation[0] = 43
SOURCE_WRONG 0: kept(); n.page[0], n.generation[0] = 3, 43
SOURCE_WRONG 2: kept(); r.snapshot_source[2] = 0
SOURCE_WRONG 1: kept(); r.snapshot_source[1] = 0
TARGET_USED 1: kept(); r.snapshot_target[1] = 0
TARGET_USED 1: kept(); r.snapshot_target[1] = 1
TARGET_USED 1: kept(); r.snapshot_target[1] = 1; n.pins[1] = 2
0 0: kept(); r.snapshot_target[1] = 1; n.pins[1] = 1
SNAPSHOT_UNINDEXED 1: kept(); n.page[1], n.generation[1] = 5, 45
SNAPSHOT_UNINDEXED 1: kept(); n.page[1], n.generation[1] = 3, 43
0 0: kept(); n.page[1], n.generation[1], n.of_page[3] = 3, 43, 1
SNAPSHOT_PINS 0: kept(); n.pins[0] = 0
SNAPSHOT_PINS 0: kept(); n.pins[0] = 2
SNAPSHOT_PINS 2: kept(); n.pins[2] = 1
CHUNK_BEYOND 2: kept(5)
SPACE_LEFT 0: kept(3)
CHUNK_BEYOND 2: kept(); r.snapshot_branch[1] = 7
0 0: kept(); r.snapshot_branch[1] = 4
0 0: kept(); r.snapshot_branch[1] = 9
SPACE_LEFT 0: kept(); r.canonical[1] = CHAIN_EVICTED
0 0: kept(8); r.canonical[1] = CHAIN_EVICTED
"""
CODES = {name: code for module in (B, P, R, N) for name, code in vars(module).items() if name.isupper() and isinstance(code, int)}


def names(state: Any) -> dict[str, Any]:
    """The names used in the changes."""
    r, b, pages = state.requests, state.batch, state.pages

    def scored(slot: int) -> None:
        r.entry[slot, E.WORD_FLAGS] |= E.SUBMIT_SCORE_PROMPT

    def best_effort(*slots: int) -> None:
        r.entry[list(slots), E.WORD_BEST_EFFORT] = 1

    def index(page: int) -> None:
        """Index a page, alone in bucket 9."""
        pages.key[page], pages.bucket_head[9] = 9, page

    def rows(*slots: int) -> None:
        """A batch of these slots, each with all its missing tokens, or as many as `longer` states; slot 0 decodes."""
        tokens = 0
        for row, slot in enumerate(slots):
            n = chunks.get(slot, int(r.length[slot] - r.computed[slot]))
            positions = np.arange(r.computed[slot], r.computed[slot] + n)
            these = slice(tokens, tokens + n)
            b.row_slots[row], b.context_lengths[row], b.token_rows[these] = slot, r.computed[slot] + n, row
            b.emits[row], b.query_starts[row : row + 2] = b.context_lengths[row] == r.length[slot], (tokens, tokens + n)
            b.positions[these], b.token_ids[these] = positions, r.tokens[slot, positions]
            b.cache_slots[these] = r.page_table[slot, positions // 4] * 4 + positions % 4
            tokens += n
        b.counts[:3] = len(slots), tokens, 0 in slots
        b.counts[S.GROUPS] = 1

    def cut(*slots: int) -> None:
        """A batch of these slots and slot 1, which is best-effort, in three groups."""
        best_effort(1)
        rows(*slots)
        r.stalled[list(slots)], b.counts[S.GROUPS] = S.IN_FLIGHT, 3
        state.counts[S.STALLED_COUNT] += len(slots)

    def suspend() -> None:
        """A step of slots 7 and 1 is suspended before its second group, and slot 0 decodes meanwhile."""
        cut(7, 1)
        kept = state.suspended
        for name in kept._fields:
            getattr(kept, name)[:] = getattr(b, name)
        kept.counts[S.GROUP] = state.counts[S.INTERRUPTIONS] = state.pairs.reserved[:2] = 1
        state.pairs.cq_tail[0] = 21
        rows(0)

    chunks = dict[int, int]()

    def longer(n: int) -> None:
        """Slot 1 has one page more, a prompt of 16 tokens, and a chunk of n tokens."""
        r.prompt_length[1] = r.length[1] = 16
        r.num_pages[1], r.page_table[1, 3], pages.refcount[14] = 4, 14, 1
        state.counts[S.FREE_COUNT], chunks[1] = 4, n

    def hold_all() -> None:
        """No page is free."""
        for page, slot in zip(pages.free[: state.counts[S.FREE_COUNT]], (0, 1, 2, 2, 7), strict=True):
            r.page_table[slot, r.num_pages[slot]], pages.refcount[page] = page, 1
            r.num_pages[slot] += 1
        state.counts[S.FREE_COUNT] = 0

    def rename(page: int, other: int) -> None:
        """Two pages change places, everywhere."""
        for array in (r.page_table, r.canonical, pages.free, pages.ring, *links):
            array[...] = np.select([array == page, array == other], [other, page], array)
        for array in (pages.refcount, pages.ring_position, pages.key, pages.tokens, pages.generation, *links[1:]):
            array[[page, other]] = array[[other, page]]
        places = b.cache_slots // 4
        b.cache_slots[:] += np.select([places == page, places == other], [other - page, page - other], 0) * 4

    def string(own: int, hubs: int) -> None:
        """The last state of an automaton belongs to a counted string of up to three characters: it is the hub if hubs is 1."""
        words = state.grammars.words[own]
        words[[COUNTED_WORD, HUBS_WORD]] = 1, hubs
        words[packed_words(2, 0) + LOOP_MOST] = 3

    def kept(n: int = 4) -> None:
        """Slot 0 starts from the snapshot of its second page, and slot 1 has a chunk of n tokens."""
        kept = state.snapshots
        kept.page[0], kept.generation[0], kept.of_page[4], kept.pins[0], r.snapshot_source[0] = 4, 44, 0, 1, 0
        chunks[1] = n
        rows(0, 7, 1)

    def drafts(*tokens: int) -> None:
        """Slots 1 and 7 are stalled. Slot 0 has drafts, and a counted string with one character so far: token 6 adds a character,
        token 7 a character and the end."""
        class_of = np.full(BYTES, 2, np.uint8)
        class_of[list(b"ab")] = 0, 1
        loops, start = np.array([[1, 0, 3]], np.int32), position_of(1, 1)
        table, pieces = np.array([[DEAD] * 3, [1, 0, DEAD]], np.int16), {6: b"a", 7: b"ab"}
        grammar = ByteAutomaton(class_of, table, np.array([True, False]), loops=loops, start=start)
        state.grammars.words[1, : len(grammar.words())] = grammar.words()
        state.grammars.token_place[6:8], state.grammars.token_bytes[0] = ((0, 1), (0, 2)), int.from_bytes(b"ab", "little")
        r.grammar_state[0] = start
        r.stalled[[1, 7]], count = 1, len(tokens)
        state.counts[S.STALLED_COUNT] += 2
        rows(0)
        for k, token in enumerate(tokens, 1):
            start = grammar.advance(start, pieces.get(token, b""))
            r.draft_states[0, 9 + k], r.tokens[0, 8 + k], b.token_ids[k] = start, token, token
            b.row_slots[k], b.emits[k], b.context_lengths[k], b.token_rows[k] = 0, S.DRAFT, 9 + k, k
            b.positions[k], b.query_starts[k + 1], b.cache_slots[k] = 8 + k, 1 + k, 6 * 4 + k
        b.counts[:3] = 1 + count, 1 + count, 0

    links = (pages.bucket_head, pages.bucket_next, pages.bucket_previous, pages.parent)
    longs = r.entry.view(np.int64)
    words = {"GRAMMAR_WORDS": E.WORD_GRAMMAR_WORDS, "GRAMMAR_DIGEST": E.LONG_GRAMMAR_DIGEST}
    words |= {"RULES_WORDS": E.WORD_RULES_WORDS, "RULES_DIGEST": E.LONG_RULES_DIGEST}
    helpers = {"scored": scored, "best_effort": best_effort, "index": index, "rows": rows, "longer": longer}
    helpers |= {"hold_all": hold_all, "rename": rename, "cut": cut, "suspend": suspend, "string": string, "kept": kept}
    helpers |= {"drafts": drafts}
    arrays = {
        "r": r,
        "p": pages,
        "b": b,
        "g": state.grammars,
        "q": state.pairs,
        "c": state.counts,
        "longs": longs,
        "n": state.snapshots,
    }
    arrays |= {"WORD_BEST_EFFORT": E.WORD_BEST_EFFORT}
    return vars(S) | words | helpers | arrays | {"state": state}


def sizes() -> Limits:
    queue, facts, options = case_sizes(
        pairs=3,
        rows=4,
        tokens=14,
        max_model_len=16,
        share=2,
        token_words=1,
        mixed_step_tokens=10,
        burst_step_tokens=12,
        best_effort_step_tokens=11,
        best_effort_pages=0.625,
        step_groups=2,
        cut_step_tokens=14,
    )
    return make_limits_by_name(queue, facts, **options)


def cut_sizes() -> Limits:
    return sizes()._replace(step_groups=3, cut_tokens=9, suspend_steps=2)


def draft_sizes() -> Limits:
    return sizes()._replace(draft_tokens=2)


def snapshot_sizes() -> Limits:
    return sizes()._replace(snapshots=3, snapshot_tokens=16)


def faults(limits: Limits, change: str) -> tuple[int, tuple[int, int]]:
    """(result of the check, first fault of the reference) for the state with a change."""
    state = make_state(limits)
    known = names(state)
    exec(STATE, known)
    exec(change, known)
    scratch = np.full((2, max(limits.slots, limits.pages)), 77)
    return int(check_state(limits, as_memoryviews(state), *map(memoryview, scratch))), next(wrong(limits, state), (0, 0))


def clauses(cases: str) -> list[tuple[str, str, str]]:
    """(fault and place, ":", change) for each line."""
    return [line.partition(": ") for line in cases.splitlines() if line]


def check_clauses(cases: str, limits: Limits) -> None:
    """The check and the reference find the same fault at the same place first."""
    for expected, _, change in clauses(cases):
        name, place = expected.split()
        code = CODES.get(name, 0)
        fault, reference = faults(limits, change)
        assert fault == fault_at(code, int(place)), (expected, change, hex(fault))
        assert reference == (code, int(place)), (expected, change)


def test_each_fault_has_a_clause() -> None:
    every = LISTS + ONE_REQUEST + GRAMMARS_AND_RULES + PAGES + RING + PREFIX_INDEX + QUEUE_PAIRS
    every += ROWS_OF_A_BATCH + TOKENS_OF_A_BATCH + CLASSES_AND_SPACE + DRAFTS + CUT_STEPS + SNAPSHOTS
    assert {expected.split()[0] for expected, *_ in clauses(every)} >= set(CODES)


# A test for each group of clauses: a single test is quick, and shows the place of the fault.
def test_valid_states_violate_no_clause() -> None:
    check_clauses(ALL_IS_WELL, sizes())


def test_clauses_of_the_lists() -> None:
    check_clauses(LISTS, sizes())


def test_clauses_of_one_request() -> None:
    check_clauses(ONE_REQUEST, sizes())


def test_clauses_of_grammars_and_rules() -> None:
    check_clauses(GRAMMARS_AND_RULES, sizes())


def test_clauses_of_pages() -> None:
    check_clauses(PAGES, sizes())


def test_clauses_of_the_eviction_ring() -> None:
    check_clauses(RING, sizes())


def test_clauses_of_the_prefix_index() -> None:
    check_clauses(PREFIX_INDEX, sizes())


def test_clauses_of_queue_pairs() -> None:
    check_clauses(QUEUE_PAIRS, sizes())


def test_clauses_of_the_rows_of_a_batch() -> None:
    check_clauses(ROWS_OF_A_BATCH, sizes())


def test_clauses_of_the_tokens_of_a_batch() -> None:
    check_clauses(TOKENS_OF_A_BATCH, sizes())


def test_clauses_of_classes_and_room() -> None:
    check_clauses(CLASSES_AND_SPACE, sizes())


def test_clauses_of_drafts() -> None:
    check_clauses(DRAFTS, draft_sizes())


def test_clauses_of_cut_steps() -> None:
    check_clauses(CUT_STEPS, cut_sizes())


def test_empty_full_and_narrow_states() -> None:
    """Lists and counts that are empty or full; the maximum number of rows, and one more."""
    limits = sizes()
    state = make_state(limits)
    scratch = [memoryview(row) for row in np.full((2, 16), 77)]

    def check() -> int:
        return int(check_state(limits, as_memoryviews(state), *scratch))

    assert check() == 0
    state.requests.status[:], state.requests.prompt_length[:], state.requests.length[:] = S.WAITING, 1, 1
    state.waiting[:], state.requests.arrival[:], state.pairs.attached[:] = range(12), range(12), 1
    state.counts[S.WAITING_COUNT] = 12
    assert check() == 0
    state.counts[S.WAITING_COUNT] = 13
    assert check() == R.WAITING_LIST
    exec(STATE, names(state := make_state(limits)))
    views = as_memoryviews(state)
    assert check_state(limits._replace(rows=3), views, *scratch) == R.RUNNING_LIST
    for slots, bound, code in (((1,), 2, 0), ((1, 7), 4, R.BEST_EFFORT_PAGES), ((1, 7), 5, 0)):
        exec(STATE, known := names(state := make_state(limits)))
        known["best_effort"](*slots)
        views = as_memoryviews(state)
        assert check_state(limits._replace(best_effort_pages=bound), views, *scratch) == code, slots
    exec(STATE, names(state := make_state(limits)))
    views = as_memoryviews(state)
    assert B.check_batch(limits._replace(rows=3), views, scratch[0]) == 0
    assert B.check_batch(limits._replace(rows=2), views, scratch[0]) == B.BATCH_SIZE
    exec(f"{STATE}suspend()", names(state := make_state(limits := cut_sizes())))
    views = as_memoryviews(state)
    for groups, code in ((3, 0), (1, B.BATCH_SIZE)):  # without groups, no step can be suspended
        assert B.check_batch(limits._replace(step_groups=groups), views, scratch[0]) == code, groups
    for change, share, code in (
        ("pass", 0, 0),  # decodes are not best-effort prompts
        ("best_effort(1); longer(1); rows(0, 1)", 1, B.BEST_EFFORT_BEYOND),
        ("best_effort(1); longer(1); rows(1)", 1, B.SPACE_LEFT),  # exactly their share; the fault is that others wait
    ):
        exec(STATE, known := names(state := make_state(limits := sizes())))
        exec(change, known)
        assert B.check_batch(limits._replace(best_effort_step_tokens=share), as_memoryviews(state), scratch[0]) == code, change


def test_snapshots() -> None:
    check_clauses(SNAPSHOTS, snapshot_sizes())
    check_clauses("COPY_RANGE 0: r.snapshot_source[0] = 0\nCOPY_RANGE 7: r.snapshot_target[7] = 0", sizes())
