"""The only functions with three bodies: memory-model primitives, and collectives over the lanes of a block.

Everything else in the scheduler is one source. A function here has

- a plain Python body, the `def` below: the reference;
- a body for numba.njit: LLVM atomics and calls of the C library (no inline assembly: it would abort the process);
- a body for numba.cuda: inline PTX, warp shuffles and shared memory; registered by `register_cuda`, since numba-cuda is
  an optional package. This is the one module that touches numba's extension points.

*Lanes.* Device code runs as `lanes` lanes of one block (a power of two; on a GPU a multiple of 32), each knowing its
`lane`. All lanes call the collectives (barrier, block_scan, block_sum, block_max) in the same order. njit runs one lane,
plain Python one or, in a lanes.Team, several.

*Memory model.* A word that another party writes is read with load_acquire when what it announces is read after it, with
load_relaxed otherwise: never with a plain load, which may come from a register or a cache. Words for another party are
written with store_release after what they announce, with store_relaxed when they announce nothing but themselves.
Both are single accesses of an aligned word, so they can't be torn. Scope is the whole system: host, GPU, network card.
"""

from __future__ import annotations

import time

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload, register_jitable

from blinkpy.kernels.lanes import team_of
from blinkpy.kernels.trees import WordsType, element_pointer, register_cuda_trees

device = register_jitable

# ---- plain Python -------------------------------------------------------------------------------------------------------


def load_acquire(array, index):
    """array[index]; what the writer stored before its release store is visible after it."""
    return array[index]


def load_relaxed(array, index):
    """array[index], from memory."""
    return array[index]


def store_release(array, index, value):
    """array[index] = value; all stores before it are visible to who loads it with acquire."""
    array[index] = value


def store_relaxed(array, index, value):
    """array[index] = value, as one store to memory."""
    array[index] = value


def prefetch(array, index):
    """Bring array[index] near, as it will be read soon; its value may still change until then."""


def fence():
    """Orders all accesses before it with all after it, for every observer in the system."""


def nanosleep(nanoseconds):
    """Give up the processor for about so long; 0 only yields."""
    time.sleep(nanoseconds / 1e9)


def now_ns():
    """Monotonic clock, ns. On a GPU its own, with another origin."""
    return time.monotonic_ns()


def strided(first, last, lanes):
    """first, first + lanes, ... below last. (range would do, but on a GPU it divides, and 64-bit division is slow there.)"""
    return range(first, last, lanes)


def barrier(lanes):
    """All lanes arrive before one goes on; what they wrote is visible to all."""
    if lanes > 1:
        team, lane = team_of(lanes)
        team.barrier(lane)


def block_scan(value, lane, lanes):
    """(sum of the lower lanes' values, sum of all lanes' values). Also a barrier."""
    if lanes == 1:
        return 0, value
    team, own = team_of(lanes)
    values = team.exchange(own, value)
    return sum(values[:lane]), sum(values)


def block_sum(value, lane, lanes):
    """Sum over the lanes. Also a barrier."""
    return block_scan(value, lane, lanes)[1]


def block_max(value, lane, lanes):
    """Maximum over the lanes. Also a barrier."""
    if lanes == 1:
        return value
    team, own = team_of(lanes)
    return max(team.exchange(own, value))


# ---- njit ---------------------------------------------------------------------------------------------------------------


def _is_words(array):
    return isinstance(array, WordsType) or (isinstance(array, types.Array) and isinstance(array.dtype, types.Integer))


def _pointer(utils, context, builder, signature, args):
    """Address of args[0][args[1]]: of an array or of a table's one; the index is an integer or a tuple of them."""
    array_type, index_type = signature.args[0], signature.args[1]
    if isinstance(array_type, WordsType):
        return element_pointer(context, builder, array_type, args[0], index_type, args[1])
    array = context.make_array(array_type)(context, builder, args[0])
    if isinstance(index_type, types.BaseTuple):
        indices, index_types = utils.unpack_tuple(builder, args[1], len(index_type)), list(index_type)
    else:
        indices, index_types = [args[1]], [index_type]
    indices = [context.cast(builder, i, t, types.intp) for i, t in zip(indices, index_types, strict=True)]
    return utils.get_item_pointer(context, builder, array_type, array, indices, wraparound=False)


def _cpu_load(order):
    @intrinsic
    def load(typing_context, array, index):
        def generate(context, builder, signature, args):
            pointer = _pointer(cgutils, context, builder, signature, args)
            return builder.load_atomic(pointer, order, array.dtype.bitwidth // 8)

        return array.dtype(array, index), generate

    return load


def _cpu_store(order):
    @intrinsic
    def store(typing_context, array, index, value):
        def generate(context, builder, signature, args):
            pointer = _pointer(cgutils, context, builder, signature, args)
            word = context.cast(builder, args[2], signature.args[2], array.dtype)
            builder.store_atomic(word, pointer, order, array.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(array, index, value), generate

    return store


_cpu_load_acquire, _cpu_load_relaxed = _cpu_load("acquire"), _cpu_load("monotonic")
_cpu_store_release, _cpu_store_relaxed = _cpu_store("release"), _cpu_store("monotonic")

_TIMESPEC = ir.LiteralStructType([ir.IntType(64), ir.IntType(64)])
_CLOCK_MONOTONIC = 1
_SECOND_NS = 1_000_000_000


def _c_function(builder, name, result, *args):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, list(args)), name)


@intrinsic
def _cpu_fence(typing_context):
    def generate(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def _cpu_sleep(typing_context, nanoseconds):
    def generate(context, builder, signature, args):
        i64 = ir.IntType(64)
        total = context.cast(builder, args[0], signature.args[0], types.int64)
        with builder.if_else(builder.icmp_signed(">", total, i64(0))) as (some, none):
            with some:
                time_of = cgutils.alloca_once(builder, _TIMESPEC)
                builder.store(builder.sdiv(total, i64(_SECOND_NS)), cgutils.gep_inbounds(builder, time_of, 0, 0))
                builder.store(builder.srem(total, i64(_SECOND_NS)), cgutils.gep_inbounds(builder, time_of, 0, 1))
                function = _c_function(builder, "nanosleep", ir.IntType(32), _TIMESPEC.as_pointer(), _TIMESPEC.as_pointer())
                builder.call(function, [time_of, ir.Constant(_TIMESPEC.as_pointer(), None)])
            with none:
                builder.call(_c_function(builder, "sched_yield", ir.IntType(32)), [])
        return context.get_dummy_value()

    return types.void(nanoseconds), generate


@intrinsic
def _cpu_now(typing_context):
    def generate(context, builder, signature, args):
        i32, i64 = ir.IntType(32), ir.IntType(64)
        time_of = cgutils.alloca_once(builder, _TIMESPEC)
        function = _c_function(builder, "clock_gettime", i32, i32, _TIMESPEC.as_pointer())
        builder.call(function, [i32(_CLOCK_MONOTONIC), time_of])
        seconds = builder.load(cgutils.gep_inbounds(builder, time_of, 0, 0))
        rest = builder.load(cgutils.gep_inbounds(builder, time_of, 0, 1))
        return builder.add(builder.mul(seconds, i64(_SECOND_NS)), rest)

    return types.int64(), generate


@overload(load_acquire, target="cpu")
def _njit_load_acquire(array, index):
    return (lambda array, index: _cpu_load_acquire(array, index)) if _is_words(array) else None


@overload(load_relaxed, target="cpu")
def _njit_load_relaxed(array, index):
    return (lambda array, index: _cpu_load_relaxed(array, index)) if _is_words(array) else None


@overload(store_release, target="cpu")
def _njit_store_release(array, index, value):
    return (lambda array, index, value: _cpu_store_release(array, index, value)) if _is_words(array) else None


@overload(store_relaxed, target="cpu")
def _njit_store_relaxed(array, index, value):
    return (lambda array, index, value: _cpu_store_relaxed(array, index, value)) if _is_words(array) else None


@overload(prefetch, target="cpu")
def _njit_prefetch(array, index):
    return (lambda array, index: None) if _is_words(array) else None


@overload(fence, target="cpu")
def _njit_fence():
    return lambda: _cpu_fence()


@overload(nanosleep, target="cpu")
def _njit_nanosleep(nanoseconds):
    return lambda nanoseconds: _cpu_sleep(nanoseconds)


@overload(now_ns, target="cpu")
def _njit_now_ns():
    return lambda: _cpu_now()


@overload(strided, target="cpu")
def _njit_strided(first, last, lanes):
    return lambda first, last, lanes: range(first, last)  # one lane


@overload(barrier, target="cpu")
def _njit_barrier(lanes):
    return lambda lanes: None


@overload(block_scan, target="cpu")
def _njit_block_scan(value, lane, lanes):
    return lambda value, lane, lanes: (0, value)


@overload(block_sum, target="cpu")
def _njit_block_sum(value, lane, lanes):
    return lambda value, lane, lanes: value


@overload(block_max, target="cpu")
def _njit_block_max(value, lane, lanes):
    return lambda value, lane, lanes: value


# ---- CUDA ---------------------------------------------------------------------------------------------------------------

_cuda_registered = False


def register_cuda():
    """Add the CUDA bodies, once, and return the module numba.cuda. Raises ImportError without numba-cuda."""
    global _cuda_registered
    from numba import cuda

    if not _cuda_registered:
        register_cuda_trees()
        _register_memory(cuda)
        _register_block(cuda)
        _register_strided()
        _cuda_registered = True
    return cuda


def _register_memory(cuda):
    from numba.cuda import cgutils as cuda_cgutils
    from numba.cuda.extending import intrinsic as cuda_intrinsic
    from numba.cuda.extending import overload as cuda_overload

    i64, void = ir.IntType(64), ir.VoidType()

    def assembly(builder, result, text, constraints, args):
        return builder.asm(ir.FunctionType(result, [a.type for a in args]), text, constraints, args, side_effect=True)

    def address(context, builder, signature, args):
        return builder.ptrtoint(_pointer(cuda_cgutils, context, builder, signature, args), i64)

    def load(order):
        @cuda_intrinsic
        def body(typing_context, array, index):
            bits = array.dtype.bitwidth
            text = f"{{ .reg .u64 p; cvta.to.global.u64 p, $1; ld.{order}.sys.global.u{bits} $0, [p]; }}"
            constraints = f"={'r' if bits == 32 else 'l'},l,~{{memory}}"

            def generate(context, builder, signature, args):
                pointer = address(context, builder, signature, args)
                return assembly(builder, ir.IntType(bits), text, constraints, [pointer])

            return array.dtype(array, index), generate

        return body

    def store(order):
        @cuda_intrinsic
        def body(typing_context, array, index, value):
            bits = array.dtype.bitwidth
            text = f"{{ .reg .u64 p; cvta.to.global.u64 p, $0; st.{order}.sys.global.u{bits} [p], $1; }}"
            constraints = f"l,{'r' if bits == 32 else 'l'},~{{memory}}"

            def generate(context, builder, signature, args):
                word = context.cast(builder, args[2], signature.args[2], array.dtype)
                assembly(builder, void, text, constraints, [address(context, builder, signature, args), word])
                return context.get_dummy_value()

            return types.void(array, index, value), generate

        return body

    @cuda_intrinsic
    def fetch_into_l2(typing_context, array, index):
        def generate(context, builder, signature, args):
            pointer = address(context, builder, signature, args)
            assembly(builder, void, "{ .reg .u64 p; cvta.to.global.u64 p, $0; prefetch.global.L2 [p]; }", "l", [pointer])
            return context.get_dummy_value()

        return types.void(array, index), generate

    @cuda_intrinsic
    def system_fence(typing_context):
        def generate(context, builder, signature, args):
            assembly(builder, void, "fence.acq_rel.sys;", "~{memory}", [])
            return context.get_dummy_value()

        return types.void(), generate

    @cuda_intrinsic
    def sleep(typing_context, nanoseconds):
        def generate(context, builder, signature, args):
            duration = context.cast(builder, args[0], signature.args[0], types.uint32)
            assembly(builder, void, "nanosleep.u32 $0;", "r,~{memory}", [duration])
            return context.get_dummy_value()

        return types.void(nanoseconds), generate

    @cuda_intrinsic
    def timer(typing_context):
        def generate(context, builder, signature, args):
            return assembly(builder, i64, "mov.u64 $0, %globaltimer;", "=l,~{memory}", [])

        return types.int64(), generate

    acquire, relaxed = load("acquire"), load("relaxed")
    release, plain = store("release"), store("relaxed")

    @cuda_overload(load_acquire, target="cuda")
    def _load_acquire(array, index):
        return (lambda array, index: acquire(array, index)) if _is_words(array) else None

    @cuda_overload(load_relaxed, target="cuda")
    def _load_relaxed(array, index):
        return (lambda array, index: relaxed(array, index)) if _is_words(array) else None

    @cuda_overload(store_release, target="cuda")
    def _store_release(array, index, value):
        return (lambda array, index, value: release(array, index, value)) if _is_words(array) else None

    @cuda_overload(store_relaxed, target="cuda")
    def _store_relaxed(array, index, value):
        return (lambda array, index, value: plain(array, index, value)) if _is_words(array) else None

    @cuda_overload(prefetch, target="cuda")
    def _prefetch(array, index):
        return (lambda array, index: fetch_into_l2(array, index)) if _is_words(array) else None

    @cuda_overload(fence, target="cuda")
    def _fence():
        return lambda: system_fence()

    @cuda_overload(nanosleep, target="cuda")
    def _nanosleep(nanoseconds):
        return lambda nanoseconds: sleep(nanoseconds)

    @cuda_overload(now_ns, target="cuda")
    def _now_ns():
        return lambda: timer()


def _register_block(cuda):
    from numba.cuda import cgutils as cuda_cgutils
    from numba.cuda.extending import intrinsic as cuda_intrinsic
    from numba.cuda.extending import overload as cuda_overload

    all_lanes, warps_at_most, shared_memory = 0xFFFFFFFF, 32, 3
    i64 = ir.IntType(64)

    def partial(builder, index):
        """Address of a word of shared memory, one for each warp. cuda.shared.array can't be used here: Numba links a
        module once for each function that uses it, and refuses its shared memory the second time."""
        name, kind = "blinkpy_partial", ir.ArrayType(i64, warps_at_most)
        memory = builder.module.globals.get(name)
        if memory is None:
            memory = cuda_cgutils.add_global_variable(builder.module, kind, name, shared_memory)
            memory.linkage, memory.initializer, memory.align = "linkonce_odr", ir.Constant(kind, ir.Undefined), 8
        return builder.gep(memory, [i64(0), index])

    @cuda_intrinsic
    def get_partial(typing_context, warp):
        def generate(context, builder, signature, args):
            return builder.load(partial(builder, context.cast(builder, args[0], signature.args[0], types.int64)))

        return types.int64(warp), generate

    @cuda_intrinsic
    def set_partial(typing_context, warp, value):
        def generate(context, builder, signature, args):
            index, word = (context.cast(builder, arg, kind, types.int64) for arg, kind in zip(args, signature.args, strict=True))
            builder.store(word, partial(builder, index))
            return context.get_dummy_value()

        return types.void(warp, value), generate

    @cuda_intrinsic
    def out_of_line(typing_context):
        """Keeps the function that calls it from being inlined. The collectives are called from a hundred places; their
        code fits the instruction cache once."""

        def generate(context, builder, signature, args):
            builder.function.attributes.add("noinline")
            return context.get_dummy_value()

        return types.void(), generate

    @cuda_overload(barrier, target="cuda")
    def _barrier(lanes):
        return lambda lanes: cuda.syncthreads()

    @cuda_overload(block_scan, target="cuda")
    def _block_scan(value, lane, lanes):
        def body(value, lane, lanes):
            out_of_line()
            within, warp = lane & 31, lane >> 5
            inclusive = types.int64(value)
            reach = 1
            while reach < 32:
                lower = cuda.shfl_up_sync(all_lanes, inclusive, reach)
                if within >= reach:
                    inclusive += lower
                reach *= 2
            if within == 31:
                set_partial(warp, inclusive)
            cuda.syncthreads()
            before = inclusive - value
            total = types.int64(0)
            for other in range(lanes >> 5):
                own = get_partial(other)
                if other < warp:
                    before += own
                total += own
            cuda.syncthreads()  # the words are used again by the next collective
            return before, total

        return body

    @cuda_overload(block_sum, target="cuda")
    def _block_sum(value, lane, lanes):
        def body(value, lane, lanes):
            out_of_line()
            own = types.int64(value)
            reach = 16
            while reach > 0:
                own += cuda.shfl_xor_sync(all_lanes, own, reach)
                reach >>= 1
            if lane & 31 == 0:
                set_partial(lane >> 5, own)
            cuda.syncthreads()
            total = types.int64(0)
            for other in range(lanes >> 5):
                total += get_partial(other)
            cuda.syncthreads()
            return total

        return body

    @cuda_overload(block_max, target="cuda")
    def _block_max(value, lane, lanes):
        def body(value, lane, lanes):
            out_of_line()
            own = types.int64(value)
            reach = 16
            while reach > 0:
                own = max(own, cuda.shfl_xor_sync(all_lanes, own, reach))
                reach >>= 1
            if lane & 31 == 0:
                set_partial(lane >> 5, own)
            cuda.syncthreads()
            greatest = get_partial(0)
            for other in range(1, lanes >> 5):
                greatest = max(greatest, get_partial(other))
            cuda.syncthreads()
            return greatest

        return body


class StridedIterator(types.SimpleIteratorType):
    """Numba's type of an iterator over strided(...), on a GPU."""

    def __init__(self):
        super().__init__("StridedIterator", types.int64)


class Strided(types.SimpleIterableType):
    """Numba's type of strided(...), on a GPU."""

    def __init__(self):
        super().__init__("Strided", StridedIterator())


def _register_strided():
    from numba.cuda import cgutils as cuda_cgutils
    from numba.cuda import models as cuda_models
    from numba.cuda.core.imputils import RefType, iternext_impl
    from numba.cuda.cudaimpl import registry
    from numba.cuda.extending import core_models
    from numba.cuda.extending import intrinsic as cuda_intrinsic
    from numba.cuda.extending import overload as cuda_overload

    @cuda_models.register_model(Strided)
    class StridedModel(core_models.StructModel):
        def __init__(self, manager, kind):
            super().__init__(manager, kind, [("first", types.int64), ("last", types.int64), ("step", types.int64)])

    @cuda_models.register_model(StridedIterator)
    class StridedIteratorModel(core_models.StructModel):
        def __init__(self, manager, kind):
            pointer = types.EphemeralPointer(types.int64)
            super().__init__(manager, kind, [("next", pointer), ("last", types.int64), ("step", types.int64)])

    @cuda_intrinsic
    def make_strided(typing_context, first, last, lanes):
        kind = Strided()

        def generate(context, builder, signature, args):
            made = cuda_cgutils.create_struct_proxy(kind)(context, builder)
            made.first, made.last, made.step = (
                context.cast(builder, arg, own, types.int64) for arg, own in zip(args, signature.args, strict=True)
            )
            return made._getvalue()

        return kind(first, last, lanes), generate

    @registry.lower("getiter", Strided)
    def get_iterator(context, builder, sig, args):
        made = cuda_cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0])
        iterator = cuda_cgutils.create_struct_proxy(sig.return_type)(context, builder)
        iterator.next = cuda_cgutils.alloca_once(builder, ir.IntType(64))
        builder.store(made.first, iterator.next)
        iterator.last, iterator.step = made.last, made.step
        return iterator._getvalue()

    @registry.lower("iternext", StridedIterator)
    @iternext_impl(RefType.UNTRACKED)
    def get_next(context, builder, sig, args, result):
        iterator = cuda_cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0])
        value = builder.load(iterator.next)
        valid = builder.icmp_signed("<", value, iterator.last)
        result.set_valid(valid)
        with builder.if_then(valid):
            result.yield_(value)
            builder.store(builder.add(value, iterator.step), iterator.next)

    @cuda_overload(strided, target="cuda")
    def _strided(first, last, lanes):
        return lambda first, last, lanes: make_strided(first, last, lanes)
