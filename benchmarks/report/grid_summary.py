"""The grid's results as a Markdown summary, and what its plots and tables are made of."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from benchmarks.serving.load_figures import verdict

VERDICT = """INVALID: the client, which offers the load and takes the times, fell behind, and a figure may be off by more
than 5 %; STARTED BESIDE: see below. Such a load is left out of all other tables, ratios and plots. A load counts if
the client's median lag, which every event has, is at most 5 % of the median TTFT and of the median TPOT, and if the
99th percentile of its lag is at most 5 % of the 99th percentile of TTFT, or 2 ms. A load without neighbours is also left out when
a server of a benchmark beside this one started meanwhile. The rules are the same for all systems, and are applied
anew whenever this page is written."""
Document = dict[str, Any]
Figure = Callable[[dict[str, Any]], float | None]


def latency(what: str, level: str) -> Figure:
    """A cell's percentile in ms; None where no request was answered."""
    return lambda cell: cell[what][level]["value"] if what in cell else None


FIGURES: dict[str, tuple[str, Figure]] = {
    "P99 TTFT": ("ms", latency("ttft_ms", "p99")),
    "P99 TPOT": ("ms", latency("tpot_ms", "p99")),
    "throughput": ("output tokens/s", lambda cell: cell["output_tokens_per_s"]),
    "energy": ("J/token", lambda cell: cell["energy"].get("joules_per_token")),
}
MODES = ("isolated", "interfered")
MEDIANS: dict[str, Figure] = {
    "median TTFT": latency("ttft_ms", "p50"),
    "median TPOT": latency("tpot_ms", "p50"),
    "throughput": FIGURES["throughput"][1],
}


def placement(document: Document) -> str:
    """Where the grid's front ends are: own, or shared."""
    return "own" if document["cores"]["front_end"] else "shared"


def counts(document: Document, cell: dict[str, Any]) -> bool:
    """Whether a cell says something about its server: the client kept up and no other server started beside it, or nothing means
    anything. It is judged anew: the rule may have changed since the cell was measured."""
    return bool(document["smoke"] or verdict(cell)["valid"])


def series(document: Document, system: str, mode: str, figure: Figure, front_end: str = "") -> dict[float, float]:
    """A figure by rate; the geometric mean where cells were repeated. Invalid cells are left out. front_end: own or shared; by
    default the grid's."""
    wanted = (system, mode, front_end or placement(document))
    found: dict[float, list[float]] = {}
    for cell in document["cells"]:
        key = cell["cell"]
        same = key["rate"] and (key["system"], key["mode"], key["front_end"]) == wanted
        if same and counts(document, cell) and (value := figure(cell)):
            found.setdefault(key["rate"], []).append(value)
    return {rate: geometric_mean(values) for rate, values in sorted(found.items())}


def closed_loops(document: Document, system: str, figure: Figure) -> dict[float, float]:
    """A figure by the number of streams, without invalid cells."""
    cells = [cell for cell in document["cells"] if cell["cell"]["streams"] and cell["cell"]["system"] == system]
    return {cell["cell"]["streams"]: value for cell in cells if counts(document, cell) and (value := figure(cell))}


def systems(document: Document) -> list[str]:
    return list(dict.fromkeys(cell["cell"]["system"] for cell in document["cells"]))


def unmeasured(document: Document, names: Iterable[str], rates: Iterable[float] = ()) -> list[str]:
    """What is missing, in words: of these systems, the loads that any system was offered and they weren't; and the grid at these
    rates, for which nobody need have been asked."""
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


def started_beside(cell: dict[str, Any]) -> list[str]:
    """The servers of other benchmarks that started during a load without neighbours: starts.marked looks for them."""
    found: list[str] = cell.get("beside", {}).get("starts", [])
    return found


def fallen_behind(document: Document) -> list[str]:
    """The loads in which the client fell behind, in words."""
    return [whole_name(document, cell) for cell in document["cells"] if not counts(document, cell) and not started_beside(cell)]


def disturbed(document: Document) -> list[str]:
    """The loads that don't count since a server started beside them, in words."""
    return [whole_name(document, cell) for cell in document["cells"] if not counts(document, cell) and started_beside(cell)]


def whole_name(document: Document, cell: dict[str, Any]) -> str:
    """A load with its system and mode; and where its front end was, if that is not where the grid's are."""
    key = cell["cell"]
    where = "" if key["front_end"] == placement(document) else ", front end on contended cores"
    return f"{key['system']} {load_name(cell)}, {key['mode']}{where}"


def load_name(cell: dict[str, Any]) -> str:
    key = cell["cell"]
    return stream_words(key["streams"]) if key["streams"] else f"{key['rate']:g} requests/s"


def stream_words(count: float) -> str:
    return f"{count:g} stream{'' if count == 1 else 's'}"


def enumerated(values: Iterable[float]) -> str:
    """2, 8 and 32."""
    *words, last = [f"{value:g}" for value in values]
    return f"{', '.join(words)} and {last}" if words else last


def alongside(document: Document) -> list[str]:
    """A sentence on the benchmarks that ran beside this one; none if it was alone."""
    others = {name for cell in document["cells"] for name in cell.get("beside", {}).get("benchmarks", ())}
    if not others:
        return []
    return [
        f"Beside it {' and '.join(sorted(others))} was measured, on another GPU and other cores of the machine; loads without",
        "neighbours never ran while the other's had them.",
    ]


def geometric_mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def ratios(above: dict[float, float], below: dict[float, float]) -> list[float]:
    """Ratios at the rates that both have."""
    return [above[rate] / below[rate] for rate in sorted(above.keys() & below.keys())]


def summary(document: Document) -> str:
    """Tables: how much neighbours cost each system, how the systems compare, each cell's figures, and repeated cells."""
    gpu = document["gpu"].get("gpu", "no GPU")
    lines = [f"# {document['model']}, {gpu}", ""]
    if not document["smoke"] and (missing := unmeasured(document, systems(document))):
        lines += [f"**Not measured:** {'; '.join(missing)}.", ""]
    if beside := alongside(document):
        lines += [*beside, ""]
    for system, error in document["errors"].items():
        lines += [f"**{system} failed:** {error.splitlines()[0]}", ""]
    names = systems(document)
    for front_end in ("own", "shared"):
        rows = [(name, (name, "interfered", front_end), (name, "isolated", front_end)) for name in names]
        if table := _ratio_table(document, rows):
            where = "on cores of their own" if front_end == "own" else "among the neighbours"
            lines += [f"Front ends {where}, interfered over isolated, geometric mean over rates (range); below 1 is a loss for"]
            lines += ["throughput:", "", *table, ""]
    if len(names) > 1:
        first, *others = names
        pairs = [
            (f"{other} / {first}, {mode}", (other, mode, ""), (first, mode, ""))
            for other in others
            for mode in ("isolated", "interfered")
        ]
        if table := _ratio_table(document, pairs):
            lines += [f"The others over {first}, geometric mean over rates (range):", "", *table, ""]
    if table := _repeat_table(document):
        lines += ["Cells that were measured several times, largest over smallest:", "", *table, ""]
    lines += ["Every cell:", "", *_cell_table(document), "", *VERDICT.splitlines(), ""]
    if shares := [cell["client"]["busiest_core_share"] for cell in document["cells"] if "busiest_core_share" in cell["client"]]:
        lines += [
            f"The busiest of the client's processes had something to do for at most {100 * max(shares):.0f} % of a load's time.",
            "",
        ]
    idle = {cell["cell"]["system"]: cell["server"] for cell in document["cells"] if cell["server"].get("idle_w")}
    watts = [f"{name} {server['idle_w']:g} W ({server['idle_before_w']:g} W before its start)" for name, server in idle.items()]
    return "\n".join([*lines, f"Power of the GPU with an idle server: {', '.join(watts)}.", ""] if watts else lines)


def _ratio_table(document: Document, rows: list[tuple[str, tuple[str, str, str], tuple[str, str, str]]]) -> list[str]:
    """Empty if no row has a ratio. rows: label, and (system, mode, front end) of numerator and denominator."""

    def points(which: tuple[str, str, str], figure: Figure) -> dict[float, float]:
        system, mode, front_end = which
        return series(document, system, mode, figure, front_end)

    lines = ["| | " + " | ".join(FIGURES) + " |", "|---" * (len(FIGURES) + 1) + "|"]
    for label, above, below in rows:
        found = [ratios(points(above, value), points(below, value)) for _, value in FIGURES.values()]
        if any(found):
            words = [f"{geometric_mean(one):.2f} ({min(one):.2f} to {max(one):.2f})" if one else "none" for one in found]
            lines.append(f"| {label} | " + " | ".join(words) + " |")
    return lines if len(lines) > 2 else []


def _cell_table(document: Document) -> list[str]:
    titles = (
        "system, front end, mode, load, TTFT p50 / p99 ms, TPOT p50 / p99 ms, output tok/s, goodput/s, J/token, errors, "
        "client's lag p99 ms"
    )
    names = titles.split(", ")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for cell in document["cells"]:
        key, energy = cell["cell"], cell["energy"].get("joules_per_token")
        times = [
            f"{cell[what]['p50']['value']:g} / {cell[what]['p99']['value']:g}" if what in cell else "none"
            for what in ("ttft_ms", "tpot_ms")
        ]
        client, mark = cell["client"], "STARTED BESIDE" if started_beside(cell) else "INVALID"
        lines.append(
            f"| {key['system']} | {key['front_end']} | {key['mode']} | {load_name(cell)} | {times[0]} | {times[1]} | "
            f"{cell['output_tokens_per_s']:g} | {cell['goodput_per_s']:g} | {'' if energy is None else f'{energy:.3g}'} | "
            f"{', '.join(f'{count} {error}' for error, count in cell['errors'].items()) or '0'} | "
            f"{client['lag_ms']['p99']:g}{'' if verdict(cell)['valid'] else f' {mark}'} |"
        )
    return lines


def repeated(document: Document) -> dict[tuple[str, str, float], dict[str, float]]:
    """Of each cell of the grid that was measured several times, by system, mode and rate: the largest over the smallest of each
    of MEDIANS."""
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        key = cell["cell"]
        if key["rate"] and key["front_end"] == placement(document) and counts(document, cell):
            groups.setdefault((key["system"], key["mode"], key["rate"]), []).append(cell)
    found: dict[tuple[str, str, float], dict[str, float]] = {}
    for which, cells in groups.items():
        values = {name: [value for cell in cells if (value := figure(cell))] for name, figure in MEDIANS.items()}
        if len(cells) > 1:
            found[which] = {name: max(some) / min(some) for name, some in values.items() if some}
    return found


def _repeat_table(document: Document) -> list[str]:
    lines = ["| system | mode | requests/s | " + " | ".join(MEDIANS) + " |", "|---" * (len(MEDIANS) + 3) + "|"]
    for (system, mode, rate), found in repeated(document).items():
        words = [f"{found[name]:.3f}" if name in found else "none" for name in MEDIANS]
        lines.append(f"| {system} | {mode} | {rate:g} | " + " | ".join(words) + " |")
    return lines if len(lines) > 2 else []
