"""The simulator: no violation, the same in Python and compiled, and failures that can be repeated."""

import importlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.seeded_bugs import SCHEDULER_BUGS, Bug, planted

from blinkpy.device.expect import describe_fault
from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.sim.__main__ import main
from blinkpy.verify.sim.draws import draw, start_draws
from blinkpy.verify.sim.runs import RunReport, run
from blinkpy.verify.sim.scenario import Scenario, narrate, shrink
from blinkpy.verify.sim.simulation import Failure, Simulation, simulate


def test_many_worlds_under_every_shipped_policy(seed: int) -> None:
    report = run(list(SHIPPED.values()), seed, steps=1_500_000)
    assert not report.failures, report.failures
    assert report.calls >= 1_500_000


def test_every_decision_is_that_of_the_rules(seed: int) -> None:
    report = run(list(SHIPPED.values()), seed, steps=40_000, turns=1000, oracle=True)
    assert not report.failures, report.failures


def test_every_turn_is_repeated_from_its_record(seed: int) -> None:
    """To the same decisions and the same record, from a world's first turn on, over rings that wrap."""
    report = run(list(SHIPPED.values()), seed, steps=10_000, turns=500, records=True)
    assert not report.failures, report.failures


@pytest.mark.parametrize(("lanes", "steps"), [(2, 800), (5, 1500), (32, 500)])
def test_several_lanes_do_what_one_lane_does(seed: int, lanes: int, steps: int) -> None:
    """In random order, bit for bit after each turn, records included, without a race; and that is what the rules say."""
    report = run(list(SHIPPED.values()), seed, steps, turns=100, oracle=True, records=True, lanes=lanes)
    assert not report.failures, report.failures


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("    barrier(lanes)\n    for i in strided(lane, taken, lanes):", "    for i in strided(lane, taken, lanes):", ""),
        ("free + (before & _LOW)]", "free + (total & _LOW) - 1 - (before & _LOW)]", "than one lane does (pages.free"),
    ],
    ids=["a barrier is missing", "free pages are in another order, which breaks no rule"],
)
def test_what_goes_wrong_in_several_lanes_alone_is_found(before: str, after: str, fault: str) -> None:
    with planted(Bug("", "page_allocator", before, after)):
        schedule = importlib.import_module("blinkpy.scheduler.cycle").make_turn(SHIPPED["fcfs"])
    assert not any(simulate(seed, 100, scheduler=schedule, oracle=True).failure for seed in range(1, 8))
    found = [simulate(seed, 100, scheduler=schedule, oracle=True, lanes=5).failure for seed in range(1, 8)]
    assert any(failure and fault in str(failure) for failure in found), found
    assert found == [simulate(seed, 100, scheduler=schedule, oracle=True, lanes=5).failure for seed in range(1, 8)]


def test_a_storm_reaches_everything() -> None:
    """Worlds that see no preemption, hit or fence would prove little."""
    totals: dict[str, int] = {}
    for seed in range(1, 120):
        simulation = Simulation(seed, 1500)
        assert simulation.run().failure is None
        for name, value in simulation.counters().items():
            totals[name] = totals.get(name, 0) + value
    missing = [name for name, value in totals.items() if value < 100 and name not in ("integrity_errors", "policy_faults")]
    assert not missing, totals


def test_muted_acts_leave_the_draws_of_others_alone() -> None:
    draws = np.zeros(1, np.int64).data

    def numbers(turn: int, actor: int) -> list[int]:
        start_draws(draws, 7, turn, actor)
        return [int(draw(draws, 1000)) for _ in range(20)]

    assert numbers(3, 1) == numbers(3, 1)
    assert len({tuple(numbers(turn, actor)) for turn in range(20) for actor in range(5)}) == 100


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
        if failure and "cancel" in describe_fault(failure.code):
            return failure
    raise AssertionError("no seed fails")


def test_a_failure_is_shrunk_saved_and_repeated(broken: Callable[..., int], tmp_path: Path) -> None:
    failure = _failure(broken)
    assert simulate(failure.seed, 300, scheduler=broken).failure == failure
    scenario = shrink(failure, SHIPPED["fcfs"], "fcfs", seconds=10, scheduler=broken)
    assert 1 <= len(scenario.keep) <= 20
    path = tmp_path / "found" / "scenario.json"
    scenario.save(path)
    assert Scenario.load(path) == scenario
    lines = list(narrate(Scenario.load(path), SHIPPED["fcfs"], scheduler=broken))
    assert describe_fault(failure.code) in lines[-1]
    assert any("cancels" in line for line in lines)
    assert "all ended well" in list(narrate(scenario, SHIPPED["fcfs"]))[-1]  # without the bug


def test_the_command_runs_seeds_and_says_what_it_did(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["--steps", "3000", "--turns", "500", "--policy", "fcfs", "--save", str(tmp_path)]) == 0
    assert "no violation" in capsys.readouterr().out


def test_the_command_reports_a_failure_and_repeats_it(
    broken: Callable[..., int], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failure = _failure(broken)
    report = RunReport(failure.seed, 1, 10, 0.1, [(SHIPPED["fcfs"], failure)])
    monkeypatch.setattr("blinkpy.verify.sim.__main__.run", lambda *arguments, **options: report)
    scenario = Scenario(failure.seed, 30, "fcfs", [(2, 0)])
    monkeypatch.setattr("blinkpy.verify.sim.__main__.shrink", lambda *arguments, **options: scenario)
    assert main(["--save", str(tmp_path)]) == 1
    assert f"seed {failure.seed}, turn {failure.turn}: {describe_fault(failure.code)}" in capsys.readouterr().out
    assert main(["--replay", str(tmp_path / f"seed-{failure.seed}.json")]) == 0
    assert "all ended well" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--policy", "no-such-policy"], "policy must be"),
        (["--policy", "nowhere.py:rank"], "does not exist"),
        (["--replay", "/nowhere/scenario.json"], "can't read"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"seed": 1, "turns": 2, "policy": "fcfs", "keep": [[1]]}'])
def test_a_file_that_is_no_scenario_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(text)
    assert main(["--replay", str(path)]) == 2
    assert "is not a scenario" in capsys.readouterr().err
