"""The grid's results as one page of plots: each figure against the rate, isolated on the left, beside neighbours on the right."""

from __future__ import annotations

from typing import Any

from benchmarks.common import figure_row, plain_log
from benchmarks.paper_report import FIGURES, MODES, Document, Figure, counts, placement, series, systems

STYLES = {  # colour (Okabe and Ito, told apart by the colour-blind too) and marker; the same on every page
    "blinkpy": ("#0072B2", "o"),
    "blinkpy-host": ("#E69F00", "s"),
    "blinkpy-8192": ("#56B4E9", "v"),
    "vllm": ("#D55E00", "D"),
}
OTHERS = (("#009E73", "^"), ("#CC79A7", "P"), ("#000000", "X"), ("#999999", "h"))
UNANSWERED = 0.01  # share of requests without an answer, above which a point is hollow: its percentiles are those of the others
LATENCIES = {"P99 TTFT": "ttft_ms", "P99 TPOT": "tpot_ms"}


def draw(document: Document) -> Any:
    """A page of plots. Left and right have the same scale; on the right each system's isolated line is repeated, thin."""
    from matplotlib.lines import Line2D

    figure, rows = figure_row(2, 5.2, 2.75, rows=len(FIGURES))
    names = systems(document)
    styles = styles_of(names)
    rates = sorted({cell["cell"]["rate"] for cell in document["cells"] if cell["cell"]["rate"]})
    for row, (title, (unit, value)) in zip(rows, FIGURES.items(), strict=True):
        row[1].sharey(row[0])
        for ax, mode in zip(row, MODES, strict=True):
            for order, name in enumerate(names):
                curve(ax, document, name, mode, title, value, styles[name], order)
                if mode == MODES[1] and (quiet := series(document, name, MODES[0], value)):
                    ax.plot(list(quiet), list(quiet.values()), color=styles[name][0], linewidth=1.2, linestyle=":", zorder=1)
            ax.set(xlabel="requests/s", ylabel=f"{title}, {unit}")
            ax.set_xlim(0, 1.05 * max(rates, default=1.0))
            ax.set_xticks([rate for i, rate in enumerate(rates) if i == 0 or rate - rates[i - 1] >= max(rates) / 20])
            ax.xaxis.set_major_formatter("{x:g}")
            ax.grid(alpha=0.3)
        if not any(ax.has_data() for ax in row):
            why = "no energy counter" if title == "energy" else "nothing counts"
            for ax in row:
                ax.text(0.5, 0.5, why, ha="center", transform=ax.transAxes)
        elif title in LATENCIES:
            plain_log(row[0], "y")
        else:
            row[0].set_ylim(bottom=0)
    beside = next((cell["load"] for cell in document["cells"] if cell["cell"]["mode"] == MODES[1]), None)
    rows[0][0].set_title("isolated: nothing else runs", fontsize=10)
    if beside:
        kinds = ", ".join(beside["kinds"])
        rows[0][1].set_title(f"interfered: {beside['per_core']} neighbours on each core ({kinds})", fontsize=10)
    legend = [Line2D([], [], color=styles[name][0], marker=styles[name][1], markersize=5, label=name) for name in names]
    grey = {"color": "grey", "linestyle": "none"}
    marks: dict[str, dict[str, Any]] = {
        "hollow: more than 1 % not answered": {**grey, "marker": "o", "markerfacecolor": "white"},
        "x: client fell behind, doesn't count": {**grey, "marker": "x"},
        "dotted: the same, isolated": {"color": "grey", "linewidth": 1.2, "linestyle": ":"},
    }
    legend += [Line2D([], [], label=label, **style) for label, style in marks.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=4, fontsize=8)
    cores = "cores of their own" if placement(document) == "own" else "the contended cores"
    figure.suptitle(f"{document['model']} on {document['gpu'].get('gpu', 'no GPU')}; front ends on {cores}; bars: 95 % intervals")
    return figure


def styles_of(names: list[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each system."""
    others = [name for name in names if name not in STYLES]
    return STYLES | {name: OTHERS[i % len(OTHERS)] for i, name in enumerate(others)}


def curve(
    ax: Any, document: Document, name: str, mode: str, title: str, value: Figure, style: tuple[str, str], order: int
) -> None:
    """One system's line through the cells that count, with intervals of latencies, and crosses for those that don't."""
    colour, marker = style
    points = series(document, name, mode, value)
    if points:
        ax.plot(list(points), list(points.values()), color=colour, linewidth=1.4, zorder=9 - order)
    for cell in document["cells"]:
        key = cell["cell"]
        if (key["system"], key["mode"], key["front_end"]) != (name, mode, placement(document)) or not key["rate"]:
            continue
        height = value(cell)
        if not height:
            continue
        if not counts(document, cell):
            ax.plot(key["rate"], height, color=colour, marker="x", markersize=6, zorder=9 - order)
            continue
        open_ = sum(cell["errors"].values()) > UNANSWERED * cell.get("requests", float("inf"))
        ax.plot(
            key["rate"], height, color=colour, marker=marker, markersize=5, zorder=20 - order,
            markerfacecolor="white" if open_ else colour,
        )  # fmt: skip
        if title in LATENCIES and "low" in (level := cell[LATENCIES[title]]["p99"]):
            ax.plot([key["rate"]] * 2, [level["low"], level["high"]], color=colour, linewidth=3, alpha=0.3, solid_capstyle="butt")
