"""`make mutants`: plant mutants, and see which ones live.

A fresh random sample, or all of them with --all: at most one for each line and rule, or with --every each one. --part takes
one of --parts shares of these, for several machines or calls. --verdicts keeps what became of each mutant as it comes, and a call
with the same file goes on where the last one ended. --merge makes one result of such files. docs/verification.md has more.

Exit codes: 0 when as many die as must, 1 when fewer do, 2 wrong usage.
"""

import argparse
import json
import multiprocessing
import random
import secrets
import signal
import sys
import tempfile
import time
import zlib
from contextlib import closing
from pathlib import Path
from typing import Any

from blinkpy.sources import source_files
from blinkpy.verify.sim.simulation import simulate
from mutants.hunt import Hunt, Hunted
from mutants.mutations import mutants_of, thinned
from mutants.processes import Processes
from mutants.reach import digest, reach
from mutants.results import HOW, Header, Verdict, header, merged, read, result, write

EQUIVALENT = Path(__file__).parent / "equivalent.txt"
GROUPS = {
    "scheduler": ("scheduler",),
    "kv": ("kv",),
    "queues": ("queues",),
    "transport": ("transport",),
    "link": ("dpu/link",),
    "client": ("dpu/engine_link.py", "dpu/poll_pace.py"),
    "grammar": ("dpu/grammar/ebnf",),
    "sampling": ("kernels/sampling", "models/cpu/cpu_sampler.py"),
}
"""Folders and files of the package that have mutants. A new file in one of the folders joins by being there."""
MUST_DIE, MUST_DIE_EACH = 0.95, 0.90  # shares of the mutants, of all and, with --all, of each module


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--count", type=int, default=60, help="size of the sample [60]")
    made.add_argument("--all", action="store_true", help="no sample: one mutant for each line and rule")
    made.add_argument("--every", action="store_true", help="every mutant of a line, too")
    made.add_argument("--part", type=int, default=1, help="which share of them, from 1 [1]")
    made.add_argument("--parts", type=int, default=1, help="number of shares; they need the same --seed [1]")
    made.add_argument("--only", default="", help="files whose path contains this")
    made.add_argument("--seed", type=int, default=0, help="of the choice and of all that is random [a fresh one]")
    made.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="mutants at a time [all cores]")
    made.add_argument("--seconds", type=float, default=float("inf"), help="begin no mutant after so long [no limit]")
    made.add_argument("--verdicts", type=Path, help="keep the verdicts here, lines of JSON, and go on where they end")
    made.add_argument("--merge", type=Path, nargs="+", help="hunt nothing: the result of these files of verdicts")
    made.add_argument("--out", type=Path, help="write the result to this file, JSON")
    return made


def equivalent() -> dict[str, str]:
    """Mutants that change nothing that anybody could see, and why: lines `name # reason`."""
    pairs = [line.rsplit(" # ", 1) for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    return {name.strip(): reason for name, reason in pairs}


def chosen(arguments: argparse.Namespace, seed: int) -> list[Hunted]:
    """The mutants of this run, in random order."""
    known, names, every = equivalent(), set[str](), list[Hunted]()
    for group, parts in GROUPS.items():
        for path in source_files(parts):
            mutants = mutants_of(path) if arguments.only in str(path) else []
            names |= {mutant.name for mutant in mutants}
            living = [mutant for mutant in mutants if mutant.name not in known]
            every += [Hunted(mutant, group) for mutant in (living if arguments.every else thinned(living, seed))]
    if (stale := known.keys() - names) and not arguments.only:
        raise SystemExit(f"{EQUIVALENT.name} has mutants that no rule makes any more:\n  " + "\n  ".join(sorted(stale)))
    some = every[arguments.part - 1 :: arguments.parts]
    return random.Random(seed).sample(some, len(some) if arguments.all else min(arguments.count, len(some)))


def hunt_all(arguments: argparse.Namespace, seed: int) -> tuple[Header, list[Verdict]]:
    """Hunt what was chosen and has no verdict yet."""
    until, mutants = time.monotonic() + arguments.seconds, chosen(arguments, seed)
    words = "every mutant" if arguments.every else "one mutant for each line and rule"
    words = words if arguments.all else f"a sample of {words}"
    sources = f"{digest()} {zlib.crc32(EQUIVALENT.read_bytes()):08x}"
    told, verdicts, kept = header(seed, words, len(mutants), sources), list[Verdict](), arguments.verdicts
    if kept and kept.exists():
        told, verdicts = read(kept, told["run"])
    elif kept:
        kept.write_text(json.dumps(told) + "\n", encoding="utf-8")
    done = {verdict.name for verdict in verdicts}
    waiting = [hunted for hunted in mutants if hunted.mutant.name not in done]
    print(f"seed {seed}: {len(waiting)} of {len(mutants)} mutants, {arguments.jobs} at a time", flush=True)
    simulate(1, 1, mode="python")  # compile the checks once, for all children
    processes = Processes(arguments.jobs)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, closing(processes):
        traced = [path for parts in GROUPS.values() for path in source_files(parts)]
        hunt = Hunt(processes, reach(processes, traced, seed, folder), seed, folder)
        for verdict in hunt.verdicts(waiting, until):
            verdicts.append(verdict)
            print(f"[{len(verdicts)}/{len(mutants)}] {verdict}", flush=True)
            if kept:
                with open(kept, "a", encoding="utf-8") as file:
                    file.write(json.dumps(verdict._asdict()) + "\n")
    return told, verdicts


def judge(found: dict[str, Any]) -> int:
    """Print what a result comes to; the exit code."""
    print("\nsurvivors:" if found["survivors"] else "\nno survivors")
    for survivor in found["survivors"]:
        print(f"{survivor['change']}\n  line {survivor['line']}, {survivor['rule']}")
    planted, killed = found["planted"], found["killed"]
    (low, high), timeouts = found["interval"], found["how"][HOW[2]]
    print(f"{killed} of {planted} mutants were killed ({killed / max(1, planted):.1%}); {found['asked'] - planted} are left")
    how = ", ".join(f"{how} {count}" for how, count in found["how"].items())
    print(f"noticed by {how}; without timeouts {(killed - timeouts) / max(1, planted):.1%}")
    if found["asked"] > planted or _is_sample(found):
        print(f"of all, {low:.1%} to {high:.1%} with 95 % confidence")
    weak = [name for name, (dead, all_) in found["modules"].items() if dead < MUST_DIE_EACH * all_ and not _is_sample(found)]
    print("".join(f"fewer than {MUST_DIE_EACH:.0%} of {name}\n" for name in weak), end="")
    return 1 if weak or killed < MUST_DIE * planted else 0


def _is_sample(found: dict[str, Any]) -> bool:
    return found["run"]["chosen"].startswith("a sample")


def main() -> int:
    arguments = parser().parse_args()
    if not 1 <= arguments.part <= arguments.parts:
        parser().error("--part is from 1 to --parts")
    if arguments.parts > 1 and not (arguments.seed and arguments.all):
        parser().error("--parts are shares of --all, and need one --seed")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    seed = arguments.seed or secrets.randbelow(1 << 31) + 1
    found = result(*(merged(arguments.merge) if arguments.merge else hunt_all(arguments, seed)))
    if arguments.out:
        write(arguments.out, found)
    return judge(found)


if __name__ == "__main__":
    raise SystemExit(main())
