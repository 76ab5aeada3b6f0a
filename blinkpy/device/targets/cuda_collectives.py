"""The collectives of device/portable.py for numba.cuda: warp shuffles, and one word of shared memory per warp."""

import operator

from llvmlite import ir

from blinkpy.device.cuda.kernel_compiler import cgutils, cuda, intrinsic, types

ALL_LANES = 0xFFFFFFFF
WARPS_AT_MOST = 32
SHARED_MEMORY = 3  # an address space of NVVM
_I64 = ir.IntType(64)


def _partial(builder, index):
    """Address of a word of shared memory, one for each warp. cuda.shared.array can't be used here: Numba links a
    module once for each function that uses it, and refuses its shared memory the second time."""
    name, kind = "blinkpy_partial", ir.ArrayType(_I64, WARPS_AT_MOST)
    memory = builder.module.globals.get(name)
    if memory is None:
        memory = cgutils.add_global_variable(builder.module, kind, name, SHARED_MEMORY)
        memory.linkage, memory.initializer, memory.align = "linkonce_odr", ir.Constant(kind, ir.Undefined), 8
    return builder.gep(memory, [_I64(0), index])


@intrinsic
def get_partial(typing_context, warp):
    def generate(context, builder, signature, args):
        return builder.load(_partial(builder, context.cast(builder, args[0], signature.args[0], types.int64)))

    return types.int64(warp), generate


@intrinsic
def set_partial(typing_context, warp, value):
    def generate(context, builder, signature, args):
        index, word = (context.cast(builder, arg, kind, types.int64) for arg, kind in zip(args, signature.args, strict=True))
        builder.store(word, _partial(builder, index))
        return context.get_dummy_value()

    return types.void(warp, value), generate


@intrinsic
def out_of_line(typing_context):
    """Keeps the function that calls it from being inlined. The collectives are called from a hundred places; their
    code fits the instruction cache once."""

    def generate(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


def barrier(lanes):
    """The barrier of a block."""
    cuda.syncthreads()


def block_scan(value, lane, lanes):
    """Within a warp by shuffles, then over the warps' sums."""
    out_of_line()
    within, warp = lane & 31, lane >> 5
    inclusive = types.int64(value)
    reach = 1
    while reach < 32:
        lower = cuda.shfl_up_sync(ALL_LANES, inclusive, reach)
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


def _reduction(combine):
    """A collective from a function of two values: within a warp by shuffles, then over the warps' results."""

    def reduce(value, lane, lanes):
        out_of_line()
        own = types.int64(value)
        reach = 16
        while reach > 0:
            own = combine(own, cuda.shfl_xor_sync(ALL_LANES, own, reach))
            reach >>= 1
        if lane & 31 == 0:
            set_partial(lane >> 5, own)
        cuda.syncthreads()
        total = get_partial(0)
        for other in range(1, lanes >> 5):
            total = combine(total, get_partial(other))
        cuda.syncthreads()
        return total

    return reduce


block_sum, block_max = _reduction(operator.add), _reduction(max)
