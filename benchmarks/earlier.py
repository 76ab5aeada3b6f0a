"""Grids next to earlier ones (steps-of-2048-MODEL.json, steps-of-512-MODEL.json): what other step sizes did to blinkpy; what
company on the same host does to the peer, which was the same every time; and how much two runs of a grid differ."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.paper_report import (
    FIGURES,
    MEDIANS,
    MODES,
    Document,
    Figure,
    closed_loops,
    latency,
    repeated,
    series,
    stream_words,
)
from benchmarks.serving_tables import HEADLINE_RATE, OURS, PEER, RATES, paragraph, percent, word

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


def repeats(twice: dict[str, Document], machines: Pairs) -> str:
    """How much two runs of a grid differ: on one machine, where a file has them; and the peer's on two, without neighbours.

    twice: result files by the model's title; machines: two runs of the peer."""
    lines = []
    for title, document in twice.items():
        if document and (again := repeated(document["results"])):
            lines.append(
                f"- On one machine, one after the other, {title}, `{_commit(document)}`: {len(again)} loads of {OURS}'s were"
                f" measured twice and differ by at most {_differences(list(again.values()))}."
            )
    for title, (before, after) in machines.items():
        shown = {name: [ratio for ratio in _ratios(before, after, value) if ratio] for name, value in MEDIANS.items()}
        if all(shown.values()):
            found = [{name: max(some) for name, some in shown.items()}]
            lines.append(
                f"- On two machines of one kind, the same {PEER}, loads without neighbours, {title}, `{_commit(before)}` and"
                f" `{_commit(after)}`: at most {_differences(found)}."
            )
    return "\n".join([line for item in lines for line in textwrap.wrap(item, 130, subsequent_indent="  ")] + [""])


def _ratios(before: Document, after: Document, value: Figure) -> list[float]:
    """The larger over the smaller of the peer's figure at each rate that both have."""
    pairs = (_at_rate(before, after, PEER, MODES[0], rate, {"": value})[0] for rate in RATES)
    return [max(left, right) / min(left, right) for left, right in pairs if left and right]


def _differences(found: list[dict[str, float]]) -> str:
    return ", ".join(f"{name} {percent(max(one[name] for one in found if name in one) - 1, 1)}" for name in MEDIANS)


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


def _commit(file: Document) -> str:
    return str(file["commit"].get("hash", "unknown")[:7])


def _commits(pairs: dict[str, Any]) -> str:
    return " ".join(f"{title}: `{_commit(before)}` → `{_commit(after)}`." for title, (before, after) in pairs.items())
