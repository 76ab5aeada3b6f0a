"""The null engine's step: tokens that are made up, and no model."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from blinkpy.device.compile_cache import cached_njit
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.queues.logprob_record import NO_RECORD_PAIR, RECORD_PAIRS
from blinkpy.queues.page_hash import HASH_MODULUS_1
from blinkpy.queues.submission import WORD_LOGPROBS, WORD_SEED


@device
def made_up_token(seed, position, low, high):
    """A token of [low, high) for a position of a request, the same in every run. seed: the request's, int64."""
    mixed = (seed % HASH_MODULUS_1 * 48271 + position * 69621 + 1) % HASH_MODULUS_1
    mixed = mixed * 48271 % HASH_MODULUS_1
    return low + (mixed * 69621 % HASH_MODULUS_1) % (high - low)


@device
def fill_sampled(state, low, high, even):
    """Made-up tokens for all rows of the batch, and log probabilities of the distribution that they are drawn from: all
    tokens of [low, high) are equally likely. even: the log probability as a pair of a record for token 0."""
    batch, entry = state.batch, state.requests.entry
    for row in range(batch.counts[S.ROWS]):
        slot = batch.row_slots[row]
        seed = entry[slot, WORD_SEED + 1] << 32 | (entry[slot, WORD_SEED] & 0xFFFFFFFF)
        batch.sampled[row] = made_up_token(seed, batch.context_lengths[row], low, high)
        if entry[slot, WORD_LOGPROBS] >= 0:
            batch.logprobs[row, 0] = even | batch.sampled[row]
            for k in range(1, RECORD_PAIRS):
                batch.logprobs[row, k] = even | low + k - 1 if low + k <= high else NO_RECORD_PAIR


@lru_cache(maxsize=1)
def compiled_fill() -> Any:
    return cached_njit(fill_sampled, nogil=True)
