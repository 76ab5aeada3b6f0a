"""Predicted latencies as tables and a plot: what benchmarks/tuning/capacity.py and docs/tuning.md show."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.common.harness import figure_row, plain_log

COLUMNS = ("ttft_p50", "ttft_mean", "ttft_p99", "tpot_p50", "tpot_mean", "tpot_p99", "itl_p99", "itl_max", "e2e_mean")
SHOWN = (  # policy, max_num_batched_tokens, mixed_step_tokens, burst_tokens, burst_step_tokens
    ("fcfs", 512, 0, 0, 0),
    ("fcfs", 2048, 0, 0, 0),
    ("fcfs", 8192, 0, 0, 0),
    ("short-prompts", 2048, 0, 0, 0),
    ("short-prompts", 2048, 512, 4096, 0),
    ("short-prompts", 8192, 512, 4096, 2048),
)
OPTIONS = ("policy", "tokens", "mixed", "burst", "burst_step")


def page(results: dict[str, Any]) -> str:
    """The choices of SHOWN under each load, as Markdown."""
    parts = []
    for load in results.get("loads", []):
        rows = [row for row in load["choices"] if tuple(row[name] for name in OPTIONS) in SHOWN]
        parts.append(f"{load_name(load)}, {load['requests']:,} requests, ms:\n\n{table(rows)}\n")
    return "\n".join(parts) or "Not simulated yet.\n"


def load_name(load: dict[str, Any]) -> str:
    """An open loop by its rate, a closed one by its streams."""
    return f"{load['streams']} streams" if load["streams"] else f"{load['rate']:g} requests/s"


def table(rows: list[dict[str, Any]]) -> str:
    """The main figures as a Markdown table, ms."""
    lines = [
        "| policy, step tokens | " + " | ".join(name.replace("_", " ") for name in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    lines += ["| " + " | ".join([row["name"], *(f"{row[name]:g}" for name in COLUMNS)]) + " |" for row in rows]
    return "\n".join(lines)


def side_by_side(rows: list[dict[str, Any]]) -> str:
    """Measured and predicted figures as a Markdown table, ms."""
    names = ("ttft_p50", "ttft_mean", "ttft_p99", "tpot_p50", "tpot_mean", "tpot_p99", "itl_p99", "e2e_mean")
    lines = ["| load | " + " | ".join(name.replace("_", " ") for name in names) + " |", "|---" * (len(names) + 1) + "|"]
    for row in rows:
        words = [f"{row['measured'][name]:g} / {row['predicted'][name]:g}" for name in names]
        lines.append(f"| {load_name(row)} | " + " | ".join(words) + " |")
    return "Measured / predicted, ms\n\n" + "\n".join(lines)


def plot(loads: list[dict[str, Any]]) -> Any:
    """The tails against each other: one line for each policy and kind of steps, one panel for each rate. Three sizes of steps are
    left out: they differ from two where short prompts come together, which no open loop of conversations shows."""
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
            for row in rows:
                size = row["burst"] if row["mixed"] else row["tokens"]
                ax.annotate(
                    f"{size:,}", (row["ttft_p99"], row["tpot_p99"]), fontsize=7, xytext=(4, 3), textcoords="offset points"
                )
        plain_log(ax, "x")
        ax.set(xlabel="P99 TTFT, ms", ylabel="P99 TPOT, ms", title=f"{load['rate']:g} requests/s (simulated)")
        ax.grid(alpha=0.3)
    np.atleast_1d(axes)[0].legend(fontsize=7)
    return figure
