"""The grid's results as one page of plots: each figure against the rate, isolated on the left, with neighbours on the
right."""

import itertools
import math
from typing import Any

from benchmarks.report.figure_files import figure_row, plain_log
from benchmarks.report.grid_summary import FIGURES, Document, Figure, cells_of, counts, placement, series, systems
from benchmarks.serving.load_figures import MODES

STYLES = {  # colour (Okabe and Ito, distinguishable for colour-blind readers) and marker; the same on every page
    "blinkpy": ("#0072B2", "o"),
    "blinkpy-host": ("#E69F00", "s"),
    "blinkpy-8192": ("#56B4E9", "v"),
    "blinkpy-even": ("#009E73", "^"),
    "vllm": ("#D55E00", "D"),
}
OTHERS = (("#CC79A7", "P"), ("#000000", "X"), ("#999999", "h"))
UNANSWERED = 0.01  # share of unanswered requests above which a point is hollow, since its percentiles exclude these
LATENCIES = {"P99 TTFT": "ttft_ms", "P99 TPOT": "tpot_ms"}
MARKS: dict[str, dict[str, Any]] = {
    "hollow: more than 1 % not answered": {"linestyle": "none", "marker": "o", "markerfacecolor": "white"},
    "x: the client fell behind, or excluded: doesn't count": {"linestyle": "none", "marker": "x"},
    "dotted: the same, isolated": {"linestyle": ":", "linewidth": 1.2},
}


def draw(document: Document) -> Any:
    """A page of plots. Left and right have the same scale; on the right each system's isolated line is repeated, dotted."""
    figure, rows = figure_row(2, 5.2, 2.75, rows=len(FIGURES))
    curves = Curves(document)
    for row, (title, (unit, value)) in zip(rows, FIGURES.items(), strict=True):
        row[1].sharey(row[0])
        for ax, mode in zip(row, MODES, strict=True):
            for name in curves.styles:
                curves.line(ax, name, mode, value, linewidth=1.4)
                curves.points(ax, name, mode, title, value)
                if mode != MODES[0]:
                    curves.line(ax, name, MODES[0], value, linewidth=1.2, linestyle=":")
            ax.set(xlabel="requests/s", ylabel=f"{title}, {unit}")
            curves.rate_axis(ax)
            ax.grid(alpha=0.3)
        if not any(value(cell) for cell in document["cells"]):
            row[0].set_ylim(0, 1)
            for ax in row:
                ax.text(0.5, 0.5, "not measured", ha="center", transform=ax.transAxes)
        elif title in LATENCIES:
            plain_log(row[0], "y")
        else:
            row[0].set_ylim(bottom=0)
    rows[0][0].set_title("isolated: no neighbours", fontsize=10)
    if beside := next((cell["load"] for cell in document["cells"] if cell["cell"]["mode"] != MODES[0]), None):
        kinds = ", ".join(beside["kinds"])
        rows[0][1].set_title(f"interfered: {beside['per_core']} neighbours on each core ({kinds})", fontsize=10)
    figure.legend(handles=curves.legend(), loc="outside lower center", ncols=4, fontsize=8)
    cores = "cores of their own" if placement(document) == "own" else "the contended cores"
    figure.suptitle(f"{document['model']} on {document['gpu'].get('gpu', 'no GPU')}; front ends on {cores}; bars: 95 % intervals")
    return figure


class Curves:
    """Draws the systems of a result, each in its own style, over the rates that any of them was offered."""

    def __init__(self, document: Document):
        self.document = document
        others = itertools.cycle(OTHERS)
        self.styles = {name: STYLES[name] if name in STYLES else next(others) for name in systems(document)}
        self.rates = sorted({cell["cell"]["rate"] for cell in document["cells"] if cell["cell"]["rate"]})

    def line(self, ax: Any, name: str, mode: str, value: Figure, **style: Any) -> None:
        """Draw a line through the valid cells, with a gap at a missing rate that another system has."""
        found = series(self.document, name, mode, value)
        heights = [found.get(rate, math.nan) for rate in self.rates]
        ax.plot(self.rates, heights, color=self.styles[name][0], zorder=self._above(name), **style)

    def points(self, ax: Any, name: str, mode: str, title: str, value: Figure) -> None:
        """Draw every cell: a latency with its interval; hollow if many requests had no answer; a cross if it is
        invalid."""
        colour, marker = self.styles[name]
        for cell in cells_of(self.document, system=name, mode=mode, streams=0, front_end=placement(self.document)):
            rate, height = cell["cell"]["rate"], value(cell)
            if not height:
                continue
            style = {"color": colour, "marker": marker, "markersize": 5, "zorder": 10 + self._above(name)}
            if not counts(self.document, cell):
                style |= {"marker": "x"}
            elif sum(cell["errors"].values()) > UNANSWERED * cell["requests"]:
                style |= {"markerfacecolor": "white"}
            ax.plot(rate, height, **style)
            if title in LATENCIES and counts(self.document, cell):
                level = cell[LATENCIES[title]]["p99"]
                ax.vlines(rate, level["low"], level["high"], color=colour, linewidth=3, alpha=0.3)

    def rate_axis(self, ax: Any) -> None:
        """Ticks at the rates, without overlapping ticks."""
        most = max(self.rates, default=1.0)
        ax.set_xlim(0, 1.05 * most)
        ax.set_xticks([rate for i, rate in enumerate(self.rates) if i == 0 or rate - self.rates[i - 1] >= most / 20])
        ax.xaxis.set_major_formatter("{x:g}")

    def legend(self) -> list[Any]:
        """The systems, and the meaning of the marks."""
        from matplotlib.lines import Line2D

        names = [Line2D([], [], color=style[0], marker=style[1], markersize=5, label=name) for name, style in self.styles.items()]
        return names + [Line2D([], [], color="grey", label=label, **style) for label, style in MARKS.items()]

    def _above(self, name: str) -> int:
        """Draw overlapping systems so that the first is on top."""
        return 9 - list(self.styles).index(name)
