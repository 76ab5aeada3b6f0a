"""Sampling for benchmarks, at the full cost of a step: the tokens of given texts, or a given share of correct drafts."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from blinkpy.kernels.delta.drafted_rows import DRAFT
from blinkpy.kernels.launch import COUNT_ROWS
from blinkpy.kernels.sampling.sampler import ENTRY_WORDS, WORD_SEED, SamplingCall, sample_tokens


@triton.jit
def _force(  # type: ignore[no-untyped-def]
    sampled_ptr,  # int32 [B]
    outputs_ptr,  # int32 [texts, length]
    entry_ptr,  # int32 [S, ENTRY_WORDS]
    prompt_length_ptr,  # int32 [S]
    row_slots_ptr, context_lengths_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    length,  # tokens of a text
):  # fmt: skip
    row = tl.program_id(0)
    if row < tl.load(counts_ptr + COUNT_ROWS):
        slot = tl.load(row_slots_ptr + row).to(tl.int64)
        place = tl.load(context_lengths_ptr + row) - tl.load(prompt_length_ptr + slot)
        if (place >= 0) & (place < length):
            text = tl.load(entry_ptr + slot * ENTRY_WORDS + WORD_SEED)
            tl.store(sampled_ptr + row, tl.load(outputs_ptr + text * length + place))


def forcing(outputs: torch.Tensor) -> Callable[[SamplingCall], None]:
    """Sampling that replaces each token by that of a text, whose number is the request's seed.

    outputs: int32 [texts, tokens] on the GPU. Tokens after a text's end are sampled.
    """

    def sample(call: SamplingCall) -> None:
        sample_tokens(call)
        batch, requests = call.batch, call.requests
        _force[(len(call.logits),)](
            call.sampled, outputs, requests.entry, requests.prompt_length, batch.row_slots, batch.context_lengths, batch.counts,
            outputs.shape[1],
        )  # fmt: skip

    return sample


@triton.jit
def _accept(  # type: ignore[no-untyped-def]
    sampled_ptr,  # int32 [B]
    rates_ptr,  # float32 [texts]
    entry_ptr,  # int32 [S, ENTRY_WORDS]
    tokens_ptr,  # int32 [S, L]; drafts follow a request's own tokens
    row_slots_ptr, context_lengths_ptr, emits_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    length,  # L
    vocabulary,
):  # fmt: skip
    row = tl.program_id(0)
    following = tl.load(emits_ptr + row + 1, mask=row + 1 < tl.load(counts_ptr + COUNT_ROWS), other=0)
    if following == DRAFT:
        slot = tl.load(row_slots_ptr + row).to(tl.int64)
        context = tl.load(context_lengths_ptr + row)
        draft, text = tl.load(tokens_ptr + slot * length + context), tl.load(entry_ptr + slot * ENTRY_WORDS + WORD_SEED)
        correct = tl.rand(text, context) < tl.load(rates_ptr + text)
        tl.store(sampled_ptr + row, tl.where(correct, draft, (draft + 1) % vocabulary))


def accepting(rates: torch.Tensor) -> Callable[[SamplingCall], None]:
    """Sampling that replaces a token by the draft for its position, or by another token.

    rates: float32 [texts] on the GPU: the probability that a draft after correct ones is correct. A request's seed is the number
        of its text.
    """

    def sample(call: SamplingCall) -> None:
        sample_tokens(call)
        batch, requests = call.batch, call.requests
        _accept[(len(call.logits),)](
            call.sampled, rates, requests.entry, requests.tokens, batch.row_slots, batch.context_lengths, batch.emits,
            batch.counts, requests.tokens.shape[1], call.logits.shape[1],
        )  # fmt: skip

    return sample
