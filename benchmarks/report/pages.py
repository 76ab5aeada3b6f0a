"""Every figure that the README shows, from the result files: rewrites what lies between its markers, and the plots of the grid.

    python -m benchmarks.report.pages              # after a new result; --check only says whether anything would change

A part of a page begins with the comment `measured: NAME` and ends with `end of measured`; NAME is one of PARTS. Nothing between
is written by hand, and a test fails when a page and the results disagree.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.harness import RESULTS, ROOT, UsageError, main, save_figure
from benchmarks.report.capacity_report import page as capacity_page
from benchmarks.report.energy_report import energy_table
from benchmarks.report.gpu_tests import gpu_tests
from benchmarks.report.grid_plot import draw
from benchmarks.report.grid_summary import summary
from benchmarks.report.serving_tables import alone, claim, paragraph, percent, serving
from benchmarks.report.steps_table import table as steps_table
from benchmarks.starts import marked

Document = dict[str, Any]
PAGES = (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PART = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end of measured -->)", re.DOTALL)
SHAPES = {"llama-3-8b": "Llama-3-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
CPU_ROWS = (  # file, how its target begins, what it is called here
    ("control_overhead", "scheduler call at 64 running, steady", "scheduler, one call at 64 running sequences, caches cold"),
    ("control_overhead", "scheduler call at 256 running, steady", "scheduler, one call at 256 running sequences, caches cold"),
    ("cpu_engine", "token rate of 16 streams", "demonstration model, 16 streams to one"),
    ("cpu_engine", "engine step to bare forward", "its engine step to the bare torch forward, 16 streams"),
    ("front_end_cpu", "CPU of a worker per token event", "front end, CPU for each token event, 64 paced streams"),
    ("rdma_cpu", "CPU of a request of 128 tokens", "front end over RDMA, CPU for a request of 128 tokens, without HTTP"),
    ("queue_round_trip", "round trip through the transport", "queue pair, round trip between two processes"),
)
STEPS, SCHEDULER = "decode-llama-3-8b", "decode-scheduler"
ALONE = "alone-"  # of loads with each system alone on a machine, one after another
GRID = "paper-"  # begins the name of a model's page
GRIDS = (GRID, ALONE, "steps-of-", "repeats-")  # the last two: of earlier grids
MAKERS = {  # of a result file, by the beginning of its name
    "decode-": "`python -m benchmarks.parts.decode_step`",
    **dict.fromkeys(GRIDS, "`python -m benchmarks.serving.grid`"),
    "serving-": "`python -m benchmarks.serving.compare`",
    "interference-": "`python -m benchmarks.serving.interference`",
    "energy-": "`python -m benchmarks.serving.energy`",
    "steps-": "`python -m benchmarks.parts.whole_steps`",  # behind the grids whose names begin with it
}


class Results:
    """The result files of a folder, by name without .json."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = sorted(path.stem for path in folder.glob("*.json") if not path.stem.endswith(".partial"))

    def read(self, name: str) -> Document:
        """A result; empty if there is none. A model's grid comes with the marks that the other models' grids give it."""
        found = self._read(name)
        kind = next((kind for kind in GRIDS if name.startswith(kind)), None)
        if found and kind:
            return marked(found, [self._read(other) for other in self.names if other.startswith(kind) and other != name])
        return found

    def _read(self, name: str) -> Document:
        path = self.folder / f"{name}.json"
        found: Document = json.loads(path.read_text()) if path.exists() else {}
        return found


# ---- the parts ----------------------------------------------------------------------------------------------------------


def decode(results: Results) -> str:
    """The decode step against the floor, for each shape, and what the loop adds."""
    shown = {title: found for name, title in SHAPES.items() if (found := results.read(f"decode-{name}"))}
    if not shown:
        return "Decode steps: not measured yet.\n"
    prompt = next(iter(shown.values()))["prompt"]
    rows = list(dict.fromkeys(row for found in shown.values() for row in found["rows"]))
    heads = [f"{title} step, ms | floor, ms | share" for title in shown]
    lines = ["| rows | " + " | ".join(heads) + " |", "|---" * (1 + 3 * len(shown)) + "|"]
    for row in rows:
        words = []
        for found in shown.values():
            step = found["rows"].get(row, {})
            fine = "step_us" in step
            words.append(
                f"{ms(step['step_us']['p50'])} | {ms(step['floor_us'])} | {percent(step['share_of_floor'])}" if fine else "| |"
            )
        lines.append(f"| {row} | " + " | ".join(words) + " |")
    steps = [step for found in shown.values() for step in found["rows"].values() if "scheduler_us" in step]
    lines = [
        *paragraph(
            f"A decode step within the loop, bfloat16, random weights, {prompt} tokens in: the median from one scheduler run to",
            "the next. The floor is the time to read weights and cache once, as fast as memory can be read.",
        ),
        "",
        *lines,
        "",
    ]
    text = [
        f"Between two steps the scheduler's kernel takes {spread(steps, 'scheduler_us')} us, and the GPU waits",
        f"{spread(steps, 'gap_us')} us from one step's last kernel to the next one's first. In turns that admit or end requests",
        f"it is {spread(steps, 'general_scheduler_us')} us and {spread(steps, 'general_gap_us')} us.",
    ]
    if alone := results.read("decode-scheduler"):
        row = max(alone["rows"], key=int)
        took = alone["rows"][row]["scheduler_us"]["p50"]
        text.append(
            f"At {int(row):,} rows, with a made-up step of {alone['spin_us'] / 1000:g} ms, the scheduler takes {took:.1f} us."
        )
    origins = paragraph(*(f"{title}: {origin_of(found)}." for title, found in shown.items()))
    return "\n".join([*lines, *paragraph(*text), "", *origins]) + "\n"


def steps(results: Results) -> str:
    """Whole steps, back to back, with their power, of each shape."""
    lines = []
    for name, title in SHAPES.items():
        if found := results.read(f"steps-{name}"):
            measured, gpu = found["results"], found["results"]["gpu"]
            limit = f", power limit {gpu['power_limit_w']:.0f} W" if "power_limit_w" in gpu else ""
            where = f"{title}, {gpu['gpu']}{limit}; {found['arguments']['seconds']:g} s of each step; {when(found)}:"
            lines += [*paragraph(where), "", *steps_table(measured["steps"]), ""]
    return "\n".join(["", *lines] if lines else ["Not measured yet.", ""])


GAP_PARTS = (  # of the gap, in its order: title, and how a step's medians make it
    ("the turn begins after", lambda step: step["scheduler_began_after_us"]["p50"]),
    ("decides", lambda step: step["scheduler_us"]["p50"]),
    (
        "until the next step begins",
        lambda step: step["gap_us"]["p50"] - step["scheduler_us"]["p50"] - step["scheduler_began_after_us"]["p50"],
    ),
    ("in all", lambda step: step["gap_us"]["p50"]),
)


def gap(results: Results) -> str:
    """What the time between two steps consists of, with a model's step and with one that leaves the caches alone."""
    lines = []
    for name, what in (STEPS, "Llama-3-8B"), (SCHEDULER, "made up"):
        for row, step in results.read(name).get("rows", {}).items():
            if "gap_us" in step:
                words = [f"{round(value(step), 1) + 0.0:.1f} us" for _, value in GAP_PARTS]
                lines.append(f"| {what} | {int(row):,} | {' | '.join(words)} |")
    titles = ("step", "rows", *(title for title, _ in GAP_PARTS))
    return "\n".join([f"| {' | '.join(titles)} |", "|---" * len(titles) + "|", *lines]) + "\n" if lines else "Not measured yet.\n"


def energy(results: Results) -> str:
    """Joules for each token, taken apart, of each model."""
    lines = []
    for name, title in SHAPES.items():
        if (found := results.read(f"paper-{name}")) and (table := energy_table(found["results"])):
            lines += [f"{title}, `{found['commit']['hash'][:7]}`:", "", *table, ""]
    return "\n".join(["", *lines] if lines else ["Not measured yet.", ""])


def rdma(results: Results) -> str:
    """What a request takes of the processor in a front end over RDMA."""
    found = results.read("rdma_cpu")
    if not found:
        return "Not measured yet.\n"
    measured, limit = found["results"], found["targets"][0]["limit"]
    sizes = sorted(int(name.removeprefix("request_")) for name in measured if name.startswith("request_"))
    times = [measured[f"request_{size}"]["p50"]["value"] for size in sizes]
    counted = [measured["instructions"].get(f"request_{size}") for size in sizes]
    rows = (
        ("tokens of the prompt", [f"{size:,}" for size in sizes]),
        ("CPU time, median", [f"{time:.0f} us" + ("" if time <= limit else ": **missed**") for time in times]),
        ("instructions", [f"{count:,}" if count else "not counted" for count in counted]),
    )
    lines = [f"| {title} | {' | '.join(words)} |" for title, words in rows]
    others = percent(found["others"]["other_processes"])
    origin = f"({hardware(found)}, {when(found)}; other work took {others} of all cores meanwhile.)"
    return "\n".join([lines[0], "|---" * (len(sizes) + 1) + "|", *lines[1:], "", origin]) + "\n"


def cpu(results: Results) -> str:
    """What was promised for the parts that need no GPU, and what was measured."""
    lines, sources = [], {}
    for name, what, label in CPU_ROWS:
        found = results.read(name)
        for target in found.get("targets", ()):
            if target["what"].startswith(what):
                sources[name] = found
                sign, met = ("at most" if target["at_most"] else "at least"), "" if target["met"] else " (**missed**)"
                value, limit = (number(target[key], target["unit"]) for key in ("value", "limit"))
                lines.append(f"| {label} | {value}{met} | {sign} {limit} |")
    cores = " or ".join(dict.fromkeys(str(found["machine"]["cores"]) for found in sources.values()))
    others = ", ".join(f"{percent(found['others']['other_processes'])} in `{name}`" for name, found in sources.items())
    text = paragraph(
        "Other work took a share of all cores meanwhile, which lengthens times, and CPU times and ratios less so:", f"{others}."
    )
    head = [f"On {cores} cores without a GPU, medians:", "", "| | measured | target |", "|---|---|---|"]
    return "\n".join([*head, *lines, "", *text]) + "\n"


def grids(results: Results, kind: str) -> dict[str, Document]:
    """Of each model, by its title; empty where there is none."""
    return {title: results.read(kind + name) for name, title in SHAPES.items()}


def files(results: Results) -> str:
    """The result files, each with its origin."""
    lines = ["| file | made by | on | when, commit |", "|---|---|---|---|"]
    for name in results.names:
        found = results.read(name)
        by_name = (maker for start, maker in MAKERS.items() if name.startswith(start))
        made = next(by_name, module_of(name))
        beside = [f"`{suffix}`" for suffix in (".png", ".md") if (results.folder / f"{name}{suffix}").exists()]
        also = f", {' '.join(beside)}" if beside else ""
        lines.append(f"| `{name}.json`{also} | {made} | {hardware(found)} | {when(found)} |")
    return "\n".join(lines) + "\n"


def module_of(name: str) -> str:
    """The command that writes a result file, by that file's name; a benchmark may be gone since."""
    found = next((ROOT / "benchmarks").glob(f"*/{name}.py"), None)
    return f"`python -m benchmarks.{found.parent.name}.{name}`" if found else "a benchmark of that commit"


PARTS: dict[str, Callable[[Results], str]] = {
    "claim": lambda results: claim(grids(results, GRID)),
    "decode": decode,
    "gap": gap,
    "serving": lambda results: serving(grids(results, GRID)),
    "cpu": cpu,
    "capacity": lambda results: capacity_page(results.read("capacity").get("results", {})),
    "energy": energy,
    "steps": steps,
    "alone": lambda results: alone(grids(results, ALONE)),
    "tests": lambda results: gpu_tests(found) if (found := results.read("gpu_tests")) else "",
    "rdma": rdma,
    "files": files,
}


# ---- words --------------------------------------------------------------------------------------------------------------


def ms(us: float) -> str:
    return f"{us / 1000:.3g}"


def number(value: float, unit: str) -> str:
    """Two digits or all of a whole number; ratios as 3x."""
    word = f"{value:.0f}" if value >= 10 else f"{value:.2g}"
    return f"{word}x" if unit == "x" else f"{word} {unit}"


def spread(steps: list[Document], what: str) -> str:
    """Smallest and largest median."""
    values = [step[what]["p50"] for step in steps if what in step]
    low, high = f"{min(values):.0f}", f"{max(values):.0f}"
    return low if low == high else f"{low} to {high}"


def hardware(found: Document) -> str:
    gpu = found.get("environment", {}).get("gpu") or (found.get("results") or {}).get("gpu", {}).get("gpu")
    return gpu or f"{found['machine']['cores']} cores, {found['machine']['cpu']}"


def when(found: Document) -> str:
    """Date and commit of a result; decode.py keeps them with its environment."""
    origin = found.get("environment", found)
    commit = origin["commit"]
    changed = " with changes" if commit.get("dirty") else ""
    return f"{origin['date'][:10]}, `{commit.get('hash', 'unknown')[:7]}`{changed}"


def origin_of(found: Document) -> str:
    environment = found["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "numba"))
    return f"{environment['gpu']}, driver {environment['driver'].split()[0]}, {versions}; {when(found)}"


# ---- pages --------------------------------------------------------------------------------------------------------------


def rewritten(text: str, results: Results) -> str:
    """A page with its measured parts made anew. Raises UsageError for a part that isn't known."""

    def part(found: re.Match[str]) -> str:
        if found[2] not in PARTS:
            raise UsageError(f"unknown part {found[2]!r}: one of {', '.join(PARTS)}")
        return found[1] + PARTS[found[2]](results) + found[3]

    return PART.sub(part, text)


def benchmark(options: argparse.Namespace) -> None:
    results = Results(RESULTS)
    changed = []
    for name in results.names:
        if name.startswith(GRID):
            document = results.read(name)["results"]
            path = RESULTS / f"{name}.md"
            text = summary(document)
            plot = path.with_suffix(".png")
            if not path.exists() or path.read_text() != text or not plot.exists():
                changed += [path, plot]
                if not options.check:
                    path.write_text(text)
                    save_figure(draw(document), plot)
    for page in PAGES:
        text = rewritten(page.read_text(), results)
        if text != page.read_text():
            changed.append(page)
            if not options.check:
                page.write_text(text)
    for path in changed:
        print(f"{'would change' if options.check else 'written'}: {path.relative_to(ROOT)}")
    if changed and options.check:
        sys.exit(1)


def options() -> argparse.Namespace:
    result = argparse.ArgumentParser(prog="python -m benchmarks.report.pages", description=(__doc__ or "").splitlines()[0])
    result.add_argument("--check", action="store_true", help="write nothing; exit code 1 if something would change")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
