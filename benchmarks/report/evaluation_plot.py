"""The README's claim as a plot: the effect of busy neighbours on each system's latencies."""

from typing import Any

from benchmarks.report.evaluation_tables import CLAIM_MODEL, LATENCIES, Cells, pairs
from benchmarks.report.figure_files import figure_row, plain_log

AXES = dict(zip(LATENCIES, ("P99 time to first token, ms", "P99 time per output token, ms"), strict=True))
OURS, PEERS = "#0072B2", "#D55E00"  # Okabe and Ito, distinguishable for colour-blind readers


def draw_claim(cells: Cells) -> Any:
    """For each system and rate a filled point (isolated) and a hollow one (with neighbours). Left first tokens, right the others.

    cells: by (card, table).
    """
    found = pairs(cells)
    figure, axes = figure_row(2, 5.2, 0.6 + 0.32 * len(found))
    for ax, (kind, label) in zip(axes, AXES.items(), strict=True):
        for row, (_, name, pair) in enumerate(found):
            quiet, busy = (cell[kind]["p99"]["value"] for cell in pair)
            colour = OURS if name.startswith("blinkpy") else PEERS
            ax.plot([quiet, busy], [row, row], color=colour, linewidth=1.5, alpha=0.6)
            ax.plot(busy, row, "o", color=colour, markerfacecolor="white", markersize=9, zorder=3)
            ax.plot(quiet, row, "o", color=colour, markersize=5, zorder=4)
        plain_log(ax, "x", between=(1.0,) if kind == "ttft_ms" else (1.0, 2.0, 5.0))  # first tokens take up to a minute
        ax.set(xlabel=label, ylim=(len(found) - 0.5, -0.5))
        ax.tick_params(axis="x", labelsize=7)
        ax.grid(alpha=0.3)
    axes[0].set_yticks(range(len(found)), [f"{name}, {rate:g}/s" for rate, name, _ in found], fontsize=8)
    axes[1].set_yticks(range(len(found)), [""] * len(found))
    beside = max((pair[1]["load"]["per_core"] for _, _, pair in found), default=0)
    figure.suptitle(f"{CLAIM_MODEL}: filled without neighbours, hollow with {beside} on each core", fontsize=10)
    return figure
