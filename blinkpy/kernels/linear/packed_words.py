"""4-bit weights in the order of a matrix unit's registers: the single internal form of all 4-bit formats of checkpoints.

A word has eight numbers of one row. Words come in fours, for 32 inputs. Pair p is bits 4 p to 4 p + 3 of both halves of a
word. In word t it has the inputs 8 p + 2 t and, in the upper half, 8 p + 2 t + 1. So a thread that unpacks a word holds the
pairs of inputs that Hopper's matrix unit (m64nNk16, first operand in registers) wants from it. A pair leaves its word by
one shift and one logical operation: a bfloat16 whose bits are 0x4300 and, in the lowest four, a number n, is 128 + n.
"""

from dataclasses import dataclass, replace
from typing import Self

import torch
import triton
import triton.language as tl

from blinkpy.kernels.launch import INTERPRETED

CHUNK = 32
"""Inputs of four words."""
FP4_GROUP = 16
"""E2M1 numbers that share a scale."""
SCALE_BIAS = 22
"""A scale of E2M1 numbers is 2 ** (its upper five bits - 22) * (1 + its lower three bits / 8): E4M3's values without a sign, as
normal numbers. The least one stands for 0. MXFP4's scales are powers of two (packed_loader.py)."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # OCP MX 1.0
SIGN_BITS = tl.constexpr(-2147450880)  # 0x80008000, of two bfloat16
E2M1_BITS = tl.constexpr(0x01C001C0)
_SUBTRACT = tl.constexpr("""{
    .reg .b32 rest;
    lop3.b32 $0, $4, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 rest, $4, 4;
    lop3.b32 $1, rest, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 rest, $4, 8;
    lop3.b32 $2, rest, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 rest, $4, 12;
    lop3.b32 $3, rest, 0x000F000F, 0x43004300, 0xEA;
    sub.rn.bf16x2 $0, $0, $5;
    sub.rn.bf16x2 $1, $1, $5;
    sub.rn.bf16x2 $2, $2, $5;
    sub.rn.bf16x2 $3, $3, $5;
}""")
_SCALE = tl.constexpr("""{
    .reg .b32 sign, rest;
    shl.b32 sign, $4, 12;
    shl.b32 rest, $4, 6;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 $0, rest, 0x01C001C0, sign, 0xEA;
    shl.b32 sign, $4, 8;
    shl.b32 rest, $4, 2;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 $1, rest, 0x01C001C0, sign, 0xEA;
    shl.b32 sign, $4, 4;
    shr.u32 rest, $4, 2;
    and.b32 sign, sign, 0x80008000;
    lop3.b32 $2, rest, 0x01C001C0, sign, 0xEA;
    shr.u32 rest, $4, 6;
    and.b32 sign, $4, 0x80008000;
    lop3.b32 $3, rest, 0x01C001C0, sign, 0xEA;
    mul.rn.bf16x2 $0, $0, $5;
    mul.rn.bf16x2 $1, $1, $5;
    mul.rn.bf16x2 $2, $2, $6;
    mul.rn.bf16x2 $3, $3, $6;
}""")
FP4_UNSCALE = tl.constexpr(256.0)
"""A factor that `fp4_weights` leaves out."""


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [N, K], or one for each expert [experts, N, K], of 4-bit numbers.

    int4: a weight is (number - zero point) * scale. E2M1: number * scale * factor of the row.

    words: int32 [..., N, 4 * ceil(K / 32)], see above; undefined beyond K.
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


@triton.jit
def int4_weights(w, zero):
    """bfloat16 [N, 8 * W] numbers minus zero points, exact. w: int32 [N, W]. zero: int32 [N], 0 to 15."""
    if not INTERPRETED:
        offset = tl.broadcast_to(((zero | 0x4300) * 0x10001)[:, None], w.shape)
        types: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        p0, p1, p2, p3 = tl.inline_asm_elementwise(_SUBTRACT, "=&r,=&r,=&r,=&r,r,r", [w, offset], types, True, 1)
        return _in_order(_halves(p0), _halves(p1), _halves(p2), _halves(p3))
    less = zero[:, None].to(tl.float32)
    return _in_order(_less(w, less), _less(w >> 4, less), _less(w >> 8, less), _less(w >> 12, less))


@triton.jit
def fp4_weights(w, four, next_four):
    """bfloat16 [N, 8 * W] E2M1 numbers times scales / 256, exact. w: int32 [N, W]. four: int32 [N], four scales of 16 inputs
    each, the first in the lowest byte; next_four: the scales for the ninth and later words, if W is 16.
    """
    N: tl.constexpr = w.shape[0]
    W: tl.constexpr = w.shape[1]
    two = tl.join(four, four >> 16)
    if W > 8:
        two = tl.permute(tl.join(two, tl.join(next_four, next_four >> 16)), (0, 2, 1))
    two = tl.reshape(two, [N, W // 4, 1])
    two = tl.reshape(tl.broadcast_to(two, [N, W // 4, 4]), [N, W])
    first = ((two & 0xFF) << 4) + (223 << 7)  # bfloat16 of 2 ** 118 times the scale; tiny numbers have 2 ** -126 of theirs
    second = ((two >> 8 & 0xFF) << 4) + (223 << 7)
    if not INTERPRETED:
        types: tl.constexpr = (tl.int32, tl.int32, tl.int32, tl.int32)
        inputs = [w, first * 0x10001, second * 0x10001]
        p0, p1, p2, p3 = tl.inline_asm_elementwise(_SCALE, "=&r,=&r,=&r,=&r,r,r,r", inputs, types, True, 1)
        return _in_order(_halves(p0), _halves(p1), _halves(p2), _halves(p3))
    p0, p1 = _times(w << 12, w << 6, first), _times(w << 8, w << 2, first)
    p2, p3 = _times(w << 4, w >> 2, second), _times(w, w >> 6, second)
    return _in_order(p0, p1, p2, p3)


@triton.jit
def _halves(two):
    """bfloat16 [N, W, 2] of the two halves of words."""
    return tl.join(two.to(tl.int16), (two >> 16).to(tl.int16)).to(tl.bfloat16, bitcast=True)


@triton.jit
def _less(w, zero):
    """bfloat16 [N, W, 2]: the first number of each half, minus zero. Only for the interpreter."""
    return tl.join((w & 15).to(tl.float32) - zero, (w >> 16 & 15).to(tl.float32) - zero).to(tl.bfloat16)


@triton.jit
def _times(signs, rest, scale):
    tiny = _halves((signs & SIGN_BITS) | (rest & E2M1_BITS)).to(tl.float32)
    return (tiny * scale.to(tl.int16).to(tl.bfloat16, bitcast=True).to(tl.float32)[:, :, None]).to(tl.bfloat16)


@triton.jit
def _in_order(p0, p1, p2, p3):
    """[N, 8 * W] numbers in the order of the inputs, from the four pairs of each word, [N, W, 2]."""
    N: tl.constexpr = p0.shape[0]
    CHUNKS: tl.constexpr = p0.shape[1] // 4
    pairs = tl.reshape(tl.join(tl.join(p0, p1), tl.join(p2, p3)), [N, CHUNKS, 4, 2, 2, 2])
    return tl.reshape(tl.permute(pairs, (0, 1, 5, 4, 2, 3)), [N, CHUNKS * 32])
