"""Reads a recording from another process: consistent copies of memory that the engine may still write."""

import io
import json
import mmap
import os
import time
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib.format import read_array, write_array
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.recording import recording_layout as layouts
from blinkpy.recording.recording_layout import (
    MAGIC,
    TAKEN_AT,
    WRITES,
    Int64,
    RecordingError,
    RecordingLayout,
    RecordingViews,
    link_path,
)
from blinkpy.version import __version__

TRIES = 20
INBOX_WORDS = ("heartbeat", "claim", "cq_head", "doorbell")  # in the order of a record
STUCK_S = 0.05  # a turn unfinished for this time counts as stuck


class Capture(NamedTuple):
    """The replayable part of a recording: a snapshot of the state, and the records after it.

    description: the JSON.
    words: int64, the records; the last record may belong to an unfinished turn.
    arrays: the snapshot, by name.
    """

    description: dict[str, Any]
    words: Int64
    arrays: dict[str, NDArray[Any]]


class RecordingReader:
    """A recording, read by another process, or after the engine's end. Raises RecordingError if it does not
    exist.
    """

    def __init__(self, name: str):
        path = link_path(name)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise RecordingError(f"no recording of an engine with the name {name!r}: {path}: {error.strerror}") from error
        try:
            if os.fstat(fd).st_uid != os.getuid():
                raise RecordingError(f"the recording {path} belongs to another user: run the command as this user")
            self._memory = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
        except ValueError as error:
            raise RecordingError(f"{path} does not point to a recording") from error
        finally:
            os.close(fd)
        if self._memory[0:8] != MAGIC:
            raise RecordingError(f"{path} does not point to a recording")
        length = int.from_bytes(self._memory[8:16], "little")
        self.description: dict[str, Any] = json.loads(self._memory[16 : 16 + length])
        layout = RecordingLayout(self.description)
        self._words, self._views = layout.words, RecordingViews(self._memory, layout)

    @property
    def position(self) -> int:
        """Number of words that the engine has recorded."""
        return int(self._views.progress[S.POSITION])

    def capture(self) -> Capture:
        """Copy the replayable part. Raises RecordingError if there is no snapshot, or the engine overwrites
        it too soon.
        """
        for _ in range(TRIES):
            unended = self._unended_record()
            end = self.position
            for i in sorted(range(2), key=lambda i: int(self._views.heads[i][TAKEN_AT])):
                head = self._views.heads[i]
                writes, first = int(head[WRITES]), int(head[TAKEN_AT])
                if writes == 0 or writes % 2 or not 0 <= end - first <= 3 * self._words // 4:
                    continue
                if end - first + len(unended) > self._words:  # the unfinished turn's notes overwrite the first records
                    continue
                arrays = {name: array.copy() for name, array in self._views.copies[i].items()}
                words = self._views.ring[np.arange(first, end) & (self._words - 1)]
                overwritten = self.position - first > 7 * self._words // 8
                if int(head[WRITES]) == writes and not overwritten:
                    return Capture(self.description, np.concatenate([words, unended]), arrays)
            time.sleep(0.01)
        raise RecordingError("the recording is overwritten faster than it can be copied; increase --record-steps")

    def _unended_record(self) -> Int64:
        """The record of an unfinished turn, with only its inputs. Empty if the last turn finished, or has not yet read its
        inputs."""
        views = self._views
        inputs, opened = views.inputs, views.inputs[layouts.OPENED].copy()
        now, number, position = opened[[layouts.OPENED_NS, layouts.OPENED_TURN, layouts.OPENED_AT]].tolist()
        if now == 0:
            return views.ring[:0].copy()
        time.sleep(STUCK_S)
        stuck = np.array_equal(opened, inputs[layouts.OPENED])
        if not stuck or int(inputs["inbox.now_ns"][0]) != now or self.position != position:
            return views.ring[:0].copy()
        cursor, inbox = inputs[layouts.CURSOR], [inputs[f"inbox.{name}"] for name in INBOX_WORDS]
        sampled, cancels = inputs["batch.sampled"][: cursor[S.COMMITS]], inputs["inbox.cancel"]
        drafted = inputs["batch.drafted"][: len(sampled), : self.description["limits"]["step_drafts"]]
        words = [np.stack(inbox, axis=1).ravel(), sampled, drafted.ravel()]
        noted_at = position + S.RECORD_HEADER + sum(len(part) for part in words)
        words.append(views.ring[np.arange(noted_at, noted_at + cursor[S.NOTES]) & (self._words - 1)])
        words += [np.array([layouts.CANCEL_WORDS | len(cancels) + 1 << S.NOTE_SHIFT]), cancels]
        length, notes = S.RECORD_HEADER + sum(len(part) for part in words), int(cursor[S.NOTES]) + 1 + len(cancels)
        head = [length | S.RECORD_MARK << 32, number, now, inputs["inbox.command"][0], len(sampled), notes, 0, layouts.OPEN_TURN]
        return np.concatenate([np.array(head, np.int64), *words])


# A dump: one file with all data for a replay, in NumPy's zipped format, without pickles.
#
# It contains the prompts and generated tokens of its requests as token ids.

FORMAT = 5
COMPRESSION = 1  # zlib's fastest: a dump is mostly zeros
ABOUT, WORDS, STATE = "about", "words", "state/"
CRASHES_KEPT = 10  # a folder of crashes keeps this number of newest dumps


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
        raise RecordingError(
            f"{path} has format {about.get('format')}; this version reads {FORMAT}: use the blinkpy that wrote it"
        )
    state = {name.removeprefix(STATE): array for name, array in arrays.items() if name.startswith(STATE)}
    for name, dtype, shape in about.get("arrays", []):
        if name not in state or list(state[name].shape) != shape or state[name].dtype.str != dtype:
            raise RecordingError(f"{path} is damaged: array {name} is missing or has another shape")
    if words.dtype != np.int64 or words.ndim != 1:
        raise RecordingError(f"{path} is damaged: its records are not integer words")
    return Capture(about, words, state)


def save_crash(reader: RecordingReader, folder: str, name: str, reason: str) -> str:
    """Save the recording of an engine that died. Returns a line with its path, or with the reason of a
    failure. Errors of disk or recording are not raised, because the caller already reports a worse error.

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
