"""Quantised matrices as torch tensors: FP8 numbers with scales, and 4-bit numbers in the words of linear/packed_words.py.

Only torch is imported: an engine on the CPU reads, unpacks and multiplies these matrices on machines without Triton.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
BLOCK = 128
"""Rows and columns of a block that share a scale; the same number of inputs shares a scale."""


@dataclass(frozen=True)
class Fp8Matrix:
    """A weight: values times scales.

    With row scales, y[m, n] = sx[m] * scales[n] * sum over k of qx[m, k] * values[n, k]. Here qx is a row
    x[m] divided by sx[m] and rounded. sx[m] is `input_scale`, or max |x[m]| / 448 without an input scale.

    With block scales, x is quantised in groups of 128 columns, each with the scale max |group| / 448. The sum
    over k is then the sum over the groups of sx[m, g] * scales[n // 128, g] * (sum of the group).

    x is rounded to its storage dtype before it is quantised; sums are float32. If max |x| / 448 is 0, the
    scale is 1.
    """

    values: torch.Tensor  # float8_e4m3fn [N, K], or [experts, N, K]
    scales: torch.Tensor  # float32 [N], or [ceil(N / 128), ceil(K / 128)]; of experts with them as first dimension
    input_scale: float | None = None

    @property
    def blocks(self) -> bool:
        """Whether each block has a scale, instead of each row."""
        return self.scales.dim() == self.values.dim()


def quantised_rows(x: torch.Tensor, scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """(Values divided by their scale as FP8, rounded to nearest and saturated; the scales).

    x: [..., K], of any float type. scale: scale of all rows; None: the maximum of each row becomes 448 (scale 1 if it
    is 0). Returns float8_e4m3fn [..., K] and float32 [...].
    """
    x = x.float()
    if scale is None:
        scales = x.abs().amax(-1) / LARGEST
        scales[scales == 0] = 1
    else:
        scales = x.new_full(x.shape[:-1], scale)
    return (x / scales[..., None]).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


CHUNK = 32
"""Inputs of four words."""
FP4_GROUP = 16
"""E2M1 numbers that share a scale."""
SCALE_BIAS = 22
"""A scale of E2M1 numbers is 2 ** (its upper five bits - 22) * (1 + its lower three bits / 8): E4M3's values without a sign, as
normal numbers. The least one stands for 0. MXFP4's scales are powers of two (packed_loader.py)."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # OCP MX 1.0


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [N, K], or one for each expert [experts, N, K], of 4-bit numbers.

    int4: a weight is (number - zero point) * scale. E2M1: number * scale * factor of the row.

    words: int32 [..., N, 4 * ceil(K / 32)], see linear/packed_words.py; undefined beyond K.
    scales: int32 [..., groups, N]. int4: the scale of K / groups inputs, a float32 whose lowest four bits are the zero point.
    E2M1: four scales of 16 inputs each, the first in the lowest byte; groups is ceil(K / 64).
    width: K.
    factors: float32 [..., N], or None for int4.
    columns: int32 [..., K], the input of each column; None: the inputs in their order.
    """

    words: torch.Tensor
    scales: torch.Tensor
    width: int
    factors: torch.Tensor | None = None
    columns: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [experts, N, K]."""
        return (*self.words.shape[:-1], self.width)

    @property
    def fp4(self) -> bool:
        """Whether the numbers are E2M1, and not integers."""
        return self.factors is not None

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: a whole row."""
        groups = self.scales.shape[-2]
        return FP4_GROUP if self.fp4 else 0 if groups == 1 else self.width // groups

    @property
    def kind(self) -> str:
        """The type of the numbers; for integers also the inputs that share a scale (0: a row)."""
        return "fp4" if self.fp4 else f"int4 {self.group}"

    @property
    def device(self) -> torch.device:
        return self.words.device

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, expert: int) -> Self:
        factors, columns = (None if some is None else some[expert] for some in (self.factors, self.columns))
        return replace(self, words=self.words[expert], scales=self.scales[expert], factors=factors, columns=columns)

    def rows(self, rows: slice) -> Self:
        """Some rows of one matrix."""
        factors = None if self.factors is None else self.factors[rows]
        return replace(self, words=self.words[rows], scales=self.scales[:, rows], factors=factors)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """The inputs in the order of the columns. x: [tokens, K]."""
        return x if self.columns is None else x[:, self.columns]

    def unpack(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Some rows of one matrix, in the order of its columns: [rows, K]."""
        numbers, scales = (
            unpack_words(self.words[rows])[:, : self.width],
            self.scales[:, rows].T.clone(memory_format=torch.contiguous_format),
        )
        if self.factors is None:
            values = numbers.unflatten(1, (scales.shape[1], -1)).float() - (scales & 15).float()[..., None]
            return (values * (scales & -16).view(torch.float32)[..., None]).flatten(1).to(dtype)
        each = (scales.view(torch.uint8).int() << 20) + (127 - SCALE_BIAS << 23)  # [rows, 4 * groups]
        each = each.view(torch.float32).repeat_interleave(FP4_GROUP, 1)[:, : self.width]
        values = torch.tensor(E2M1, device=self.device)[numbers.int()]
        return (values * each * self.factors[rows, None]).to(dtype)


def kind_of(*matrices: PackedMatrix) -> str:
    """The common kind of matrices; "" if they differ. A matrix with one scale per row matches any group size."""
    kinds = {matrix.kind for matrix in matrices}
    if len(kinds) > 1:
        kinds -= {"int4 0"}
    return kinds.pop() if len(kinds) == 1 else ""


def pack_words(numbers: torch.Tensor) -> torch.Tensor:
    """Words of 4-bit numbers. numbers: uint8 [..., K]. Returns int32 [..., 4 * ceil(K / 32)]."""
    padded = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % CHUNK))
    chunks = padded.unflatten(-1, (-1, 4, 4, 2))  # [..., chunks, pair, word, half]
    bytes_of = chunks[..., ::2, :, :] | chunks[..., 1::2, :, :] << 4  # [..., chunks, byte of a half, word, half]
    return bytes_of.movedim(-3, -1).contiguous().flatten(-4).view(torch.int32)


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """The inverse of pack_words: uint8 [N, 8 * W] of int32 [N, W]."""
    bytes_of = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4, 2, 2))  # [N, chunks, word, half, byte]
    pairs = torch.stack((bytes_of & 15, bytes_of >> 4), -1)  # [N, chunks, word, half, byte, pair of the byte]
    return pairs.permute(0, 1, 4, 5, 2, 3).flatten(1)


def int4_scales(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """Scales of a PackedMatrix, int32, from float32 scales (rounded to 20 bits) and zero points (0 to 15) of the same shape."""
    return (scales.float().contiguous().view(torch.int32) + 8 & -16) | zeros.to(torch.int32)


def fp4_scales(scales: torch.Tensor) -> torch.Tensor:
    """Scales of a PackedMatrix, int32 [ceil(K / 64), N], from those of E4M3, float32 [N, K / 16], at least 0."""
    bits = scales.contiguous().view(torch.int32) - (127 - SCALE_BIAS << 23) >> 20
    padded = torch.nn.functional.pad(torch.where(scales > 0, bits, 0).to(torch.uint8), (0, -scales.shape[1] % 4))
    return padded.view(torch.int32).T.contiguous()
