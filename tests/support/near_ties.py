"""Comparison of outputs of float32 steps of different sizes: equal, except after a token that rounding has chosen."""

from pathlib import Path

import numpy as np
import transformers
from support.drafted_requests import DraftedRequest, Output
from support.models import kernel_reference as reference
from support.models.expected_logits import expected_logits, experts_of_a_token

SLACK = 1e-5  # of logits, of experts' weights, and of the uniform random number
TRIES = 50
MOST_TIES = 2  # among all requests


def check_same_outputs(folder: Path, requests: list[DraftedRequest], found: list[Output], expected: list[Output]) -> int:
    """Assert that outputs are equal up to near ties in transformers' logits. Returns the number of ties."""
    ties = 0
    for request, own, other in zip(requests, found, expected, strict=True):
        if own == other:
            continue
        same = _equal_tokens(own.tokens, other.tokens)
        assert len(request) == 2 and same < min(len(own.tokens), len(other.tokens)), f"{own} != {other}"
        pair, possible = {own.tokens[same], other.tokens[same]}, possible_tokens(folder, request, own.tokens[:same])
        assert possible is None or pair <= possible, f"tokens {pair} after {same} equal ones: {request[1]}"
        ties += 1
    assert ties <= MOST_TIES
    return ties


def possible_tokens(folder: Path, request: DraftedRequest, output: list[int]) -> set[int] | None:
    """The tokens that rounding may choose after a prompt and an output; None: any token, since rounding may choose other
    experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt, p = request[0], request[1]
    every, end = expected_logits(model, prompt + output, experts_of_a_token(model.config), SLACK)
    if end < len(prompt + output):
        return None
    logits, history, rng = every[-1], np.array(prompt + output), np.random.default_rng(1)
    if len(output) < p.min_tokens:
        logits[[stop for stop in p.stop_ids if stop >= 0]] = -np.inf
    penalties = p.repetition_penalty, p.presence_penalty, p.frequency_penalty
    number, possible = reference.uniform(p.seed, len(history)), set[int]()
    for _ in range(TRIES):
        rounded = (logits + rng.uniform(-SLACK, SLACK, len(logits))).astype(np.float32)
        own = reference.penalize(rounded, history, len(prompt), *penalties)
        possible |= set(reference.sample_span(own, p.temperature, p.top_k, p.top_p, p.min_p, number, SLACK).tolist())
    return possible


def _equal_tokens(first: list[int], second: list[int]) -> int:
    """The number of equal tokens at the start."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
