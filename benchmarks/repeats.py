"""How much two runs of a grid differ: blinkpy's loads that a result file has twice, and the peer's in two files."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from benchmarks.report.grid_summary import MEDIANS, MODES, Document, repeated, series
from benchmarks.report.serving_tables import OURS, PEER, percent

Pairs = dict[str, tuple[Document, Document]]  # result files by the model's title
WITHIN = 0.05  # two runs of a load shall differ by no more


@dataclass(frozen=True)
class Twice:
    """A model's result file in which loads of blinkpy's were measured twice.

    title: of the model; where: both were measured, in words; name: of the file."""

    title: str
    where: str
    name: str
    document: Document

    @cached_property
    def loads(self) -> dict[str, dict[str, float]]:
        """By how much each of MEDIANS differs between the runs, as a share of the smaller one, by the load's name."""
        found = repeated(self.document["results"]) if self.document else {}
        return {
            f"{rate:g} requests/s, {mode}": {name: ratio - 1 for name, ratio in figures.items()}
            for (system, mode, rate), figures in found.items()
            if system == OURS
        }

    @property
    def differences(self) -> list[float]:
        return [difference for figures in self.loads.values() for difference in figures.values()]

    @property
    def apart(self) -> dict[str, float]:
        """The figures that differ by more than WITHIN, by name."""
        return {
            f"{name} at {load}": difference
            for load, figures in self.loads.items()
            for name, difference in figures.items()
            if difference > WITHIN
        }

    @property
    def counted(self) -> str:
        """21 of 24 figures."""
        count, apart = len(self.differences), len(self.apart)
        return f"{count - apart} of {count} figures" if apart else f"all {count} figures"


def repeats(twice: Iterable[Twice], machines: dict[str, tuple[Document, Document]]) -> str:
    """A list of both. machines: two runs of the peer, on two machines, by the model's title."""
    lines = [_ours(one) for one in twice if one.loads]
    lines += [line for title, both in machines.items() if (line := _peers(title, *both))]
    return "\n".join([line for item in lines for line in textwrap.wrap(item, 130, subsequent_indent="  ")] + [""])


def _ours(twice: Twice) -> str:
    loads = "1 load" if len(twice.loads) == 1 else f"{len(twice.loads)} loads"
    text = (
        f"- {OURS} {twice.where}, {twice.title}, {loads} (`{twice.name}.json`, `{commit_of(twice.document)}`):"
        f" {twice.counted} are within {percent(WITHIN)}, half of them within {percent(statistics.median(twice.differences), 1)}."
        f" Differences are at most {_largest(twice.loads.values())}."
    )
    apart = "; ".join(f"{name} ({percent(difference, 1)})" for name, difference in twice.apart.items())
    return f"{text} Further apart: {apart}." if apart else text


def _peers(title: str, before: Document, after: Document) -> str:
    """The peer's loads without neighbours that both files have. Empty if there is none."""
    found: dict[str, float] = {}
    for name, value in MEDIANS.items():
        left, right = (series(file["results"], PEER, MODES[0], value) for file in (before, after))
        if rates := left.keys() & right.keys():
            found[name] = max(max(left[rate], right[rate]) / min(left[rate], right[rate]) - 1 for rate in rates)
    where = f"on two machines of one kind, {title}, loads without neighbours, `{commit_of(before)}` and `{commit_of(after)}`"
    return f"- The same {PEER} {where}: at most {_largest([found])}." if found else ""


def _largest(differences: Iterable[dict[str, float]]) -> str:
    """The largest of each kind."""
    some = list(differences)
    kinds = {name: max((one[name] for one in some if name in one), default=None) for name in MEDIANS}
    return ", ".join(f"{name} {percent(value, 1)}" for name, value in kinds.items() if value is not None)


def commit_of(file: dict[str, Any]) -> str:
    """The beginning of the commit that a result file is from."""
    return str(file["commit"].get("hash", "unknown")[:7])
