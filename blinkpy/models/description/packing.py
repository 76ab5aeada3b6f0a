"""4-bit weights in linear layers: how a checkpoint stores one matrix. No torch.

Layouts: compressed-tensors' `pack-quantized`, `nvfp4-pack-quantized` and `mxfp4-pack-quantized`, AutoAWQ's GEMM form, GPTQ, and
NVIDIA's modelopt.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

WORD = 8  # 4-bit numbers of an int32
INT32, INT64, BYTES, FP8 = ("I32",), ("I64",), ("U8",), ("F8_E4M3",)
FLOATS = ("F16", "BF16", "F32")


class Layout(Enum):
    """The form of a stored matrix."""

    COMPRESSED = "compressed-tensors, pack-quantized"
    AWQ = "AWQ"
    GPTQ = "GPTQ"
    NVFP4 = "compressed-tensors, nvfp4-pack-quantized"
    MODELOPT = "modelopt, NVFP4"
    MXFP4 = "compressed-tensors, mxfp4-pack-quantized"


E2M1_LAYOUTS = (Layout.NVFP4, Layout.MODELOPT, Layout.MXFP4)


class StoredPart(NamedTuple):
    """A stored tensor of a matrix. role: words, scales, zeros, order, factor, or "" if it has no effect."""

    role: str
    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    optional: bool = False


@dataclass(frozen=True)
class Packing:
    """4-bit weights of all linear layers; their inputs are not quantised.

    group: inputs that share a scale; 0: a whole row. zeros: whether the checkpoint has a zero point per scale. ordered: whether
    it has the group of each input (`desc_act`, `actorder`). zero_offset: added to stored zero points. ignored: regular
    expressions for the names of unquantised matrices. ignored_ends: suffixes of such names.
    """

    layout: Layout
    group: int = 128
    zeros: bool = False
    ordered: bool = False
    zero_offset: int = 0
    ignored: tuple[str, ...] = ()
    ignored_ends: tuple[str, ...] = ()

    @property
    def is_float(self) -> bool:
        """Whether the numbers are E2M1, and not integers."""
        return self.layout in E2M1_LAYOUTS

    @property
    def kind(self) -> str:
        """`PackedMatrix.kind`: the type of the numbers; for integers also the inputs that share a scale (0: a row)."""
        return "fp4" if self.is_float else f"int4 {self.group}"

    @property
    def text(self) -> str:
        """The packing in words."""
        kind = "FP4 (E2M1)" if self.is_float else "int4"
        each = f"{self.group} inputs" if self.group else "row"
        return f"{kind}, a scale for each {each} ({self.layout.value}), inputs not quantised"

    def keeps(self, name: str) -> bool:
        """Whether a matrix is not quantised. name: without ".weight"."""
        return name.endswith(self.ignored_ends) or (bool(self.ignored) and _compiled(self.ignored).match(name) is not None)

    def groups(self, width: int) -> int:
        """Scales of a row of `width` inputs."""
        return width // self.group if self.group else 1

    def misfit(self, rows: int, width: int) -> str:
        """Why a matrix of this shape can't be stored in this form, or ""."""
        if width % WORD or (self.group and width % self.group):
            return f"{width} inputs are not a multiple of {self.group or WORD}"
        if rows % WORD and (self.layout in (Layout.AWQ, Layout.GPTQ) or self.zeros):
            return f"{rows} outputs are not a multiple of {WORD}"
        return ""

    def tensors(self, weight: str, rows: int, width: int) -> Iterator[StoredPart]:
        """The tensors of one matrix in a checkpoint. weight: its name, with ".weight"."""
        stem, groups = weight.removesuffix("weight"), self.groups(width)
        if self.layout in (Layout.AWQ, Layout.GPTQ):
            packed = (width, rows // WORD) if self.layout == Layout.AWQ else (width // WORD, rows)
            yield StoredPart("words", f"{stem}qweight", packed, INT32)
            yield StoredPart("scales", f"{stem}scales", (groups, rows), FLOATS)
            yield StoredPart("zeros", f"{stem}qzeros", (groups, rows // WORD), INT32)
            if self.layout == Layout.GPTQ:
                yield StoredPart("order", f"{stem}g_idx", (width,), INT32, optional=not self.ordered)
        elif self.layout == Layout.COMPRESSED:
            yield StoredPart("words", f"{stem}weight_packed", (rows, width // WORD), INT32)
            yield StoredPart("scales", f"{stem}weight_scale", (rows, groups), FLOATS)
            if self.zeros:
                yield StoredPart("zeros", f"{stem}weight_zero_point", (rows // WORD, groups), INT32)
            if self.ordered:
                yield StoredPart("order", f"{stem}weight_g_idx", (width,), INT32)
            yield StoredPart("", f"{stem}weight_shape", (2,), INT64 + INT32, optional=True)
        else:
            of_modelopt = self.layout == Layout.MODELOPT
            yield StoredPart("words", weight if of_modelopt else f"{stem}weight_packed", (rows, width // 2), BYTES)
            of_powers = self.layout == Layout.MXFP4
            yield StoredPart("scales", f"{stem}weight_scale", (rows, groups), BYTES if of_powers else FP8)
            if of_powers:
                return
            factor = "weight_scale_2" if of_modelopt else "weight_global_scale"
            yield StoredPart("factor", f"{stem}{factor}", () if of_modelopt else (1,), FLOATS)
            inputs = "input_scale" if of_modelopt else "input_global_scale"
            yield StoredPart("", f"{stem}{inputs}", () if of_modelopt else (1,), FLOATS, optional=True)


@lru_cache(maxsize=16)
def _compiled(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
