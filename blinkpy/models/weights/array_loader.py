"""Loads tensors from files into float32 NumPy arrays: threads read pieces, and convert other types.

Files are read, not mapped, so a file that is truncated meanwhile causes an error with its name instead of a
SIGBUS.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.quantization import BLOCK, Scales
from blinkpy.models.weights.parts.part import Part, ScaleTensor
from blinkpy.models.weights.parts.weight_parts import all_parts, cache_scales
from blinkpy.models.weights.stored_tensor import POWERS, StoredTensor, open_weights
from blinkpy.progress import finish_pieces

THREADS = 4
PIECE_ITEMS = 4 << 20
STORED_DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "F8_E4M3": np.uint8}
STORED_DTYPES |= {POWERS: np.uint8}


def _fp8_numbers() -> NDArray[np.float32]:
    """float32 [256]: the value of each byte as E4M3 without infinities (OCP 8-bit Floating Point, version 1.0)."""
    byte = np.arange(256)
    exponent, fraction = byte >> 3 & 15, byte & 7
    numbers = np.ldexp(np.where(exponent == 0, fraction, 8 + fraction), np.maximum(exponent, 1) - 10)
    numbers[byte & 127 == 127] = np.nan
    return np.where(byte < 128, numbers, -numbers).astype(np.float32)


FP8_NUMBERS = _fp8_numbers()


def load_arrays(
    places: list[tuple[str, StoredTensor, NDArray[np.float32]]],
    progress: Callable[[float], None] = lambda share: None,
    threads: int = THREADS,
    piece_items: int = PIECE_ITEMS,
) -> None:
    """Load tensors, given by name and location, each into a contiguous array of its shape.

    progress: called with the completed fraction, at each percent.
    piece_items: items of one read.

    Raises ConfigError, and stops, if a file can't be read to the end.
    """
    with ExitStack() as closing:
        files = {path: closing.enter_context(open_weights(path)) for path in {stored.path for _, stored, _ in places}}
        pool = ThreadPoolExecutor(threads, "loader")
        closing.callback(pool.shutdown, cancel_futures=True)
        pieces = []
        for name, stored, target in places:
            flat, position = target.reshape(-1), 0
            for first in range(0, flat.size, piece_items):
                part = flat[first : first + piece_items]
                pieces.append((part.size, pool.submit(load_piece, files[stored.path], name, stored, position, part)))
                position += part.size * stored.itemsize
        finish_pieces(pieces, progress)


def load_piece(file: FileIO, name: str, place: StoredTensor, position: int, target: NDArray[np.float32]) -> None:
    """Fill a contiguous array from a stored tensor. position: start within the tensor, bytes."""
    dtype = place.dtype
    stored = target if dtype == "F32" else np.empty(target.size, STORED_DTYPES[dtype])
    place.read(stored.view(np.uint8).data, file, position, name)
    if dtype == "BF16":  # the upper half of a float32
        np.left_shift(stored, 16, out=target.view(np.uint32), dtype=np.uint32, casting="unsafe")
    elif dtype == "F8_E4M3":
        np.take(FP8_NUMBERS, stored.view(np.uint8), out=target)
    elif dtype == POWERS:
        np.ldexp(np.float32(1), stored.astype(np.int32) - 127, out=target)
    elif stored is not target:
        target[:] = stored


Float32 = NDArray[np.float32]


class PartScales(NamedTuple):
    """Scales of one FP8 matrix.

    weights: float32 [scale_shape of the part].
    inputs: scale of all its inputs, if stored.
    """

    weights: Float32
    inputs: float | None


class StoredScales(NamedTuple):
    """The scales of a checkpoint.

    of_parts: scales by the name of a part's first source.
    of_cache: each layer's scales, fields of LayerWeights.
    """

    of_parts: dict[str, PartScales]
    of_cache: list[dict[str, float]]


class _Reader:
    """Reads small tensors as numbers. stored: result of open_checkpoint."""

    def __init__(self, stored: dict[str, StoredTensor], closing: ExitStack):
        self._stored = stored
        self._closing = closing
        self._files = dict[Path, FileIO]()

    def read(self, tensor: ScaleTensor) -> Float32:
        """float32, in the stored shape. Raises ConfigError unless all are finite and above 0."""
        name, place = tensor.names[0], self._stored[tensor.names[0]]
        if place.path not in self._files:
            self._files[place.path] = self._closing.enter_context(open_weights(place.path))
        found = np.empty(place.shape, np.float32)
        with np.errstate(over="ignore", under="ignore"):  # when converting float64; the check below finds overflow and underflow
            load_piece(self._files[place.path], name, place, 0, found.reshape(-1))
        wrong = found[~(np.isfinite(found) & (found > 0))]
        if wrong.size:
            raise ConfigError(f"{place.path}: {name} has the value {wrong[0]:g}; scales must be finite and above 0")
        return found


def read_scales(model: DecoderDescription, stored: dict[str, StoredTensor]) -> StoredScales:
    """All scales of a checkpoint. stored: from open_checkpoint. Raises ConfigError with the tensor's name."""
    with ExitStack() as closing:
        reader = _Reader(stored, closing)
        of_cache: list[dict[str, float]] = [{} for _ in model.layers]
        for layer, field, tensor in cache_scales(model):
            if tensor.names[0] in stored:
                of_cache[layer][field] = float(reader.read(tensor).reshape(-1)[0])
        parts = [part for part in all_parts(model) if part.stored_scales]
        return StoredScales({part.sources[0][0]: _read_part(part, reader) for part in parts}, of_cache)


def _read_part(part: Part, reader: _Reader) -> PartScales:
    """The scales of a part. A scale of a whole tensor, or of an expert's part of it, is repeated for each row. Fused
    matrices get the largest input scale.
    """
    scales = np.empty(part.scale_shape, np.float32)
    blocks = part.quantization is not None and part.quantization.scales == Scales.BLOCK
    for (_, (rows, *width), expert, row), tensor in zip(part.sources, part.stored_scales, strict=True):
        target, found = scales if expert < 0 else scales[expert], reader.read(tensor)
        if len(width) == 2:  # of all experts
            scales[:] = found.reshape(rows, 1)
        elif blocks:
            target[row // BLOCK : row // BLOCK + len(found)] = found
        else:
            target[row : row + rows] = found.reshape(-1)
    inputs = [float(reader.read(tensor).max()) for tensor in part.stored_input_scales]
    return PartScales(scales, max(inputs) if inputs else None)
