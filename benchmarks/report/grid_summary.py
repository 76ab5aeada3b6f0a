"""The grid's results: figures by system, mode and load, what is missing, and the context of its page (templates/grid.md.j2)."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.common.load import load_name
from benchmarks.serving.load_figures import MODES, levels, verdict

Document = dict[str, Any]
Figure = Callable[[Document], float | None]


def latency(what: str, level: str) -> Figure:
    """A cell's percentile in ms; None without answered requests."""
    return lambda cell: cell[what][level]["value"] if what in cell else None


FIGURES: dict[str, tuple[str, Figure]] = {
    "P99 TTFT": ("ms", latency("ttft_ms", "p99")),
    "P99 TPOT": ("ms", latency("tpot_ms", "p99")),
    "throughput": ("output tokens/s", lambda cell: cell["output_tokens_per_s"]),
    "energy": ("J/token", lambda cell: cell["energy"].get("joules_per_token")),
}
MEDIANS: dict[str, Figure] = {
    "median TTFT": latency("ttft_ms", "p50"),
    "median TPOT": latency("tpot_ms", "p50"),
    "throughput": FIGURES["throughput"][1],
}


def placement(document: Document) -> str:
    """The placement of the grid's front ends: own or shared."""
    return "own" if document["cores"]["front_end"] else "shared"


def counts(document: Document, cell: Document) -> bool:
    """Whether a cell is valid by today's rule. In a smoke run all cells count."""
    return bool(document["smoke"] or verdict(cell)["valid"])


def cells_of(document: Document, **wanted: Any) -> list[Document]:
    """The cells with these values in their keys; cells with a schema only if requested."""
    return [
        cell for cell in document["cells"] if ({"schema": False} | wanted).items() <= ({"schema": False} | cell["cell"]).items()
    ]


def valid_cells(document: Document, **wanted: Any) -> list[Document]:
    """The valid cells with these values."""
    return [cell for cell in cells_of(document, **wanted) if counts(document, cell)]


def series(document: Document, system: str, mode: str, figure: Figure, front_end: str = "") -> dict[float, float]:
    """A figure of valid cells by rate; the geometric mean of repeated cells. front_end: own or shared; by
    default the grid's.
    """
    found: dict[float, list[float]] = {}
    for cell in valid_cells(document, system=system, mode=mode, streams=0, front_end=front_end or placement(document)):
        if value := figure(cell):
            found.setdefault(cell["cell"]["rate"], []).append(value)
    return {rate: geometric_mean(values) for rate, values in sorted(found.items())}


def closed_loops(document: Document, system: str, figure: Figure) -> dict[float, float]:
    """A figure by the number of streams, without invalid cells."""
    cells = valid_cells(document, system=system, rate=0)
    return {cell["cell"]["streams"]: value for cell in cells if (value := figure(cell))}


def systems(document: Document) -> list[str]:
    return list(dict.fromkeys(cell["cell"]["system"] for cell in document["cells"]))


def unmeasured(document: Document, names: Iterable[str], rates: Iterable[float] = ()) -> list[str]:
    """The missing measurements of these systems, as text: loads of any other system, and the grid at these
    rates.
    """
    keys = [cell["cell"] for cell in document["cells"]]
    done = {(key["system"], key["mode"], key["rate"], key["streams"], key["front_end"]) for key in keys}
    own = placement(document)
    wanted: dict[str, set[float]] = {own: {*rates}}
    wanted.setdefault("shared", set())
    for key in keys:
        if key["rate"]:
            wanted[key["front_end"]].add(key["rate"])
    streams = sorted({key["streams"] for key in keys if key["streams"]})
    found = []
    for name in names:
        for front_end, some in wanted.items():
            gaps = {mode: [rate for rate in sorted(some) if (name, mode, rate, 0, front_end) not in done] for mode in MODES}
            where = "" if front_end == own else ", front end on contended cores"
            if gaps[MODES[0]] == gaps[MODES[1]]:
                gaps = {"isolated and interfered": gaps[MODES[0]]}
            found += [f"{name} at {enumerated(gap)} requests/s, {mode}{where}" for mode, gap in gaps.items() if gap]
        if gap := [count for count in streams if (name, MODES[0], 0.0, count, own) not in done]:
            found.append(f"{name} with {enumerated(gap)} streams")
    return found


def fallen_behind(document: Document) -> list[str]:
    """The invalid loads, as text, with the placement of their front ends if it differs from the grid's."""
    found = []
    for cell in document["cells"]:
        key = cell["cell"]
        where = "" if key["front_end"] == placement(document) else ", front end on contended cores"
        if not counts(document, cell):
            found.append(f"{key['system']} {cell_load(cell)}, {key['mode']}{where}")
    return found


def cell_load(cell: Document) -> str:
    """The load of a cell."""
    return load_name(cell["cell"]["rate"], cell["cell"]["streams"])


def enumerated(values: Iterable[float]) -> str:
    """Numbers as text, such as "2, 8 and 32"."""
    *words, last = [f"{value:g}" for value in values]
    return f"{', '.join(words)} and {last}" if words else last


def alongside(document: Document) -> list[str]:
    """The models measured concurrently on other GPUs of the machine; empty in newer files."""
    return sorted({name for cell in document["cells"] for name in cell.get("beside", {}).get("benchmarks", ())})


def geometric_mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def mean_ratio(above: dict[float, float], below: dict[float, float]) -> float | None:
    """Geometric mean of the ratios at common rates; None without common rates."""
    rates = sorted(above.keys() & below.keys())
    return geometric_mean(above[rate] / below[rate] for rate in rates) if rates else None


def repeated(document: Document) -> dict[tuple[str, str, float], dict[str, float]]:
    """For each repeated cell of the grid, by system, mode and rate: the ratio of the largest to the smallest
    value of each of MEDIANS.
    """
    groups: dict[tuple[str, str, float], list[Document]] = {}
    for cell in valid_cells(document, streams=0, front_end=placement(document)):
        key = cell["cell"]
        groups.setdefault((key["system"], key["mode"], key["rate"]), []).append(cell)
    found: dict[tuple[str, str, float], dict[str, float]] = {}
    for which, cells in groups.items():
        values = {name: [value for cell in cells if (value := figure(cell))] for name, figure in MEDIANS.items()}
        if len(cells) > 1:
            found[which] = {name: max(some) / min(some) for name, some in values.items() if some}
    return found


def page(document: Document) -> dict[str, Any]:
    """The context of templates/grid.md.j2: every load of a model."""
    return {
        "document": document,
        "gpu": document["gpu"].get("gpu", "no GPU"),
        "missing": [] if document["smoke"] else unmeasured(document, systems(document)),
        "beside": alongside(document),
        "cells": [cell_row(cell) for cell in document["cells"]],
        "busiest": max((cell["client"].get("busiest_core_share", 0.0) for cell in document["cells"]), default=0.0),
    }


def cell_row(cell: Document) -> list[str]:
    """Every figure of one load, as text."""
    key, joules = cell["cell"], cell["energy"].get("joules_per_token")
    errors = ", ".join(f"{count} {error}" for error, count in cell["errors"].items())
    lag = f"{cell['client']['lag_ms']['p99']:g}{'' if verdict(cell)['valid'] else ' INVALID'}"
    throughput, goodput = f"{cell['output_tokens_per_s']:g}", f"{cell['goodput_per_s']:g}"
    words = [key["system"], key["front_end"], key["mode"], cell_load(cell), levels(cell, "ttft_ms"), levels(cell, "tpot_ms")]
    return [*words, throughput, goodput, "" if joules is None else f"{joules:.3g}", errors or "0", lag]
