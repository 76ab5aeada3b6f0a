"""Converts 4-bit matrices of a checkpoint to the internal form of the decoder (blinkpy.kernels.quantised_matrices)."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.quantised_matrices import (
    BLOCK,
    CHUNK,
    FP4_GROUP,
    Fp8Matrix,
    PackedMatrix,
    fp4_scales,
    int4_scales,
    pack_words,
)
from blinkpy.models.description.packing import Layout
from blinkpy.models.weights.packed_loader import PackedReader
from blinkpy.models.weights.parts.part import Part


def dense(matrix: torch.Tensor | Fp8Matrix | PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """A matrix [N, K], or in FP8 also [experts, N, K], without quantization, in a dtype."""
    if isinstance(matrix, PackedMatrix):
        unpacked = matrix.unpack(slice(None), torch.float32)
        result = torch.empty_like(unpacked)
        result[:, slice(None) if matrix.columns is None else matrix.columns] = unpacked
        return result.to(dtype)
    if isinstance(matrix, Fp8Matrix) and matrix.values.dim() == 3:
        result = torch.empty(matrix.values.shape, dtype=dtype, device=matrix.values.device)
        for own, values, scales in zip(result, matrix.values, matrix.scales, strict=True):
            own.copy_(dense(Fp8Matrix(values, scales), dtype))
        return result
    if isinstance(matrix, Fp8Matrix):
        rows, width = matrix.values.shape
        scales = (
            matrix.scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1) if matrix.blocks else matrix.scales[:, None]
        )
        return (matrix.values.float() * scales[:rows, :width]).to(dtype)
    return matrix.to(dtype)


def empty_packed(part: Part, device: str = "cpu") -> PackedMatrix:
    """A matrix with the shape of a part, and memory that is not set."""
    packing, shape = part.packing, part.shape
    if packing is None:
        raise ValueError(f"{part.field} has no 4-bit form")
    *matrices, rows, width = shape
    groups = -(-width // 64) if packing.is_float else packing.groups(width)
    words = torch.empty(*matrices, rows, -(-width // CHUNK) * 4, dtype=torch.int32, device=device)
    scales = torch.empty(*matrices, groups, rows, dtype=torch.int32, device=device)
    factors = torch.empty(*matrices, rows, device=device) if packing.is_float else None
    return PackedMatrix(words, scales, width, factors)


def numbers_of(words: torch.Tensor, layout: Layout, rows: int, width: int) -> torch.Tensor:
    """uint8 [rows, width] numbers of a matrix's stored words, int32 or uint8."""
    stored = words.contiguous().view(torch.uint8)
    numbers = torch.stack((stored & 15, stored >> 4), -1).flatten(-2)  # eight of each int32, from its lowest bits on
    if layout == Layout.AWQ:  # [width, rows], of each eight outputs those with even numbers first
        return numbers.view(width, -1, 2, 4).mT.reshape(width, rows).T
    if layout == Layout.GPTQ:  # [width / 8, rows, 8]
        return numbers.view(-1, rows, 8).transpose(0, 1).reshape(rows, width)
    return numbers.view(rows, width)


def factors_of_rows(part: Part, unit: int = 1) -> torch.Tensor:
    """float32 [stored rows / unit, rounded up], Part.row_factors of every `unit`-th row."""
    return torch.cat([torch.full((rows,), factor) for rows, factor in part.row_factors])[::unit]


def read_packed(part: Part, reader: PackedReader, device: str = "cpu") -> PackedMatrix:
    """The matrix of a part. Raises ConfigError for sources that have their inputs in different orders."""
    result = empty_packed(part, device)
    orders: dict[int, torch.Tensor | None] = {}
    factors = factors_of_rows(part) if part.row_factors else torch.ones(part.shape[-2])
    factors = (factors * part.factor).to(device)
    for name, (rows, width), expert, row in part.sources:
        found, at = reader.read(name, rows, width), slice(row, row + rows)
        own, scales = result if expert < 0 else result[expert], torch.from_numpy(found.scales).to(device)
        numbers = numbers_of(torch.from_numpy(found.words).to(device), reader.layout, rows, width)
        if own.factors is not None:
            signs = (scales < 0).to(torch.uint8) << 3  # the numbers take them
            numbers = numbers ^ signs.repeat_interleave(FP4_GROUP, 1)
            own.scales[:, at] = fp4_scales(scales.abs())
            own.factors[at] = torch.from_numpy(found.factors).to(device) * factors[at]
        elif found.zeros is not None:
            own.scales[:, at] = int4_scales(scales * factors[at, None], torch.from_numpy(found.zeros).to(device)).T
        columns = slice(None) if found.columns is None else torch.from_numpy(found.columns).to(device)
        own.words[at] = pack_words(numbers[:, columns])
        order = None if found.columns is None else torch.from_numpy(found.columns).int()
        if expert in orders and not _same(orders[expert], order):
            other = part.sources[0][0].removesuffix(".weight")
            own_name = name.removesuffix(".weight")
            raise ConfigError(f"{own_name} and {other} have their inputs in different orders (g_idx), so they can't be fused")
        orders[expert] = order
    by_row = [result.words, result.scales.mT, *([] if result.factors is None else [result.factors])]
    for tensor in by_row if part.pairs_of else ():
        arrange_heads(tensor, *part.pairs_of)  # type: ignore[misc]
    for tensor in by_row if part.runs else ():
        arrange_runs(tensor, part.runs)
    if all(order is None for order in orders.values()):
        return result
    natural = torch.arange(part.shape[-1], dtype=torch.int32)
    found_orders = [natural if order is None else order for _, order in sorted(orders.items())]
    columns = found_orders[0] if -1 in orders else torch.stack(found_orders)
    return replace(result, columns=columns.to(device))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def arrange_runs(weight: torch.Tensor, runs: Sequence[tuple[int, int]], unit: int = 1) -> None:
    """Put runs of rows into this order, in place.

    weight: a tensor of any shape.
    runs: (first row, rows) of each run. A row of `weight` represents `unit` rows of the matrix.
    """
    stored = weight.view(torch.uint8) if weight.itemsize == 1 else weight
    stored.copy_(torch.cat([stored[first // unit : (first + rows) // unit] for first, rows in runs]))


def arrange_heads(weight: torch.Tensor, rows: int, head: int, rotated: int) -> None:
    """Reorder the rows of heads, in place. Stored neighbours are rotated together; then row i is, with row i + rotated // 2.

    weight: of any shape. Its first `rows` rows are heads of `head` rows each, of which the first `rotated` are rotated.
    """
    turned = weight[:rows].unflatten(0, (rows // head, head))[:, :rotated]
    turned.copy_(turned.unflatten(1, (rotated // 2, 2)).transpose(1, 2).flatten(1, 2))
