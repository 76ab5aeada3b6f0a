"""What became of mutants: a line of JSON for each as it comes, and one result of all lines."""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.harness import machine, revision, software, to_json

HOW = ("an error", "an endless call", "a timeout")
"""How mutants are noticed: somebody says what is wrong; one call, or one test, takes many times what it usually takes; or its
process died, or took or waited too long as a whole, which one that changes nothing may do on a bad machine."""


class Verdict(NamedTuple):
    """What became of a mutant. by: the stage that noticed it, "" for a survivor. said: the first line of what it said. seconds:
    of the processor, by stage. how: one of HOW, "" for a survivor."""

    name: str
    group: str
    line: int
    rule: str
    by: str
    said: str
    seconds: dict[str, float]
    how: str = ""

    def __str__(self) -> str:
        told = f"killed by {self.by}, {self.how}: {self.said}" if self.by else "SURVIVED"
        return f"{self.name}\n  line {self.line}, {self.rule}: {told} ({sum(self.seconds.values()):.1f} s)"


Header = dict[str, Any]


def header(seed: int, chosen: str, asked: int, sources: str) -> Header:
    """The first line of a file of verdicts. chosen: which mutants, in words. asked: how many, in this part. sources: the digest
    of sources and tests."""
    run = {"seed": seed, "chosen": chosen, "sources": sources}
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"run": run, "asked": asked, "date": date, "commit": revision(), "machine": machine(), "software": software()}


def read(path: Path, run: dict[str, Any] | None = None) -> tuple[Header, list[Verdict]]:
    """A file of verdicts: its header, and the verdicts. A last line that was cut off does not count. Raises SystemExit when it is
    of another run."""
    first, *lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    header = json.loads(first)
    if run is not None and header["run"] != run:
        raise SystemExit(f"{path} is of another seed, choice or state of the sources")
    return header, [Verdict(**json.loads(line)) for line in lines]


def merged(paths: Iterable[Path]) -> tuple[Header, list[Verdict]]:
    """The verdicts of the parts of one run."""
    header, verdicts, asked = dict[str, Any](), dict[str, Verdict](), 0
    for path in paths:
        part, found = read(path, header.get("run"))
        header, asked = header or part, asked + part["asked"]
        verdicts |= {verdict.name: verdict for verdict in found}
    return {**header, "asked": asked}, list(verdicts.values())


def result(header: Header, verdicts: list[Verdict]) -> dict[str, Any]:
    """Figures of a run, and its survivors."""
    killed = [verdict for verdict in verdicts if verdict.by]
    survivors = sorted((verdict for verdict in verdicts if not verdict.by), key=lambda verdict: verdict.name)
    planted, dead = (Counter(v.name.partition("::")[0] for v in some) for some in (verdicts, killed))
    cpu: dict[str, Counter[str]] = defaultdict(Counter)
    for verdict in verdicts:
        cpu[verdict.group].update(verdict.seconds)
    return {
        **header,
        "planted": len(verdicts),
        "killed": len(killed),
        "share": round(len(killed) / max(1, len(verdicts)), 4),
        "interval": [round(end, 4) for end in interval(len(killed), len(verdicts))],
        "killers": Counter(verdict.by for verdict in killed),
        "how": {how: sum(verdict.how == how for verdict in killed) for how in HOW},
        "processor_seconds": {group: {stage: round(s) for stage, s in stages.items()} for group, stages in cpu.items()},
        "modules": {file: [dead[file], planted[file]] for file in sorted(planted)},
        "survivors": [{"change": v.name, "line": v.line, "rule": v.rule} for v in survivors],
    }


def interval(killed: int, planted: int) -> tuple[float, float]:
    """Between which shares that of all mutants lies, of which these are a random sample, with 95 % confidence (Wilson, 1927)."""
    if planted == 0:
        return 0.0, 1.0
    z, share = 1.96, killed / planted
    middle, width = share + z * z / (2 * planted), z * math.sqrt(share * (1 - share) / planted + (z / (2 * planted)) ** 2)
    return max(0.0, (middle - width) / (1 + z * z / planted)), min(1.0, (middle + width) / (1 + z * z / planted))


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(to_json(result) + "\n", encoding="utf-8")
