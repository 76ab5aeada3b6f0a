"""The turn that is rehearsed beside a step: steady each time, and of no effect outside of its own world."""

from __future__ import annotations

from typing import Any

from blinkpy.device.array_trees import as_memoryviews
from blinkpy.engine.rehearsal import rehearsal_world
from blinkpy.kv.state import STEPS
from blinkpy.kv.state_snapshots import differences, snapshot
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.phases.commit import GENERATED_TOKENS
from blinkpy.verify.sim.world import make_world

COUNTED = {f"counts[{STEPS}]", f"counters[{GENERATED_TOKENS}]"}


def test_every_turn_takes_the_short_way_and_leaves_what_it_found(seed: int) -> None:
    nowhere: Any = None  # the queues: a turn that read or wrote them would fail
    for number in range(20):
        limits, state = rehearsal_world(make_world(seed + number, 1).limits)
        schedule = make_phases().schedule
        assert schedule(limits, nowhere, as_memoryviews(state), 0, 1) == 0
        settled = snapshot(state)
        for _ in range(3):
            assert schedule(limits, nowhere, as_memoryviews(state), 0, 1) == 0
            assert {one.split(":")[0] for one in differences(settled, snapshot(state))} == COUNTED
