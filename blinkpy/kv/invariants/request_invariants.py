"""Checks of requests, of the lists that hold them, and of the pairs that own them."""

from blinkpy.device.expect import fault_at, fault_code
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.kv.grammars import end_of, holds_rules, is_position
from blinkpy.queues import submission as E

UNRANKED = fault_code("requests without a rank are left over")
NO_STATUS = fault_code("slot {} has no legal status")
RUNNING_LIST = fault_code("running does not list the slots with that status")
WAITING_LIST = fault_code("waiting does not list the slots with that status")
FINISHING_LIST = fault_code("finishing does not list the slots with that status")
UNSORTED = fault_code("waiting is not sorted by (rank, arrival) at {}")


@device
def check_list(slots, n, total, status, wanted, seen):
    """Whether slots[0:n] lists exactly the slots with a status, without duplicates.

    total: S.
    seen: scratch, int64 [>= S].
    """
    if n < 0 or n > total:
        return False
    having = 0
    for slot in range(total):
        seen[slot] = 0
        if status[slot] == wanted:
            having += 1
    for i in range(n):
        slot = slots[i]
        if slot < 0 or slot >= total or status[slot] != wanted or seen[slot] != 0:
            return False
        seen[slot] = 1
    return having == n


@device
def check_lists(limits, state, seen):
    counts, requests = state.counts, state.requests
    if counts[S.UNRANKED_COUNT] != 0:
        return UNRANKED
    for slot in range(limits.slots):
        if requests.status[slot] < S.EMPTY or requests.status[slot] > S.FINISHING:
            return fault_at(NO_STATUS, slot)
    if counts[S.RUNNING_COUNT] > limits.rows or not check_list(
        state.running, counts[S.RUNNING_COUNT], limits.slots, requests.status, S.RUNNING, seen
    ):
        return RUNNING_LIST
    if not check_list(state.waiting, counts[S.WAITING_COUNT], limits.slots, requests.status, S.WAITING, seen):
        return WAITING_LIST
    if not check_list(state.finishing, counts[S.FINISHING_COUNT], limits.slots, requests.status, S.FINISHING, seen):
        return FINISHING_LIST
    for i in range(1, counts[S.WAITING_COUNT]):
        before, after = state.waiting[i - 1], state.waiting[i]
        if requests.rank[before] > requests.rank[after] or (
            requests.rank[before] == requests.rank[after] and requests.arrival[before] > requests.arrival[after]
        ):
            return fault_at(UNSORTED, i)
    return 0


PROMPT_LONGER = fault_code("slot {}: its prompt is longer than its request and not scored, or empty")
CONTEXT_EXCEEDED = fault_code("slot {}: its request is longer than the context")
NOTHING_TO_COMPUTE = fault_code("slot {} runs and has nothing to compute")
IDLE_CACHE = fault_code("slot {} does not run and has a cache")
IDLE_PAGES = fault_code("slot {} does not run and holds pages")
MORE_COMPUTED = fault_code("slot {}: more tokens are computed than its pages hold")
TABLE_END = fault_code("slot {}: its page table has entries after its pages")
TABLE_RANGE = fault_code("slot {}: a page id of its page table is out of range")
INDEXED_BEYOND = fault_code("slot {}: more pages are indexed than held")
INDEXED_COMPUTED = fault_code("slot {}: a page is indexed that is not computed")
IDLE_STALLED = fault_code("slot {} is stalled and does not run")
STALLED_WRONG = fault_code("the number of stalled requests is wrong")
TENANT_ROW = fault_code("slot {}: the row of its tenant is out of range")
VOCABULARY = fault_code("slot {}: a token is outside the vocabulary")
GRAMMAR_LOST = fault_code("slot {}: its request has a grammar without an automaton, or an automaton without a grammar")
GRAMMAR_FOREIGN = fault_code("slot {}: its request's automaton is a different one, or belongs to another queue pair")
GRAMMAR_STATE = fault_code("slot {}: its automaton has no such state")
RULES_LOST = fault_code("slot {}: its request has token rules only in its entry, or only in the engine")
BEST_EFFORT_PAGES = fault_code("best-effort requests hold more pages than they may together")
RULES_FOREIGN = fault_code("slot {}: its request's token rules are different ones, or belong to another queue pair")


@device
def check_request(limits, r, slot):
    """Check one request slot."""
    running = r.status[slot] == S.RUNNING
    live = running or r.status[slot] == S.WAITING
    computed, length, held = r.computed[slot], r.length[slot], r.num_pages[slot]
    scored = r.entry[slot, E.WORD_FLAGS] & E.SUBMIT_SCORE_PROMPT != 0
    if live and (r.prompt_length[slot] < 1 or length < (1 if scored else r.prompt_length[slot])):
        return fault_at(PROMPT_LONGER, slot)
    if live and max(length, r.prompt_length[slot]) > limits.max_model_len:
        return fault_at(CONTEXT_EXCEEDED, slot)
    if computed < 0 or (running and computed >= length):
        return fault_at(NOTHING_TO_COMPUTE, slot)
    if not running and computed != 0 and r.status[slot] != S.EMPTY:
        return fault_at(IDLE_CACHE, slot)
    if not running and held != 0:
        return fault_at(IDLE_PAGES, slot)
    if computed > held * limits.page_size:
        return fault_at(MORE_COMPUTED, slot)
    if held > limits.pages_per_sequence:
        return fault_at(TABLE_END, slot)
    for k in range(limits.pages_per_sequence):
        page = r.page_table[slot, k]
        if (k < held) != (page >= 0):
            return fault_at(TABLE_END, slot)
        if page < -1 or page >= limits.pages:
            return fault_at(TABLE_RANGE, slot)
    if running and r.indexed[slot] > held:
        return fault_at(INDEXED_BEYOND, slot)
    if running and r.indexed[slot] * limits.page_size > computed:
        return fault_at(INDEXED_COMPUTED, slot)
    if r.stalled[slot] != 0 and not running:
        return fault_at(IDLE_STALLED, slot)
    if live and not 0 <= r.tenant_row[slot] < limits.slots:
        return fault_at(TENANT_ROW, slot)
    if live:
        for i in range(max(length, r.prompt_length[slot])):
            if r.tokens[slot, i] < 0 or r.tokens[slot, i] >= limits.vocab_size:
                return fault_at(VOCABULARY, slot)
    return 0


@device
def check_grammar(limits, state, slot):
    """Check the automaton of a live request."""
    r, own = state.requests, state.requests.grammar[slot]
    if (own != -1) != (r.entry[slot, E.WORD_GRAMMAR_WORDS] != 0):
        return fault_at(GRAMMAR_LOST, slot)
    if own == -1:
        return 0
    if not is_own(limits, state, slot, own, E.WORD_GRAMMAR_DIGEST):
        return fault_at(GRAMMAR_FOREIGN, slot)
    words = state.grammars.words
    fine = not holds_rules(words, own) and end_of(words, own) <= limits.grammar_words
    return 0 if fine and is_position(words, own, r.grammar_state[slot]) else fault_at(GRAMMAR_STATE, slot)


@device
def check_rules(limits, state, slot):
    """Check the token rules of a live request."""
    own = state.requests.rules[slot]
    if (own != -1) != (state.requests.entry[slot, E.WORD_RULES_WORDS] != 0):
        return fault_at(RULES_LOST, slot)
    if own == -1:
        return 0
    fine = is_own(limits, state, slot, own, E.WORD_RULES_DIGEST) and holds_rules(state.grammars.words, own)
    return 0 if fine else fault_at(RULES_FOREIGN, slot)


@device
def is_own(limits, state, slot, own, digest_word):
    """Whether grammar slot `own` belongs to the request's queue pair, and holds the object that the request's entry names."""
    r, g, pair = state.requests, state.grammars, state.requests.pair[slot]
    if own < 0 or own // limits.grammar_share != pair or g.epoch[own] != state.pairs.epoch[pair]:
        return False
    return g.digest[own] == r.entry[slot, digest_word + 1] << 32 | (r.entry[slot, digest_word] & 0xFFFFFFFF)


@device
def check_best_effort(limits, state):
    """Check the pages of running best-effort requests against their share; a single request may exceed it."""
    r, held, running = state.requests, 0, 0
    for slot in range(limits.slots):
        if r.status[slot] == S.RUNNING and r.entry[slot, E.WORD_BEST_EFFORT] != 0:
            held, running = held + r.num_pages[slot], running + 1
    bounded = limits.best_effort_pages < limits.pages and running > 1
    return BEST_EFFORT_PAGES if bounded and held > limits.best_effort_pages else 0


@device
def check_requests(limits, state):
    stalled = 0
    for slot in range(limits.slots):
        fault = check_request(limits, state.requests, slot)
        if fault == 0 and (state.requests.status[slot] == S.RUNNING or state.requests.status[slot] == S.WAITING):
            fault = check_grammar(limits, state, slot)
            fault = fault if fault != 0 else check_rules(limits, state, slot)
        if fault != 0:
            return fault
        stalled += 1 if state.requests.stalled[slot] != 0 else 0
    return STALLED_WRONG if stalled != state.counts[S.STALLED_COUNT] else check_best_effort(limits, state)


SUBMISSIONS = fault_code("queue pair {}: its submission ring overflowed")
COMPLETIONS = fault_code("queue pair {}: its completion ring overflowed")
OWNERLESS = fault_code("slot {}: the owner of its request is gone")


@device
def check_pairs(limits, state):
    p, r = state.pairs, state.requests
    for pair in range(limits.pairs):
        if not 0 <= p.sq_tail[pair] - p.sq_head[pair] <= limits.sq_entries:
            return fault_at(SUBMISSIONS, pair)
        if not 0 <= p.cq_tail[pair] - p.cq_head[pair] <= limits.cq_entries:
            return fault_at(COMPLETIONS, pair)
    for slot in range(limits.slots):
        if r.status[slot] != S.EMPTY and p.attached[r.pair[slot]] != 1:
            return fault_at(OWNERLESS, slot)
    return 0
