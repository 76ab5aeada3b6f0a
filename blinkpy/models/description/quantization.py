"""FP8 weights of a model: which matrices have them, and which numbers share a scale. packing.py describes 4-bit weights."""

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

BLOCK = 128
"""Rows and columns of a block that shares a scale: blinkpy.kernels.quantised_matrices.BLOCK."""


class Scales(Enum):
    """Which numbers of a stored weight share a scale."""

    MATRIX = "matrix"
    ROW = "row"
    BLOCK = "block of 128 x 128"


@dataclass(frozen=True)
class Quantization:
    """FP8 (E4M3) weights in the linear layers of all layers, including experts. blinkpy.kernels.quantised_matrices
    defines the arithmetic.

    inputs: whether inputs are also rounded to 8 bits; otherwise weights are dequantised at the start.
    static: whether the checkpoint has an input scale for each matrix; otherwise each input gets a scale (with block scales of
    weights, one per 128 columns).
    stored: whether the checkpoint has FP8 weights; otherwise loading quantises them.
    scale, input_scale: possible suffixes of the names of stored scales.
    ignored, ignored_ends: regular expressions, matched from the start, and ends of the names of matrices that are not quantised.
    """

    scales: Scales = Scales.ROW
    static: bool = False
    stored: bool = True
    scale: tuple[str, ...] = ("weight_scale", "weight_scale_inv")
    input_scale: tuple[str, ...] = ("input_scale", "activation_scale")
    ignored: tuple[str, ...] = ()
    ignored_ends: tuple[str, ...] = ()
    inputs: bool = True

    @property
    def text(self) -> str:
        """A description for people."""
        if not self.inputs:
            return f"FP8 (E4M3), a scale for each {self.scales.value}, inputs not quantised: dequantised at the start"
        inputs = "one for each matrix" if self.static else "one for 128 columns" if self.scales == Scales.BLOCK else "one a token"
        made = "" if self.stored else ", quantised as it is loaded"
        return f"FP8 (E4M3), a scale for each {self.scales.value}, inputs have {inputs}{made}"

    def keeps(self, name: str) -> bool:
        """Whether a matrix is not quantised. name: without ".weight"."""
        return name.endswith(self.ignored_ends) or (bool(self.ignored) and _compiled(self.ignored).match(name) is not None)


QUANTISED_ON_LOADING = Quantization(stored=False)
"""The quantization of `--quantization fp8`."""


def any_of(patterns: tuple[str, ...]) -> str:
    """One regular expression that matches every text that any of these expressions matches."""
    return "|".join(f"(?:{pattern})" for pattern in patterns)


@lru_cache(maxsize=16)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile(any_of(patterns))
