"""Tables and plots of drafts: time per output token and energy, with and without them."""

from typing import Any

import numpy as np

from benchmarks.report.figure_files import figure_row
from benchmarks.report.part_tables import Document, Results, hardware, when
from benchmarks.report.words import percent

PREFIX = "drafts-"
HEAD = [
    "outputs", "streams", "TPOT without drafts, ms", "with drafts, ms", "faster", "accepted drafts",
    "J/token without", "with drafts",
]  # fmt: skip


def drafts(results: Results) -> dict[str, Any]:
    """A table for each model."""
    tables = [
        {
            "title": title, "origin": f"{hardware(found)}, {when(found)}", "setup": found["arguments"], "rows": rows(found),
            "plot": f"{PREFIX}{found['results']['shape']}.png",
        }
        for title, found in results.by_shape(PREFIX).items()
        if found
    ]  # fmt: skip
    return {"head": HEAD, "tables": tables}


def rows(found: Document) -> list[list[str]]:
    engines = found["results"]["engines"]
    some = []
    for outputs, by_streams in engines["off"].items():
        for streams, off in by_streams.items():
            on = engines["ngram"][outputs][streams]
            times = [f"{one['tpot_ms']:.3g}" for one in (off, on)]
            energy = [f"{one['joules_per_token']:.3g}" if one["joules_per_token"] else "unknown" for one in (off, on)]
            right = percent(on["right"] / on["drafts"]) if on["drafts"] else "no drafts"
            some.append([outputs, streams, *times, f"{faster(off, on):.2f}x", right, *energy])
    return some


def faster(off: Document, on: Document) -> float:
    return float(off["tpot_ms"] / on["tpot_ms"])


def draw_drafts(document: Document) -> Any:
    """How many times faster a token comes with drafts, by kind of outputs and number of streams."""
    off, on = (document["results"]["engines"][kind] for kind in ("off", "ngram"))
    figure, ax = figure_row(width=7.0, height=3.2)
    streams = list(next(iter(off.values())))
    for place, count in enumerate(streams):
        values = [faster(off[outputs][count], on[outputs][count]) for outputs in off]
        at = np.arange(len(off)) + 0.8 * place / len(streams)
        bars = ax.bar(at, values, 0.75 / len(streams), label=f"{count} streams" if count != "1" else "1 stream")
        ax.bar_label(bars, [f"{value:.2f}" for value in values], fontsize=7, padding=2)
    ax.set_xticks(np.arange(len(off)) + 0.4 * (len(streams) - 1) / len(streams), list(off))
    ax.axhline(1, color="black", linewidth=0.8)
    ax.margins(y=0.1)
    ax.set(ylabel="times faster per output token with drafts")
    ax.grid(alpha=0.3, axis="y")
    ax.legend(fontsize=7)
    return figure
