"""Tokens whose choice depends on rounding. From such a token on, the outputs of float32 steps of other sizes may differ."""

from collections.abc import Sequence

import numpy as np
from support.models import kernel_reference as reference

from blinkpy.queues.request_parameters import RequestParameters

SLACK = 1e-5  # of logits, of experts' weights, and of the uniform number that draws
TRIES = 50
MOST_TIES = 2  # of the requests


def choices(logits: np.ndarray, history: list[int], begin: int, p: RequestParameters) -> set[int]:
    """The tokens that rounding may choose.

    logits: float32 [vocab], before penalties.
    history: prompt and output so far.
    begin: length of the prompt.
    """
    logits, rng, known = logits.copy(), np.random.default_rng(1), np.array(history)
    if len(history) - begin < p.min_tokens:
        logits[[stop for stop in p.stop_ids if stop >= 0]] = -np.inf
    penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
    number, possible = reference.uniform(p.seed, len(history)), set[int]()
    for _ in range(TRIES):
        rounded = (logits + rng.uniform(-SLACK, SLACK, len(logits))).astype(np.float32)
        own = reference.penalize(rounded, known, begin, *penalties)
        possible |= set(reference.sample_span(own, p.temperature, p.top_k, p.top_p, p.min_p, number, SLACK).tolist())
    return possible


def equal_tokens(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of equal tokens at the start of both."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))


def is_tie(found: list[int], expected: list[int], begin: int, logits: list[np.ndarray], p: RequestParameters) -> bool:
    """Whether two outputs differ, which only rounding may cause: both tokens at the first difference must be possible there.

    found, expected: prompt and output.
    begin: length of the prompt.
    logits: float32 [vocab] before each token of an output.
    """
    if found == expected:
        return False
    same = equal_tokens(found, expected)
    assert begin <= same < min(len(found), len(expected)), f"{found} != {expected}"
    pair, possible = {found[same], expected[same]}, choices(logits[same - begin], expected[:same], begin, p)
    assert pair <= possible, f"tokens {pair} after {same} equal ones, not {possible}: {p}"
    return True
