"""What neighbours on the host do to a server: each kind, several for each core, with front ends on cores of their own or among
them.

    python -m benchmarks.serving.interference --model llama-3-8b --system blinkpy --system vllm --server-cores 0-11
    --client-cores 12-15 --frontend-cores 10-11

With --frontend-cores, every system is measured in two placements: "own", where its front-end processes have those cores alone, as
on a DPU, and "shared", where neighbours run on all of the server's cores. Each placement has its quiet run, and ratios are to
that.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.common.harness import Run, main, parser
from benchmarks.serving.cell import Bench, Load, add_options, bench
from benchmarks.serving.compare import METHOD, end
from benchmarks.serving.load_figures import levels
from benchmarks.serving.neighbours import KINDS
from benchmarks.serving.systems import Cores, Running, ServerError

COMPARED = {
    "TTFT p99": ("ttft_ms", "p99"),
    "TPOT p99": ("tpot_ms", "p99"),
    "TTFT p50": ("ttft_ms", "p50"),
    "TPOT p50": ("tpot_ms", "p50"),
}
NEIGHBOUR_METHOD = """Neighbours are processes that may run on all of their cores, started before the load and killed after it;
their number is per core. Context switches are those of the server's threads during the load; cache misses come from perf where
it can count them."""


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        options.rate, options.seconds, options.drain_s, options.data = 6.0, 2.0, 10.0, "fixed:24:12"
        options.per_core, options.kinds = [0, 1], ["memory"]
    run = Run("serving.interference", options)
    with bench(options, run.progress) as means:
        results: dict[str, Any] = {**means.facts(), "systems": {}}
        for system in means.systems:
            found: dict[str, Any] = {"starts": [], "cells": []}
            results["systems"][system.name] = found
            try:
                with means.server(system, dataclasses.replace(means.cores, front_end=())) as server:
                    found["starts"].append(server.facts)
                    for cell in cells(means, server, options):
                        found["cells"].append(cell)
                        run.keep(results)
            except ServerError as error:
                found["error"] = str(error)
                print(f"error: {error}", file=sys.stderr)
    run.write(f"{METHOD} {NEIGHBOUR_METHOD}", results)
    print(table(results))
    end(found.get("error", "") for found in results["systems"].values())


def cells(means: Bench, server: Running, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Every placement, kind and number of neighbours, on one running server."""
    for placement, cores in placements(means.cores).items():
        server.place(cores)
        for kind, per_core in conditions(options.kinds, options.per_core):
            common = {"seed": options.seed, "per_core": per_core, "kinds": (kind,)}
            load = Load(options.data, options.rate, options.arrivals, options.seconds, options.drain_s, **common)
            name = f"{server.system.name}, {placement}, {per_core} {kind} per core"
            yield means.measure(server, load, name, cores)


def placements(cores: Cores) -> dict[str, Cores]:
    shared = dataclasses.replace(cores, front_end=())
    return {"own": cores, "shared": shared} if cores.front_end else {"shared": shared}


def conditions(kinds: Sequence[str], per_core: list[int]) -> list[tuple[str, int]]:
    """(kind, number for each core); quiet comes first, and once."""
    return [("none", 0)] + [(kind, count) for kind in kinds for count in per_core if count]


def table(results: dict[str, Any]) -> str:
    """Markdown: each condition, with its ratios to the quiet run of the same placement."""
    lines = [
        "| system | front end | neighbours per core | TTFT p50 / p99 ms | TPOT p50 / p99 ms | output tok/s | to quiet: "
        + ", ".join(COMPARED)
        + ", tok/s | involuntary switches | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, found in results["systems"].items():
        quiet = {cell["front_end"]: cell for cell in found["cells"] if not cell["neighbours"]}
        for cell in found["cells"]:
            base = quiet[cell["front_end"]]
            ratios = [
                f"{cell[what][level]['value'] / base[what][level]['value']:.2f}" if what in cell and what in base else "none"
                for what, level in COMPARED.values()
            ]
            ratios.append(f"{cell['output_tokens_per_s'] / base['output_tokens_per_s']:.2f}")
            words = [
                name,
                cell["front_end"],
                f"{cell['load']['per_core']} {cell['load']['kinds'][0]}",
                levels(cell, "ttft_ms"),
                levels(cell, "tpot_ms"),
                f"{cell['output_tokens_per_s']:g}",
                ", ".join(ratios),
                str(cell["context_switches"].get("involuntary", "")),
                "" if cell["client"]["valid"] else "INVALID",
            ]
            lines.append("| " + " | ".join(words) + " |")
    return "\n".join(lines)


def options() -> argparse.Namespace:
    result = parser("serving.interference", "Servers beside neighbours.")
    add_options(result)
    result.set_defaults(kinds=KINDS)
    result.add_argument(
        "--per-core", type=int, nargs="+", default=[2, 8], help="neighbours for each core; the quiet run is always made"
    )
    result.add_argument("--rate", type=float, default=16.0, help="requests a second")
    result.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    result.add_argument("--drain-s", type=float, default=60.0, help="after which what hasn't ended is given up")
    result.add_argument("--data", default="azure", help="fixed:IN:OUT, azure, azure:FILE, sharegpt:FILE")
    result.add_argument("--arrivals", choices=("poisson", "trace"), default="poisson")
    result.add_argument("--seed", type=int, default=1, help="of lengths and arrivals")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
