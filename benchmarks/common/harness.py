"""The common part of all benchmarks: options, the description of the machine, the result file, targets.

A result file is one JSON object: the run (benchmark, arguments, commit, date), the machine (machine,
software), disturbances (others), and the outcome (results, targets). benchmarks.report makes pages and
plots of it.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from blinkpy.progress import Progress

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SCHEMA = 2  # 1 kept samples; 2 keeps figures alone
LINE = 360  # maximum characters of a JSON object or list on one line
PACKAGES = ("numpy", "numba", "numba-cuda", "torch", "triton", "uvloop", "httptools", "tokenizers", "orjson")
UNSAID = ("output", "note", "wait_quiet", "logs", "state", "api_key", "env")  # options that name places or secrets
QUIET_SHARE = 0.03  # maximum share of all cores that other processes use on a quiet machine
QUIET_LOOK_S = 2.0


class WrongAnswer(Exception):
    """The measured code gave a wrong result, so its speed means nothing."""


class UsageError(Exception):
    """Invalid options. The message is one line for the user."""


def check(fine: bool, what: str) -> None:
    """Raise WrongAnswer unless `fine`."""
    if not fine:
        raise WrongAnswer(what)


class Flag(NamedTuple):
    """An option of a benchmark: a number, or several as a tuple. smoke: its value with --smoke; None: the
    default.
    """

    default: Any
    help: str = ""
    smoke: Any = None


def parser(name: str, description: str, **flags: Flag) -> argparse.ArgumentParser:
    """The common options of benchmarks, and a benchmark's own. name: of its module, within benchmarks."""
    result = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    result.add_argument("--output", type=Path, help=f"result file (default: benchmarks/results/{stem(name)}.json)")
    result.add_argument("--smoke", action="store_true", help="a few seconds, to see that it works; the figures mean nothing")
    result.add_argument("--wait-quiet", type=float, default=0.0, metavar="S", help="wait up to S s until other processes rest")
    result.add_argument("--note", default="", help="a remark for the result file")
    for flag, (default, text, _) in flags.items():
        several = isinstance(default, tuple)
        kind = type(default[0] if several else default)
        text = f"{text} (default: {' '.join(map(str, default)) if several else default})".strip()
        result.add_argument(f"--{flag.replace('_', '-')}", type=kind, nargs="+" if several else None, default=default, help=text)
    return result


def run_benchmark(name: str, description: str, benchmark: Callable[["Run"], None], **flags: Flag) -> NoReturn:
    """Run a benchmark as a command, with its own options."""
    options = parser(name, description, **flags).parse_args()
    if options.smoke:
        vars(options).update({flag: smoke for flag, (_, _, smoke) in flags.items() if smoke is not None})
    sys.exit(main(lambda options: benchmark(Run(name, options)), options))


def stem(name: str) -> str:
    """The name of a benchmark's result file, without its suffix: parts.cpu_engine writes cpu_engine.json."""
    return name.rpartition(".")[2]


class Run:
    """One run of a benchmark: shows progress, collects targets, writes the result file. name: as in parser."""

    def __init__(self, name: str, options: argparse.Namespace):
        self.name, self.options = name, options
        self.progress = Progress()
        if options.output is None and options.smoke:
            options.output = ROOT / "build" / "benchmarks" / f"{stem(name)}.json"
        self.output: Path = options.output or RESULTS / f"{stem(name)}.json"
        self.targets: list[dict[str, Any]] = []
        self._waited = wait_quiet(options.wait_quiet, self.progress) if options.wait_quiet else 0.0
        self._load = os.getloadavg()
        self._date = datetime.datetime.now(datetime.UTC)
        self._others = Others()
        self._commit = revision()

    def target(self, what: str, value: float, limit: float, unit: str, at_most: bool = True) -> None:
        """Compare a figure with its target."""
        met = value <= limit if at_most else value >= limit
        figure = float(f"{value:.4g}")
        self.targets.append({"what": what, "value": figure, "limit": limit, "at_most": at_most, "unit": unit, "met": met})

    def write(self, method: str | None, results: dict[str, Any]) -> None:
        """Write the result file, and print the targets. method: the method of measurement, in a few
        sentences.
        """
        self.progress.close()
        document = {
            "benchmark": self.name,
            "schema": SCHEMA,
            "smoke": self.options.smoke,
            "note": self.options.note,
            "date": self._date.isoformat(timespec="seconds"),
            "seconds": round((datetime.datetime.now(datetime.UTC) - self._date).total_seconds(), 1),
            "commit": self._commit,
            "arguments": {k: v for k, v in vars(self.options).items() if k not in UNSAID and v is not None},
            "machine": machine(),
            "software": software(),
            "others": {"load_average_before": self._load, "waited_s": round(self._waited, 1), **self._others.shares()},
            "method": " ".join((method or "").split()),
            "targets": self.targets,
            "results": results,
        }
        self.output.parent.mkdir(parents=True, exist_ok=True)
        partial = self.output.with_name(self.output.name + ".new")
        partial.write_text(to_json(document) + "\n")
        partial.replace(self.output)
        for target in self.targets:
            sign = "at most" if target["at_most"] else "at least"
            state = "met" if target["met"] else "MISSED"
            print(f"{state:7}{target['what']}: {target['value']:g} {target['unit']} (target: {sign} {target['limit']:g})")
        print(f"written: {os.path.relpath(self.output)}")


def to_json(value: Any, indent: int = 0) -> str:
    """JSON with short values and lists of numbers on one line, and otherwise one line for each key or
    item.
    """
    line = json.dumps(value, allow_nan=False)
    numbers = isinstance(value, (list, tuple)) and not any(isinstance(item, (dict, list, tuple)) for item in value)
    if not isinstance(value, (dict, list, tuple)) or not value or numbers or (indent and len(line) <= LINE):
        return line
    pad = "  " * (indent + 1)
    if isinstance(value, dict):
        lines = [f"{pad}{json.dumps(str(key))}: {to_json(item, indent + 1)}" for key, item in value.items()]
        return "{\n" + ",\n".join(lines) + "\n" + "  " * indent + "}"
    return "[\n" + ",\n".join(pad + to_json(item, indent + 1) for item in value) + "\n" + "  " * indent + "]"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines)


# ---- the machine --------------------------------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """The hardware and the operating system, without names of a host or its owner."""
    cpu = Path("/proc/cpuinfo").read_text()
    model = re.search(r"^model name\s*: (.*)", cpu, re.MULTILINE)
    return {
        "cpu": model[1] if model else platform.machine(),
        "architecture": platform.machine(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "virtual_machine": " hypervisor " in cpu,
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
    }


def origin() -> dict[str, Any]:
    """The common origin of a result's parts: the commit, and the machine without its memory, which may
    vary.
    """
    return {"machine": {key: value for key, value in machine().items() if key != "memory_gib"}, "commit": revision()}


def software() -> dict[str, str]:
    """Versions of Python and of relevant packages."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return versions


def revision() -> dict[str, Any]:
    """The commit, and whether tracked files differ from it.

    A copy without the repository's history takes the commit from the environment (BLINKPY_COMMIT); empty if
    it is not set.
    Raises UsageError if the variable is not a whole hash.
    """
    if commit := os.environ.get("BLINKPY_COMMIT"):
        if not re.fullmatch("[0-9a-f]{40}", commit):
            raise UsageError(f"BLINKPY_COMMIT={commit} is not a whole commit hash, of 40 digits")
        return {"hash": commit, "dirty": False}

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        changed = [line for line in git("status", "--porcelain").splitlines() if "benchmarks/results/" not in line]
        return {"hash": git("rev-parse", "HEAD"), "dirty": bool(changed)}
    except (OSError, subprocess.SubprocessError):
        return {}


class Others:
    """The share of the machine that others used during this benchmark: other processes, and other virtual
    machines (steal).
    """

    def __init__(self) -> None:
        self._began, self._start = time.monotonic(), _cpu_times()

    def shares(self) -> dict[str, float]:
        """Shares of all cores' time since the start. Call it after all children of this process have
        ended.
        """
        wall = (time.monotonic() - self._began) * (os.cpu_count() or 1)
        busy, steal, own = (after - before for before, after in zip(self._start, _cpu_times(), strict=True))
        return {"other_processes": round(max(0.0, busy - own) / wall, 4), "steal": round(steal / wall, 4)}


def _cpu_times() -> tuple[float, float, float]:
    """CPU seconds: (busy, stolen) of all cores since the machine's start; of this process and its ended
    children.
    """
    with open("/proc/stat") as lines:
        user, nice, system, _, _, irq, softirq, steal = (int(word) for word in lines.readline().split()[1:9])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick, sum(os.times()[:4])


def wait_quiet(limit_s: float, progress: Progress) -> float:
    """Wait until other processes are idle, for at most limit_s. Returns the seconds waited."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        progress("waiting until the machine is quiet", time.monotonic() - began, limit_s)
        others = Others()
        time.sleep(QUIET_LOOK_S)
        if sum(others.shares().values()) < QUIET_SHARE:
            break
    return time.monotonic() - began


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Iterator[None]:
    """Pin this thread and its children to some cores within the block; empty: no change."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def main(run: Callable[[argparse.Namespace], None], options: argparse.Namespace) -> int:
    """Run a benchmark's function. A wrong answer gives exit code 1, wrong options 2; both write nothing."""
    try:
        run(options)
    except WrongAnswer as error:
        print(f"wrong answer, nothing was measured: {error}", file=sys.stderr)
        return 1
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
