"""Joules for each output token, from the GPU's own counter, against the number of streams.

    python -m benchmarks.serving.energy --model llama-3-8b --system blinkpy --system vllm

The power of the idle GPU, and with the server up and idle, are measured as well: a loop on the GPU that polls has a price there.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.common.harness import Run, UsageError, main, parser, plain_log
from benchmarks.serving.cell import Load, add_options, bench
from benchmarks.serving.compare import METHOD, compare, end, table


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        options.streams, options.rounds, options.data, options.idle_s = [1, 4], 1, "fixed:16:8", 0.2
    run = Run("serving.energy", options)
    with bench(options, run.progress) as means:
        if means.meter.missing and not options.smoke:
            raise UsageError(f"no joules can be counted: {means.meter.missing}")
        run.progress("power of the idle GPU")
        before = means.meter.watts(options.idle_s)
        loads = [
            Load(options.data, streams=n, rounds=options.rounds, seed=options.seed, drain_s=options.drain_s)
            for n in options.streams
        ]
        results = compare(means, loads, run.keep, options.idle_s)
        results["idle_w"] = before
    if not options.no_plot:
        run.save(plot(run, results))
    run.write(METHOD, results)
    print(table(results))
    end(found.get("error", "") for found in results["systems"].values())


def plot(run: Run, results: dict[str, Any]) -> Any:
    """Joules for each token, and mean power, against the streams."""
    figure, axes = run.figure_row(2)
    for ax, key, label in zip(axes, ("joules_per_token", "mean_w"), ("energy, J per output token", "mean power, W"), strict=True):
        for name, found in results["systems"].items():
            points = {cell["load"]["streams"]: cell["energy"][key] for cell in found["cells"] if key in cell["energy"]}
            if points:
                ax.plot(list(points), list(points.values()), marker="o", label=name)
        if ax.has_data():
            plain_log(ax, "x", base=2)
            ax.legend(fontsize=8)
        ax.set(xlabel="streams", ylabel=label)
        ax.grid(alpha=0.3)
    if axes[0].has_data():
        plain_log(axes[0], "y")
    axes[1].set_ylim(bottom=0)
    figure.suptitle(f"{results['model']}, {results['gpu'].get('gpu', 'no GPU')}")
    return figure


def options() -> argparse.Namespace:
    result = parser("serving.energy", "Joules for each token against the number of streams.")
    add_options(result)
    result.add_argument("--streams", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64, 128, 256])
    result.add_argument("--rounds", type=int, default=3, help="requests of each stream")
    result.add_argument("--data", default="fixed:128:256", help="lengths")
    result.add_argument("--drain-s", type=float, default=60.0, help="longest time of one load")
    result.add_argument("--idle-s", type=float, default=5.0, help="for which idle power is measured")
    result.add_argument("--seed", type=int, default=1, help="of the lengths, where the data set has several")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
