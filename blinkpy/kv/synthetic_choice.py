"""The sampler of a synthetic model: it respects scored prompts, grammars, and the bitmask of token rules."""

from blinkpy.device.portable import device
from blinkpy.kv.grammars import follow
from blinkpy.kv.packed_rules import is_allowed
from blinkpy.queues.submission import STOP_IDS, WORD_MIN_TOKENS, WORD_STOP_IDS


@device
def synthetic_choice(grammars, requests, slot, token, vocab_size):
    """The next token of a request if the model proposes `token`.

    For a scored prompt: its next token. Otherwise the first token that the grammar, or else the token rules,
    allow, counting cyclically from `token`; `token` itself if none is allowed.
    """
    length = requests.length[slot]
    if length < requests.prompt_length[slot]:
        return requests.tokens[slot, length]
    if requests.grammar[slot] < 0 and requests.rules[slot] < 0:
        return token
    counts = length + 1 - requests.prompt_length[slot] > requests.entry[slot, WORD_MIN_TOKENS]
    for i in range(vocab_size):
        candidate = (token + i) % vocab_size
        if requests.grammar[slot] < 0:
            fine = is_allowed(grammars.words, requests.rules[slot], candidate)
        else:
            stops = False
            for k in range(STOP_IDS):
                stops = stops or (counts and requests.entry[slot, WORD_STOP_IDS + k] == candidate)
            fine = follow(grammars, requests.grammar[slot], requests.grammar_state[slot], candidate, stops) >= 0
        if fine:
            return candidate
    return token
