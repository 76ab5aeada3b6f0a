"""The primitives of device/portable.py for numba.cuda: inline PTX with system scope.

Each one is a Numba intrinsic with the arguments of the primitive. Needs numba-cuda: `portable.register_cuda` imports it.
"""

from llvmlite import ir

from blinkpy.device.cuda.kernel_compiler import intrinsic, types
from blinkpy.device.table_codegen import word_pointer

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
