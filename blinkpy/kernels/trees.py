"""NamedTuples of arrays behind one pointer, for compiled device code.

The scheduler works on some ninety arrays. As arguments they would be copied through every call (some 700 words), which
costs most of the compile time, 12 us in every call from Python, and more than the 4 KB that a kernel's parameters may
have. So compiled code gets them as a *table*: the integers of the tree, and address and strides of its arrays, one int64
word each. A tree, a nested tree and an array are all a pointer into the table; `tree.field` moves it, and `array[i]` loads
the address there. The device code can't tell: it reads `state.requests.length[slot]` from tuples and arrays, in plain
Python, and from a table alike.

Indices are taken as they are: not negative, not checked. A table must not change while it is in use.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
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
from numpy.typing import NDArray

WORD = 8  # bytes
_I64 = ir.IntType(64)
GLOBAL_MEMORY = 1  # an address space of NVVM


class WordsType(types.Type):
    """Numba's type of an array of a table: integers of 32 or 64 bits. dense: C-contiguous, else with any strides."""

    def __init__(self, dtype: types.Integer, ndim: int, dense: bool) -> None:
        self.dtype, self.ndim, self.dense = dtype, ndim, dense
        super().__init__(name=f"Words({dtype}, {ndim}, {'dense' if dense else 'strided'})")


class TreeType(types.Type):
    """Numba's type of a table, or of a nested part of one. fields: (name, word offset, type) in order."""

    def __init__(self, name: str, fields: tuple[tuple[str, int, types.Type], ...]) -> None:
        self.fields = {field: (offset, kind) for field, offset, kind in fields}
        listed = ", ".join(f"{field}@{offset}: {kind}" for field, offset, kind in fields)
        self._key = f"{name}({listed})"
        super().__init__(name=f"Tree({name}, {zlib.crc32(self._key.encode()):08x})")

    @property
    def key(self) -> str:
        return self._key


class ArrayFacts(NamedTuple):
    """What a table says about an array, from its (CUDA) array interface."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # bytes
    dtype: np.dtype


def array_facts(array: Any) -> ArrayFacts:
    """Of a NumPy array, or of anything with __cuda_array_interface__ (torch tensors, Numba device arrays)."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides")
    if strides is None:
        strides = dense_strides(shape, dtype.itemsize)
    return ArrayFacts(int(interface["data"][0]), shape, tuple(strides), dtype)


def dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :], dtype=np.int64)) * itemsize for i in range(len(shape)))


def tree_table(tree: Any, strided: bool = False, strided_parts: tuple[str, ...] = ()) -> tuple[TreeType, NDArray[np.int64]]:
    """The type of a tree of integers, int32 and int64 arrays, and its table. The arrays must outlive the table.

    strided: take all arrays for strided ones, so that the type does not depend on their sizes; strided_parts: only those
    in the nested tuples of these names. Others must be contiguous. Raises TypeError for what a table can't hold.
    """
    words: list[int] = []

    def add(node: Any, strided: bool) -> TreeType:
        start = len(words)
        fields: list[tuple[str, int, types.Type]] = []
        for name, item in zip(node._fields, node, strict=True):
            offset = len(words) - start
            if isinstance(item, tuple):
                fields.append((name, offset, add(item, strided or name in strided_parts)))
            elif isinstance(item, int):
                words.append(item)
                fields.append((name, offset, types.int64))
            else:
                facts = array_facts(item)
                if facts.dtype not in (np.int32, np.int64):
                    raise TypeError(f"{name} has dtype {facts.dtype}; tables hold int32 and int64 arrays")
                if not strided and facts.strides != dense_strides(facts.shape, facts.dtype.itemsize):
                    raise TypeError(f"{name} is not contiguous")
                element = types.int64 if facts.dtype == np.int64 else types.int32
                words.extend((facts.address, *facts.strides))
                fields.append((name, offset, WordsType(element, len(facts.shape), not strided)))
        return TreeType(type(node).__name__, tuple(fields))

    return add(tree, strided), np.array(words, np.int64)


class Table:
    """A tree for njit functions: they take it as an argument, at the cost of one pointer.

    tree, strided: as of tree_table; the arrays are kept alive.
    """

    def __init__(self, tree: Any, strided: bool = False) -> None:
        self.tree = tree
        self.kind, self.words = tree_table(tree, strided)
        self.address = int(self.words.ctypes.data)


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


def _type_getitem(args):
    words, index = args
    if isinstance(words, WordsType) and _fits(words, index):
        return signature(words.dtype, words, index)
    return None


def _type_setitem(args):
    words, index, value = args
    if isinstance(words, WordsType) and _fits(words, index) and isinstance(value, types.Integer | types.Boolean):
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
        key = TreeType

        def generic_resolve(self, typ, attr):
            return _type_field(typ, attr)

    @lower_getattr_generic(TreeType)
    def get_field(context, builder, typ, value, attr):
        return _field(context, builder, typ, value, attr)

    @lower(operator.getitem, WordsType, types.Any)
    def get_item(context, builder, sig, args):
        words, index = sig.args
        return builder.load(element_pointer(context, builder, words, args[0], index, args[1]))

    @lower(operator.setitem, WordsType, types.Any, types.Any)
    def set_item(context, builder, sig, args):
        words, index, kind = sig.args
        place = element_pointer(context, builder, words, args[0], index, args[1])
        builder.store(context.cast(builder, args[2], kind, words.dtype), place)
        return context.get_dummy_value()


# ---- njit ---------------------------------------------------------------------------------------------------------------

register_model(TreeType)(models.OpaqueModel)
register_model(WordsType)(models.OpaqueModel)
_add_to_target(infer_global, infer_getattr, AbstractTemplate, AttributeTemplate, lower_builtin, lower_getattr_generic)


@typeof_impl.register(Table)
def _type_of_table(table, context):
    return table.kind


@unbox(TreeType)
def _unbox_table(typ, table, c):
    number = c.pyapi.object_getattr_string(table, "address")
    address = c.pyapi.long_as_longlong(number)
    c.pyapi.decref(number)
    return NativeValue(c.builder.inttoptr(address, cgutils.voidptr_t), is_error=c.pyapi.c_api_error())


# ---- CUDA ---------------------------------------------------------------------------------------------------------------

_cuda_registered = False


def register_cuda_trees() -> None:
    """Teach numba-cuda the same, once. Raises ImportError without numba-cuda."""
    global _cuda_registered
    if _cuda_registered:
        return
    from numba.cuda import models as cuda_models
    from numba.cuda.cudadecl import registry as typing_registry
    from numba.cuda.cudaimpl import registry as lowering_registry
    from numba.cuda.extending import core_models
    from numba.cuda.typing.templates import AbstractTemplate as CudaAbstractTemplate
    from numba.cuda.typing.templates import AttributeTemplate as CudaAttributeTemplate

    cuda_models.register_model(TreeType)(core_models.OpaqueModel)
    cuda_models.register_model(WordsType)(core_models.OpaqueModel)
    _add_to_target(
        typing_registry.register_global,
        typing_registry.register_attr,
        CudaAbstractTemplate,
        CudaAttributeTemplate,
        lowering_registry.lower,
        lowering_registry.lower_getattr_generic,
    )
    _cuda_registered = True


def cuda_tree_reader(kind: TreeType) -> Callable[[Any], Any]:
    """A device function for kernels: takes the words of a table, an int64 array in any of the GPU's memories, and returns
    the tree. Shared memory is best: each access to an array of the tree looks there first."""
    register_cuda_trees()
    from numba.cuda import cgutils as cuda_cgutils
    from numba.cuda.extending import intrinsic as cuda_intrinsic

    @cuda_intrinsic
    def read_tree(typing_context, words):
        def generate(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            return builder.bitcast(array.data, cuda_cgutils.voidptr_t)

        return kind(words), generate

    return read_tree
