"""Small functions for njit code that NumPy lacks."""

from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

# Sums may be reordered, so that loops become vector instructions. Infinities keep their meaning.
FAST = {"reassoc", "contract", "nsz", "arcp", "nnan"}


@intrinsic
def pointer_to(typingctx: Any, address: Any) -> Any:
    """An integer as a pointer."""
    return types.voidptr(address), lambda context, builder, signature, args: builder.inttoptr(args[0], cgutils.voidptr_t)


@intrinsic
def float_of(typingctx: Any, bits: Any) -> Any:
    """The float32 with these bits (int32)."""
    return types.float32(types.int32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.FloatType())


@intrinsic
def bits_of(typingctx: Any, value: Any) -> Any:
    """The bits of a float32, int32."""
    return types.int32(types.float32), lambda context, builder, signature, args: builder.bitcast(args[0], ir.IntType(32))


@intrinsic
def larger(typingctx: Any, x: Any, y: Any) -> Any:
    """The larger of two float32 that are not NaN. Loops with it become vector instructions, unlike loops with
    max().
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.FloatType(), [ir.FloatType()] * 2)
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.maxnum.f32")
        return builder.call(function, args, fastmath=("nnan", "nsz"))

    return types.float32(types.float32, types.float32), generate


@intrinsic
def prefetch(typingctx: Any, array: Any, index: Any) -> Any:
    """Prefetch the cache line with the element at a flat index of a contiguous array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, args[0]).data
        byte, word = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
        # for reading, into the second-level cache, data
        builder.call(function, [builder.bitcast(builder.gep(data, [args[1]]), byte), word(0), word(2), word(1)])
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def wide_vectors(typingctx: Any) -> Any:
    """Let the calling function use 512-bit vectors if the processor has them. LLVM's default is 256 bits, because 512-bit vectors
    slowed early processors down.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        set.add(builder.function.attributes, '"prefer-vector-width"="512"')  # its add() can't set values
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def take_number(typingctx: Any, address: Any) -> Any:
    """Atomically increment the int64 at an address, and return its old value, so that each thread gets a different number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        number = ir.IntType(64)
        return builder.atomic_rmw("add", builder.inttoptr(args[0], number.as_pointer()), number(1), "monotonic")

    return types.int64(types.int64), generate


@njit(inline="always")
def fp8_of(x):  # type: ignore[no-untyped-def]
    """The bits, uint8, of a float32 as FP8 (E4M3 without infinities): saturated at 448, to nearest, ties to
    even. x must not be NaN. blinkpy/kernels/attention/attention_variants.py has the same arithmetic.
    """
    size = min(abs(x), np.float32(448))
    bits = bits_of(size)
    normal = ((bits + np.int32(0x7FFFF) + ((bits >> np.int32(20)) & np.int32(1))) >> np.int32(20)) - np.int32(120 << 3)
    small = bits_of(size + np.float32(16384)) - np.int32(0x46800000)
    sign = (bits_of(x) >> np.int32(24)) & np.int32(0x80)
    return np.uint8((small if size < np.float32(0.015625) else normal) | sign)


@njit(inline="always")
def float_of_fp8(number):  # type: ignore[no-untyped-def]
    """The float32 of an FP8 number's bits, uint8, except NaN."""
    bits = np.int32(number)
    sign = (bits & np.int32(0x80)) << np.int32(24)
    return float_of(sign | ((bits & np.int32(0x7F)) << np.int32(20))) * np.float32(2.0**120)


@njit(fastmath={"contract"}, error_model="numpy", inline="always")
def exp2(x):  # type: ignore[no-untyped-def]
    """2**x for a float32 x in [-126, 127], to a relative error of 1e-7; exactly 1 at 0.

    It is split into 2**floor(x), built from bits, and a polynomial on [0, 1): plain arithmetic compiles to
    vector instructions, unlike a call of exp2. The polynomial is the degree-6 minimax fit of the relative error
    that is exact at 0.
    """
    whole = np.floor(x)
    f = x - whole
    p = np.float32(2.1612915e-4)
    p = p * f + np.float32(1.2467846e-3)
    p = p * f + np.float32(9.6754516e-3)
    p = p * f + np.float32(5.5485281e-2)
    p = p * f + np.float32(2.4022931e-1)
    p = p * f + np.float32(6.9314704e-1)
    p = p * f + np.float32(1)
    return p * float_of((np.int32(whole) + np.int32(127)) << np.int32(23))


@njit(inline="always")
def exponentials(x, least, factor):  # type: ignore[no-untyped-def]
    """x = 2 ** (factor * (x - largest)), in place. Returns (largest, sum of the new x).

    x: float32 [n], without NaN.
    least: lower bound of `largest`.
    Indices begin at 0, so the loops need no test for negative values, and become vector instructions.
    """
    largest, total = least, np.float32(0)
    for i in range(len(x)):
        largest = larger(largest, x[i])
    for i in range(len(x)):
        power = exp2(larger((x[i] - largest) * factor, np.float32(-126)))
        x[i] = power
        total += power
    return largest, total


@njit(inline="always")
def rescale(x, factor):  # type: ignore[no-untyped-def]
    """x *= factor. x: float32 [n]."""
    for i in range(len(x)):
        x[i] *= factor
