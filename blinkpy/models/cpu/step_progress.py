"""Runs a step in pieces of a fraction of a second. A word advances after each piece, so that front ends can distinguish a
computing engine from a dead engine.
"""

import math
import time
from collections.abc import Callable, Iterator

import numpy as np

from blinkpy.models.description.blocks import Experts
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.parts.weight_parts import layer_parts

PIECE = 1 << 30  # multiply-adds
FEWEST_TOKENS = 16  # minimum tokens of a piece, because each piece reads all weights


class StepProgress:
    """piece: maximum multiply-adds between two updates of the word, except in products with FEWEST_TOKENS
    tokens.
    """

    def __init__(self, piece: int = PIECE):
        self.piece = piece
        self.word = np.zeros(1, np.int64)  # the word that front ends read, after the engine has attached

    def pieces(self, tokens: int, work: int) -> Iterator[slice]:
        """Slices of `tokens` tokens, each of which takes `work` multiply-adds. The word advances after each
        slice.
        """
        size = self._tokens_of_piece(work)
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))
            self.word += 1

    def _tokens_of_piece(self, work: int) -> int:
        return max(FEWEST_TOKENS, self.piece // max(work, 1))


TOKENS, INPUTS, OUTPUTS = 128, 1024, 3072  # of the measured product
FEW = 4  # tokens of the first measurement, and of the only one on a very slow (such as an emulated) machine
TRIALS = 4  # the best trial counts, because other processes share the machine
ENOUGH_S = 1.0  # skip a trial that would take longer


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
    """Multiply-adds of one token in the products of all layers, with its experts."""
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
    """Number of tokens that `work` multiply-adds compute: a power of two from 1 to `most`, which must be a
    power of two.
    """
    tokens = int(min(work / work_per_token(model), most))
    return 1 << max(tokens.bit_length() - 1, 0)
