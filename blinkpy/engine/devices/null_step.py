"""The null device's step: synthetic tokens, without a model."""

import math
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from numba import types

from blinkpy.device.compile_cache import cached_njit, compiled_for
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.kv.state_memory import synthetic_choice
from blinkpy.queues.page_hash import HASH_MODULUS_1
from blinkpy.queues.submission import WORD_LOGPROBS, WORD_SEED
from blinkpy.queues.words import LOGPROB_ENTRIES, LOGPROB_ENTRY, NO_LOGPROB_ENTRY
from blinkpy.scheduler.host_scheduler import Scheduler

Compute = Callable[[int], None]
"""Computes the batch that a turn planned. Gets the time at which the turn began, monotonic clock, ns."""


def run_turns(
    scheduler: Scheduler,
    compute: Compute,
    idle_ns: int,
    deadline_ns: int,
    after_turn: Callable[[], None] = lambda: None,
    before_turn: Callable[[int], None] = lambda now_ns: None,
) -> int:
    """Run an attached scheduler: before_turn with the time, a turn, after_turn, and compute if there is a batch.

    Returns NO_BATCH after idle_ns without work or at deadline_ns of time.monotonic_ns(); otherwise STOPPED or DRAINED.
    """
    now = worked = time.monotonic_ns()
    while now < deadline_ns and now - worked <= idle_ns:
        before_turn(now)
        result = scheduler.turn(now)
        after_turn()
        if result in (S.STOPPED, S.DRAINED):
            return result
        if result >= 0:
            compute(now)
            worked = time.monotonic_ns()
        now = time.monotonic_ns()
    return S.NO_BATCH


@device
def synthetic_token(seed, position, low, high):
    """A token in [low, high), determined by seed and position. seed: the request's seed, int64."""
    mixed = (seed % HASH_MODULUS_1 * 48271 + position * 69621 + 1) % HASH_MODULUS_1
    mixed = mixed * 48271 % HASH_MODULUS_1
    return low + (mixed * 69621 % HASH_MODULUS_1) % (high - low)


@device
def fill_sampled(state, low, high, even):
    """Write synthetic tokens for all rows of the batch, uniform in [low, high), with their log probabilities.

    If a grammar forbids a token, the next allowed token replaces it.
    even: a record entry for token 0 with the log probability of a uniform choice.
    """
    batch, requests, entry = state.batch, state.requests, state.requests.entry
    for row in range(batch.counts[S.ROWS]):
        slot = batch.row_slots[row]
        seed = entry[slot, WORD_SEED + 1] << 32 | (entry[slot, WORD_SEED] & 0xFFFFFFFF)
        token = synthetic_token(seed, batch.context_lengths[row], low, high)
        token = synthetic_choice(state.grammars, requests, slot, batch.context_lengths[row], token, high)
        batch.sampled[row] = token
        if entry[slot, WORD_LOGPROBS] >= 0:
            batch.logprobs[row, 0] = even | batch.sampled[row]
            for k in range(1, LOGPROB_ENTRIES):
                batch.logprobs[row, k] = even | low + k - 1 if low + k <= high else NO_LOGPROB_ENTRY


@lru_cache(maxsize=1)
def compiled_fill() -> Any:
    return cached_njit(fill_sampled, nogil=True)


def synthetic_step(scheduler: Scheduler, tokens: range, step_ns: int) -> Compute:
    """A step with synthetic tokens, compiled like the scheduler.

    tokens: the range to draw from.
    step_ns: minimum time from the start of a turn to the end of its step.
    """
    state, low, high = scheduler.state_argument, tokens.start, tokens.stop
    even = int(np.array((0, -math.log(high - low)), LOGPROB_ENTRY).view(np.int64))
    fill: Callable[..., None] = fill_sampled
    if scheduler.mode == "njit":
        kinds = (state.kind, types.int64, types.int64, types.int64)
        fill = compiled_for(compiled_fill(), kinds)

    counts = scheduler.state.batch.counts

    def compute(began_ns: int) -> None:
        fill(state, low, high, even)  # in a cut step, only the last group's tokens count
        left_ns = began_ns + step_ns // int(counts[S.GROUPS]) - time.monotonic_ns()
        if left_ns > 0:
            time.sleep(left_ns / 1e9)

    return compute
