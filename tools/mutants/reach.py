"""Tests and stages that reach a line. They are measured once for each test file, and cached in build/mutants.

A cache entry is valid for the same text of sources and test file, so build/mutants can be copied to other
machines.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from blinkpy.sources import PACKAGE, source_digest
from mutants.mutations import Mutant, short_digest
from mutants.processes import FRESH, HERE, Processes
from mutants.session import IMPORTS, Change, Reached, trace_tests, tracer
from mutants.stages import STAGES

ROOT = PACKAGE.parent
TESTS = (
    *("tests/plain/link", "tests/plain/models", "tests/plain/front_end", "tests/compiled/scheduler", "tests/compiled/recording"),
    *(f"tests/compiled/kernels/interpreted/{name}.py" for name in ("test_sampling", "test_sampling_edges")),
    *("tests/verified/test_orders.py", "tests/verified/test_reach.py"),
)
"""The tests that hunt mutants. A new file in one of the folders joins automatically."""
LEFT_OUT = {"test_compile_cache.py", "test_policy_check.py"}  # they start processes that compile
FILE_S = 600.0  # CPU time of all tests of a file, while their lines are recorded
LOOK_S = 4.0  # time for turns of the simulator and the state machine, while their reach is measured
CHOSEN_S = 15.0  # CPU time of the tests for one mutant


class Reaching(NamedTuple):
    """Tests and stages that reach a mutant's line.

    tests: quickest first.
    at_import: the line also runs when a module or test file is imported.
    """

    stages: list[str]
    tests: list[str]
    at_import: bool


class Reach(NamedTuple):
    """The measurement.

    seconds: processor time of each test that plain Python runs.
    left_out: the other tests, with reasons.
    lines: for each file of the package, line -> stages, tests, files whose fixtures reach it, and files whose import reaches it.
    """

    seconds: dict[str, float]
    left_out: dict[str, str]
    lines: dict[str, dict[str, list[str]]]

    def of(self, mutant: Mutant) -> Reaching:
        """As many tests as the time permits. For a line inside a statement, the line before it counts."""
        lines = self.lines.get(mutant.file, {})
        line = max((int(line) for line in lines if int(line) <= mutant.line), default=0)
        reached = set(lines.get(str(line), []))
        imported = {name.removeprefix(IMPORTS) for name in reached if name.startswith(IMPORTS)}
        files = reached | imported
        tests, left = list[str](), CHOSEN_S
        some = [test for test in self.seconds if test in reached or file_of(test) in files]
        some.sort(key=lambda test: (self.seconds[test], test))
        nth, functions = dict[str, int](), Counter[str]()  # all functions of tests before one of them with other parameters
        for test in some:
            functions[function := test.partition("[")[0]] += 1
            nth[test] = functions[function]
        ordered = sorted(some, key=lambda test: (test not in reached, nth[test], self.seconds[test]))
        for test in ordered:
            if self.seconds[test] <= left:
                left -= self.seconds[test]
                tests.append(test)
        tests.sort(key=ordered.index)
        return Reaching([stage for stage in STAGES if stage in reached], tests, bool(imported))


def file_of(test: str) -> str:
    return test.partition("::")[0]


def reach(
    processes: Processes, traced: list[Path], seed: int, folder: str, tests: list[str] | None = None, stages: bool = True
) -> Reach:
    """The measurement, from the cache or new; a new one takes some minutes.

    traced: the source files.
    tests: test files; None: test_files().
    stages: whether to measure the simulator and the state machine.
    """
    found = Reach({}, {}, defaultdict(lambda: defaultdict(list)))
    files = test_files() if tests is None else tests
    for reached in _measured(processes, [str(path) for path in traced], seed, folder, files, stages):
        found.seconds.update(reached.seconds)
        found.left_out.update(reached.left_out)
        for path, line, tests in reached.lines:
            found.lines[path][str(line)] += tests
    return found


def test_files() -> list[str]:
    """The test files, relative to the root."""
    paths = [path for part in TESTS for path in (sorted((ROOT / part).rglob("test_*.py")) or [ROOT / part])]
    return [path.relative_to(ROOT).as_posix() for path in paths if path.name not in LEFT_OUT]


def _measured(
    processes: Processes, traced: list[str], seed: int, folder: str, files: list[str], stages: bool
) -> Iterator[Reached]:
    waiting: list[tuple[Any, ...]] = []
    of = short_digest(" ".join(sorted(traced)).encode())[:6]
    for name in STAGES if stages else ():
        waiting.append((_kept(f"{name} {of}", "tools/mutants/stages.py"), name, HERE, _trace_stage, name, traced, seed))
    for file in files:
        waiting.append((_kept(f"{file} {of}", file), file, FRESH, trace_tests, file, traced, seed, folder))
    for kept in [kept for kept, *_ in waiting if kept.exists()]:
        yield Reached(*json.loads(kept.read_text()))
    waiting = [entry for entry in waiting if not entry[0].exists()]
    left = len(waiting)
    while waiting or processes:
        while waiting and processes.has_space:
            kept, name, *how = waiting.pop(0)
            processes.start((kept, name), FILE_S, *how)
        for ended in processes.ended():
            (kept, name), left = ended.key, left - 1
            reached = ended.answer or Reached({}, {name: ended.died_of}, [])
            print(f"{left} files to trace; {name}: {ended.seconds:.0f} s, {len(reached.left_out)} left out", flush=True)
            below = [(Path(path).relative_to(PACKAGE).as_posix(), line, tests) for path, line, tests in reached.lines]
            reached = reached._replace(lines=below)
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(reached))
            yield reached


def _kept(name: str, file: str) -> Path:
    """The cache file of a test file or stage, for the current sources."""
    digest = source_digest(("blinkpy", "tests/support", "tests/conftest.py", "tools/mutants/session.py", file), ROOT)
    return ROOT / "build" / "mutants" / f"{re.sub('[^a-z0-9_]+', '-', name)}-{digest[:16]}.json"


def _trace_stage(name: str, traced: list[str], seed: int) -> Reached:
    """The lines that a stage reaches without a mutant."""
    path = PACKAGE / "kv" / "page_allocator.py"
    cover = tracer(traced)
    cover.start()
    said = STAGES[name](Change("blinkpy.kv.page_allocator", path, path.read_text()), seed, LOOK_S)
    cover.stop()
    data = cover.get_data()
    lines = [(file, line, [name]) for file in data.measured_files() for line in data.lines(file) or []]
    return Reached({}, {name: said} if said else {}, lines)
