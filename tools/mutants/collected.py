"""A pytest session that has imported all tests and runs none. It forks for each mutant, and the child runs
some tests.

In the child, the mutant replaces the code of its function wherever the function was imported. Nothing is
imported or compiled again. A function that was called during the imports can't be changed in this way.
Triton's interpreter reads a function's text at the first call.
"""

import gc
import importlib
import sys
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest

from mutants.processes import forks
from mutants.session import FLAGS, Change, Chosen, Planted, prepare

UNCHANGED = "this process can't have the change"
_session: list[pytest.Session] = []  # that of this process


def serve_tests(path: str, files: list[str], seed: int, folder: str) -> None:
    """Import these test files, and fork for each connection to the path. Returns only if they can't be
    imported.
    """
    prepare(seed, folder)
    pytest.main([*FLAGS, *files], [_Serving(path)])


class _Serving:
    def __init__(self, path: str) -> None:
        self._path = path

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        _session.append(session)
        gc.freeze()  # exclude objects that all children share from garbage collection
        forks(self._path)
        return True


def run_collected(tests: dict[str, float], change: Change, function: str) -> str:
    """Run session.run_tests in a child of serve_tests, or return UNCHANGED.

    function: qualified name of the changed function.
    """
    session = _session[0]
    try:
        plant(change, function)
    except LookupError:
        return UNCHANGED
    chosen = Chosen(tests)
    session.config.pluginmanager.register(chosen)
    chosen.pytest_collection_modifyitems(session.items)
    for item, following in zip(session.items, [*session.items[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if chosen.failed:
            break
    return next(iter(chosen.failed.values()), "")


def plant(change: Change, function: str) -> None:
    """Give a function of this process its code in the changed text. Raises LookupError if that is
    impossible.
    """
    planted = Planted(change)
    sys.meta_path.insert(0, planted)  # for later imports
    module = sys.modules.get(change.module)
    if module is None:
        return
    live, code = live_function(module, function, change.file), _code_of(planted.get_code(change.module), function)
    if live.__code__.co_freevars != code.co_freevars:
        raise LookupError(f"{function} has other variables of its surroundings")
    portable = importlib.import_module("blinkpy.device.portable")
    for name in ("load_relaxed", "store_relaxed"):  # of mutants, which the module may not import
        vars(module).setdefault(name, getattr(portable, name))
    vars(module)["__loader__"] = planted  # lanes are made of its text
    live.__code__ = code


def live_function(module: Any, function: str, file: Path) -> FunctionType:
    """A function or method of a module, without what is wrapped around it. Raises LookupError."""
    *owners, name = function.split(".")
    found: Any = module
    for owner in owners:
        found = vars(found).get(owner)
    found = vars(found).get(name) if found is not None else None
    while not isinstance(found, FunctionType) or found.__code__.co_filename != str(file):
        names = ("fn",) if type(found).__name__ == "InterpretedFunction" else ("__func__", "fget", "__wrapped__")
        found = next((inner for name in names if (inner := getattr(found, name, None))), None)
        if found is None:
            raise LookupError(f"{function} of {module.__name__} is not a plain function")
    if found.__code__.co_qualname != function:
        raise LookupError(f"{function} of {module.__name__} is {found.__code__.co_qualname}")
    return found


def _code_of(code: CodeType, function: str) -> CodeType:
    """The code of a function within that of its module. Raises LookupError unless there is one."""
    found = [c for c in code.co_consts if isinstance(c, CodeType)]
    found += [inner for c in found for inner in c.co_consts if isinstance(inner, CodeType)]  # methods
    named = [c for c in found if c.co_qualname == function]
    if len(named) != 1:
        raise LookupError(f"the changed text has {len(named)} of {function}")
    return named[0]
