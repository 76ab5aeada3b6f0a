"""The engine's grammars: byte automata that define the allowed outputs of a request, and token rules.

A slot of State.grammars holds an automaton (packed as in blinkpy/queues/byte_automaton.py) or token rules
(blinkpy/queues/token_rules.py). Each queue pair has a separate share of the slots, so front ends do not compete for slots. A
request has a slot and a position in its automaton: a state, and the number of characters in the open counted string. commit
advances the position by the bytes of each sampled token, and the samplers mask tokens with which no string of the language
continues. The position after a token is a pure function of the previous position and the token, so each draft of a request also
has a position (Requests.draft_states).

Near max_tokens, the mask leads to an end: the remaining tokens must suffice to reach an accepting state from the position after
a token (see most_distance).

A slot is in use while a waiting or running request refers to it. Slots have no reference counts: when a slot is needed, which is
rare, the requests are scanned.
"""

from blinkpy.device.portable import barrier, block_max, device, strided
from blinkpy.kv import state as S
from blinkpy.queues import byte_automaton as A
from blinkpy.queues import token_rules as R
from blinkpy.queues.submission import STOP_IDS, WORD_MAX_TOKENS, WORD_MIN_TOKENS, WORD_RULES_WORDS, WORD_STOP_IDS
from blinkpy.queues.words import FINISH_COMPLETE, FINISH_ERROR, FINISH_STOP

_BIT_MASK = (1 << R.BITS_SHIFT) - 1


@device
def holds_rules(words, slot):
    """Whether a slot has token rules instead of an automaton."""
    return words[slot, R.MARK_WORD] == R.MARK


@device
def is_allowed(words, slot, token):
    """Whether the rules in a slot allow a token."""
    if words[slot, R.BITMASK_WORD] == 0:
        return True
    first = R.FIRST_WORD + 2 * words[slot, R.BIASES_WORD] + R.SEQUENCE_TOKENS * words[slot, R.SEQUENCES_WORD]
    return (words[slot, first + (token >> R.BITS_SHIFT)] >> (token & _BIT_MASK)) & 1 != 0


ILLEGAL = -1  # instead of a state: the grammar does not allow this token
STATE_MASK = A.STATE_MASK
ENDING = 1 << 15  # flag added to a position: the output ends here

NO_LIMIT = 1 << 20  # no limit on the distance to an end; above MOST_DISTANCE + LONGEST_LEAST

_INDEX_BITS = 12  # limits.MOST_SHARE
_INDEX_MASK = (1 << _INDEX_BITS) - 1
_LATEST = 1 << 50  # above all arrival numbers

# ---- one lane -----------------------------------------------------------------------------------------------------------


@device
def cell_of(words, slot, i):
    """The i-th cell of the automaton in a slot."""
    return (words[slot, A.CELLS_WORD + (i >> 1)] >> A.CELL_BITS * (i & 1)) & A.CELL_MASK


@device
def class_of(words, slot, byte):
    return (words[slot, A.CLASS_OF_WORD + (byte >> 2)] >> 8 * (byte & 3)) & 0xFF


@device
def loops_of(words, slot):
    """The first word of the loops of the automaton in a slot."""
    return A.CELLS_WORD + ((words[slot, A.STATES_WORD] * (1 + words[slot, A.CLASSES_WORD]) + 1) >> 1)


@device
def end_of(words, slot):
    """The number of words of the automaton in a slot."""
    return loops_of(words, slot) + A.LOOP_WORDS * (words[slot, A.STATES_WORD] - words[slot, A.COUNTED_WORD])


@device
def loop_word(words, slot, state, word):
    """A LOOP_* word of a state of a counted string."""
    return words[slot, loops_of(words, slot) + A.LOOP_WORDS * (state - words[slot, A.COUNTED_WORD]) + word]


@device
def has_counts(words, slot):
    """Whether the automaton in a slot has counted strings."""
    return words[slot, A.COUNTED_WORD] < words[slot, A.STATES_WORD]


@device
def state_after(grammars, slot, position, token):
    """The position of the automaton in a slot after the bytes of a token, or ILLEGAL. A token without bytes is never legal."""
    if has_counts(grammars.words, slot):
        return counted_state_after(grammars, slot, position, token)
    return plain_state_after(grammars, slot, position, token)


@device
def plain_state_after(grammars, slot, state, token):
    """state_after for an automaton without counted strings, whose positions are its states."""
    words, place = grammars.words, grammars.token_place
    first, length, row = place[token, 0], place[token, 1], 1 + words[slot, A.CLASSES_WORD]
    following = state if length > 0 else ILLEGAL
    for i in range(length):
        byte = (grammars.token_bytes[first + (i >> 2)] >> 8 * (i & 3)) & 0xFF
        following = cell_of(words, slot, following * row + 1 + class_of(words, slot, byte))
        if following == A.DEAD_CELL:
            return ILLEGAL
    return following


@device
def counted_state_after(grammars, slot, position, token):
    """state_after for any automaton. A token may begin and end strings several times."""
    words, place = grammars.words, grammars.token_place
    first, length, row = place[token, 0], place[token, 1], 1 + words[slot, A.CLASSES_WORD]
    counted, hubs = words[slot, A.COUNTED_WORD], words[slot, A.HUBS_WORD]
    state, count, least, most = position & STATE_MASK, position >> A.COUNT_SHIFT, 0, 0
    if length == 0:
        return ILLEGAL
    if state >= counted:
        least, most = loop_word(words, slot, state, A.LOOP_LEAST), loop_word(words, slot, state, A.LOOP_MOST)
    for k in range(length):
        byte = (grammars.token_bytes[first + (k >> 2)] >> 8 * (k & 3)) & 0xFF
        following = cell_of(words, slot, state * row + 1 + class_of(words, slot, byte))
        if following == A.DEAD_CELL:
            return ILLEGAL
        if state < counted <= following:
            least, most = loop_word(words, slot, following, A.LOOP_LEAST), loop_word(words, slot, following, A.LOOP_MOST)
        elif state >= counted and following < counted:
            if count < least:
                return ILLEGAL
            count = 0
        elif state >= counted:
            if count >= most:
                return ILLEGAL
            count += 1 if following >= hubs else 0
        state = following
    return state | count << A.COUNT_SHIFT


@device
def flags_of(words, slot, position):
    """The first cell of a position's state: STATE_* flags and the distance."""
    return cell_of(words, slot, (position & STATE_MASK) * (1 + words[slot, A.CLASSES_WORD]))


@device
def may_end(words, slot, position):
    """Whether the output may end at a position of the automaton in a slot."""
    return flags_of(words, slot, position) & A.STATE_ACCEPTING != 0


@device
def must_end(words, slot, position):
    """Whether the output ends at this position, because no byte continues it."""
    return flags_of(words, slot, position) & A.STATE_ENDING != 0


@device
def distance_of(words, slot, position):
    """The minimum number of bytes from a position of the automaton in a slot to an accepting state."""
    state, far = position & STATE_MASK, flags_of(words, slot, position) >> A.DISTANCE_SHIFT
    if state >= words[slot, A.COUNTED_WORD]:  # a begun character counts
        count = (position >> A.COUNT_SHIFT) + (1 if state < words[slot, A.HUBS_WORD] else 0)
        far += max(0, loop_word(words, slot, state, A.LOOP_LEAST) - count)
    return far


@device
def start_of(words, slot):
    """The position of the automaton in a slot before the first byte."""
    return words[slot, A.START_WORD] | int(words[slot, A.START_COUNT_WORD]) << A.COUNT_SHIFT


@device
def is_position(words, slot, position):
    """Whether a position is valid for the automaton in a slot: one of its states, with a count that the state may have."""
    state, count, fine = position & STATE_MASK, position >> A.COUNT_SHIFT, position >= 0 and position & ENDING == 0
    fine = fine and state < words[slot, A.STATES_WORD]
    if fine and state < words[slot, A.COUNTED_WORD]:
        fine = count == 0
    elif fine:
        within = 1 if state < words[slot, A.HUBS_WORD] else 0
        fine = count + within <= loop_word(words, slot, state, A.LOOP_MOST)
    return fine


@device
def may_stop(entry, slot, generated):
    """Whether a stop id can end the output. generated: tokens of the output, including the next token."""
    some = False
    for i in range(STOP_IDS):
        some = some or entry[slot, WORD_STOP_IDS + i] >= 0
    return some and generated > entry[slot, WORD_MIN_TOKENS]


@device
def position_at(requests, slot, length):
    """The position of a request's automaton after its first `length` tokens, which may include drafts."""
    if length > requests.length[slot]:
        return requests.draft_states[slot, length & (S.DRAFT_PLACES - 1)]
    return requests.grammar_state[slot]


@device
def most_distance(grammars, requests, slot, position, generated):
    """The largest legal distance to an end after a request's next token, so that the output is complete at max_tokens.

    position: position of its automaton before that token. generated: tokens of its output, including that token.

    NO_LIMIT in these cases: the remaining tokens suffice for every end, or for no end; the output may end here, but no stop id
    can end it; the request has token rules, which may exclude the necessary tokens.
    """
    entry, own = requests.entry, requests.grammar[slot]
    left = entry[slot, WORD_MAX_TOKENS] - generated
    if left >= grammars.words[own, A.FARTHEST_WORD] or entry[slot, WORD_RULES_WORDS] != 0:
        return NO_LIMIT
    if distance_of(grammars.words, own, position) > left + 1:
        return NO_LIMIT
    if may_end(grammars.words, own, position) and not may_stop(entry, slot, generated):
        return NO_LIMIT
    return left


@device
def follow(grammars, slot, position, token, stops, most):
    """The position after a token, with ENDING if the output ends there, or ILLEGAL.

    stops: whether the token is a stop id, which is legal if the output may end here, and keeps the position.
    most: the largest legal distance of the position after the token (most_distance).
    """
    if stops:
        following = position if may_end(grammars.words, slot, position) else ILLEGAL
    else:
        following = state_after(grammars, slot, position, token)
        if following >= 0 and distance_of(grammars.words, slot, following) > most:
            following = ILLEGAL
        if following >= 0 and must_end(grammars.words, slot, following):
            following |= ENDING
    return following


@device
def finish_under_grammar(grammars, requests, slot, token, finish):
    """(finish code, next position) of a request with a grammar after a sampled token.

    finish: its finish code without the grammar.
    """
    own, position = requests.grammar[slot], requests.grammar_state[slot]
    most = most_distance(grammars, requests, slot, position, requests.length[slot] + 1 - requests.prompt_length[slot])
    following = follow(grammars, own, position, token, finish == FINISH_STOP, most)
    if following < 0:
        finish = FINISH_ERROR
    elif following & ENDING != 0:
        finish = FINISH_COMPLETE
    return finish, following & ~ENDING


# ---- all lanes ----------------------------------------------------------------------------------------------------------


@device
def find_grammar(limits, grammars, pair, epoch, digest, rules, lane, lanes):
    """The slot with this digest and epoch in a queue pair's share, or -1. rules: whether to search token rules instead of
    automata.
    """
    first, found = pair * limits.grammar_share, -1
    for slot in strided(first + lane, first + limits.grammar_share, lanes):
        if grammars.epoch[slot] == epoch and grammars.digest[slot] == digest and holds_rules(grammars.words, slot) == rules:
            found = slot
    return block_max(found, lane, lanes)


@device
def unused_grammar(limits, requests, grammars, scratch, pair, kept, lane, lanes):
    """The least recently used of the unused slots in a queue pair's share, or -1.

    kept: a slot to treat as used, or -1.
    """
    first, first_slot = pair * limits.grammar_share, pair * limits.slots_per_pair
    for i in strided(lane, limits.grammar_share, lanes):
        scratch.found[i] = 0
    barrier(lanes)
    for slot in strided(first_slot + lane, first_slot + limits.slots_per_pair, lanes):
        lives = requests.status[slot] == S.WAITING or requests.status[slot] == S.RUNNING
        if lives and requests.grammar[slot] >= 0:
            scratch.found[requests.grammar[slot] - first] = 1  # several lanes may write the same value
        if lives and requests.rules[slot] >= 0:
            scratch.found[requests.rules[slot] - first] = 1
    if lane == 0 and kept >= 0:
        scratch.found[kept - first] = 1
    barrier(lanes)
    oldest = -1
    for i in strided(lane, limits.grammar_share, lanes):
        if scratch.found[i] == 0:
            oldest = max(oldest, (_LATEST - grammars.used[first + i]) << _INDEX_BITS | i)
    oldest = block_max(oldest, lane, lanes)
    return first + (oldest & _INDEX_MASK) if oldest >= 0 else -1
