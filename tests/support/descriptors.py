"""Descriptors of a segment in this process. The garbage collector may close descriptors of earlier tests meanwhile."""

import contextlib
import os


def descriptors_of(name: str) -> list[int]:
    """Open descriptors, sorted, whose file name contains a segment's name, even if the file is unlinked."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            if name in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(int(fd))
    return sorted(found)
