"""The primitives of device/portable.py for njit: LLVM atomics and calls of the C library.

Inline assembly would abort the process. Each function is a Numba intrinsic with the arguments of the
primitive.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, register_jitable

from blinkpy.device.tables import word_pointer

_TIMESPEC = ir.LiteralStructType([ir.IntType(64), ir.IntType(64)])
_CLOCK_MONOTONIC = 1
_SECOND_NS = 1_000_000_000


def _load(order):
    @intrinsic
    def load(typing_context, array, index):
        def generate(context, builder, signature, args):
            pointer = word_pointer(context, builder, signature, args)
            return builder.load_atomic(pointer, order, array.dtype.bitwidth // 8)

        return array.dtype(array, index), generate

    return load


def _store(order):
    @intrinsic
    def store(typing_context, array, index, value):
        def generate(context, builder, signature, args):
            pointer = word_pointer(context, builder, signature, args)
            word = context.cast(builder, args[2], signature.args[2], array.dtype)
            builder.store_atomic(word, pointer, order, array.dtype.bitwidth // 8)
            return context.get_dummy_value()

        return types.void(array, index, value), generate

    return store


load_acquire, load_relaxed = _load("acquire"), _load("monotonic")
store_release, store_relaxed = _store("release"), _store("monotonic")


@register_jitable
def prefetch(array, index):
    """No operation: the CPU's hardware prefetching is sufficient."""


def _c_function(builder, name, result, *args):
    return cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, list(args)), name)


@intrinsic
def fence(typing_context):
    def generate(context, builder, signature, args):
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sleep(typing_context, nanoseconds):
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
def now(typing_context):
    def generate(context, builder, signature, args):
        i32, i64 = ir.IntType(32), ir.IntType(64)
        time_of = cgutils.alloca_once(builder, _TIMESPEC)
        function = _c_function(builder, "clock_gettime", i32, i32, _TIMESPEC.as_pointer())
        builder.call(function, [i32(_CLOCK_MONOTONIC), time_of])
        seconds = builder.load(cgutils.gep_inbounds(builder, time_of, 0, 0))
        rest = builder.load(cgutils.gep_inbounds(builder, time_of, 0, 1))
        return builder.add(builder.mul(seconds, i64(_SECOND_NS)), rest)

    return types.int64(), generate
