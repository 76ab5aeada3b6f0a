"""Names of queue segments of `serve` and `LLM`, which the user does not choose."""

import contextlib
import os
import secrets

from blinkpy.recording.recording_layout import remove_dead_links
from blinkpy.transport.segment import FOLDER, unlink_stale

SERVE_PREFIX = "serve-"  # prefix of generated segment names


def private_name() -> str:
    """A name for the segment of this process, never used before."""
    return f"{SERVE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"


def remove_leftovers() -> None:
    """Remove segments of earlier `serve` and `LLM` whose engines were killed together with whatever watched them."""
    for path in FOLDER.glob(f"blinkpy.{SERVE_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's
            unlink_stale(path.name.removeprefix("blinkpy."))
    remove_dead_links()
