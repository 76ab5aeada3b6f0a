"""The serving comparison for the README, from the grid's result files."""

from __future__ import annotations

import textwrap
from typing import Any

from benchmarks.report.grid_summary import (
    FIGURES,
    MEDIANS,
    MODES,
    Figure,
    alongside,
    closed_loops,
    counts,
    disturbed,
    fallen_behind,
    geometric_mean,
    latency,
    placement,
    ratios,
    repeated,
    series,
    started_beside,
    stream_words,
    systems,
    unmeasured,
)

Document = dict[str, Any]
HEADLINE_RATE = 16.0
OURS, PEER = "blinkpy", "vllm"
COMPARED = (OURS, "blinkpy-host", PEER)  # what is missing of these is named
RATES = (2.0, 8.0, 16.0, 32.0)  # that they are measured at, at least
WHAT = {  # of systems whose name doesn't say it
    "blinkpy-host": "`blinkpy-host` has its scheduler on the CPU (`--control host`) and the same kernels.",
    "blinkpy-8192": "`blinkpy-8192` takes up to 8,192 tokens into a step (`--max-num-batched-tokens`), as vLLM does by default.",
}
BEHIND = 1.02  # by so much a figure is worse before it is called so
JOULES = FIGURES["energy"][1]


def serving(found: dict[str, Document]) -> str:
    """All models. found: result files by the model's title; empty where there is none."""
    parts = [model(title, document) for title, document in found.items() if document]
    missing = [title for title, document in found.items() if not document]
    if missing:
        parts.append(f"{' and '.join(missing)} under load, next to another server: not measured yet.\n")
    return "\n".join(parts)


def alone(found: dict[str, Document]) -> str:
    """Loads without neighbours, each system alone on a machine, one after another; found as of serving()."""
    lines: list[str] = []
    for title, file in found.items():
        if not file:
            continue
        document = file["results"]
        lines += [*paragraph(f"{title}, nothing else on the machine.", *machine(file)), "", *closed(document), ""]
        figures = [(name, [series(document, name, MODES[0], value).get(HEADLINE_RATE) for _, value in FIGURES.values()])
                   for name in ours_first(document)]  # fmt: skip
        rows = [f"| {name} | {' | '.join(map(word, values))} |" for name, values in figures if any(values)]
        if rows:
            titles = [f"{figure}, {unit}" for figure, (unit, _) in FIGURES.items()]
            head = ["| system | " + " | ".join(titles) + " |", "|---" * (1 + len(titles)) + "|"]
            lines += [*paragraph(f"Azure conversation lengths at {HEADLINE_RATE:g} requests/s:"), "", *head, *rows, ""]
    return "\n".join(lines)


def claim(found: dict[str, Document]) -> str:
    """What neighbours on the host do to each system at the headline rate, for every model that both were measured with there;
    empty if there is none."""
    lines: list[str] = []
    where: list[str] = []
    for title, file in found.items():
        document = file.get("results", {})
        rows = [row for name in (OURS, PEER) if document and (row := endurance(document, title, name))]
        if len(rows) == 2:
            lines += rows
            neighbours = max(cell["load"]["per_core"] for cell in document["cells"])
            where.append(f"{document['gpu'].get('gpu', 'GPU')}, without → with {neighbours} CPU-hungry neighbours")
    if not lines:
        return ""
    if len(set(where)) > 1:
        raise ValueError(f"the models were not measured alike: {'; '.join(where)}")
    text = paragraph(f"{HEADLINE_RATE:g} requests/s of Azure conversation lengths on one {where[0]} on each of the host's cores:")
    header = ["| shape | system | P99 TPOT, ms | P99 TTFT, ms | tokens/s | not answered |", "|---|---|---|---|---|---|"]
    return "\n".join([*text, "", *header, *lines, ""])


def endurance(document: Document, title: str, name: str) -> str:
    """The row of a system: its figures without and with neighbours. Empty where one is missing."""
    words = []
    for figure in ("P99 TPOT", "P99 TTFT", "throughput"):
        values = [series(document, name, mode, FIGURES[figure][1]).get(HEADLINE_RATE) for mode in MODES]
        if not all(values):
            return ""
        words.append(f"{word(values[0])} → {word(values[1])}")
    keys = [(name, mode, HEADLINE_RATE, placement(document)) for mode in MODES]
    lost = [sum(sum(cell["errors"].values()) for cell in document["cells"] if key_of(cell) == key) for key in keys]
    words.append(f"{lost[0]} → {lost[1]}")
    return f"| {title} | {name} | {' | '.join(words)} |"


def model(title: str, file: Document) -> str:
    """One model: where it was measured, closed loops, the headline rate, ratios, where blinkpy is behind."""
    document = file["results"]
    lines = [f"### {title} shape under load", "", *origin(file), ""]
    for table in (closed(document), headline(document), slowdowns(document)):
        lines += [*table, ""] if table else []
    lines += [
        *remarks(document),
        "",
        f"![{title}: each figure against the rate](../benchmarks/results/{file_name(document)}.png)",
        "",
    ]
    return "\n".join(lines)


def file_name(document: Document) -> str:
    return f"paper-{document['model']}"


def origin(file: Document) -> list[str]:
    """Machine, versions, commit, date, cores, and where every cell is."""
    name = file_name(file["results"])
    every = f"Every cell, with energy and errors: [{name}.md](../benchmarks/results/{name}.md)."
    return paragraph(*machine(file), *alongside(file["results"]), every)


def machine(file: Document) -> list[str]:
    """Sentences on machine, versions, cores, commit, date, and what the systems are."""
    document, host = file["results"], file["machine"]
    gpu, cores = document["gpu"], document["cores"]
    versions = {cell["cell"]["system"]: cell["server"].get("version", "") for cell in document["cells"]}
    days = sorted({cell["date"][:10] for cell in document["cells"]})
    driver = f" (driver {gpu['driver']})" if "driver" in gpu else ""
    apart = f", {len(cores['front_end'])} of them for front ends alone" if cores["front_end"] else ""
    return [
        f"{', '.join(f'{system} {version}'.strip() for system, version in versions.items())}, one after another on one",
        f"{gpu.get('gpu', 'CPU')}{driver} and {host['cpu']}: the same {len(cores['server'])} cores for every server{apart},",
        f"{len(cores['client']) or 'the same'} for the client; random weights, no prefix cache.",
        f"Commit `{file['commit'].get('hash', 'unknown')[:7]}`, {' and '.join(days)}.",
        *(what for system in versions if (what := explained(document, system))),
    ]


def explained(document: Document, system: str) -> str:
    """What a system is, if its name doesn't say it: in a sentence of WHAT, or by the options that it has and blinkpy hasn't."""
    commands = {cell["cell"]["system"]: cell["server"].get("command", "").split() for cell in document["cells"]}
    ours, words = commands.get(OURS, []), commands[system]
    if system in WHAT or not ours or words == ours or words[: len(ours)] != ours:
        return WHAT.get(system, "")
    return f"`{system}` is {OURS} with `{' '.join(words[len(ours) :])}`."


CLOSED_FIGURES: tuple[tuple[str, Figure, bool], ...] = (  # title, figure, whether more is better
    ("median TTFT, ms", latency("ttft_ms", "p50"), False),
    ("median TPOT, ms", latency("tpot_ms", "p50"), False),
    ("tokens/s", FIGURES["throughput"][1], True),
    ("J/token", JOULES, False),
)


def closed(document: Document) -> list[str]:
    """Figures against the number of streams; behind the others' how they compare with blinkpy's: above 1 it is ahead."""
    names = [name for name in ours_first(document) if closed_loops(document, name, CLOSED_FIGURES[0][1])]
    if not names:
        return []
    found = {(name, title): closed_loops(document, name, figure) for name in names for title, figure, _ in CLOSED_FIGURES}
    lines = ["| streams | system | " + " | ".join(title for title, *_ in CLOSED_FIGURES) + " |", "|---" * 6 + "|"]
    for streams in sorted({streams for figures in found.values() for streams in figures}):
        for name in names:
            words = []
            for title, _, more in CLOSED_FIGURES:
                value, ours = found[name, title].get(streams), found.get((OURS, title), {}).get(streams)
                ratio = (ours / value if more else value / ours) if value and ours and name != OURS else 0.0
                words.append(word(value) + (f" ({ratio:.2f}x)" if ratio else ""))
            if any(words):
                lines.append(f"| {streams:g} | {name} | " + " | ".join(words) + " |")
    return [f"Closed loops, 128 tokens in and 256 out; in brackets, by how much {OURS} is better (above 1) or worse:", "", *lines]


def ours_first(document: Document) -> list[str]:
    """The systems of a document."""
    return sorted(systems(document), key=lambda name: name != OURS)


def headline(document: Document) -> list[str]:
    """Every figure at one rate: quiet and interfered, for both placements of front ends."""
    lines = []
    per_core = max((cell["load"]["per_core"] for cell in document["cells"]), default=0)
    for front_end in ("own", "shared"):
        if not any(key_of(cell)[2:] == (HEADLINE_RATE, front_end) for cell in document["cells"]):
            continue
        where = "own cores" if front_end == "own" else "contended cores"
        for mode in MODES:
            beside = "none" if mode == MODES[0] else f"{per_core} per core"
            for name in dict.fromkeys([*systems(document), *COMPARED]):
                which = (name, mode, HEADLINE_RATE, front_end)
                some = [cell for cell in document["cells"] if key_of(cell) == which]
                cells = [cell for cell in some if counts(document, cell)]
                if not cells:
                    if some or name in COMPARED:
                        why = "not measured" if not some else "the client fell behind"
                        why = "another server started beside it" if any(map(started_beside, some)) else why
                        lines.append(f"| {beside} | {where} | {name} | {why} |" + " |" * len(FIGURES) + " |")
                    continue
                words = [word(series(document, name, mode, value, front_end).get(HEADLINE_RATE)) for _, value in FIGURES.values()]
                words.insert(3, f"{sum(cell['goodput_per_s'] for cell in cells) / len(cells):.3g}")
                words.append(str(sum(sum(cell["errors"].values()) for cell in cells)))
                lines.append(f"| {beside} | {where} | {name} | " + " | ".join(words) + " |")
    if not lines:
        return []
    titles = "neighbours | front end on | system | P99 TTFT, ms | P99 TPOT, ms | tokens/s | goodput/s | J/token | not answered"
    what = document["cells"][0]["load"]["kinds"]
    return [
        f"Azure conversation lengths at {HEADLINE_RATE:g} requests/s; neighbours are {' and '.join(what)}:",
        "",
        f"| {titles} |",
        "|---" * len(titles.split("|")) + "|",
        *lines,
    ]


def key_of(cell: Document) -> tuple[str, str, float, str]:
    key = cell["cell"]
    return key["system"], key["mode"], key["rate"], key["front_end"]


def slowdowns(document: Document) -> list[str]:
    """Interfered over isolated, mean over rates; the other systems over blinkpy."""
    rows = []
    for front_end in ("own", "shared"):
        where = "own cores" if front_end == "own" else "contended cores"
        for name in systems(document):
            rows.append((f"{name}, front end on {where}: interfered / isolated", (name, MODES[1]), (name, MODES[0]), front_end))
    for name in systems(document):
        if name != OURS:
            rows += [(f"{name} / {OURS}, {mode}", (name, mode), (OURS, mode), placement(document)) for mode in MODES]
    lines = []
    for label, above, below, front_end in rows:
        found = [
            ratios(series(document, *above, value, front_end), series(document, *below, value, front_end))
            for _, value in FIGURES.values()
        ]
        if any(found):
            lines.append(f"| {label} | " + " | ".join(f"{geometric_mean(one):.2f}" if one else "" for one in found) + " |")
    if not lines:
        return []
    head = ["| ratios | " + " | ".join(FIGURES) + " |", "|---" * (len(FIGURES) + 1) + "|"]
    return ["Geometric means over the rates that both have:", "", *head, *lines]


def remarks(document: Document) -> list[str]:
    """Where blinkpy is behind, how much two runs differ, power when idle, times to start, loads that don't count."""
    lines = [behind(document)] if {OURS, PEER} <= set(systems(document)) else []
    if again := repeated(document):
        largest = {name: max(found[name] for found in again.values() if name in found) for name in MEDIANS}
        words = ", ".join(f"{name} {percent(value - 1, 1)}" for name, value in largest.items())
        lines.append(
            f"{len(again)} cells of the grid were measured twice: here are their means. The runs differ by at most: {words}."
        )
    else:
        lines.append("No cell of the grid was measured twice.")
    servers: dict[str, list[Document]] = {}
    for cell in document["cells"]:
        servers.setdefault(cell["cell"]["system"], []).append(cell["server"])
    starts, idle = [], []
    for name, some in servers.items():
        if seconds := sorted(
            {f"{server['start_to_healthy_s']:.0f}" for server in some if "start_to_healthy_s" in server}, key=int
        ):
            starts.append(f"{name} {' or '.join(seconds)} s")
        if known := next((server for server in some if server.get("idle_w") and server.get("idle_before_w")), None):
            idle.append(f"{name} {known['idle_w']:.0f} W ({known['idle_before_w']:.0f} W before its start)")
    if starts:
        lines.append(f"From start to healthy: {', '.join(starts)}; of several, the longest was the first, with empty caches.")
    if idle:
        lines.append(f"Power of the GPU with an idle server: {', '.join(idle)}.")
    if behind_loads := fallen_behind(document):
        how_many = f"{len(behind_loads)} of {len(document['cells'])}"
        lines.append(f"In {how_many} loads the client fell behind; they are left out: {'; '.join(behind_loads)}.")
    if loads := disturbed(document):
        how_many = f"{len(loads)} of {len(document['cells'])}"
        lines.append(f"Beside {how_many} loads a server of the other model started; they are left out: {'; '.join(loads)}.")
    if missing := unmeasured(document, COMPARED, RATES):
        lines.append(f"Not measured: {'; '.join(missing)}.")
    return [f"- {line}" for line in lines]


def behind(document: Document) -> str:
    """Every figure in which blinkpy is worse than the peer: those of the plots, and medians."""
    found = []
    plotted = {name: value for name, (_, value) in FIGURES.items()}
    for name, value in (MEDIANS | plotted).items():
        for mode in MODES:
            ours, peers = series(document, OURS, mode, value), series(document, PEER, mode, value)
            for rate in sorted(ours.keys() & peers.keys()):
                found += worse(name, f"{rate:g} requests/s, {mode}", ours[rate], peers[rate])
    closed_figures: dict[str, Figure] = MEDIANS | {"energy": JOULES}
    for name, value in closed_figures.items():
        ours, peers = closed_loops(document, OURS, value), closed_loops(document, PEER, value)
        for streams in sorted(ours.keys() & peers.keys()):
            found += worse(name, stream_words(streams), ours[streams], peers[streams])
    what = "; ".join(found) if found else "nothing that was measured"
    return f"{OURS} is behind {PEER} by more than {percent(BEHIND - 1)} in: {what}."


def worse(name: str, where: str, ours: float, peers: float) -> list[str]:
    ratio = peers / ours if name == "throughput" else ours / peers
    return [f"{name} at {where} ({ratio:.2f}x)"] if ratio > BEHIND else []


def paragraph(*pieces: str) -> list[str]:
    """Pieces of a text as the lines of a paragraph."""
    return textwrap.wrap(" ".join(pieces), 130, break_long_words=False, break_on_hyphens=False)


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:z.{digits}f} %"


def word(value: float | None) -> str:
    """Three digits; empty if there is none."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
