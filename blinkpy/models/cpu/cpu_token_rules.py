"""Token rules on the CPU: biases, allowed tokens and banned sequences of one row, in the form of
blinkpy/queues/token_rules.py.
"""

from functools import partial

import numpy as np
from numpy.typing import NDArray

from blinkpy.device.compile_cache import cached_njit
from blinkpy.kv.grammars import cell_of, class_of, may_end, state_after
from blinkpy.kv.state import Grammars
from blinkpy.queues import byte_automaton as A
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.token_rules import ANY_TOKEN, BIASES_WORD, FIRST_WORD, SEQUENCE_TOKENS
from blinkpy.queues.words import Int32


@partial(cached_njit, nogil=True)
def _mask_row(logits, grammars, slot, state, stop_ids):  # type: ignore[no-untyped-def]
    row = 1 + grammars.words[slot, A.CLASSES_WORD]
    leads = np.zeros(A.BYTES, np.bool_)  # most tokens have an illegal first byte
    for byte in range(A.BYTES):
        leads[byte] = cell_of(grammars.words, slot, state * row + 1 + class_of(grammars.words, slot, byte)) != A.DEAD_CELL
    kept = np.full(len(stop_ids), -np.inf, np.float32)
    if may_end(grammars.words, slot, state):
        for i in range(len(stop_ids)):
            if 0 <= stop_ids[i] < len(logits):
                kept[i] = logits[stop_ids[i]]
    for token in range(len(logits)):
        first, length = grammars.token_place[token, 0], grammars.token_place[token, 1]
        legal = length > 0 and leads[grammars.token_bytes[first] & 0xFF]
        if legal and length > 1:
            legal = state_after(grammars, slot, state, token) >= 0
        if not legal:
            logits[token] = -np.inf
    for i in range(len(stop_ids)):
        if 0 <= stop_ids[i] < len(logits):
            logits[stop_ids[i]] = kept[i]


def mask_illegal(logits: np.ndarray, grammars: Grammars, slot: int, state: int, stop_ids: Int32) -> None:
    """Mask one row in place. logits: float32 [vocab]. slot, state: of its automaton. stop_ids: int32
    [STOP_IDS], legal if the output may end; padded with -1.
    """
    _mask_row(logits, grammars, slot, state, stop_ids)


def warm_up(grammars: Grammars) -> None:
    """Compile the mask now, so that no request waits for it."""
    mask_illegal(np.zeros(1, np.float32), grammars, 0, 0, np.full(STOP_IDS, -1, np.int32))


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
