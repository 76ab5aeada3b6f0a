"""Rows quantised to FP8: inputs of products with an `Fp8Matrix`.

Kernels that compute a whole row (the norm, SwiGLU) quantise it with `store_quantised`. Rows computed by
several programs (attention, a fused SwiGLU) are quantised by a separate kernel.
"""

from dataclasses import dataclass
from typing import Self

import torch
import triton
import triton.language as tl

from blinkpy.kernels import MAX_FP8_WIDTH, launch
from blinkpy.kernels.launch import COUNT_TOKENS, INTERPRETED
from blinkpy.kernels.quantised_matrices import BLOCK, FP8, LARGEST, Fp8Matrix

WORD = tl.constexpr(8)
"""Weights of a word."""
_LEAST_WORD = tl.constexpr(2.0**-100)  # lower bound of a row's maximum
_EXPONENT = tl.constexpr(0x7F800000)  # bits of a float32
_MULTIPLY_WORDS = tl.constexpr("""{
    .reg .b32 w<2>, x<4>, pair, sums;
    .reg .b16 a, b, c, d;
    mov.b64 {w0, w1}, $1;
    mov.b64 {x0, x1}, $2;
    mov.b64 {x2, x3}, $3;
    mov.b32 {a, b}, w0;
    mov.b32 {c, d}, w1;
    cvt.rn.f16x2.e4m3x2 pair, a;
    mul.rn.f16x2 sums, pair, x0;
    cvt.rn.f16x2.e4m3x2 pair, b;
    fma.rn.f16x2 sums, pair, x1, sums;
    cvt.rn.f16x2.e4m3x2 pair, c;
    fma.rn.f16x2 sums, pair, x2, sums;
    cvt.rn.f16x2.e4m3x2 pair, d;
    fma.rn.f16x2 sums, pair, x3, sums;
    mov.b32 {a, b}, sums;
    add.rn.f16 a, a, b;
    cvt.f32.f16 $0, a;
}""")


@triton.jit
def pack_row(x, BLOCK_K: tl.constexpr):
    """(words of inputs 0 to 3 of each eight, words of inputs 4 to 7, the inverse of their scale) of x,
    float32 [BLOCK_K]. Words are int64 [BLOCK_K / 8], of four float16 each.
    """
    power = row_power(x)
    low, high = pack_scaled(x * (8.0 / power), BLOCK_K)
    return low, high, power / 8.0


@triton.jit
def row_power(x):
    """The power of two at or below the largest |x| of a float32 block, at least 2 ** -100."""
    most = tl.maximum(tl.max(tl.abs(x), 0), _LEAST_WORD)
    return (most.to(tl.int32, bitcast=True) & _EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def pack_scaled(x, BLOCK_K: tl.constexpr):
    """The words of `pack_row` for an x that is already scaled to less than 16."""
    bits = x.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int64) & 0xFFFF
    first, second = tl.split(tl.reshape(bits, [BLOCK_K // 2, 2]))
    first, second = tl.split(tl.reshape(first | second << 16, [BLOCK_K // 4, 2]))
    return tl.split(tl.reshape(first | second << 32, [BLOCK_K // WORD, 2]))


@triton.jit
def multiply_words(w, low, high):
    """float32 sums of the products of weight words with the inputs of `pack_row`; all are int64 and of one shape."""
    if not INTERPRETED:
        return tl.inline_asm_elementwise(_MULTIPLY_WORDS, "=f,l,l,l", [w, low, high], tl.float32, True, 1)
    even = tl.zeros_like(w).to(tl.float16)
    odd = even
    for i in tl.static_range(0, WORD, 2):  # like the instructions, except the rounding of fused multiply-adds
        inputs = (low if i < 4 else high) >> 16 * (i % 4)
        even += _weight(w >> 8 * i) * _input(inputs)
        odd += _weight(w >> 8 * (i + 1)) * _input(inputs >> 16)
    return (even + odd).to(tl.float32)


@triton.jit
def multiply_words_exactly(w, x):
    """multiply_words in float32, for float32 inputs, which need more than 11 bits: w int64 [N, W], x float32
    [8 * W].
    """
    byte = w[:, :, None] >> (tl.arange(0, WORD) * 8)[None, None, :] & 0xFF
    weights = byte.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return tl.sum(weights * tl.reshape(x, [w.shape[1], WORD])[None, :, :], 2)


@triton.jit
def _weight(word):
    """float16 of a word's lowest byte."""
    return (word & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)


@triton.jit
def _input(word):
    """float16 of a word's lowest 16 bits."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True)


ROW_SCALES, BLOCK_SCALES = tl.constexpr(1), tl.constexpr(2)
"""Values of the kernels' SCALES; 0 means no scales. ROW_SCALES: one scale per row of inputs and of weights.
BLOCK_SCALES: one per 128 inputs of a row, and per 128 x 128 weights.
"""
GROUP = tl.constexpr(BLOCK)
PART = 2048
"""Columns of a program, if a row has several scales or a given one."""
MOST_COLUMNS, PIECE = 32_768, 16_384
"""Most columns that 16 warps hold without spilling registers, and columns of a piece of a wider row."""
_LARGEST = tl.constexpr(LARGEST)
_LEAST = tl.constexpr(2.0**-100)  # lower bound of a row's maximum, so that rows of zeros have a scale


@dataclass(frozen=True)
class Fp8Rows:
    """Quantised rows: x = values * scales, as in Fp8Matrix."""

    values: torch.Tensor  # float8_e4m3fn [M, K]
    scales: torch.Tensor  # float32 [M], or [M, ceil(K / 128)]

    @classmethod
    def within(cls, scratch: Self, weight: Fp8Matrix, rows: int) -> Self:
        """The memory for `rows` inputs of a weight, at the start of a larger buffer. Raises ValueError if it is too
        small.
        """
        k = weight.values.shape[-1]
        groups = -(-k // BLOCK) if weight.blocks else 1
        if scratch.values.numel() < rows * k or scratch.scales.numel() < rows * groups:
            raise ValueError(f"{rows} quantised rows of {k} values exceed the buffer of {scratch.values.numel()} values")
        scales = scratch.scales.view(-1)[: rows * groups]
        return cls(scratch.values.view(-1)[: rows * k].view(rows, k), scales.view(rows, groups) if weight.blocks else scales)

    @classmethod
    def allocate(cls, rows: int, width: int, device: str) -> Self:
        """Allocate scratch memory for `rows` rows of at most `width`, with scales of either kind."""
        values = torch.zeros(rows * width, dtype=torch.uint8, device=device).view(FP8)
        return cls(values, torch.zeros(rows * -(-width // BLOCK), dtype=torch.float32, device=device))

    @property
    def kind(self) -> int:
        """The kernels' SCALES."""
        return ROW_SCALES.value if self.scales.dim() == 1 else BLOCK_SCALES.value

    def declared(self, rows: int, width: int) -> list[tuple[object, ...]]:
        """For `check_tensors`."""
        sizes = (rows,) if self.scales.dim() == 1 else (rows, -(-width // BLOCK))
        return [(self.values, "quantised values", (rows, width), FP8), (self.scales, "their scales", sizes, torch.float32)]


@triton.jit
def row_scale(x):
    """The scale of a row x, float32 [BLOCK]: its largest absolute value becomes the largest FP8 number."""
    return tl.div_rn(tl.maximum(tl.max(tl.abs(x), 0), _LEAST), _LARGEST)


@triton.jit
def store_quantised(
    x,  # float32 [BLOCK] a row, or a part with BLOCK_SCALES or STATIC, as rounded to the storage dtype; 0 beyond WIDTH
    values_ptr,  # float8 [T, WIDTH]
    scales_ptr,  # float32 [T], or [T, GROUPS]
    row, first,  # row, and the part's first column
    input_scale,  # of all rows (STATIC only)
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr, STATIC: tl.constexpr,
):  # fmt: skip
    """Divide by the scale, round to nearest even, saturate, and store."""
    at = row.to(tl.int64) * WIDTH
    column = first + tl.arange(0, BLOCK)
    if SCALES == BLOCK_SCALES:
        GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
        groups = tl.reshape(x, [BLOCK // GROUP, GROUP])
        scale = tl.div_rn(tl.maximum(tl.max(tl.abs(groups), 1), _LEAST), _LARGEST)
        quantised = tl.reshape(tl.div_rn(groups, tl.broadcast_to(scale[:, None], [BLOCK // GROUP, GROUP])), [BLOCK])
        group = first // GROUP + tl.arange(0, BLOCK // GROUP)
        tl.store(scales_ptr + row.to(tl.int64) * GROUPS + group, scale, mask=group < GROUPS)
    else:
        if STATIC:
            scale = input_scale + 0.0
        else:
            scale = row_scale(x)
        quantised = tl.div_rn(x, scale + tl.zeros([BLOCK], tl.float32))
        tl.store(scales_ptr + row, scale, mask=first == 0)
    quantised = tl.clamp(quantised, -_LARGEST, _LARGEST, propagate_nan=tl.PropagateNan.ALL)
    tl.store(values_ptr + at + column, quantised.to(tl.float8e4nv), mask=column < WIDTH)


@triton.jit
def _quantise_rows(
    x_ptr,  # [T, WIDTH], rows x_stride elements apart
    values_ptr,  # float8 [T, WIDTH]
    scales_ptr,  # float32 [T], or [T, GROUPS]
    counts_ptr,  # int64 [8] batch header
    x_stride,  # elements
    input_scale,  # of all rows (STATIC only)
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALES: tl.constexpr, STATIC: tl.constexpr,
    EACH: tl.constexpr,  # rows of a token
    PIECES: tl.constexpr,  # of a row with one scale
    PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    first = tl.program_id(1) * BLOCK
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    if row < tl.load(counts_ptr + COUNT_TOKENS) * EACH:
        x_ptr += row.to(tl.int64) * x_stride
        if PIECES == 1:
            x = _piece(x_ptr, first, WIDTH, BLOCK)
            store_quantised(x, values_ptr, scales_ptr, row, first, input_scale, WIDTH, BLOCK, SCALES, STATIC)
        else:  # read each piece twice: for the maximum, and to store it
            most = tl.zeros([BLOCK], tl.float32)
            for piece in range(PIECES):
                most = tl.maximum(most, tl.abs(_piece(x_ptr, piece * BLOCK, WIDTH, BLOCK)))
            scale = row_scale(most)
            for piece in range(PIECES):
                x = _piece(x_ptr, piece * BLOCK, WIDTH, BLOCK)
                store_quantised(x, values_ptr, scales_ptr, row, piece * BLOCK, scale, WIDTH, BLOCK, SCALES, True)


@triton.jit
def _piece(row_ptr, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns first to first + BLOCK of a row, as float32; 0 beyond WIDTH."""
    column = first + tl.arange(0, BLOCK)
    return tl.load(row_ptr + column, mask=column < WIDTH, other=0.0).to(tl.float32)


def quantise_rows(
    x: torch.Tensor, counts: torch.Tensor, out: Fp8Rows, input_scale: float | None = None, *, each: int = 1, pdl: bool = False
) -> None:
    """Quantise the first counts[TOKENS] * each rows of x [T * each, width], in a storage dtype and with any
    row stride.
    """
    rows, width = x.shape
    check_width(width)
    header = (counts, "counts", *launch.HEADER)
    launch.check_tensors((x, "x", (rows, width), launch.STORAGE_DTYPES, True), header, *out.declared(rows, width))
    block, programs, pieces = row_pieces(width, whole=out.kind == ROW_SCALES.value and input_scale is None)
    _quantise_rows[(rows, programs)](
        x, out.values, out.scales, counts, x.stride(0), input_scale or 0.0,
        WIDTH=width, BLOCK=block, SCALES=out.kind, STATIC=input_scale is not None, EACH=each, PIECES=pieces, PDL=pdl,
        num_warps=row_warps(block), **launch.options(pdl),
    )  # fmt: skip


def row_block(width: int) -> int:
    """The power of two that fits a row and whole groups."""
    return max(BLOCK, triton.next_power_of_2(width))


def row_pieces(width: int, *, whole: bool) -> tuple[int, int, int]:
    """The division of a row of `width` columns for quantization: (columns of a piece, programs of a row, pieces of a program).

    whole: the row has one scale, which its program finds first. A program holds a row of up to MOST_COLUMNS columns; it
        goes through a wider row in pieces, twice.
    """
    block = row_block(width)
    if not whole:
        block = min(PART, block)
        return block, triton.cdiv(width, block), 1
    block = block if block <= MOST_COLUMNS else PIECE
    return block, 1, triton.cdiv(width, block)


def row_warps(block: int) -> int:
    return min(16, max(1, block // 512))


def check_width(width: int) -> None:
    if width > MAX_FP8_WIDTH:
        raise ValueError(f"a row of {width} values is wider than the {MAX_FP8_WIDTH} values that a program can quantise")
