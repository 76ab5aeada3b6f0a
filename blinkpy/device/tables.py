"""NamedTuples of arrays behind one pointer, for compiled device code.

The scheduler works on about ninety arrays. As arguments, every call would copy about 700 words. This would cost most of the
compile time, add 12 us to each call from Python, and exceed a kernel's 4 KB of parameters. So compiled code receives a *table*:
the integers of the tree, and address and strides of its arrays, one int64 word each. Trees, nested trees and arrays are pointers
into the table: `tree.field` advances the pointer, and `array[i]` loads the address there. Device code is the same for
both: `state.requests.length[slot]` reads a tuple of arrays in plain Python, or a table.

Indices are not checked and must not be negative. A table must not change while it is in use.
"""

import math
import operator
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import builtin_registry as lowering_registry
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, signature
from numba.core.typing.templates import builtin_registry as typing_registry
from numba.extending import NativeValue, models, register_model, typeof_impl, unbox
from numpy.typing import NDArray


class TableArrayType(types.Type):
    """Numba's type of a table's array: integers of 32 or 64 bits. dense: C-contiguous; otherwise with any
    strides.
    """

    def __init__(self, dtype: types.Integer, ndim: int, dense: bool) -> None:
        self.dtype = dtype
        self.ndim = ndim
        self.dense = dense
        super().__init__(name=f"Words({dtype}, {ndim}, {'dense' if dense else 'strided'})")


class TableType(types.Type):
    """Numba's type of a table or of a nested part. fields: (name, word offset, type) in order."""

    def __init__(self, name: str, fields: tuple[tuple[str, int, types.Type], ...]) -> None:
        self.fields = {field: (offset, kind) for field, offset, kind in fields}
        listed = ", ".join(f"{field}@{offset}: {kind}" for field, offset, kind in fields)
        self._key = f"{name}({listed})"
        super().__init__(name=f"Tree({name}, {zlib.crc32(self._key.encode()):08x})")

    @property
    def key(self) -> str:
        return self._key


# Cached, because Numba builds and looks up a type's name each time, and a simulation makes a hundred tables
# per world.


@cache
def _array_type(itemsize: int, ndim: int, dense: bool) -> TableArrayType:
    return TableArrayType(types.int64 if itemsize == 8 else types.int32, ndim, dense)


@cache
def _table_type(name: str, fields: tuple[tuple[str, int, types.Type], ...]) -> TableType:
    return TableType(name, fields)


def array_properties(array: Any) -> tuple[int, np.dtype, tuple[int, ...], tuple[int, ...]]:
    """(address, dtype, shape, strides in bytes) of a NumPy array, or of any object with
    __cuda_array_interface__ (torch tensors, Numba device arrays).
    """
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    strides = interface.get("strides") or dense_strides(shape, dtype.itemsize)
    return int(interface["data"][0]), dtype, shape, tuple(strides)


def dense_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) * itemsize for i in range(len(shape)))


def make_table(tree: Any, strided: bool = False, strided_parts: tuple[str, ...] = ()) -> tuple[TableType, NDArray[np.int64]]:
    """The type of a tree of integers, int32 and int64 arrays, and its table. The arrays must outlive the table.

    strided: treat all arrays as strided, so that the type does not depend on sizes.
    strided_parts: names of nested tuples whose arrays are strided; all other arrays must be contiguous.

    Raises TypeError for values that a table can't hold.
    """
    words: list[int] = []

    def add(node: Any, strided: bool) -> TableType:
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
                address, dtype, shape, strides = array_properties(item)
                if dtype not in (np.int32, np.int64):
                    raise TypeError(f"{name} has dtype {dtype}; tables hold int32 and int64 arrays")
                if not strided and strides != dense_strides(shape, dtype.itemsize):
                    raise TypeError(f"{name} is not contiguous")
                words.extend((address, *strides))
                fields.append((name, offset, _array_type(dtype.itemsize, len(shape), not strided)))
        return _table_type(type(node).__name__, tuple(fields))

    return add(tree, strided), np.array(words, np.int64)


# NamedTuples of arrays, such as State, as trees: their arrays mapped and named.


def map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    """Apply a function to each array of nested NamedTuples: for copies, memoryviews, or arrays on a GPU."""
    if isinstance(tree, tuple):
        return type(tree)(*(map_arrays(function, item) for item in tree))
    return function(tree)


def map_named_arrays(function: Callable[[str, Any], Any], tree: Any, name: str = "") -> Any:
    """map_arrays with function(name, array); names as in named_arrays."""
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        inner = zip(tree._fields, tree, strict=True)
        return type(tree)(*(map_named_arrays(function, item, f"{name}.{field}" if name else field) for field, item in inner))
    return function(name, tree)


def as_memoryviews(tree: Any) -> Any:
    """NumPy arrays as memoryviews, for plain Python. Elements are Python integers, which don't overflow, and
    a value that does not fit its array raises an error.
    """
    return map_arrays(lambda array: np.asarray(array).data, tree)


def named_arrays(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("requests.status", array) for every array of a state, in order."""
    for name, item in zip(tree._fields, tree, strict=True):
        if isinstance(item, tuple):
            yield from named_arrays(item, f"{prefix}{name}.")
        else:
            yield prefix + name, item


# Numba's code generation for device/tables.py: reading fields, loading and storing elements. Registered for
# njit on import, for CUDA on request.

WORD = 8  # bytes
GLOBAL_MEMORY = 1  # an address space of NVVM
_I64 = ir.IntType(64)


# ---- code for both targets ----------------------------------------------------------------------------------------------


def _for_gpu(context):
    """Whether the code is for CUDA. Needed because numba-cuda also uses lowerings registered for njit."""
    return type(context).__name__ == "CUDATargetContext"


def _load_word(context, builder, pointer, i):
    """The i-th word at a pointer into a table (i8*). For njit it is marked as constant. On a GPU, that mark would make the
    compiler keep all words in registers, twice as many as exist. Without the mark, the compiler reloads words from shared memory.
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
    place = builder.inttoptr(address, element.as_pointer(GLOBAL_MEMORY))  # so that loads know the address space
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
    """Register tables for numba-cuda, once. Raises ImportError without numba-cuda."""
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
