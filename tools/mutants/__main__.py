"""`make mutants`: plant mutants, and see which ones live.

A fresh random sample, or all of them with --all; --part takes one of --parts shares of these, for several machines. Survivors are
printed with their change. docs/verification.md says how to read them.

Exit codes: 0 when as many die as must, 1 when fewer do, 2 wrong usage.
"""

import argparse
import json
import multiprocessing
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from blinkpy.sources import source_files
from blinkpy.verify.sim.simulation import simulate
from mutants.hunt import GROUPS, ROOT, Group, Verdict, copy_tree, hunt
from mutants.mutations import Mutant, mutants_of

EQUIVALENT = Path(__file__).parent / "equivalent.txt"
MUST_DIE, MUST_DIE_EACH = 0.95, 0.90  # shares of the mutants, of all and, with --all, of each module
HARD_LIMIT_S = 900  # of one mutant; its process is killed then


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--count", type=int, default=60, help="size of the sample [60]")
    made.add_argument("--all", action="store_true", help="every mutant")
    made.add_argument("--part", type=int, default=1, help="which share of them, from 1 [1]")
    made.add_argument("--parts", type=int, default=1, help="number of shares [1]")
    made.add_argument("--only", default="", help="files whose path contains this")
    made.add_argument("--seed", type=int, default=0, help="of the sample and of all that is random [a fresh one]")
    made.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="mutants at a time [all cores]")
    made.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after so long [no limit]")
    made.add_argument("--out", type=Path, help="write the result to this file, JSON")
    return made


def equivalent() -> dict[str, str]:
    """Mutants that change nothing that anybody could see, and why: lines `name # reason`."""
    pairs = [line.split(" # ", 1) for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    return {name.strip(): reason for name, reason in pairs}


def chosen(arguments: argparse.Namespace, draw: random.Random) -> list[tuple[Mutant, Group]]:
    """The mutants of this run, in random order."""
    known = equivalent()
    files = [(path, group) for group in GROUPS for path in source_files(group.parts) if arguments.only in str(path)]
    every = [(mutant, group) for path, group in files for mutant in mutants_of(path)]
    stale = set(known) - {mutant.name for mutant, _ in every}
    if stale and not arguments.only:
        raise SystemExit(f"{EQUIVALENT.name} has mutants that no rule makes any more:\n  " + "\n  ".join(sorted(stale)))
    every = [pair for pair in every if pair[0].name not in known]
    if arguments.all:
        every = every[arguments.part - 1 :: arguments.parts]
    draw.shuffle(every)
    return every if arguments.all else every[: arguments.count]


def _child(pipe: Connection, mutant: Mutant, group: Group, seed: int, tree: Path) -> None:
    sys.stdout = sys.stderr = open("/dev/null", "w")  # noqa: SIM115 - until the process ends
    pipe.send(hunt(mutant, group, seed, tree))


class Hunted(NamedTuple):
    """A mutant under way. tree: the copy of the sources that is its own meanwhile."""

    process: BaseProcess
    mutant: Mutant
    tree: Path
    began: float  # time.monotonic()


def _verdict(pipe: Connection, hunted: Hunted) -> Verdict:
    """What a child found; one that says nothing was noticed by its silence."""
    seconds = time.monotonic() - hunted.began
    if not pipe.poll():
        return Verdict(hunted.mutant, "deadline", "hangs", seconds)
    try:
        verdict: Verdict = pipe.recv()
    except EOFError:
        return Verdict(hunted.mutant, "crash", "its process died", seconds)
    return verdict


def hunt_all(mutants: list[tuple[Mutant, Group]], seed: int, jobs: int, seconds: float, folder: Path) -> list[Verdict]:
    """Hunt each mutant in a process of its own, `jobs` at a time: a mutant may hang, or leave its process in any state."""
    context, verdicts, started = multiprocessing.get_context("fork"), list[Verdict](), time.monotonic()
    trees = [folder / str(i) for i in range(jobs)]
    for tree in trees:
        copy_tree(tree)
    left, running = list(reversed(mutants)), dict[Connection, Hunted]()
    while left or running:
        late = time.monotonic() - started > seconds
        while left and trees and not late:
            (mutant, group), tree = left.pop(), trees.pop()
            pipe, theirs = context.Pipe()
            process = context.Process(target=_child, args=(theirs, mutant, group, seed, tree))
            process.start()
            theirs.close()
            running[pipe] = Hunted(process, mutant, tree, time.monotonic())
        if late and not running:
            break
        ready = [pipe for pipe in wait(list(running), timeout=5.0) if isinstance(pipe, Connection)]
        for pipe in ready or [p for p in running if time.monotonic() - running[p].began > HARD_LIMIT_S]:
            hunted = running.pop(pipe)
            verdict = _verdict(pipe, hunted)
            hunted.process.kill()
            hunted.process.join()
            trees.append(hunted.tree)
            verdicts.append(verdict)
            told = f"killed by {verdict.by}: {verdict.said}" if verdict.by else "SURVIVED"
            print(f"[{len(verdicts)}/{len(mutants)}] {verdict.mutant}\n  {told} ({verdict.seconds:.0f} s)", flush=True)
    return verdicts


def summary(verdicts: list[Verdict], seed: int) -> dict[str, Any]:
    """Figures of a run."""
    dead = Counter(v.mutant.module for v in verdicts if v.by)
    planted = Counter(v.mutant.module for v in verdicts)
    survivors = [{"name": v.mutant.name, "line": v.mutant.line, "rule": v.mutant.rule} for v in verdicts if not v.by]
    return {
        "seed": seed,
        "planted": len(verdicts),
        "killed": sum(dead.values()),
        "killers": dict(Counter(v.by for v in verdicts if v.by)),
        "modules": {module: [dead[module], planted[module]] for module in sorted(planted)},
        "survivors": sorted(survivors, key=lambda s: s["name"]),
    }


def main() -> int:
    arguments = parser().parse_args()
    seed = arguments.seed or secrets.randbelow(1 << 31)
    mutants = chosen(arguments, random.Random(seed))
    print(f"seed {seed}: {len(mutants)} mutants, {arguments.jobs} at a time, of {ROOT}", flush=True)
    simulate(1, 1, mode="python")  # compile the checks once, for all children
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        verdicts = hunt_all(mutants, seed, arguments.jobs, arguments.seconds, Path(folder))
    result = summary(verdicts, seed)
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\nsurvivors:" if result["survivors"] else "\nno survivors")
    for verdict in verdicts:
        if not verdict.by:
            print(f"{verdict.mutant}\n  {verdict.mutant.name}")
    killed = sum(bool(v.by) for v in verdicts)
    print(f"{killed} of {len(verdicts)} mutants were killed ({killed / max(1, len(verdicts)):.1%})")
    each = result["modules"] if arguments.all else {}
    weak = [name for name, (dead, planted) in each.items() if dead < MUST_DIE_EACH * planted]
    print("".join(f"fewer than {MUST_DIE_EACH:.0%} of {name}\n" for name in weak), end="")
    return 1 if weak or killed < MUST_DIE * len(verdicts) else 0


if __name__ == "__main__":
    raise SystemExit(main())
