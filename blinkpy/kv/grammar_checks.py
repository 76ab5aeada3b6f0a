"""Checks of a front end's grammar: whether the words in a slot are a valid automaton, or valid token rules.

The engine copies these words from the memory of a front end, which it does not trust. After a check, the functions of
blinkpy/kv/grammars.py stay within the slot.
"""

from blinkpy.device.portable import block_max, block_sum, device, strided
from blinkpy.kv.grammars import cell_of, class_of, end_of, holds_rules, is_position, loop_word, start_of
from blinkpy.queues import byte_automaton as A
from blinkpy.queues import token_rules as R

_BIT_MASK = (1 << R.BITS_SHIFT) - 1
_MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 except the sign


@device
def are_token_rules(limits, words, slot, count, lane, lanes):
    """Whether the `count` words in a slot are token rules of the model's vocabulary, in their canonical
    form.
    """
    biases, sequences, mask = words[slot, R.BIASES_WORD], words[slot, R.SEQUENCES_WORD], words[slot, R.BITMASK_WORD]
    mask_words = (limits.vocab_size + _BIT_MASK) >> R.BITS_SHIFT
    fits = holds_rules(words, slot) and 0 <= biases <= R.MOST_BIASES and 0 <= sequences <= R.MOST_SEQUENCES
    fits = fits and (mask == 0 or mask == mask_words)
    fits = fits and count == R.FIRST_WORD + 2 * biases + R.SEQUENCE_TOKENS * sequences + mask
    bad, allowed = 0, 0
    if fits:
        first, banned = R.FIRST_WORD, R.FIRST_WORD + 2 * biases
        for i in strided(lane, biases, lanes):
            token, before = words[slot, first + i], words[slot, first + i - 1] if i > 0 else -1
            if token <= before or token >= limits.vocab_size:
                bad = 1
            if words[slot, first + biases + i] & _MAGNITUDE > R.HIGHEST_BIAS_BITS:
                bad = 1
        for i in strided(lane, sequences, lanes):
            bad |= bad_sequence(limits, words, slot, banned + R.SEQUENCE_TOKENS * i)
        first = banned + R.SEQUENCE_TOKENS * sequences
        for i in strided(lane, mask, lanes):
            allowed += 1 if words[slot, first + i] != 0 else 0
            behind = ((i + 1) << R.BITS_SHIFT) - limits.vocab_size  # unused bits
            if behind > 0 and (words[slot, first + i] & 0xFFFFFFFF) >> (_BIT_MASK + 1 - behind) != 0:
                bad = 1
    bad = block_max(bad, lane, lanes)
    allowed = block_sum(allowed, lane, lanes)
    return fits and bad == 0 and (mask == 0 or allowed > 0)


@device
def bad_sequence(limits, words, slot, first):
    """1 unless the words from `first` are a valid banned sequence: ANY_TOKEN only at the start, then at least one token id."""
    begun, bad = False, 0
    for i in range(R.SEQUENCE_TOKENS):
        token = words[slot, first + i]
        if token < R.ANY_TOKEN or token >= limits.vocab_size or (begun and token == R.ANY_TOKEN):
            bad = 1
        begun = begun or token != R.ANY_TOKEN
    return bad if begun else 1


@device
def is_automaton(words, slot, count, lane, lanes):
    """Whether the `count` words in a slot are a packed automaton with valid targets and loops, correct flags, and distances all
    correct or all 0."""
    states, classes, counted = words[slot, A.STATES_WORD], words[slot, A.CLASSES_WORD], words[slot, A.COUNTED_WORD]
    row, hubs = 1 + classes, words[slot, A.HUBS_WORD]
    fits = 1 <= states <= A.MOST_STATES and 1 <= classes <= A.BYTES and 1 <= counted <= hubs <= states
    fits = fits and count == end_of(words, slot)
    bad, wrong, distances, farthest = 0, 0, 0, 0
    if fits:
        for byte in strided(lane, A.BYTES, lanes):
            if class_of(words, slot, byte) >= classes:
                bad = 1
        for state in strided(lane, states, lanes):
            flags, leads, nearest = cell_of(words, slot, state * row), 0, A.MOST_DISTANCE
            for i in range(1, row):
                following = cell_of(words, slot, state * row + i)
                if following != A.DEAD_CELL:
                    leads = 1
                    if following >= states:
                        bad = 1
                    else:
                        more = least_of_hub(words, slot, following) if state < counted else 0
                        nearest = min(nearest, 1 + more + (cell_of(words, slot, following * row) >> A.DISTANCE_SHIFT))
            accepts, distance = flags & A.STATE_ACCEPTING, flags >> A.DISTANCE_SHIFT
            if flags & (1 << A.DISTANCE_SHIFT) - 1 != accepts | (A.STATE_ENDING if accepts != 0 and leads == 0 else 0):
                bad = 1
            if distance != (0 if accepts != 0 else nearest):
                wrong = 1
            bad |= bad_loop(words, slot, state)
            distances = max(distances, distance)
            farthest = max(farthest, distance + least_of_hub(words, slot, state))
        if lane == 0 and states * row & 1 != 0 and cell_of(words, slot, states * row) != 0:
            bad = 1  # padding
        if words[slot, A.START_COUNT_WORD] < 0 or not 0 <= words[slot, A.START_WORD] < states:
            bad = 1
        else:
            bad |= 0 if is_position(words, slot, start_of(words, slot)) else 1
    bad, wrong, distances = block_max(bad, lane, lanes), block_max(wrong, lane, lanes), block_max(distances, lane, lanes)
    farthest = block_max(farthest, lane, lanes)
    fits = fits and words[slot, A.FARTHEST_WORD] == (farthest if distances > 0 else 0)
    return fits and bad == 0 and (wrong == 0 or distances == 0)


@device
def least_of_hub(words, slot, state):
    """Minimum characters of the counted string that begins in a state, or 0. `state` must be a valid number."""
    return min(loop_word(words, slot, state, A.LOOP_LEAST), A.LONGEST_LEAST) if state >= words[slot, A.HUBS_WORD] else 0


@device
def bad_loop(words, slot, state):
    """1 unless the edges of a state follow the rules of counted strings (blinkpy/queues/byte_automaton.py)."""
    states, counted, hubs = words[slot, A.STATES_WORD], words[slot, A.COUNTED_WORD], words[slot, A.HUBS_WORD]
    row, bad, again, exits, hub = 1 + words[slot, A.CLASSES_WORD], 0, 0, 0, -1
    if counted == states:
        return 0
    if state >= counted:
        hub = loop_word(words, slot, state, A.LOOP_HUB)
        least, most = loop_word(words, slot, state, A.LOOP_LEAST), loop_word(words, slot, state, A.LOOP_MOST)
        if not hubs <= hub < states or (state >= hubs and hub != state):
            return 1
        if least != loop_word(words, slot, hub, A.LOOP_LEAST) or most != loop_word(words, slot, hub, A.LOOP_MOST):
            bad = 1
        if not (0 <= least <= most and least <= A.LONGEST_LEAST and 1 <= most <= A.NO_MOST):
            bad = 1
        if cell_of(words, slot, state * row) & A.STATE_ACCEPTING != 0:
            bad = 1
    for i in range(1, row):
        following = cell_of(words, slot, state * row + i)
        if following < states:
            if state < counted and counted <= following < hubs:
                bad = 1  # a string begins within a character
            if state >= counted and following >= counted and loop_word(words, slot, following, A.LOOP_HUB) != hub:
                bad = 1
            if counted <= state < hubs and following < counted:
                bad = 1  # a string ends within a character
            again = 1 if following == state else again
            exits = 1 if following < counted else exits
    return 1 if state >= hubs and (again == 0 or exits == 0) else bad
