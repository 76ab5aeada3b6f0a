"""The mutation tester itself: what it chooses, what it runs, what it keeps, and that nothing of a mutant stays."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from blinkpy.sources import PACKAGE

ROOT = PACKAGE.parent


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")


def names(seed: int, *options: str) -> list[str]:
    from mutants.__main__ import chosen, parser

    return [hunted.mutant.name for hunted in chosen(parser().parse_args(options), seed)]


def living(path: Path) -> list[Any]:
    """The mutants of a file that are not known to change nothing."""
    from mutants.__main__ import equivalent
    from mutants.mutations import mutants_of

    known = equivalent()
    return [mutant for mutant in mutants_of(path) if mutant.name not in known]


# ---- which mutants ------------------------------------------------------------------------------------------------------


def test_parts_are_disjoint_and_complete(seed: int) -> None:
    from mutants.mutations import thinned

    files = (PACKAGE / "scheduler" / "phases").glob("p*.py")
    expected = {mutant.name for path in files for mutant in thinned(living(path), seed)}
    parts = seed % 7 + 2
    some = ("--all", "--only", "scheduler/phases/p", "--parts", str(parts))
    shares = [names(seed, *some, "--part", str(part + 1)) for part in range(parts)]
    together = [name for share in shares for name in share]
    assert len(together) == len(set(together)) > 100
    assert set(together) == set(names(seed, "--all", "--only", "scheduler/phases/p")) == expected
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_one_mutant_for_each_line_and_rule(seed: int) -> None:
    from mutants.mutations import thinned

    every = living(PACKAGE / "kv" / "prefix_cache.py")
    kept = thinned(every, seed)
    places = Counter((mutant.line, mutant.rule) for mutant in kept)
    assert set(places.values()) == {1}
    assert places.keys() == {(mutant.line, mutant.rule) for mutant in every}
    assert kept == [mutant for mutant in every if mutant in kept] == thinned(every, seed) != thinned(every, seed + 1)
    assert len(kept) < len(names(seed, "--all", "--every", "--only", "kv/prefix_cache.py")) == len(every)


def test_every_file_of_the_folders_has_its_mutants(seed: int) -> None:
    found = {name.partition("::")[0].rpartition("/")[0] for name in names(seed, "--all")}
    with_functions = {
        path.parent.relative_to(PACKAGE).as_posix()
        for folder in ("scheduler", "kv", "queues", "transport", "dpu/link", "dpu/grammar/ebnf", "kernels/sampling")
        for path in (PACKAGE / folder).rglob("*.py")
        if "\ndef " in path.read_text()
    }
    assert found == {*with_functions, "dpu", "models/cpu"}


# ---- who looks for them -------------------------------------------------------------------------------------------------


def test_tests_that_reach_the_line_are_chosen_quickest_first() -> None:
    from mutants.mutations import mutants_of
    from mutants.reach import CHOSEN_S, Reach

    mutant = mutants_of(PACKAGE / "kv" / "prefix_cache.py")[0]
    seconds = {"a.py::slow": 3.0, "a.py::quick": 0.1, "b.py::one": 0.5, "c.py::other": 0.1, "d.py::endless": CHOSEN_S + 1}
    before, at = ["c.py::other"], ["simulator", "a.py::slow", "a.py::quick", "b.py", "d.py::endless"]
    lines = {str(mutant.line - 2): before, str(mutant.line - 1): at, str(mutant.line + 1): before}
    assert Reach(seconds, {}, {mutant.file: lines}).of(mutant) == (["simulator"], ("b.py::one", "a.py::quick", "a.py::slow"))
    assert Reach(seconds, {}, {}).of(mutant) == ([], ())


@pytest.mark.parametrize(("seconds", "last"), [(0.1, ["tests", "state machine"]), (9.0, ["state machine", "tests"])])
def test_who_takes_long_looks_last(seconds: float, last: list[str], tmp_path: Path) -> None:
    from mutants.hunt import Hunt, Hunted
    from mutants.mutations import mutants_of
    from mutants.processes import Ended
    from mutants.reach import Reach

    class Nobody:
        """Processes that find nothing."""

        has_room = True

        def __init__(self) -> None:
            self.running: list[Any] = []

        def __len__(self) -> int:
            return len(self.running)

        def start(self, key: Any, cpu_s: float, fresh: bool, function: Any, *arguments: Any) -> None:
            self.running.append(key)

        def ended(self) -> list[Ended]:
            done, self.running = self.running, []
            return [Ended(key, "", "", 1.0) for key in done]

    mutant = mutants_of(PACKAGE / "kv" / "prefix_cache.py")[0]
    reach = Reach({"a.py::test": seconds}, {}, {mutant.file: {str(mutant.line): ["simulator", "state machine", "a.py"]}})
    (verdict,) = Hunt(Nobody(), reach, 1, str(tmp_path)).verdicts([Hunted(mutant, "kv")], float("inf"))  # type: ignore[arg-type]
    assert list(verdict.seconds) == ["simulator", *last] and not verdict.by


# ---- processes ----------------------------------------------------------------------------------------------------------


def answers(cpu_s: float, fresh: bool, function: Callable[..., Any], *arguments: Any) -> tuple[Any, str]:
    from mutants.processes import Processes

    processes = Processes(1)
    processes.start("key", cpu_s, fresh, function, *arguments)
    assert not processes.has_room
    found: list[Any] = []
    while processes:
        found += processes.ended()
    ((key, answer, died_of, _),) = found
    assert key == "key" and processes.has_room
    return answer, died_of


def loop() -> None:
    while True:
        pass


def test_a_process_that_hangs_or_dies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mutants.processes.WALL_SHARE", 1)
    assert answers(60, False, lambda: 7) == (7, "")
    assert answers(1, False, time.sleep, 600)[1] == "waits for what never comes"
    monkeypatch.setattr("mutants.processes.WALL_SHARE", 1000)
    assert answers(1, False, loop)[1] == "takes more than 1 s of the processor"
    assert answers(60, False, lambda: os._exit(3))[1] == "its process died, with 3"


def test_a_planted_mutant_is_what_the_tests_import(tmp_path: Path, seed: int) -> None:
    from mutants.session import Change, run_tests, trace_tests

    path = PACKAGE / "queues" / "completion.py"
    file = "tests/plain/link/test_queue_layout.py"
    traced = answers(120, True, trace_tests, file, [str(path)], seed, str(tmp_path))[0]
    assert not traced.left_out
    tests = {test: 60.0 for reaching in traced.lines.values() for test in reaching if "::" in test}
    assert tests and tests.keys() <= traced.seconds.keys()
    whole = Change("blinkpy.queues.completion", path, path.read_text())
    assert answers(120, True, run_tests, tests, whole, seed, str(tmp_path)) == ("", "")
    wrong = whole.source + "\n\ndef lap_of(position, size):\n    return 1\n"
    said, _ = answers(120, True, run_tests, tests, whole._replace(source=wrong), seed, str(tmp_path))
    assert said.partition(": ")[0] in tests
    endless = wrong.replace("    return 1", "    while True:\n        pass")
    limits = dict.fromkeys(tests, 0.5)  # of a test; that of the process is far away
    said, died_of = answers(600, True, run_tests, limits, whole._replace(source=endless), seed, str(tmp_path))
    assert "EndlessCallError" in said and not died_of
    assert path.read_text() == whole.source


def test_several_lanes_run_the_planted_mutant(tmp_path: Path, seed: int) -> None:
    from mutants.session import Change, run_tests

    path = PACKAGE / "kv" / "page_allocator.py"
    wrong = path.read_text().replace("min(total, missing - taken)", "total")  # which one lane does not see
    test = "tests/compiled/scheduler/test_lane_races.py::test_lanes_evict_as_many_pages_as_are_missing[3]"
    change = Change("blinkpy.kv.page_allocator", path, wrong)
    assert answers(120, True, run_tests, {test: 60.0}, change, seed, str(tmp_path))[0].startswith(test)


def test_a_loop_of_a_stage_is_told_from_an_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mutants import stages
    from mutants.hunt import Hunted
    from mutants.mutations import mutants_of
    from mutants.session import Change

    monkeypatch.setattr(stages, "CALL_S", 1.0)
    path = PACKAGE / "scheduler" / "phases" / "commit.py"
    mutant, text = mutants_of(path)[0], path.read_text()
    line = "    rows = batch.counts[S.ROWS]\n"
    assert text.count(line) == 1
    for more, how in (("    while rows > 0:\n        pass\n", "an endless call"), ("    rows += 1\n", "an error")):
        said = stages.simulated(Change(mutant.module, path, text.replace(line, line + more)), seed, 1.0)
        verdict = Hunted(mutant, "scheduler").verdict("simulator", said)
        assert verdict.how == how, said
    assert Hunted(mutant, "scheduler").verdict("tests", "its process died, with 3", died=True).how == "a timeout"


# ---- results ------------------------------------------------------------------------------------------------------------


def test_parts_of_a_run_make_one_result(tmp_path: Path) -> None:
    from mutants.results import Verdict, header, merged, read, result

    def verdict(number: int, by: str) -> Verdict:
        return Verdict(f"kv/x.py::f: {number} -> 0", "kv", number, "off by one", by, "", {"tests": 1.5}, "an error" if by else "")

    def part(name: str, *verdicts: Verdict, seed: int = 1, end: str = "\n") -> Path:
        told = header(seed, "every mutant", 2, "digest")
        (tmp_path / name).write_text("\n".join([json.dumps(told), *(json.dumps(v._asdict()) for v in verdicts)]) + end)
        return tmp_path / name

    one, two = part("1", verdict(1, "tests"), verdict(2, "")), part("2", verdict(3, "simulator"), verdict(4, ""), end="")
    told, verdicts = merged([one, two])
    found = result(told, verdicts)
    assert (found["asked"], found["planted"], found["killed"]) == (4, 3, 2)  # the last line of the second was cut off
    assert found["modules"] == {"kv/x.py": [2, 3]} and found["killers"] == {"tests": 1, "simulator": 1}
    assert found["how"] == {"an error": 2, "an endless call": 0, "a timeout": 0} and found["share"] == 0.6667
    assert [survivor["change"] for survivor in found["survivors"]] == ["kv/x.py::f: 2 -> 0"]
    assert read(one, told["run"])[1] == verdicts[:2]
    with pytest.raises(SystemExit, match="another seed"):
        merged([one, part("3", verdict(1, ""), seed=2)])


@pytest.mark.parametrize(("killed", "planted", "low", "high"), [(10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0, 1)])
def test_a_sample_says_how_sure_it_is(killed: int, planted: int, low: float, high: float) -> None:
    """Against the interval's figures in textbooks."""
    from mutants.results import interval

    assert interval(killed, planted) == pytest.approx((low, high), abs=1e-4)
