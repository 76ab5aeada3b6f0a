"""The manifest of the package's sources. Cached compiled code, recordings, coverage and the tests' seeded
bugs depend on them. Moving, adding or changing a file changes the digest.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

PACKAGE = Path(__file__).parent

SCHEDULER = ("queues", "device", "kv", "scheduler")
"""Sources that determine the scheduler's decisions: a recording replays on the same sources."""
DEVICE_CODE = (*SCHEDULER, "kernels", "models/cpu", "engine/devices/null_step.py", "verify/sim")
"""Sources of compiled code that outlives the process."""
FRONT_END = (
    *("dpu", "queues", "transport", "config", "model_files.py", "packages.py", "process_exit.py", "processes.py"),
    *("sources.py", "version.py"),
)
"""Sources of a worker and of its children, which must be the same."""
VERIFIED = (
    *("queues", "kv", "scheduler/cycle.py", "scheduler/host_scheduler.py", "scheduler/pace.py", "scheduler/phases"),
    "scheduler/tenant_service.py",
    "scheduler/yielding.py",
    "engine/devices/null_step.py",
    *("dpu/link/connect_shm.py", "dpu/link/grammar_arena.py", "dpu/link/queue_pair.py"),
    "dpu/link/store_fence.py",
    "transport/segment.py",
)
"""Sources that tests must cover completely, by line and branch: `make coverage`."""


def source_files(parts: Iterable[str], package: Path = PACKAGE) -> list[Path]:
    """Python files of the parts, sorted by path.

    parts: folders or files below the package.
    Raises FileNotFoundError for a missing part, because without it stale code would be used.
    """
    files: set[Path] = set()
    for part in parts:
        path = package / part
        if not path.exists():
            raise FileNotFoundError(f"blinkpy has no {part}; correct the manifest in blinkpy/sources.py")
        files.update(path.rglob("*.py") if path.is_dir() else [path])
    return sorted(files)


def source_digest(parts: Iterable[str], package: Path = PACKAGE) -> str:
    """SHA-256, hexadecimal, of the paths and contents of the parts' files."""
    digest = hashlib.sha256()
    for file in source_files(parts, package):
        text = file.read_bytes()
        digest.update(f"{file.relative_to(package).as_posix()}\0{len(text)}\0".encode() + text)
    return digest.hexdigest()
