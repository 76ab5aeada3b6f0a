"""A weight of the decoder, and the tensors of a checkpoint that it consists of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from blinkpy.models.description.packing import Packing
from blinkpy.models.description.quantization import BLOCK, Quantization, Scales

SCALAR: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1))  # shapes of one number
Source = tuple[str, tuple[int, ...], int, int]


class ScaleTensor(NamedTuple):
    """A tensor with scales that a checkpoint must have, under one of these names and with one of these
    shapes.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Part:
    """A weight of the decoder, and the checkpoint's tensors that it consists of.

    field: name in LayerWeights or Weights.
    shape: shape of the decoder's weight.
    sources: (checkpoint name, expected shape, expert or -1, first row) of each tensor. Its rows go to
        [expert, first row:] of a stacked weight, or to [first row:]. Without sources the weight is not
        stored, and is 1 everywhere.
    factor, offset: the decoder's weight is factor * (offset + stored weight).
    wide: float32, whatever the dtype of the other weights.
    transposed: the only source has each expert's matrix as [columns, rows].
    interleaved: the only source has alternating rows of gate and up; the decoder's weight has all rows of
        gate first.
    pairs_of: (rows, rows of a head, rotated rows of a head). In the first rows, the checkpoint rotates neighbouring rows of a
    head together. The decoder's weight has the first rows of all pairs, then the second rows.
    row_factors: (rows, factor) of each run of stored rows, in addition to `factor`. Empty: 1 for all rows.
    runs: (first stored row, rows) of each run of rows; the decoder's weight has them in this order. Empty: as stored.
    packed: bytes of MXFP4, blocks or scales, not numbers.
    quantization: quantization of an FP8 matrix (an Fp8Matrix in LayerWeights); None: a tensor.
    packing: packing of a 4-bit matrix (a PackedMatrix).
    dequantised: quantization and packing describe only the checkpoint; the decoder's weight is a plain tensor.
    """

    field: str
    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    factor: float = 1.0
    offset: float = 0.0
    wide: bool = False
    transposed: bool = False
    interleaved: bool = False
    packed: bool = False
    pairs_of: tuple[int, int, int] | None = None
    row_factors: tuple[tuple[int, float], ...] = ()
    runs: tuple[tuple[int, int], ...] = ()
    quantization: Quantization | None = None
    packing: Packing | None = None
    dequantised: bool = False

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales of an FP8 matrix."""
        if self.quantization is None or self.quantization.scales != Scales.BLOCK:
            return self.shape[:-1]
        return (*self.shape[:-2], *(-(-size // BLOCK) for size in self.shape[-2:]))

    @property
    def stored_scales(self) -> list[ScaleTensor]:
        """For each source of a stored FP8 matrix, one of its weights."""
        found, kind = list[ScaleTensor](), self.quantization
        if kind is None or not kind.stored:
            return found
        for name, (rows, *width), _, _ in self.sources:
            if len(width) == 2:  # of all experts: one for each
                found.append(ScaleTensor(_scale_names(name, kind.scale), ((rows, 1, 1), (rows,))))
                continue
            shapes: dict[Scales, tuple[tuple[int, ...], ...]] = {
                Scales.MATRIX: SCALAR,
                Scales.ROW: ((rows, 1), (rows,)),
                Scales.BLOCK: (tuple(-(-size // BLOCK) for size in (rows, *width)),),
            }
            found.append(ScaleTensor(_scale_names(name, kind.scale), shapes[kind.scales]))
        return found

    @property
    def stored_input_scales(self) -> list[ScaleTensor]:
        """The input scale of each source, if stored."""
        kind = self.quantization
        if kind is None or not kind.static:
            return []
        of_all = [(name, ((shape[0],),) if len(shape) == 3 else SCALAR) for name, shape, _, _ in self.sources]
        return [ScaleTensor(_scale_names(name, kind.input_scale), shapes) for name, shapes in of_all]

    @property
    def parameters(self) -> int:
        """The number of parameters; scales do not count."""
        stored = {(name, expert): math.prod(shape) for name, shape, expert, _ in self.sources}  # a tensor may be there twice
        return 0 if self.field.endswith("_scales") else sum(stored.values()) * (2 if self.packed else 1)

    def nbytes(self, itemsize: int) -> int:
        """Its memory. itemsize: bytes of weights that are neither FP8, packed nor wide."""
        if self.dequantised:
            return math.prod(self.shape) * itemsize
        if self.packing is not None:
            *matrices, rows, width = self.shape
            scales = (
                -(-width // 64) + 1 if self.packing.is_float else self.packing.groups(width)
            )  # of a row, or four and a factor
            order = 4 * width if self.packing.ordered else 0
            return math.prod(matrices) * (rows * (-(-width // 32) * 16 + 4 * scales) + order)
        if self.quantization is not None:
            return math.prod(self.shape) + 4 * math.prod(self.scale_shape)
        return math.prod(self.shape) * (1 if self.packed else 4 if self.wide else itemsize)


def _scale_names(weight: str, ends: Sequence[str]) -> tuple[str, ...]:
    """Names of tensors that belong to a weight."""
    if not weight.endswith(".weight"):  # of all experts
        return tuple(f"{weight}_{end.removeprefix('weight_')}" for end in ends)
    return tuple(weight.removesuffix("weight") + end for end in ends)


def joined(field: str, tensors: Sequence[tuple[str, int]], *width: int) -> Part:
    """Tensors stacked along their first dimension: (name, rows) of each. width: second dimension; empty for
    vectors.
    """
    first_rows = accumulate((rows for _, rows in tensors), initial=0)
    sources = tuple((name, (rows, *width), -1, first) for (name, rows), first in zip(tensors, first_rows, strict=False))
    return Part(field, (sum(rows for _, rows in tensors), *width), sources)


def vector(field: str, name: str, size: int) -> Part:
    return joined(field, [(f"{name}.weight", size)])


def matrix(field: str, stored: Sequence[str], rows: Sequence[int], width: int, bias: bool = False) -> list[Part]:
    """A projection and its bias. rows: rows of each tensor; the checkpoint may also store them as one tensor."""
    sizes = list(zip(stored, rows, strict=True)) if len(stored) > 1 else [(stored[0], sum(rows))]
    parts = [joined(field, [(f"{name}.weight", count) for name, count in sizes], width)]
    if bias:
        parts.append(joined(f"{field}_bias", [(f"{name}.bias", count) for name, count in sizes]))
    return parts
