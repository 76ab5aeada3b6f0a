"""From logits to tokens: one entry point."""

import torch

from blinkpy.kernels.launch import AtLeast, by_name, check_tensors
from blinkpy.kernels.sampling import sampler
from blinkpy.kernels.sampling.sampling_call import SamplingCall, SamplingVariant
from blinkpy.queues.submission import SQ_ENTRY_WORDS

VARIANTS: dict[str, SamplingVariant] = by_name(sampler.VARIANT)  # the default first


def sample_tokens(call: SamplingCall, variant: str = "") -> None:
    """sampled[row] = the next token of each emitting row. variant: its name; "": the default. Raises ValueError
    or TypeError if the tensors do not match.
    """
    check_call(call)
    VARIANTS[variant or next(iter(VARIANTS))].launch(call)


def check_call(call: SamplingCall) -> None:
    """Raise ValueError or TypeError unless the tensors fit together."""
    (rows, vocabulary), slots, scratch = call.logits.shape, len(call.requests.entry), call.workspace
    check_tensors(
        (call.logits, "logits", (rows, vocabulary), torch.float32, True),
        (call.requests.entry, "entry", (slots, SQ_ENTRY_WORDS), torch.int32),
        (call.requests.tokens, "tokens", (slots, None), torch.int32),
        (call.requests.prompt_length, "prompt_length", (slots,), torch.int32),
        (call.grammars.slot, "grammar", (slots,), torch.int32),
        (call.grammars.state, "grammar_state", (slots,), torch.int32),
        (call.grammars.rules, "rules", (slots,), torch.int32),
        (call.grammars.words, "grammar words", (None, None), torch.int32),
        (call.grammars.token_place, "token_place", (None, 2), torch.int32),
        (call.grammars.token_bytes, "token_bytes", (None,), torch.int32),
        (call.sampled, "sampled", (AtLeast(rows),), torch.int32),
        (scratch.adjusted, "adjusted", (AtLeast(rows), vocabulary), torch.float32),
        *call.batch.declared(rows, "row_slots", "emits", "context_lengths"),
    )
