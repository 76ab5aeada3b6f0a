"""How fast this machine computes, and how many tokens of a model it computes in a given time."""

import math
import time
from collections.abc import Callable

from blinkpy.models.description.blocks import Experts
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.weight_parts import layer_parts

TOKENS, INPUTS, OUTPUTS = 128, 1024, 3072  # of the product that is measured
FEW = 4  # of its tokens, which come first: on a very slow machine, such as an emulated one, they are all
TRIALS = 4  # the best one counts: others share the machine
ENOUGH_S = 1.0  # a trial that would take longer is left out


def measured_speed(multiply: Callable[[int], object]) -> float:
    """Multiply-adds per second of a product of [TOKENS, INPUTS] and [OUTPUTS, INPUTS]. multiply: computes a
    given number of its first tokens.
    """
    few_s = _seconds(multiply, FEW)
    if few_s * TOKENS / FEW > ENOUGH_S:
        return FEW * INPUTS * OUTPUTS / few_s
    best = min(_seconds(multiply, TOKENS) for _ in range(TRIALS))
    return TOKENS * INPUTS * OUTPUTS / max(best, 1e-9)


def _seconds(multiply: Callable[[int], object], tokens: int) -> float:
    began = time.perf_counter()
    multiply(tokens)
    return time.perf_counter() - began


def work_per_token(model: DecoderDescription) -> int:
    """Multiply-adds of one token in the products of all layers; of its experts, if there are some."""
    work = 0
    for number, layer in enumerate(model.layers):
        for part in layer_parts(model, number):
            matrix = len(part.shape) > 1 and not part.field.endswith(("_bias", "_scales"))
            size = math.prod(part.shape) * (2 if part.packed else 1) if matrix else 0
            if isinstance(layer.mlp, Experts) and len(part.shape) == 3:
                size = size // layer.mlp.number * layer.mlp.top_k
            work += size
    return work


def tokens_within(work: float, model: DecoderDescription, most: int) -> int:
    """How many tokens of a model that many multiply-adds compute: a power of two from 1 to `most`, which is one."""
    tokens = int(min(work / work_per_token(model), most))
    return 1 << max(tokens.bit_length() - 1, 0)
