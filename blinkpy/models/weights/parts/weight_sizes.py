"""The number of a model's parameters, and bytes of its weights: in memory, and read by a step."""

from dataclasses import replace

from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.parts.block_parts import MXFP4_BLOCK
from blinkpy.models.weights.parts.weight_parts import all_parts


def weight_elements(model: DecoderDescription) -> int:
    """Number of parameters. Tied embeddings count once, and a packed block counts without its scale."""
    return sum(part.parameters for part in all_parts(model))


def weight_bytes(model: DecoderDescription, itemsize: int) -> int:
    """Memory of all weights, and of those of its draft head, in bytes. itemsize: bytes of weights that are neither FP8, packed
    nor wide.
    """
    own = sum(part.nbytes(itemsize) for part in all_parts(model))
    return own if model.draft_head is None else own + weight_bytes(model.draft_head, itemsize)


def decode_weight_bytes(model: DecoderDescription, itemsize: int, rows: int) -> int:
    """Bytes that a step of random tokens reads without drafts, with the expected number of visited experts. Embeddings, which
    are gathered, are ignored. itemsize: bytes of weights that are neither FP8 nor packed.
    """
    gathered = (0 if model.tied_embeddings else model.hidden_size) + model.layer_inputs * len(model.layers)
    read = weight_bytes(replace(model, draft_head=None), itemsize) - itemsize * model.vocab_size * gathered
    if any(model.expert_layers):
        experts = model.experts
        matrices = experts.activation.halves + 1
        unused = (1 - experts.top_k / experts.number) ** rows
        fp8 = model.quantization is not None and model.quantization.inputs
        each = 0.5 + 1 / MXFP4_BLOCK if experts.mxfp4 or model.packing else 1 if fp8 else itemsize
        read -= int(unused * sum(model.expert_layers) * experts.number * matrices * experts.size * model.hidden_size * each)
    return read
