"""The only functions with three implementations: memory-model primitives, and collectives over the lanes of a
block.

The rest of the scheduler has a single source. A function here has

- a plain Python body, the `def` below: the reference;
- a body for numba.njit, from the intrinsics in device/cpu_primitives.py;
- a body for numba.cuda, from device/cuda_primitives.py, registered by `register_cuda`, because numba-cuda is
  an
  optional package.

*Lanes.* Device code runs as `lanes` lanes of one block (any number; on a GPU a multiple of 32), each
knowing its `lane`. All lanes call the collectives (barrier, block_scan, block_sum, block_max) in the same
order. njit runs one lane, plain Python one lane, or several in a lanes.Team, which has its own collectives.

*Memory model.* Read a word of another party with load_acquire if the word announces data, otherwise with load_relaxed. A plain
load may come from a register or a cache. Write a word for another party with store_release after the data that it announces, or
with store_relaxed if it announces no data. Both are single accesses of an aligned word, so they can't be torn. Scope is the whole
system: host, GPU, network card.
"""

import time
from functools import cache, partial
from typing import Any

from llvmlite.binding import ffi
from numba.core.codegen import JITCodeLibrary, JITCPUCodegen
from numba.core.environment import lookup_environment
from numba.extending import overload, register_jitable

from blinkpy.device import cpu_primitives
from blinkpy.device.expect import register_expect
from blinkpy.device.tables import is_words, register_cuda_tables

ENTRIES = ("_ZN7cpython", "cfunc.")  # prefixes of functions for callers in Python and C
COMPILED = "_ZN"  # prefix of all functions that Numba compiles from Python
ENVIRONMENT = "_ZN08NumbaEnv"


class SharedLibrary(JITCodeLibrary):
    """The code of one function and its callees. `put_off`: it has no entry point yet, so code generation waits."""

    put_off = False

    def _has_no_entry(self) -> bool:
        names = [function.name for function in self._final_module.functions if _is_seen(function)]
        return bool(names) and all(name.startswith(COMPILED) and not name.startswith(ENTRIES) for name in names)

    def _optimize_final_module(self) -> None:
        if not self._has_no_entry():
            super()._optimize_final_module()

    def _finalize_final_module(self) -> None:
        if not self._has_no_entry():
            self._emit()
            return
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = self.put_off = True

    def _emit(self) -> None:
        """Generate machine code, and link it to the constants of its functions."""
        super()._finalize_final_module()
        self.put_off = False
        for variable in self._final_module.global_variables:
            environment = lookup_environment(variable.name) if variable.name.startswith(ENVIRONMENT) else None
            if environment is not None:
                self._codegen.set_env(variable.name, environment)

    def get_pointer_to_function(self, name: str) -> int:
        self._ensure_finalized()
        if self.put_off:
            if all(function.name != name for function in self.get_defined_functions()):
                return 0
            super()._optimize_final_module()
            self._emit()
        pointer: int = super().get_pointer_to_function(name)
        return pointer


def _is_seen(function: Any) -> bool:
    """Whether a function is visible outside its module."""
    return not function.is_declaration and function.linkage.name == "external"


_set_environment = JITCPUCodegen.set_env


def _set_environment_of_code(self: Any, name: str, environment: Any) -> None:
    """Numba's set_env, restricted to existing code; see SharedLibrary._emit."""
    if self._engine.is_symbol_defined(name):
        _set_environment(self, name, environment)


def optimise_once() -> None:
    """Enable SharedLibrary in this process. Code compiled earlier is unchanged."""
    JITCPUCodegen.set_env = _set_environment_of_code
    JITCPUCodegen._library_class = SharedLibrary


def stop_timing_llvm() -> None:
    """Remove Numba's timers of LLVM calls: each call notifies every compilation in progress, and the scheduler's are nested
    deeply. They took a sixth of its compile time; no code reads them.
    """
    ffi.lib._lock._cblist.clear()


optimise_once()
stop_timing_llvm()
# Without C entry points, which are never used but take a seventh of the scheduler's compile time.
INNER = {"no_cfunc_wrapper": True}
device = register_jitable(**INNER)
inner_overload = partial(overload, jit_options=INNER)

# ---- plain Python -------------------------------------------------------------------------------------------------------


def load_acquire(array, index):
    """array[index]; the writer's stores before its release store are visible after this load."""
    return array[index]


def load_relaxed(array, index):
    """array[index], from memory."""
    return array[index]


def store_release(array, index, value):
    """array[index] = value; all stores before it are visible after an acquire load of it."""
    array[index] = value


def store_relaxed(array, index, value):
    """array[index] = value, as one store to memory."""
    array[index] = value


def prefetch(array, index):
    """Prefetch array[index] into a cache. The value may still change until it is read."""


def fence():
    """Order all earlier accesses before all later ones, for every observer in the system."""


def nanosleep(nanoseconds):
    """Sleep for about this time; 0 only yields."""
    time.sleep(nanoseconds / 1e9)


def now_ns():
    """Monotonic clock, ns. On a GPU it is the GPU's clock, with another origin."""
    return time.monotonic_ns()


def strided(first, last, lanes):
    """first, first + lanes, ... below last. On a GPU, range would need a slow 64-bit division."""
    return range(first, last, lanes)


def barrier(lanes):
    """Wait until all lanes have arrived; their writes are then visible to all."""
    _one_lane(lanes)


def block_scan(value, lane, lanes):
    """(sum of the lower lanes' values, sum of all lanes' values). Also a barrier."""
    _one_lane(lanes)
    return 0, value


def block_sum(value, lane, lanes):
    """Sum over the lanes. Also a barrier."""
    _one_lane(lanes)
    return value


def block_max(value, lane, lanes):
    """Maximum over the lanes. Also a barrier."""
    _one_lane(lanes)
    return value


def _one_lane(lanes):
    if lanes > 1:
        raise RuntimeError(f"{lanes} lanes in plain Python must be run by blinkpy.device.lanes.Team.run")


# ---- compiled -----------------------------------------------------------------------------------------------------------


def _register_primitives(overload, target, intrinsics):
    """Register the memory-model primitives for one target, from a module with intrinsics of these names."""

    def load(own):
        return lambda array, index: (lambda array, index: own(array, index)) if is_words(array) else None

    def store(own):
        return lambda array, index, value: (lambda array, index, value: own(array, index, value)) if is_words(array) else None

    own_fence, own_sleep, own_now = intrinsics.fence, intrinsics.sleep, intrinsics.now
    overload(load_acquire, target=target)(load(intrinsics.load_acquire))
    overload(load_relaxed, target=target)(load(intrinsics.load_relaxed))
    overload(prefetch, target=target)(load(intrinsics.prefetch))
    overload(store_release, target=target)(store(intrinsics.store_release))
    overload(store_relaxed, target=target)(store(intrinsics.store_relaxed))
    overload(fence, target=target)(lambda: lambda: own_fence())
    overload(nanosleep, target=target)(lambda nanoseconds: lambda nanoseconds: own_sleep(nanoseconds))
    overload(now_ns, target=target)(lambda: lambda: own_now())


_register_primitives(inner_overload, "cpu", cpu_primitives)
# One lane:
inner_overload(strided, target="cpu")(lambda first, last, lanes: lambda first, last, lanes: range(first, last))
inner_overload(barrier, target="cpu")(lambda lanes: lambda lanes: None)
inner_overload(block_scan, target="cpu")(lambda value, lane, lanes: lambda value, lane, lanes: (0, value))
inner_overload(block_sum, target="cpu")(lambda value, lane, lanes: lambda value, lane, lanes: value)
inner_overload(block_max, target="cpu")(lambda value, lane, lanes: lambda value, lane, lanes: value)


@cache
def register_cuda():
    """Add the CUDA bodies, once, and return the module numba.cuda. Raises ImportError without numba-cuda."""
    from blinkpy.device import cuda_primitives
    from blinkpy.device import cuda_primitives as cuda_collectives
    from blinkpy.device.cuda.kernel_compiler import cuda
    from blinkpy.device.cuda.kernel_compiler import overload as cuda_overload
    from blinkpy.device.cuda_primitives import make_strided

    register_cuda_tables()
    _register_primitives(cuda_overload, "cuda", cuda_primitives)
    register_expect(cuda_overload, "cuda")
    cuda_overload(strided, target="cuda")(lambda first, last, lanes: lambda first, last, lanes: make_strided(first, last, lanes))
    cuda_overload(barrier, target="cuda")(lambda lanes: cuda_collectives.barrier)
    cuda_overload(block_scan, target="cuda")(lambda value, lane, lanes: cuda_collectives.block_scan)
    cuda_overload(block_sum, target="cuda")(lambda value, lane, lanes: cuda_collectives.block_sum)
    cuda_overload(block_max, target="cuda")(lambda value, lane, lanes: cuda_collectives.block_max)
    return cuda
