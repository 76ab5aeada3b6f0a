"""The simulator: no violation, the same results in Python and compiled, and reproducible failures.

Tester [simulator](#the-simulator): scheduler, allocator and prefix cache, compiled or in plain Python |
1.5 million turns under all shipped policies, with fresh seeds; 5,300 turns in lanes
"""

import importlib
import multiprocessing
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.seeded_bugs import SCHEDULER_BUGS, Bug, planted

from blinkpy.device.expect import describe_fault
from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.sim.__main__ import main
from blinkpy.verify.sim.runs import BLOCK, RunReport, Scenario, Storm, narrate, run, shrink
from blinkpy.verify.sim.simulation import ENDLESS, Failure, Outcome, Simulation, simulate
from blinkpy.verify.sim.synthetic_model import draw, start_draws
from blinkpy.verify.sim.world import uneven_world

TURNS = 1_500_000
UNEVEN = 60  # worlds


def test_many_worlds_under_every_shipped_policy(seed: int) -> None:
    """Claim state/pages (simulator): Free, cached and held pages add up to all pages. An unshared page has one
    owner, reference counts equal the references, and every list and bound holds.

    Claim decisions/progress (simulator): Every request ends within a bounded number of turns, under every
    shipped policy.
    """
    report = run(list(SHIPPED.values()), seed, steps=TURNS)
    assert not report.failures, report.failures
    assert report.calls >= TURNS


def test_every_decision_is_that_of_the_rules(seed: int) -> None:
    """Claim decisions/rules: Each decision follows the rules below."""
    report = run(list(SHIPPED.values()), seed, steps=40_000, turns=1000, oracle=True)
    assert not report.failures, report.failures


def test_decisions_in_uneven_worlds(seed: int) -> None:
    """The time of a step grows with its batch, with jitter, and each class has its own pace."""
    policies = list(SHIPPED.values())
    for world in range(seed, seed + UNEVEN):
        outcome = simulate(world, 200, policies[world % len(policies)], oracle=True, world=uneven_world(world, 200))
        assert not outcome.failure, outcome.failure


WRONG_PACES = [
    Bug("an estimate is capped at the other class's pace", "pace",
        "min(slowest, limits.best_effort_pace_ns)", "min(slowest, limits.pace_ns)"),
    Bug("both classes have one pace", "pace",
        "pace_ns = limits.best_effort_pace_ns if best_effort else limits.pace_ns", "pace_ns = limits.pace_ns"),
]  # fmt: skip


@pytest.mark.parametrize("bug", WRONG_PACES, ids=lambda bug: bug.what)
def test_uneven_worlds_find_a_wrong_pace(bug: Bug) -> None:
    """Of worlds with even steps, only the 34th would find these bugs."""
    policies = list(SHIPPED.values())
    with planted(bug):
        make_turn = importlib.import_module("blinkpy.scheduler.cycle").make_turn
    for seed in range(1, 60):
        policy, world = policies[seed % len(policies)], uneven_world(seed, 200)
        scheduler = make_turn(policy)
        if simulate(seed, 200, policy, mode="python", checks="python", oracle=True, scheduler=scheduler, world=world).failure:
            return
    raise AssertionError("no world finds it")


def test_every_turn_is_repeated_from_its_record(seed: int) -> None:
    """A replay makes the same decisions and the same record, from a world's first turn on, over rings that wrap.

    Supports claim recordings/replay.
    """
    report = run(list(SHIPPED.values()), seed, steps=10_000, turns=500, records=True)
    assert not report.failures, report.failures


@pytest.mark.parametrize(("lanes", "steps"), [(2, 800), (5, 1500), (32, 500)])
def test_several_lanes_do_what_one_lane_does(seed: int, lanes: int, steps: int) -> None:
    """In random order, bit for bit after each turn, records included, without a race; and as the rules demand.

    Claim state/lanes: If one lane writes a word, no other lane touches it between the same two barriers.
    No index is below 0.
    """
    report = run(list(SHIPPED.values()), seed, steps, turns=100, oracle=True, records=True, lanes=lanes)
    assert not report.failures, report.failures


@pytest.mark.parametrize(
    ("before", "after", "fault"),
    [
        ("    barrier(lanes)\n    for i in strided(lane, taken, lanes):", "    for i in strided(lane, taken, lanes):", ""),
        ("free + (before & _LOW)]", "free + (total & _LOW) - 1 - (before & _LOW)]", "than one lane (pages.free"),
    ],
    ids=["a barrier is missing", "free pages are in another order, which breaks no rule"],
)
def test_bugs_of_several_lanes_only_are_found(before: str, after: str, fault: str) -> None:
    with planted(Bug("", "page_allocator", before, after)):
        schedule = importlib.import_module("blinkpy.scheduler.cycle").make_turn(SHIPPED["fcfs"])
    assert not any(simulate(seed, 100, scheduler=schedule, oracle=True).failure for seed in range(1, 8))
    found = [simulate(seed, 100, scheduler=schedule, oracle=True, lanes=5).failure for seed in range(1, 8)]
    assert any(failure and fault in str(failure) for failure in found), found
    assert found == [simulate(seed, 100, scheduler=schedule, oracle=True, lanes=5).failure for seed in range(1, 8)]


def test_a_storm_reaches_everything() -> None:
    """Worlds without a preemption, hit or fence would prove little."""
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
    """A scheduler that ignores cancels of waiting requests."""
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
    """Supports claim testers/seeded-bugs."""
    failure = _failure(broken)
    assert simulate(failure.seed, 300, scheduler=broken).failure == failure
    scenario = shrink(failure, SHIPPED["fcfs"], "fcfs", seconds=200, scheduler=broken)
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


# ---- several processes --------------------------------------------------------------------------------------------------


def test_several_processes_match_one_process(seed: int) -> None:
    policies = list(SHIPPED.values())
    report = run(policies, seed, steps=6000, turns=200, oracle=True, processes=2)
    alone = Storm(policies, 200, 1, 1, {"oracle": True}).block(seed, report.worlds)[1]
    assert not report.failures and report.worlds % BLOCK == 0
    assert (report.calls, report.judged) == tuple(
        sum(outcome.calls for _, outcome in alone if outcome.judged or all_of) for all_of in (True, False)
    )
    assert 6000 <= report.calls and 0 < report.judged < report.calls


def test_lanes_are_for_a_share_of_each_policys_worlds() -> None:
    storm = Storm(list(SHIPPED.values()), 1, 5, 10, {})
    lanes = [(storm.policy(seed), storm.lanes_of(seed)) for seed in range(7, 7 + 40 * len(SHIPPED))]
    assert all(lanes.count((policy, 5)) == 4 and lanes.count((policy, 1)) == 36 for policy in SHIPPED.values())


def _fake_simulate(wrong: int, waits: bool = False) -> Callable[..., Outcome]:
    """Every world takes 10 turns. The world of one seed fails, or never ends."""

    def simulate(seed: int, turns: int, policy: object, **options: object) -> Outcome:
        while waits and seed == wrong:
            time.sleep(1)
        return Outcome(10, Failure(seed, turns, 7, ENDLESS) if seed == wrong and turns > 1 else None)

    return simulate


@pytest.mark.parametrize(("processes", "policy", "lanes"), [("1", "all", 5), ("3", "all", 5), ("3", "short-prompts", 1)])
def test_the_first_failure_ends_all_and_the_printed_command_repeats_it(
    processes: str,
    policy: str,
    lanes: int,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("blinkpy.verify.sim.runs.simulate", _fake_simulate(1041))
    shrunk: list[dict[str, object]] = []

    def shrink(failure: Failure, policy: object, name: str, **options: object) -> Scenario:
        shrunk.append({"failure": failure, "policy": name, **options})
        return Scenario(failure.seed, 1, name, [(0, 0)])

    monkeypatch.setattr("blinkpy.verify.sim.__main__.shrink", shrink)
    options = ["--lanes", "5", "--lanes-every", "13", "--oracle", "--turns", "9", "--save", str(tmp_path), "--steps", str(10**12)]
    assert main(["--seed", "1000", "--processes", processes, "--policy", policy, *options]) == 1
    (line,) = re.findall("again: python -m blinkpy.verify.sim (.*)", capsys.readouterr().out)
    assert main([*line.split(), "--save", str(tmp_path)]) == 1
    assert capsys.readouterr().out.startswith("10 turns in 1 worlds (seeds 1041 to 1041)")
    assert len(shrunk) == 2 and shrunk[0] == shrunk[1]
    assert shrunk[0]["policy"] == (list(SHIPPED)[1041 % len(SHIPPED)] if policy == "all" else policy)
    assert shrunk[0]["lanes"] == lanes and shrunk[0]["oracle"]
    assert not multiprocessing.active_children()


def test_a_world_that_does_not_end_is_a_failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkpy.verify.sim.runs.simulate", _fake_simulate(1002, waits=True))
    monkeypatch.setattr("blinkpy.verify.sim.runs.STUCK_S", 3.0)
    assert main(["--seed", "1000", "--processes", "2", "--seconds", "0.1"]) == 1
    out = capsys.readouterr().out
    assert f"seed 1000, turn 0: one of the {BLOCK} worlds that begin with this seed does not end" in out and "--seed 1000 " in out
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "--steps must be at least 1"),
        (["--processes", "0"], "--processes must be at least 1"),
        (["--lanes-every", "0"], "--lanes-every must be at least 1"),
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
