"""Generated names for the queue segments of `serve` and `LLM`."""

import contextlib
import os
import secrets

from blinkpy.recording.recording_layout import remove_dead_links
from blinkpy.transport.segment import FOLDER, unlink_stale

SERVE_PREFIX = "serve-"  # prefix of generated segment names


def private_name() -> str:
    """A new unique segment name for this process."""
    return f"{SERVE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"


def remove_leftovers() -> None:
    """Remove segments of earlier `serve` and `LLM` processes that were killed with their engines."""
    for path in FOLDER.glob(f"blinkpy.{SERVE_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's
            unlink_stale(path.name.removeprefix("blinkpy."))
    remove_dead_links()
