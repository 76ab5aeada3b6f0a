"""The bytes of weights that a decode step must read, a lower bound of its time."""

from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.weight_parts import MXFP4_BLOCK, weight_bytes


def decode_weight_bytes(model: DecoderDescription, itemsize: int, rows: int) -> int:
    """Bytes that a step of random tokens reads, with the expected number of visited experts. The embedding, a
    gather, is ignored. itemsize: of weights that are neither FP8 nor packed.
    """
    read = weight_bytes(model, itemsize) - (0 if model.tied_embeddings else itemsize * model.vocab_size * model.hidden_size)
    if any(model.expert_layers):
        experts = model.experts
        unused = (1 - experts.top_k / experts.number) ** rows
        each = 0.5 + 1 / MXFP4_BLOCK if experts.mxfp4 else 1 if model.quantization else itemsize
        read -= int(unused * sum(model.expert_layers) * experts.number * 3 * experts.size * model.hidden_size * each)
    return read
