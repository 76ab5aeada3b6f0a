"""The tensors of a model's safetensors files: their places, and reading them.

The file format: 8 bytes, little endian, with the length of a JSON header; the header, which maps a tensor's name to its dtype,
shape and byte range; the data. Headers are read and checked in full before anything is allocated.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NamedTuple

from blinkpy.config import ConfigError
from blinkpy.model_files import has_file, open_file, parse_json, read_json

MAX_HEADER_BYTES, MOST_DIMENSIONS = 100_000_000, 16
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
NUMBERS = tuple(ITEM_BYTES)
INTEGER_BYTES = {"I32": 4, "I64": 8}  # of 4-bit weights, their zero points and groups
PACKED = "U8"  # dtype of MXFP4's blocks and scales
FP8, POWERS = "F8_E4M3", "F8_E8M0"  # POWERS: scales that are powers of two (OCP MX 1.0)
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


class StoredSlice(NamedTuple):
    """A part of a tensor: the tensor's bytes are divided into equal stretches, and the same runs are taken from each, in order.

    runs: (first byte, bytes) of each run within a stretch.
    pitch: bytes of a stretch.
    """

    runs: tuple[tuple[int, int], ...]
    pitch: int

    @classmethod
    def of(cls, shape: tuple[int, ...], itemsize: int, axis: int, parts: Sequence[tuple[int, int]]) -> "StoredSlice":
        """The parts (first, count) of a tensor [shape] along an axis. itemsize: bytes of a number."""
        each = math.prod(shape[axis + 1 :]) * itemsize
        return cls(tuple((first * each, count * each) for first, count in parts), shape[axis] * each)

    def pieces(self, position: int, size: int) -> Iterator[tuple[int, int]]:
        """(byte of the tensor, bytes) of each run in the slice's bytes [position, position + size)."""
        stretch, skipped = divmod(position, sum(count for _, count in self.runs))
        while size:
            for first, count in self.runs:
                taken = min(max(count - skipped, 0), size)
                if taken:
                    yield stretch * self.pitch + first + skipped, taken
                skipped, size = max(skipped - count, 0), size - taken
            stretch += 1


def open_weights(path: Path) -> FileIO:
    """Open a file for read_into. Raises ConfigError."""
    return open_file(path.parent, path.name)


def read_into(memory: memoryview, file: FileIO, offset: int, name: str) -> None:
    """Fill memory, bytes, from the file at `offset`. name: the tensor's name. Raises ConfigError if the file is
    too short or can't be read.
    """
    while memory:
        try:
            read = os.preadv(file.fileno(), [memory], offset)
        except OSError as error:
            raise ConfigError(f"can't read {name} from {file.name}: {error.strerror}") from error
        if read == 0:
            raise ConfigError(f"{file.name} was truncated while being read: {name} lacks at least {len(memory)} bytes")
        memory, offset = memory[read:], offset + read


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor, or of a part of it.

    dtype: safetensors' name.
    offset: bytes of the whole tensor from the start of the file.
    part: the bytes of it; None: all.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    part: StoredSlice | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return item_bytes(self.dtype)

    def read(self, memory: memoryview, file: FileIO, position: int, name: str) -> None:
        """Fill memory, bytes, from `position` in the tensor or its part. Raises ConfigError like read_into."""
        for start, size in [(position, len(memory))] if self.part is None else self.part.pieces(position, len(memory)):
            read_into(memory[:size], file, self.offset + start, name)
            memory = memory[size:]


def item_bytes(dtype: str) -> int:
    """Bytes of a number; 0 for a type that is not supported."""
    return 1 if dtype in (PACKED, FP8, POWERS) else (ITEM_BYTES | INTEGER_BYTES).get(dtype, 0)


def read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Name and place of each tensor of a file. Raises ConfigError for a truncated or malformed file."""
    try:
        with open_file(path.parent, path.name) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"{path} is truncated, or not a safetensors file ({size} bytes)")
            text = file.read(length)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    header = parse_json(text, f"{path} is not a safetensors file: its header")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            if len(entry["shape"]) > MOST_DIMENSIONS:
                raise ValueError("more dimensions than any tensor")
            dtype, shape = entry["dtype"], tuple(_whole(n) for n in entry["shape"])
            start, end = (_whole(n) for n in entry["data_offsets"])
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"{path}: the header's entry of {name} is malformed") from error
        itemsize = item_bytes(dtype)
        if itemsize and (min(shape, default=0) < 0 or start < 0 or end - start != math.prod(shape) * itemsize):
            raise ConfigError(f"{path}: {name} has {end - start} bytes, which does not match {dtype} {list(shape)}")
        if 8 + length + end > size:
            raise ConfigError(f"{path} is truncated: {name} ends at byte {8 + length + end}, but the file has {size} bytes")
        yield name, StoredTensor(path, dtype, shape, 8 + length + start)


def _whole(number: object) -> int:
    """Return a JSON integer. Raises TypeError for other values, including floats such as 1e999."""
    if type(number) is not int:
        raise TypeError(f"{number!r} is not an integer")
    return number


def weight_files(folder: Path) -> list[Path]:
    """The files with a model's weights. Raises ConfigError with the name of a missing file."""
    index = folder / INDEX
    if not has_file(folder, INDEX):
        if not has_file(folder, SINGLE):
            others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
            hint = f"; {', '.join(others[:3])} can't be used" if others else ""
            raise ConfigError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}{hint}")
        return [folder / SINGLE]
    try:
        names = set(read_json(folder, INDEX)["weight_map"].values())
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{index} refers to a file outside the folder: {name!r:.200}")
        if not has_file(folder, name):
            raise ConfigError(f"{folder} has no {name:.200}, which {INDEX} refers to")
    return [folder / name for name in sorted(names)]
