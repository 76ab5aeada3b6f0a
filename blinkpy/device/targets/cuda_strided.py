"""`strided` of device/portable.py for numba.cuda: an iterable that adds and compares, without division."""

from llvmlite import ir

from blinkpy.device.cuda.kernel_compiler import cgutils, core_models, imputils, intrinsic, lowering_registry, models, types


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
