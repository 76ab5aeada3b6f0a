"""NamedTuples of arrays, such as State, as trees: their arrays mapped, named, copied and compared."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv.state import State


def map_arrays(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same NamedTuples with function(array) in place of each array: copies, memoryviews, arrays on a GPU."""
    if isinstance(tree, tuple):
        return type(tree)(*(map_arrays(function, item) for item in tree))
    return function(tree)


def plain(tree: Any) -> Any:
    """NumPy arrays as memoryviews, for plain Python: elements are Python integers, which don't overflow, and a value that
    doesn't fit its array is an error."""
    return map_arrays(lambda array: np.asarray(array).data, tree)


def named_arrays(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """("requests.status", array) for every array of a state, in order."""
    for name, item in zip(tree._fields, tree, strict=True):
        if isinstance(item, tuple):
            yield from named_arrays(item, f"{prefix}{name}.")
        else:
            yield prefix + name, item


def snapshot(state: State) -> dict[str, NDArray[Any]]:
    """Copies of all arrays that must not depend on how schedule() was executed: everything but the scratch memory."""
    return {name: np.array(array) for name, array in named_arrays(state) if not name.startswith("scratch.")}


def differences(a: dict[str, NDArray[Any]], b: dict[str, NDArray[Any]]) -> list[str]:
    """Where two snapshots differ, one line for each array: its name, the first index and both values."""
    lines = []
    for name in a:
        where = np.argwhere(a[name] != b[name])
        if len(where):
            index = tuple(int(i) for i in where[0])
            lines.append(f"{name}{list(index)}: {a[name][index]} != {b[name][index]} ({len(where)} differ)")
    return lines
