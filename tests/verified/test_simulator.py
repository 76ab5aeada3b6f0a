"""The simulator: no violation, the same in Python and compiled, and failures that can be repeated."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numba import types
from support.seeded_bugs import SCHEDULER_BUGS, planted

from blinkpy.device.array_trees import named_arrays
from blinkpy.device.compile_cache import cached_njit
from blinkpy.device.expect import PROBLEMS
from blinkpy.device.table_codegen import ArgumentTable
from blinkpy.kv.integrity import check_integrity
from blinkpy.kv.invariants.check_state import find_problem
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.sim.__main__ import main
from blinkpy.verify.sim.draws import draw, start_draws
from blinkpy.verify.sim.failure_story import tell
from blinkpy.verify.sim.runs import Report, run
from blinkpy.verify.sim.shrink import Schedule, shrink
from blinkpy.verify.sim.simulation import Failure, Simulation, simulate


def test_many_worlds_under_every_shipped_policy(seed: int) -> None:
    report = run(list(SHIPPED.values()), seed, steps=1_500_000)
    assert not report.failures, report.failures
    assert report.calls >= 1_500_000


def test_a_storm_reaches_everything() -> None:
    """Worlds that see no preemption, hit or fence would prove little."""
    totals: dict[str, int] = {}
    for seed in range(1, 120):
        simulation = Simulation(seed, 1500)
        assert simulation.run().failure is None
        for name, value in simulation.counters().items():
            totals[name] = totals.get(name, 0) + value
    missing = [name for name, value in totals.items() if value < 100 and name != "integrity_errors"]
    assert not missing, totals


def test_muted_acts_leave_the_draws_of_others_alone() -> None:
    draws = np.zeros(1, np.int64).data

    def numbers(turn: int, actor: int) -> list[int]:
        start_draws(draws, 7, turn, actor)
        return [int(draw(draws, 1000)) for _ in range(20)]

    assert numbers(3, 1) == numbers(3, 1)
    assert len({tuple(numbers(turn, actor)) for turn in range(20) for actor in range(5)}) == 100


# ---- the compiled checks are those of kv.integrity ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def compiled_find() -> Callable[[Limits, State], int]:
    function = cached_njit(find_problem)

    def find(limits: Limits, state: State) -> int:
        scratch = np.zeros(max(limits.slots, limits.pages), np.int64)
        tables = ArgumentTable(limits), ArgumentTable(state)
        vector = types.Array(types.int64, 1, "C")
        function.compile((tables[0].kind, tables[1].kind, vector, vector))
        return int(function(*tables, scratch, scratch.copy()))

    return find


def test_compiled_checks_agree_with_the_readable_ones(seed: int, compiled_find: Callable[[Limits, State], int]) -> None:
    """Random states of random worlds, each with one word of its arrays damaged, and undamaged."""
    draw_from = random.Random(seed)
    damaged = 0
    for number in range(40):
        simulation = Simulation(seed + number, 400)
        for _ in range(draw_from.randint(20, 400)):
            assert simulation.advance()
        limits, state = simulation.world.limits, simulation.world.state
        assert check_integrity(limits, state) == [] and compiled_find(limits, state) == 0
        arrays = [(name, array) for name, array in named_arrays(state) if array.size and not name.startswith(CONSTANT)]
        for _ in range(150):
            name, array = draw_from.choice(arrays)
            index = tuple(draw_from.randrange(n) for n in array.shape)
            before = array[index]
            array[index] = draw_from.choice((before + 1, before - 1, before ^ 1, 0, -1, draw_from.randrange(limits.pages)))
            damaged += _agrees(limits, state, name, compiled_find)
            array[index] = before
    assert damaged > 500


CONSTANT = ("scratch.", "inbox.", "requests.pair", "requests.entry", "buckets.")  # or not looked at between calls


def _agrees(limits: Limits, state: State, name: str, find: Callable[[Limits, State], int]) -> bool:
    """Compare the two; whether they found damage."""
    try:
        problems = check_integrity(limits, state)
    except IndexError:
        problems = ["an index is out of range"]
    found = find(limits, state)
    assert (found == 0) == (problems == []), (name, PROBLEMS.get(found), problems)
    if found and problems != ["an index is out of range"]:
        assert any(PROBLEMS[found] in problem for problem in problems), (name, PROBLEMS[found], problems)
    return bool(found)


# ---- failures -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken() -> Callable[..., int]:
    """A scheduler that forgets cancels of waiting requests."""
    bug = next(bug for bug in SCHEDULER_BUGS if "cancel of a waiting" in bug.what)
    with planted(bug):
        schedule: Callable[..., int] = importlib.import_module("blinkpy.scheduler.cycle").make_turn(SHIPPED["fcfs"])
    return schedule


def _failure(schedule: Callable[..., int]) -> Failure:
    for seed in range(1, 100):
        failure = simulate(seed, 300, scheduler=schedule).failure
        if failure and "cancel" in PROBLEMS[failure.code]:
            return failure
    raise AssertionError("no seed fails")


def test_a_failure_is_shrunk_saved_and_repeated(broken: Callable[..., int], tmp_path: Path) -> None:
    failure = _failure(broken)
    assert simulate(failure.seed, 300, scheduler=broken).failure == failure
    actors = Simulation(failure.seed, 1).world.limits.pairs + 1
    schedule = shrink(failure, SHIPPED["fcfs"], "fcfs", actors, seconds=10, scheduler=broken)
    assert 1 <= len(schedule.keep) <= 20
    path = tmp_path / "found" / "schedule.json"
    schedule.save(path)
    assert Schedule.load(path) == schedule
    lines = list(tell(Schedule.load(path), SHIPPED["fcfs"], scheduler=broken))
    assert PROBLEMS[failure.code] in lines[-1]
    assert any("cancels" in line for line in lines)
    assert "all ended well" in list(tell(schedule, SHIPPED["fcfs"]))[-1]  # without the bug


def test_the_command_runs_seeds_and_says_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--steps", "3000", "--turns", "500", "--policy", "fcfs", "--save", str(tmp_path)]) == 0
    assert "no violation" in capsys.readouterr().out


def test_the_command_reports_a_failure_and_repeats_it(
    broken: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = _failure(broken)
    report = Report(failure.seed, 1, 10, 0.1, [(SHIPPED["fcfs"], failure)])
    monkeypatch.setattr("blinkpy.verify.sim.__main__.run", lambda *arguments, **options: report)
    monkeypatch.setattr("blinkpy.verify.sim.__main__.shrink", lambda *arguments: Schedule(failure.seed, 30, "fcfs", [(2, 0)]))
    assert main(["--save", str(tmp_path)]) == 1
    assert f"seed {failure.seed}, call {failure.turn}: {PROBLEMS[failure.code]}" in capsys.readouterr().out
    assert main(["--replay", str(tmp_path / f"seed-{failure.seed}.json")]) == 0
    assert "all ended well" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--policy", "no-such-policy"], "policy must be"),
        (["--policy", "nowhere.py:rank"], "does not exist"),
        (["--replay", "/nowhere/schedule.json"], "can't read"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"seed": 1, "turns": 2, "policy": "fcfs", "keep": [[1]]}'])
def test_a_file_that_is_no_schedule_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "schedule.json"
    path.write_text(text)
    assert main(["--replay", str(path)]) == 2
    assert "is not a schedule" in capsys.readouterr().err
