"""Assumptions of phases: an exception in Python, a fault word in checked code, and no code in the serving scheduler.

Supports claim state/checks.
"""

import importlib
from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numba import njit
from support.expecting_phases import EXPECTING
from support.part_of_cases import part_of

from blinkpy.device.expect import FAULT_TEXTS, BrokenInvariantError, describe_fault, expect, fault_at, fault_code, is_faulted
from blinkpy.device.tables import ArgumentTable
from blinkpy.kv.invariants import check_state as phase_faults
from blinkpy.kv.invariants.check_state import state_faults
from blinkpy.kv.state import FINISHING, RUNNING, WAITING
from blinkpy.kv.state_memory import differences, snapshot
from blinkpy.scheduler.policies import short_prompts
from blinkpy.sources import PACKAGE
from blinkpy.verify.sim.simulation import Mode, Simulation, simulate
from blinkpy.verify.sim.world import make_world

BROKEN = fault_code("slot {} is broken by a test")
OTHER = fault_code("something else is broken by a test")
CODES = {name: code for name, code in vars(phase_faults).items() if name.isupper()}
MODES: list[Mode] = part_of(["python", "njit"], 2)  # to compile a checked scheduler takes 40 s
RECORDED = {"RECORD_BEYOND", "COPIED_BEYOND"}  # the simulator's worlds have no recorder; tests of recordings reach these


def test_python_raises() -> None:
    state = SimpleNamespace()
    expect(state, True, BROKEN)
    with pytest.raises(BrokenInvariantError, match="slot 7 is broken by a test") as raised:
        expect(state, False, fault_at(BROKEN, 7))
    assert raised.value.fault == fault_at(BROKEN, 7) and not is_faulted(state)


def test_fault_codes_are_distinct_and_a_clash_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fault_code("slot {} is broken by a test") == BROKEN != OTHER
    assert describe_fault(fault_at(OTHER, 3)) == "something else is broken by a test"
    monkeypatch.setitem(FAULT_TEXTS, BROKEN, "another text")
    with pytest.raises(ValueError, match="two faults have the code"):
        fault_code("slot {} is broken by a test")


@njit
def check_both(state: Any, slot: Any) -> Any:
    expect(state, state.requests.status[slot] == 0, fault_at(BROKEN, slot))
    expect(state, state.requests.num_pages[slot] == 0, OTHER)
    return is_faulted(state)


@pytest.mark.parametrize("checked", [False, True])
def test_compiled_code_keeps_the_first_fault_of_a_checked_state(checked: bool) -> None:
    world = make_world(1, 1, checked=checked)
    table = ArgumentTable(world.state)
    assert not check_both(table, 0)
    world.state.requests.status[0] = world.state.requests.num_pages[0] = 1
    assert check_both(table, 0) == checked
    faults = state_faults(world.limits, world.state)
    assert (faults == ["slot 0 is broken by a test"]) == checked and faults


def test_every_phase_expects_two_things_and_storms_look_at_all_of_them(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    assert not [path.name for path, count in EXPECTING.items() if count < 2]
    seen: Counter[int] = Counter()

    def counting(state: Any, condition: Any, code: int) -> None:
        seen[code] += 1
        expect(state, condition, code)

    for path in EXPECTING:
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        monkeypatch.setattr(importlib.import_module(module), "expect", counting, raising=False)
    for number in range(200):
        assert simulate(seed + number, 300, mode="python").failure is None
        if len(seen) == len(CODES) - len(RECORDED):
            break
    assert {name for name, code in CODES.items() if not seen[code]} == RECORDED


@pytest.mark.parametrize("mode", MODES)
def test_a_checked_scheduler_leaves_the_same_state(mode: Mode, seed: int) -> None:
    for number in range(10):
        runs = [Simulation(seed + number, 300, short_prompts, mode=mode, checked=checked) for checked in (False, True)]
        assert [run.run().failure for run in runs] == [None, None]
        plain, checked = (run.world for run in runs)
        assert not differences(snapshot(plain.state), snapshot(checked.state)) and plain.segment == checked.segment
        assert not len(plain.state.fault) and checked.state.fault.tolist() == [0]


@pytest.mark.parametrize("mode", MODES)
def test_damage_is_found_where_a_phase_relies_on_it(mode: Mode, seed: int) -> None:
    listed = np.zeros(0, np.int64)
    while not listed.size:  # in some worlds no request needs them
        run = Simulation(seed, 300, short_prompts, mode=mode, checked=True, check_every=1000)
        seed, status = seed + 1, run.world.state.requests.status
        for _ in range(300):
            if (listed := np.flatnonzero((status == RUNNING) | (status == WAITING))).size:
                break
            assert run.advance()
    status[listed[0]] = FINISHING
    assert not run.advance()
    assert run.code == phase_faults.LISTED_IDLE
    if mode == "njit":
        assert state_faults(run.world.limits, run.world.state) == [FAULT_TEXTS[run.code]]
