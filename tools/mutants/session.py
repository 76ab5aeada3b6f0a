"""A pytest session in a process that has imported nothing of the package: with a mutant, or to trace the
lines of each test.

This module imports nothing of the package either, because the fork server imports it.
"""

import importlib.util
import linecache
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.endless_calls import EndlessCallError

TEST_S = 15.0  # of the processor; a test that takes longer in plain Python, while its lines are noted, is left out
FLAGS = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=line", "-o", "timeout=0"]
IMPORTS = "import "


class Change(NamedTuple):
    """The text of a module that replaces its file's."""

    module: str
    file: Path
    source: str


class Reached(NamedTuple):
    """The measurement of tests without a mutant.

    seconds: CPU time.
    lines: (source file, line, what reaches it): tests; a test file for its fixtures; IMPORTS and a test file
        for its imports.
    """

    seconds: dict[str, float]
    left_out: dict[str, str]
    lines: list[tuple[str, int, list[str]]]


def run_tests(tests: dict[str, float], change: Change, seed: int, folder: str) -> str:
    """The output of the first failing test, in this order; "" if all pass.

    tests: with the maximum seconds of processor time; a test that needs more fails.
    folder: for files of the tests.
    """
    prepare(seed, folder)
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, Planted(change))
    plugin = Chosen(tests)
    code = pytest.main([*FLAGS, "-x", *dict.fromkeys(test.partition("::")[0] for test in tests)], [plugin])
    nothing = code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    return next(iter(plugin.failed.values()), "" if nothing else f"pytest ends with {code}")


def trace_tests(file: str, traced: list[str], seed: int, folder: str) -> Reached:
    """The lines that each test of a file reaches. traced: source files."""
    prepare(seed, folder)
    plugin = _Traced(file, tracer(traced))
    pytest.main([*FLAGS, file], [plugin])
    return plugin.reached()


def tracer(files: list[str]) -> Any:
    """coverage.py over source files. Imported late, because a run with a complete cache does not need it."""
    return importlib.import_module("coverage").Coverage(data_file=None, include=files, config_file=False)


def prepare(seed: int, folder: str) -> None:
    """Set a new temporary folder, and replace compiled device code by plain Python, because compiling takes
    longer than all tests.
    """
    tempfile.tempdir = folder
    os.environ |= {"TMPDIR": folder, "HYPOTHESIS_STORAGE_DIRECTORY": folder, "BLINKPY_SEED": str(seed), "TRITON_INTERPRET": "1"}
    compile_cache: Any = importlib.import_module("blinkpy.device.compile_cache")
    map_arrays = importlib.import_module("blinkpy.device.tables").map_arrays

    def plain(argument: Any) -> Any:
        tree = getattr(argument, "tree", argument)  # of an ArgumentTable
        return map_arrays(lambda item: item if isinstance(item, int) else np.asarray(item).data, tree)

    compile_cache.cached_njit = lambda function, key=None, **options: function
    compile_cache.compiled_for = lambda function, kinds: lambda *arguments: function(*map(plain, arguments))


class Planted(SourceFileLoader):
    """Finds and loads one module with a changed text."""

    def __init__(self, change: Change) -> None:
        super().__init__(change.module, str(change.file))
        self._source = change.source
        linecache.cache[self.path] = (len(self._source), None, self._source.splitlines(keepends=True), self.path)  # for Triton

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_source(self, fullname: str) -> str:
        return self._source  # for lanes, which are made of it

    def get_code(self, fullname: str) -> Any:
        return compile(self._source, self.path, "exec")


class _Listening:
    """Records failures with the first line of each."""

    def __init__(self) -> None:
        self.failed = dict[str, str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else str(report.longrepr)
            self.failed.setdefault(report.nodeid, f"{report.nodeid}: {message.partition(chr(10))[0]}")

    pytest_collectreport: Any = pytest_runtest_logreport


class Chosen(_Listening):
    """Runs only the chosen tests, in their order, each within its time limit."""

    def __init__(self, tests: dict[str, float]) -> None:
        super().__init__()
        self._rank, self._seconds = {test: rank for rank, test in enumerate(tests)}, tests

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        signal.signal(signal.SIGPROF, _endless)
        signal.setitimer(signal.ITIMER_PROF, self._seconds[item.nodeid])
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        return result

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted((i for i in items if i.nodeid in self._rank), key=lambda i: self._rank[i.nodeid])


class _Traced(_Listening):
    """Records the lines and the time of each test, and whether plain Python can run it."""

    def __init__(self, file: str, cover: Any) -> None:
        super().__init__()
        self._file, self._cover, self._seconds = file, cover, dict[str, float]()
        cover.start()
        cover.switch_context(IMPORTS + file)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        _forget_caches()
        self._cover.switch_context(item.nodeid)
        started = time.process_time()
        signal.signal(signal.SIGPROF, _too_long)
        signal.setitimer(signal.ITIMER_PROF, TEST_S)
        result = yield
        signal.setitimer(signal.ITIMER_PROF, 0)
        self._seconds[item.nodeid] = round(time.process_time() - started, 3)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[None]:
        self._cover.switch_context(request._pyfuncitem.nodeid if fixturedef.scope == "function" else self._file)
        try:
            return (yield)
        finally:
            self._cover.switch_context(request._pyfuncitem.nodeid)

    def reached(self) -> Reached:
        self._cover.stop()
        data = self._cover.get_data()
        lines = [(file, n, tests) for file in data.measured_files() for n, tests in data.contexts_by_lineno(file).items()]
        return Reached({test: s for test, s in self._seconds.items() if test not in self.failed}, self.failed, lines)


def _too_long(number: int, frame: FrameType | None) -> None:
    raise TimeoutError(f"takes more than {TEST_S} s")


def _endless(number: int, frame: FrameType | None) -> None:
    raise EndlessCallError("takes many times its usual time")


def _forget_caches() -> None:
    """Clear caches, so that each test reaches its lines as if it were the first test."""
    for module in [module for name, module in sys.modules.items() if name.startswith("blinkpy.")]:
        for value in list(vars(module).values()):
            if callable(getattr(value, "cache_clear", None)):
                value.cache_clear()
