"""A failure as a scenario: shrunk, saved, and repeated in plain Python turn by turn."""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from blinkpy.config import ConfigError
from blinkpy.device.expect import CODE_MASK, describe_fault
from blinkpy.kv import state as S
from blinkpy.queues.words import COMMAND_RUN
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.sim.simulation import Act, Failure, Simulation, simulate
from blinkpy.verify.sim.world import make_world

STATUS_NAMES = ("empty", "waiting", "running", "finishing")
RESULTS = {S.NO_BATCH: "nothing to compute", S.STOPPED: "stopped", S.DRAINED: "drained"}


@dataclass(frozen=True)
class Scenario:
    """A repeatable run: the world of a seed, in which only some actors act in some turns.

    turns: length of the stormy part.
    policy: name for load_policy.
    keep: (turn, actor) of each act, in order. The world is the actor after the last front end.
    lanes: of the scheduler.
    hostile: whether the last front end is hostile.
    """

    seed: int
    turns: int
    policy: str
    keep: list[Act]
    lanes: int = 1
    hostile: bool = False

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a scenario. Raises ConfigError if the file can't be read or is not a scenario."""
        try:
            values = json.loads(path.read_text())
            keep = [(int(turn), int(actor)) for turn, actor in values["keep"]]
            options = int(values.get("lanes", 1)), bool(values.get("hostile", False))
            return cls(int(values["seed"]), int(values["turns"]), str(values["policy"]), keep, *options)
        except OSError as error:
            raise ConfigError(f"can't read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a scenario: {type(error).__name__}: {error}") from error


def shrink(failure: Failure, policy: Policy, policy_name: str, seconds: float = 20.0, **options: Any) -> Scenario:
    """Find a scenario with the same fault and as few acts as possible within `seconds`.

    options: of Simulation.
    Algorithm: delta debugging by complements (A. Zeller, R. Hildebrandt: Simplifying and isolating
        failure-inducing input, 2002).
    """

    def needed(keep: list[Act]) -> list[Act] | None:
        """The acts of `keep` up to the fault, or None if they don't cause it."""
        found = simulate(failure.seed, failure.turns, policy, keep=keep, **options).failure
        if found is None or found.code & CODE_MASK != failure.code & CODE_MASK:
            return None
        return [act for act in keep if act[0] <= found.turn]

    kind = options.get("lanes", 1), options.get("hostile", False)
    deadline = time.monotonic() + seconds
    actors = make_world(failure.seed, 1, hostile=int(kind[1])).limits.pairs + 1
    everything = [(turn, actor) for turn in range(failure.turns) for actor in range(actors)]
    keep = needed([act for act in everything if act[0] <= failure.turn])
    if keep is None:  # the fault needs an omitted act, because the calm began at another moment
        return Scenario(failure.seed, failure.turns, policy_name, everything, *kind)
    size = max(1, len(keep) // 2)
    while size and time.monotonic() < deadline:
        start, found = 0, False
        while start < len(keep) and time.monotonic() < deadline:
            shorter = needed(keep[:start] + keep[start + size :])
            if shorter is None:
                start += size
            else:
                keep, found = shorter, True
        if not found or size > 1:
            size //= 2
    return Scenario(failure.seed, failure.turns, policy_name, keep, *kind)


def narrate(scenario: Scenario, policy: Policy, **options: Any) -> Iterator[str]:
    """Repeat a scenario in plain Python. Yields a line for each event, and finally the faults.

    options: of Simulation.
    """
    options |= {"mode": "python", "checks": "python", "lanes": scenario.lanes, "hostile": scenario.hostile}
    simulation = Simulation(scenario.seed, scenario.turns, policy, keep=scenario.keep, **options)
    yield f"world of seed {scenario.seed}: {simulation.world.limits}"
    for _ in range(scenario.turns):
        before, seen = simulation.world.state.requests.status.tolist(), int(simulation.world.sim.logged[0])
        fine = simulation.advance(COMMAND_RUN)
        yield from _turn(simulation, before, seen)
        if not fine:
            yield f"turn {simulation.turn - 1}: {describe_fault(simulation.code)} {simulation.detail}".rstrip()
            return
    outcome = simulation.calm()
    yield str(outcome.failure) if outcome.failure else f"all ended well, after {outcome.calls} turns"


def _turn(simulation: Simulation, before: list[int], seen: int) -> Iterator[str]:
    """Yield the events and results of the last turn."""
    limits, state = simulation.world.limits, simulation.world.state
    turn = simulation.turn - 1
    for when, actor, what in simulation.events(seen):
        who = f"front end {actor}" if actor < limits.pairs else "world"
        yield f"turn {when}: {who} {what}"
    for slot, (old, new) in enumerate(zip(before, state.requests.status.tolist(), strict=True)):
        if old != new:
            pair, local = divmod(slot, limits.slots_per_pair)
            yield f"turn {turn}:   pair {pair} slot {local}: {STATUS_NAMES[old]} -> {STATUS_NAMES[new]}"
    if simulation.bucket >= 0:
        counts, batch = state.batch.counts, state.batch
        rows = ", ".join(
            f"slot {batch.row_slots[row]} +{batch.query_starts[row + 1] - batch.query_starts[row]}"
            for row in range(counts[S.ROWS])
        )
        decoding = f"{counts[S.DECODE_ROWS]} of {counts[S.ROWS]} rows decode"
        yield f"turn {turn}:   step of {counts[S.TOKENS]} tokens, {decoding}: {rows}"
    elif simulation.bucket != S.NO_BATCH:
        yield f"turn {turn}:   {RESULTS[simulation.bucket]}"
