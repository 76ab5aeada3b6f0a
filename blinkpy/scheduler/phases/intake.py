"""Takes new requests from the submission rings. All checks are here, so later phases can rely on valid data.

Each entry is copied once, and the copy is checked. So a front end that writes while the engine reads can only harm itself.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_sum, device, store_release, strided
from blinkpy.kv import state as S
from blinkpy.kv.grammar_checks import are_token_rules, is_automaton
from blinkpy.kv.grammars import find_grammar, start_of, unused_grammar
from blinkpy.kv.invariants import check_state as F
from blinkpy.kv.limits import takes_predictions
from blinkpy.queues import submission as E
from blinkpy.queues import words as C
from blinkpy.queues.byte_automaton import CELLS_WORD
from blinkpy.queues.page_hash import HASH_SHIFT
from blinkpy.queues.request_parameters import INT32_MAX
from blinkpy.queues.token_rules import FIRST_WORD as FIRST_RULES_WORD
from blinkpy.queues.words import COMMAND_RUN, PAIR_SQ_HEAD
from blinkpy.scheduler.phases.drafts import begin_drafts
from blinkpy.scheduler.phases.recorder import record_entry, submitted_place
from blinkpy.scheduler.tenant_service import charge_tenant

REQUESTS_ACCEPTED = S.COUNTER_INDEX["requests_accepted"]
REQUESTS_REJECTED = S.COUNTER_INDEX["requests_rejected"]
PROMPT_TOKENS = S.COUNTER_INDEX["prompt_tokens"]
STALE_ENTRIES = S.COUNTER_INDEX["stale_entries"]
GRAMMARS_INSTALLED = S.COUNTER_INDEX["grammars_installed"]
GRAMMARS_REUSED = S.COUNTER_INDEX["grammars_reused"]

MICROSECOND_NS = 1000
HASH_LIMIT = 1 << 2 * HASH_SHIFT


@device
def intake(limits, queues, state, lane, lanes):
    """Consume entries, rotating over the pairs. Accepted requests are "entering": not ranked yet.

    A pair that changes its owner gives no entries; the old owner's entries are skipped.
    """
    pairs, counts = state.pairs, state.counts
    pending = 0
    for pair in strided(lane, limits.pairs, lanes):
        pending += pairs.sq_tail[pair] - pairs.sq_head[pair]
    pending = block_sum(pending, lane, lanes)
    if pending == 0 or state.inbox.command[0] != COMMAND_RUN:
        return
    pair = counts[S.ROTATION]
    entries, tokens = 0, 0
    while entries < min(pending, limits.intake_entries) and tokens < limits.intake_tokens:
        while pairs.sq_head[pair] == pairs.sq_tail[pair]:  # terminates, because some pair has an entry
            pair = pair + 1 if pair + 1 < limits.pairs else 0
        tokens += consume_entry(limits, queues, state, pair, lane, lanes)
        if lane == 0:
            pairs.sq_head[pair] += 1
        barrier(lanes)
        pair = pair + 1 if pair + 1 < limits.pairs else 0
        entries += 1
    if lane == 0:
        counts[S.ROTATION] = pair
    # Keeps O2 of docs/verification.md: after these stores, front ends may overwrite consumed entries, so they
    # release.
    for taken in strided(lane, limits.pairs, lanes):
        store_release(queues.pair, (taken, PAIR_SQ_HEAD), pairs.sq_head[taken])
    barrier(lanes)


@device
def consume_entry(limits, queues, state, pair, lane, lanes):
    """Consume one entry. Returns the number of copied prompt tokens and words. Ends with a barrier."""
    requests, counts, counters, entry = state.requests, state.counts, state.counters, state.scratch.entry
    where = state.pairs.sq_head[pair] & (limits.sq_entries - 1)
    for word in strided(lane, E.SQ_ENTRY_WORDS, lanes):
        entry[word] = queues.sq[pair, where, word]
    barrier(lanes)
    expect(state, state.pairs.attached[pair] == 1, F.ENTRY_UNOWNED)
    local = entry[E.WORD_SLOT]
    usable = 0 <= local < limits.slots_per_pair
    slot = pair * limits.slots_per_pair + local if usable else 0
    usable = usable and requests.status[slot] == S.EMPTY
    # Relies on O6 of docs/verification.md: an entry has its epoch, because an earlier owner's write may
    # arrive late.
    stale = entry[E.WORD_EPOCH] != state.pairs.epoch[pair]
    arrivals, waiting, entering = counts[S.ARRIVALS], counts[S.WAITING_COUNT], counts[S.UNRANKED_COUNT]
    finishing = counts[S.FINISHING_COUNT]
    barrier(lanes)
    if stale or not usable:
        if lane == 0:
            counters[STALE_ENTRIES if stale else REQUESTS_REJECTED] += 1
        record_entry(limits, state, pair, 0, 0, -1, 0, -1, 0, lane, lanes)
        return 0
    expect(state, requests.num_pages[slot] == 0, F.SLOT_HOLDS_PAGES)
    expect(state, waiting + entering < limits.slots and finishing < limits.slots, F.LISTS_FULL)
    reason = check_entry(limits, entry, state.pairs.epoch[pair])
    length, copied, grammar, taken, rules, taken_rules = entry[E.WORD_PROMPT_LENGTH], 0, -1, 0, -1, 0
    if reason == 0:
        reason = copy_prompt(limits, queues, requests, entry, pair, slot, lane, lanes)
        copied = length + entry[E.WORD_PREDICTED_TOKENS]
    if reason == 0 and entry[E.WORD_GRAMMAR_WORDS] != 0:
        reason, grammar, taken = take_grammar(limits, queues, state, pair, False, -1, lane, lanes)
    if reason == 0 and entry[E.WORD_RULES_WORDS] != 0:
        reason, rules, taken_rules = take_grammar(limits, queues, state, pair, True, grammar, lane, lanes)
    if reason == 0:
        charge_tenant(limits, state, slot, waiting + entering, lane, lanes)
    for word in strided(lane, E.SQ_ENTRY_WORDS, lanes):
        requests.entry[slot, word] = entry[word]
    if lane == 0 and reason == 0:
        requests.status[slot] = S.WAITING
        requests.request_id[slot] = long_word(entry, E.LONG_REQUEST_ID)
        requests.cache_salt[slot] = long_word(entry, E.LONG_CACHE_SALT)
        requests.prompt_length[slot] = length
        requests.length[slot] = 1 if entry[E.WORD_FLAGS] & E.SUBMIT_SCORE_PROMPT != 0 else length
        requests.computed[slot] = 0
        requests.hashed[slot] = entry[E.WORD_HASH_COUNT]
        requests.indexed[slot] = 0
        requests.canonical[slot] = S.NO_PAGE
        requests.arrival[slot] = arrivals
        requests.arrival_us[slot] = state.inbox.now_ns[0] // MICROSECOND_NS
        requests.first_token_ns[slot] = 0
        requests.finish[slot] = C.FINISH_NONE
        requests.stalled[slot] = 0
        requests.preemptions[slot] = 0
        requests.hit_tokens[slot] = 0
        requests.grammar[slot] = grammar
        requests.grammar_state[slot] = start_of(state.grammars.words, grammar) if grammar >= 0 else 0
        requests.rules[slot] = rules
        begin_drafts(limits, state.drafts, slot, entry[E.WORD_PREDICTED_TOKENS])
        state.inbox.cancel[slot] = 0  # drop the cancel word of the slot's last request, because a front end may reuse the id
        state.waiting[waiting + entering] = slot
        counts[S.UNRANKED_COUNT] = entering + 1
        counts[S.ARRIVALS] = arrivals + 1
        counters[REQUESTS_ACCEPTED] += 1
        counters[PROMPT_TOKENS] += length
    elif lane == 0:
        requests.status[slot] = S.FINISHING
        requests.request_id[slot] = long_word(entry, E.LONG_REQUEST_ID)
        requests.finish[slot] = C.FINISH_REJECTED | reason << S.FINISH_REASON_SHIFT
        state.finishing[finishing] = slot
        counts[S.FINISHING_COUNT] = finishing + 1
        counters[REQUESTS_REJECTED] += 1
    record_entry(limits, state, pair, slot, copied, grammar, taken, rules, taken_rules, lane, lanes)
    barrier(lanes)
    return copied + taken + taken_rules


@device
def long_word(entry, index):
    """An int64 field of an entry, from its int32 words."""
    return entry[2 * index + 1] << 32 | (entry[2 * index] & 0xFFFFFFFF)


@device
def check_entry(limits, entry, epoch):
    """The REJECT_* code of an invalid entry, or 0."""
    length, max_tokens = entry[E.WORD_PROMPT_LENGTH], entry[E.WORD_MAX_TOKENS]
    offset, count, full = entry[E.WORD_HASH_OFFSET], entry[E.WORD_HASH_COUNT], length >> limits.page_shift
    of_epoch = long_word(entry, E.LONG_REQUEST_ID) >> 32
    unhashed = count == 0 and (limits.prefix_caching == 0 or entry[E.WORD_FLAGS] & E.SUBMIT_NO_PREFIX_CACHE != 0)
    predicted, start = entry[E.WORD_PREDICTED_TOKENS], entry[E.WORD_PROMPT_OFFSET]
    usable = predicted == 0 or (predicted > 0 and takes_predictions(limits))
    reason = 0
    if length < 1 or start < 0 or start + length + max(0, predicted) > limits.prompt_tokens:
        reason = C.REJECT_PROMPT
    elif not parameters_in_range(entry) or entry[E.WORD_OUTPUT_TOKENS] >= length or of_epoch != epoch or not usable:
        reason = C.REJECT_PARAMETER
    elif length + max(max_tokens, predicted) > limits.max_model_len:
        reason = C.REJECT_LENGTH
    elif (length + max_tokens - 1 + limits.page_size - 1) >> limits.page_shift > limits.pages:  # the last token isn't cached
        reason = C.REJECT_PAGES
    elif (count != full and not unhashed) or offset < 0 or offset + count > limits.hash_entries:
        reason = C.REJECT_HASHES
    elif not words_in_range(limits, entry[E.WORD_GRAMMAR_OFFSET], entry[E.WORD_GRAMMAR_WORDS], CELLS_WORD):
        reason = C.REJECT_GRAMMAR
    elif not words_in_range(limits, entry[E.WORD_RULES_OFFSET], entry[E.WORD_RULES_WORDS], FIRST_RULES_WORD):
        reason = C.REJECT_RULES
    return reason


@device
def words_in_range(limits, offset, words, head):
    """Whether optional words (automaton or token rules) have a valid length and are inside the arena.

    head: number of words before the content.
    """
    return words == 0 or (head < words <= limits.grammar_words and 0 <= offset <= limits.prompt_tokens - words)


def make_range_check(checks):
    """A device function that returns whether an entry passes all of submission.CHECKS. Each check is a function with its numbers
    as constants, because numba-cuda would compile a loop over the tuple for ten minutes.
    """
    if not checks:
        return device(lambda entry: True)
    (word, low, high, is_float), rest = checks[0], make_range_check(checks[1:])

    @device
    def in_range(entry):
        key = entry[word]
        if is_float and key < 0:
            key = key ^ INT32_MAX  # submission.order_key
        return low <= key <= high and rest(entry)

    return in_range


parameters_in_range = make_range_check(E.CHECKS)


@device
def copy_prompt(limits, queues, requests, entry, pair, slot, lane, lanes):
    """Copy prompt, prediction and page hashes to the slot. Returns REJECT_* if a value is out of range, or 0."""
    offset, count = entry[E.WORD_PROMPT_OFFSET], entry[E.WORD_HASH_COUNT]
    length, predicted = entry[E.WORD_PROMPT_LENGTH], entry[E.WORD_PREDICTED_TOKENS]
    bad = 0
    for i in strided(lane, length + predicted, lanes):
        token = queues.prompt[pair, offset + i]
        requests.tokens[slot, submitted_place(limits, length, predicted, i)] = token
        if token < 0 or token >= limits.vocab_size:
            bad |= 1
    offset = entry[E.WORD_HASH_OFFSET]
    for i in strided(lane, count, lanes):
        key = queues.hashes[pair, offset + i]
        requests.page_hash[slot, i] = key
        if key < 0 or key >= HASH_LIMIT:
            bad |= 1 << 32
    bad = block_sum(bad, lane, lanes)
    reason = 0
    if bad & 0xFFFFFFFF:
        reason = C.REJECT_TOKEN
    elif bad > 0:
        reason = C.REJECT_HASHES
    return reason


@device
def take_grammar(limits, queues, state, pair, rules, kept, lane, lanes):
    """Find the automaton of scratch.entry in its pair's share of grammar slots, or copy it to a slot and check the copy.

    rules: whether to take the token rules instead.
    kept: the slot of the entry's automaton, or -1.

    Returns (REJECT_* or 0, slot, copied words). It never overwrites a slot that a live request uses.
    """
    grammars, entry, counters, epoch = state.grammars, state.scratch.entry, state.counters, state.pairs.epoch[pair]
    digest, offset, words = long_word(entry, E.LONG_GRAMMAR_DIGEST), entry[E.WORD_GRAMMAR_OFFSET], entry[E.WORD_GRAMMAR_WORDS]
    if rules:
        digest, offset, words = long_word(entry, E.LONG_RULES_DIGEST), entry[E.WORD_RULES_OFFSET], entry[E.WORD_RULES_WORDS]
    reason, copied, counter = 0, 0, GRAMMARS_REUSED
    slot = find_grammar(limits, grammars, pair, epoch, digest, rules, lane, lanes)
    if slot < 0:
        slot = unused_grammar(limits, state.requests, grammars, state.scratch, pair, kept, lane, lanes)
        if slot < 0:
            return C.REJECT_SHARE, slot, copied
        for i in strided(lane, words, lanes):
            grammars.words[slot, i] = queues.prompt[pair, offset + i]
        barrier(lanes)
        copied, counter = words, GRAMMARS_INSTALLED
        if rules and not are_token_rules(limits, grammars.words, slot, words, lane, lanes):
            reason = C.REJECT_RULES
        elif not rules and not is_automaton(grammars.words, slot, words, lane, lanes):
            reason = C.REJECT_GRAMMAR
    if lane == 0 and reason == 0:
        counters[counter] += 1
        grammars.epoch[slot], grammars.digest[slot] = epoch, digest
        grammars.used[slot] = counters[GRAMMARS_INSTALLED] + counters[GRAMMARS_REUSED]
    elif lane == 0:
        grammars.epoch[slot], grammars.used[slot] = 0, 0
    barrier(lanes)
    return reason, slot, copied
