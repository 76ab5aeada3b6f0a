"""The one inner form of all 4-bit weights: numbers along the inputs, a scale for each group of inputs, and a table of values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from blinkpy.config import ConfigError
from blinkpy.kernels.fp8_rows import BLOCK, Fp8Matrix
from blinkpy.models.weights.packed_loader import PackedReader
from blinkpy.models.weights.part import Part

INTEGERS = tuple(float(number) for number in range(16))
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # OCP MX 1.0


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix [N, K], or one for each expert [experts, N, K]. A weight is (table[number] - zero) * scale.

    words: uint8 [..., N, K / 2]: a byte has two numbers, the first one in its lower half. scales: float32 [..., N, groups].
    zeros: float32 [..., N, groups], or None for 0. table: float32 [16]. columns: int64 [..., K], the input of each column; None:
    the inputs in their order.
    """

    words: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    table: torch.Tensor
    columns: torch.Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """[N, K], or [experts, N, K]."""
        return (*self.words.shape[:-1], 2 * self.words.shape[-1])

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, expert: int) -> "PackedMatrix":
        zeros = None if self.zeros is None else self.zeros[expert]
        columns = None if self.columns is None else self.columns[expert]
        return replace(self, words=self.words[expert], scales=self.scales[expert], zeros=zeros, columns=columns)

    def inputs(self, x: torch.Tensor) -> torch.Tensor:
        """The inputs in the order of the columns. x: [tokens, K]."""
        return x if self.columns is None else x[:, self.columns]

    def unpack(self, rows: slice, dtype: torch.dtype) -> torch.Tensor:
        """Some rows of one matrix, in the order of its columns: [rows, K]."""
        words, scales = self.words[rows], self.scales[rows]
        numbers = torch.stack((words & 15, words >> 4), -1).flatten(1)
        values = self.table[numbers.int()].unflatten(1, (scales.shape[1], -1))
        if self.zeros is not None:
            values = values - self.zeros[rows, :, None]
        return (values * scales[..., None]).flatten(1).to(dtype)


def dense(matrix: torch.Tensor | Fp8Matrix | PackedMatrix, dtype: torch.dtype) -> torch.Tensor:
    """A matrix [N, K] without quantization, in a dtype."""
    if isinstance(matrix, PackedMatrix):
        unpacked = matrix.unpack(slice(None), torch.float32)
        result = torch.empty_like(unpacked)
        result[:, slice(None) if matrix.columns is None else matrix.columns] = unpacked
        return result.to(dtype)
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
    words = torch.empty(*shape[:-1], shape[-1] // 2, dtype=torch.uint8, device=device)
    scales = torch.empty(*shape[:-1], packing.groups(shape[-1]), device=device)
    zeros = None if packing.is_float else torch.empty_like(scales)
    return PackedMatrix(words, scales, zeros, torch.tensor(E2M1 if packing.is_float else INTEGERS, device=device))


def read_packed(part: Part, reader: PackedReader, device: str = "cpu") -> PackedMatrix:
    """The matrix of a part. Raises ConfigError for sources that have their inputs in different orders."""
    result = empty_packed(part, device)
    orders: dict[int, torch.Tensor | None] = {}
    for name, (rows, width), expert, row in part.sources:
        found, at = reader.read(name, rows, width), slice(row, row + rows)
        numbers = torch.from_numpy(found.numbers)
        packed = numbers[:, ::2] | numbers[:, 1::2] << 4
        own = result if expert < 0 else result[expert]
        own.words[at], own.scales[at] = packed.to(device), torch.from_numpy(found.scales).to(device)
        if own.zeros is not None and found.zeros is not None:
            own.zeros[at] = torch.from_numpy(found.zeros).to(device)
        order = None if found.columns is None else torch.from_numpy(found.columns)
        if expert in orders and not _same(orders[expert], order):
            other = part.sources[0][0].removesuffix(".weight")
            own_name = name.removesuffix(".weight")
            raise ConfigError(f"{own_name} has its inputs in another order (g_idx) than {other}, with which it is fused")
        orders[expert] = order
    if part.pairs_of:
        rows, head, rotated = part.pairs_of
        for tensor in (result.words, result.scales, result.zeros):
            if tensor is not None:
                arrange_heads(tensor, rows, head, rotated)
    if part.runs:
        for tensor in (result.words, result.scales, result.zeros):
            if tensor is not None:
                arrange_runs(tensor, part.runs)
    if part.factor != 1:
        result.scales.mul_(part.factor)
    if all(order is None for order in orders.values()):
        return result
    natural = torch.arange(part.shape[-1])
    found_orders = [natural if order is None else order for _, order in sorted(orders.items())]
    columns = found_orders[0] if -1 in orders else torch.stack(found_orders)
    return replace(result, columns=columns.to(device))


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def arrange_runs(weight: torch.Tensor, runs: Sequence[tuple[int, int]], unit: int = 1) -> None:
    """Put runs of rows into this order, in place.

    weight: of any shape.
    runs: (first row, rows) of each, in a matrix of which a row of `weight` stands for `unit` rows.
    """
    stored = weight.view(torch.uint8) if weight.itemsize == 1 else weight
    stored.copy_(torch.cat([stored[first // unit : (first + rows) // unit] for first, rows in runs]))


def arrange_heads(weight: torch.Tensor, rows: int, head: int, rotated: int) -> None:
    """From heads whose neighbouring rows are rotated together to ours, in which row i is with i + rotated // 2, in place. weight:
    of any shape; its first rows are heads of `head` rows, of which the first `rotated` are rotated."""
    turned = weight[:rows].unflatten(0, (rows // head, head))[:, :rotated]
    turned.copy_(turned.unflatten(1, (rotated // 2, 2)).transpose(1, 2).flatten(1, 2))
