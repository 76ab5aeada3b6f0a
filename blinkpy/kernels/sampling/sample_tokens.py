"""From logits to tokens: one entry point."""

from __future__ import annotations

import torch

from blinkpy.kernels.launch import HEADER, INDICES, check_tensors
from blinkpy.kernels.sampling import sampler  # noqa: F401 (registers its variant)
from blinkpy.kernels.sampling.sampling_variants import VARIANTS, SamplingCall
from blinkpy.queues.submission import SQ_ENTRY_WORDS


def sample_tokens(call: SamplingCall, variant: str | None = None) -> None:
    """sampled[row] = the next token of each emitting row. variant: its name; None: the default.

    The uniform of a token is Philox4x32-10 of the request's seed at the token's position, as triton.language.rand. Raises
    ValueError or TypeError where the tensors do not fit together.
    """
    check_call(call)
    VARIANTS[variant or next(iter(VARIANTS))].launch(call)


def check_call(call: SamplingCall) -> None:
    """Raise ValueError or TypeError unless the tensors fit together."""
    (rows, vocabulary), slots, batch, scratch = call.logits.shape, len(call.requests.entry), call.batch, call.workspace
    by_row = {"sampled": call.sampled} | {name: getattr(batch, name) for name in ("row_slots", "emits", "context_lengths")}
    check_tensors(
        (call.logits, "logits", (rows, vocabulary), torch.float32, True),
        (call.requests.entry, "entry", (slots, SQ_ENTRY_WORDS), torch.int32),
        (call.requests.tokens, "tokens", (slots, None), torch.int32),
        (call.requests.prompt_length, "prompt_length", (slots,), torch.int32),
        (batch.counts, "counts", *HEADER),
        (scratch.adjusted, "adjusted", (None, vocabulary), torch.float32),
        *((tensor, name, *INDICES) for name, tensor in by_row.items()),
    )
    for name, tensor in by_row.items():
        if len(tensor) < rows:
            raise ValueError(f"{name} [{len(tensor)}] too short for {rows} rows")
    if len(scratch.adjusted) < rows:
        raise ValueError(f"a sampling workspace of {len(scratch.adjusted)} rows does not fit {rows}")
