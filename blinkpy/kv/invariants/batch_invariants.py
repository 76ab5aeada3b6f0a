"""Checks of a batch against its requests' states."""

from __future__ import annotations

from blinkpy.device.expect import problem
from blinkpy.device.portable import device
from blinkpy.kv import state as S

BATCH_SIZE = problem("the batch's size is wrong")
TWO_ROWS = problem("a request has two rows")
ROW_IDLE = problem("a row's request does not run")
ROW_PAUSED = problem("a row's request is paused")
ROW_EMPTY = problem("a row has no tokens")
DECODE_LONG = problem("a decode row has several tokens")
UNCOVERED = problem("the rows do not cover the batch's tokens")
CONTEXT_WRONG = problem("a context length is wrong")
EMITS_WRONG = problem("a row emits and should not, or the other way")
TOKEN_ROW = problem("a token has the wrong row")
TOKEN_POSITION = problem("a token has the wrong position")
TOKEN_WRONG = problem("a token is wrong")
TOKEN_PAGELESS = problem("a token has no page")
CACHE_SLOT = problem("a token has the wrong cache slot")
SHARED_WRITE = problem("a step writes into a shared page")
ROOM_LEFT = problem("a prompt waits although the step has room")


@device
def check_rows(limits, state, rows, decodes, seen):
    """The rows of a batch. seen: int64 [>= S], any content."""
    b, r = state.batch, state.requests
    for slot in range(limits.slots):
        seen[slot] = 0
    for row in range(rows):
        slot = b.row_slots[row]
        if slot < 0 or slot >= limits.slots or r.status[slot] != S.RUNNING:
            return ROW_IDLE
        if seen[slot] != 0:
            return TWO_ROWS
        seen[slot] = 1
        if r.stalled[slot] != 0:
            return ROW_PAUSED
        length = b.query_starts[row + 1] - b.query_starts[row]
        if length < 1 or b.query_starts[row] < 0:
            return ROW_EMPTY
        if row < decodes and length != 1:
            return DECODE_LONG
        if b.context_lengths[row] != r.computed[slot] + length:
            return CONTEXT_WRONG
    return 0


@device
def check_token(limits, state, row, i):
    """One token of a batch, in its row."""
    b, r = state.batch, state.requests
    slot = b.row_slots[row]
    position = r.computed[slot] + i - b.query_starts[row]
    if b.token_rows[i] != row:
        return TOKEN_ROW
    if b.positions[i] != position:
        return TOKEN_POSITION
    if b.token_ids[i] != r.tokens[slot, position]:
        return TOKEN_WRONG
    page = r.page_table[slot, position >> limits.page_shift]
    if page < 0:
        return TOKEN_PAGELESS
    if b.cache_slots[i] != page * limits.page_size + (position & (limits.page_size - 1)):
        return CACHE_SLOT
    return 0 if state.pages.refcount[page] == 1 else SHARED_WRITE


@device
def check_batch(limits, state, seen):
    """seen: int64 [>= S], any content."""
    b, r = state.batch, state.requests
    rows, tokens, decodes = b.counts[S.ROWS], b.counts[S.TOKENS], b.counts[S.DECODE_ROWS]
    if not (0 <= decodes <= rows <= limits.rows and rows <= tokens <= limits.tokens):
        return BATCH_SIZE
    if rows == 0:
        return 0
    fault = check_rows(limits, state, rows, decodes, seen)
    if fault != 0:
        return fault
    if b.query_starts[rows] != tokens:
        return UNCOVERED
    for row in range(rows):
        slot = b.row_slots[row]
        ends = b.context_lengths[row] == r.length[slot]
        if b.emits[row] != (1 if ends else 0) or b.context_lengths[row] > r.length[slot]:
            return EMITS_WRONG
        for i in range(b.query_starts[row], b.query_starts[row + 1]):
            fault = check_token(limits, state, row, i)
            if fault != 0:
                return fault
    cut = state.counts[S.RUNNING_COUNT] - state.counts[S.STALLED_COUNT] > rows or b.emits[rows - 1] == 0
    smaller = tokens == limits.mixed_tokens or tokens == limits.burst_step_tokens
    if cut and tokens != limits.tokens and not (decodes > 0 and smaller):
        return ROOM_LEFT
    return 0
