"""Drafts: guesses of the next tokens, checked in one step (speculation; prompt lookup: Saxena, 2023).

A draft is a row of one token after its request's row, and each row samples a token. Random numbers depend only on the request's
seed and the position. So a draft is correct if it equals the token sampled at its position, and drafts never change the output.

Drafts copy the tokens that followed an earlier occurrence of the request's last tokens. While the step runs, overlap looks for an
earlier match of the last draft_match - 1 tokens (`find_drafts`). If the newly sampled token also matches, `propose_drafts` takes
the tokens after it. The longest match wins, and the latest of equally long matches.

A request may have a prediction of its output. The prediction fills the end of the request's row of tokens; a growing output may
overwrite its first tokens. Drafts begin with the prediction's first token. A match in the prediction wins over a match of equal
length in the request's own tokens.

With Limits.step_drafts, a draft layer of the model runs in the step and returns the drafts of each row instead
(Batch.drafted). They follow the token that the step samples, so `propose_drafts` takes them unchanged.

If a request has a grammar, its drafts end before the first draft that the grammar refuses. The sampler
masks the tokens of each draft's row by the position of the automaton there (Requests.draft_states).

The index is a hash table of n-grams for each slot, with chains; n-grams of a prediction have other buckets. It is never cleared:
each entry that a lookup finds is compared with the request's tokens, so a stale entry of an earlier request is harmless.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_max, block_scan, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.grammars import counted_state_after
from blinkpy.kv.invariants import check_state as F
from blinkpy.kv.limits import takes_predictions
from blinkpy.kv.page_allocator import evict_pages, extend_table
from blinkpy.queues.submission import (
    WORD_BEST_EFFORT,
    WORD_GRAMMAR_WORDS,
    WORD_MAX_TOKENS,
    WORD_OUTPUT_TOKENS,
    WORD_PREDICTED_TOKENS,
)
from blinkpy.scheduler.phases.completions import free_entries
from blinkpy.scheduler.phases.preempt import spare_pages
from blinkpy.scheduler.suspension import is_suspended, step_ended
from blinkpy.scheduler.yielding import limits_pages

DRAFT_TOKENS = S.COUNTER_INDEX["draft_tokens"]
DRAFTS_REFUSED = S.COUNTER_INDEX["draft_tokens_refused"]

INDEXED_AT_ONCE = 512  # maximum positions of a request indexed per turn
CANDIDATES = 8  # maximum places that a lookup compares per kind of bucket, latest first
OWN, PREDICTED = range(2)  # kinds of places
LONGEST_MATCH = 64  # tokens; longer matches count as equal
HASH_MULTIPLIER, HASH_MASK, HASH_FOLD = 1_000_003, (1 << 40) - 1, 17
_HALF, _LOW = 32, 0xFFFFFFFF  # packs two counts into one scan


@device
def may_have_drafts(requests, slot):
    """Whether a request may have drafts, which excludes scored prompts."""
    return requests.length[slot] >= requests.prompt_length[slot]


@device
def has_draft_row(batch, row):
    """Whether drafts follow a row."""
    return row + 1 < batch.counts[S.ROWS] and batch.emits[row + 1] == S.DRAFT


@device
def begin_drafts(limits, drafts, slot, predicted):
    """One lane: prepare for a new request. predicted: tokens of its prediction."""
    if limits.draft_tokens > 0:
        drafts.source[slot] = -1
        drafts.most[slot] = limits.draft_tokens
        drafts.rests_until[slot] = 0
        drafts.known[slot] = limits.draft_match - 1
        drafts.predicted[slot] = limits.max_model_len - predicted + limits.draft_match - 1


@device
def first_place(limits, requests, slot):
    """The position of a prediction's first token."""
    return limits.max_model_len - requests.entry[slot, WORD_PREDICTED_TOKENS]


@device
def first_intact(limits, requests, slot):
    """The first position of a prediction that neither output nor drafts overwrite; at least max_model_len if all are
    overwritten."""
    return max(first_place(limits, requests, slot), requests.length[slot] + limits.draft_tokens)


@device
def follows_prediction(limits, requests, drafts, slot):
    """Whether a request's drafts come from its prediction. Not with Limits.step_drafts."""
    return drafts.source[slot] >= first_intact(limits, requests, slot)


@device
def find_drafts(limits, state, lane, lanes):
    """Part of overlap: update the index, and look for drafts that may follow the token being sampled. Returns whether any request
    may get drafts.
    """
    if limits.draft_tokens == 0 or not step_ended(state.batch):
        return False
    if limits.step_drafts > 0:
        return find_step_drafts(state, lane, lanes)
    requests, drafts, batch = state.requests, state.drafts, state.batch
    found = 0
    for row in strided(lane, batch.counts[S.ROWS], lanes):
        slot = batch.row_slots[row]
        able = batch.emits[row] != S.DRAFT and may_have_drafts(requests, slot)
        if able:
            index_tokens(limits, requests, drafts, slot)
        if batch.emits[row] != S.DRAFT and not has_draft_row(batch, row):
            source = -1
            if able and batch.emits[row] != 0 and requests.length[slot] >= drafts.rests_until[slot]:
                source = next_place(limits, requests, drafts, slot)
            drafts.source[slot] = source
            found = 1 if source >= 0 else found
        elif batch.emits[row] != S.DRAFT:
            found = 1  # all drafts of the running step may be correct
    return block_max(found, lane, lanes) > 0


@device
def find_step_drafts(state, lane, lanes):
    """find_drafts, if the step returns the drafts. Requests never rest, because their drafts are computed anyway."""
    requests, drafts, batch = state.requests, state.drafts, state.batch
    found = 0
    for row in strided(lane, batch.counts[S.ROWS], lanes):
        if batch.emits[row] != S.DRAFT:
            slot = batch.row_slots[row]
            able = batch.emits[row] != 0 and may_have_drafts(requests, slot)
            drafts.source[slot] = row if able else -1
            found = 1 if able else found
    return block_max(found, lane, lanes) > 0


@device
def no_drafts(limits, state, lane, lanes):
    """Replaces find_drafts and propose_drafts if no request has drafts."""
    return False


@device
def bucket_of(limits, requests, slot, position, kind):
    """The bucket of the n-gram before a position."""
    key = kind
    for i in range(position - limits.draft_match + 1, position):
        key = (key * HASH_MULTIPLIER + requests.tokens[slot, i] + 1) & HASH_MASK
    return (key ^ key >> HASH_FOLD) & (limits.draft_buckets - 1)


@device
def index_tokens(limits, requests, drafts, slot):
    """One lane: add known and predicted tokens to the index, by the n-grams before them."""
    drafts.known[slot] = index_places(limits, requests, drafts, slot, drafts.known[slot], requests.length[slot], OWN)
    end = limits.max_model_len
    if drafts.predicted[slot] < end:
        first = max(drafts.predicted[slot], first_intact(limits, requests, slot))  # positions of the output keep their links
        drafts.predicted[slot] = index_places(limits, requests, drafts, slot, first, end, PREDICTED)


@device
def index_places(limits, requests, drafts, slot, first, end, kind):
    """One lane: add the next of the positions [first, end) to the index. Returns the first position that is left."""
    last = min(end, first + INDEXED_AT_ONCE)
    for position in range(first, last):
        bucket = bucket_of(limits, requests, slot, position, kind)
        drafts.links[slot, position] = drafts.heads[slot, bucket]
        drafts.heads[slot, bucket] = position
    return max(first, last)


@device
def next_place(limits, requests, drafts, slot):
    """The position of the likely next token: the prediction's start before any output, later the end of the longest match."""
    first, length = first_place(limits, requests, slot), requests.length[slot]
    if requests.entry[slot, WORD_OUTPUT_TOKENS] == 0 and length == requests.prompt_length[slot]:
        if first < limits.max_model_len and first == first_intact(limits, requests, slot):
            return first
    return longest_match(limits, requests, drafts, slot)


@device
def longest_match(limits, requests, drafts, slot):
    """The position after the longest earlier or predicted match of the request's last tokens, or -1 if fewer than
    draft_match - 1 tokens repeat.
    """
    length, source = requests.length[slot], -1
    best = limits.draft_match - 2
    if length < limits.draft_match:
        return source
    first = first_intact(limits, requests, slot)
    if first < limits.max_model_len:
        best, source = longer_match(limits, requests, drafts, slot, PREDICTED, first, limits.max_model_len, best, source)
    best, source = longer_match(limits, requests, drafts, slot, OWN, 0, length, best, source)
    return source


@device
def longer_match(limits, requests, drafts, slot, kind, first, end, best, source):
    """The longest match that ends before one of the positions [first, end). Returns (matching tokens, position), or (best,
    source) if no match has more than `best` tokens.
    """
    length, tried = requests.length[slot], 0
    position = drafts.heads[slot, bucket_of(limits, requests, slot, length, kind)]
    while position > 0 and tried < CANDIDATES:
        if first <= position < end:
            equal = 0
            while equal < min(position - first, length, LONGEST_MATCH) and (
                requests.tokens[slot, position - 1 - equal] == requests.tokens[slot, length - 1 - equal]
            ):
                equal += 1
            if equal > best:
                best, source = equal, position
        before = drafts.links[slot, position]
        position = before if before < position else 0  # a stale entry of an earlier request may point anywhere
        tried += 1
    return best, source


@device
def wanted_drafts(limits, state, slot):
    """The number of drafts that a request can use in the next step, before rows and pages are distributed."""
    requests, drafts, source = state.requests, state.drafts, state.drafts.source[slot]
    length, most = requests.length[slot], drafts.most[slot]
    if source < 0 or requests.stalled[slot] != 0:
        return 0
    if limits.step_drafts > 0:
        most = min(most, returned_drafts(limits, state.batch, source, slot))
    else:
        if source >= length - 1:
            if not follows_prediction(limits, requests, drafts, slot):
                return 0
            most = min(most, limits.max_model_len - 1 - source)
        if most < 1 or requests.tokens[slot, source] != requests.tokens[slot, length - 1]:
            return 0
    if free_entries(limits, state.pairs, requests.pair[slot]) <= limits.rows:  # one entry per row that the step may have
        return 0
    left = requests.prompt_length[slot] + requests.entry[slot, WORD_MAX_TOKENS] - length  # intake limits this to the context
    return min(most, left - 1)  # one token needs no draft


@device
def returned_drafts(limits, batch, row, slot):
    """The number of drafts that the step returned for a request; 0 if `row` now belongs to another request."""
    count = 0
    if row < batch.counts[S.ROWS] and batch.row_slots[row] == slot:
        while count < limits.step_drafts and 0 <= batch.drafted[row, count] < limits.vocab_size:
            count += 1
    return count


@device
def write_drafts(limits, state, slot, wanted):
    """One lane: write a request's drafts after its tokens, up to the first draft that its grammar refuses. Returns their number,
    and stores the position of its automaton after each.
    """
    requests, source, length = state.requests, state.drafts.source[slot], state.requests.length[slot]
    constrained, position = requests.entry[slot, WORD_GRAMMAR_WORDS] != 0, requests.grammar_state[slot]
    limit = limits.rows if limits.step_drafts > 0 else length - 1
    predicted = takes_predictions(limits) and follows_prediction(limits, requests, state.drafts, slot)
    expect(state, wanted == 0 or predicted or 0 <= source < limit, F.DRAFT_SOURCE)
    for k in range(wanted):  # in order, because the source may overlap the drafts
        token = state.batch.drafted[source, k] if limits.step_drafts > 0 else requests.tokens[slot, source + 1 + k]
        if constrained:
            position = counted_state_after(state.grammars, requests.grammar[slot], position, token)
            if position < 0:
                return k
            requests.draft_states[slot, (length + k + 1) & (S.DRAFT_PLACES - 1)] = position
        requests.tokens[slot, length + k] = token
    return wanted


@device
def propose_drafts(limits, state, lane, lanes):
    """Part of schedule, before plan_batch: set scratch.first[i] to the number of drafts of running[i], and take
    their pages. The drafts are written after its tokens.

    No request has drafts if a prompt needs a chunk, a step is suspended, or more than draft_requests requests decode. Remaining
    rows and pages go to requests in the order of `running` (see share_out).
    """
    if limits.draft_tokens == 0:
        return
    requests, counts, scratch = state.requests, state.counts, state.scratch
    running, prompts = counts[S.RUNNING_COUNT], 0
    for i in strided(lane, running, lanes):
        slot = state.running[i]
        scratch.first[i] = 0
        if requests.stalled[slot] == 0 and requests.length[slot] - requests.computed[slot] > 1:
            prompts = 1
    decoding = running - counts[S.STALLED_COUNT]
    rows = limits.rows - decoding if decoding <= limits.draft_requests else 0
    if block_max(prompts, lane, lanes) > 0 or is_suspended(state) or rows == 0:
        barrier(lanes)
        return
    proposed, pages, refused = share_out(limits, state, running, rows, lane, lanes)
    barrier(lanes)
    if lane == 0:
        state.counters[DRAFT_TOKENS] += proposed
        state.counters[DRAFTS_REFUSED] += refused
    if proposed == 0:
        return
    if pages > 0:
        take_draft_pages(limits, state, running, pages, lane, lanes)


@device
def share_out(limits, state, running, rows, lane, lanes):
    """Distribute `rows` rows to drafts: running[i] gets scratch.first[i] drafts, and scratch.page[i] further pages for them.
    Returns (drafts, additional pages, drafts that grammars refused).

    Without free pages, a request keeps only the drafts that fit into its pages; drafts preempt no request. One page for
    each running request, at most an eighth of the pool, stays free. Best effort gets no additional pages if its pages are
    limited.
    """
    requests, scratch = state.requests, state.scratch
    spare, limited = spare_pages(limits, state.counts), limits_pages(limits)
    drafts, asked, taken, refused = 0, 0, 0, 0
    for tile in strided(0, running, lanes):
        i = tile + lane
        wanted, lacking, held = 0, 0, 0
        if i < running:
            slot = state.running[i]
            wanted = wanted_drafts(limits, state, slot)
            written = write_drafts(limits, state, slot, wanted)
            refused += wanted - written
            wanted = written
            # Drafts that its pages hold; a stalled request may even lack a page.
            held = max(0, (requests.num_pages[slot] << limits.page_shift) - requests.length[slot])
        before, total = block_scan(wanted, lane, lanes)
        granted = max(0, min(wanted, rows - before))
        rows = max(0, rows - total)
        if granted > held:
            lacking = (granted - held + limits.page_size - 1) >> limits.page_shift
            if limited and requests.entry[state.running[i], WORD_BEST_EFFORT] != 0:
                granted, lacking = held, 0
        before, total = block_scan(lacking, lane, lanes)
        if lacking > 0 and asked + before + lacking > spare:
            granted, lacking = held, 0
        asked += total
        if i < running:
            scratch.first[i], scratch.page[i] = granted, lacking
        _, total = block_scan(lacking << _HALF | granted, lane, lanes)
        drafts, taken = drafts + (total & _LOW), taken + (total >> _HALF)
    return drafts, taken, block_sum(refused, lane, lanes)


@device
def take_draft_pages(limits, state, running, amount, lane, lanes):
    """Give running[i] scratch.page[i] further pages, `amount` in total."""
    requests, pages, counts = state.requests, state.pages, state.counts
    evict_pages(limits, pages, counts, state.counters, amount, lane, lanes)
    free = counts[S.FREE_COUNT]
    expect(state, free >= amount, F.STACK_SHORT)
    for tile in strided(0, running, lanes):
        i = tile + lane
        slot, lacking = 0, 0
        if i < running:
            slot, lacking = state.running[i], state.scratch.page[i]
        free -= extend_table(requests, pages, slot, lacking, free, lane, lanes)
    barrier(lanes)
    if lane == 0:
        counts[S.FREE_COUNT] = free
    barrier(lanes)


@device
def learn_from_drafts(limits, drafts, slot, length, given, accepted):
    """One lane: adapt a request's number of drafts to its acceptance in a step.

    length: tokens of the request after the step. given, accepted: its drafts in the step.
    The number doubles if all drafts were correct. Otherwise it becomes one more than the number of correct drafts. If the first
    draft was wrong, the number is halved, and the request pauses its drafts.
    """
    most = drafts.most[slot]
    if accepted == given:
        most = min(limits.draft_tokens, 2 * most)
    elif accepted > 0:
        most = accepted + 1
    else:
        most = max(1, most >> 1)
        drafts.rests_until[slot] = length + limits.draft_rest
    drafts.most[slot] = most
    if limits.step_drafts == 0:
        drafts.source[slot] += accepted + 1
