"""A dump: one file with everything that a replay needs, in NumPy's zipped format, without pickles.

It holds the prompts and the generated tokens of the requests that it covers, as token ids.
"""

from __future__ import annotations

import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.verify.recording.recording_errors import RecordingError
from blinkpy.verify.recording.recording_reader import Snapshot
from blinkpy.version import __version__

FORMAT = 3
COMPRESSION = 1  # zlib's fastest: a dump is mostly zeros
ABOUT, WORDS, STATE = "about", "words", "state/"


def write_dump(path: Path, capture: Snapshot, reason: str) -> None:
    """Write a dump, whole or not at all. Raises RecordingError when it can't be written."""
    about = {
        **capture.description,
        "format": FORMAT,
        "reason": reason,
        "version": __version__,
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    arrays = {ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8), WORDS: capture.words}
    arrays |= {STATE + name: array for name, array in capture.arrays.items()}
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with (
            os.fdopen(descriptor, "wb") as file,
            zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=COMPRESSION) as target,
        ):
            for name, array in arrays.items():
                with target.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordingError(f"can't write {path}: {error.strerror}") from error


def read_dump(path: Path) -> Snapshot:
    """Read a dump. Raises RecordingError, in one line, for what is not one or is damaged."""
    try:
        with zipfile.ZipFile(path) as source:
            arrays = {name.removesuffix(".npy"): _read(source, name) for name in source.namelist()}
        about: dict[str, Any] = json.loads(arrays.pop(ABOUT).tobytes())
        words = arrays.pop(WORDS)
    except OSError as error:
        raise RecordingError(f"can't read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, ValueError, KeyError, EOFError, NotImplementedError) as error:
        raise RecordingError(f"{path} is not a recording, or it is damaged: {error}") from error
    except Exception as error:  # zlib.error has no base class of its own
        raise RecordingError(f"{path} is damaged: {error}") from error
    if about.get("format") != FORMAT:
        raise RecordingError(f"{path} has format {about.get('format')}; this version reads {FORMAT}")
    state = {name.removeprefix(STATE): array for name, array in arrays.items() if name.startswith(STATE)}
    for name, dtype, shape in about.get("arrays", []):
        if name not in state or list(state[name].shape) != shape or state[name].dtype.str != dtype:
            raise RecordingError(f"{path} is damaged: array {name} is missing or has another shape")
    if words.dtype != np.int64 or words.ndim != 1:
        raise RecordingError(f"{path} is damaged: its records are no words")
    return Snapshot(about, words, state)


def _read(source: zipfile.ZipFile, name: str) -> NDArray[Any]:
    with source.open(name) as member:
        array: NDArray[Any] = np.lib.format.read_array(member, allow_pickle=False)
        member.read()  # to the end: the checksum is compared there
        return array
