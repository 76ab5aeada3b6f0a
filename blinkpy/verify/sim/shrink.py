"""Making a failure small: leave out what front ends and the world do, as long as the same thing still goes wrong."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.device.expect import CODE_MASK
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.sim.simulation import Failure, Mute, Outcome, simulate

Try = Callable[[list[Mute]], Outcome]


@dataclass(frozen=True)
class Scenario:
    """A run that can be repeated: the world of a seed, in which only some actors act in some turns.

    keep: (turn, actor) in order; the actor after the last front end is the world. policy: name, as of load_policy. lanes:
    of the scheduler.
    """

    seed: int
    turns: int
    policy: str
    keep: list[Mute]
    lanes: int = 1

    def muted(self, actors: int) -> list[Mute]:
        """All (turn, actor) that do nothing. actors: front ends and the world."""
        kept = set(self.keep)
        return [(turn, actor) for turn in range(self.turns) for actor in range(actors) if (turn, actor) not in kept]

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: Path) -> Scenario:
        """Raises ConfigError when the file can't be read or is no scenario."""
        try:
            values = json.loads(path.read_text())
            keep = [(int(turn), int(actor)) for turn, actor in values["keep"]]
            return cls(int(values["seed"]), int(values["turns"]), str(values["policy"]), keep, int(values.get("lanes", 1)))
        except OSError as error:
            raise ConfigError(f"can't read {path}: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} is not a scenario: {type(error).__name__}: {error}") from error


def shrink(failure: Failure, policy: Policy, policy_name: str, actors: int, seconds: float = 20.0, **options: Any) -> Scenario:
    """A scenario with the same fault and as few acts as can be found in the time. actors: front ends and the world. options: of
    Simulation.

    Delta debugging (A. Zeller, R. Hildebrandt: Simplifying and isolating failure-inducing input, 2002), by complements alone.
    """

    def attempt(muted: list[Mute]) -> Outcome:
        return simulate(failure.seed, failure.turns, policy, muted=muted, **options)

    everything = [(turn, actor) for turn in range(failure.turns) for actor in range(actors)]
    keep = minimise(everything, failure, attempt, time.monotonic() + seconds)
    return Scenario(failure.seed, failure.turns, policy_name, keep, options.get("lanes", 1))


def minimise(everything: list[Mute], failure: Failure, attempt: Try, deadline: float) -> list[Mute]:
    """The acts that are needed for the failure. deadline: of time.monotonic(); what is found by then is returned."""
    keep = [act for act in everything if act[0] <= failure.turn]
    if not _same(attempt(_without(everything, keep)), failure):
        return everything  # it needs what was left out: the calm begins at another moment
    size = max(1, len(keep) // 2)
    while size and time.monotonic() < deadline:
        start, found = 0, False
        while start < len(keep) and time.monotonic() < deadline:
            shorter = keep[:start] + keep[start + size :]
            outcome = attempt(_without(everything, shorter))
            if _same(outcome, failure):
                assert outcome.failure is not None
                keep = [act for act in shorter if act[0] <= outcome.failure.turn]
                found = True
            else:
                start += size
        if not found or size > 1:
            size //= 2
    return keep


def _same(outcome: Outcome, failure: Failure) -> bool:
    return outcome.failure is not None and outcome.failure.code & CODE_MASK == failure.code & CODE_MASK


def _without(everything: list[Mute], keep: list[Mute]) -> list[Mute]:
    kept = set(keep)
    return [act for act in everything if act not in kept]
