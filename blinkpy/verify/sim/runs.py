"""Many seeds: as many as a number of turns, or a time, allows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.verify.sim.simulation import Failure, Mode, simulate

ROUNDS = 4000  # stormy turns of one world


@dataclass
class RunReport:
    """What a run of many seeds did. calls: turns of the scheduler. seconds: wall clock, without compiling."""

    first_seed: int
    worlds: int = 0
    calls: int = 0
    seconds: float = 0.0
    failures: list[tuple[Policy, Failure]] = field(default_factory=list)
    claims: int = 0  # of hostile front ends
    entries: int = 0  # of theirs, consumed

    def __str__(self) -> str:
        found = f"{len(self.failures)} failed" if self.failures else "no violation"
        rate = self.calls / self.seconds if self.seconds else 0.0
        seeds = f"seeds {self.first_seed} to {self.first_seed + self.worlds - 1}"
        did = f"{self.calls:,} turns in {self.worlds:,} worlds ({seeds})"
        if self.claims:
            did += f" with {self.entries:,} garbage entries and {self.claims:,} claims of hostile front ends"
        return f"{did}, {self.seconds:.1f} s, {rate:,.0f} turns/s: {found}"


def run(
    policy: Policy | Sequence[Policy] = fcfs,
    seed: int = 1,
    steps: int = 1_000_000,
    *,
    turns: int = ROUNDS,
    seconds: float = float("inf"),
    mode: Mode = "njit",
    check_every: int = 1,
    oracle: bool = False,
    records: bool = False,
    lanes: int = 1,
    hostile: bool = False,
    progress: Callable[[RunReport], None] | None = None,
) -> RunReport:
    """Simulate worlds from `seed` on, until the scheduler made `steps` turns, the time is over or a seed failed.

    policy: one, or several that take turns. turns: stormy turns of each world. mode: of scheduler and checks alike. oracle,
    records, lanes, hostile: see Simulation. progress: called after every world.
    """
    policies = [policy] if callable(policy) else list(policy)
    for each in policies:
        simulate(seed, 1, each, mode=mode, checks=mode)  # compile, before the clock starts
    report = RunReport(seed)
    started = time.monotonic()
    while report.calls < steps and report.seconds < seconds and not report.failures:
        chosen = policies[report.worlds % len(policies)]
        options: dict[str, Any] = {"mode": mode, "checks": mode, "check_every": check_every, "lanes": lanes, "hostile": hostile}
        outcome = simulate(seed + report.worlds, turns, chosen, oracle=oracle, records=records, **options)
        report.worlds += 1
        report.calls += outcome.calls
        report.claims += outcome.claims
        report.entries += outcome.entries
        report.seconds = time.monotonic() - started
        if outcome.failure is not None:
            report.failures.append((chosen, outcome.failure))
        if progress is not None:
            progress(report)
    return report
