"""The one reader of model folders. A folder is untrusted: its author chose every byte and every link.

The engine, the front end and the commands open each file of a folder here. The reader raises ConfigError for:
- a link out of the folder, except from a snapshot of the hub's cache to its blobs;
- a directory, FIFO, socket or device;
- a file above the limit of its kind;
- JSON with too many values or levels, or with a number outside float64.

`models/description/` checks the numbers of a config.json.
"""

import json
import os
import re
import stat
from io import FileIO
from pathlib import Path
from typing import Any, NoReturn

from blinkpy.config import ConfigError

MIB = 1 << 20
TEMPLATE_BYTES = MIB
# Maximum bytes of files that are read whole, by suffix: several times the size in the largest published
# model.
LIMITS = {
    "/generation_config.json": MIB,
    "/special_tokens_map.json": 4 * MIB,
    "/added_tokens.json": 4 * MIB,
    "/chat_template.json": 2 * TEMPLATE_BYTES,
    "/tokenizer_config.json": 16 * MIB,
    "/config.json": 16 * MIB,
    "/model.safetensors.index.json": 64 * MIB,
    "/tokenizer.json": 128 * MIB,
    ".jinja": TEMPLATE_BYTES,
}
MOST_VALUES = 2 << 20  # per JSON text, without keys: at most about 200 MiB of Python objects
DEEPEST = 64  # nested objects and lists of a JSON text
DIGITS = 40  # of an integer: transformers writes int(1e30) for "no limit"
STRING = re.compile(rb'"(?:[^"\\]|\\.)*+"?', re.DOTALL)  # the closing quote may be missing: linear time for any text
# No wait for a FIFO's writer, no link at the checked path, no controlling terminal.
FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_NOCTTY
KINDS = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def has_file(folder: Path, name: str) -> bool:
    """Whether a folder has an entry of this name, of any kind. name: relative to the folder."""
    return os.path.lexists(folder / name)


def open_file(folder: Path, name: str) -> FileIO:
    """Open a file of a folder, unbuffered, for callers that limit their reads. name: relative to the folder.
    Raises ConfigError.
    """
    path = folder / name
    try:
        real = Path(os.path.realpath(path, strict=True))
        _require_within(folder, path, real)
        return _open_regular(path, real)
    except OSError as error:
        raise ConfigError(f"can't read {path}: {_reason(error)}") from error
    except ValueError as error:  # a NUL within the name
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{folder} has no valid path for {name!r:.200}: {error}") from error


def read_bytes(folder: Path, name: str) -> bytes:
    """Read a file's content, up to the size in LIMITS. Raises ConfigError."""
    limit = next(limit for end, limit in LIMITS.items() if f"/{name}".endswith(end))
    with open_file(folder, name) as file:
        return _bounded(file, folder / name, limit)


def read_text(folder: Path, name: str) -> str:
    """Read a UTF-8 file. Raises ConfigError."""
    return _text(read_bytes(folder, name), folder / name)


def read_own_template(path: Path) -> str:
    """Read a chat template at a path of the operator's choice, with the checks of a model's template. Raises
    ConfigError.
    """
    try:
        with _open_regular(path, Path(os.path.realpath(path, strict=True))) as file:
            return _text(_bounded(file, path, TEMPLATE_BYTES), path)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"can't read the chat template {path}: {_reason(error)}") from error


def read_json(folder: Path, name: str, *, optional: bool = False) -> dict[str, Any]:
    """Read a file's JSON object. optional: a missing file counts as {}. Raises ConfigError."""
    if optional and not has_file(folder, name):
        return {}
    return parse_json(read_bytes(folder, name), str(folder / name))


def parse_json(text: bytes, label: str) -> dict[str, Any]:
    """Parse a JSON object within the limits of this module. label: its name in errors. Raises ConfigError."""
    _require_few_values(text, label)
    try:
        value = json.loads(text.decode(), parse_int=_whole, parse_float=_finite, parse_constant=_no_constant)
    except RecursionError:
        raise ConfigError(f"{label} nests more than {DEEPEST} objects and lists") from None
    except ValueError as error:
        raise ConfigError(f"{label} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{label} must hold an object, not {type(value).__name__}")
    _require_shallow(value, label)
    return value


def _require_within(folder: Path, path: Path, real: Path) -> None:
    """Raise ConfigError unless the resolved path `real` is in the folder or a blob of the hub's cache."""
    own = Path(os.path.realpath(folder))
    blobs = own.parent.parent / "blobs" if own.parent.name == "snapshots" else None
    if own not in real.parents and real.parent != blobs:
        raise ConfigError(f"{path} leads out of the model's folder, to {real}; copy the file into the folder")


def _open_regular(path: Path, real: Path) -> FileIO:
    _require_regular(path, os.stat(real).st_mode)  # checked before opening, because opening some devices has effects
    file = FileIO(path, opener=lambda name, flags: os.open(real, FLAGS))
    try:
        _require_regular(path, os.fstat(file.fileno()).st_mode)
    except ConfigError:
        file.close()
        raise
    return file


def _require_regular(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{path} is {KINDS.get(stat.S_IFMT(mode), 'something else')}, not a regular file")


def _bounded(file: FileIO, path: Path, limit: int) -> bytes:
    """Read a whole file, which may grow meanwhile, or be longer than its reported size."""
    parts, left = [], limit + 1
    while left and (part := file.read(min(left, 4 * MIB))):
        parts.append(part)
        left -= len(part)
    if not left:
        raise ConfigError(f"{path} is larger than {limit:,} bytes, the limit for such files")
    return b"".join(parts)


def _text(content: bytes, path: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"can't read {path}: it is not UTF-8 ({error.reason} at byte {error.start})") from None


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _require_few_values(text: bytes, label: str) -> None:
    """Count the values in the text, before any object is created."""

    def count(found: bytes) -> int:
        return found.count(b",") + found.count(b"[") + found.count(b"{")

    if count(text) > MOST_VALUES and count(STRING.sub(b"", text)) > MOST_VALUES:
        raise ConfigError(f"{label} has more than {MOST_VALUES:,} values")


def _require_shallow(value: dict[str, Any], label: str) -> None:
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        inner = (part.values() if isinstance(part, dict) else part for part in level)
        level = [child for children in inner for child in children if isinstance(child, (dict, list))]
        if not level:
            return
    raise ConfigError(f"{label} nests more than {DEEPEST} objects and lists")


def _whole(digits: str) -> int:
    if len(digits) > DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if number - number != 0:
        raise ValueError(f"no float64 holds {digits[:DIGITS]}")
    return number


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
