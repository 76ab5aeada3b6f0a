"""Outputs of float32 steps of other sizes: equal, except after a token whose choice was a matter of rounding."""

from pathlib import Path

import transformers
from support.drafted_requests import DraftedRequest, Output
from support.models.expected_logits import expected_logits, experts_of_a_token
from support.models.rounded_choices import MOST_TIES, SLACK, choices, equal_tokens


def check_same_outputs(folder: Path, requests: list[DraftedRequest], found: list[Output], expected: list[Output]) -> int:
    """Assert that outputs are equal up to near ties, which transformers' logits must explain. Returns the number of ties."""
    ties = 0
    for request, own, other in zip(requests, found, expected, strict=True):
        if own == other:
            continue
        same = equal_tokens(own.tokens, other.tokens)
        assert len(request) == 2 and same < min(len(own.tokens), len(other.tokens)), f"{own} != {other}"
        pair, possible = {own.tokens[same], other.tokens[same]}, possible_tokens(folder, request, own.tokens[:same])
        assert possible is None or pair <= possible, f"tokens {pair} after {same} equal ones: {request[1]}"
        ties += 1
    assert ties <= MOST_TIES
    return ties


def possible_tokens(folder: Path, request: DraftedRequest, output: list[int]) -> set[int] | None:
    """The tokens that rounding may choose after a prompt and an output; None: any, since it may choose other experts."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    prompt, p = request[0], request[1]
    every, end = expected_logits(model, prompt + output, experts_of_a_token(model.config), SLACK)
    if end < len(prompt + output):
        return None
    return choices(every[-1], prompt + output, len(prompt), p)
