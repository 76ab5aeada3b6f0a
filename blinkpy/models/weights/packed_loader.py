"""4-bit matrices of a checkpoint, in any stored form: words as stored, scales and zero points as numbers. NumPy only."""

from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.packing import Layout, Packing, StoredPart
from blinkpy.models.weights.array_loader import FP8_NUMBERS
from blinkpy.models.weights.parts.weight_parts import all_parts
from blinkpy.models.weights.stored_tensor import StoredTensor, open_weights

DTYPES = {"I32": np.int32, "I64": np.int64, "U8": np.uint8, "F8_E4M3": np.uint8, "F32": np.float32, "F16": np.float16}
NIBBLES = np.arange(0, 32, 4, dtype=np.uint32)  # shifts of the eight numbers of a word
AWQ_ORDER = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # the place of each output's number in a word of AWQ
SYMMETRIC = 8  # the zero point of stored integers if the checkpoint has no zero points
NOT_A_NUMBER = 255  # as a power of two of MXFP4 (OCP Microscaling Formats, version 1.0)
POWERS = 31  # different powers of two of a row that its scales can have: quantised_matrices.SCALE_BIAS
LARGEST_POWER = 9  # of a scale, without its row's factor


class StoredMatrix(NamedTuple):
    """One matrix. A weight is (number - zero) * scale; with E2M1: number * scale * factor.

    words: numbers as stored: int32, or uint8 of E2M1.
    scales: float32 [rows, groups]; for E2M1, of 16 inputs each, values of E4M3 or powers of two.
    zeros: uint8 [rows, groups]; None: E2M1.
    columns: int64 [width], the input of each column, or None.
    factors: float32 [rows].
    """

    words: NDArray[Any]
    scales: NDArray[np.float32]
    zeros: NDArray[np.uint8] | None
    columns: NDArray[np.int64] | None
    factors: NDArray[np.float32]


class PackedReader:
    """Reads matrices of a checkpoint. stored: the result of open_checkpoint."""

    def __init__(self, packing: Packing, stored: dict[str, StoredTensor]):
        self._packing, self._stored = packing, stored

    def check(self, model: DecoderDescription) -> None:
        """Read everything except the numbers. Raises ConfigError for scales that are not finite, and for an impossible order."""
        for part in all_parts(model):
            for name, (rows, width), _, _ in part.sources if part.packing is not None else ():
                found = self._found(name, rows, width)
                self._scales(found)
                self._columns(found, width)

    @property
    def layout(self) -> Layout:
        """The layout of all matrices."""
        return self._packing.layout

    def read(self, name: str, rows: int, width: int) -> StoredMatrix:
        """One matrix. name: with ".weight"."""
        found = self._found(name, rows, width)
        scales, factors = self._scales(found)
        return StoredMatrix(self._array(found["words"]), scales, self._zeros(found, scales), self._columns(found, width), factors)

    def is_ordered(self, name: str, rows: int, width: int) -> bool:
        """Whether a matrix stores its inputs in a different order."""
        return self._columns(self._found(name, rows, width), width) is not None

    def _zeros(self, found: dict[str, StoredPart], scales: NDArray[np.float32]) -> NDArray[np.uint8] | None:
        """uint8 [rows, groups]."""
        packing = self._packing
        if packing.is_float:
            return None
        if "zeros" not in found:
            return np.full(scales.shape, SYMMETRIC, np.uint8)
        stored = _unpacked(self._array(found["zeros"]))  # [groups, words, 8], or of compressed-tensors [words, groups, 8]
        if packing.layout == Layout.COMPRESSED:
            return stored.transpose(0, 2, 1).reshape(scales.shape)
        if packing.layout == Layout.AWQ:
            return stored[..., AWQ_ORDER].reshape(scales.shape[::-1]).T
        return stored.reshape(scales.shape[::-1]).T + np.uint8(packing.zero_offset) & np.uint8(15)

    def _found(self, name: str, rows: int, width: int) -> dict[str, StoredPart]:
        return {part.role: part for part in self._packing.tensors(name, rows, width) if part.name in self._stored}

    def _array(self, part: StoredPart) -> NDArray[Any]:
        place = self._stored[part.name]
        with ExitStack() as closing:
            file = closing.enter_context(open_weights(place.path))
            dtype = np.uint16 if place.dtype == "BF16" else DTYPES[place.dtype]
            found = np.empty(place.shape, dtype)
            place.read(found.reshape(-1).view(np.uint8).data, file, 0, part.name)
        if place.dtype == "BF16":
            return (found.astype(np.uint32) << 16).view(np.float32)
        return FP8_NUMBERS[found] if place.dtype == "F8_E4M3" else found

    def _scales(self, found: dict[str, StoredPart]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """(float32 [rows, groups], factors of rows, float32 [rows])."""
        part, factor = found["scales"], np.float32(1)
        if self._packing.layout == Layout.MXFP4:
            return self._powers(found)
        scales = self._array(part).astype(np.float32)
        if self._packing.layout in (Layout.AWQ, Layout.GPTQ):
            scales = scales.T
        if "factor" in found:
            factor = self._array(found["factor"]).astype(np.float32).reshape(-1)[0]
            if not np.isfinite(factor) or factor <= 0:
                raise self._error(found["factor"], f"has the value {factor:g}; it must be finite and above 0")
            factor = 1 / factor if self._packing.layout == Layout.NVFP4 else factor
        if not np.isfinite(scales).all():
            raise self._error(part, "has scales that are not finite")
        return np.ascontiguousarray(scales), np.full(len(scales), factor, np.float32)

    def _powers(self, found: dict[str, StoredPart]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Scales and factors of MXFP4. A row's factor is a power of two, so that the scales' powers fit five bits. A group of
        zeros may have any scale.
        """
        stored = self._array(found["scales"]).astype(np.int32)
        if (stored == NOT_A_NUMBER).any():
            raise self._error(found["scales"], "has scales that are not finite")
        highest, lowest = stored.max(1), stored.min(1)
        if (highest - lowest >= POWERS).any():
            words = self._array(found["words"]).reshape(*stored.shape, -1)
            zero = ((words & 0x77) == 0).all(-1)
            highest = np.where(zero, 0, stored).max(1)
            stored = np.where(zero, highest[:, None], stored)
            if (highest - stored.min(1) >= POWERS).any():
                text = f"has a row whose scales differ by more than 2**{POWERS - 1}; quantise the model in another form"
                raise self._error(found["scales"], text)
        one, powers = np.float32(1), stored - highest[:, None] + LARGEST_POWER
        return np.ldexp(one, powers).repeat(2, axis=1), np.ldexp(one, highest - 127 - LARGEST_POWER)

    def _columns(self, found: dict[str, StoredPart], width: int) -> NDArray[np.int64] | None:
        """The inputs sorted by their group; None if that is their natural order."""
        packing = self._packing
        if "order" not in found:
            return None
        group_of = self._array(found["order"]).astype(np.int64)
        groups = packing.groups(width)
        counts = np.bincount(group_of, minlength=groups) if group_of.min() >= 0 and group_of.max() < groups else np.zeros(1)
        if not (len(counts) == groups and (counts == width // groups).all()):
            each = f"{groups} groups of {width // groups} inputs each"
            raise self._error(found["order"], f"does not name {each}")
        columns = np.argsort(group_of, kind="stable")
        return None if (columns == np.arange(width)).all() else columns

    def _error(self, part: StoredPart, text: str) -> ConfigError:
        return ConfigError(f"{self._stored[part.name].path}: {part.name} {text}")


def _unpacked(words: NDArray[Any]) -> NDArray[np.uint8]:
    """The eight numbers of each int32 word, from the lowest on: uint8 [..., 8]."""
    return (words.view(np.uint32)[..., None] >> NIBBLES & 15).astype(np.uint8)
