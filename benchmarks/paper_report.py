"""The grid's results as plots and as a Markdown summary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

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
MEDIANS: dict[str, Figure] = {
    "median TTFT": latency("ttft_ms", "p50"),
    "median TPOT": latency("tpot_ms", "p50"),
    "throughput": FIGURES["throughput"][1],
}


def series(document: Document, system: str, mode: str, figure: Figure) -> dict[float, float]:
    """A figure by rate; the geometric mean where cells were repeated. Invalid cells are left out, unless nothing means
    anything."""
    found: dict[float, list[float]] = {}
    for cell in document["cells"]:
        key = cell["cell"]
        counts = cell["client"]["valid"] or document["smoke"]
        if (key["system"], key["mode"]) == (system, mode) and counts and (value := figure(cell)):
            found.setdefault(key["rate"], []).append(value)
    return {rate: geometric_mean(values) for rate, values in sorted(found.items())}


def systems(document: Document) -> list[str]:
    return list(dict.fromkeys(cell["cell"]["system"] for cell in document["cells"]))


def geometric_mean(values: Iterable[float]) -> float:
    return float(np.exp(np.mean(np.log(list(values)))))


def ratios(above: dict[float, float], below: dict[float, float]) -> list[float]:
    """Ratios at the rates that both have."""
    return [above[rate] / below[rate] for rate in sorted(above.keys() & below.keys())]


def draw(document: Document, figure_row: Callable[..., Any]) -> Any:
    """One row of plots against the rate: isolated solid, interfered dashed."""
    figure, axes = figure_row(len(FIGURES), 4.4, 3.8)
    for ax, (name, (unit, value)) in zip(axes, FIGURES.items(), strict=True):
        for i, system in enumerate(systems(document)):
            for mode, line in (("isolated", "-"), ("interfered", "--")):
                points = series(document, system, mode, value)
                if points:
                    label = f"{system}, {mode}"
                    ax.plot(list(points), list(points.values()), line, color=f"C{i}", marker="o", markersize=3, label=label)
        ax.set(xlabel="requests/s", ylabel=unit, title=name)
        if name.startswith("P99"):
            ax.set_yscale("log")
            ax.yaxis.set_major_formatter("{x:g}")
            ax.yaxis.set_minor_formatter("{x:g}")
        else:
            ax.set_ylim(bottom=0)
        ax.grid(alpha=0.3)
    if axes[0].has_data():
        axes[0].legend(fontsize=7)
    if not axes[-1].has_data():
        axes[-1].text(0.5, 0.5, "no energy counter", ha="center", transform=axes[-1].transAxes)
    figure.suptitle(f"{document['model']}, {document['gpu'].get('gpu', 'no GPU')}")
    return figure


def summary(document: Document) -> str:
    """Tables: how much neighbours cost each system, how the systems compare, each cell's figures, and repeated cells."""
    gpu = document["gpu"].get("gpu", "no GPU")
    lines = [f"# {document['model']}, {gpu}", ""]
    if not document["complete"]:
        lines += [f"**Not complete:** {document['done']} cells.", ""]
    for system, error in document["errors"].items():
        lines += [f"**{system} failed:** {error.splitlines()[0]}", ""]
    names = systems(document)
    lines += ["Interfered over isolated, geometric mean over rates (range); below 1 is a loss for throughput:", ""]
    lines += _ratio_table(document, [(system, (system, "interfered"), (system, "isolated")) for system in names])
    if len(names) > 1:
        first, *others = names
        pairs = [
            (f"{other} / {first}, {mode}", (other, mode), (first, mode))
            for other in others
            for mode in ("isolated", "interfered")
        ]
        lines += ["", f"The others over {first}, geometric mean over rates (range):", "", *_ratio_table(document, pairs)]
    lines += ["", "Every cell:", "", *_cell_table(document), ""]
    if repeated := _repeat_table(document):
        lines += ["Repeated cells, largest over smallest at the median:", "", *repeated, ""]
    return "\n".join(lines)


def _ratio_table(document: Document, rows: list[tuple[str, tuple[str, str], tuple[str, str]]]) -> list[str]:
    lines = ["| | " + " | ".join(FIGURES) + " |", "|---" * (len(FIGURES) + 1) + "|"]
    for label, above, below in rows:
        words = []
        for _, value in FIGURES.values():
            found = ratios(series(document, *above, value), series(document, *below, value))
            words.append(f"{geometric_mean(found):.2f} ({min(found):.2f} to {max(found):.2f})" if found else "none")
        lines.append(f"| {label} | " + " | ".join(words) + " |")
    return lines


def _cell_table(document: Document) -> list[str]:
    titles = "system, mode, requests/s, TTFT p50 / p99 ms, TPOT p50 / p99 ms, output tok/s, goodput/s, J/token, errors, client"
    names = titles.split(", ")
    lines = ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]
    for cell in document["cells"]:
        key, energy = cell["cell"], cell["energy"].get("joules_per_token")
        times = [
            f"{cell[what]['p50']['value']:g} / {cell[what]['p99']['value']:g}" if what in cell else "none"
            for what in ("ttft_ms", "tpot_ms")
        ]
        lines.append(
            f"| {key['system']} | {key['mode']} | {key['rate']:g} | {times[0]} | {times[1]} | {cell['output_tokens_per_s']:g} | "
            f"{cell['goodput_per_s']:g} | {'' if energy is None else f'{energy:.3g}'} | {sum(cell['errors'].values())} | "
            f"{'kept up' if cell['client']['valid'] else 'INVALID'} |"
        )
    return lines


def _repeat_table(document: Document) -> list[str]:
    groups: dict[tuple[str, str, float], list[dict[str, Any]]] = {}
    for cell in document["cells"]:
        key = cell["cell"]
        groups.setdefault((key["system"], key["mode"], key["rate"]), []).append(cell)
    rows = []
    for (system, mode, rate), cells in groups.items():
        if len(cells) < 2:
            continue
        words = []
        for figure in MEDIANS.values():
            values = [value for cell in cells if (value := figure(cell))]
            words.append(f"{max(values) / min(values):.3f}" if values else "none")
        rows.append(f"| {system} | {mode} | {rate:g} | " + " | ".join(words) + " |")
    head = ["| system | mode | requests/s | " + " | ".join(MEDIANS) + " |", "|---" * (len(MEDIANS) + 3) + "|"]
    return head + rows if rows else []
