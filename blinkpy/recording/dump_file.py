"""A dump: one file with all data for a replay, in NumPy's zipped format, without pickles.

It contains the prompts and generated tokens of its requests as token ids.
"""

import io
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.format import read_array, write_array

from blinkpy.recording.recording_layout import RecordingError
from blinkpy.recording.recording_reader import Capture, RecordingReader
from blinkpy.version import __version__

FORMAT = 3
COMPRESSION = 1  # zlib's fastest: a dump is mostly zeros
ABOUT, WORDS, STATE = "about", "words", "state/"
CRASHES_KEPT = 10  # number of the newest dumps that a folder of crashes keeps


def write_dump(path: Path, capture: Capture, reason: str) -> None:
    """Write a dump atomically. Raises RecordingError if it can't be written."""
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
                    write_array(member, np.ascontiguousarray(array), allow_pickle=False)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RecordingError(f"can't write {path}: {error.strerror}") from error


def read_dump(path: Path) -> Capture:
    """Read a dump. Raises RecordingError, in one line, for a file that is not a dump or is damaged."""
    try:
        with zipfile.ZipFile(path) as source:
            arrays = {name.removesuffix(".npy"): read_array(io.BytesIO(source.read(name))) for name in source.namelist()}
        about: dict[str, Any] = json.loads(arrays.pop(ABOUT).tobytes())
        words = arrays.pop(WORDS)
    except OSError as error:
        raise RecordingError(f"can't read {path}: {error.strerror or error}") from error
    except Exception as error:  # zlib.error, for example, has no specific base class
        raise RecordingError(f"{path} is not a recording, or it is damaged: {error}") from error
    if about.get("format") != FORMAT:
        raise RecordingError(f"{path} has format {about.get('format')}; this version reads {FORMAT}")
    state = {name.removeprefix(STATE): array for name, array in arrays.items() if name.startswith(STATE)}
    for name, dtype, shape in about.get("arrays", []):
        if name not in state or list(state[name].shape) != shape or state[name].dtype.str != dtype:
            raise RecordingError(f"{path} is damaged: array {name} is missing or has another shape")
    if words.dtype != np.int64 or words.ndim != 1:
        raise RecordingError(f"{path} is damaged: its records are not integer words")
    return Capture(about, words, state)


def save_crash(reader: RecordingReader, folder: str, name: str, reason: str) -> str:
    """Save the recording of an engine that died. Returns a line with its path, or with the reason of a
    failure. Errors of disk or recording are not raised, because a worse error is being reported.

    folder: "" means a folder in the user's state directory.
    """
    try:
        state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
        place = Path(folder or Path(state) / "blinkpy")
        place.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = place / f"crash-{name}-{time.strftime('%Y%m%d-%H%M%S')}.recording"
        write_dump(path, reader.capture(), reason)
        for old in sorted(place.glob("crash-*.recording"), key=lambda file: file.stat().st_mtime)[:-CRASHES_KEPT]:
            old.unlink(missing_ok=True)
    except (OSError, RuntimeError, RecordingError) as error:
        return f"the recording of the last steps could not be saved: {error}"
    return f"the last steps before it are in {path} (prompts included): blinkpy replay {path}"
