"""Plans the next batch: decode rows in the order of `running`, then prefill chunks within the budget.

The budget is the size of the largest batch, or less if requests decode: see step_budget. Chunked prefill: Agrawal et al.,
"Taming throughput-latency tradeoff in LLM inference with Sarathi-Serve", OSDI 2024. The choice by waiting and decoding requests
is this project's (docs/tuning.md).
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_max, block_scan, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import check_state as F
from blinkpy.kv.limits import groups_of_step
from blinkpy.kv.snapshots import chunk_end
from blinkpy.queues.submission import WORD_BEST_EFFORT
from blinkpy.scheduler.suspension import begin_flight, is_suspended
from blinkpy.scheduler.yielding import best_effort_prompt, goes_first, sensitive_prompt_runs

_COUNT_BITS = 16  # rows in the low bits, tokens above, in one scan
_COUNT_MASK = 0xFFFF
_HALF = 32


@device
def step_budget(limits, state, yields, lane, lanes):
    """The maximum tokens of the next batch.

    - limits.mixed_tokens while a request decodes and all prompts, waiting ones included, lack at most
      limits.burst_tokens: the step reads the weights for the decodes anyway.
    - limits.burst_step_tokens in a burst: larger chunks finish the prompts sooner.
    - limits.tokens if no request decodes, and in a burst of prompts that lack at most limits.mixed_tokens on
      average: one step then gives many first tokens.
    - limits.sensitive_step_tokens plus the decodes while best-effort prompts yield: so the next arrival waits only for a short
    step.

    Prefill always progresses: a request that lacks more than one token has a row, so fewer than limits.rows
    decode.
    """
    if limits.mixed_tokens == limits.tokens and not yields:
        return limits.tokens
    requests, counts = state.requests, state.counts
    decoding, prompts = 0, 0
    for i in strided(lane, counts[S.RUNNING_COUNT], lanes):
        slot = state.running[i]
        if requests.stalled[slot] == 0:
            missing = requests.length[slot] - requests.computed[slot]
            decoding += 1 if missing == 1 else 0
            prompts += missing if missing > 1 else 0
    waiting = counts[S.WAITING_COUNT] + counts[S.UNRANKED_COUNT]
    for i in strided(lane, waiting, lanes):
        prompts += requests.length[state.waiting[i]]
    both = block_sum(prompts << _COUNT_BITS | decoding, lane, lanes)
    decoding, prompts = both & _COUNT_MASK, both >> _COUNT_BITS
    asking = counts[S.RUNNING_COUNT] - counts[S.STALLED_COUNT] - decoding + waiting
    if yields:
        budget = min(limits.tokens, decoding + limits.sensitive_step_tokens)
    elif decoding > 0 and prompts <= limits.burst_tokens:
        budget = limits.mixed_tokens
    elif decoding > 0 and prompts > asking * limits.mixed_tokens:
        budget = limits.burst_step_tokens
    else:
        budget = limits.tokens
    return budget


@device
def plan_batch(limits, state, budget, yields, lane, lanes):
    """Write state.batch. Returns the bucket, or -1 if no request can run.

    budget: maximum tokens; more if more requests decode.
    yields: see begin_yield; best-effort prompts get no chunk in a step that interrupts another step.
    """
    running = state.counts[S.RUNNING_COUNT]
    decode_rows, others, context = plan_decodes(limits, state, running, lane, lanes)
    rows, tokens, emits, groups = decode_rows, decode_rows, decode_rows, 1
    if limits.draft_tokens > 0:
        rows, context = plan_drafts(limits, state, running, decode_rows, context, lane, lanes)
        tokens, emits = rows, rows
    if others > 0:
        interrupts = is_suspended(state)
        yields = interrupts or (yields and sensitive_prompt_runs(state, lane, lanes))
        rows, tokens, emits, context, flexible = plan_chunks(
            limits, state, running, budget, yields, decode_rows, context, lane, lanes
        )
        if flexible > 0 and tokens > limits.cut_tokens:
            size = state.buckets.tokens[smallest_bucket(state, rows, tokens)]
            groups = groups_of_step(limits.step_groups, size, limits.tokens)
        expect(state, flexible == 0 or not interrupts, F.BEST_EFFORT_INTERRUPTS)
    expect(state, tokens <= limits.tokens and rows <= limits.rows, F.BATCH_BEYOND)
    if groups > 1:
        begin_flight(state, rows, lane, lanes)
    return finish_batch(state, rows, tokens, decode_rows, emits, groups, block_max(context, lane, lanes), lane, lanes)


@device
def smallest_bucket(state, rows, tokens):
    """The smallest bucket that fits a batch."""
    bucket = 0
    while state.buckets.tokens[bucket] < tokens or state.buckets.rows[bucket] < rows:
        bucket += 1
    return bucket


@device
def finish_batch(state, rows, tokens, decode_rows, emits, groups, context, lane, lanes):
    """Pad a batch whose rows are written, and write its counts. Returns the bucket, or -1 without rows."""
    batch, counts = state.batch, state.counts
    bucket = -1
    if rows > 0:
        bucket = smallest_bucket(state, rows, tokens)
        pad_batch(state, rows, tokens, bucket, lane, lanes)
    if lane == 0:
        batch.counts[S.ROWS], batch.counts[S.TOKENS], batch.counts[S.DECODE_ROWS] = rows, tokens, decode_rows
        batch.counts[S.BUCKET], batch.counts[S.MAX_CONTEXT], batch.counts[S.EMITS] = bucket, context, emits
        batch.counts[S.GROUPS], batch.counts[S.GROUP] = groups, 0
        if rows > 0:
            counts[S.STEPS] += 1
    barrier(lanes)
    return bucket


@device
def plan_decodes(limits, state, running, lane, lanes):
    """Write the rows of requests that lack one token and have no drafts. Returns (rows, requests that lack more tokens, this
    lane's longest context).
    """
    requests, batch, drafting = state.requests, state.batch, limits.draft_tokens > 0
    rows, others, context = 0, 0, 0
    for tile in strided(0, running, lanes):
        i = tile + lane
        slot, kind = 0, 0
        if i < running:
            slot = state.running[i]
            expect(state, requests.computed[slot] < requests.length[slot], F.PLANNED_COMPUTED)
            if requests.stalled[slot] == 0:
                kind = 1 if requests.length[slot] - requests.computed[slot] == 1 else 1 << _HALF
                if drafting and state.scratch.first[i] > 0:
                    kind = 0  # see plan_drafts
        before, total = block_scan(kind, lane, lanes)
        if kind == 1:
            row = rows + (before & 0xFFFFFFFF)
            write_row(batch, row, slot, row, requests.length[slot], 1)
            write_token(limits, requests, batch, row, row, slot, requests.computed[slot])
            context = max(context, requests.length[slot])
        rows += total & 0xFFFFFFFF
        others += total >> _HALF
    return rows, others, context


@device
def plan_drafts(limits, state, running, first, context, lane, lanes):
    """Part of plan_batch: write the rows of requests with drafts, from row `first` on: each request's own row, then its drafts.
    Returns (rows after them, this lane's longest context).
    """
    requests, batch, row = state.requests, state.batch, first
    for tile in strided(0, running, lanes):
        i = tile + lane
        slot, own = 0, 0
        if i < running and state.scratch.first[i] > 0:
            slot, own = state.running[i], 1 + state.scratch.first[i]
        before, total = block_scan(own, lane, lanes)
        for k in range(own):
            place, position = row + before + k, requests.length[slot] - 1 + k
            write_row(batch, place, slot, place, position + 1, 1 if k == 0 else S.DRAFT)
            write_token(limits, requests, batch, place, place, slot, position)
            expect(state, batch.cache_slots[place] >= 0, F.CHUNK_PAGELESS)
            context = max(context, position + 1)
        row += total
    return row, context


@device
def list_prompts(state, running, yields, lane, lanes):
    """List the requests that may get a chunk in scratch.page, in the order of `running`. If best-effort prompts yield, list only
    latency-sensitive requests, by rank and arrival. Returns their number.
    """
    requests, scratch, count = state.requests, state.scratch, 0
    for tile in strided(0, running, lanes):
        i = tile + lane
        slot, found = 0, 0
        if i < running:
            slot = state.running[i]
            if requests.stalled[slot] == 0 and requests.length[slot] - requests.computed[slot] > 1:
                found = 0 if yields and requests.entry[slot, WORD_BEST_EFFORT] != 0 else 1
        before, total = block_scan(found, lane, lanes)
        if found == 1:
            scratch.slot[count + before] = slot
        count += total
    barrier(lanes)
    for i in strided(lane, count, lanes):
        slot, place = scratch.slot[i], i
        if yields:
            place = 0
            for j in range(count):
                place += 1 if goes_first(requests, scratch.slot[j], slot) else 0
        scratch.page[place] = slot
    barrier(lanes)
    return count


@device
def plan_chunks(limits, state, running, budget, yields, decode_rows, context, lane, lanes):
    """Plan chunks of the listed requests, in order, while the budget lasts.

    Best-effort prompts get no chunk if they yield, else at most the tokens that
    limits.best_effort_step_tokens leaves after decodes. If they yield, prompts that end in this step come first. A prompt that
    does not end gets at most half of limits.sensitive_step_tokens, to keep the step short for the ending prompts and for the next
    arrival.

    Returns (rows, tokens, emitting rows, context, rows of best-effort prompts).
    """
    requests, batch, listed = state.requests, state.batch, state.scratch.page
    count = list_prompts(state, running, yields, lane, lanes)
    limited, space = limits.best_effort_step_tokens < limits.tokens, limits.best_effort_step_tokens - decode_rows
    wanted, filled = 0, 0
    ends = 0  # packed counts: rows, above them best-effort rows, in the upper half emitting rows
    for tile in strided(0, count, lanes):
        i = tile + lane
        slot, missing, granted, chunk = 0, 0, 0, 0
        if i < count:
            slot = listed[i]
            missing = chunk_end(limits, requests, slot) - requests.computed[slot]
            granted = missing
        if limited:
            asked = granted if i < count and best_effort_prompt(requests, slot) else 0
            before, total = block_scan(asked, lane, lanes)
            granted = granted if asked == 0 else max(0, min(asked, space - before))
            space -= total
        own = granted << _COUNT_BITS | 1 if granted > 0 else 0
        before, total = block_scan(own, lane, lanes)
        before += wanted
        first = decode_rows + (before >> _COUNT_BITS)
        if own > 0 and first < budget:
            chunk = min(granted, budget - first)
            if yields and chunk < missing and first > decode_rows:
                chunk = min(chunk, decode_rows + limits.sensitive_step_tokens // 2 - first)
        if chunk > 0:
            filled += chunk
            after = requests.computed[slot] + chunk
            emits = 1 if after == requests.length[slot] else 0
            write_row(batch, decode_rows + (before & _COUNT_MASK), slot, first, after, emits)
            context = max(context, after)
            flexible = 1 if best_effort_prompt(requests, slot) else 0
            ends += 1 | flexible << _COUNT_BITS | emits << _HALF
        wanted += total
    ends = block_sum(ends, lane, lanes)
    rows, flexible = decode_rows + (ends & _COUNT_MASK), ends >> _COUNT_BITS & _COUNT_MASK
    tokens = decode_rows + block_sum(filled, lane, lanes)
    for row in range(decode_rows, rows):
        slot, first = batch.row_slots[row], batch.query_starts[row]
        past = batch.query_starts[row + 1] if row + 1 < rows else tokens
        for i in strided(first + lane, past, lanes):
            write_token(limits, requests, batch, i, row, slot, requests.computed[slot] + i - first)
            expect(state, batch.cache_slots[i] >= 0, F.CHUNK_PAGELESS)
    return rows, tokens, decode_rows + (ends >> _HALF), context, flexible


@device
def write_row(batch, row, slot, first, context, emits):
    batch.row_slots[row] = slot
    batch.query_starts[row] = first
    batch.context_lengths[row] = context
    batch.emits[row] = emits


@device
def write_token(limits, requests, batch, i, row, slot, position):
    page = requests.page_table[slot, position >> limits.page_shift]
    batch.token_ids[i] = requests.tokens[slot, position]
    batch.positions[i] = position
    batch.cache_slots[i] = page << limits.page_shift | (position & (limits.page_size - 1))
    batch.token_rows[i] = row


@device
def pad_batch(state, rows, tokens, bucket, lane, lanes):
    """Fill the bucket's entries after the batch with padding, which the step computes without an effect."""
    batch = state.batch
    for i in strided(tokens + lane, state.buckets.tokens[bucket], lanes):
        batch.token_ids[i] = 0
        batch.positions[i] = 0
        batch.cache_slots[i] = -1
        batch.token_rows[i] = -1
    for row in strided(rows + lane, state.buckets.rows[bucket], lanes):
        batch.row_slots[row] = -1
        batch.context_lengths[row] = 0
        batch.emits[row] = 0
    for row in strided(rows + lane, state.buckets.rows[bucket] + 1, lanes):
        batch.query_starts[row] = tokens
