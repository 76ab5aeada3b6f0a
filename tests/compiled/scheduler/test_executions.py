"""Storms of the simulator: the scheduler under all permitted actions of front ends, with the same result in all executions."""

import ast
import importlib
import random
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.scheduler_cases import case_sizes
from support.tile_storms import Mirror, run_storms

from blinkpy.device.lanes import in_lanes
from blinkpy.device.tables import as_memoryviews, map_arrays
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import FAST_PATH, RUNNING_COUNT, UNRANKED_COUNT, WAITING_COUNT
from blinkpy.kv.state_memory import differences, snapshot
from blinkpy.scheduler.cycle import make_phases, make_turn
from blinkpy.scheduler.phases.plan import step_budget
from blinkpy.scheduler.policies import SHIPPED, Policy, fcfs, read_policy
from blinkpy.sources import PACKAGE, source_files
from blinkpy.verify.sim.simulation import Simulation, simulate
from blinkpy.verify.sim.world import Odds, make_world

# Long outputs and space for all requests: turns in which every request decodes, with rare arrivals.
ROOMY = case_sizes(slots=6, cq_entries=64, rows=6, tokens=24, mixed_step_tokens=12, page_size=2, pages=64, max_model_len=48)
CALM = Odds(**dict.fromkeys(Odds._fields, 0) | {"submit": 60, "answer": 40, "burst": 2, "comeback": 1000, "notice": 1000})
# More queue pairs than a turn counts together, many rows, and long prompts.
LARGE = case_sizes(pairs=9, slots=20, cq_entries=64, rows=48, tokens=256, mixed_step_tokens=96, pages=300, max_model_len=200)
FAULTING = Path(__file__).parents[2] / "support" / "faulting_policy.py"
FEW = ("python", "all python", "general", "overlapped", "njit")


def storms(names: tuple[str, ...], seed: int, rounds: int, policy: Policy, **chosen: Any) -> list[Simulation]:
    """The same storm in several executions of the scheduler.

    all python: with front ends, model and checks in Python; otherwise these are compiled.
    general: plain Python that never takes the fast path.
    overlapped: the part that needs no tokens runs before the model's step, as on a GPU.
    chosen: see make_world.
    """
    options: dict[str, Callable[[], dict[str, Any]]] = {
        "python": lambda: {"mode": "python"},
        "all python": lambda: {"mode": "python", "checks": "python"},
        "general": lambda: {"scheduler": make_phases(policy, fast_path=False).turn},
        "overlapped": lambda: {"overlapped": True, "mode": "python"},
        "njit": lambda: {"mode": "njit"},
    }
    worlds = [make_world(seed, rounds, **chosen) for _ in names]
    return [Simulation(seed, rounds, policy, world=world, **options[name]()) for name, world in zip(names, worlds, strict=True)]


def same(first: Simulation, other: Simulation) -> bool:
    """Whether states, shared memory, front ends and the memory of the checks are equal, bit for bit."""
    assert not differences(snapshot(first.world.state), snapshot(other.world.state))
    ours, theirs = ((*s.world.sim.fronts, *s.world.sim.observed) for s in (first, other))
    return first.world.segment == other.world.segment and all(map(np.array_equal, ours, theirs))


def agree(simulations: list[Simulation]) -> tuple[int, int]:
    """Run simulations side by side, and compare them after each round. Returns the number of rounds on the fast path, and of
    rounds in which a request finished."""
    fast = finished = 0
    first = simulations[0]
    for _ in range(first.turns):
        before = first.counters()["requests_finished"]
        assert all(simulation.advance() for simulation in simulations)
        assert all(same(first, other) for other in simulations[1:])
        if first.world.state.counts[FAST_PATH] != 0:
            fast += 1
            finished += first.counters()["requests_finished"] > before
    outcomes = [simulation.calm() for simulation in simulations]
    assert [outcome.failure for outcome in outcomes] == [None] * len(simulations)
    assert len({outcome.calls for outcome in outcomes}) == 1 and all(same(first, other) for other in simulations[1:])
    return fast, finished


@pytest.mark.parametrize("policy", sorted(SHIPPED))
def test_every_execution_leaves_the_same_state(seed: int, policy: str) -> None:
    """The simulator's checks ensure that each request gets its tokens and its end in each execution.

    Claim state/executions (simulator): No data that a running step reads is changed or freed. Each
    request gets exactly the engine's tokens, in order and once. Python, njit and several lanes leave the
    same state, bit for bit.
    """
    for number in range(4):
        agree(storms(FEW, seed + number, 120, SHIPPED[policy]))


def test_a_policy_that_faults_leaves_the_same_state_everywhere(seed: int) -> None:
    """In several lanes, too, and as the rules demand: ranks, the counter, and the published fault."""
    policy, faults = read_policy(f"{FAULTING}:rank"), 0
    for number in range(80):  # in one world of seven no request meets a fault
        if number >= 4 and faults > 0:
            break
        runs = storms(("python", "overlapped", *(("njit",) if number == 0 else ())), seed + number, 60, policy)
        agree(runs)
        judged = Simulation(seed + number, 60, policy, lanes=3, scheduler=make_turn(policy), checks="python", oracle=True)
        assert judged.run().failure is None
        faults += runs[0].counters()["policy_faults"] + judged.counters()["policy_faults"]
    assert faults > 0


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The maximum number of tiles that each strided loop of the scheduler ran in plain Python."""
    simulate(1, 1)  # compiled before any function is replaced
    most: dict[str, int] = {}

    def counted(first: int, last: int, lanes: int) -> range:
        caller = sys._getframe(1)
        site, count = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}", len(range(first, last, lanes))
        most[site] = max(most.get(site, 0), count)
        return range(first, last, lanes)

    for path in source_files(("kv", "scheduler")):
        if path.name == "rank_exchange.py":
            continue  # of several GPUs: test_rank_exchange.py runs it in several lanes
        text = path.read_text().splitlines()
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        lines = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "strided"]
        # Not prefetch_forecast, and not count_policy_faults: fcfs has no faults, see test_a_policy_that_faults.
        elsewhere = ("limits.rows, lanes", "lane, ranked, lanes")
        most |= {f"{path.name}:{line}": 0 for line in lines if not any(loop in text[line - 1] for loop in elsewhere)}
        if lines:
            module = importlib.import_module(".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts))
            monkeypatch.setattr(module, "strided", counted)
    return most


def test_storms_of_several_tiles_leave_the_same_state(seed: int, tiles: dict[str, int]) -> None:
    """Every strided loop runs several tiles in 4 lanes, as in the 256 lanes of tests/gpu/test_same_state.py.

    Supports claim state/lanes.
    """

    def twin(limits: Limits, mirror: Mirror) -> Callable[[int], int]:
        queues, state = (as_memoryviews(map_arrays(torch.Tensor.numpy, tree)) for tree in (mirror.queues, mirror.state))
        turn = in_lanes(make_turn(fcfs), 4, seed, races=True)
        return lambda now: turn(limits, queues, state, now, 0, 1)

    def few() -> dict[str, int]:
        return {site: most for site, most in tiles.items() if most < 2}

    seen = run_storms(4, seed, 300, 100, fcfs, twin, "cpu", seconds=200, enough=lambda: not few())
    print(f"{seen.steps} steps; {dict(seen.most)}; {dict(seen.happened)}")
    assert not seen.missing(4)
    assert not few()


def test_the_fast_path_is_usual_where_it_should_be(seed: int) -> None:
    """Hundreds of turns on each path leave the same state.

    Claim decisions/fast-path: The fast path leaves the same state as the full path. The budget depends
    only on decoding requests and waiting tokens.
    """
    fast, finished, rounds = 0, 0, 0
    for number in range(12):
        more = agree(storms(("python", "general"), seed + number, 200, fcfs, chosen=ROOMY, odds=CALM))
        fast, finished, rounds = fast + more[0], finished + more[1], rounds + 200
    print(f"{rounds} rounds, {fast} of them fast; requests finished in {finished} of these")
    assert rounds // 8 < fast < rounds - rounds // 8
    assert finished > 10


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_paths_agree_where_queues_have_just_room(seed: int, rows: int) -> None:
    """Completion queues of one to four entries for each row: claims are counted on the fast path and off it."""
    fast = 0
    for number, wide in product(range(2), (1, 2, 4)):
        space = {"slots": rows + 1, "cq_entries": max(2, wide * rows), "rows": rows, "pages": 64}
        sizes = case_sizes(**space, tokens=16, page_size=2, max_model_len=48)
        fast += agree(storms(("python", "general"), seed + number, 60, fcfs, chosen=sizes, odds=CALM))[0]
    assert fast > 10


def test_the_budget_follows_from_decoding_requests_and_waiting_tokens(seed: int) -> None:
    """Compared with the same rule in NumPy, in states of random storms. Waiting requests count, with a rank, or without if
    preempted.

    Supports claim decisions/fast-path.
    """
    sizes = case_sizes(slots=6, rows=4, tokens=20, mixed_step_tokens=8, burst_step_tokens=14, burst_tokens=24, pages=40)
    seen, draw = {8: 0, 14: 0, 20: 0}, random.Random(seed)
    for number in range(200):
        if number >= 24 and min(seen.values()) > 15:
            break
        (storm,) = storms(("general",), seed + number, 60, fcfs, chosen=sizes)
        limits, state = storm.world.limits, storm.world.state
        for _ in range(60):
            assert storm.advance()
            r, running = state.requests, state.running[: state.counts[RUNNING_COUNT]]
            lacking = (r.length - r.computed)[running][r.stalled[running] == 0]
            prompts = np.concatenate([lacking[lacking > 1], r.length[state.waiting[: state.counts[WAITING_COUNT]]]])
            expected = 20
            if (lacking == 1).any() and prompts.sum() <= 24:
                expected = 8
            elif (lacking == 1).any() and prompts.mean() > 8:
                expected = 14
            assert step_budget(limits, as_memoryviews(state), False, 0, 1) == expected
            unranked = draw.randint(0, int(state.counts[WAITING_COUNT]))
            state.counts[[WAITING_COUNT, UNRANKED_COUNT]] += [-unranked, unranked]
            assert step_budget(limits, as_memoryviews(state), False, 0, 1) == expected
            state.counts[[WAITING_COUNT, UNRANKED_COUNT]] -= [-unranked, unranked]
            seen[expected] += 1
    assert min(seen.values()) > 15, seen


def test_njit_on_larger_worlds(seed: int) -> None:
    finished = 0
    for number in range(6):
        (storm,) = storms(("njit",), seed + number, 150, fcfs, chosen=LARGE)
        assert storm.run().failure is None
        finished += storm.counters()["requests_finished"]
    assert finished > 50
