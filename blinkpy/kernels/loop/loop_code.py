"""The loop's kernels, compiled for a GPU, and kept on disk."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from blinkpy.device.compile_cache import cache_folder
from blinkpy.device.cuda.kernel_compiler import VERSION, KernelCode, compile_kernel
from blinkpy.kernels.loop.loop_kernels import (
    AFTER_COPY_SIGNATURE,
    OVERLAP_SIGNATURE,
    PUBLISH_SIGNATURE,
    SCHEDULE_SIGNATURE,
    STAMP_SIGNATURE,
    after_copy_kernel,
    overlap_kernel,
    publish_kernel,
    schedule_kernel,
    stamp_kernel,
)
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.policies import Policy
from blinkpy.scheduler.policy_key import policy_digest


class LoopCode(NamedTuple):
    """The compiled kernels of the loop."""

    overlap: KernelCode
    schedule: KernelCode
    publish: KernelCode
    stamp: KernelCode
    after_copy: KernelCode


def loop_code(policy: Policy, kind: Any, words: int, capability: tuple[int, int]) -> LoopCode:
    """The compiled kernels for a GPU's compute capability; from the cache if this machine compiled these sources before."""
    phases = make_phases(policy)
    return LoopCode(
        _code("overlap", policy, kind, words, capability, lambda: (overlap_kernel(phases, kind, words), OVERLAP_SIGNATURE)),
        _code("schedule", policy, kind, words, capability, lambda: (schedule_kernel(phases, kind, words), SCHEDULE_SIGNATURE)),
        _code("publish", policy, kind, words, capability, lambda: (publish_kernel(phases, kind, words), PUBLISH_SIGNATURE)),
        _code("stamp", policy, kind, words, capability, lambda: (stamp_kernel(), STAMP_SIGNATURE)),
        _code("after_copy", policy, kind, words, capability, lambda: (after_copy_kernel(), AFTER_COPY_SIGNATURE)),
    )


def _code(
    name: str,
    policy: Policy,
    kind: Any,
    words: int,
    capability: tuple[int, int],
    source: Callable[[], tuple[Callable[..., None], Any]],
) -> KernelCode:
    path = _cached_at(name, policy, kind, words, capability)
    if path is not None:
        with contextlib.suppress(OSError, ValueError):
            return _load(path)
    code = compile_kernel(*source(), capability)
    if path is not None:
        with contextlib.suppress(OSError):
            _store(path, code)
    return code


def _cached_at(name: str, policy: Policy, kind: Any, words: int, capability: tuple[int, int]) -> Path | None:
    """File for the code, named by all that it depends on beside the package's sources; None where there is no cache."""
    folder, digest = cache_folder(), policy_digest(policy)
    if folder is None or digest is None:
        return None
    what = (digest, kind.key, words, capability, *VERSION)
    return folder / f"{name}-{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}.kernel"


def _store(path: Path, code: KernelCode) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    head = json.dumps({"entry": code.entry, "bytes": len(code.cubin)}).encode()
    temporary.write_bytes(head + b"\n" + code.cubin)
    temporary.replace(path)  # whole or not at all


def _load(path: Path) -> KernelCode:
    """Raises OSError or ValueError where there is no complete file."""
    head, _, cubin = path.read_bytes().partition(b"\n")
    facts = json.loads(head)
    if len(cubin) != facts["bytes"]:
        raise ValueError(f"{path} is cut short")
    return KernelCode(facts["entry"], "", cubin)
