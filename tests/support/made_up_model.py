"""A model made of sums: what it caches and which token comes next depends on all tokens before, so that a mistake shows."""

from __future__ import annotations

import numpy as np

from blinkpy.queues.completion import FINISH_LENGTH, FINISH_STOP
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES

MODULUS = 1_000_003


def value_of(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What the made-up model caches for tokens at positions."""
    return (tokens.astype(np.int64) * 7919 + positions * 104_729 + 13) % MODULUS


def next_token(values: np.ndarray, vocab_size: int) -> int:
    """The token after cached values, in order."""
    weights = np.arange(1, len(values) + 1, dtype=np.int64)
    return int((values * weights).sum() % MODULUS % vocab_size)


def generate(prompt: list[int], max_tokens: int, min_tokens: int, stop_ids: list[int], vocab_size: int) -> tuple[list[int], int]:
    """All tokens that a request must get, and its finish reason."""
    tokens = list(prompt)
    while True:
        array = np.array(tokens, np.int64)
        tokens.append(next_token(value_of(array, np.arange(len(tokens))), vocab_size))
        generated = len(tokens) - len(prompt)
        if generated > min_tokens and tokens[-1] in stop_ids:
            return tokens[len(prompt) :], FINISH_STOP
        if generated == max_tokens:
            return tokens[len(prompt) :], FINISH_LENGTH


def record_of(token: int, context: int) -> np.ndarray:
    """Log probabilities of the made-up model, int64 [LOGPROB_ENTRIES]: numbers that say where they belong."""
    return (token << 40) + (context << 20) + np.arange(LOGPROB_ENTRIES)
