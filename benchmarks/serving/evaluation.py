"""The evaluation, cell by cell: measures as many missing cells as fit into a time.

    python -m benchmarks.serving.evaluation --seconds 540 --server-cores 0-11 --client-cores 12-15 --frontend-cores 10-11
    python -m benchmarks.serving.evaluation --list

benchmarks/evaluation.toml has the tables. A cell is one load on one system; it is kept in results/evaluation/CARD/TABLE/ once it
is measured, and never measured again. A run takes the first table with missing cells. Of its loads it takes those first that
other systems of the table have already, so that figures which are compared stand side by side. A system is started once a run,
and measured with all its loads of the run. A system that does not start is left out, with its error.
"""

import argparse
import dataclasses
import datetime
import itertools
import re
import sys
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.harness import RESULTS, ROOT, UsageError, WrongAnswer, main, origin, parser, software, table, to_json
from benchmarks.common.nvml import EnergyMeter
from benchmarks.serving.cell import Bench, Load, add_options, bench
from benchmarks.serving.grid import CELL_SPARE_S, Cell, load_of, shown
from benchmarks.serving.load_figures import MODES
from benchmarks.serving.systems import SYSTEMS, ServerError
from blinkpy.progress import Progress

MANIFEST = ROOT / "benchmarks" / "evaluation.toml"
CELLS = RESULTS / "evaluation"
NO_CARD = "no-gpu"
FIELDS = {"name": str, "model": str, "data": str, "rates": list, "modes": list, "systems": list}
SYSTEM_FIELDS = {"system": str, "start_s": int | float, "extra": str, "environment": dict}


@dataclass(frozen=True)
class Entry:
    """A system of the manifest.

    name: in tables and cells.
    system: a name of SYSTEMS.
    start_s: expected time from its start until it is warm.
    extra: further arguments.
    environment: further variables.
    """

    name: str
    system: str
    start_s: float
    extra: str = ""
    environment: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def words(self) -> dict[str, list[str]]:
        """The options of add_options() that name it."""
        variables = [f"{self.name}:{key}={value}" for key, value in self.environment.items()]
        extra = [f"{self.name}:{self.extra}"] if self.extra else []
        return {"system": [f"{self.name}={self.system}"], "extra": extra, "env": variables}


@dataclass(frozen=True)
class Table:
    """Loads of one model, for some systems. loads: (rate, mode) in the order of the manifest."""

    name: str
    model: str
    data: str
    loads: tuple[tuple[float, str], ...]
    systems: tuple[Entry, ...]

    def cell(self, entry: Entry, load: tuple[float, str]) -> Cell:
        return Cell(entry.name, load[1], load[0], 0, "own", 0)

    def cells(self) -> list[Cell]:
        return [self.cell(entry, load) for entry in self.systems for load in self.loads]


def read_manifest(path: Path) -> list[Table]:
    """The tables of a manifest. Raises UsageError, with the table or system that is wrong."""
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"can't read {path.name}: {error}") from error
    _require(path.name, content, {"systems": dict, "tables": list}, optional=("systems", "tables"))
    systems = {name: _entry(name, fields) for name, fields in content.get("systems", {}).items()}
    tables = [_table(fields, systems) for fields in content.get("tables", [])]
    names = [each.name for each in tables]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{path.name} has the table {twice} twice")
    return tables


def _entry(name: str, fields: dict[str, Any]) -> Entry:
    _require(f"systems.{name}", fields, SYSTEM_FIELDS, optional=("extra", "environment"))
    if fields["system"] not in SYSTEMS:
        raise UsageError(f"systems.{name}: unknown system {fields['system']!r}: one of {', '.join(SYSTEMS)}")
    return Entry(name, **fields)


def _table(fields: dict[str, Any], systems: dict[str, Entry]) -> Table:
    name = f"table {fields.get('name', '')}".strip()
    _require(name, fields, FIELDS)
    if unknown := [each for each in fields["systems"] if each not in systems]:
        raise UsageError(f"{name}: unknown system {unknown[0]!r}: one of {', '.join(systems)}")
    if unknown := [each for each in fields["modes"] if each not in MODES]:
        raise UsageError(f"{name}: unknown mode {unknown[0]!r}: one of {', '.join(MODES)}")
    loads = tuple((float(rate), mode) for rate, mode in itertools.product(fields["rates"], fields["modes"]))
    return Table(fields["name"], fields["model"], fields["data"], loads, tuple(systems[each] for each in fields["systems"]))


def _require(where: str, fields: dict[str, Any], types: dict[str, Any], optional: tuple[str, ...] = ()) -> None:
    if unknown := sorted(fields.keys() - types.keys()):
        raise UsageError(f"{where}: unknown field {unknown[0]!r}; known fields: {', '.join(types)}")
    for name, kind in types.items():
        if name not in fields and name not in optional:
            raise UsageError(f"{where}: {name} is missing")
        if name in fields and not isinstance(fields[name], kind):
            raise UsageError(f"{where}: {name} has the wrong type")


@dataclass(frozen=True)
class Kept:
    """The measured cells of one card."""

    folder: Path

    def path(self, name: str, cell: Cell) -> Path:
        return self.folder / name / cell.file

    def has(self, name: str, cell: Cell) -> bool:
        return self.path(name, cell).exists()

    def keep(self, name: str, cell: Cell, found: dict[str, Any]) -> None:
        path = self.path(name, cell)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".new")
        partial.write_text(to_json({"cell": dataclasses.asdict(cell), **found}) + "\n")
        partial.replace(path)

    def missing(self, tables: Iterable[Table]) -> list[Table]:
        return [each for each in tables if not all(self.has(each.name, cell) for cell in each.cells())]


def next_cells(
    wanted: Table, has: Callable[[Cell], bool], budget_s: float, cell_s: float, left_out: Iterable[str] = ()
) -> dict[Entry, list[Cell]]:
    """The cells of a table to measure next, by system.

    has: whether a cell is measured.
    budget_s: time for starts and cells together.
    cell_s: time of one cell.
    left_out: names of systems that can't be measured in this run.
    Loads that some system already has go first, then the manifest's order. Returns {} if not one load fits.
    """
    systems = [entry for entry in wanted.systems if entry.name not in set(left_out)]
    lacking = {load: [entry for entry in systems if not has(wanted.cell(entry, load))] for load in wanted.loads}
    begun = [load for load in wanted.loads if any(has(wanted.cell(entry, load)) for entry in wanted.systems)]
    chosen = dict[Entry, list[Cell]]()
    left_s = budget_s
    for load in [*begun, *(load for load in wanted.loads if load not in begun)]:
        price_s = sum(cell_s + (entry.start_s if entry not in chosen else 0.0) for entry in lacking[load])
        if price_s > left_s:
            break
        left_s -= price_s
        for entry in lacking[load]:
            chosen.setdefault(entry, []).append(wanted.cell(entry, load))
    return chosen


def card_of(meter: EnergyMeter) -> str:
    """The GPU's name as a folder."""
    name = str(meter.facts.get("gpu", ""))
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or NO_CARD


def benchmark(options: argparse.Namespace) -> None:
    tables = read_manifest(options.manifest)
    if options.table:
        tables = [each for each in tables if each.name in options.table]
        if len(tables) < len(set(options.table)):
            raise UsageError(f"unknown table; known tables: {', '.join(each.name for each in read_manifest(options.manifest))}")
    names = {entry.name for each in tables for entry in each.systems}
    if unknown := set(options.without) - names:
        raise UsageError(f"--without: unknown system {min(unknown)!r}; systems of these tables: {', '.join(sorted(names))}")
    if options.list:
        print(overview(tables, options.cells))
        return
    deadline = time.monotonic() + options.seconds
    cell_s = options.cell_seconds or options.load_seconds + options.drain_s + CELL_SPARE_S
    errors = dict.fromkeys(options.without, "left out by --without")
    measured = 0
    for wanted in tables:
        measured += measure_table(wanted, options, deadline, cell_s, errors)
    print(overview(tables, options.cells))
    print(f"{measured} cells were measured in this run")
    if errors.keys() - set(options.without):
        sys.exit(1)


def measure_table(wanted: Table, options: argparse.Namespace, deadline: float, cell_s: float, errors: dict[str, str]) -> int:
    """Measure missing cells of a table until the deadline (time.monotonic()).

    errors: of systems by name; appended to.
    Returns the number of measured cells.
    """
    with EnergyMeter() as meter:
        kept = Kept(options.cells / card_of(meter))
    count = 0
    while plan := next_cells(wanted, lambda cell: kept.has(wanted.name, cell), deadline - time.monotonic(), cell_s, errors):
        for entry, cells in plan.items():
            count += measure_system(wanted, entry, cells, kept, options, deadline - cell_s, errors)
    return count


def measure_system(
    wanted: Table,
    entry: Entry,
    cells: list[Cell],
    kept: Kept,
    options: argparse.Namespace,
    last_start: float,
    errors: dict[str, str],
) -> int:
    """Start one system and measure its cells; none is begun after last_start. Returns their number."""
    own = argparse.Namespace(**vars(options) | {"model": wanted.model, "data": wanted.data, "seconds": options.load_seconds})
    for name, words in entry.words().items():
        setattr(own, name, [*words, *(word for word in getattr(options, name) if word.startswith(f"{entry.name}:"))])
    count = 0
    try:
        with bench(own, Progress()) as means, means.server(means.systems[0]) as server:
            for number, cell in enumerate(cells):
                if time.monotonic() > last_start:
                    break
                name = f"{wanted.name}: {cell.name} ({number + 1} of {len(cells)})"
                found = measured_cell(means, server, load_of(cell, own), name)
                kept.keep(wanted.name, cell, found)
                print(shown([{"cell": dataclasses.asdict(cell), **found}]), flush=True)
                count += 1
    except (ServerError, WrongAnswer, TimeoutError) as error:
        errors[entry.name] = str(error)
        print(f"error: {error}", file=sys.stderr)
    if not count and entry.name not in errors:
        errors[entry.name] = "no time was left after its start"
    return count


def measured_cell(means: Bench, server: Any, load: Load, name: str) -> dict[str, Any]:
    """The figures of a cell, with all context that a reader needs."""
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    cores = means.cores.of(server.system)
    found = means.measure(server, load, name, cores)
    facts = means.facts() | {"cores": dataclasses.asdict(cores)}
    return {"date": date, **origin(), "software": software(), **facts, "server": server.facts, **found}


def overview(tables: Iterable[Table], folder: Path) -> str:
    """How many cells of each table are measured, by card, and the systems that lack the most."""
    cards = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    rows = []
    for wanted, card in itertools.product(tables, cards or [NO_CARD]):
        kept = Kept(folder / card)
        done = {e.name: sum(kept.has(wanted.name, wanted.cell(e, load)) for load in wanted.loads) for e in wanted.systems}
        words = ", ".join(f"{name} {number} of {len(wanted.loads)}" for name, number in done.items())
        rows.append([wanted.name, card, f"{sum(done.values())} of {len(wanted.cells())}", words])
    return table(("table", "card", "cells", "by system"), rows)


def options() -> argparse.Namespace:
    result = parser("serving.evaluation", "Missing cells of the evaluation's tables, as many as fit into a time.")
    add_options(result)
    result.add_argument("--seconds", type=float, default=600.0, help="time of the whole run, starts included [600]")
    result.add_argument("--load-seconds", type=float, default=60.0, help="of arrivals in a cell [60]")
    result.add_argument("--drain-s", type=float, default=30.0, help="after which the rest of a cell's requests is given up [30]")
    help_text = "expected time of a cell, for the choice of cells [arrivals, drain and 5 s]"
    result.add_argument("--cell-seconds", type=float, default=0.0, help=help_text)
    result.add_argument("--without", nargs="+", default=[], metavar="NAME", help="systems that are not measured in this run")
    result.add_argument("--per-core", type=int, default=8, help="neighbours on each of the server's cores, if interfered [8]")
    result.add_argument("--seed", type=int, default=1, help="of lengths and arrivals [1]")
    result.add_argument("--table", nargs="+", default=[], metavar="NAME", help="only these tables")
    result.add_argument("--list", action="store_true", help="show the measured and missing cells; measure nothing")
    result.add_argument("--manifest", type=Path, default=MANIFEST, help="the tables [benchmarks/evaluation.toml]")
    result.add_argument("--cells", type=Path, default=CELLS, help="folder of cells [benchmarks/results/evaluation]")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
