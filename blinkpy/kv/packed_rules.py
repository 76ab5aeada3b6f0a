"""Token rules in the engine: validate packed rules, and evaluate them.

They are stored in slots of State.grammars, packed as in blinkpy/queues/token_rules.py. Only the samplers
apply them; no scheduling decision depends on them.
"""

from blinkpy.device.portable import block_max, block_sum, device, strided
from blinkpy.queues import token_rules as R

_MAGNITUDE = 0x7FFFFFFF  # all bits of a float32 but the sign
_BIT_MASK = (1 << R.BITS_SHIFT) - 1


@device
def holds_rules(words, slot):
    """Whether a slot has token rules, and no automaton."""
    return words[slot, R.MARK_WORD] == R.MARK


@device
def is_allowed(words, slot, token):
    """Whether the bitmask of the rules in a slot has a token."""
    if words[slot, R.BITMASK_WORD] == 0:
        return True
    first = R.FIRST_WORD + 2 * words[slot, R.BIASES_WORD] + R.SEQUENCE_TOKENS * words[slot, R.SEQUENCES_WORD]
    return (words[slot, first + (token >> R.BITS_SHIFT)] >> (token & _BIT_MASK)) & 1 != 0


@device
def are_token_rules(limits, words, slot, count, lane, lanes):
    """Whether the `count` words in a slot are token rules of the model's vocabulary, in the one form that they have."""
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
            behind = ((i + 1) << R.BITS_SHIFT) - limits.vocab_size  # bits of no token
            if behind > 0 and (words[slot, first + i] & 0xFFFFFFFF) >> (_BIT_MASK + 1 - behind) != 0:
                bad = 1
    bad = block_max(bad, lane, lanes)
    allowed = block_sum(allowed, lane, lanes)
    return fits and bad == 0 and (mask == 0 or allowed > 0)


@device
def bad_sequence(limits, words, slot, first):
    """1 unless the words from `first` on are a banned sequence: ANY_TOKEN in front alone, then token ids, one at least."""
    begun, bad = False, 0
    for i in range(R.SEQUENCE_TOKENS):
        token = words[slot, first + i]
        if token < R.ANY_TOKEN or token >= limits.vocab_size or (begun and token == R.ANY_TOKEN):
            bad = 1
        begun = begun or token != R.ANY_TOKEN
    return bad if begun else 1
