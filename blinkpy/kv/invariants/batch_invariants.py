"""Checks of a batch against its requests' states."""

from blinkpy.device.expect import fault_at, fault_code
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.queues import submission as E

BATCH_SIZE = fault_code("the batch's size is wrong")
TWO_ROWS = fault_code("row {}: its request has two rows")
ROW_IDLE = fault_code("row {}: its request does not run")
ROW_STALLED = fault_code("row {}: its request is stalled")
ROW_EMPTY = fault_code("row {} has no tokens")
DECODE_LONG = fault_code("decode row {} has several tokens")
UNCOVERED = fault_code("the rows do not cover the batch's tokens")
CONTEXT_WRONG = fault_code("row {}: its context length is wrong")
EMITS_WRONG = fault_code("row {} emits and should not, or the other way")
TOKEN_ROW = fault_code("token {} has the wrong row")
TOKEN_POSITION = fault_code("token {} has the wrong position")
TOKEN_WRONG = fault_code("token {} is wrong")
TOKEN_PAGELESS = fault_code("token {} has no page")
CACHE_SLOT = fault_code("token {} has the wrong cache slot")
SHARED_WRITE = fault_code("token {} is written into a shared page")
YIELDS_NOT = fault_code("row {} has a best-effort prompt beside a latency-sensitive one, to which it yields")
BEST_EFFORT_BEYOND = fault_code("best-effort prompts fill the step beyond their share")
ROOM_LEFT = fault_code("a prompt waits although the step has room")


@device
def check_rows(limits, state, rows, decodes, seen):
    """The rows of a batch. seen: int64 [>= S], any content."""
    b, r = state.batch, state.requests
    for slot in range(limits.slots):
        seen[slot] = 0
    for row in range(rows):
        slot = b.row_slots[row]
        if slot < 0 or slot >= limits.slots or r.status[slot] != S.RUNNING:
            return fault_at(ROW_IDLE, row)
        if seen[slot] != 0:
            return fault_at(TWO_ROWS, row)
        seen[slot] = 1
        if r.stalled[slot] != 0:
            return fault_at(ROW_STALLED, row)
        length = b.query_starts[row + 1] - b.query_starts[row]
        if length < 1 or b.query_starts[row] < 0:
            return fault_at(ROW_EMPTY, row)
        if row < decodes and length != 1:
            return fault_at(DECODE_LONG, row)
        if b.context_lengths[row] != r.computed[slot] + length:
            return fault_at(CONTEXT_WRONG, row)
    return 0


@device
def check_token(limits, state, row, i):
    """One token of a batch, in its row."""
    b, r = state.batch, state.requests
    slot = b.row_slots[row]
    position = r.computed[slot] + i - b.query_starts[row]
    if b.token_rows[i] != row:
        return fault_at(TOKEN_ROW, i)
    if b.positions[i] != position:
        return fault_at(TOKEN_POSITION, i)
    if b.token_ids[i] != r.tokens[slot, position]:
        return fault_at(TOKEN_WRONG, i)
    page = r.page_table[slot, position >> limits.page_shift]
    if page < 0:
        return fault_at(TOKEN_PAGELESS, i)
    if b.cache_slots[i] != page * limits.page_size + (position & (limits.page_size - 1)):
        return fault_at(CACHE_SLOT, i)
    return 0 if state.pages.refcount[page] == 1 else fault_at(SHARED_WRITE, i)


@device
def sensitive_chunk(state, rows, decodes):
    """Whether a latency-sensitive prompt has a row."""
    for row in range(decodes, rows):
        if state.requests.entry[state.batch.row_slots[row], E.WORD_BEST_EFFORT] == 0:
            return True
    return False


@device
def waiting_tokens(state, rows, best_effort_prompts):
    """(tokens in the step of best-effort prompts, or of all other requests; tokens that these lack beyond it)."""
    b, r, planned, lacking = state.batch, state.requests, 0, 0
    for row in range(rows):
        slot = b.row_slots[row]
        prompt = r.entry[slot, E.WORD_BEST_EFFORT] != 0 and r.length[slot] - r.computed[slot] > 1
        if prompt == best_effort_prompts:
            planned += b.query_starts[row + 1] - b.query_starts[row]
    for i in range(state.counts[S.RUNNING_COUNT]):
        slot = state.running[i]
        prompt = r.entry[slot, E.WORD_BEST_EFFORT] != 0 and r.length[slot] - r.computed[slot] > 1
        if r.stalled[slot] == 0 and prompt == best_effort_prompts:
            lacking += r.length[slot] - r.computed[slot]
    return planned, lacking - planned


@device
def check_room(limits, state, rows, tokens, decodes, yields):
    """Whether a prompt waits although the step has room, or best-effort ones have more than theirs. yields: these have none."""
    full = tokens == limits.tokens
    if decodes > 0 and (tokens == limits.mixed_tokens or tokens == limits.burst_step_tokens):
        full = True
    _, waits = waiting_tokens(state, rows, False)
    planned, best_effort_waits = waiting_tokens(state, rows, True)
    share = limits.best_effort_step_tokens
    if planned > 0 and decodes + planned > share:
        return BEST_EFFORT_BEYOND
    if best_effort_waits > 0 and not yields and decodes + planned < share:
        waits += best_effort_waits
    return ROOM_LEFT if waits > 0 and not full else 0


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
            return fault_at(EMITS_WRONG, row)
        for i in range(b.query_starts[row], b.query_starts[row + 1]):
            fault = check_token(limits, state, row, i)
            if fault != 0:
                return fault
    yields = state.counts[S.YIELDED_TURNS] > 0 and sensitive_chunk(state, rows, decodes)
    if yields:
        for row in range(decodes, rows):
            if r.entry[b.row_slots[row], E.WORD_BEST_EFFORT] != 0:
                return fault_at(YIELDS_NOT, row)
    return check_room(limits, state, rows, tokens, decodes, yields)
