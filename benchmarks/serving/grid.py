"""The evaluation's grid: request rates, in isolation and next to neighbours, for each system.

    python -m benchmarks.serving.grid --model llama-3-8b --system blinkpy --system blinkpy-host --system vllm

Each system is started once for all of its loads. Each cell is kept in a state folder once it is measured, so the same command
continues where the last one ended; it may name other systems and rates: the result has all cells of the folder. --rates without a
number leaves the grid out. docs/evaluation.md explains the other options.
"""

import argparse
import dataclasses
import datetime
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import RESULTS, ROOT, Run, UsageError, WrongAnswer, main, origin, parser, table, to_json
from benchmarks.common.load import load_name
from benchmarks.serving.cell import Bench, Load, add_options, bench
from benchmarks.serving.load_figures import MODES, levels, verdict
from benchmarks.serving.systems import Running, ServerError, System
from benchmarks.serving.workload import DATA_SETS

METHOD = """Each system is started on the same cores, warmed up, offered the same loads in the same order, and ended. Lengths
and arrival times follow from the seed and are the same for all; the prompts' token ids are random and new each time. All
answers are asked for with ignore_eos and must bring exactly the tokens that were asked for. The client runs in several
processes and measures its own lag; a load in which it fell behind is marked invalid. TTFT counts from when a request was due
(open loop) or sent (closed loop) to its first text; TPOT is one figure for each request, from first to last text over its
tokens but one; ITL is between two events of a stream. Latencies are those of the requests that were answered completely; the
others are counted under errors. Throughput, goodput and energy are taken over window_s from the start: the time of the
arrivals, or until the first stream had nothing more to ask. Energy is the GPU's own counter, idle power included. Intervals:
95%, block bootstrap."""
RATES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20, 24, 28, 32)
QUICK_RATES = (2, 8, 16, 32)
SMOKE_RATES = (4, 12)
SECONDS, QUICK_SECONDS = 60.0, 20.0
SAME = (  # fields in which the cells of one result agree
    *("model", "seconds", "drain_s", "data", "closed_data", "rounds", "seed"),
    *("per_core", "kinds", "server_cores", "client_cores", "frontend_cores", "engine_cores", "chat", "text"),
)
CELL_SPARE_S = 5.0  # time of a cell in addition to arrivals and drain: prompts, client processes, neighbours, and the figures


@dataclass(frozen=True)
class Cell:
    """An open loop with a rate, or a closed loop with streams. front_end: own (has separate cores) or shared (by
    neighbours). schema: all answers are JSON of one schema."""

    system: str
    mode: str
    rate: float
    streams: int
    front_end: str
    repeat: int
    schema: bool = False

    @property
    def file(self) -> str:
        what = (f"{self.streams}-streams" if self.streams else f"{self.rate:g}") + "-schema" * self.schema
        return f"{self.system}-{self.mode}-{what}-{self.front_end}-{self.repeat}.json"

    @property
    def name(self) -> str:
        again = f", again ({self.repeat})" if self.repeat else ""
        what = load_name(self.rate, self.streams) + ", with a schema" * self.schema
        return f"{self.system}, {self.mode}, {what}, front end {self.front_end}{again}"


class State:
    """The measured cells, one file each. Raises UsageError if the folder belongs to another grid, machine or commit."""

    def __init__(self, folder: Path, plan: dict[str, Any]):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        path, text = folder / "plan.json", to_json(plan) + "\n"
        if path.exists() and path.read_text() != text:
            before = json.loads(path.read_text())
            other = ", ".join(key for key in {**before, **plan} if json.dumps(before.get(key)) != json.dumps(plan.get(key)))
            raise UsageError(f"{folder.name} holds cells of another grid ({other}); give another --state, or remove it")
        path.write_text(text)

    def done(self, cell: Cell) -> bool:
        return (self.folder / cell.file).exists()

    def missing(self, cell: Cell, redo_invalid: bool) -> bool:
        """Whether a cell is still to be measured. redo_invalid: also if its client fell behind."""
        return not self.done(cell) or (redo_invalid and not self.read(cell.file)["client"]["valid"])

    def keep(self, cell: Cell, found: dict[str, Any]) -> None:
        partial = self.folder / "new"
        partial.write_text(to_json({"cell": dataclasses.asdict(cell), **found}) + "\n")
        partial.rename(self.folder / cell.file)

    def read(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / name).read_text())
        found["client"] |= verdict(found)  # by today's rule
        return found

    def all(self, order: Sequence[str]) -> list[dict[str, Any]]:
        """Every cell of the folder, including those of earlier commands. order: order of the systems; other systems follow by
        name.
        """

        def place(found: dict[str, Any]) -> tuple[Any, ...]:
            key = found["cell"]
            system = order.index(key["system"]) if key["system"] in order else len(order)
            load = key["streams"], key["repeat"], MODES.index(key["mode"]), key["rate"], key["schema"]
            return system, key["system"], key["front_end"], *load

        names = [path.name for path in self.folder.glob("*.json") if path.name != "plan.json"]
        return sorted(map(self.read, names), key=place)


def grid(options: argparse.Namespace, systems: Sequence[System]) -> list[Cell]:
    """All cells, in order. For each system: closed loops, closed loops with and without a schema, the grid, the other
    placement of front ends, the grid's repetitions."""
    own = "own" if options.frontend_cores else "shared"
    cells = []
    for system in systems:
        first, *again = [
            [Cell(system.name, mode, rate, 0, own, repeat) for rate in options.rates for mode in options.modes]
            for repeat in range(options.repeats)
        ]
        cells += [Cell(system.name, MODES[0], 0.0, streams, own, 0) for streams in options.streams]
        for streams, mode in itertools.product(options.schema_streams, options.modes):
            cells += [Cell(system.name, mode, 0.0, streams, own, 0, schema) for schema in (False, True)]
        cells += first
        cells += [Cell(system.name, mode, rate, 0, "shared", 0) for rate in options.shared_rates for mode in options.modes]
        cells += [cell for repeat in again for cell in repeat]
    return cells


def settle(options: argparse.Namespace) -> None:
    """Apply --smoke and --quick. Raises UsageError."""
    if options.smoke:
        options.rates, options.seconds, options.drain_s = SMOKE_RATES, 2.0, 10.0
        options.data, options.closed_data, options.per_core, options.rounds = "fixed:24:12", "fixed:16:8", 1, 2
    if options.rates is None:
        options.rates = QUICK_RATES if options.quick else RATES
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    options.system = options.system or ["blinkpy"]
    if options.shared_rates and not options.frontend_cores:
        raise UsageError("--shared-rates is the other placement of front ends that have --frontend-cores")


def benchmark(options: argparse.Namespace) -> None:
    settle(options)
    name = f"paper-{Path(options.model).name}"
    if options.output is None and not options.smoke:
        options.output = RESULTS / f"{name}.json"
    state_folder = Path(options.state or ROOT / "build" / "benchmarks" / f"{name}-state")
    deadline = time.monotonic() + options.budget if options.budget else float("inf")
    plan = {key: getattr(options, key) for key in SAME} | origin()
    run = Run("serving.grid", options)
    with bench(options, run.progress) as means:
        state = State(state_folder, plan)
        cells = grid(options, means.systems)
        errors = measure(means, state, cells, options, deadline)
        done = sum(map(state.done, cells))  # of this command's cells
        document = {
            **means.facts(),
            "complete": done == len(cells),
            "done": done,
            "errors": errors,
            "cells": state.all([system.name for system in means.systems]),
            "smoke": options.smoke,
        }
    run.write(METHOD, document)
    print(shown(document["cells"]))
    if not document["complete"]:
        print(f"{done} of {len(cells)} cells are done: run the same command again to go on")
    if errors:
        sys.exit(1)


def shown(cells: list[dict[str, Any]]) -> str:
    """The main figures of cells, for a terminal."""
    rows = []
    for cell in cells:
        joules = cell["energy"].get("joules_per_token")
        words = [Cell(**cell["cell"]).name, levels(cell, "ttft_ms"), levels(cell, "tpot_ms"), f"{cell['output_tokens_per_s']:g}"]
        words += ["" if joules is None else f"{joules:.3g}", str(sum(cell["errors"].values()))]
        rows.append([*words, "kept up" if cell["client"]["valid"] else "INVALID"])
    head = ("load", "TTFT p50 / p99 ms", "TPOT p50 / p99 ms", "output tok/s", "J per token", "errors", "client")
    return table(head, rows)


def measure(means: Bench, state: State, cells: list[Cell], options: argparse.Namespace, deadline: float) -> dict[str, str]:
    """Measure missing cells, until the deadline (time.monotonic()). Systems that failed are omitted: errors by system."""
    errors: dict[str, str] = {}
    needed = options.seconds + options.drain_s + CELL_SPARE_S
    for system in means.systems:
        missing = [cell for cell in cells if cell.system == system.name and state.missing(cell, options.redo_invalid)]
        if not missing or time.monotonic() + needed > deadline:
            continue
        try:
            before = means.meter.watts(options.idle_s) if options.idle_s else None
            with means.server(system) as server:
                if options.idle_s:
                    server.facts |= {"idle_w": means.meter.watts(options.idle_s), "idle_before_w": before}
                for cell, found in measured(means, server, missing, options, deadline - needed):
                    state.keep(cell, {"server": server.facts, **found})
        except (ServerError, WrongAnswer, TimeoutError) as error:
            errors[system.name] = str(error)
            print(f"error: {error}", file=sys.stderr)
    return errors


def measured(
    means: Bench, server: Running, cells: list[Cell], options: argparse.Namespace, last_start: float
) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """Measure cells on a running server in turn; none is started after last_start."""
    placed = ""
    for number, cell in enumerate(cells):
        if time.monotonic() > last_start:
            return
        cores = (means.cores if cell.front_end == "own" else means.cores.shared).of(server.system)
        if placed != cell.front_end:
            server.place(cores)
            placed = cell.front_end
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        name = f"{cell.name} ({number + 1} of {len(cells)})"
        yield cell, {"date": date, **means.measure(server, load_of(cell, options), name, cores)}


def load_of(cell: Cell, options: argparse.Namespace) -> Load:
    """The load of a cell; a closed loop may take as long as an open one."""
    per_core = options.per_core if cell.mode == MODES[1] else 0
    common: dict[str, Any] = {"seed": options.seed, "text": options.text, "per_core": per_core, "kinds": tuple(options.kinds)}
    if cell.streams:
        common |= {"streams": cell.streams, "rounds": options.rounds, "schema": cell.schema}
        return Load(options.closed_data, seconds=0.0, drain_s=options.seconds + options.drain_s, **common)
    return Load(options.data, cell.rate, options.seconds, options.drain_s, **common)


def options() -> argparse.Namespace:
    result = parser("serving.grid", "Request rates, isolated and interfered, for each system.")
    add_options(result)
    result.add_argument("--quick", action="store_true", help=f"{len(QUICK_RATES)} rates of {QUICK_SECONDS:g} s")
    result.add_argument("--rates", type=float, nargs="*", help="requests a second, in this order (default: 13 from 1 to 32)")
    result.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    result.add_argument("--seconds", type=float, help=f"of arrivals in a cell (default: {SECONDS:g})")
    result.add_argument("--drain-s", type=float, default=60.0, help="after which what hasn't ended is given up")
    result.add_argument("--data", default="azure", help=DATA_SETS)
    result.add_argument("--per-core", type=int, default=8, help="neighbours on each of the server's cores, when interfered")
    result.add_argument("--streams", type=int, nargs="*", default=[], help="requests in flight of each closed loop, isolated")
    help_text = "closed loops, in all modes, without and with a JSON schema for every answer"
    result.add_argument("--schema-streams", type=int, nargs="*", default=[], metavar="STREAMS", help=help_text)
    result.add_argument("--rounds", type=int, default=4, help="requests of each stream of a closed loop")
    result.add_argument("--closed-data", default="fixed:128:256", metavar="DATA", help="lengths of the closed loops")
    help_text = "rates that are repeated with the front ends among the neighbours"
    result.add_argument("--shared-rates", type=float, nargs="*", default=[], metavar="RATE", help=help_text)
    result.add_argument("--repeats", type=int, default=1, help="how often the grid is measured, to see how much it varies")
    result.add_argument("--idle-s", type=float, default=0.0, help="of measuring power before a server starts, and when idle")
    result.add_argument("--seed", type=int, default=1, help="of lengths and arrivals")
    result.add_argument("--state", default="", metavar="FOLDER", help="cells that are done (default: in build/benchmarks)")
    result.add_argument("--redo-invalid", action="store_true", help="measure cells again in which the client fell behind")
    result.add_argument("--budget", type=float, default=0.0, metavar="S", help="start no cell that could end after S seconds")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
