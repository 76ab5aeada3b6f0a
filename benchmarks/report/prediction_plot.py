"""The plot of predicted latencies (benchmarks/tuning/capacity.py)."""

from typing import Any

import numpy as np

from benchmarks.report.figure_files import figure_row, plain_log


def draw_predictions(document: dict[str, Any]) -> Any:
    """The tails against each other: one line for each policy and kind of steps, one panel for each rate. Three sizes of steps are
    left out: they differ from two where short prompts come together, which no open loop of conversations shows."""
    loads = [load for load in document["results"]["loads"] if load["rate"]]
    figure, axes = figure_row(len(loads))
    for ax, load in zip(np.atleast_1d(axes), loads, strict=True):
        series: dict[str, list[dict[str, Any]]] = {}
        for row in load["choices"]:
            if row["burst_step"]:
                continue
            kind = f"{row['policy']}, {row['mixed']} then {row['tokens']}" if row["mixed"] else f"{row['policy']}, one size"
            series.setdefault(kind, []).append(row)
        for kind, rows in series.items():
            xs, ys = ([row[name] for row in rows] for name in ("ttft_p99", "tpot_p99"))
            ax.plot(xs, ys, "o--" if rows[0]["mixed"] else "s-", markersize=4, label=kind)
            for x, y, row in zip(xs, ys, rows, strict=True):
                size = row["burst"] if row["mixed"] else row["tokens"]
                ax.annotate(f"{size:,}", (x, y), fontsize=7, xytext=(4, 3), textcoords="offset points")
        plain_log(ax, "x")
        ax.set(xlabel="P99 TTFT, ms", ylabel="P99 TPOT, ms", title=f"{load['rate']:g} requests/s (simulated)")
        ax.grid(alpha=0.3)
    np.atleast_1d(axes)[0].legend(fontsize=7)
    return figure
