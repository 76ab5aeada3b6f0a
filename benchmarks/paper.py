"""The evaluation's grid: request rates, in isolation and beside neighbours, for each system; as JSON, plots and a summary.

    python -m benchmarks.paper --model llama-3-8b --system blinkpy --system blinkpy-host --system vllm

Each cell of the grid is kept in a state folder once it is measured, so the same command goes on where the last one ended:
with --budget 540 a long grid is measured in parts of under ten minutes. --quick has 4 rates of 20 s.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cell import Bench, Load, add_options, bench
from benchmarks.common import RESULTS, ROOT, Run, UsageError, main, parser, to_json
from benchmarks.paper_report import draw, summary
from benchmarks.serving import METHOD, end
from benchmarks.systems import Running, ServerError, System

RATES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32)
QUICK_RATES = (2, 8, 16, 32)
SMOKE_RATES = (4, 12)
MODES = ("isolated", "interfered")
CELL_SPARE_S = 5.0


@dataclass(frozen=True)
class Cell:
    """One measurement of the grid."""

    system: str
    mode: str
    rate: float
    repeat: int

    @property
    def file(self) -> str:
        return f"{self.system}-{self.mode}-{self.rate:g}-{self.repeat}.json"


class State:
    """The cells that are done, one file each. Raises UsageError when the folder belongs to another grid."""

    def __init__(self, folder: Path, plan: dict[str, Any]):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path, text = folder / "plan.json", to_json(plan) + "\n"
        if path.exists() and path.read_text() != text:
            raise UsageError(f"{folder.name} holds cells of another grid; give another --state, or remove it")
        path.write_text(text)

    def done(self, cell: Cell) -> bool:
        return (self.folder / cell.file).exists()

    def drop_invalid(self, cells: list[Cell]) -> None:
        """Forget cells in which the client fell behind, so that they are measured again."""
        for cell in cells:
            if self.done(cell) and not self.read(cell)["client"]["valid"]:
                (self.folder / cell.file).unlink()

    def keep(self, cell: Cell, found: dict[str, Any]) -> None:
        partial = self.folder / "new"
        partial.write_text(to_json({"cell": dataclasses.asdict(cell), **found}) + "\n")
        partial.rename(self.folder / cell.file)

    def read(self, cell: Cell) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / cell.file).read_text())
        return found


def grid(options: argparse.Namespace, systems: Sequence[System]) -> list[Cell]:
    """All cells, in the order in which they are measured."""
    return [
        Cell(system.name, mode, rate, repeat)
        for system in systems
        for repeat in range(options.repeats)
        for mode in MODES
        for rate in options.rates
    ]


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        options.rates, options.seconds, options.drain_s = SMOKE_RATES, 2.0, 10.0
        options.data, options.per_core = "fixed:24:12", 1
    elif options.quick:
        options.rates, options.seconds = QUICK_RATES, 20.0
    options.system = options.system or ["blinkpy"]
    name = f"paper-{Path(options.model).name}"
    if options.output is None and not options.smoke:
        options.output = RESULTS / f"{name}.json"
    state_folder = Path(options.state or ROOT / "build" / "benchmarks" / f"{name}-state")
    deadline = time.monotonic() + options.budget if options.budget else float("inf")
    plan = {
        key: getattr(options, key) for key in ("model", "rates", "seconds", "drain_s", "data", "arrivals", "seed", "per_core")
    }
    run = Run("paper", options)
    with bench(options, run.progress) as means:
        state = State(state_folder, {**plan, "kinds": list(options.kinds), "frontend_cores": options.frontend_cores})
        cells = grid(options, means.systems)
        if options.redo_invalid:
            state.drop_invalid(cells)
        errors = measure(means, state, cells, options, deadline)
        document = {**gather(state, cells, means, errors), "smoke": options.smoke}
    if not options.no_plot:
        run.save(draw(document, run.figure_row))
    run.write(METHOD, document)
    text = summary(document)
    run.output.with_suffix(".md").write_text(text)
    print(text)
    if not document["complete"]:
        print(f"{document['done']} of {len(cells)} cells are done: run the same command again to go on")
    end(errors.values())


def measure(means: Bench, state: State, cells: list[Cell], options: argparse.Namespace, deadline: float) -> dict[str, str]:
    """Measure what is not done yet, until the deadline (time.monotonic()); errors by system.

    A system that fails is left, and the others go on."""
    errors: dict[str, str] = {}
    needed = options.seconds + options.drain_s + CELL_SPARE_S
    for system in means.systems:
        missing = [cell for cell in cells if cell.system == system.name and not state.done(cell)]
        if not missing or time.monotonic() + needed > deadline:
            continue
        try:
            with means.server(system) as server:
                for cell, found in _cells(means, server, missing, options, deadline - needed):
                    state.keep(cell, {"server": server.facts, **found})
        except ServerError as error:
            errors[system.name] = str(error)
            print(f"error: {error}", file=sys.stderr)
    return errors


def _cells(
    means: Bench, server: Running, cells: list[Cell], options: argparse.Namespace, last_start: float
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Measure cells on a running server, one after another; none is started after last_start."""
    for number, cell in enumerate(cells):
        if time.monotonic() > last_start:
            return
        load = Load(
            options.data,
            cell.rate,
            options.arrivals,
            options.seconds,
            options.drain_s,
            seed=options.seed,
            per_core=options.per_core if cell.mode == "interfered" else 0,
            kinds=tuple(options.kinds),
        )
        name = f"{cell.system}, {cell.mode}, {cell.rate:g} requests/s ({number + 1} of {len(cells)})"
        yield cell, means.measure(server, load, name)


def gather(state: State, cells: list[Cell], means: Bench, errors: dict[str, str]) -> dict[str, Any]:
    """The results of all cells that are done."""
    done = [state.read(cell) for cell in cells if state.done(cell)]
    return {
        **means.facts(),
        "complete": len(done) == len(cells),
        "done": len(done),
        "errors": errors,
        "cells": done,
    }


def options() -> argparse.Namespace:
    result = parser("paper", "Request rates, isolated and interfered, for each system.")
    add_options(result)
    result.add_argument("--quick", action="store_true", help="4 rates of 20 s")
    result.add_argument("--rates", type=float, nargs="+", default=RATES, help="requests a second")
    result.add_argument("--seconds", type=float, default=60.0, help="of arrivals in a cell")
    result.add_argument("--drain-s", type=float, default=60.0, help="after which what hasn't ended is given up")
    result.add_argument("--data", default="azure", help="fixed:IN:OUT, azure, azure:FILE, sharegpt:FILE")
    result.add_argument("--arrivals", choices=("poisson", "trace"), default="poisson")
    result.add_argument("--per-core", type=int, default=8, help="neighbours on each of the server's cores, when interfered")
    result.add_argument("--repeats", type=int, default=1, help="how often the grid is measured, to see how much it varies")
    result.add_argument("--seed", type=int, default=1, help="of lengths and arrivals")
    result.add_argument("--state", default="", metavar="FOLDER", help="cells that are done (default: in build/benchmarks)")
    result.add_argument("--redo-invalid", action="store_true", help="measure cells again in which the client fell behind")
    result.add_argument("--budget", type=float, default=0.0, metavar="S", help="start no cell that could end after S seconds")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
