"""A run in plain Python, told turn by turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from blinkpy.device.expect import describe_fault
from blinkpy.kv import state as S
from blinkpy.queues.words import COMMAND_RUN
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.sim.shrink import Scenario
from blinkpy.verify.sim.simulation import Simulation

STATUS_NAMES = ("empty", "waiting", "running", "finishing")
RESULTS = {S.NO_BATCH: "nothing to compute", S.STOPPED: "stopped", S.DRAINED: "drained"}


def narrate(scenario: Scenario, policy: Policy, **options: Any) -> Iterator[str]:
    """Repeat a scenario; what happens in each call, line by line, and at the end what is wrong. options: of Simulation."""
    options |= {"mode": "python", "checks": "python", "lanes": scenario.lanes}
    blank = Simulation(scenario.seed, scenario.turns, policy, **options)
    actors = blank.world.limits.pairs + 1
    muted = scenario.muted(actors)
    simulation = Simulation(scenario.seed, scenario.turns, policy, muted=muted, **options)
    limits = simulation.world.limits
    yield f"world of seed {scenario.seed}: {limits}"
    outcome = None
    for _ in range(scenario.turns):
        before, seen = _statuses(simulation), int(simulation.world.sim.logged[0])
        fine = simulation.advance(COMMAND_RUN)
        yield from _turn(simulation, before, seen)
        if not fine:
            yield f"call {simulation.turn - 1}: {describe_fault(simulation.code)} {simulation.detail}".rstrip()
            return
    outcome = simulation.calm()
    yield str(outcome.failure) if outcome.failure else f"all ended well, after {outcome.calls} calls"


def _statuses(simulation: Simulation) -> list[int]:
    status: list[int] = np.asarray(simulation.world.state.requests.status).tolist()
    return status


def _turn(simulation: Simulation, before: list[int], seen: int) -> Iterator[str]:
    """What one turn did, if it did anything."""
    limits, state = simulation.world.limits, simulation.world.state
    turn = simulation.turn - 1
    for when, actor, what in simulation.events(seen):
        who = f"front end {actor}" if actor < limits.pairs else "world"
        yield f"call {when}: {who} {what}"
    for slot, (old, new) in enumerate(zip(before, _statuses(simulation), strict=True)):
        if old != new:
            pair, local = divmod(slot, limits.slots_per_pair)
            yield f"call {turn}:   pair {pair} slot {local}: {STATUS_NAMES[old]} -> {STATUS_NAMES[new]}"
    if simulation.bucket >= 0:
        counts, batch = state.batch.counts, state.batch
        rows = ", ".join(
            f"slot {batch.row_slots[row]} +{batch.query_starts[row + 1] - batch.query_starts[row]}"
            for row in range(counts[S.ROWS])
        )
        decoding = f"{counts[S.DECODE_ROWS]} of {counts[S.ROWS]} rows decode"
        yield f"call {turn}:   step of {counts[S.TOKENS]} tokens, {decoding}: {rows}"
    elif simulation.bucket != S.NO_BATCH:
        yield f"call {turn}:   {RESULTS[simulation.bucket]}"
