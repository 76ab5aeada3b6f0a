"""The collectives of device/portable.py for numba.cuda: warp shuffles, and one word of shared memory per warp."""

import operator

from llvmlite import ir

from blinkpy.device.cuda.kernel_compiler import cgutils, core_models, cuda, imputils, intrinsic, lowering_registry, models, types
from blinkpy.device.tables import word_pointer

_I64, _VOID = ir.IntType(64), ir.VoidType()


def _assembly(builder, result, text, constraints, args):
    return builder.asm(ir.FunctionType(result, [a.type for a in args]), text, constraints, args, side_effect=True)


def _address(context, builder, signature, args):
    return builder.ptrtoint(word_pointer(context, builder, signature, args), _I64)


def _load(order):
    @intrinsic
    def body(typing_context, array, index):
        bits = array.dtype.bitwidth
        text = f"{{ .reg .u64 p; cvta.to.global.u64 p, $1; ld.{order}.sys.global.u{bits} $0, [p]; }}"
        constraints = f"={'r' if bits == 32 else 'l'},l,~{{memory}}"

        def generate(context, builder, signature, args):
            pointer = _address(context, builder, signature, args)
            return _assembly(builder, ir.IntType(bits), text, constraints, [pointer])

        return array.dtype(array, index), generate

    return body


def _store(order):
    @intrinsic
    def body(typing_context, array, index, value):
        bits = array.dtype.bitwidth
        text = f"{{ .reg .u64 p; cvta.to.global.u64 p, $0; st.{order}.sys.global.u{bits} [p], $1; }}"
        constraints = f"l,{'r' if bits == 32 else 'l'},~{{memory}}"

        def generate(context, builder, signature, args):
            word = context.cast(builder, args[2], signature.args[2], array.dtype)
            _assembly(builder, _VOID, text, constraints, [_address(context, builder, signature, args), word])
            return context.get_dummy_value()

        return types.void(array, index, value), generate

    return body


@intrinsic
def prefetch(typing_context, array, index):
    def generate(context, builder, signature, args):
        pointer = _address(context, builder, signature, args)
        _assembly(builder, _VOID, "{ .reg .u64 p; cvta.to.global.u64 p, $0; prefetch.global.L2 [p]; }", "l", [pointer])
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def fence(typing_context):
    def generate(context, builder, signature, args):
        _assembly(builder, _VOID, "fence.acq_rel.sys;", "~{memory}", [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def sleep(typing_context, nanoseconds):
    def generate(context, builder, signature, args):
        duration = context.cast(builder, args[0], signature.args[0], types.uint32)
        _assembly(builder, _VOID, "nanosleep.u32 $0;", "r,~{memory}", [duration])
        return context.get_dummy_value()

    return types.void(nanoseconds), generate


@intrinsic
def now(typing_context):
    def generate(context, builder, signature, args):
        return _assembly(builder, _I64, "mov.u64 $0, %globaltimer;", "=l,~{memory}", [])

    return types.int64(), generate


load_acquire, load_relaxed = _load("acquire"), _load("relaxed")
store_release, store_relaxed = _store("release"), _store("relaxed")


ALL_LANES = 0xFFFFFFFF
WARPS_AT_MOST = 32
SHARED_MEMORY = 3  # an address space of NVVM
_WORD = ir.IntType(64)


def _partial(builder, index):
    """Address of a word of shared memory, one per warp. cuda.shared.array can't be used here: Numba links a module once for each
    function that uses it, and the second link rejects the module's shared memory.
    """
    name, kind = "blinkpy_partial", ir.ArrayType(_WORD, WARPS_AT_MOST)
    memory = builder.module.globals.get(name)
    if memory is None:
        memory = cgutils.add_global_variable(builder.module, kind, name, SHARED_MEMORY)
        memory.linkage = "linkonce_odr"
        memory.initializer = ir.Constant(kind, ir.Undefined)
        memory.align = 8
    return builder.gep(memory, [_WORD(0), index])


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
    """Prevent inlining of the calling function. A hundred call sites use the collectives, and inlined copies would not fit the
    instruction cache.
    """

    def generate(context, builder, signature, args):
        builder.function.attributes.add("noinline")
        return context.get_dummy_value()

    return types.void(), generate


def barrier(lanes):
    """The barrier of a block."""
    cuda.syncthreads()


def block_scan(value, lane, lanes):
    """Scan within a warp by shuffles, then over the warps' sums."""
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
    cuda.syncthreads()  # the next collective reuses the words
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


class StridedIterator(types.SimpleIteratorType):
    """Numba's type of an iterator over strided(...), on a GPU."""

    def __init__(self):
        super().__init__("StridedIterator", types.int64)


class Strided(types.SimpleIterableType):
    """Numba's type of strided(...), on a GPU."""

    def __init__(self):
        super().__init__("Strided", StridedIterator())


@models.register_model(Strided)
class StridedModel(core_models.StructModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, [("first", types.int64), ("last", types.int64), ("step", types.int64)])


@models.register_model(StridedIterator)
class StridedIteratorModel(core_models.StructModel):
    def __init__(self, manager, kind):
        pointer = types.EphemeralPointer(types.int64)
        super().__init__(manager, kind, [("next", pointer), ("last", types.int64), ("step", types.int64)])


@intrinsic
def make_strided(typing_context, first, last, lanes):
    kind = Strided()

    def generate(context, builder, signature, args):
        made = cgutils.create_struct_proxy(kind)(context, builder)
        made.first, made.last, made.step = (
            context.cast(builder, arg, own, types.int64) for arg, own in zip(args, signature.args, strict=True)
        )
        return made._getvalue()

    return kind(first, last, lanes), generate


@lowering_registry.lower("getiter", Strided)
def get_iterator(context, builder, sig, args):
    made = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0])
    iterator = cgutils.create_struct_proxy(sig.return_type)(context, builder)
    iterator.next = cgutils.alloca_once(builder, ir.IntType(64))
    builder.store(made.first, iterator.next)
    iterator.last, iterator.step = made.last, made.step
    return iterator._getvalue()


@lowering_registry.lower("iternext", StridedIterator)
@imputils.iternext_impl(imputils.RefType.UNTRACKED)
def get_next(context, builder, sig, args, result):
    iterator = cgutils.create_struct_proxy(sig.args[0])(context, builder, value=args[0])
    value = builder.load(iterator.next)
    valid = builder.icmp_signed("<", value, iterator.last)
    result.set_valid(valid)
    with builder.if_then(valid):
        result.yield_(value)
        builder.store(builder.add(value, iterator.step), iterator.next)


@intrinsic
def set_condition(typingctx, handle, value):
    """Set the conditional node of `handle` (uint64) to `value` (uint32). A WHILE node repeats unless the
    value is 0. A SWITCH node runs the body with this number, if such a body exists.
    """

    def codegen(context, builder, signature, arguments):
        signature_of_extern = ir.FunctionType(ir.VoidType(), [ir.IntType(64), ir.IntType(32)])
        extern = cgutils.get_or_insert_function(builder.module, signature_of_extern, "cudaGraphSetConditional")
        wanted = (types.uint64, types.uint32)
        builder.call(extern, [context.cast(builder, a, s, w) for a, s, w in zip(arguments, signature.args, wanted, strict=True)])
        return context.get_dummy_value()

    return types.void(handle, value), codegen


@intrinsic
def wait_for_predecessors(typingctx):
    """Wait until the previous kernels of the graph are complete, and their writes are visible. Needed after a
    programmatic edge, because the kernel then starts early; without such an edge it returns immediately.
    """

    def codegen(context, builder, signature, arguments):
        builder.asm(ir.FunctionType(ir.VoidType(), []), "griddepcontrol.wait;", "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def let_successors_begin(typingctx):
    """Let kernels start that depend on this one by a programmatic edge of the graph."""

    def codegen(context, builder, signature, arguments):
        builder.asm(ir.FunctionType(ir.VoidType(), []), "griddepcontrol.launch_dependents;", "~{memory}", [], side_effect=True)
        return context.get_dummy_value()

    return types.void(), codegen
