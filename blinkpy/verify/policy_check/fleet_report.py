"""`blinkpy check --fleet`: simulate a fleet with each placement, and print the results."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from blinkpy.dpu.fleet.placement import Placement
from blinkpy.dpu.fleet.placement_rules import SHIPPED_RULES, Rule, load_rule, round_robin
from blinkpy.process_exit import print_error
from blinkpy.progress import Progress
from blinkpy.scheduler.policies import Policy
from blinkpy.scheduler.policy_vetting import vetted_policy
from blinkpy.tool_options import CheckOptions
from blinkpy.verify.policy_check.fleet_simulation import FLEET_WORKLOADS, SLOTS, FleetSimulation
from blinkpy.verify.policy_check.timed_server import ServerModel, StuckError

ONE_ENGINE = "(one engine)"


class FleetFigures(NamedTuple):
    """Results of one workload with one placement.

    ttft: seconds.
    hit_rate: fraction of the prompts' tokens.
    balance: tokens computed by the busiest engine, divided by the mean.
    faults: requests for which the rule failed.
    """

    workload: str
    placement: str
    ttft_p50: float
    ttft_p99: float
    hit_rate: float
    balance: float
    faults: int


def compare(
    rules: Mapping[str, Rule],
    policy: Policy,
    machine: ServerModel,
    engines: int,
    *,
    requests: int,
    rate: float,
    seed: int,
    workloads: Iterable[str] = FLEET_WORKLOADS,
    begin: Callable[[str], None] = lambda what: None,
) -> Iterator[FleetFigures]:
    """Simulate all rules and workloads; the result depends only on the arguments. The last figures of each
    workload are those of a single engine with the combined size and speed.

    machine: each engine's machine.
    rate: each engine's request rate, requests/s.
    begin: called before each simulation with its name.
    """
    for name in workloads:
        rng = np.random.default_rng([seed, list(FLEET_WORKLOADS).index(name)])
        workload = FLEET_WORKLOADS[name](requests, rate * engines, engines, rng)
        for title, rule in (*rules.items(), (ONE_ENGINE, round_robin)):
            begin(f"{name}, {title}")
            joined = title == ONE_ENGINE
            count, server = (1, _joined(machine, engines)) if joined else (engines, machine)
            placement = Placement(count, machine.page_size, rule=rule, record_pages=server.num_pages, seed=seed)
            outcome = FleetSimulation(policy, server, workload, count, placement, SLOTS * engines // count).run()
            p50, p99 = (float(np.percentile(outcome.ttft_ns, p)) / 1e9 for p in (50, 99))
            yield FleetFigures(name, title, p50, p99, outcome.hit_rate, outcome.balance, outcome.faults)


def _joined(machine: ServerModel, engines: int) -> ServerModel:
    """The model of a single engine with the combined rows, pages and speed of `engines` engines."""
    sizes = ("max_num_seqs", "max_num_batched_tokens", "mixed_step_tokens", "burst_step_tokens", "burst_tokens", "num_pages")
    grown = {name: getattr(machine, name) * engines for name in sizes}
    return dataclasses.replace(machine, **grown, row_us=machine.row_us / engines, token_us=machine.token_us / engines)


POLICY = "short-prompts"  # the default
HEAD = ("workload", "placement", "TTFT P50", "P99", "prefix hits", "busiest/mean")


def run_fleet_check(options: CheckOptions) -> int:
    """Compare the given placement with the shipped ones. Returns the exit code: 1 if requests never ended or
    the placement failed for a request, else 0. Raises ConfigError for wrong options.
    """
    named = options.placement
    rules = {**({named: load_rule(named)} if named else {}), **SHIPPED_RULES}
    policy = vetted_policy(options.policy or POLICY)
    machine = ServerModel.of(options)
    load: dict[str, Any] = {"requests": options.requests, "rate": options.rate, "seed": options.seed}
    progress, found = Progress(), list[FleetFigures]()
    errors = []
    try:
        for figures in compare(rules, policy, machine, options.fleet, **load, begin=lambda what: progress(f"simulating {what}")):
            found.append(figures)
    except StuckError as error:
        errors.append(str(error))
    finally:
        progress.close()
    errors += [f"{f.placement}, {f.workload}: failed for {f.faults:,} requests" for f in found if f.faults]
    print(_report(options, found, errors))
    if options.json:
        facts = {"options": dataclasses.asdict(options), "figures": [f._asdict() for f in found], "errors": errors}
        try:
            Path(options.json).write_text(json.dumps(facts, indent=1) + "\n")
        except OSError as error:
            print_error(f"can't write {options.json}: {error.strerror}")
    return int(bool(errors))


def _report(options: CheckOptions, found: list[FleetFigures], errors: list[str]) -> str:
    rows = [HEAD]
    for f in found:
        times = f"{f.ttft_p50:.3f}", f"{f.ttft_p99:.3f}"
        rows.append((f.workload, Path(f.placement).name, *times, f"{100 * f.hit_rate:.1f} %", f"{f.balance:.2f}"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  " + "  ".join([*map(str.ljust, row[:2], widths[:2]), *map(str.rjust, row[2:], widths[2:])]) for row in rows]
    load = f"{options.fleet} engines, {options.requests:,} requests of each workload, {options.rate:g}/s an engine; seconds:"
    end = [f"  ERROR  {error}" for error in errors] or ["no errors found"]
    return "\n".join([load, "", *table, "", *end])
