"""What happens to a recording when its engine dies."""

from __future__ import annotations

import os
import time
from pathlib import Path

from blinkpy.verify.recording.dump_file import write_dump
from blinkpy.verify.recording.recording_errors import RecordingError
from blinkpy.verify.recording.recording_reader import RecordingReader

KEPT = 10  # recordings of crashes; older ones are removed


def crash_folder(option: str) -> Path:
    """Where the recordings of crashes go: the option, or a folder of the user's state."""
    if option:
        return Path(option)
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "blinkpy"


def save_crash(reader: RecordingReader, folder: Path, name: str, reason: str) -> str:
    """Save the recording of an engine that died. Returns a line that says where it is, or why it is not there; never raises for
    what the disk or the recording are like, since something worse is being told already."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"crash-{name}-{time.strftime('%Y%m%d-%H%M%S')}.recording"
        write_dump(path, reader.capture(), reason)
        for old in sorted(folder.glob("crash-*.recording"), key=lambda file: file.stat().st_mtime)[:-KEPT]:
            old.unlink(missing_ok=True)
    except (OSError, RuntimeError, RecordingError) as error:
        return f"the recording of the last steps could not be saved: {error}"
    return f"the last steps before it are in {path} (prompts included): blinkpy replay {path}"
