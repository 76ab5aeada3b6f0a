"""The cache key of a policy's compiled code: a digest of all values that Numba compiles into it.

At compile time, Numba takes the values of globals, closure variables and attributes of other modules. So the digest hashes all of
these by value. For library code, the package's version is hashed.
"""

import hashlib
import sys
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
from numba import types
from numba.core.dispatcher import Dispatcher

PLAIN = (int, float, complex, str, bytes, bool, type(None), type(Ellipsis))
LIBRARIES = frozenset(("numpy", "numba", *sys.stdlib_module_names))


class _UnknownError(Exception):
    """A value that can't be compared."""


def policy_digest(policy: Callable[..., Any]) -> str | None:
    """A digest of a policy's code and of the values that it uses, equal in all processes. None if a value can't be compared; then
    the compiled code must not be cached.
    """
    digest = hashlib.sha256()
    try:
        for part in _parts(policy, {}):
            digest.update(part.encode() + b"\0")
    except _UnknownError:
        return None
    return digest.hexdigest()


def _parts(value: Any, seen: dict[int, int]) -> Iterator[str]:
    """The parts of a value as texts. seen: by id, a number for each visited function and module."""
    if isinstance(value, Dispatcher):  # a function that Numba has wrapped
        yield f"njit {sorted(value.targetoptions.items())}"
        value = value.py_func
    if isinstance(value, PLAIN):
        yield f"{type(value).__name__} {value!r}"
    elif isinstance(value, np.ndarray | np.generic):
        array = np.asarray(value)
        if array.dtype.hasobject:
            raise _UnknownError
        yield f"array {array.dtype.descr} {array.shape} {array.flags.c_contiguous} {array.tobytes().hex()}"
    elif isinstance(value, tuple | list | frozenset):
        yield f"{type(value).__module__} {type(value).__qualname__} {len(value)}"
        for item in sorted(value, key=repr) if isinstance(value, frozenset) else value:
            yield from _parts(item, seen)
    elif isinstance(value, types.Type):
        yield f"numba {value!r}"
    elif library := _library(value):
        yield library
    elif id(value) in seen:
        yield f"again {seen[id(value)]}"
    elif isinstance(value, FunctionType):
        seen[id(value)] = len(seen)
        yield from _function(value, seen)
    else:
        raise _UnknownError


def _library(value: Any) -> str:
    """The name and version of a library's module, class or function; "" for anything else."""
    if not isinstance(value, ModuleType | type | FunctionType | BuiltinFunctionType | np.ufunc):
        return ""
    if isinstance(value, np.ufunc):
        module = "numpy"  # older ufuncs have no module attribute
    else:
        # a method of a value has no module
        module = value.__name__ if isinstance(value, ModuleType) else value.__module__ or ""
    package = module.partition(".")[0]
    if package not in LIBRARIES:
        return ""
    version = getattr(sys.modules.get(package), "__version__", sys.version)
    return f"library {module} {getattr(value, '__qualname__', value.__name__)} {version}"


def _function(function: FunctionType, seen: dict[int, int]) -> Iterator[str]:
    """A function's code, defaults, and the values of all names in its code."""
    yield from _code(function.__code__)
    yield from _parts(function.__defaults__ or (), seen)
    for cell in function.__closure__ or ():
        try:
            content = cell.cell_contents
        except ValueError as error:  # an empty cell
            raise _UnknownError from error
        yield from _parts(content, seen)
    names = sorted(set(_names(function.__code__)))
    for name in names:
        if name in function.__globals__:
            yield f"global {name}"
            yield from _global(function.__globals__[name], names, seen)


def _global(value: Any, names: list[str], seen: dict[int, int]) -> Iterator[str]:
    """The parts of a global. For a module that is not a library: its attributes in `names`."""
    if not isinstance(value, ModuleType) or _library(value):
        yield from _parts(value, seen)
    elif id(value) in seen:
        yield f"again {seen[id(value)]}"
    else:
        seen[id(value)] = len(seen)
        for name in names:
            if hasattr(value, name):
                yield f"attribute {name}"
                yield from _global(getattr(value, name), names, seen)


def _code(code: CodeType) -> Iterator[str]:
    yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {code.co_cellvars}"
    yield f"lines {[line for _, _, line in code.co_lines()]}"  # because faults name the lines
    yield f"flags {code.co_flags} {code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount}"
    for constant in code.co_consts:
        yield from _code(constant) if isinstance(constant, CodeType) else _parts(constant, {})


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in a code object and its nested code objects."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
