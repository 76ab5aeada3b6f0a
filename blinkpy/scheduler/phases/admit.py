"""Admission of waiting requests: see `admit`."""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_sum, device, store_relaxed, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import check_state as F
from blinkpy.kv.page_allocator import share_pages, take_pages
from blinkpy.kv.prefix_cache import find_prefix, uses_prefixes
from blinkpy.kv.snapshots import snapshot_hits, start_from_snapshot
from blinkpy.queues.submission import WORD_BEST_EFFORT
from blinkpy.queues.words import HIT_SHIFT, NAME_BITS, NAME_MASK, WAIT_LIMIT, WAIT_SHIFT
from blinkpy.scheduler.phases.intake import MICROSECOND_NS
from blinkpy.scheduler.phases.preempt import WATERMARK_SHIFT, missing_pages, preempt, preemption_victim, spare_pages
from blinkpy.scheduler.phases.waiting_list import keep_with_status
from blinkpy.scheduler.yielding import best_effort_load, best_effort_prompt, goes_first, next_to_pass

PREFIX_LOOKUP_TOKENS = S.COUNTER_INDEX["prefix_lookup_tokens"]
PREFIX_HIT_TOKENS = S.COUNTER_INDEX["prefix_hit_tokens"]

_COUNT_BITS = 16  # requests in the low bits, tokens above, in one sum
_COUNT_MASK = 0xFFFF
# Results for a waiting request: preempt a stalled request for it; it can run; its class has used its pages; it blocks later
# requests.
NOT_YET, FITS_NOW, CLASS_WAITS, MUST_WAIT = range(4)


@device
def admit(limits, queues, state, budget, yields, lane, lanes):
    """Admit waiting requests, best rank first, while rows, token budget and pages last.

    No request overtakes a better-ranked request that does not fit, which could otherwise wait forever. Waiting requests that
    stall are skipped; stalled running requests are preempted. If best effort has used its share of the step or of the pages, all
    best-effort requests are skipped.

    yields: whether best-effort prompts yield (begin_yield); then only latency-sensitive requests are admitted, up to the limit of
    overtakings.
    """
    requests, counts = state.requests, state.counts
    waiting = counts[S.WAITING_COUNT]
    if waiting == 0 or counts[S.UNRANKED_COUNT] > 0:  # a request that was just preempted would be admitted first
        return
    admitted, passed, position, outcome = 0, counts[S.PASSED], 0, NOT_YET  # written back below, after a barrier
    left, space = 1, 0  # yielding requests are not admitted; for other requests see tokens_ahead
    if not yields:
        left, space = budget_left(limits, state, budget, lane, lanes)
    while outcome != MUST_WAIT and position < waiting and left > 0:
        slot, passes = state.waiting[position], False
        if yields:
            slot, passes = next_to_pass(limits, state, passed, lane, lanes)
            left = budget - tokens_ahead(state, slot, lane, lanes) if slot >= 0 else 0
        if left > 0 and state.pairs.unclaimed_entries[requests.pair[slot]] > 0:
            best_effort = requests.entry[slot, WORD_BEST_EFFORT] != 0
            outcome = CLASS_WAITS
            if space > 0 or not best_effort:
                outcome = fits_after_preemption(limits, state, slot, best_effort, lane, lanes)
            if outcome == CLASS_WAITS:
                space = 0
            elif outcome == FITS_NOW:
                hits = start_request(limits, queues, state, slot, lane, lanes)
                missing = requests.length[slot] - (hits << limits.page_shift)
                left -= min(missing, space) if best_effort else missing
                space -= missing if best_effort else 0
                admitted += 1
                passed += 1 if passes else 0
            if best_effort and outcome != MUST_WAIT:
                passed = 0
        position += 1
    entering = counts[S.UNRANKED_COUNT]
    if admitted > 0:
        kept = keep_with_status(state.waiting, waiting + entering, requests.status, S.WAITING, lane, lanes)
        if lane == 0:
            counts[S.WAITING_COUNT] = kept - entering
    if lane == 0:
        counts[S.PASSED] = passed
    barrier(lanes)


@device
def budget_left(limits, state, budget, lane, lanes):
    """(tokens of the budget that running requests leave, part of them for best-effort prompts). At most 0 if the budget is used
    up.
    """
    requests = state.requests
    others, prompts, decoding = 0, 0, 0  # others: tokens of all requests except best-effort prompts
    for i in strided(lane, state.counts[S.RUNNING_COUNT], lanes):
        slot = state.running[i]
        if requests.stalled[slot] == 0:
            missing = requests.length[slot] - requests.computed[slot]
            decoding += 1 if missing == 1 else 0
            if best_effort_prompt(requests, slot):
                prompts += missing
            else:
                others += missing
    others = block_sum(others << _COUNT_BITS | decoding, lane, lanes)
    prompts = block_sum(prompts, lane, lanes)
    space = limits.best_effort_step_tokens - (others & _COUNT_MASK)
    return budget - (others >> _COUNT_BITS) - min(prompts, space), space - prompts


@device
def tokens_ahead(state, slot, lane, lanes):
    """Tokens of a step that precede a waiting latency-sensitive request while best-effort prompts yield: decodes, and chunks of
    latency-sensitive prompts with a lower (rank, arrival).
    """
    requests, ahead = state.requests, 0
    for i in strided(lane, state.counts[S.RUNNING_COUNT], lanes):
        other = state.running[i]
        if requests.stalled[other] == 0:
            missing = requests.length[other] - requests.computed[other]
            if missing == 1 or (requests.entry[other, WORD_BEST_EFFORT] == 0 and goes_first(requests, other, slot)):
                ahead += missing
    return block_sum(ahead, lane, lanes)


@device
def fits_after_preemption(limits, state, slot, best_effort, lane, lanes):
    """FITS_NOW, CLASS_WAITS or MUST_WAIT for a waiting request, preempting stalled requests for it; only stalled best-effort
    requests if that class has used its pages. scratch.found: see fits_now.
    """
    outcome = NOT_YET
    while outcome == NOT_YET:
        crowded = best_effort and not fits_best_effort(limits, state, slot, lane, lanes)
        if not crowded and fits_now(limits, state, slot, lane, lanes):
            outcome = FITS_NOW
        else:
            victim = -1
            if state.counts[S.STALLED_COUNT] > 0:
                victim = preemption_victim(state, True, crowded, lane, lanes)
            if victim < 0:
                outcome = CLASS_WAITS if crowded else MUST_WAIT
            else:
                preempt(limits, state, victim, lane, lanes)
                n = state.counts[S.RUNNING_COUNT]
                n = keep_with_status(state.running, n, state.requests.status, S.RUNNING, lane, lanes)
                if lane == 0:
                    state.counts[S.RUNNING_COUNT] = n
                barrier(lanes)
    return outcome


@device
def fits_best_effort(limits, state, slot, lane, lanes):
    """Whether best effort may hold one more request's pages, plus one page per running best-effort request, up to an eighth of
    the pool.
    """
    if limits.best_effort_pages == limits.pages:
        return True
    running, held = best_effort_load(state, lane, lanes)
    spare = min(running, limits.best_effort_pages >> WATERMARK_SHIFT)
    return running == 0 or held + missing_pages(limits, state.requests, slot) + spare <= limits.best_effort_pages


@device
def fits_now(limits, state, slot, lane, lanes):
    """Whether a row is free, and pages for all tokens of a waiting request. Its hits are in scratch.found and hit_tokens.

    One more page per running request must be free, so that the new request is not preempted immediately.
    """
    requests, pages, counts, scratch = state.requests, state.pages, state.counts, state.scratch
    available = spare_pages(limits, counts)
    if counts[S.RUNNING_COUNT] == limits.rows or available <= 0:  # every request needs at least one page that is not a hit
        return False
    hits = find_prefix(limits, requests, pages, scratch.found, slot, lane, lanes)
    if limits.snapshots > 0:
        hits = snapshot_hits(limits, state, slot, hits, lane, lanes)
    revived = 0
    for k in strided(lane, hits, lanes):
        revived += 1 if pages.refcount[scratch.found[k]] == 0 else 0
    revived = block_sum(revived, lane, lanes)
    if lane == 0:
        requests.hit_tokens[slot] = hits << limits.page_shift
    barrier(lanes)
    return missing_pages(limits, requests, slot) - hits <= available - revived


@device
def start_request(limits, queues, state, slot, lane, lanes):
    """Give a fitting request its pages and let it run. Returns the number of hit pages."""
    requests, pages, counts, scratch = state.requests, state.pages, state.counts, state.scratch
    expect(state, requests.status[slot] == S.WAITING, F.STARTED_IDLE)
    expect(state, counts[S.RUNNING_COUNT] < limits.rows, F.ROWS_FULL)
    expect(state, state.pairs.unclaimed_entries[requests.pair[slot]] > 0, F.NO_ENTRY)
    hits = requests.hit_tokens[slot] >> limits.page_shift
    total = missing_pages(limits, requests, slot)
    if hits > 0:
        share_pages(requests, pages, counts, scratch.found, slot, hits, lane, lanes)
    take_pages(limits, requests, pages, counts, state.counters, slot, total - hits, lane, lanes)
    if lane == 0:
        requests.status[slot] = S.RUNNING
        requests.computed[slot] = hits << limits.page_shift
        requests.indexed[slot] = hits
        requests.canonical[slot] = S.NO_PAGE
        if hits > 0:
            page = scratch.found[hits - 1]
            requests.canonical[slot] = page
            requests.canonical_generation[slot] = pages.generation[page]
        if limits.snapshots > 0:
            start_from_snapshot(state, slot, hits)
        if requests.preemptions[slot] == 0:  # after a preemption, hits are the request's own pages
            pair, request_id = requests.pair[slot], requests.request_id[slot]
            name = (request_id ^ request_id >> NAME_BITS ^ request_id >> 2 * NAME_BITS) & NAME_MASK
            waited_ns = state.inbox.now_ns[0] - requests.arrival_us[slot] * MICROSECOND_NS
            word = name | min(waited_ns >> WAIT_SHIFT, WAIT_LIMIT - 1) << NAME_BITS | hits << HIT_SHIFT
            store_relaxed(queues.hits, (pair, slot - pair * limits.slots_per_pair), word)
        state.running[counts[S.RUNNING_COUNT]] = slot
        counts[S.RUNNING_COUNT] += 1
        state.pairs.unclaimed_entries[requests.pair[slot]] -= 1
        state.tenants.clock[0] = max(state.tenants.clock[0], requests.service[slot])
        if uses_prefixes(limits, requests, slot):
            state.counters[PREFIX_LOOKUP_TOKENS] += requests.length[slot]
            state.counters[PREFIX_HIT_TOKENS] += hits << limits.page_shift
    barrier(lanes)
    return hits
