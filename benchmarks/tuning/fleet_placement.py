"""Compares placements of a fleet's requests.

The schedulers are the real ones, compiled, each behind a queue pair (blinkpy/verify/policy_check/fleet_simulation.py),
and the placement is the real one. Only the clock is synthetic: a step takes step_us, row_us for each decoding row and
token_us for each token of a prompt. Each figure is the median over the seeds. "(one engine)" has the rows, pages and
speed of all engines together.
"""

import statistics
from typing import Any

from benchmarks.common.harness import Flag, Run, check, run_benchmark
from blinkpy.dpu.fleet.placement_rules import SHIPPED_RULES
from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.policy_check.fleet_report import ONE_ENGINE, FleetFigures, compare
from blinkpy.verify.policy_check.fleet_simulation import FLEET_WORKLOADS
from blinkpy.verify.policy_check.timed_server import ServerModel

DEFAULT = "prefix"
BASELINES = [name for name in SHIPPED_RULES if name != DEFAULT]
MACHINE: dict[str, Any] = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "page_size": 16,
    "step_us": 4500.0,
    "row_us": 22.0,
    "token_us": 27.0,
}
FIGURES = ("ttft_p50", "ttft_p99", "hit_rate", "balance")


def simulate(run: Run) -> dict[str, dict[str, dict[str, float]]]:
    """The figures of each workload and placement."""
    options = run.options
    machine = ServerModel(num_pages=options.pages, **MACHINE)
    found: dict[tuple[str, str], list[FleetFigures]] = {}
    for seed in options.seeds:
        load = {"requests": options.requests, "rate": options.rate, "seed": seed, "begin": run.progress}
        for figures in compare(SHIPPED_RULES, SHIPPED["short-prompts"], machine, options.engines, **load):
            check(figures.faults == 0, "a rule failed")
            found.setdefault((figures.workload, figures.placement), []).append(figures)
    names = (*SHIPPED_RULES, ONE_ENGINE)
    return {
        workload: {
            name: {key: round(statistics.median(getattr(one, key) for one in found[workload, name]), 4) for key in FIGURES}
            for name in names
        }
        for workload in FLEET_WORKLOADS
    }


def benchmark(run: Run) -> None:
    workloads = simulate(run)
    better = 0
    for name, rows in workloads.items():
        best = min(rows[baseline]["ttft_p99"] for baseline in BASELINES)
        better += rows[DEFAULT]["ttft_p99"] < best
        run.target(f"{name}: P99 TTFT, to the best of the others", rows[DEFAULT]["ttft_p99"] / best, 1.1, "x")
    run.target("workloads with a better P99 TTFT than all others", better, 2, "", at_most=False)
    shared = workloads["shared-prefix"]
    lost = 1 - shared[DEFAULT]["hit_rate"] / shared[ONE_ENGINE]["hit_rate"]
    run.target("shared-prefix: share of one engine's hits that the fleet loses", lost, 0.05, "")
    results: dict[str, Any] = {"engines": run.options.engines, "rate": run.options.rate, "requests": run.options.requests}
    run.write(__doc__, {**results, "model": MACHINE, "workloads": workloads})


if __name__ == "__main__":
    run_benchmark(
        "tuning.fleet_placement",
        "Placements of a fleet compared.",
        benchmark,
        engines=Flag(4, "of the fleet"),
        requests=Flag(3000, "of each workload", smoke=60),
        rate=Flag(16.0, "arrivals at each engine, requests/s"),
        pages=Flag(16384, "of each engine", smoke=2048),
        seeds=Flag((1, 2, 3), "of the workloads", smoke=(1,)),
    )
