"""FP8 weights of a model's linear layers: their scales, the scales of inputs, and the layers that have them.
No torch.
"""

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

BLOCK = 128
"""Rows and columns of a block that shares a scale: blinkpy.kernels.fp8_matrix.BLOCK."""


class Scales(Enum):
    """The numbers that share a scale of a stored weight."""

    MATRIX = "matrix"
    ROW = "row"
    BLOCK = "block of 128 x 128"


@dataclass(frozen=True)
class Quantization:
    """FP8 (E4M3) weights in the linear layers of all layers, experts included: blinkpy.kernels.fp8_matrix
    defines the arithmetic.

    static: the checkpoint has a scale for the inputs of each matrix; else each input gets its own, or one for
    128 columns where weights have one for each block. stored: the checkpoint has FP8 weights; else they are
    quantised as they are loaded. scale, input_scale: ends of the names of stored scales, any one of them.
    ignored: regular expressions, and ignored_ends: ends, of the names of matrices that stay unchanged.
    """

    scales: Scales = Scales.ROW
    static: bool = False
    stored: bool = True
    scale: tuple[str, ...] = ("weight_scale", "weight_scale_inv")
    input_scale: tuple[str, ...] = ("input_scale", "activation_scale")
    ignored: tuple[str, ...] = ()
    ignored_ends: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """For people."""
        inputs = "one for each matrix" if self.static else "one for 128 columns" if self.scales == Scales.BLOCK else "one a token"
        made = "" if self.stored else ", quantised as it is loaded"
        return f"FP8 (E4M3), a scale for each {self.scales.value}, inputs have {inputs}{made}"

    def keeps(self, name: str) -> bool:
        """Whether a matrix is not quantised. name: without ".weight"."""
        return name.endswith(self.ignored_ends) or (bool(self.ignored) and _compiled(self.ignored).match(name) is not None)


QUANTISED_ON_LOADING = Quantization(stored=False)
"""The quantization of `--quantization fp8`."""


def joined(patterns: tuple[str, ...]) -> str:
    """One regular expression for any of them."""
    return "|".join(f"(?:{pattern})" for pattern in patterns)


@lru_cache(maxsize=16)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(joined(patterns))
