"""Which descriptors of this process are of a segment: others come and go, as what earlier tests left is collected."""

import contextlib
import os


def descriptors_of(name: str) -> list[int]:
    """Open ones whose file, there or unlinked, has a segment's name in its own; sorted."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # That of the folder being listed.
            if name in os.readlink(f"/proc/self/fd/{fd}"):
                found.append(int(fd))
    return sorted(found)
