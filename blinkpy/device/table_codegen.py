"""Numba's code for device/tables.py: reading fields, loading and storing elements; for njit at once, for CUDA when asked."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, infer_global, signature
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_builtin,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)

from blinkpy.device.tables import TableArrayType, TableType, make_table

WORD = 8  # bytes
GLOBAL_MEMORY = 1  # an address space of NVVM
_I64 = ir.IntType(64)


# ---- code, the same for both targets ------------------------------------------------------------------------------------


def _for_gpu(context):
    """Whether code is made for CUDA. Asked here because numba-cuda also takes lowerings that were registered for njit."""
    return type(context).__name__ == "CUDATargetContext"


def _load_word(context, builder, pointer, i):
    """The i-th word at a pointer into a table (i8*). For njit it is marked as constant. On a GPU the compiler would then
    keep all of them, in twice the registers that there are; there it loads them again, from shared memory."""
    value = builder.load(builder.bitcast(builder.gep(pointer, [_I64(i * WORD)]), _I64.as_pointer()))
    if not _for_gpu(context):
        value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


def _field(context, builder, tree, pointer, name):
    """A field of the tree at `pointer`: a pointer again, or an integer."""
    offset, kind = tree.fields[name]
    if isinstance(kind, types.Integer):
        return _load_word(context, builder, pointer, offset)
    return builder.gep(pointer, [_I64(offset * WORD)])


def element_pointer(context, builder, words, pointer, index_type, index):
    """Address of an element of the array of type `words` at `pointer`; the index is an integer or a tuple of them."""
    if isinstance(index_type, types.BaseTuple):
        indices, index_types = cgutils.unpack_tuple(builder, index, len(index_type)), list(index_type)
    else:
        indices, index_types = [index], [index_type]
    size = words.dtype.bitwidth // 8
    address = _load_word(context, builder, pointer, 0)
    for axis, (i, kind) in enumerate(zip(indices, index_types, strict=True)):
        inner = words.dense and axis == words.ndim - 1
        stride = _I64(size) if inner else _load_word(context, builder, pointer, 1 + axis)
        address = builder.add(address, builder.mul(context.cast(builder, i, kind, types.int64), stride))
    element = ir.IntType(8 * size)
    if not _for_gpu(context):
        return builder.inttoptr(address, element.as_pointer())
    place = builder.inttoptr(address, element.as_pointer(GLOBAL_MEMORY))  # then a load need not find out where it goes
    return builder.addrspacecast(place, element.as_pointer())


def is_words(array):
    """Whether a type is an array of integers, of a table or a plain one."""
    return isinstance(array, TableArrayType) or (isinstance(array, types.Array) and isinstance(array.dtype, types.Integer))


def word_pointer(utils, context, builder, signature, args):
    """Address of args[0][args[1]]: of a plain array or of a table's one; the index is an integer or a tuple of them. utils: the
    target's module cgutils."""
    array_type, index_type = signature.args[0], signature.args[1]
    if isinstance(array_type, TableArrayType):
        return element_pointer(context, builder, array_type, args[0], index_type, args[1])
    array = context.make_array(array_type)(context, builder, args[0])
    if isinstance(index_type, types.BaseTuple):
        indices, index_types = utils.unpack_tuple(builder, args[1], len(index_type)), list(index_type)
    else:
        indices, index_types = [args[1]], [index_type]
    indices = [context.cast(builder, i, t, types.intp) for i, t in zip(indices, index_types, strict=True)]
    return utils.get_item_pointer(context, builder, array_type, array, indices, wraparound=False)


def _type_getitem(args):
    words, index = args
    if isinstance(words, TableArrayType) and _fits(words, index):
        return signature(words.dtype, words, index)
    return None


def _type_setitem(args):
    words, index, value = args
    if isinstance(words, TableArrayType) and _fits(words, index) and isinstance(value, types.Integer | types.Boolean):
        return signature(types.none, words, index, value)
    return None


def _fits(words, index):
    kinds = list(index) if isinstance(index, types.BaseTuple) else [index]
    return len(kinds) == words.ndim and all(isinstance(kind, types.Integer) for kind in kinds)


def _type_field(tree, name):
    return tree.fields[name][1] if name in tree.fields else None


def _add_to_target(infer_global, infer_getattr, abstract: Any, attribute: Any, lower, lower_getattr_generic) -> None:
    """Typing and code of trees and words, for one target."""

    @infer_global(operator.getitem)
    class GetItem(abstract):
        key = operator.getitem

        def generic(self, args, kws):
            return _type_getitem(args)

    @infer_global(operator.setitem)
    class SetItem(abstract):
        key = operator.setitem

        def generic(self, args, kws):
            return _type_setitem(args)

    @infer_getattr
    class Fields(attribute):
        key = TableType

        def generic_resolve(self, typ, attr):
            return _type_field(typ, attr)

    @lower_getattr_generic(TableType)
    def get_field(context, builder, typ, value, attr):
        return _field(context, builder, typ, value, attr)

    @lower(operator.getitem, TableArrayType, types.Any)
    def get_item(context, builder, sig, args):
        words, index = sig.args
        return builder.load(element_pointer(context, builder, words, args[0], index, args[1]))

    @lower(operator.setitem, TableArrayType, types.Any, types.Any)
    def set_item(context, builder, sig, args):
        words, index, kind = sig.args
        place = element_pointer(context, builder, words, args[0], index, args[1])
        builder.store(context.cast(builder, args[2], kind, words.dtype), place)
        return context.get_dummy_value()


# ---- njit ---------------------------------------------------------------------------------------------------------------

register_model(TableType)(models.OpaqueModel)
register_model(TableArrayType)(models.OpaqueModel)
_add_to_target(infer_global, infer_getattr, AbstractTemplate, AttributeTemplate, lower_builtin, lower_getattr_generic)


class ArgumentTable:
    """A tree for njit functions: they take it as an argument, at the cost of one pointer.

    tree, strided: as of make_table; the arrays are kept alive.
    """

    def __init__(self, tree: Any, strided: bool = False) -> None:
        self.tree = tree
        self.kind, self.words = make_table(tree, strided)
        self.address = int(self.words.ctypes.data)


@typeof_impl.register(ArgumentTable)
def _type_of_table(table, context):
    return table.kind


@unbox(TableType)
def _unbox_table(typ, table, c):
    number = c.pyapi.object_getattr_string(table, "address")
    address = c.pyapi.long_as_longlong(number)
    c.pyapi.decref(number)
    return NativeValue(c.builder.inttoptr(address, cgutils.voidptr_t), is_error=c.pyapi.c_api_error())


# ---- CUDA ---------------------------------------------------------------------------------------------------------------


@cache
def register_cuda_tables() -> None:
    """Teach numba-cuda the same, once. Raises ImportError without numba-cuda."""
    from blinkpy.device.cuda.kernel_compiler import (
        AbstractTemplate,
        AttributeTemplate,
        core_models,
        lowering_registry,
        models,
        typing_registry,
    )

    models.register_model(TableType)(core_models.OpaqueModel)
    models.register_model(TableArrayType)(core_models.OpaqueModel)
    _add_to_target(
        typing_registry.register_global,
        typing_registry.register_attr,
        AbstractTemplate,
        AttributeTemplate,
        lowering_registry.lower,
        lowering_registry.lower_getattr_generic,
    )


def cuda_table_reader(kind: TableType) -> Callable[[Any], Any]:
    """A device function for kernels: takes the words of a table, an int64 array in any of the GPU's memories, and returns
    the tree. Shared memory is best: each access to an array of the tree looks there first."""
    from blinkpy.device.cuda.kernel_compiler import cgutils as cuda_cgutils
    from blinkpy.device.cuda.kernel_compiler import intrinsic as cuda_intrinsic

    register_cuda_tables()

    @cuda_intrinsic
    def read_tree(typing_context, words):
        def generate(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            return builder.bitcast(array.data, cuda_cgutils.voidptr_t)

        return kind(words), generate

    return read_tree
