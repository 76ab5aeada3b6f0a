"""Token rules on the CPU: biases, allowed tokens and banned sequences of one row. Their form: blinkpy/queues/token_rules.py."""

import numpy as np
from numpy.typing import NDArray

from blinkpy.queues.token_rules import ANY_TOKEN, BIASES_WORD, FIRST_WORD, SEQUENCE_TOKENS
from blinkpy.queues.words import Int32


def apply_rules(logits: NDArray[np.float32], words: Int32, output: Int32) -> None:
    """Change the logits of one row, float32 [vocab], in place. words: a slot with packed rules, int32 [W],
    validated by the engine. output: int32 [n], the generated tokens.
    """
    biases, sequences, mask = words[BIASES_WORD:FIRST_WORD].tolist()
    lengths = (biases, biases, SEQUENCE_TOKENS * sequences, mask)
    ids, values, banned, bits, _ = np.split(words[FIRST_WORD:], np.cumsum(lengths))
    if mask:
        allowed = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), bitorder="little")[: len(logits)]
        logits[allowed == 0] = -np.inf
    logits[ids] += np.ascontiguousarray(values).view(np.float32)
    if sequences:
        *before, last = banned.reshape(sequences, SEQUENCE_TOKENS).T
        known = np.full(SEQUENCE_TOKENS - 1, ANY_TOKEN, np.int32)
        tail = output[-len(known) :]
        known[len(known) - len(tail) :] = tail
        met = [(tokens == ANY_TOKEN) | (tokens == one) for tokens, one in zip(before, known, strict=True)]
        logits[last[np.logical_and.reduce(met)]] = -np.inf
