"""Sampling for benchmarks: the tokens of given texts, at the full cost of a step."""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

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
