"""Placements compared: each workload of a fleet with each rule, and with one engine that has the size of all."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from blinkpy.dpu.fleet.placement import Placement
from blinkpy.dpu.fleet.placement_rules import Rule, round_robin
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.fleet_check.fleet_simulation import SLOTS, FleetSimulation
from blinkpy.verify.fleet_check.fleet_workloads import FLEET_WORKLOADS
from blinkpy.verify.policy_check.timed_server import ServerModel

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
    workload are those of one engine with the size and speed of all.

    machine: of each engine.
    rate: of each engine, requests/s.
    begin: called before each simulation.
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
    """One engine instead of several: with the rows, pages and speed of all."""
    sizes = ("max_num_seqs", "max_num_batched_tokens", "mixed_step_tokens", "burst_step_tokens", "burst_tokens", "num_pages")
    grown = {name: getattr(machine, name) * engines for name in sizes}
    return dataclasses.replace(machine, **grown, row_us=machine.row_us / engines, token_us=machine.token_us / engines)
