"""NamedTuples of arrays behind one pointer, for compiled device code.

The scheduler works on some ninety arrays. As arguments they would be copied through every call (some 700 words), which
costs most of the compile time, 12 us in every call from Python, and more than the 4 KB that a kernel's parameters may
have. So compiled code gets them as a *table*: the integers of the tree, and address, shape and strides of its arrays, one
int64 word each. `tree.field` then loads from the table, and a nested tuple is the same pointer with an offset. The device
code can't tell: it reads `state.requests.length[slot]` from tuples, in plain Python, and from a table alike.

A table must not change while it is in use; loads from it are marked as invariant.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import (
    NativeValue,
    infer_getattr,
    lower_getattr_generic,
    models,
    register_model,
    typeof_impl,
    unbox,
)
from numba.core.typing.templates import AttributeTemplate
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

WORD = 8  # bytes


class TreeType(types.Type):
    """Numba's type of a table, or of a nested part of one. fields: (name, word offset, type) in order."""

    def __init__(self, name: str, fields: tuple[tuple[str, int, types.Type], ...]) -> None:
        self.fields = {field: (offset, kind) for field, offset, kind in fields}
        listed = ", ".join(f"{field}@{offset}: {kind}" for field, offset, kind in fields)
        self._key = f"{name}({listed})"
        super().__init__(name=f"Tree[{name}, {zlib.crc32(self._key.encode()):08x}]")

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
        start, fields = len(words), []
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
                words.extend((facts.address, *facts.shape, *facts.strides))
                fields.append((name, offset, types.Array(element, len(facts.shape), "A" if strided else "C")))
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


@typeof_impl.register(Table)
def _type_of_table(table, context):
    return table.kind


@unbox(TreeType)
def _unbox_table(typ, table, c):
    number = c.pyapi.object_getattr_string(table, "address")
    address = c.pyapi.long_as_longlong(number)
    c.pyapi.decref(number)
    return NativeValue(c.builder.inttoptr(address, cgutils.voidptr_t), is_error=c.pyapi.c_api_error())


# ---- attributes ---------------------------------------------------------------------------------------------------------


def _load_field(context, builder, tree, pointer, name, space):
    """Code that loads a field of the tree at `pointer` (i8*). space: LLVM address space of the arrays."""
    i64 = ir.IntType(64)
    offset, kind = tree.fields[name]
    here = builder.gep(pointer, [i64(offset * WORD)])
    if isinstance(kind, TreeType):
        return here

    def word(i):
        address = builder.bitcast(builder.gep(here, [i64(i * WORD)]), i64.as_pointer())
        value = builder.load(address)
        value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return value

    if isinstance(kind, types.Integer):
        return word(0)
    array = context.make_array(kind)(context, builder)
    element = context.get_data_type(kind.dtype)
    data = builder.inttoptr(word(0), element.as_pointer(space))
    if space:
        data = builder.addrspacecast(data, element.as_pointer())
    populate_array(
        array,
        data=data,
        shape=[word(1 + i) for i in range(kind.ndim)],
        strides=[word(1 + kind.ndim + i) for i in range(kind.ndim)],
        itemsize=kind.dtype.bitwidth // 8,
        meminfo=None,
    )
    return array._getvalue()


register_model(TreeType)(models.OpaqueModel)


@infer_getattr
class _TreeAttributes(AttributeTemplate):
    key = TreeType

    def generic_resolve(self, typ, attr):
        return typ.fields[attr][1] if attr in typ.fields else None


@lower_getattr_generic(TreeType)
def _lower_attribute(context, builder, typ, value, attr):
    return _load_field(context, builder, typ, value, attr, 0)


# ---- CUDA ---------------------------------------------------------------------------------------------------------------

_GLOBAL_MEMORY = 1  # NVVM's address space
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
    from numba.cuda.typing.templates import AttributeTemplate as CudaAttributeTemplate

    cuda_models.register_model(TreeType)(core_models.OpaqueModel)

    @typing_registry.register_attr
    class _CudaTreeAttributes(CudaAttributeTemplate):
        key = TreeType

        def generic_resolve(self, typ, attr):
            return typ.fields[attr][1] if attr in typ.fields else None

    @lowering_registry.lower_getattr_generic(TreeType)
    def _lower_cuda_attribute(context, builder, typ, value, attr):
        return _load_field(context, builder, typ, value, attr, _GLOBAL_MEMORY)

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
