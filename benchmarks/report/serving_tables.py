"""The serving comparison: contexts of the templates, from the grid's result files.

A table is a list of rows of words; without rows it is omitted.
"""

from itertools import pairwise
from typing import Any

import benchmarks.report.grid_summary as grid
from benchmarks.common.load import load_name
from benchmarks.report.grid_summary import FIGURES, MEDIANS, Document, Figure
from benchmarks.report.words import percent, word
from benchmarks.serving.load_figures import MODES
from benchmarks.serving.systems import SYSTEMS

Rows = list[list[str]]
HEADLINE_RATE = 16.0
OURS, PEER = "blinkpy", "vllm"
COMPARED = (OURS, "blinkpy-host", PEER)  # what is missing of these is named
RATES = (2.0, 8.0, 16.0, 32.0)  # that they are measured at, at least
WHAT = {  # of systems whose name doesn't say it
    "blinkpy-host": "`blinkpy-host` runs its scheduler on the CPU (`--control host`), with the same kernels.",
    "blinkpy-8192": "`blinkpy-8192` computes up to 8,192 tokens per step (`--max-num-batched-tokens`), as vLLM does by default.",
}
FRONT_END_CORES = {"own": "own", "shared": "contended"}  # placement of a cell's front ends: the word for their cores
BEHIND = 1.02  # ratio above which a figure counts as worse
SHOWN = [value for name, (_, value) in FIGURES.items() if name != "energy"]  # at the headline rate; energy() has the rest


def most_neighbours(document: Document) -> int:
    """The largest number of neighbours on each core."""
    return max((cell["load"]["per_core"] for cell in document["cells"]), default=0)


def failed(cells: list[Document]) -> int:
    """Number of requests without a complete answer."""
    return sum(sum(cell["errors"].values()) for cell in cells)


def serving(found: dict[str, Document]) -> dict[str, Any]:
    """The context of all models. found: result files by the model's title; empty without a file."""
    models = [model(title, file) for title, file in found.items() if file]
    for before, after in reversed(list(pairwise(models))):
        if after["origin"] == before["origin"]:
            after["origin"] = "Systems, machine, commit and date are those above."
    return {
        "models": models,
        "missing": [title for title, file in found.items() if not file],
        "rate": HEADLINE_RATE,
    }


def model(title: str, file: Document) -> dict[str, Any]:
    """One model: origin, closed loops, headline rate, ratios, remarks."""
    document = file["results"]
    return {
        "title": title,
        "name": f"paper-{document['model']}",
        "origin": machine(file),
        "beside": grid.alongside(document),
        "closed": closed(document),
        "kinds": document["cells"][0]["load"]["kinds"],
        "headline": headline(document),
        "slowdowns": slowdowns(document),
        "remarks": remarks(document),
    }


def alone(found: dict[str, Document]) -> dict[str, Any]:
    """Loads without neighbours, each system alone on a machine, consecutively. found: as of serving()."""
    models = []
    for title, file in found.items():
        if file:
            document = file["results"]
            rows = []
            for name in ours_first(document):
                figures = [grid.series(document, name, MODES[0], value).get(HEADLINE_RATE) for value in SHOWN]
                rows += [[name, *map(word, figures)]] if any(figures) else []
            models.append({"title": title, "origin": machine(file), "closed": closed(document), "rows": rows})
    return {"models": models, "rate": HEADLINE_RATE}


def machine(file: Document) -> str:
    """Sentences on machine, versions, cores, commit, date, and the systems."""
    document, host = file["results"], file["machine"]
    gpu, cores = document["gpu"], document["cores"]
    versions = {cell["cell"]["system"]: cell["server"].get("version", "") for cell in document["cells"]}
    days = sorted({cell["date"][:10] for cell in document["cells"]})
    driver = f" (driver {gpu['driver']})" if "driver" in gpu else ""
    apart = f", {len(cores['front_end'])} of them reserved for front ends" if cores["front_end"] else ""
    sentences = [
        f"{', '.join(f'{system} {version}'.strip() for system, version in versions.items())}; one system after another.",
        f"Machine: {gpu.get('gpu', 'CPU')}{driver}, {host['cpu']}. Every server had {len(cores['server'])} cores{apart},",
        f"and the client {len(cores['client']) or 'the same'}. Random weights, no prefix cache.",
        f"Commit `{file['commit'].get('hash', 'unknown')[:7]}`, {' and '.join(days)}.",
        *(what for system in versions if (what := explained(document, system))),
    ]
    return " ".join(sentences)


def explained(document: Document, system: str) -> str:
    """A sentence on a system, if its name does not explain it: from WHAT, or by its options in addition to
    blinkpy's.
    """
    commands = {cell["cell"]["system"]: cell["server"].get("command", "").split() for cell in document["cells"]}
    ours, words = commands.get(OURS, []), commands[system]
    if system in WHAT or not ours or words == ours or words[: len(ours)] != ours:
        return WHAT.get(system, "")
    return f"`{system}` is {OURS} with `{' '.join(words[len(ours) :])}`."


CLOSED_FIGURES: tuple[tuple[str, Figure, bool], ...] = (  # title, figure, whether more is better
    ("median TTFT, ms", grid.latency("ttft_ms", "p50"), False),
    ("median TPOT, ms", grid.latency("tpot_ms", "p50"), False),
    ("tokens/s", FIGURES["throughput"][1], True),
)


def closed(document: Document) -> Rows:
    """Figures by number of streams. Other systems' figures have their ratio to blinkpy's: above 1, blinkpy is
    better.
    """
    names = [name for name in ours_first(document) if grid.closed_loops(document, name, CLOSED_FIGURES[0][1])]
    found = {(name, title): grid.closed_loops(document, name, figure) for name in names for title, figure, _ in CLOSED_FIGURES}
    rows = []
    for streams in sorted({streams for figures in found.values() for streams in figures}):
        for name in names:
            words = []
            for title, _, more in CLOSED_FIGURES:
                value, ours = found[name, title].get(streams), found.get((OURS, title), {}).get(streams)
                ratio = (ours / value if more else value / ours) if value and ours and name != OURS else 0.0
                words.append(word(value) + (f" ({ratio:.2f}x)" if ratio else ""))
            if any(words):
                rows.append([f"{streams:g}", name, *words])
    return rows


def schemas(results: dict[str, Document]) -> dict[str, Any]:
    """Closed loops with a JSON schema for every answer compared with loops without, with and without
    neighbours.
    """
    models = []
    for title, file in results.items():
        if file:
            rows = []
            for free, bound in schema_pairs(file["results"]):
                row = [f"{free['cell']['streams']:g}", free["cell"]["system"], str(free["neighbours"])]
                for percentile in ("p50", "p99"):
                    without, with_schema = schema_tpot(free, bound, percentile)
                    row += [word(without), word(with_schema), f"{with_schema / without:.2f}"]
                rows.append(row)
            models.append({"title": title, "rows": rows, "origin": machine(file)})
    return {"models": models}


def fewer_bits(found: list[dict[str, Document]]) -> dict[str, Any]:
    """Every load of servers with FP8 weights, and of the systems that they are compared with. found: files by
    the model's title.
    """
    models = []
    for title, file in ((title, file) for files in found for title, file in files.items() if file):
        document = file["results"]
        cells = grid.valid_cells(document)
        rows = []
        for cell in sorted(cells, key=lambda cell: (cell["cell"]["streams"], cell["cell"]["rate"], cell["load"]["per_core"])):
            beside = f", {cell['load']['per_core']} neighbours per core" if cell["load"]["per_core"] else ""
            ttft, tpot, *others = (value(cell) for _, value in FIGURES.values())
            figures = [MEDIANS["median TTFT"](cell), ttft, MEDIANS["median TPOT"](cell), tpot, *others]
            rows.append([grid.cell_load(cell) + beside, cell["cell"]["system"], *map(word, figures)])
        models.append({"title": title, "origin": machine(file), "options": options(document), "rows": rows})
    return {"models": models}


def options(document: Document) -> list[str]:
    """Each system's name and options, without the options of all systems of its kind."""
    found = {}
    for cell in document["cells"]:
        words = cell["server"]["command"].split()
        common = next((known for one in SYSTEMS.values() if words[: len(known := one.command.split())] == known), words)
        found[cell["cell"]["system"]] = " ".join(words[len(common) :])
    return [f"`{name}`: `{given}`" for name, given in found.items() if given]


def schema_pairs(document: Document) -> list[tuple[Document, Document]]:
    """Valid closed loops without a schema, each with the same loop with a schema."""
    free = [cell for name in ours_first(document) for cell in grid.valid_cells(document, system=name, rate=0)]
    return [(cell, bound) for cell in free for bound in grid.valid_cells(document, **cell["cell"] | {"schema": True})]


def schema_tpot(free: Document, bound: Document, percentile: str) -> tuple[float, float]:
    """TPOT without and with a schema, ms."""
    figure = grid.latency("tpot_ms", percentile)
    return figure(free) or float("nan"), figure(bound) or float("nan")


def ours_first(document: Document) -> list[str]:
    return sorted(grid.systems(document), key=lambda name: name != OURS)


def headline(document: Document) -> Rows:
    """Every figure at one rate, without and with neighbours, for both placements of front ends."""
    rows = []
    for front_end, cores in FRONT_END_CORES.items():
        for beside, mode in zip((0, most_neighbours(document)), MODES, strict=True):
            for name in grid.systems(document):
                if words := headline_words(document, name, mode, front_end):
                    rows.append([str(beside), cores, name, *words])
    return rows


def headline_words(document: Document, name: str, mode: str, front_end: str) -> list[str]:
    """A system's figures at the headline rate, or the reason why they don't count; empty if they were not
    measured.
    """
    some = grid.cells_of(document, system=name, mode=mode, rate=HEADLINE_RATE, front_end=front_end)
    cells = [cell for cell in some if grid.counts(document, cell)]
    if not cells:
        return ["the client fell behind", *[""] * (len(SHOWN) + 1)] if some else []
    words = [word(grid.series(document, name, mode, value, front_end).get(HEADLINE_RATE)) for value in SHOWN]
    goodput = sum(cell["goodput_per_s"] for cell in cells) / len(cells)
    return [*words, f"{goodput:.3g}", str(failed(cells))]


def slowdown(document: Document, name: str, figure: str, front_end: str = "") -> float | None:
    """Ratio of a figure with neighbours to the figure without: geometric mean over rates."""
    beside, isolated = (grid.series(document, name, mode, FIGURES[figure][1], front_end) for mode in reversed(MODES))
    return grid.mean_ratio(beside, isolated)


def slowdowns(document: Document) -> Rows:
    """Ratios with neighbours to without, means over rates, with front ends on their own cores; and ratios of
    the peer to blinkpy.
    """
    rows = [(name, [slowdown(document, name, figure) for figure in FIGURES]) for name in grid.systems(document)]
    for mode in MODES:
        both = [[grid.series(document, one, mode, value) for one in (PEER, OURS)] for _, value in FIGURES.values()]
        rows.append((f"{PEER} / {OURS}, {mode}", [grid.mean_ratio(*one) for one in both]))
    return [[label, *(f"{ratio:.2f}" if ratio else "" for ratio in found)] for label, found in rows if any(found)]


def remarks(document: Document) -> list[str]:
    """Figures in which blinkpy is worse, differences of repeated runs, idle power, and omitted loads."""
    lines = [behind(document)] if {OURS, PEER} <= set(grid.systems(document)) else []
    if again := grid.repeated(document):
        largest = {name: max(found[name] for found in again.values() if name in found) for name in MEDIANS}
        words = ", ".join(f"{name} {percent(value - 1, 1)}" for name, value in largest.items())
        lines.append(f"{len(again)} cells are means of two runs, which differ by at most: {words}.")
    else:
        lines.append("No cell of the grid was measured twice.")
    lines += idle_power(document)
    if left_out := grid.fallen_behind(document):
        how_many = f"{len(left_out)} of {len(document['cells'])}"
        lines.append(f"In {how_many} loads the client fell behind; they are omitted: {'; '.join(left_out)}.")
    if missing := grid.unmeasured(document, COMPARED, RATES):
        lines.append(f"Not measured: {'; '.join(missing)}.")
    return lines


def idle_power(document: Document) -> list[str]:
    """Power of each idle server."""
    idle = []
    for name in grid.systems(document):
        servers = [cell["server"] for cell in grid.cells_of(document, system=name)]
        if known := [server for server in servers if server.get("idle_w") and server.get("idle_before_w")]:
            idle.append(f"{name} {known[0]['idle_w']:.0f} W ({known[0]['idle_before_w']:.0f} W before its start)")
    return [f"Power of the GPU with an idle server: {', '.join(idle)}."] if idle else []


def behind(document: Document) -> str:
    """Every figure in which blinkpy is worse than the peer: plotted figures and medians."""
    found = []
    plotted = {name: value for name, (_, value) in FIGURES.items()}
    for name, value in (MEDIANS | plotted).items():
        for mode in MODES:
            ours, peers = grid.series(document, OURS, mode, value), grid.series(document, PEER, mode, value)
            for rate in sorted(ours.keys() & peers.keys()):
                found += worse(name, f"{rate:g} requests/s, {mode}", ours[rate], peers[rate])
    closed_figures: dict[str, Figure] = MEDIANS | {"energy": FIGURES["energy"][1]}
    for name, value in closed_figures.items():
        ours, peers = grid.closed_loops(document, OURS, value), grid.closed_loops(document, PEER, value)
        for streams in sorted(ours.keys() & peers.keys()):
            found += worse(name, load_name(0, int(streams)), ours[streams], peers[streams])
    return f"{OURS} is worse than {PEER} by more than {percent(BEHIND - 1)} in: {'; '.join(found) or 'no measured figure'}."


def worse(name: str, where: str, ours: float, peers: float) -> list[str]:
    ratio = peers / ours if name == "throughput" else ours / peers
    return [f"{name} at {where} ({ratio:.2f}x)"] if ratio > BEHIND else []


# ---- energy -------------------------------------------------------------------------------------------------------------


def energy(found: dict[str, Document]) -> dict[str, Any]:
    """Energy per token of each model, as a product. found: as of serving()."""
    tables = [(title, file["commit"]["hash"][:7], energy_rows(file["results"])) for title, file in found.items() if file]
    return {"tables": [one for one in tables if one[2]], "ours": OURS, "peer": PEER}


def energy_rows(document: Document) -> Rows:
    """Each isolated load of both systems: blinkpy's J/token / the peer's, and the ratio. Empty without an
    energy counter.
    """
    found: dict[str, dict[str, Document]] = {}
    for cell in grid.valid_cells(document, mode=MODES[0], front_end=grid.placement(document), repeat=0):
        if cell["energy"].get("mean_w") and cell.get("steps"):
            found.setdefault(grid.cell_load(cell), {})[cell["cell"]["system"]] = cell
    rows = []
    for load, cells in sorted(found.items(), key=lambda item: (item[0].endswith("/s"), float(item[0].split()[0]))):
        if {OURS, PEER} <= cells.keys():
            ours, peers = energy_figures(cells[OURS]), energy_figures(cells[PEER])
            step, steps = ours[1] / peers[1], peers[0] / ours[0]  # J for each step, and steps for each token
            rows.append([load, f"{ours[2]:.3g} / {peers[2]:.3g}", f"{step * steps:.2f} = {step:.2f} x {steps:.2f}"])
    return rows


def energy_figures(cell: Document) -> list[float]:
    """Tokens per step, J per step, J/token; includes idle power."""
    tokens, step = cell["steps"]["tokens"], cell["energy"]["mean_w"] / cell["steps"]["per_s"]
    return [tokens, step, step / tokens]
