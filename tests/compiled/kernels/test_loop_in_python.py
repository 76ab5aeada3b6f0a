"""The control flow of the loop on the GPU, played in plain Python: see support.played_loop. These tests judge neither the results
of compiled kernels nor the cooperation of their lanes.

Claim state/loop: The GPU's kernels run each batch, and each group of a step, in the graph made for it. They
publish each turn, copy the state only between steps, and end.
"""

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: the kernels can't be defined")

from support.played_loop import NEVER, PlayedLoop

from blinkpy.kernels.loop_kernels import LOOP_RESULT, TIME_OVER
from blinkpy.kv import state as S
from blinkpy.scheduler.policies import SHIPPED, fcfs
from blinkpy.scheduler.rank_exchange import RANK_FAULT
from blinkpy.verify.sim.simulation import Simulation
from blinkpy.verify.sim.world import TICK_NS, make_world

TURNS = 120
LEAST = {"steps": 500, "groups": 300, "drafted": 20, "suspensions": 60, "copies": 60, "drained": 1, "stopped": 1}


def test_the_loop_does_what_turns_do(seed: int) -> None:
    """In worlds of the simulator, until each event was frequent enough: steps of all kinds, turns without a step, copies of the
    state; and the end by drain or stop."""
    draw, seen = random.Random(seed), Counter[str]()
    while any(seen[what] < least for what, least in LEAST.items()):
        one, policy, records = draw.randrange(1 << 30), draw.choice(list(SHIPPED.values())), draw.random() < 0.5
        world = make_world(one, TURNS, records=records)
        if world.limits.step_groups == 1 and draw.random() < 0.9:
            continue
        with pytest.MonkeyPatch.context() as patch:
            loop = PlayedLoop(patch, policy, copy_every=draw.choice((1, 64, 500)) if records else NEVER)
            simulation = Simulation(one, TURNS, policy, scheduler=loop, world=world)
            outcome = simulation.run()
        assert not outcome.failure, outcome.failure
        seen += Counter(steps=loop.steps, groups=loop.groups, drafted=loop.drafted, copies=loop.copies)
        seen += Counter(suspensions=simulation.counters()["suspensions"])
        seen += Counter(drained=loop.words[LOOP_RESULT] == S.DRAINED, stopped=loop.words[LOOP_RESULT] == S.STOPPED)


def test_the_loop_ends_when_its_time_is_over(seed: int) -> None:
    """The turn that notices it is the last: no step follows, whatever its decision."""
    with pytest.MonkeyPatch.context() as patch:
        loop = PlayedLoop(patch, fcfs, budget_ns=(budget := 30 * TICK_NS))
        simulation = Simulation(seed, TURNS, scheduler=loop, world=make_world(seed, TURNS))
        times = list[int]()
        while not loop.words[LOOP_RESULT]:
            assert simulation.advance()
            times.append(int(simulation.world.sim.clock[0]))
        assert loop.words[LOOP_RESULT] == TIME_OVER and times[-2] - times[0] <= budget < times[-1] - times[0]


class LoopWithFault(PlayedLoop):
    """A loop whose scheduler finds a fault of its rank after some turns."""

    left = 25

    def _scheduled(self, limits: Any, queues: Any, state: Any, lane: int, lanes: int) -> int:
        self.left -= 1
        if self.left > 0:
            return super()._scheduled(limits, queues, state, lane, lanes)
        self._chosen, self._bucket = True, RANK_FAULT
        return RANK_FAULT


def test_a_fault_of_a_rank_ends_the_loop(seed: int) -> None:
    """The loop publishes nothing of that turn, and does not report a stop: the host announces the fault."""
    with pytest.MonkeyPatch.context() as patch:
        loop = LoopWithFault(patch, fcfs)
        simulation = Simulation(seed, TURNS, scheduler=loop, world=make_world(seed, TURNS))
        engine, before = simulation.world.queues.engine, np.zeros(0, np.int64)
        for _ in range(LoopWithFault.left):
            assert not loop.words[LOOP_RESULT]
            before = engine.copy()
            simulation.advance()
        assert loop.words[LOOP_RESULT] == RANK_FAULT
        assert np.array_equal(engine, before)
