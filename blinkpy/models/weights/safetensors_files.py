"""A model's safetensors files: which there are, and where their tensors lie.

The file format: 8 bytes, little endian, with the length of a JSON header; the header, which maps a tensor's name to its
dtype, shape and byte range; the data. Headers are read and checked in full before anything is allocated.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from blinkpy.config import ConfigError

MAX_HEADER_BYTES = 100_000_000
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
NUMBERS = tuple(ITEM_BYTES)
PACKED = "U8"  # dtype of MXFP4's blocks and scales
FP8 = "F8_E4M3"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies. dtype: safetensors' name. offset: bytes from the start of the file."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> Iterator[tuple[str, StoredTensor]]:
    """Name and place of each tensor of a file. Raises ConfigError for one that is truncated or malformed."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or not 2 <= length <= min(size - 8, MAX_HEADER_BYTES):
                raise ConfigError(f"{path} is truncated or no safetensors file ({size} bytes)")
            header = json.loads(file.read(length))
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise ConfigError(f"{path} is no safetensors file: its header is no object")
    header.pop("__metadata__", None)
    for name, entry in header.items():
        try:
            dtype, shape = entry["dtype"], tuple(_whole(n) for n in entry["shape"])
            start, end = (_whole(n) for n in entry["data_offsets"])
        except (TypeError, KeyError, ValueError) as error:
            raise ConfigError(f"{path}: the header's entry of {name} is malformed") from error
        itemsize = 1 if dtype in (PACKED, FP8) else ITEM_BYTES.get(dtype)
        if itemsize and (min(shape, default=0) < 0 or start < 0 or end - start != math.prod(shape) * itemsize):
            raise ConfigError(f"{path}: {name} has {end - start} bytes, which don't make {dtype} {list(shape)}")
        if 8 + length + end > size:
            raise ConfigError(f"{path} is truncated: {name} ends at byte {8 + length + end}, the file at {size}")
        yield name, StoredTensor(path, dtype, shape, 8 + length + start)


def _whole(number: object) -> int:
    """An integer as JSON has it; a float, 1e999 too, is none. Raises TypeError."""
    if type(number) is not int:
        raise TypeError(f"{number!r} is no integer")
    return number


def weight_files(folder: Path) -> list[Path]:
    """The files that hold a model's weights. Raises ConfigError, naming what is missing, unless the folder has all of them."""
    index = folder / INDEX
    if not index.is_file():
        if not (folder / SINGLE).is_file():
            others = sorted(p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".gguf", ".safetensors"))
            hint = f"; {', '.join(others[:3])} can't be used" if others else ""
            raise ConfigError(f"{folder} has no weights: neither {SINGLE} nor {INDEX}{hint}")
        return [folder / SINGLE]
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{index} is no index of safetensors files: {error!r}") from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(f"{index} names a file outside of the folder: {name!r}")
        if not (folder / name).is_file():
            raise ConfigError(f"{folder} has no {name}, which {INDEX} names")
    return [folder / name for name in sorted(names)]
