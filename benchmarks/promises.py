"""What was promised of the engine on a GPU, held against the result files: what was not reached, by how much, and what was."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from benchmarks.repeats import WITHIN, Twice
from benchmarks.report.grid_summary import (
    FIGURES,
    MEDIANS,
    MODES,
    Document,
    alongside,
    closed_loops,
    latency,
    ratios,
    series,
    stream_words,
)
from benchmarks.report.serving_tables import HEADLINE_RATE, OURS, PEER, file_name, percent, word

# By the model's name, as the result files have it; ratios are those of the peer's time to ours.
TPOT = {"llama-3-8b": {1.0: 1.15, 64.0: 1.15, 256.0: 1.1}, "qwen3-30b-a3b": {1.0: 1.4, 64.0: 1.1}}  # by streams
TAILS = {"llama-3-8b": 1.5}  # P99 at HEADLINE_RATE
BESIDE = 0.05  # by how much neighbours may make a figure worse, at every rate
START_S = {"llama-3-8b": 60.0}  # from start to healthy, with warm caches
GAP_US = 10.0  # between two steps of STEPS, at any number of rows
STEPS, SCHEDULER = "decode-llama-3-8b", "decode-scheduler"
SCHEDULER_US = {STEPS: (256, 10.0), SCHEDULER: (1024, 20.0)}  # rows and limit, by file
EARLIER = "steps-of-2048-"  # begins the name of the grids in which the peer had a machine to itself
ALONE = "alone-"  # of loads with each system alone on a machine, one after another
END_TO_END = latency("e2e_ms", "p50")


class Held(NamedTuple):
    """A promise and what came of it.

    limit, value: in a unit: x (a ratio, the more the better), us, s, or none (a share). figures: what the value was made of, in
    words."""

    what: str
    limit: float
    value: float
    unit: str
    figures: str
    files: str

    @property
    def kept(self) -> bool:
        return self.value >= self.limit if self.unit == "x" else self.value <= self.limit

    @property
    def promised(self) -> str:
        limit = {"x": f"{self.limit:g}x", "": percent(self.limit)}.get(self.unit, f"{self.limit:g} {self.unit}")
        return f"at {'least' if self.unit == 'x' else 'most'} {limit}"

    @property
    def measured(self) -> str:
        """With a digit more than the limit has, so that one that is just missed doesn't look reached."""
        value = {"x": f"{self.value:.3f}x", "": percent(self.value, 1)}.get(self.unit, f"{self.value:.1f} {self.unit}")
        return value if self.kept else f"{value}, {percent(self.value / self.limit, 1)} of that"


class Served(NamedTuple):
    """Result files of a model; empty where there is none. earlier: a grid in which the peer had a machine to itself."""

    paper: Document
    earlier: Document
    alone: Document


def promises(served: dict[str, Served], decode: dict[str, Document], twice: Iterable[Twice]) -> str:
    """Two tables: what was not reached, and what was.

    served: by the model's title. decode: files of decode steps by their names. twice: files with loads measured twice."""
    held = [one for title, files in served.items() for one in _serving(title, files)]
    held += [*_steps(decode), *_runs(twice)]
    lines = _table("not reached", [one for one in held if not one.kept]) + _table("reached", [one for one in held if one.kept])
    return "\n".join(lines) or "Not measured yet.\n"


def _table(title: str, held: list[Held]) -> list[str]:
    """Empty without a promise."""
    rows = [f"| {one.what} | {one.promised} | {one.measured} | {one.figures}{one.figures and ': '}{one.files} |" for one in held]
    return [f"| {title} | promised | measured | made of |", "|---" * 4 + "|", *rows, ""] if rows else []


def _serving(title: str, files: Served) -> Iterator[Held]:
    """Of a model's serving benchmarks: what is held against the peer, then what is held against blinkpy's own quiet loads."""
    if files.paper:
        document = files.paper["results"]
        name = f"`{file_name(document)}.json`"
        yield from _against_peer(title, "", name, document, document)
        if files.earlier and alongside(document):
            names = f"{name}, {PEER}'s: `{EARLIER}{document['model']}.json`"
            yield from _loops(title, f", {PEER} alone on a machine", names, document, files.earlier["results"])
    if files.alone:
        document = files.alone["results"]
        yield from _against_peer(title, ", each alone on a machine", f"`{ALONE}{document['model']}.json`", document, document)
    if files.paper:
        yield from _own(title, files.paper)


def _against_peer(title: str, where: str, name: str, ours: Document, peers: Document) -> Iterator[Held]:
    yield from _loops(title, where, name, ours, peers)
    limit = TAILS.get(ours["model"])
    for figure in ("P99 TTFT", "P99 TPOT"):
        value = FIGURES[figure][1]
        own, other = (series(one, who, MODES[0], value).get(HEADLINE_RATE) for one, who in ((ours, OURS), (peers, PEER)))
        if limit and own and other:
            what = f"{title}, {figure} at {HEADLINE_RATE:g} requests/s, {PEER} / {OURS}{where}"
            yield Held(what, limit, other / own, "x", f"{word(other)} and {word(own)} ms", name)


def _loops(title: str, where: str, names: str, ours: Document, peers: Document) -> Iterator[Held]:
    for streams, limit in TPOT.get(ours["model"], {}).items():
        what = f"{title}, median TPOT with {stream_words(streams)}, {PEER} / {OURS}{where}"
        yield from _closed(what, names, ours, peers, streams, limit)


def _own(title: str, file: Document) -> Iterator[Held]:
    """What neighbours do to blinkpy, and its start."""
    document = file["results"]
    model, name = document["model"], f"`{file_name(document)}.json`"
    for figure in ("P99 TTFT", "P99 TPOT", "throughput"):
        if found := _worse(document, figure):
            runs = sorted({cell["cell"]["repeat"] for cell in document["cells"]})
            single = [max(some) for run in runs if (some := _worse(_run(document, run), figure))]
            words = f"{', '.join(percent(share, 1) for share in found)}; in each run at most"
            words = f"{words} {' and '.join(percent(share, 1) for share in single)}"
            what = f"{title}, {OURS}'s {figure}, how much worse neighbours make it, the largest of {len(found)} rates"
            yield Held(what, BESIDE, max(found), "", words, name)
    servers = [cell["server"] for cell in document["cells"] if cell["cell"]["system"] == OURS]
    seconds = {server["start_to_healthy_s"] for server in servers if "start_to_healthy_s" in server}
    if model in START_S and seconds:
        words = " and ".join(f"{second:.0f}" for second in sorted(seconds))
        yield Held(f"{title}, {OURS}'s start to healthy, caches warm", START_S[model], min(seconds), "s", f"{words} s", name)


def _worse(document: Document, figure: str) -> list[float]:
    """By how much a figure is worse with neighbours than without, at each rate; below 0 it is better."""
    quiet, beside = (series(document, OURS, mode, FIGURES[figure][1]) for mode in MODES)
    return [ratio - 1 for ratio in (ratios(quiet, beside) if figure == "throughput" else ratios(beside, quiet))]


def _run(document: Document, repeat: int) -> Document:
    """The loads of one run."""
    return {**document, "cells": [cell for cell in document["cells"] if cell["cell"]["repeat"] == repeat]}


def _closed(what: str, names: str, ours: Document, peers: Document, streams: float, limit: float) -> Iterator[Held]:
    """TPOT of a closed loop; the other medians behind it, since TTFT can be had for TPOT."""
    pairs = {
        label: (closed_loops(peers, PEER, value).get(streams), closed_loops(ours, OURS, value).get(streams))
        for label, value in {"TPOT": MEDIANS["median TPOT"], "TTFT": MEDIANS["median TTFT"], "end to end": END_TO_END}.items()
    }
    known = {label: (left, right) for label, (left, right) in pairs.items() if left and right}
    if "TPOT" in known:
        words = [f"{label} {word(left)} and {word(right)} ms" for label, (left, right) in known.items()]
        if "end to end" in known:
            words.append(f"which is {known['end to end'][0] / known['end to end'][1]:.2f}x")
        yield Held(what, limit, known["TPOT"][0] / known["TPOT"][1], "x", ", ".join(words), names)


def _steps(decode: dict[str, Document]) -> Iterator[Held]:
    """Of the loop: the gap between steps, and the scheduler's kernel."""
    if steps := decode.get(STEPS):
        gaps = {rows: step["gap_us"]["p50"] for rows, step in steps["rows"].items() if "gap_us" in step}
        words = f"{', '.join(f'{gap:.1f}' for gap in gaps.values())} us with {', '.join(gaps)} rows"
        yield Held(
            "Llama-3-8B, GPU idle between two steps, the longest",
            GAP_US,
            max(gaps.values()),
            "us",
            words,
            f"`{STEPS}.json`",
        )
    for name, (rows, limit) in SCHEDULER_US.items():
        if (found := decode.get(name)) and "scheduler_us" in (step := found["rows"].get(str(rows), {})):
            took = step["scheduler_us"]["p50"]
            yield Held(f"The scheduler's kernel with {rows:,} rows", limit, took, "us", "", f"`{name}.json`")


def _runs(twice: Iterable[Twice]) -> Iterator[Held]:
    """Of loads that were measured twice: the difference that half of the figures stay below, and the largest."""
    for one in twice:
        if one.loads:
            runs, name = f"{one.title}, two runs of {OURS} {one.where}", f"`{one.name}.json`"
            of = "difference of medians and throughput"
            yield Held(f"{runs}, the median {of}", WITHIN, statistics.median(one.differences), "", "", name)
            yield Held(f"{runs}, the largest {of}", WITHIN, max(one.differences), "", f"{one.counted} are within", name)
