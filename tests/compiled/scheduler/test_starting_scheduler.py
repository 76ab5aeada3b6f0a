"""A scheduler that is interpreted until its code is compiled: the same state, and a compiler that may fail."""

import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest

from blinkpy.engine.devices.host_loop import HostLoop
from blinkpy.kv.state_memory import snapshot
from blinkpy.scheduler import starting_scheduler
from blinkpy.scheduler.host_scheduler import Scheduler, table_kinds
from blinkpy.scheduler.policies import SHIPPED, fcfs
from blinkpy.scheduler.starting_scheduler import StartingScheduler, start_scheduler
from blinkpy.verify.sim.simulation import Simulation
from blinkpy.verify.sim.world import World, make_world

TURNS = 120
COMPILER = [sys.executable, "-m", starting_scheduler.__name__]


def started(world: World, command: list[str]) -> StartingScheduler:
    compiler = subprocess.Popen(command, stdin=subprocess.PIPE)
    scheduler = StartingScheduler(world.limits, world.state, fcfs, compiler)
    scheduler.attach(world.queues)
    return scheduler


@pytest.mark.parametrize("compiler", [COMPILER, ["sleep", "1000"]], ids=["compiles", "is killed"])
def test_turns_go_on_with_the_same_state(compiler: list[str], seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Claim state/interpreted: A scheduler that is interpreted until its code is compiled has the same state, bit for bit."""
    world = make_world(seed, TURNS)
    scheduler = started(world, compiler)
    turn, modes = 0, list[str]()

    def play(limits: object, queues: object, state: object, now: int, lane: int, lanes: int) -> int:
        nonlocal turn
        turn += 1
        if turn == TURNS // 2:
            if compiler != COMPILER:
                scheduler._compiler.kill()
            scheduler._loader.join()
        result = scheduler.turn(now)
        modes.append(scheduler.mode)
        if turn % 10 == 0:
            assert scheduler.check() == []
        return result

    storm, compiled = Simulation(seed, TURNS, world=world, scheduler=play), Simulation(seed, TURNS)
    for each in (storm, compiled):
        assert all(each.advance() for _ in range(TURNS))
    scheduler.close()
    assert modes[0] == "python" and modes[-1] == "njit"
    first, second = snapshot(storm.world.state), snapshot(compiled.world.state)
    assert [name for name in first if not (first[name] == second[name]).all()] == []
    assert ("the process that compiles the scheduler" in caplog.text) == (compiler != COMPILER)


def test_a_fault_of_the_state_is_found_while_interpreted(seed: int) -> None:
    world = make_world(seed, 1)
    scheduler = started(world, ["sleep", "1000"])
    assert scheduler.check() == []
    world.state.counts[0] += 1 << 20
    assert scheduler.check() == Scheduler(world.limits, world.state).check() != []
    scheduler.close()
    scheduler.close()
    assert scheduler._compiler.poll() is not None


def test_an_error_of_the_compiler_is_raised_by_a_turn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: object, **options: object) -> None:
        raise MemoryError("no room for code")

    world = make_world(seed, 1)
    monkeypatch.setattr(starting_scheduler, "Scheduler", broken)
    scheduler = started(world, ["false"])
    scheduler._loader.join()
    with pytest.raises(MemoryError, match="no room for code"):
        scheduler.turn(0)
    scheduler.close()


def test_what_is_compiled_starts_compiled(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(seed, 1)
    Scheduler(world.limits, world.state)  # into the cache, if it is missing
    assert start_scheduler(world.limits, world.state, fcfs).mode == "njit"
    monkeypatch.setattr(starting_scheduler, "is_kept", lambda function, kinds: False)
    scheduler = start_scheduler(world.limits, world.state, fcfs)
    assert scheduler.mode == "python"
    scheduler.close()
    monkeypatch.setattr(starting_scheduler, "cache_folder", lambda: None)
    assert start_scheduler(world.limits, world.state, SHIPPED["fcfs"]).mode == "njit"


def test_types_of_tables_reach_the_compiler(seed: int) -> None:
    world = make_world(seed, 1)
    kinds = table_kinds(world.limits, world.state)
    assert pickle.loads(pickle.dumps(kinds)) == kinds


@pytest.mark.parametrize("when", ["idle", "always", "never"])
def test_an_idle_loop_checks_with_compiled_code_alone(when: str) -> None:
    loop = HostLoop.__new__(HostLoop)
    loop._when = when
    for mode in ("python", "njit"):
        loop.scheduler = SimpleNamespace(mode=mode)  # type: ignore[assignment]
        assert loop._checks() == (when != "never" and mode == "njit")
