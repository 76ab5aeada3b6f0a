"""Updates every figure of the pages from the result files: rewrites the text between its markers, and draws
the plots.

    python -m benchmarks.report.pages              # after a new result

A part of a page begins with the comment `measured: NAME` and ends with `end of measured`. NAME is one of
PARTS, and its text is templates/NAME.md.j2. A figure in a sentence is between the comments `figure: NAME`
and `/`. NAME is one of named_figures.NAMED. Neither is written by hand, and a test fails if a page and
the results disagree.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from benchmarks.common.harness import RESULTS, ROOT, UsageError, table
from benchmarks.report import (
    class_tables,
    draft_tables,
    front_end_tables,
    grid_summary,
    part_tables,
    rank_tables,
    recurrent_tables,
    serving_tables,
    words,
)
from benchmarks.report.evaluation_plot import draw_claim
from benchmarks.report.evaluation_tables import claim, evaluation, read_cells
from benchmarks.report.figure_files import (
    digest,
    draw_attacks,
    draw_fleet,
    draw_predictions,
    draw_rings,
    draw_soak,
    save_figure,
    shows,
)
from benchmarks.report.gpu_tests import gpu_tests
from benchmarks.report.grid_plot import draw
from benchmarks.report.named_figures import NAMED
from benchmarks.report.part_tables import Document, Results

# Begin the names of a model's grid, of loads with each system alone on a machine, of loads with a schema and without, and of
# servers with FP8 weights: next to others, and with one stream alone.
GRID, ALONE, SCHEMAS, FP8 = "paper-", "alone-", "schemas-", ("served-fp8-", "stream-fp8-")
CLAIM, EVALUATION = RESULTS / "claim.png", "evaluation"
PAGES = (ROOT / "README.md", RESULTS / "README.md", *sorted((ROOT / "docs").glob("*.md")))
PART = re.compile(r"(<!-- measured: (\w+) -->\n).*?(<!-- end of measured -->)", re.DOTALL)
FIGURE = re.compile(r"(<!-- figure: ([\w-]+)\s*-->).*?(<!-- / -->)", re.DOTALL)
TEMPLATES = Environment(
    loader=FileSystemLoader(Path(__file__).parent / "templates"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.globals |= {"table": table, "FIGURES": list(grid_summary.FIGURES)}
TEMPLATES.filters |= {"wrap": words.wrap}
PARTS: dict[str, Callable[[Results], dict[str, Any]]] = {
    "claim": lambda results: claim(read_cells(results.folder / EVALUATION)),
    "serving": lambda results: serving_tables.serving(results.by_shape(GRID)),
    "schemas": lambda results: serving_tables.schemas(results.by_shape(SCHEMAS)),
    "alone": lambda results: serving_tables.alone(results.by_shape(ALONE)),
    "fewer_bits": lambda results: serving_tables.fewer_bits([results.by_shape(start) for start in FP8]),
    "evaluation": lambda results: evaluation(read_cells(results.folder / EVALUATION)),
    "classes": class_tables.classes,
    "simulated_classes": class_tables.simulated_classes,
    "cut_steps": part_tables.cut_steps,
    "drafts": draft_tables.drafts,
    "draft_heads": draft_tables.draft_heads,
    "ranks": rank_tables.ranks,
    "recurrent_prompts": recurrent_tables.recurrent_prompts,
    "energy": lambda results: serving_tables.energy(results.by_shape(GRID)),
    "decode": part_tables.decode,
    "gap": part_tables.gap,
    "grammars": part_tables.grammars,
    "steps": part_tables.steps,
    "cpu": part_tables.cpu,
    "capacity": part_tables.capacity,
    "fleet": part_tables.fleet,
    "window_cache": part_tables.window_cache,
    "quantised": part_tables.quantised,
    "attacks": front_end_tables.attacks,
    "crowd": front_end_tables.crowd,
    "tests": lambda results: {"tests": gpu_tests(found) if (found := results.read("gpu_tests")) else ""},
    "simulated": part_tables.simulated,
    "mutants": part_tables.mutants,
    "mutants_of_parts": part_tables.mutants_of_parts,
    "files": part_tables.files,
}
PLOTS: dict[str, Callable[[Document], Any]] = {  # by the beginning of a result's name
    GRID: lambda found: draw(found["results"]),
    "capacity": draw_predictions,
    "soak": draw_soak,
    "attacks": draw_attacks,
    "window_cache": draw_rings,
    "fleet_placement": draw_fleet,
    class_tables.PREFIX: class_tables.draw_classes,
    draft_tables.PREFIX: draft_tables.draw_drafts,
    draft_tables.PLOTTED: draft_tables.draw_drafts,
}


def part(name: str, results: Results) -> str:
    """The text of one part. Raises UsageError for an unknown part."""
    if name not in PARTS:
        raise UsageError(f"unknown part {name!r}: one of {', '.join(PARTS)}")
    return TEMPLATES.get_template(f"{name}.md.j2").render(PARTS[name](results))


def named(name: str, results: Results) -> str:
    """One figure of a sentence. Raises UsageError for an unknown figure."""
    if name not in NAMED:
        raise UsageError(f"unknown figure {name!r}: one of {', '.join(NAMED)}")
    return NAMED[name](results)


def rewritten(text: str, results: Results) -> str:
    """A page with new measured parts and figures. Raises UsageError for unknown ones."""
    text = PART.sub(lambda found: found[1] + part(found[2], results) + found[3], text)
    return FIGURE.sub(lambda found: found[1] + named(found[2], results) + found[3], text)


def grid_page(document: Document) -> str:
    return TEMPLATES.get_template("grid.md.j2").render(grid_summary.page(document))


def plots(results: Results) -> dict[Path, tuple[list[Path], Callable[[], Any]]]:
    """For each plot, the result files that it shows, and the function that draws it."""
    found: dict[Path, tuple[list[Path], Callable[[], Any]]] = {}
    for name in results.names:
        for plot in (plot for start, plot in PLOTS.items() if name.startswith(start)):
            found[RESULTS / f"{name}.png"] = [RESULTS / f"{name}.json"], partial(plot, results.read(name))
    if cells := sorted((results.folder / EVALUATION).glob("*/*/*.json")):
        found[CLAIM] = cells, lambda: draw_claim(read_cells(results.folder / EVALUATION))
    return found


def main() -> None:
    results = Results(RESULTS)
    changed = []
    for path, (sources, plot) in plots(results).items():
        if not shows(path, sources):
            save_figure(plot(), path, digest(sources))
            changed.append(path)
    texts = {RESULTS / f"{name}.md": grid_page(results.read(name)["results"]) for name in results.names if name.startswith(GRID)}
    texts |= {page: rewritten(page.read_text(), results) for page in PAGES}
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            changed.append(path)
    for path in changed:
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
