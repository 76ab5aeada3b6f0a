"""Figures of matplotlib, made without a display and stored with a digest of their results; and the figures of
predictions, the soak test and attacks."""

import hashlib
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np

# For the curves in turn: the position of the numbers relative to the points, in points, and their alignment.
LABELS = (((4, 3), "left"), ((-4, 3), "right"), ((4, -9), "left"), ((-4, -9), "right"))


def figure_row(columns: int = 1, width: float = 5.5, height: float = 4.2, rows: int = 1) -> Any:
    """A matplotlib figure and a row of axes, or rows of them, without a display. width, height: inches of each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(width * columns, height * rows), layout="constrained")


def plain_log(ax: Any, which: str, base: int = 10, between: tuple[float, ...] = (1.0, 2.0, 5.0)) -> None:
    """Make an axis ("x" or "y") of a plot logarithmic, with plain numbers: powers of two, or powers of ten by those between."""
    from matplotlib.ticker import LogLocator, NullFormatter

    ax.set(**{f"{which}scale": "log"})
    axis = {"x": ax.xaxis, "y": ax.yaxis}[which]
    axis.set_major_locator(LogLocator(base, subs=(1.0,) if base == 2 else between))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def save_figure(figure: Any, path: Path, source: str) -> None:
    """Write a figure as a PNG with the digest of its sources, and close it."""
    import matplotlib.pyplot as plt

    figure.savefig(path, dpi=110, metadata={"Software": None, "Source": source})
    plt.close(figure)


def digest(results: list[Path]) -> str:
    """A digest of the content of result files."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in results)).hexdigest()


def shows(path: Path, results: list[Path]) -> bool:
    """Whether a PNG exists and was made from the current result files."""
    return path.exists() and digest(results).encode() in path.read_bytes()


def draw_predictions(document: dict[str, Any]) -> Any:
    """Draw the tails of latencies: one line for each policy and kind of steps, one panel for each rate.

    Three sizes of steps are omitted: they differ from two only when short prompts arrive together, which no open loop
    of conversations shows.
    """
    loads = [load for load in document["results"]["loads"] if load["rate"]]
    figure, axes = figure_row(len(loads))
    for ax, load in zip(np.atleast_1d(axes), loads, strict=True):
        series: dict[str, list[dict[str, Any]]] = {}
        for row in load["choices"]:
            if row["burst_step"]:
                continue
            kind = f"{row['policy']}, {row['mixed']} then {row['tokens']}" if row["mixed"] else f"{row['policy']}, one size"
            series.setdefault(kind, []).append(row)
        for (kind, rows), (place, side) in zip(series.items(), cycle(LABELS), strict=False):
            xs, ys = ([row[name] for row in rows] for name in ("ttft_p99", "tpot_p99"))
            ax.plot(xs, ys, "o--" if rows[0]["mixed"] else "s-", markersize=4, label=kind)
            for x, y, row in zip(xs, ys, rows, strict=True):
                size = row["burst"] if row["mixed"] else row["tokens"]
                ax.annotate(f"{size:,}", (x, y), fontsize=7, xytext=place, ha=side, textcoords="offset points")
        plain_log(ax, "x")
        ax.set(xlabel="P99 TTFT, ms", ylabel="P99 TPOT, ms", title=f"{load['rate']:g} requests/s (simulated)")
        ax.grid(alpha=0.3)
    np.atleast_1d(axes)[0].legend(fontsize=7)
    return figure


def draw_fleet(document: dict[str, Any]) -> Any:
    """P99 of TTFT and prefix hits of each placement, a group of bars for each workload."""
    workloads = document["results"]["workloads"]
    names = list(next(iter(workloads.values())))
    figure, axes = figure_row(2, height=3.4)
    panels = (("ttft_p99", 1000, "P99 TTFT, ms (simulated)"), ("hit_rate", 100, "prefix hits, % of the prompts' tokens"))
    for ax, (key, unit, label) in zip(axes, panels, strict=True):
        for i, name in enumerate(names):
            values = [unit * its[name][key] for its in workloads.values()]
            color = "lightgray" if name.startswith("(") else f"C{i}"
            ax.bar(np.arange(len(values)) + 0.16 * i, values, 0.15, label=name, color=color)
        ax.set_xticks(np.arange(len(workloads)) + 0.16 * (len(names) - 1) / 2, list(workloads))
        ax.set(ylabel=label)
        ax.grid(alpha=0.3, axis="y")
    axes[0].legend(fontsize=7)
    return figure


def draw_soak(document: dict[str, Any]) -> Any:
    """Private memory of each process over time, in percent of its first look."""
    figure, ax = figure_row(width=7.0, height=3.2)
    minutes = [seconds / 60 for seconds in document["results"]["looked at, s"]]
    for row in document["results"]["private memory, KiB"]:
        first = row["looks"][0]
        ax.plot(
            minutes, [100 * kib / first for kib in row["looks"]], "o-", markersize=3, label=f"{row['process']}, {first:,} KiB"
        )
    ax.set(xlabel="minutes from the first look on", ylabel="private memory, %", ylim=(97, 103))
    ax.axhline(101, linestyle=":", color="gray")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7, ncol=2)
    return figure


def draw_attacks(document: dict[str, Any]) -> Any:
    """P99 of the gaps of streams, without and during each attack, and the worker's memory."""
    rows = document["results"]["attacks"]
    names, places = [row["attack"] for row in rows], np.arange(len(rows))
    figure, axes = figure_row(2, height=3.6)
    series = (("quiet", "tab:gray"), ("beside", "tab:blue"))
    for offset, (when, color) in enumerate(series):
        values = [row["gap_ms"][when]["p99"]["value"] for row in rows]
        axes[0].barh(places + 0.4 * offset, values, 0.38, label=when, color=color)
    axes[0].plot(
        [3 * row["gap_ms"]["quiet"]["p99"]["value"] for row in rows], places + 0.2, "|", color="tab:red", label="3 x quiet"
    )
    axes[0].set_yticks(places + 0.2, names)
    axes[0].set(xlabel="P99 of the gap between two tokens, ms")
    axes[1].barh(places + 0.2, [row["worker_mib"]["peak"] for row in rows], 0.6, color="tab:blue")
    axes[1].axvline(512, linestyle=":", color="tab:red")
    axes[1].set_yticks(places + 0.2, [""] * len(rows))
    axes[1].set(xlabel="memory of the worker at most, MiB")
    for ax in axes:
        ax.invert_yaxis()
        ax.grid(alpha=0.3, axis="x")
    axes[0].legend(fontsize=7)
    return figure


def draw_rings(document: dict[str, Any]) -> Any:
    """The cache of one sequence, and the number of sequences on a GPU, for each model with all tokens kept and with
    rings."""
    found = document["results"]
    names = [model["model"] for model in found["models"]]
    figure, axes = figure_row(2, height=3.4)
    panels = (
        ("bytes", 2**30, f"GiB of cache of one sequence of {found['tokens']:,} tokens", "{:.2f}"),
        ("sequences", 1, f"sequences of {found['tokens']:,} tokens on {found['fits']}", "{:g}"),
    )
    for ax, (key, unit, label, form) in zip(axes, panels, strict=True):
        for offset, (kind, color) in enumerate((("full", "tab:gray"), ("ring", "tab:blue"))):
            values = [model[kind][key] / unit for model in found["models"]]
            bars = ax.barh(np.arange(len(names)) + 0.4 * offset, values, 0.38, label=f"--window-cache {kind}", color=color)
            ax.bar_label(bars, [form.format(value) for value in values], fontsize=7, padding=2)
        ax.set_yticks(np.arange(len(names)) + 0.2, names)
        ax.invert_yaxis()
        ax.margins(x=0.12)
        if key == "sequences":
            plain_log(ax, "x")
        ax.set(xlabel=label)
        ax.grid(alpha=0.3, axis="x")
    axes[0].legend(fontsize=7)
    return figure
