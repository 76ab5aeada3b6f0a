"""The mutation tester: its processes, verdicts, ledger and results, and that no mutant stays in a source file."""

import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.report import part_tables
from blinkpy.sources import PACKAGE

ROOT = PACKAGE.parent
LAYOUT_TESTS = "tests/plain/link/test_queue_layout.py"


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")


# ---- verdicts ------------------------------------------------------------------------------------------------------------


DIED = "its process died"


class StubProcesses:
    """Processes that find nothing, or return the result of `say`."""

    def __init__(self, say: Callable[[str, str, list[str], str], str] = lambda *started: "", starved_s: float = 0.0) -> None:
        self.starved_s = starved_s
        self.started: list[Any] = []
        self._running: list[Any] = []
        self._say = say

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_space(self) -> bool:
        return not self._running

    def start(self, key: Any, cpu_s: float, origin: str, function: Any, *arguments: Any) -> None:
        tests = list(arguments[0]) if isinstance(arguments[0], dict) else []
        change = arguments[1] if tests else arguments[0]
        self._running.append((key, self._say(origin, function.__name__, tests, change.source)))
        self.started.append((origin, function.__name__, tests))

    def ended(self) -> list[Any]:
        from mutants.processes import Ended

        done, self._running = self._running, []
        died = [said if said.startswith(DIED) else "" for _, said in done]
        return [Ended(key, None if of else said, of, 1.0, self.starved_s) for (key, said), of in zip(done, died, strict=True)]


def hunted(
    seconds: dict[str, float], reaching: list[str], killed: list[tuple[str, str]], processes: StubProcesses, nth: int = 0
) -> Any:
    """The last verdict on mutants, up to the nth, whose lines are reached by some, when others of the function were killed."""
    from mutants.hunt import Hunt, Hunted, Killers
    from mutants.mutations import mutants_of
    from mutants.reach import Reach

    mutants = mutants_of(PACKAGE / "kv" / "prefix_cache.py")[: nth + 1]
    reach = Reach(seconds, {}, {mutant.file: {str(mutant.line): reaching for mutant in mutants} for mutant in mutants})
    neighbours = [(f"{mutants[0].file}::{mutants[0].function}: {text}", by) for text, by in killed]
    hunt = Hunt(processes, reach, Killers(neighbours), ["path"], 1, "folder")  # type: ignore[arg-type]
    return list(hunt.verdicts([Hunted(mutant, "kv") for mutant in mutants], float("inf")))[-1]


def test_a_test_that_fails_without_a_mutant_kills_none() -> None:
    whole = (PACKAGE / "kv" / "prefix_cache.py").read_text()

    bad, good = "a.py::bad[x: y]", "a.py::good"

    def say(origin: str, function: str, tests: list[str], source: str) -> str:
        return f"{bad}: always" if bad in tests else f"{good}: wrong" if tests and source != whole else ""

    processes = StubProcesses(say)
    verdict = hunted({bad: 0.1, good: 0.1}, ["simulator", "a.py"], [], processes)
    assert verdict.by == good
    tests = [[bad, good], [bad], [good], [good]]
    assert processes.started == [("path", "run_collected", some) for some in tests]


# ---- processes ----------------------------------------------------------------------------------------------------------


def answers(cpu_s: float, origin: str, function: Callable[..., Any], *arguments: Any, served: Any = None) -> tuple[Any, str]:
    """The answer of a process, and the cause of its death. served: processes that fork it."""
    from mutants.processes import Processes

    processes = served or Processes(1)
    processes.start("key", cpu_s, origin, function, *arguments)
    assert not processes.has_space
    found: list[Any] = []
    while processes:
        found += processes.ended()
    ((key, answer, died_of, *_),) = found
    assert key == "key" and processes.has_space
    return answer, died_of


def loop() -> None:
    while True:
        pass


def test_a_hung_or_dead_process_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mutants.processes.SLEEP_SHARE", 1)
    assert answers(60, "here", lambda: 7) == (7, "")
    assert answers(1, "here", time.sleep, 600)[1] == "waits for an event that never comes"
    assert answers(1, "here", loop)[1] == "takes more than 1 s of the processor"
    assert answers(60, "here", lambda: os._exit(3))[1] == "its process died, with 3"


def test_a_planted_mutant_is_what_the_tests_import(tmp_path: Path, seed: int) -> None:
    from mutants.session import Change, run_tests, trace_tests

    path = PACKAGE / "queues" / "words.py"
    traced = answers(120, "fresh", trace_tests, LAYOUT_TESTS, [str(path)], seed, str(tmp_path))[0]
    assert not traced.left_out and {file for file, _, _ in traced.lines} == {str(path)}
    tests = {test: 60.0 for _, _, reaching in traced.lines for test in reaching if "::" in test}
    assert all("import " + LAYOUT_TESTS in reaching for _, line, reaching in traced.lines if line == 1)
    assert tests and tests.keys() <= traced.seconds.keys()
    whole = Change("blinkpy.queues.words", path, path.read_text())
    assert answers(120, "fresh", run_tests, tests, whole, seed, str(tmp_path)) == ("", "")
    wrong = whole.source + "\n\ndef lap_of(position, size):\n    return 1\n"
    said, _ = answers(120, "fresh", run_tests, tests, whole._replace(source=wrong), seed, str(tmp_path))
    assert said.partition(": ")[0] in tests
    endless = wrong.replace("    return 1", "    while True:\n        pass")
    limits = dict.fromkeys(tests, 0.5)  # of a test; that of the process is far away
    said, died_of = answers(600, "fresh", run_tests, limits, whole._replace(source=endless), seed, str(tmp_path))
    assert "EndlessCallError" in said and not died_of
    assert path.read_text() == whole.source


# ---- results ------------------------------------------------------------------------------------------------------------


def test_a_ledger_keeps_verdicts_as_long_as_the_function_is_the_same(tmp_path: Path, seed: int) -> None:
    from mutants.mutations import mutants_of
    from mutants.results import Ledger, Verdict

    path = tmp_path / "ledger.jsonl"
    some = mutants_of(PACKAGE / "queues" / "words.py")[:5]
    dead, alive, changed, later, cut = some
    assert len({mutant.id for mutant in some}) == 5
    for mutant, by, how in (
        (dead, "simulator", "an error"),
        (alive, "", ""),
        (changed, "a.py::test", "an error"),
        (later, "", ""),
    ):
        Ledger(path).add(Verdict.of(mutant, "queues", by, how, 1.5, "what it said"))
    Ledger(path).add(Verdict.of(later, "queues", "b.py::test", "a timeout", 2.0))
    Ledger(path).add(Verdict.of(cut, "queues", "simulator", "an error", 1.5))
    path.write_text(path.read_text()[:-9])
    ledger = Ledger(path)
    assert ledger.of(dead, "queues") == Verdict.of(dead, "queues", "simulator", "an error", 1.5)
    assert ledger.of(alive, "queues") == Verdict.of(alive, "queues", "", "", 1.5)
    assert ledger.of(changed._replace(text="another"), "queues") is None and ledger.of(cut, "queues") is None
    assert ledger.of(later._replace(line=later.line + 9, start=0), "queues").by == "b.py::test"  # type: ignore[union-attr]


def test_a_result_counts_each_module_and_is_shown(tmp_path: Path) -> None:
    from mutants.mutations import mutants_of
    from mutants.results import COUNTS, Verdict, interval, result, write

    some = [mutant for file in ("words", "layout") for mutant in mutants_of(PACKAGE / "queues" / f"{file}.py")[:4]]
    ends = [("simulator", "an error"), ("a.py::x", "a timeout"), ("", ""), ("a.py::y", "an error"), ("", "")]
    verdicts = [Verdict.of(mutant, "queues", by, how, 1.0) for mutant, (by, how) in zip(some, ends, strict=False)]
    found = result([(mutant, "queues") for mutant in some], verdicts, Counter({"queues/layout.py": 2, "kv/other.py": 7}))
    assert (found["asked"], found["killed"], found["survived"], found["equivalent"]) == (8, 3, 2, 2)
    counts = {file: [found["modules"][file][name] for name in COUNTS] for file in found["modules"]}
    assert counts == {"queues/words.py": [3, 1, 0, 0], "queues/layout.py": [0, 1, 2, 3]}
    queues = found["groups"]["queues"]
    assert [queues[name] for name in ("modules", *COUNTS)] == [2, 3, 2, 2, 3]
    assert queues["interval"] == pytest.approx(interval(3, 5), abs=1e-4)
    assert dict(found["killers"]) == {"a.py": 2, "simulator": 1} and found["how"]["a timeout"] == 1
    assert found["survivors"] == sorted(some[n].name for n in (2, 4))
    write(tmp_path / "mutants.json", found)
    shown = part_tables.mutants(part_tables.Results(tmp_path))
    assert shown["total"] == {"killed": "3", "survived": "2", "unknown": "3"} and shown["share"] == "60.0 % (23.1 to 88.2)"
    assert shown["weak"] == ["`queues/layout.py` 0 of 1", "`queues/words.py` 3 of 4"]


@pytest.mark.parametrize(("killed", "planted", "low", "high"), [(10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0, 1)])
def test_a_sample_says_how_sure_it_is(killed: int, planted: int, low: float, high: float) -> None:
    """Against the interval's figures in textbooks."""
    from mutants.results import interval

    assert interval(killed, planted) == pytest.approx((low, high), abs=1e-4)


def test_each_part_has_sources_and_tests_and_its_mutants_are_valid_code(rng: np.random.Generator) -> None:
    from mutants.mutations import mutants_of
    from mutants.parts import PARTS

    from blinkpy.sources import source_files

    for name, part in PARTS.items():
        assert all((ROOT / test).is_file() for test in part.test_files()), name
        files = source_files(part.sources)
        made = mutants_of(files[int(rng.integers(len(files)))], meaning=True)
        for mutant in made[:: max(1, len(made) // 5)]:
            compile(mutant.source, mutant.file, "exec")


def test_a_name_does_not_depend_on_comments() -> None:
    from mutants.mutations import one_line

    assert one_line("f(1)  # one\n    g('#')  # two") == "f(1) g('#')"
    assert one_line("(  # begin\n  x + 1)") == "( x + 1)"
