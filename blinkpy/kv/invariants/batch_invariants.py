"""Checks of a batch against its requests' states."""

from blinkpy.device.expect import fault_at, fault_code
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.kv.grammars import counted_state_after, position_at
from blinkpy.kv.limits import groups_of_step
from blinkpy.kv.snapshots import chunk_end
from blinkpy.queues import submission as E

BATCH_SIZE = fault_code("the batch's size is wrong")
TWO_ROWS = fault_code("row {}: its request has two rows")
DRAFT_WRONG = fault_code("row {}: a draft does not follow its request's row, is one too many, or is in a step with prompts")
DRAFT_ILLEGAL = fault_code("row {}: its request's grammar refuses the draft, or the position after it is wrong")
ROW_IDLE = fault_code("row {}: its request does not run")
ROW_STALLED = fault_code("row {}: its request is stalled")
ROW_EMPTY = fault_code("row {} has no tokens")
DECODE_LONG = fault_code("decode row {} has several tokens")
UNCOVERED = fault_code("the rows do not cover the batch's tokens")
CONTEXT_WRONG = fault_code("row {}: its context length is wrong")
EMITS_WRONG = fault_code("row {}: its flag for emitting a token is wrong")
CHUNK_BEYOND = fault_code("row {} goes beyond a position at which its chunk must end for a snapshot")
TOKEN_ROW = fault_code("token {} has the wrong row")
TOKEN_POSITION = fault_code("token {} has the wrong position")
TOKEN_WRONG = fault_code("token {} is wrong")
TOKEN_PAGELESS = fault_code("token {} has no page")
CACHE_SLOT = fault_code("token {} has the wrong cache slot")
SHARED_WRITE = fault_code("token {} is written into a shared page")
YIELDS_NOT = fault_code("row {} has a best-effort prompt together with a latency-sensitive one, to which it must yield")
BEST_EFFORT_BEYOND = fault_code("best-effort prompts fill the step beyond their share")
SPACE_LEFT = fault_code("a prompt waits although the step has space")


FLIGHT_WRONG = fault_code("the requests in flight differ from the requests of the cut step")
GROUPS_WRONG = fault_code("a step is wrongly cut or not cut, or its groups are wrong")
NESTED = fault_code("the step that interrupts a suspended step is empty, cut, or exceeds the limit")
RESERVED_WRONG = fault_code("queue pair {}: the reserved entries of its completion ring differ from the suspended step's tokens")


@device
def drafts_before(b, row):
    """The number of drafts from a row back to its request's own row; 0 for the request's own row."""
    count = 0
    while count < row and b.emits[row - count] == S.DRAFT:
        count += 1
    return count


@device
def check_draft(limits, state, b, row, decodes):
    """Check that a row of a draft may be a draft."""
    if b.emits[row] != S.DRAFT:
        return 0
    ahead = drafts_before(b, row)
    fine = 0 < ahead <= limits.draft_tokens and row - ahead >= decodes and b.emits[row - ahead] == 1
    fine = fine and b.row_slots[row - 1] == b.row_slots[row] and b.counts[S.TOKENS] == b.counts[S.ROWS]
    r, slot = state.requests, b.row_slots[row]
    length = r.length[slot] + ahead
    if not fine or b.counts[S.GROUPS] != 1 or length >= limits.max_model_len:
        return fault_at(DRAFT_WRONG, row)
    token = r.tokens[slot, length - 1]
    if r.grammar[slot] < 0 or not 0 <= token < limits.vocab_size:
        return 0
    # The earlier rows have been checked, so their positions are valid.
    before = position_at(r, slot, length - 1)
    following = counted_state_after(state.grammars, r.grammar[slot], before, token)
    return 0 if following >= 0 and following == position_at(r, slot, length) else fault_at(DRAFT_ILLEGAL, row)


@device
def check_rows(limits, state, b, rows, decodes, stalled, seen):
    """Check the rows of batch b.

    stalled: Requests' array of stalled flags.
    seen: scratch, int64 [>= S].
    """
    r = state.requests
    for slot in range(limits.slots):
        seen[slot] = 0
    for row in range(rows):
        slot = b.row_slots[row]
        if slot < 0 or slot >= limits.slots or r.status[slot] != S.RUNNING:
            return fault_at(ROW_IDLE, row)
        draft = check_draft(limits, state, b, row, decodes)
        if draft != 0:
            return draft
        ahead = drafts_before(b, row)
        if seen[slot] != 0 and ahead == 0:
            return fault_at(TWO_ROWS, row)
        seen[slot] = 1
        if r.stalled[slot] != stalled:
            return fault_at(ROW_STALLED, row)
        length = b.query_starts[row + 1] - b.query_starts[row]
        if length < 1 or b.query_starts[row] < 0:
            return fault_at(ROW_EMPTY, row)
        if row < decodes and length != 1:
            return fault_at(DECODE_LONG, row)
        if b.context_lengths[row] != r.computed[slot] + length + ahead:
            return fault_at(CONTEXT_WRONG, row)
    return 0


@device
def check_token(limits, state, b, row, i):
    """Check one token of a batch b, in its row."""
    r = state.requests
    slot = b.row_slots[row]
    position = r.computed[slot] + i - b.query_starts[row] + drafts_before(b, row)
    if b.token_rows[i] != row:
        return fault_at(TOKEN_ROW, i)
    if b.positions[i] != position:
        return fault_at(TOKEN_POSITION, i)
    if b.token_ids[i] != r.tokens[slot, position] or not 0 <= b.token_ids[i] < limits.vocab_size:
        return fault_at(TOKEN_WRONG, i)
    page = r.page_table[slot, position >> limits.page_shift]
    if page < 0:
        return fault_at(TOKEN_PAGELESS, i)
    if b.cache_slots[i] != page * limits.page_size + (position & (limits.page_size - 1)):
        return fault_at(CACHE_SLOT, i)
    return 0 if state.pages.refcount[page] == 1 else fault_at(SHARED_WRITE, i)


@device
def lacks_several(state, row):
    """Whether a row of the planned batch has a chunk of a prompt."""
    slot = state.batch.row_slots[row]
    return state.requests.length[slot] - state.requests.computed[slot] > 1


@device
def sensitive_chunk(state, rows, decodes):
    """Whether a latency-sensitive prompt has a row in the batch."""
    for row in range(decodes, rows):
        sensitive = state.requests.entry[state.batch.row_slots[row], E.WORD_BEST_EFFORT] == 0
        if sensitive and lacks_several(state, row):
            return True
    return False


@device
def waiting_tokens(limits, state, rows, best_effort_prompts):
    """(tokens in the step, tokens still missing) of best-effort prompts, or of all other requests."""
    b, r, planned, lacking = state.batch, state.requests, 0, 0
    stalled = S.IN_FLIGHT if b.counts[S.GROUPS] > 1 else 0
    for row in range(rows):
        slot = b.row_slots[row]
        prompt = r.entry[slot, E.WORD_BEST_EFFORT] != 0 and r.length[slot] - r.computed[slot] > 1
        if prompt == best_effort_prompts:
            planned += b.query_starts[row + 1] - b.query_starts[row]
    for i in range(state.counts[S.RUNNING_COUNT]):
        slot = state.running[i]
        prompt = r.entry[slot, E.WORD_BEST_EFFORT] != 0 and r.length[slot] - r.computed[slot] > 1
        if (r.stalled[slot] == 0 or r.stalled[slot] == stalled) and prompt == best_effort_prompts:
            lacking += chunk_end(limits, r, slot) - r.computed[slot]
    return planned, lacking - planned


@device
def check_space(limits, state, rows, tokens, decodes, yields):
    """Check that no prompt waits while the step has budget left, and that best-effort prompts stay within their budget.

    yields: whether best-effort prompts yield, and so get no budget.
    """
    full = tokens == limits.tokens
    if state.suspended.counts[S.ROWS] > 0 or state.counts[S.YIELDED_TURNS] > 0:
        first = state.batch.row_slots[decodes] if rows > decodes else 0
        first_ends = rows > decodes and state.batch.context_lengths[decodes] == chunk_end(limits, state.requests, first)
        full = full or tokens >= limits.sensitive_step_tokens
        full = full or (first_ends and tokens - decodes >= limits.sensitive_step_tokens // 2)
    if decodes > 0 and (tokens == limits.mixed_tokens or tokens == limits.burst_step_tokens):
        full = True
    _, waits = waiting_tokens(limits, state, rows, False)
    planned, best_effort_waits = waiting_tokens(limits, state, rows, True)
    share = limits.best_effort_step_tokens
    if planned > 0 and decodes + planned > share:
        return BEST_EFFORT_BEYOND
    if best_effort_waits > 0 and not yields and decodes + planned < share:
        waits += best_effort_waits
    return SPACE_LEFT if waits > 0 and not full else 0


@device
def check_input(limits, state, b, stalled, seen):
    """Check the rows and tokens of a non-empty batch b; stalled and seen as in check_rows."""
    r, rows, tokens, decodes = state.requests, b.counts[S.ROWS], b.counts[S.TOKENS], b.counts[S.DECODE_ROWS]
    fault = check_rows(limits, state, b, rows, decodes, stalled, seen)
    if fault != 0:
        return fault
    if b.query_starts[rows] != tokens:
        return UNCOVERED
    for row in range(rows):
        slot = b.row_slots[row]
        ends = b.context_lengths[row] == r.length[slot]
        if b.emits[row] != S.DRAFT and (b.emits[row] != (1 if ends else 0) or b.context_lengths[row] > r.length[slot]):
            return fault_at(EMITS_WRONG, row)
        if b.emits[row] != S.DRAFT and b.context_lengths[row] > chunk_end(limits, r, slot):
            return fault_at(CHUNK_BEYOND, row)
        for i in range(b.query_starts[row], b.query_starts[row + 1]):
            fault = check_token(limits, state, b, row, i)
            if fault != 0:
                return fault
    return 0


@device
def fits(limits, b):
    """Whether the counts of a batch b are within their limits."""
    rows, tokens, decodes = b.counts[S.ROWS], b.counts[S.TOKENS], b.counts[S.DECODE_ROWS]
    return 0 <= decodes <= rows <= limits.rows and rows <= tokens <= limits.tokens


@device
def groups_of_batch(limits, state, counts):
    """Number of layer groups of a cut batch."""
    buckets, bucket = state.buckets, 0
    while buckets.tokens[bucket] < min(counts[S.TOKENS], limits.tokens) or buckets.rows[bucket] < min(
        counts[S.ROWS], limits.rows
    ):
        bucket += 1
    return groups_of_step(limits.step_groups, buckets.tokens[bucket], limits.tokens)


@device
def check_groups(limits, state):
    """Check the groups of a cut step, the suspended step, and the requests in flight.

    Requires a check_input of both steps.
    """
    b, kept, r, in_flight, flexible = state.batch.counts, state.suspended.counts, state.requests, 0, 0
    for i in range(limits.slots):
        in_flight += 1 if r.stalled[i] == S.IN_FLIGHT else 0
    if in_flight != kept[S.ROWS] + (b[S.ROWS] if b[S.GROUPS] > 1 else 0):
        return FLIGHT_WRONG
    for row in range(b[S.DECODE_ROWS], b[S.ROWS]):
        best_effort = r.entry[state.batch.row_slots[row], E.WORD_BEST_EFFORT] != 0
        flexible += 1 if best_effort and lacks_several(state, row) else 0
    cut = flexible > 0 and b[S.TOKENS] > limits.cut_tokens and kept[S.ROWS] == 0
    groups = groups_of_batch(limits, state, b) if cut else 1
    if b[S.ROWS] > 0 and (b[S.GROUPS] != groups or not 0 <= b[S.GROUP] < groups):
        return GROUPS_WRONG
    if kept[S.ROWS] > 0 and (kept[S.GROUPS] != groups_of_batch(limits, state, kept) or not 0 < kept[S.GROUP] < kept[S.GROUPS]):
        return GROUPS_WRONG
    interruptions = state.counts[S.INTERRUPTIONS]
    if kept[S.ROWS] > 0 and (b[S.ROWS] == 0 or b[S.GROUPS] != 1 or not 0 < interruptions <= limits.suspend_steps):
        return NESTED
    for pair in range(limits.pairs):
        wanted = 0
        for row in range(kept[S.ROWS]):
            wanted += state.suspended.emits[row] if r.pair[state.suspended.row_slots[row]] == pair else 0
        unread = state.pairs.cq_tail[pair] - state.pairs.cq_head[pair]
        if state.pairs.reserved[pair] != wanted or unread + wanted > limits.cq_entries:
            return fault_at(RESERVED_WRONG, pair)
    return 0


@device
def check_batch(limits, state, seen):
    """Check the planned batch and the suspended batch. seen: scratch, int64 [>= S]."""
    b, r, kept = state.batch, state.requests, state.suspended
    rows, tokens, decodes, suspended = b.counts[S.ROWS], b.counts[S.TOKENS], b.counts[S.DECODE_ROWS], kept.counts[S.ROWS] > 0
    if not fits(limits, b) or not fits(limits, kept) or (suspended and limits.step_groups == 1):
        return BATCH_SIZE
    fault = 0
    if rows > 0:
        fault = check_input(limits, state, b, S.IN_FLIGHT if b.counts[S.GROUPS] > 1 else 0, seen)
    if fault == 0 and suspended:
        fault = check_input(limits, state, kept, S.IN_FLIGHT, seen)
    if fault == 0:
        fault = check_groups(limits, state)
    if fault != 0 or rows == 0:
        return fault
    yields = suspended or (state.counts[S.YIELDED_TURNS] > 0 and sensitive_chunk(state, rows, decodes))
    if yields:
        for row in range(decodes, rows):
            if r.entry[b.row_slots[row], E.WORD_BEST_EFFORT] != 0 and lacks_several(state, row):
                return fault_at(YIELDS_NOT, row)
    # After the first group, further requests may wait for the next step.
    return check_space(limits, state, rows, tokens, decodes, yields) if b.counts[S.GROUP] == 0 else 0
