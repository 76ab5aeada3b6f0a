"""How a recording is found: by a symbolic link next to the queue segment, that leads to the engine's memory."""

import contextlib
from pathlib import Path

from blinkpy.config import ConfigError
from blinkpy.transport.segment import FOLDER, segment_path

LINK_PREFIX = "blinkpy-recording."


class RecordingError(ConfigError):
    """There is not a recording, or none that can be used."""


def link_path(name: str) -> Path:
    """The link to the recording of the engine with a segment name."""
    return segment_path(name).with_name(LINK_PREFIX + name)


def remove_dead_links() -> None:
    """Remove the links of engines that were killed."""
    for path in FOLDER.glob(f"{LINK_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's
            if path.is_symlink() and not path.exists():
                path.unlink()
