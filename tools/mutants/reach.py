"""Which tests and stages reach a line: measured once for these sources and tests, and kept in build/mutants."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

from blinkpy.sources import PACKAGE, source_digest
from mutants.mutations import Mutant
from mutants.processes import Processes
from mutants.session import Change, Reached, trace_tests, tracer
from mutants.stages import STAGES

ROOT = PACKAGE.parent
TESTS = (
    *("tests/plain/link", "tests/plain/models", "tests/plain/front_end", "tests/compiled/scheduler", "tests/compiled/recording"),
    "tests/plain/grammar/test_ebnf.py",
    *("tests/compiled/kernels/interpreted/test_sampling.py", "tests/verified/test_orders.py", "tests/verified/test_reach.py"),
)
"""Who looks for mutants. A new file in one of the folders joins by being there."""
LEFT_OUT = {"test_compile_cache.py", "test_policy_check.py"}  # they start processes that compile
FILE_S = 600.0  # of the processor, for all tests of a file, while their lines are noted
LOOK_S = 4.0  # of the simulator and the state machine, to see what they reach
CHOSEN_S = 15.0  # of the processor, of the tests for one mutant


class Reach(NamedTuple):
    """seconds: of the processor, for each test that plain Python runs. left_out: the other tests, and why. lines: of each file
    below the package, line -> stages, tests, and files of which all tests reach it."""

    seconds: dict[str, float]
    left_out: dict[str, str]
    lines: dict[str, dict[str, list[str]]]

    def of(self, mutant: Mutant) -> tuple[list[str], tuple[str, ...]]:
        """The stages and the tests that reach a mutant's line, quickest tests and files first, as many as there is time for. Of a
        line that begins nothing, as inside of an expression, the one before it tells."""
        lines = self.lines.get(mutant.file, {})
        line = max((int(line) for line in lines if int(line) <= mutant.line), default=0)
        reached = set(lines.get(str(line), []))
        tests = [test for test in self.seconds if test in reached or _file(test) in reached]
        files: dict[str, float] = defaultdict(float)
        left = CHOSEN_S
        for test in sorted(tests, key=lambda test: (test not in reached, self.seconds[test], test)):
            if self.seconds[test] <= left:
                left -= self.seconds[test]
                files[_file(test)] += self.seconds[test]
            else:
                tests.remove(test)
        tests.sort(key=lambda test: (files[_file(test)], _file(test), self.seconds[test]))
        return [stage for stage in STAGES if stage in reached], tuple(tests)


def _file(test: str) -> str:
    return test.partition("::")[0]


def digest() -> str:
    """Of all sources, tests, and what looks at them."""
    return source_digest(("blinkpy", "tests", "tools/mutants", "pyproject.toml"), ROOT)[:16]


def reach(processes: Processes, traced: list[Path], seed: int, folder: str) -> Reach:
    """As measured before, or now, which takes some minutes. traced: the files of which lines are asked."""
    kept = ROOT / "build" / "mutants" / f"reach-{digest()}.json"
    if not kept.exists():
        found = _measure(processes, [str(path) for path in traced], seed, folder)
        kept.parent.mkdir(parents=True, exist_ok=True)
        part = kept.with_suffix(".new")
        part.write_text(json.dumps(found))
        part.replace(kept)
    return Reach(*json.loads(kept.read_text()))


def _measure(processes: Processes, traced: list[str], seed: int, folder: str) -> Reach:
    waiting: list[tuple[Any, ...]] = [(name, False, _trace_stage, name, traced, seed) for name in STAGES]
    paths = [path for part in TESTS for path in (sorted((ROOT / part).rglob("test_*.py")) or [ROOT / part])]
    for file in (path.relative_to(ROOT).as_posix() for path in paths if path.name not in LEFT_OUT):
        waiting.append((file, True, trace_tests, file, traced, seed, folder))
    found, left = Reach({}, {}, defaultdict(lambda: defaultdict(list))), len(waiting)
    while waiting or processes:
        while waiting and processes.has_room:
            key, *how = waiting.pop(0)
            processes.start(key, FILE_S, *how)
        for ended in processes.ended():
            left -= 1
            reached = ended.answer or Reached({}, {ended.key: ended.died_of}, {})
            print(f"{left} files to trace; {ended.key}: {ended.seconds:.0f} s, {len(reached.left_out)} left out", flush=True)
            found.seconds.update(reached.seconds)
            found.left_out.update(reached.left_out)
            for (path, line), tests in reached.lines.items():
                found.lines[Path(path).relative_to(PACKAGE).as_posix()][str(line)] += tests
    return found


def _trace_stage(name: str, traced: list[str], seed: int) -> Reached:
    """What a stage reaches, without a mutant."""
    path = PACKAGE / "kv" / "page_allocator.py"
    cover = tracer(traced)
    cover.start()
    said = STAGES[name](Change("blinkpy.kv.page_allocator", path, path.read_text()), seed, LOOK_S)
    cover.stop()
    data = cover.get_data()
    lines = {(file, line): [name] for file in data.measured_files() for line in data.lines(file) or []}
    return Reached({}, {name: said} if said else {}, lines)
