"""A cache of compiled host code on disk. The scheduler takes about 20 s to compile, and a moment to load.

Numba's cache only checks the file of the outermost function, and would miss edits in other modules. So each version of the
sources has a separate folder, named by a hash of all modules with device code. If several processes need the same code, one
compiles it and the others wait.
"""

import fcntl
import hashlib
import itertools
import os
import platform
import secrets
import shutil
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numba
from numba import njit
from numba.core.bytecode import FunctionIdentity
from numba.core.caching import FunctionCache
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from blinkpy.sources import DEVICE_CODE, source_digest

KEPT = 8  # versions of the sources; the least recently used folders are removed
WAIT_S = 120.0  # time limit for another process's compilation, which takes a minute on slow machines
LOOK_S = 0.05


def _number_functions_apart() -> None:
    """Start Numba's numbering of closures at a random number. Numba starts at 1, so the code of two processes
    can have equal symbols; a process that loads both would run the first code for both.
    """
    FunctionIdentity._unique_ids = itertools.count(secrets.randbits(48))


_number_functions_apart()
os.register_at_fork(after_in_child=_number_functions_apart)


@lru_cache(maxsize=1)
def cache_folder() -> Path | None:
    """The folder for this version of the sources; None if it can't be written."""
    key = (numba.__version__, platform.python_version(), platform.machine(), source_digest(DEVICE_CODE))
    digest = hashlib.sha256(" ".join(key).encode())
    try:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blinkpy" / "njit"
        folder = root / digest.hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        folders = sorted((path for path in root.iterdir() if path.is_dir()), key=lambda path: path.stat().st_mtime)
        for path in folders[:-KEPT]:
            shutil.rmtree(path, ignore_errors=True)
    except (OSError, RuntimeError):  # RuntimeError: no home folder
        return None
    return folder if os.access(folder, os.W_OK) else None


class _SharedCache(FunctionCache):
    """Numba's cache of one function's variants, safe for processes that fill it concurrently.

    key: see cached_njit. Numba would compare pickles, and those of intrinsics differ between processes.
    """

    def __init__(self, function: Callable[..., Any], key: tuple[Any, ...] | None):
        super().__init__(function)
        self._key = key
        self._compiling: dict[Any, int] = {}  # by signature: lock files of variants that this process compiles

    def __del__(self) -> None:
        for lock in self._compiling.values():  # locks of variants that failed to compile
            os.close(lock)

    def _index_key(self, signature: Any, codegen: Any) -> tuple[Any, ...]:
        if self._key is None:
            return super()._index_key(signature, codegen)
        return (signature, codegen.magic_tuple(), self._key)

    def _save_overload(self, signature: Any, data: Any) -> None:
        # Numba finds a free number, then uses it. Without a lock, two processes could use the same number,
        # and one
        # would load the other's code.
        try:
            with open(Path(self.cache_path) / "lock", "a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                super()._save_overload(signature, data)
        finally:
            self._release(signature)

    def _load_overload(self, signature: Any, target: Any) -> Any:
        found = self._kept(signature, target)
        if found is None:  # this process compiles it next, unless another process is compiling it
            self._acquire(signature)
            found = self._kept(signature, target)
        if found is not None:
            self._release(signature)
        return found

    def _kept(self, signature: Any, target: Any) -> Any:
        try:
            return super()._load_overload(signature, target)
        except Exception:  # a damaged file, which is compiled again and overwritten
            return None

    def has(self, signature: Any, codegen: Any) -> bool:
        """Whether the index names a file for this signature."""
        try:
            return self._index_key(signature, codegen) in self._cache_file._load_index()
        except Exception:  # a damaged index
            return False

    def _acquire(self, signature: Any) -> None:
        """Wait until no other process compiles this, for at most WAIT_S. A process that exits releases its locks."""
        if signature in self._compiling:  # its compilation failed before
            return
        name = hashlib.sha256(repr((self._py_func.__qualname__, signature, self._key)).encode()).hexdigest()[:16]
        end = time.monotonic() + WAIT_S
        Path(self.cache_path).mkdir(parents=True, exist_ok=True)
        self._compiling[signature] = lock = os.open(Path(self.cache_path) / f"{name}.compiling", os.O_RDWR | os.O_CREAT, 0o600)
        while time.monotonic() < end:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(LOOK_S)

    def _release(self, signature: Any) -> None:
        lock = self._compiling.pop(signature, None)
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_UN)  # also for forked children that have the file open
            os.close(lock)


def _keep(compiled: Any, function: Callable[..., Any], key: tuple[Any, ...] | None) -> Any:
    """Cache a Numba-wrapped function's code in the folder of this version of the sources, if the folder exists."""
    folder = cache_folder()
    if folder is not None:
        before = numba.config.CACHE_DIR
        numba.config.CACHE_DIR = str(folder)  # read when the cache is created
        try:
            compiled._cache = _SharedCache(function, key)
        finally:
            numba.config.CACHE_DIR = before
    return compiled


def cached_njit(function: Callable[..., Any], key: tuple[Any, ...] | None = None, **options: Any) -> Any:
    """numba.njit(function, **options), loaded from the cache if this machine has compiled these sources
    before.

    key: all constants of a closure; None lets Numba compare its cells.
    """
    return _keep(njit(**options)(function), function, key)


def cached_cfunc(function: Callable[..., Any], signature: Any, key: tuple[Any, ...], **options: Any) -> Any:
    """numba.cfunc(signature, **options)(function), from the cache if possible; see cached_njit."""
    compiled = _keep(CFunc(function, normalize_signature(signature), locals={}, options=options), function, key)
    compiled.compile()
    return compiled


def is_kept(function: Any, kinds: tuple[Any, ...]) -> bool:
    """Whether the cache has a (possibly damaged) file with an njit function's code for these types."""
    cache = function._cache
    return isinstance(cache, _SharedCache) and cache.has(kinds, function.targetctx.codegen())


def compiled_for(function: Any, kinds: tuple[Any, ...]) -> Any:
    """The code of an njit function for these types. A direct call skips the dispatch by types."""
    function.compile(kinds)
    return function.overloads[kinds].entry_point
