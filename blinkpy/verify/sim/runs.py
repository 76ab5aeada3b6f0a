"""Simulates many seeds, up to a number of turns or a time limit, in one or several processes."""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

from blinkpy.config import ConfigError
from blinkpy.device.expect import CODE_MASK, describe_fault, fault_at, fault_code
from blinkpy.kv import state as S
from blinkpy.queues.words import COMMAND_RUN
from blinkpy.scheduler.policies import Policy, fcfs
from blinkpy.verify.sim.simulation import Act, Failure, Mode, Outcome, Simulation, simulate
from blinkpy.verify.sim.world import make_world

ROUNDS = 4000  # stormy turns of one world
BLOCK = 4  # worlds per task of a process
STUCK_S = 600.0  # time limit of a block of worlds
STUCK = fault_code("one of the {} worlds that begin with this seed does not end")


@dataclass
class RunReport:
    """The result of a run of many seeds.

    calls: turns of the scheduler.
    seconds: wall-clock time without compilation.
    failures: the failures, each with its policy.
    judged: number of worlds that the oracle checked.
    in_lanes: number of worlds with several lanes.
    cpu_seconds: CPU time of all processes.
    """

    first_seed: int
    worlds: int = 0
    calls: int = 0
    seconds: float = 0.0
    failures: list[tuple[Policy, Failure]] = field(default_factory=list)
    judged: int = 0
    in_lanes: int = 0
    cpu_seconds: float = 0.0
    claims: int = 0  # claims of hostile front ends
    entries: int = 0  # consumed entries of hostile front ends

    def __str__(self) -> str:
        found = f"{len(self.failures)} failed" if self.failures else "no violation"
        rate = self.calls / self.cpu_seconds if self.cpu_seconds else 0.0
        seeds = f"seeds {self.first_seed} to {self.first_seed + self.worlds - 1}"
        more = [f"{count:,} {what}" for count, what in ((self.judged, "under the oracle"), (self.in_lanes, "in lanes")) if count]
        if self.claims:
            more.append(f"{self.entries:,} garbage entries and {self.claims:,} claims of hostile front ends")
        did = ", ".join([f"{self.calls:,} turns in {self.worlds:,} worlds ({seeds})", *more])
        return f"{did}, {self.seconds:.1f} s, {rate:,.0f} turns/s of a core: {found}"


def lanes_of(seed: int, policies: int, lanes: int, lanes_every: int) -> int:
    """The number of lanes of a world; see Storm for `lanes_every`."""
    return 1 if seed // policies % lanes_every else lanes


Block = tuple[float, list[tuple[int, Outcome]]]  # (CPU seconds, (seed, outcome) of each world)


class Storm(NamedTuple):
    """Options of the simulated worlds. A world depends only on its seed and these options.

    policies: used in rotation.
    turns: stormy turns of each world.
    lanes: number of lanes in every `lanes_every`-th world of a policy; other worlds have one lane.
    options: further options of Simulation.
    """

    policies: Sequence[Policy]
    turns: int
    lanes: int
    lanes_every: int
    options: dict[str, Any]

    def policy(self, seed: int) -> Policy:
        return self.policies[seed % len(self.policies)]

    def lanes_of(self, seed: int) -> int:
        return lanes_of(seed, len(self.policies), self.lanes, self.lanes_every)

    def block(self, first_seed: int, worlds: int) -> Block:
        """Simulate `worlds` consecutive seeds, or up to the first failure."""
        outcomes, started = [], time.process_time()
        for seed in range(first_seed, first_seed + worlds):
            outcomes.append((seed, simulate(seed, self.turns, self.policy(seed), lanes=self.lanes_of(seed), **self.options)))
            if outcomes[-1][1].failure:
                break
        return time.process_time() - started, outcomes


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
    lanes_every: int = 1,
    processes: int = 1,
    progress: Callable[[RunReport], None] | None = None,
) -> RunReport:
    """Simulate worlds with consecutive seeds from `seed`, until the scheduler made `steps` turns, `seconds`
    have passed, or a seed fails.

    policy: one policy, or several that are used in rotation.
    turns: stormy turns of each world.
    mode: execution mode of the scheduler and the checks.
    oracle, records, lanes, hostile: options of Simulation.
    lanes_every: every `lanes_every`-th world of a policy has `lanes` lanes.
    processes: number of processes that share the worlds.
    progress: called after every block of worlds.
    """
    options = {"mode": mode, "checks": mode, "check_every": check_every, "oracle": oracle, "records": records}
    options["hostile"] = hostile
    storm = Storm([policy] if callable(policy) else list(policy), turns, lanes, lanes_every, options)
    for each in storm.policies:
        simulate(seed, 1, each, mode=mode, checks=mode)  # compile, before the clock starts
    report, started = RunReport(seed), time.monotonic()

    def continues() -> bool:
        report.seconds = time.monotonic() - started
        return report.calls < steps and report.seconds < seconds and not report.failures

    blocks = _in_one_process(storm, seed, continues) if processes == 1 else _in_processes(storm, report, continues, processes)
    for cpu_seconds, outcomes in blocks:
        report.cpu_seconds += cpu_seconds
        for each_seed, outcome in outcomes:
            report.worlds += 1
            report.calls += outcome.calls
            report.claims += outcome.claims
            report.entries += outcome.entries
            report.judged += outcome.calls if outcome.judged else 0
            report.in_lanes += outcome.calls if storm.lanes_of(each_seed) > 1 else 0
            if outcome.failure is not None:
                report.failures.append((storm.policy(each_seed), outcome.failure))
        continues()  # updates the time
        if progress is not None:
            progress(report)
    return report


def _in_one_process(storm: Storm, seed: int, continues: Callable[[], bool]) -> Iterator[Block]:
    while continues():
        yield storm.block(seed, 1)
        seed += 1


def _in_processes(storm: Storm, report: RunReport, continues: Callable[[], bool], processes: int) -> Iterator[Block]:
    """Simulate in forked processes, which inherit compiled code and unpicklable policies. A failure ends all processes."""
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _inherit, (storm,))
    seed, in_progress = report.first_seed, dict[Future[Block], int]()
    try:
        while not report.failures and (continues() or in_progress):
            while continues() and len(in_progress) < 2 * processes:
                in_progress[pool.submit(_inherited_block, seed, BLOCK)] = seed
                seed += BLOCK
            done, _ = wait(in_progress, STUCK_S, FIRST_COMPLETED)
            if not done:
                first = min(in_progress.values())
                yield 0.0, [(first, Outcome(0, Failure(first, storm.turns, 0, fault_at(STUCK, BLOCK))))]
            for future in done:
                del in_progress[future]
                yield future.result()
    finally:
        if in_progress:  # the remaining results are not needed
            for child in multiprocessing.active_children():
                child.kill()
        pool.shutdown(cancel_futures=True)


_inherited: list[Storm] = []


def _inherit(storm: Storm) -> None:
    _inherited[:] = [storm]


def _inherited_block(first_seed: int, worlds: int) -> Block:
    return _inherited[0].block(first_seed, worlds)


# A failure becomes a scenario, which is shrunk, saved, and repeated in plain Python turn by turn.

STATUS_NAMES = ("empty", "waiting", "running", "finishing")
RESULTS = {S.NO_BATCH: "nothing to compute", S.STOPPED: "stopped", S.DRAINED: "drained"}


@dataclass(frozen=True)
class Scenario:
    """A repeatable run: a seed's world in which only the listed acts happen.

    turns: length of the stormy part.
    policy: name for load_policy.
    keep: (turn, actor) of each act that happens, in order. The actor after the last front end is the world.
    lanes: number of the scheduler's lanes.
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

    options: further arguments of Simulation.
    Algorithm: delta debugging by complements (A. Zeller, R. Hildebrandt: Simplifying and isolating
        failure-inducing input, 2002).
    """

    def needed(keep: list[Act]) -> list[Act] | None:
        """The acts of `keep` up to the fault; None if these acts don't cause the fault."""
        found = simulate(failure.seed, failure.turns, policy, keep=keep, **options).failure
        if found is None or found.code & CODE_MASK != failure.code & CODE_MASK:
            return None
        return [act for act in keep if act[0] <= found.turn]

    kind = options.get("lanes", 1), options.get("hostile", False)
    deadline = time.monotonic() + seconds
    actors = make_world(failure.seed, 1, hostile=int(kind[1])).limits.pairs + 1
    everything = [(turn, actor) for turn in range(failure.turns) for actor in range(actors)]
    keep = needed([act for act in everything if act[0] <= failure.turn])
    if keep is None:  # the fault needs an omitted act, because the calm now begins at another moment
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

    options: further arguments of Simulation.
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
        party = f"front end {actor}" if actor < limits.pairs else "world"
        yield f"turn {when}: {party} {what}"
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
