"""Numba's code generation for device/tables.py: reading fields, loading and storing elements. Registered for
njit on import, for CUDA on request.
"""

import operator
from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import builtin_registry as lowering_registry
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, signature
from numba.core.typing.templates import builtin_registry as typing_registry
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox

from blinkpy.device.tables import TableArrayType, TableType, make_table

WORD = 8  # bytes
GLOBAL_MEMORY = 1  # an address space of NVVM
_I64 = ir.IntType(64)


# ---- code for both targets ----------------------------------------------------------------------------------------------


def _for_gpu(context):
    """Whether the code is for CUDA. Needed because numba-cuda also uses lowerings registered for njit."""
    return type(context).__name__ == "CUDATargetContext"


def _load_word(context, builder, pointer, i):
    """The i-th word at a pointer into a table (i8*). For njit it is marked as constant. On a GPU this would
    make the compiler keep all words in registers, twice as many as exist, so it reloads them from shared
    memory instead.
    """
    value = builder.load(builder.bitcast(builder.gep(pointer, [_I64(i * WORD)]), _I64.as_pointer()))
    if not _for_gpu(context):
        value.set_metadata("invariant.load", builder.module.add_metadata([]))
    return value


def _indices(context, builder, index_type, index):
    """An index, an integer or a tuple of them, as a list of int64."""
    if not isinstance(index_type, types.BaseTuple):
        return [context.cast(builder, index, index_type, types.int64)]
    indices = cgutils.unpack_tuple(builder, index, len(index_type))
    return [context.cast(builder, i, kind, types.int64) for i, kind in zip(indices, index_type, strict=True)]


def _element_pointer(context, builder, words, pointer, indices):
    """Address of an element of the array of type `words` at `pointer`."""
    size = words.dtype.bitwidth // 8
    address = _load_word(context, builder, pointer, 0)
    for axis, index in enumerate(indices):
        inner = words.dense and axis == words.ndim - 1
        stride = _I64(size) if inner else _load_word(context, builder, pointer, 1 + axis)
        address = builder.add(address, builder.mul(index, stride))
    element = ir.IntType(8 * size)
    if not _for_gpu(context):
        return builder.inttoptr(address, element.as_pointer())
    place = builder.inttoptr(address, element.as_pointer(GLOBAL_MEMORY))  # so that a load knows its address space
    return builder.addrspacecast(place, element.as_pointer())


def word_pointer(context, builder, signature, args):
    """Address of args[0][args[1]] in a plain array or a table's array. The index is an integer or a tuple of
    integers.
    """
    array_type, index_type, *_ = signature.args
    indices = _indices(context, builder, index_type, args[1])
    if isinstance(array_type, TableArrayType):
        return _element_pointer(context, builder, array_type, args[0], indices)
    array = context.make_array(array_type)(context, builder, args[0])
    return cgutils.get_item_pointer(context, builder, array_type, array, indices)


def is_words(array):
    """Whether a type is an array of integers, plain or of a table."""
    return isinstance(array, TableArrayType) or (isinstance(array, types.Array) and isinstance(array.dtype, types.Integer))


def _fits(words, index):
    """Whether an index is valid for a table's array: one integer per axis."""
    kinds = list(index) if isinstance(index, types.BaseTuple) else [index]
    return isinstance(words, TableArrayType) and len(kinds) == words.ndim and all(isinstance(k, types.Integer) for k in kinds)


def _add_to_target(typing_registry, lowering_registry, abstract: Any, attribute: Any) -> None:
    """Register typing and code of trees and words for one target."""

    @typing_registry.register_global(operator.getitem)
    class GetItem(abstract):
        key = operator.getitem

        def generic(self, args, kws):
            words, index = args
            return signature(words.dtype, words, index) if _fits(words, index) else None

    @typing_registry.register_global(operator.setitem)
    class SetItem(abstract):
        key = operator.setitem

        def generic(self, args, kws):
            words, index, value = args
            fits = _fits(words, index) and isinstance(value, types.Integer | types.Boolean)
            return signature(types.none, words, index, value) if fits else None

    @typing_registry.register_attr
    class Fields(attribute):
        key = TableType

        def generic_resolve(self, typ, attr):
            return typ.fields[attr][1] if attr in typ.fields else None

    @lowering_registry.lower_getattr_generic(TableType)
    def get_field(context, builder, typ, value, attr):
        """A field of a table: a pointer for a nested part, or an integer."""
        offset, kind = typ.fields[attr]
        if isinstance(kind, types.Integer):
            return _load_word(context, builder, value, offset)
        return builder.gep(value, [_I64(offset * WORD)])

    @lowering_registry.lower(operator.getitem, TableArrayType, types.Any)
    def get_item(context, builder, sig, args):
        return builder.load(word_pointer(context, builder, sig, args))

    @lowering_registry.lower(operator.setitem, TableArrayType, types.Any, types.Any)
    def set_item(context, builder, sig, args):
        place = word_pointer(context, builder, sig, args)
        builder.store(context.cast(builder, args[2], sig.args[2], sig.args[0].dtype), place)
        return context.get_dummy_value()


# ---- njit ---------------------------------------------------------------------------------------------------------------

register_model(TableType)(models.OpaqueModel)
register_model(TableArrayType)(models.OpaqueModel)
_add_to_target(typing_registry, lowering_registry, AbstractTemplate, AttributeTemplate)


class ArgumentTable:
    """A tree as one pointer argument of njit functions. It keeps the arrays alive. tree, strided: as for
    make_table.
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
    """Register the same for numba-cuda, once. Raises ImportError without numba-cuda."""
    from blinkpy.device.cuda import kernel_compiler as cuda

    cuda.models.register_model(TableType)(cuda.core_models.OpaqueModel)
    cuda.models.register_model(TableArrayType)(cuda.core_models.OpaqueModel)
    _add_to_target(cuda.typing_registry, cuda.lowering_registry, cuda.AbstractTemplate, cuda.AttributeTemplate)


def cuda_table_reader(kind: TableType) -> Callable[[Any], Any]:
    """A device function for kernels: it takes the words of a table, an int64 array in any of the GPU's
    memories, and returns the tree. Shared memory is fastest, because each access to an array first reads the
    table.
    """
    from blinkpy.device.cuda.kernel_compiler import intrinsic

    register_cuda_tables()

    @intrinsic
    def read_tree(typing_context, words):
        def generate(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            return builder.bitcast(array.data, cgutils.voidptr_t)

        return kind(words), generate

    return read_tree
