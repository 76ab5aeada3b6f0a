"""NamedTuples of arrays behind one pointer, for compiled device code.

The scheduler works on about ninety arrays. As arguments, about 700 words would be copied through every call.
This would cost most of the compile time and 12 us in every call from Python, and exceed a kernel's 4 KB of
parameters. So compiled code gets them as a *table*: the integers of the tree, and address and strides of its
arrays, one int64 word each. Trees, nested trees and arrays are pointers into the table: `tree.field` advances
the pointer, and `array[i]` loads the address there. Device code is the same for both:
`state.requests.length[slot]` reads a tuple of arrays in plain Python, or a table.

Indices are not checked and must not be negative. A table must not change while it is in use.
"""

import math
import zlib
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray


class TableArrayType(types.Type):
    """Numba's type of a table's array: integers of 32 or 64 bits. dense: C-contiguous; otherwise with any
    strides.
    """

    def __init__(self, dtype: types.Integer, ndim: int, dense: bool) -> None:
        self.dtype, self.ndim, self.dense = dtype, ndim, dense
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

    strided: treat all arrays as strided, so that the type does not depend on their sizes.
    strided_parts: treat only arrays in the nested tuples of these names as strided; others must be contiguous.

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
