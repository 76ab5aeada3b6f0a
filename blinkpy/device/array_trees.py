"""NamedTuples of arrays, such as State, as trees: their arrays mapped and named."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np


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
