"""The engine's grammars: byte automata that define the allowed outputs of a request, and the bytes of every
token.

A slot of State.grammars holds an automaton (packed as in blinkpy/queues/byte_automaton.py) or token rules
(blinkpy/kv/packed_rules.py). Each queue pair has its own share of the slots, so front ends do not compete
for them. A request has a slot and a state of its automaton; commit advances the state by the bytes of each
sampled token, and the samplers mask the tokens that lead nowhere. The state after a token is a pure
function of the state before it.

A slot is in use while a waiting or running request refers to it. There is not a reference count: the
requests are scanned when a slot is needed, which is rare.
"""

from blinkpy.device.portable import barrier, block_max, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.packed_rules import holds_rules
from blinkpy.queues import byte_automaton as A
from blinkpy.queues.completion import FINISH_COMPLETE, FINISH_ERROR, FINISH_STOP

ILLEGAL = -1  # instead of a state: the grammar does not allow this token
STATE_MASK = (1 << 15) - 1
ENDING = 1 << 15  # flag added to a state: the output ends here

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
def state_after(grammars, slot, state, token):
    """The state of the automaton in a slot after the bytes of a token, or ILLEGAL. A token without bytes is never legal."""
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
def may_end(words, slot, state):
    """Whether the output may end in a state of the automaton in a slot."""
    return cell_of(words, slot, state * (1 + words[slot, A.CLASSES_WORD])) & A.STATE_ACCEPTING != 0


@device
def must_end(words, slot, state):
    """Whether the output ends there, since no byte leads on."""
    return cell_of(words, slot, state * (1 + words[slot, A.CLASSES_WORD])) & A.STATE_ENDING != 0


@device
def follow(grammars, slot, state, token, stops):
    """The state after a token, with ENDING if the output ends there, or ILLEGAL.

    stops: whether the token is a stop id; it is legal if the output may end here, and keeps the state.
    """
    if stops:
        following = state if may_end(grammars.words, slot, state) else ILLEGAL
    else:
        following = state_after(grammars, slot, state, token)
        if following >= 0 and must_end(grammars.words, slot, following):
            following |= ENDING
    return following


@device
def finish_under_grammar(grammars, requests, slot, token, finish):
    """(finish code, next state) of a request with a grammar after a sampled token.

    finish: its finish code without the grammar.
    """
    following = follow(grammars, requests.grammar[slot], requests.grammar_state[slot], token, finish == FINISH_STOP)
    if following < 0:
        finish = FINISH_ERROR
    elif following & ENDING != 0:
        finish = FINISH_COMPLETE
    return finish, following & STATE_MASK


# ---- all lanes ----------------------------------------------------------------------------------------------------------


@device
def find_grammar(limits, grammars, pair, epoch, digest, rules, lane, lanes):
    """The slot in a queue pair's share with this digest and epoch, or -1. rules: look for token rules, not an
    automaton.
    """
    first, found = pair * limits.grammar_share, -1
    for slot in strided(first + lane, first + limits.grammar_share, lanes):
        if grammars.epoch[slot] == epoch and grammars.digest[slot] == digest and holds_rules(grammars.words, slot) == rules:
            found = slot
    return block_max(found, lane, lanes)


@device
def unused_grammar(limits, requests, grammars, scratch, pair, kept, lane, lanes):
    """The least recently used slot in a queue pair's share that no request uses, or -1.

    kept: a slot to treat as used, or -1.
    """
    first, first_slot = pair * limits.grammar_share, pair * limits.slots_per_pair
    for i in strided(lane, limits.grammar_share, lanes):
        scratch.found[i] = 0
    barrier(lanes)
    for slot in strided(first_slot + lane, first_slot + limits.slots_per_pair, lanes):
        lives = requests.status[slot] == S.WAITING or requests.status[slot] == S.RUNNING
        if lives and requests.grammar[slot] >= 0:
            scratch.found[requests.grammar[slot] - first] = 1  # by whichever lane
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


@device
def is_automaton(words, slot, count, lane, lanes):
    """Whether the `count` words in a slot are a packed automaton: nothing in it leads out of it, and its flags are true."""
    states, classes = words[slot, A.STATES_WORD], words[slot, A.CLASSES_WORD]
    row = 1 + classes
    fits = 1 <= states <= A.MOST_STATES and 1 <= classes <= A.BYTES and count == A.CELLS_WORD + ((states * row + 1) >> 1)
    bad = 0
    if fits:
        for byte in strided(lane, A.BYTES, lanes):
            if class_of(words, slot, byte) >= classes:
                bad = 1
        for state in strided(lane, states, lanes):
            flags, leads = cell_of(words, slot, state * row), 0
            for i in range(1, row):
                following = cell_of(words, slot, state * row + i)
                if following != A.DEAD_CELL:
                    leads = 1
                    if following >= states:
                        bad = 1
            ends = flags & A.STATE_ACCEPTING != 0 and leads == 0
            if flags != (flags & A.STATE_ACCEPTING) | (A.STATE_ENDING if ends else 0):
                bad = 1
        if lane == 0 and states * row & 1 != 0 and cell_of(words, slot, states * row) != 0:
            bad = 1  # padding
    bad = block_max(bad, lane, lanes)
    return fits and bad == 0
