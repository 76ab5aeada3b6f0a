"""The mutation tester itself: what it chooses, what it runs, what it keeps, and that nothing of a mutant stays."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report import part_tables
from blinkpy.sources import PACKAGE

ROOT = PACKAGE.parent
LAYOUT_TESTS = "tests/plain/link/test_queue_layout.py"


@pytest.fixture(autouse=True)
def _tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "tools")


def names(seed: int, *options: str) -> list[str]:
    from mutants.__main__ import chosen, parser

    return [hunted.mutant.name for hunted in chosen(parser().parse_args(options), seed)[0]]


def living(path: Path) -> list[Any]:
    """The mutants of a file that are not known to change nothing."""
    from mutants.__main__ import equivalent
    from mutants.mutations import mutants_of

    known = equivalent()
    return [mutant for mutant in mutants_of(path) if mutant.name not in known]


# ---- which mutants ------------------------------------------------------------------------------------------------------


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
        for folder in ("scheduler", "kv", "queues", "transport", "dpu/link", "kernels/sampling")
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
    tests = ["a.py::quick", "a.py::slow", "b.py::one"]
    assert Reach(seconds, {}, {mutant.file: lines}).of(mutant) == (["simulator"], tests, False, [])
    lines[str(mutant.line)] = ["import b.py"]
    assert Reach(seconds, {}, {mutant.file: lines}).of(mutant) == ([], ["b.py::one"], True, [])
    assert Reach(seconds, {}, {}).of(mutant) == ([], [], False, [])


def test_tests_whose_text_is_like_the_mutant_are_among_the_chosen_and_look_early(tmp_path: Path) -> None:
    from mutants.likeness import Likeness
    from mutants.mutations import mutants_of
    from mutants.reach import CHOSEN_S, Reach

    mutant = next(m for m in mutants_of(PACKAGE / "kv" / "page_allocator.py") if m.function == "compact_ring")
    texts = {"quick": "make_case()", "slow": "the_ring_is_compacted()", "slower": "rings()", "other": "make_case()"}
    (tmp_path / "a.py").write_text("".join(f"def {name}():\n    {text}\n" for name, text in texts.items()))
    seconds = {"a.py::quick": 0.1, "a.py::other": CHOSEN_S - 3, "a.py::slow": 4.0, "a.py::slower": 2.0}
    lines = {mutant.file: {str(mutant.line): list(seconds)}}
    found = Reach(seconds, {}, lines, Likeness(["a.py"], tmp_path).alike).of(mutant)
    assert found.alike == ["a.py::slower"] or found.alike == ["a.py::slow"], "as many as there is time for"
    assert found.tests[0] == "a.py::quick" and set(found.alike) < set(found.tests) and "a.py::other" not in found.tests


def test_more_parameters_of_what_is_like_the_mutant_are_among_the_chosen(tmp_path: Path) -> None:
    """Of quick ones all: each may be about another condition of the line, which many other tests reach."""
    from mutants.likeness import Likeness
    from mutants.mutations import mutants_of
    from mutants.reach import CHOSEN_S, PARAMETERS_S, Reach

    mutant = next(m for m in mutants_of(PACKAGE / "kv" / "page_allocator.py") if m.function == "compact_ring")
    (tmp_path / "a.py").write_text("def rings():\n    compact_ring()\n\ndef other():\n    make_case()\n")
    each = PARAMETERS_S / 8
    seconds = {f"a.py::rings[{n}]": each for n in range(20)} | {f"a.py::other[{n}]": each / 9 for n in range(9000)}
    assert sum(seconds.values()) > 2 * CHOSEN_S
    found = Reach(seconds, {}, {mutant.file: {str(mutant.line): list(seconds)}}, Likeness(["a.py"], tmp_path).alike).of(mutant)
    assert len(found.alike) == 1 + 8 and set(found.alike) <= set(found.tests)
    assert all(test.startswith("a.py::rings") for test in found.alike)


def test_each_function_of_tests_comes_before_more_parameters() -> None:
    from mutants.mutations import mutants_of
    from mutants.reach import CHOSEN_S, Reach

    mutant = mutants_of(PACKAGE / "kv" / "prefix_cache.py")[0]
    seconds = {f"a.py::quick[{n}]": 0.4 for n in range(40)} | {"a.py::slow": CHOSEN_S / 2}
    tests = Reach(seconds, {}, {mutant.file: {str(mutant.line): list(seconds)}}).of(mutant).tests
    assert "a.py::slow" in tests and 10 < len(tests) < 20


DIED = "its process died"


class Nobody:
    """Processes that find nothing, or what a function of what they run says."""

    def __init__(self, say: Callable[[str, str, list[str], str], str] = lambda *started: "", starved_s: float = 0.0) -> None:
        self.starved_s = starved_s
        self.started: list[Any] = []
        self._running: list[Any] = []
        self._say = say

    def __len__(self) -> int:
        return len(self._running)

    @property
    def has_room(self) -> bool:
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


def hunted(seconds: dict[str, float], reaching: list[str], killed: list[tuple[str, str]], processes: Nobody, nth: int = 0) -> Any:
    """The last verdict on mutants, up to the nth, whose lines are reached by some, when others of the function were killed."""
    from mutants.hunt import Hunt, Hunted, Killers
    from mutants.mutations import mutants_of
    from mutants.reach import Reach

    mutants = mutants_of(PACKAGE / "kv" / "prefix_cache.py")[: nth + 1]
    reach = Reach(seconds, {}, {mutant.file: {str(mutant.line): reaching for mutant in mutants} for mutant in mutants})
    neighbours = [(f"{mutants[0].file}::{mutants[0].function}: {text}", by) for text, by in killed]
    hunt = Hunt(processes, reach, Killers(neighbours), ["path"], 1, "folder")  # type: ignore[arg-type]
    return list(hunt.verdicts([Hunted(mutant, "kv") for mutant in mutants], float("inf")))[-1]


@pytest.mark.parametrize(("slow", "last"), [(2.6, ["run_collected", "exercised"]), (9.0, ["exercised", "run_collected"])])
def test_who_takes_long_looks_last(slow: float, last: list[str]) -> None:
    nobody = Nobody()
    seconds = {"a.py::quick": 0.1, "a.py::slow": slow, "b.py::other": 0.1}
    verdict = hunted(seconds, ["simulator", "state machine", "a.py"], [], nobody)
    assert [name for _, name, _ in nobody.started] == ["run_collected", "simulated", *last] and not verdict.by
    assert nobody.started[0] == ("path", "run_collected", ["a.py::quick"])
    assert ("path", "run_collected", ["a.py::slow"]) in nobody.started and verdict.seconds == 4.0


def test_who_killed_its_neighbours_looks_first() -> None:
    nobody = Nobody()
    seconds = {"a.py::quick": 0.1, "a.py::slow": 9.0, "a.py::slower": 9.5}
    killed = [("x", "a.py::slow"), ("y", "a.py::slow"), ("z", "simulator"), ("u", "c.py::of another line")]
    hunted(seconds, ["simulator", "a.py::quick", "a.py::slow"], killed, nobody)
    assert nobody.started == [("path", "run_collected", ["a.py::slow", "a.py::quick"]), ("here", "simulated", [])]
    nobody = Nobody()
    hunted(seconds, ["simulator", "a.py::quick"], [("x", "simulator")], nobody)
    assert [name for _, name, _ in nobody.started] == ["simulated", "run_collected"]


def test_what_a_process_with_all_imports_can_t_have_is_imported() -> None:
    from mutants.collected import UNCHANGED

    def say(origin: str, function: str, tests: list[str], source: str) -> str:
        return UNCHANGED if origin == "path" else "a.py::slow: wrong" if len(tests) > 1 else ""

    nobody, seconds = Nobody(say), {"a.py::quick": 0.1, "a.py::slow": 9.0}
    verdict = hunted(seconds, ["simulator", "a.py"], [], nobody)
    tests = ["a.py::quick", "a.py::slow"]
    again = ("fresh", "run_tests", tests[1:])
    assert nobody.started == [("path", "run_collected", tests[:1]), ("fresh", "run_tests", tests), again]
    assert (verdict.by, verdict.how) == ("a.py::slow", "an error")
    nobody = Nobody()
    hunted(seconds, ["import a.py"], [], nobody)
    assert nobody.started == [("fresh", "run_tests", tests)]


def test_a_test_that_fails_without_a_mutant_kills_none() -> None:
    whole = (PACKAGE / "kv" / "prefix_cache.py").read_text()

    bad, good = "a.py::bad[x: y]", "a.py::good"

    def say(origin: str, function: str, tests: list[str], source: str) -> str:
        return f"{bad}: always" if bad in tests else f"{good}: wrong" if tests and source != whole else ""

    nobody = Nobody(say)
    verdict = hunted({bad: 0.1, good: 0.1}, ["simulator", "a.py"], [], nobody)
    assert verdict.by == good
    tests = [[bad, good], [bad], [good], [good]]
    assert nobody.started == [("path", "run_collected", some) for some in tests]


@pytest.mark.parametrize("reached", ["simulator", "a.py"])
def test_who_dies_without_the_mutant_too_is_broken(reached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = (PACKAGE / "kv" / "prefix_cache.py").read_text()
    mutants_die = Nobody(lambda origin, function, tests, source: DIED if source != whole else "")
    verdict = hunted({"a.py::one": 0.1}, [reached], [], mutants_die)
    assert (verdict.by, verdict.how) == ("tests" if reached == "a.py" else reached, "a timeout")
    with pytest.raises(IndexError):  # no verdict
        hunted({"a.py::one": 0.1}, [reached], [], Nobody(lambda *started: DIED), nth=7)
    monkeypatch.setattr("mutants.hunt.BROKEN", 0)
    with pytest.raises(SystemExit, match=DIED):
        hunted({"a.py::one": 0.1}, [reached], [], Nobody(lambda *started: DIED))


@pytest.mark.parametrize(("starved_s", "tried"), [(0.0, 1), (60.0, 3)])
def test_where_others_have_the_processor_each_kill_is_tried_without_the_mutant(starved_s: float, tried: int) -> None:
    whole = (PACKAGE / "kv" / "prefix_cache.py").read_text()
    sources: list[str] = []

    def say(origin: str, function: str, tests: list[str], source: str) -> str:
        sources.append(source)
        return "a.py::good: wrong" if source != whole else ""

    verdict = hunted({"a.py::good": 0.1}, ["a.py"], [], Nobody(say, starved_s), nth=2)
    assert verdict.by == "a.py::good" and sources.count(whole) == tried and len(sources) == 3 + tried


@pytest.mark.parametrize(("slow", "by"), [(False, "a.py::late"), (True, "b.py::sure")])
def test_a_call_that_is_as_long_without_the_mutant_is_not_endless(monkeypatch: pytest.MonkeyPatch, slow: bool, by: str) -> None:
    monkeypatch.setattr("mutants.hunt.TEST_START_S", 0.5 if slow else 15.0)
    whole, endless = (PACKAGE / "kv" / "prefix_cache.py").read_text(), "a.py::late: EndlessCallError: takes too much"

    def say(origin: str, function: str, tests: list[str], source: str) -> str:
        return "" if source == whole else endless if "a.py::late" in tests else "b.py::sure: wrong"

    seconds = {"a.py::late": 0.1, "b.py::sure": 0.2}  # each process takes one second
    assert hunted(seconds, list(seconds), [], Nobody(say)).by == by


# ---- processes ----------------------------------------------------------------------------------------------------------


def answers(cpu_s: float, origin: str, function: Callable[..., Any], *arguments: Any, served: Any = None) -> tuple[Any, str]:
    """What a process answers, and what it died of. served: processes that serve where it is forked from."""
    from mutants.processes import Processes

    processes = served or Processes(1)
    processes.start("key", cpu_s, origin, function, *arguments)
    assert not processes.has_room
    found: list[Any] = []
    while processes:
        found += processes.ended()
    ((key, answer, died_of, *_),) = found
    assert key == "key" and processes.has_room
    return answer, died_of


def loop() -> None:
    while True:
        pass


def test_a_process_that_hangs_or_dies_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mutants.processes.SLEEP_SHARE", 1)
    assert answers(60, "here", lambda: 7) == (7, "")
    assert answers(1, "here", time.sleep, 600)[1] == "waits for what never comes"
    assert answers(1, "here", loop)[1] == "takes more than 1 s of the processor"
    assert answers(60, "here", lambda: os._exit(3))[1] == "its process died, with 3"


def test_a_process_counts_before_it_leads_its_session() -> None:
    """Else one that gets no processor at its beginning would seem to sleep."""
    from mutants.processes import _has_work

    child = os.fork()
    if child == 0:
        work(60)
        os._exit(0)
    try:
        assert _has_work(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def work(seconds: float) -> int:
    until = time.process_time() + seconds
    while time.process_time() < until:
        pass
    return 7


def wait_for_work(seconds: float) -> int:
    """Sleep while a child works."""
    child = os.fork()
    if child == 0:
        work(seconds)
        os._exit(0)
    os.waitpid(child, 0)
    return 7


@pytest.mark.parametrize("function", [work, wait_for_work])
def test_who_has_work_is_never_late(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of the processor it gets: a limit of its sleep is none of its time."""
    monkeypatch.setattr("mutants.processes.SLEEP_LOOK_S", 0.05)
    monkeypatch.setattr("mutants.processes.SLEEP_SHARE", 0.005)
    assert answers(60, "here", function, 1.5) == (7, "")
    assert answers(60, "here", time.sleep, 600)[1] == "waits for what never comes"


@pytest.fixture
def collected(tmp_path: Path) -> Iterator[tuple[Any, str]]:
    """Processes, and the path of the one that has imported some tests, with a seed with which they notice all mutants below."""
    from mutants.collected import serve_tests
    from mutants.processes import Processes

    processes, path = Processes(1), str(tmp_path / "path")
    with closing(processes):
        processes.serve(path, serve_tests, [LAYOUT_TESTS], 1, str(tmp_path))
        processes.served()
        yield processes, path


def test_a_child_of_a_server_that_hangs_or_dies_is_noticed(collected: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    processes, path = collected
    assert answers(60, path, abs, -7, served=processes) == (7, "")
    assert answers(60, path, os._exit, 3, served=processes)[1] == "its process died, with 3"
    assert answers(1, path, sum, range(1 << 40), served=processes)[1] == "takes more than 1 s of the processor"
    monkeypatch.setattr("mutants.processes.SLEEP_SHARE", 1)
    assert answers(1, path, time.sleep, 600, served=processes)[1] == "waits for what never comes"


def test_a_function_is_changed_wherever_it_was_imported(collected: Any) -> None:
    from mutants.collected import UNCHANGED, run_collected
    from mutants.mutations import mutants_of
    from mutants.session import Change

    processes, path = collected
    some = [mutant for mutant in mutants_of(PACKAGE / "queues" / "completion.py") if mutant.function == "pack_completion"]
    test = f"{LAYOUT_TESTS}::test_completions_survive_packing"
    for mutant in some:
        change = Change(mutant.module, mutant.path, mutant.source)
        said, died = answers(60, path, run_collected, {test: 60.0}, change, mutant.function, served=processes)
        assert said.startswith(test) and not died, mutant
    same = Change(some[0].module, some[0].path, some[0].path.read_text())
    assert answers(60, path, run_collected, {test: 60.0}, same, "pack_completion", served=processes) == ("", "")
    assert answers(60, path, run_collected, {test: 60.0}, same, "no_function", served=processes) == (UNCHANGED, "")


def test_a_planted_mutant_is_what_the_tests_import(tmp_path: Path, seed: int) -> None:
    from mutants.session import Change, run_tests, trace_tests

    path = PACKAGE / "queues" / "completion.py"
    traced = answers(120, "fresh", trace_tests, LAYOUT_TESTS, [str(path)], seed, str(tmp_path))[0]
    assert not traced.left_out and {file for file, _, _ in traced.lines} == {str(path)}
    tests = {test: 60.0 for _, _, reaching in traced.lines for test in reaching if "::" in test}
    assert all("import " + LAYOUT_TESTS in reaching for _, line, reaching in traced.lines if line == 1)
    assert tests and tests.keys() <= traced.seconds.keys()
    whole = Change("blinkpy.queues.completion", path, path.read_text())
    assert answers(120, "fresh", run_tests, tests, whole, seed, str(tmp_path)) == ("", "")
    wrong = whole.source + "\n\ndef lap_of(position, size):\n    return 1\n"
    said, _ = answers(120, "fresh", run_tests, tests, whole._replace(source=wrong), seed, str(tmp_path))
    assert said.partition(": ")[0] in tests
    endless = wrong.replace("    return 1", "    while True:\n        pass")
    limits = dict.fromkeys(tests, 0.5)  # of a test; that of the process is far away
    said, died_of = answers(600, "fresh", run_tests, limits, whole._replace(source=endless), seed, str(tmp_path))
    assert "EndlessCallError" in said and not died_of
    assert path.read_text() == whole.source


def test_several_lanes_run_the_planted_mutant(tmp_path: Path, seed: int) -> None:
    from mutants.session import Change, run_tests

    path = PACKAGE / "kv" / "page_allocator.py"
    wrong = path.read_text().replace("min(total, missing - taken)", "total")  # which one lane does not see
    test = "tests/compiled/scheduler/test_lane_races.py::test_lanes_evict_as_many_pages_as_are_missing[3]"
    change = Change("blinkpy.kv.page_allocator", path, wrong)
    assert answers(120, "fresh", run_tests, {test: 60.0}, change, seed, str(tmp_path))[0].startswith(test)


def test_a_loop_of_a_stage_is_told_from_an_error(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from mutants import stages
    from mutants.hunt import Hunted
    from mutants.mutations import mutants_of
    from mutants.session import Change

    monkeypatch.setattr(stages, "CALL_S", 2.0)
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


def test_a_ledger_keeps_verdicts_as_long_as_the_function_is_the_same(tmp_path: Path, seed: int) -> None:
    from mutants.mutations import mutants_of
    from mutants.results import Ledger, Verdict

    path = tmp_path / "ledger.jsonl"
    some = mutants_of(PACKAGE / "queues" / "completion.py")[:5]
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


def test_who_lived_is_hunted_first_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mutants import __main__ as command
    from mutants.results import Ledger, Verdict

    path, asked = tmp_path / "ledger.jsonl", list[list[str]]()

    def hunted_down(waiting: list[Any], *others: Any) -> Iterator[Any]:
        asked.append([hunted.mutant.name for hunted in waiting])
        yield from ()

    monkeypatch.setattr(command, "hunted_down", hunted_down)
    monkeypatch.setattr(command, "GROUPS", {"queues": ("queues/completion.py",)})
    monkeypatch.setattr(command, "equivalent", dict)
    options = ["--all", "--resume", "--ledger", str(path)]
    chosen = command.chosen(command.parser().parse_args(options), command.FULL_SEED)[0]
    lived, killed = chosen[-1].mutant, chosen[0].mutant
    for mutant, by in ((lived, ""), (killed, "simulator")):
        Ledger(path).add(Verdict.of(mutant, "queues", by, "an error" if by else "", 1.0))
    for again in ([], ["--again"]):
        command.hunt_all(command.parser().parse_args([*options, *again]), command.FULL_SEED)
    others = [hunted.mutant.name for hunted in chosen[1:-1]]
    assert asked == [others, [lived.name, *others]]


def test_one_run_at_a_time_adds_to_a_ledger(tmp_path: Path) -> None:
    from mutants.results import alone

    path = tmp_path / "ledger.jsonl"
    for _ in range(2):
        with alone(path), pytest.raises(SystemExit, match="another run adds"), alone(path):
            pass


def test_a_run_ends_when_it_is_told_to_in_the_state_machine(tmp_path: Path) -> None:
    """Hypothesis takes some of what a signal raises for a failure of what it runs, and goes on."""
    code = """
import os, signal, sys
from mutants import __main__ as run
from hypothesis import given, settings, strategies as st

seen = set()

def told(arguments, seed):
    @settings(max_examples=5, database=None)
    @given(st.integers())
    def test(number):
        if number not in seen:
            seen.add(number)
            os.kill(os.getpid(), signal.SIGTERM)
    try:
        test()
    except Exception:
        print("goes on")

run.hunt_all, sys.argv = told, ["mutants"]
raise SystemExit(run.main())
"""
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tools'}"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 143 and "goes on" not in done.stdout, done.stderr


def test_a_mutant_is_another_one_when_its_function_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mutants import mutations

    monkeypatch.setattr(mutations, "PACKAGE", tmp_path)
    path = tmp_path / "queues.py"

    def found(text: str) -> dict[str, tuple[str, str]]:
        path.write_text(text)
        return {mutant.name: (mutant.id, mutant.text) for mutant in mutations.mutants_of(path)}

    one, two = "def one(a):\n    return a + 7\n", "\n\ndef two(a):\n    return a + 8\n"
    first = found(one + two)
    assert found("A = 1\n" + one + two) == first
    other = found(one.replace("return", "a = -a\n    return") + two)
    assert {name for name in first if other[name] != first[name]} == {name for name in first if "::one" in name}
    assert all(other[name][0] == first[name][0] for name in first)


def test_a_result_counts_each_module_and_is_shown(tmp_path: Path) -> None:
    from mutants.mutations import mutants_of
    from mutants.results import COUNTS, Verdict, interval, result, write

    some = [mutant for file in ("completion", "layout") for mutant in mutants_of(PACKAGE / "queues" / f"{file}.py")[:4]]
    ends = [("simulator", "an error"), ("a.py::x", "a timeout"), ("", ""), ("a.py::y", "an error"), ("", "")]
    verdicts = [Verdict.of(mutant, "queues", by, how, 1.0) for mutant, (by, how) in zip(some, ends, strict=False)]
    found = result([(mutant, "queues") for mutant in some], verdicts, Counter({"queues/layout.py": 2, "kv/other.py": 7}))
    assert (found["asked"], found["killed"], found["survived"], found["equivalent"]) == (8, 3, 2, 2)
    counts = {file: [found["modules"][file][name] for name in COUNTS] for file in found["modules"]}
    assert counts == {"queues/completion.py": [3, 1, 0, 0], "queues/layout.py": [0, 1, 2, 3]}
    queues = found["groups"]["queues"]
    assert [queues[name] for name in ("modules", *COUNTS)] == [2, 3, 2, 2, 3]
    assert queues["interval"] == pytest.approx(interval(3, 5), abs=1e-4)
    assert dict(found["killers"]) == {"a.py": 2, "simulator": 1} and found["how"]["a timeout"] == 1
    assert found["survivors"] == sorted(some[n].name for n in (2, 4))
    write(tmp_path / "mutants.json", found)
    shown = part_tables.mutants(part_tables.Results(tmp_path))
    assert shown["total"] == {"killed": "3", "survived": "2", "unknown": "3"} and shown["share"] == "60.0 % (23.1 to 88.2)"
    assert shown["weak"] == ["`queues/completion.py` 3 of 4", "`queues/layout.py` 0 of 1"]


@pytest.mark.parametrize(("killed", "planted", "low", "high"), [(10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962), (0, 0, 0, 1)])
def test_a_sample_says_how_sure_it_is(killed: int, planted: int, low: float, high: float) -> None:
    """Against the interval's figures in textbooks."""
    from mutants.results import interval

    assert interval(killed, planted) == pytest.approx((low, high), abs=1e-4)
