"""Grids next to earlier ones (steps-of-2048-MODEL.json, steps-of-512-MODEL.json): what other step sizes did to blinkpy, and
what company on the same host does to the peer, which was the same every time."""

from __future__ import annotations

from typing import Any

from benchmarks.repeats import commit_of
from benchmarks.report.grid_summary import FIGURES, MODES, Document, Figure, closed_loops, latency, series, stream_words
from benchmarks.report.serving_tables import HEADLINE_RATE, OURS, PEER, RATES, paragraph, word

Pairs = dict[str, tuple[Document, Document]]  # by the model's title: the earlier result file and the one on the page
STREAMS = (64.0, 256.0)


def mean(what: str) -> Figure:
    """A cell's mean in ms; None where no request was answered."""
    return lambda cell: cell[what]["mean"] if what in cell else None


STEP_FIGURES: dict[str, Figure] = {
    "TTFT p50": latency("ttft_ms", "p50"),
    "TTFT p99": latency("ttft_ms", "p99"),
    "TPOT mean": mean("tpot_ms"),
    "TPOT p99": latency("tpot_ms", "p99"),
    "ITL p99": latency("itl_ms", "p99"),
    "e2e mean": mean("e2e_ms"),
}
PEER_FIGURES: dict[str, Figure] = {
    "TTFT p50, ms": latency("ttft_ms", "p50"),
    "TPOT p50, ms": latency("tpot_ms", "p50"),
    "tokens/s": FIGURES["throughput"][1],
}


def step_sizes(pairs: Pairs) -> str:
    """Isolated loads of blinkpy, earlier → now: those that both files have."""
    rows = []
    for title, (before, after) in pairs.items():
        for load, values in (
            *((f"{rate:g} requests/s", _at_rate(before, after, OURS, MODES[0], rate, STEP_FIGURES)) for rate in RATES),
            *((stream_words(streams), _with_streams(before, after, OURS, streams, STEP_FIGURES)) for streams in STREAMS),
        ):
            if all(left and right for left, right in values):
                rows.append(f"| {title} | {load} | {' | '.join(map(_arrow, values))} |")
    return _table(f"Isolated loads, ms. {_commits(pairs)}", STEP_FIGURES, rows)


def together(pairs: Pairs) -> str:
    """The peer, alone on a machine → beside another model's grid. Of a load that doesn't count one side is empty."""
    rows = []
    for title, (before, after) in pairs.items():
        counts = {streams for file in (before, after) for streams in _streams(file["results"])}
        for load, values in (
            *((stream_words(streams), _with_streams(before, after, PEER, streams, PEER_FIGURES)) for streams in sorted(counts)),
            *(
                (f"{HEADLINE_RATE:g} requests/s, {mode}", _at_rate(before, after, PEER, mode, HEADLINE_RATE, PEER_FIGURES))
                for mode in MODES
            ),
        ):
            if any(left or right for left, right in values):
                rows.append(f"| {title} | {load} | {' | '.join(map(_arrow, values))} |")
    return _table(f"{PEER} alone on a machine → beside the other model. {_commits(pairs)}", PEER_FIGURES, rows)


Values = list[tuple[float | None, float | None]]  # of each figure: earlier, now


def _at_rate(before: Document, after: Document, system: str, mode: str, rate: float, figures: dict[str, Figure]) -> Values:
    found = [[series(file["results"], system, mode, value).get(rate) for file in (before, after)] for value in figures.values()]
    return [(left, right) for left, right in found]


def _with_streams(before: Document, after: Document, system: str, streams: float, figures: dict[str, Figure]) -> Values:
    found = [
        [closed_loops(file["results"], system, value).get(streams) for file in (before, after)] for value in figures.values()
    ]
    return [(left, right) for left, right in found]


def _streams(document: Document) -> set[float]:
    return {cell["cell"]["streams"] for cell in document["cells"] if cell["cell"]["streams"]}


def _arrow(values: tuple[float | None, float | None]) -> str:
    left, right = (word(value) or "left out" for value in values)
    return f"{left} → {right}"


def _table(text: str, figures: dict[str, Figure], rows: list[str]) -> str:
    """A sentence and a table with these figures in its columns, behind shape and load."""
    if not rows:
        return "Not measured yet.\n"
    titles = ("shape", "load", *figures)
    return "\n".join([*paragraph(text), "", f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *rows, ""])


def _commits(pairs: dict[str, Any]) -> str:
    return " ".join(f"{title}: `{commit_of(before)}` → `{commit_of(after)}`." for title, (before, after) in pairs.items())
