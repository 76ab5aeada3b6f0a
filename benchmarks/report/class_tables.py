"""Both classes of requests, from benchmarks/serving/classes.py: tables and a plot of its result files."""

from typing import Any

import numpy as np

from benchmarks.report.figure_files import figure_row, plain_log
from benchmarks.report.part_tables import Document, Results
from benchmarks.report.words import word

PREFIX = "classes-"  # of the names of its results
SIMULATED = "class_capacity"  # of those of benchmarks.tuning.class_capacity
SIMULATED_TIMES = ("ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p99")
SIMULATED_HEAD = (
    *("arrivals", "loads", "classes", "TTFT p50, ms", "p90", "p99", "TPOT p50, ms", "p99"),
    *("best effort's throughput", "turnaround"),
)
HEAD = (
    *("arrivals", "system", "requests", "TTFTs", "TTFT mean, ms", "p50", "p99", "TPOT p50, ms", "p99"),
    *("best effort's throughput", "turnaround", "goodput/s", "suspensions"),
)


def classes(results: Results) -> dict[str, Any]:
    """A table for each file: a row for each mix of arrivals, system and arm."""
    return {"models": [one_file(results.read(name)) for name in results.names if name.startswith(PREFIX)]}


def simulated_classes(results: Results) -> dict[str, Any]:
    """A row for each choice: means over the loads, which differ in their seed."""
    rows = []
    for name in results.names:
        if name.startswith(SIMULATED):
            file = results.read(name)
            for choices in zip(*(load["choices"] for load in file["results"]["loads"]), strict=True):
                of_loads = [str(len(choices)), options_of(choices[0]["name"])]
                times = [np.mean([choice[key] for choice in choices]) for key in SIMULATED_TIMES]
                ratios = [f"{np.mean([choice[key] for choice in choices]):.3g}" for key in ("throughput", "turnaround")]
                rows.append([f"{file['arguments']['rate']:g}/s", *of_loads, *map(word, times), *ratios])
    return {"head": SIMULATED_HEAD, "rows": rows}


def options_of(choice: str) -> str:
    """The options of `serve` for OPTION=N,...; other names unchanged."""
    pairs = [word.split("=") for word in choice.split(",")]
    given = [f"--{pair[0].replace('_', '-')} {pair[1]}" for pair in pairs if len(pair) == 2]
    return f"`{' '.join(given)}`" if given else choice


def one_file(file: Document) -> dict[str, Any]:
    document, arguments = file["results"], file["arguments"]
    options = [f"`{name}`: `{given.strip()}`" for name, _, given in (words.partition(":") for words in arguments["extra"])]
    commit = file["commit"].get("hash", "unknown")[:7]
    return {
        "origin": f"{document['model']}, {document['gpu'].get('gpu', 'CPU')}; {file['date'][:10]}, `{commit}`.",
        "load": f"Lengths: `{arguments['data']}`. Each row has {arguments['seconds']:g} s of arrivals{bursts(arguments)}.",
        "options": f"{'; '.join(options)}." if options else "",
        "head": HEAD,
        "rows": [row_of(cell) for cell in valid_cells(file)],
    }


def bursts(arguments: dict[str, Any]) -> str:
    if ":" not in arguments["burst"]:
        return ""
    count, length, answer = (int(size) for size in arguments["burst"].split(":"))
    more = f"{count} additional best-effort prompts of {length:,} tokens, with answers of {answer}"
    return f". Every {arguments['burst_every_s']:g} s there are {more}"


def valid_cells(file: Document) -> list[Document]:
    """Cells whose client kept up. Files before 2026-11-27 have one mix, in their arguments, and no
    suspensions.
    """
    usual = {"mix": {name: file["arguments"][name] for name in ("rate", "sensitive")}, "suspensions": None}
    return [usual | cell for cell in file["results"]["cells"] if cell["whole"]["client"]["valid"]]


def mix_name(cell: Document) -> str:
    return f"{cell['mix']['rate']:g}/s, {cell['mix']['sensitive']:.0%} sensitive"


def row_of(cell: Document) -> list[str]:
    own, against, whole = cell["classes"], cell["against_first"], cell["whole"]
    ttft, tpot = own["ttft_ms"], own["tpot_ms"]
    times = [ttft["mean"], *(part[level]["value"] for part in (ttft, tpot) for level in ("p50", "p99"))]
    ratios = [f"{against[name]:.3g}" for name in ("best_effort_throughput", "best_effort_turnaround")]
    counted = "" if cell["suspensions"] is None else f"{cell['suspensions']:,}"
    head = [mix_name(cell), cell["system"], cell["arm"], str(ttft["count"])]
    return [*head, *map(word, times), *ratios, word(whole["goodput_per_s"]), counted]


def draw_classes(file: Document) -> Any:
    """TTFT of latency-sensitive requests, and the cost for best effort: a group of bars for each mix of
    arrivals.
    """
    cells = valid_cells(file)
    mixes, names = (list(dict.fromkeys(map(of, cells))) for of in (mix_name, system_name))
    figure, axes = figure_row(3, height=3.6, width=4.6)
    width = 0.8 / len(names)
    panels = (
        ("TTFT of latency-sensitive prompts, ms: median, and bar to P99", ("ttft_ms", "p50"), ("ttft_ms", "p99")),
        ("throughput of best effort, over the first bar's", ("best_effort_throughput",), None),
        ("turnaround of best effort, over the first bar's", ("best_effort_turnaround",), None),
    )
    for ax, (label, path, top) in zip(axes, panels, strict=True):
        for cell in cells:
            place, number = mixes.index(mix_name(cell)), names.index(system_name(cell))
            x, value = place + width * (number - (len(names) - 1) / 2), value_of(cell, path)
            ax.bar(x, value_of(cell, top) if top else value, width * 0.9, color=f"C{number}", alpha=0.45 if top else 1.0)
            if top:
                ax.plot(x, value, "_", color=f"C{number}", markersize=11, markeredgewidth=2.5)
        ax.set_xticks(np.arange(len(mixes)), mixes, fontsize=8)
        ax.set_xlabel(label, fontsize=9)
        ax.grid(alpha=0.3, axis="y")
    plain_log(axes[0], "y")
    for ax in axes[1:]:
        ax.axhline(1, linestyle=":", color="black", linewidth=1)
    handles = [axes[1].bar(0, 0, color=f"C{number}", label=name) for number, name in enumerate(names)]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=8)
    where = f"{file['results']['model']} on {file['results']['gpu'].get('gpu', 'no GPU')}"
    figure.suptitle("; ".join([where, *(given.strip() for given in file["arguments"]["extra"])]), fontsize=10)
    return figure


def system_name(cell: Document) -> str:
    return f"{cell['system']}, {cell['arm']}"


def value_of(cell: Document, path: tuple[str, ...]) -> float:
    """A ratio to the first cell by its name, or a level of a distribution."""
    if len(path) == 1:
        return float(cell["against_first"].get(path[0], float("nan")))
    return float(cell["classes"][path[0]][path[1]]["value"])
