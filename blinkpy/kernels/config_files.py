"""Files of measured configurations: one for each GPU model and each kind of kernel, shipped in configs/."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from blinkpy.config import ConfigError

FOLDER = Path(__file__).parent / "configs"
VERSION = 1

T = TypeVar("T")


def gpu_slug(name: str) -> str:
    """File name of a GPU model: "NVIDIA H200" -> "nvidia_h200"."""
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")


def read_table(path: Path, section: str, what: str, parse: Callable[[Any], T]) -> dict[str, T]:
    """The entries of a file, each parsed; none where there is no file. section: the key that holds them.

    Raises ConfigError for a damaged file, which is then called "not a table of `what`".
    """
    if not path.exists():
        return {}
    try:
        document: dict[str, Any] = json.loads(path.read_text())
        if document["version"] != VERSION:
            raise ConfigError(f"{path}: version {document['version']}, expected {VERSION}")
        return {name: parse(entry) for name, entry in document[section].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: not a table of {what}: {error}") from error


def write_table(path: Path, section: str, gpu_name: str, measured: dict[str, Any], entries: Mapping[str, Any]) -> Path:
    """Write the entries, JSON each, in the order of their names. measured: with what (versions, date)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"version": VERSION, "gpu": gpu_name, "measured": measured, section: dict(sorted(entries.items()))}
    path.write_text(json.dumps(document, indent=1) + "\n")
    return path
