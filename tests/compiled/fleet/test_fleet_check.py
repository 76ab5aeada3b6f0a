"""blinkpy check --fleet: the simulated fleet uses the real scheduler and the real placement, and its figures are correct."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from blinkpy import cli
from blinkpy.dpu.fleet.placement import Placement
from blinkpy.dpu.fleet.placement_rules import SHIPPED_RULES
from blinkpy.scheduler.policies import fcfs
from blinkpy.verify.policy_check.fleet_report import ONE_ENGINE, FleetFigures, compare
from blinkpy.verify.policy_check.fleet_simulation import FLEET_WORKLOADS, NONE, QUESTION, FleetSimulation
from blinkpy.verify.policy_check.timed_server import OTHER, STOP, ServerModel, simulate

MACHINE = ServerModel(8, 512, page_size=16, num_pages=2048, step_us=4500.0, row_us=22.0, token_us=27.0)


def test_it_depends_on_its_seed_alone(seed: int) -> None:
    def figures(seed: int) -> list[FleetFigures]:
        rules = {name: SHIPPED_RULES[name] for name in ("prefix", "random")}
        return list(compare(rules, fcfs, MACHINE, 2, requests=30, rate=6.0, seed=seed, workloads=("chats",)))

    seed %= 1 << 31
    first = figures(seed)
    assert [(f.workload, f.placement) for f in first] == [("chats", name) for name in ("prefix", "random", ONE_ENGINE)]
    assert first == figures(seed)
    assert first != figures(seed + 1)


def test_a_fleet_of_one_is_one_server(rng: np.random.Generator) -> None:
    """Prompts share no prefix, as in the simulation of a policy, which uses only lengths."""
    workload = FLEET_WORKLOADS["azure"](60, 8.0, 1, rng)
    machine = dataclasses.replace(MACHINE, num_pages=8192)
    outcome = FleetSimulation(fcfs, machine, workload, 1, Placement(1, 16)).run()
    expected = simulate(fcfs, machine, workload.requests)
    assert np.array_equal(outcome.ttft_ns, expected.first_token - expected.arrival)
    assert outcome.hit_rate == 0


def test_hits_are_what_prompts_have_in_common(rng: np.random.Generator) -> None:
    """Consecutive requests to an engine with space for all: each finds the pages of an earlier one, except the page of
    its last token."""
    workload = FLEET_WORKLOADS["shared-prefix"](80, 0.01, 1, rng)
    outcome = FleetSimulation(fcfs, dataclasses.replace(MACHINE, num_pages=20_000), workload, 1, Placement(1, 16)).run()
    seen: set[bytes] = set()
    found = 0
    for prompt in workload.prompts:
        names = [prompt[:end].tobytes() for end in range(16, len(prompt) + 1, 16)]
        known = next((i for i, name in enumerate(names) if name not in seen), len(names))
        found += 16 * min(known, (len(prompt) - 1) // 16)
        seen.update(names)
    assert found > 0
    assert outcome.hit_rate == pytest.approx(found / sum(map(len, workload.prompts)))


def test_chats_return_to_their_engine_and_hit_its_cache(rng: np.random.Generator) -> None:
    workload = FLEET_WORKLOADS["chats"](60, 2.0, 3, rng)
    outcome = FleetSimulation(fcfs, MACHINE, workload, 3, Placement(3, 16)).run()
    assert (outcome.ttft_ns > 0).all()
    later = np.flatnonzero(workload.follows != NONE)
    stays = outcome.engine[later] == outcome.engine[workload.follows[later]]
    assert stays.mean() > 0.6
    for number in later:
        before, output = workload.prompts[workload.follows[number]], int(workload.requests.output[workload.follows[number]])
        said = np.concatenate((before, np.full(output - 1, OTHER), [STOP]))
        assert np.array_equal(workload.prompts[number][: len(said)], said)
        assert QUESTION[0] <= len(workload.prompts[number]) - len(said) < QUESTION[1]
    assert outcome.hit_rate > 0.4


# ---- the command -------------------------------------------------------------------------------------------------------

SMALL = ("--requests", "20", "--num-pages", "2048")


def test_the_command_shows_all_placements(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rule, reported = tmp_path / "first.py", tmp_path / "told.json"
    rule.write_text("def choose(request, engines):\n    return engines[0]\n")
    assert cli.main(["check", "fcfs", "--fleet", "2", "--placement", str(rule), *SMALL, "--json", str(reported)]) == 0
    out = capsys.readouterr().out
    figures = json.loads(reported.read_text())["figures"]
    assert len(figures) == len(FLEET_WORKLOADS) * 6
    assert out.count("first.py") == out.count("round-robin") == len(FLEET_WORKLOADS)
    assert [f["balance"] for f in figures if f["placement"] == str(rule)] == [2.0] * len(FLEET_WORKLOADS)
    assert "no errors found" in out


def test_a_placement_that_fails_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("blinkpy.verify.policy_check.fleet_report.SHIPPED_RULES", {})
    rule = tmp_path / "bad.py"
    rule.write_text("def choose(request, engines):\n    return None\n")
    assert cli.main(["check", "fcfs", "--fleet", "2", "--placement", str(rule), *SMALL]) == 1
    assert "failed for 20 requests" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a POLICY to check, or --fleet N"),
        (["fcfs", "--placement", "x.py"], "--placement needs --fleet"),
        (["--fleet", "1"], "--fleet must be at least 2"),
        (["--fleet", "65"], "fleet must be 0 to 64"),
        (["--fleet", "2", "--placement", "/nowhere/x.py"], "does not exist"),
        (["--fleet", "2", "--placement", "nothing"], "placement must be one of prefix, least-loaded"),
        (["nothing", "--fleet", "2"], "policy must be one of fair, fcfs"),
        (["--fleet", "2", "--workload", "x.csv"], "workload can't be used with --fleet"),
        (["--fleet", "2", "--plot", "x.png"], "plot can't be used with --fleet"),
        (["--fleet", "2", "--rate", "0"], "rate must be above 0"),
        (["--fleet", "2", "--num-pages", "16"], "increase num_pages"),
        (["--fleet", "2", "--json", "/nowhere/x.json"], "folder /nowhere does not exist"),
    ],
)
def test_wrong_usage_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *arguments]) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("blinkpy: error:")]
    assert message in line
