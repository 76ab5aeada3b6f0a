"""The loop's kernels, compiled for a GPU and cached on disk."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from blinkpy.device.compile_cache import cache_folder
from blinkpy.device.cuda.kernel_compiler import VERSION, KernelCode, compile_kernel
from blinkpy.kernels.loop import loop_kernels as K
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

    def code(name: str, signature: Any, make: Callable[..., Callable[..., None]], *arguments: Any) -> KernelCode:
        path = _cached_at(name, policy, kind, words, capability)
        if path is not None:
            with contextlib.suppress(OSError, ValueError):
                return _load(path)
        compiled = compile_kernel(make(*arguments), signature, capability)
        if path is not None:
            with contextlib.suppress(OSError):
                _store(path, compiled)
        return compiled

    return LoopCode(
        code("overlap", K.OVERLAP_SIGNATURE, K.overlap_kernel, phases, kind, words),
        code("schedule", K.SCHEDULE_SIGNATURE, K.schedule_kernel, phases, kind, words),
        code("publish", K.PUBLISH_SIGNATURE, K.publish_kernel, phases, kind, words),
        code("stamp", K.STAMP_SIGNATURE, K.stamp_kernel),
        code("after_copy", K.AFTER_COPY_SIGNATURE, K.after_copy_kernel),
    )


def _cached_at(name: str, policy: Policy, kind: Any, words: int, capability: tuple[int, int]) -> Path | None:
    """File for the code, named by its dependencies other than the package's sources; None without a cache."""
    folder, digest = cache_folder(), policy_digest(policy)
    if folder is None or digest is None:
        return None
    what = (digest, kind.key, words, capability, *VERSION)
    return folder / f"{name}-{hashlib.sha256(repr(what).encode()).hexdigest()[:24]}.kernel"


def _store(path: Path, code: KernelCode) -> None:
    temporary = path.with_suffix(f".{os.getpid()}")
    head = json.dumps({"entry": code.entry, "bytes": len(code.cubin)}).encode()
    temporary.write_bytes(head + b"\n" + code.cubin)
    temporary.replace(path)  # atomically


def _load(path: Path) -> KernelCode:
    """Raises OSError or ValueError if there is no complete file."""
    head, _, cubin = path.read_bytes().partition(b"\n")
    facts = json.loads(head)
    if len(cubin) != facts["bytes"]:
        raise ValueError(f"{path} is truncated")
    return KernelCode(facts["entry"], "", cubin)
