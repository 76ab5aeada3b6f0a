"""A model's safetensors files and the places of their tensors.

The file format: 8 bytes, little endian, with the length of a JSON header; the header, which maps a tensor's name to its
dtype, shape and byte range; the data. Headers are read and checked in full before anything is allocated.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blinkpy.config import ConfigError
from blinkpy.model_files import has_file, open_file, parse_json, read_json

MAX_HEADER_BYTES, MOST_DIMENSIONS = 100_000_000, 16
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
NUMBERS = tuple(ITEM_BYTES)
INTEGER_BYTES = {"I32": 4, "I64": 8}  # of 4-bit weights, their zero points and groups
PACKED = "U8"  # dtype of MXFP4's blocks and scales
FP8 = "F8_E4M3"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """The place of a tensor. dtype: safetensors' name. offset: bytes from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


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
    header = parse_json(text, f"{path} is no safetensors file: its header")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            if len(entry["shape"]) > MOST_DIMENSIONS:
                raise ValueError("more dimensions than any tensor")
            dtype, shape = entry["dtype"], tuple(_whole(n) for n in entry["shape"])
            start, end = (_whole(n) for n in entry["data_offsets"])
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"{path}: the header's entry of {name} is malformed") from error
        itemsize = 1 if dtype in (PACKED, FP8) else (ITEM_BYTES | INTEGER_BYTES).get(dtype)
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
