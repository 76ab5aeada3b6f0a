"""The outcomes of mutants: a ledger with a JSON line for each, and figures of all lines.

A line `run` gives time and machine of the verdicts after it. A verdict is valid while the text of the
mutant's function is the same; the last one counts. To merge ledgers of several machines, append them: cat
FILE >> LEDGER.
"""

import contextlib
import fcntl
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common.harness import machine, revision, software, to_json
from mutants.mutations import Mutant

HOW = ("an error", "an endless call", "a timeout")
"""Ways to notice mutants: a test or check reports an error; one call, or one test, takes many times its usual time; or the
process died, used too much CPU time as a whole, or slept too long. An equivalent mutant may do the latter, too."""

COUNTS = ("killed", "survived", "equivalent", "unknown")


class Verdict(NamedTuple):
    """The outcome of a mutant.

    by: the stage or the test that detected it; "" for a survivor.
    how: one of HOW; "" for a survivor.
    seconds: CPU time.
    said: first line of the output of `by`; not stored in the ledger.
    """

    id: str
    name: str
    group: str
    line: int
    rule: str
    text: str
    by: str
    how: str
    seconds: float
    said: str = ""

    @classmethod
    def of(cls, mutant: Mutant, group: str, by: str, how: str, seconds: float, said: str = "") -> "Verdict":
        return cls(mutant.id, mutant.name, group, mutant.line, mutant.rule, mutant.text, by, how, seconds, said)

    def __str__(self) -> str:
        reported = f"killed by {self.by}, {self.how}: {self.said}" if self.by else "SURVIVED"
        return f"{self.name}\n  line {self.line}, {self.rule}: {reported} ({self.seconds:.1f} s)"


class Ledger:
    """The verdicts of earlier runs, in a file, and new ones."""

    def __init__(self, path: Path) -> None:
        self._path, self._known, self._began, self._killers = path, dict[tuple[str, str], Any](), False, dict[str, str]()
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for line in text.split("\n")[:-1]:  # an incomplete last line does not count
            found = json.loads(line)
            if "id" in found:
                self._known[found["id"], found["text"]] = found
                self._killers[found["id"]] = found["by"]

    def of(self, mutant: Mutant, group: str) -> Verdict | None:
        """The mutant's verdict, if one exists for the current text of its function."""
        found = self._known.get((mutant.id, mutant.text))
        return Verdict.of(mutant, group, found["by"], found["how"], found["seconds"]) if found else None

    def killer(self, mutant: Mutant) -> str:
        """The test that last killed it, also with another text of its function; "" without such a test."""
        return self._killers.get(mutant.id, "")

    def add(self, verdict: Verdict) -> None:
        lines = [] if self._began else [{"run": origin()}]
        lines.append({name: getattr(verdict, name) for name in ("id", "text", "by", "how", "seconds")})
        self._began = True
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines))


@contextlib.contextmanager
def alone(ledger: Path) -> Iterator[None]:
    """Lock a ledger. Raises SystemExit if another process has locked it."""
    with open(ledger, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run adds to {ledger}: wait for its end, or name another --ledger") from None
        yield


def origin() -> dict[str, Any]:
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "commit": revision(), "machine": machine(), "software": software()}


def result(asked: Iterable[tuple[Mutant, str]], verdicts: Iterable[Verdict], equivalent: Counter[str]) -> dict[str, Any]:
    """Figures of verdicts, by module and in total.

    asked: all chosen mutants, with their groups.
    equivalent: number of equivalent mutants in each file.
    """
    verdicts = list(verdicts)
    modules: dict[str, Counter[str]] = defaultdict(Counter)
    groups: dict[str, set[str]] = defaultdict(set)
    for mutant, group in asked:
        modules[mutant.file]["asked"] += 1
        groups[group].add(mutant.file)
    for verdict in verdicts:
        modules[verdict.name.partition("::")[0]]["killed" if verdict.by else "survived"] += 1
    for file, counts in modules.items():
        counts["equivalent"], counts["unknown"] = equivalent[file], counts["asked"] - counts["killed"] - counts["survived"]
    killed = [verdict for verdict in verdicts if verdict.by]
    return {
        **origin(),
        "hunted": len(verdicts),
        "interval": [round(end, 4) for end in interval(len(killed), len(verdicts))],
        "asked": sum(counts["asked"] for counts in modules.values()),
        "killed": len(killed),
        "survived": len(verdicts) - len(killed),
        "equivalent": sum(equivalent[file] for file in modules),
        "killers": Counter(verdict.by.partition("::")[0] for verdict in killed).most_common(),
        "how": {how: sum(verdict.how == how for verdict in killed) for how in HOW},
        "processor_seconds": round(sum(verdict.seconds for verdict in verdicts)),
        "groups": {
            group: {"modules": len(files), **counted(sum((modules[file] for file in files), Counter()))}
            for group, files in groups.items()
        },
        "modules": {file: counted(counts) for file, counts in sorted(modules.items())},
        "rules": {
            rule: [sum(v.rule == rule for v in killed), sum(v.rule == rule for v in verdicts)]
            for rule in sorted({verdict.rule for verdict in verdicts})
        },
        "survivors": sorted(verdict.name for verdict in verdicts if not verdict.by),
    }


def counted(counts: Counter[str]) -> dict[str, Any]:
    """Figures of a module, or of a group of modules."""
    killed, planted = counts["killed"], counts["killed"] + counts["survived"]
    return {**{name: counts[name] for name in COUNTS}, "interval": [round(end, 4) for end in interval(killed, planted)]}


def interval(killed: int, planted: int) -> tuple[float, float]:
    """The 95 % confidence interval of the share of killed mutants, for a random sample (Wilson, 1927)."""
    if planted == 0:
        return 0.0, 1.0
    z, share = 1.96, killed / planted
    middle, width = share + z * z / (2 * planted), z * math.sqrt(share * (1 - share) / planted + (z / (2 * planted)) ** 2)
    return max(0.0, (middle - width) / (1 + z * z / planted)), min(1.0, (middle + width) / (1 + z * z / planted))


def write(path: Path, result: dict[str, Any]) -> None:
    path.write_text(to_json(result) + "\n", encoding="utf-8")
