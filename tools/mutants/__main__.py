"""`make mutants`: plant mutants, and report the survivors.

A run takes a random sample, or with --all all mutants: at most one for each line and rule, or with
--every all of them. With --resume, verdicts are stored in a ledger, and reused while the text of the
mutant's function is the same. So --all --resume may be interrupted at any time, and the next run continues. See
docs/verification.md.

`--part NAME` samples a part beyond the verified core (mutants.parts), with mutants by syntax and of meaning.

Exit codes: 0: enough mutants died; 1: too few; 2: wrong usage; 143: terminated.
"""

import argparse
import multiprocessing
import random
import secrets
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.common.harness import RESULTS
from blinkpy.sources import source_files
from mutants.collected import serve_tests
from mutants.hunt import Hunt, Hunted, Killers
from mutants.mutations import Mutant, mutants_of, thinned
from mutants.parts import PARTS
from mutants.processes import Processes
from mutants.reach import reach, test_files
from mutants.results import COUNTS, HOW, Ledger, Verdict, alone, interval, result, write
from mutants.session import Change
from mutants.stages import STAGES

EQUIVALENT = Path(__file__).parent / "equivalent.txt"
LEDGER = RESULTS / "mutants.jsonl"
OF_PARTS = RESULTS / "mutants_of_parts"  # a file for each part
FULL_SEED = 1602  # selects the mutants of a full run, so that all its parts use the same selection
GROUPS = {
    "scheduler": ("scheduler",),
    "kv": ("kv",),
    "queues": ("queues",),
    "transport": ("transport",),
    "link": ("dpu/link",),
    "client": ("dpu/engine_link.py", "dpu/token_feed.py"),
    "sampling": ("kernels/sampling", "models/cpu/cpu_sampler.py"),
}
"""Folders and files of the package that have mutants. A new file in one of the folders joins automatically."""
FORKS_EACH = 6  # concurrent children of a process that has collected all tests: it forks them one after another
KINDS = {"both": (False, True), "syntax": (False,), "meaning": (True,)}
MUST_DIE, MUST_DIE_EACH = 0.95, 0.90  # minimum killed shares of all mutants and, with --all, of each module's


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").splitlines()[0])
    made.add_argument("--count", type=int, default=60, help="size of the sample [60]")
    made.add_argument("--all", action="store_true", help="no sample: one mutant for each line and rule")
    made.add_argument("--every", action="store_true", help="every mutant of a line, too")
    made.add_argument("--only", default="", help="mutants whose name contains this, as in kv/limits.py")
    made.add_argument(
        "--resume", action="store_true", help="with --all: only mutants without a verdict in the ledger, and add verdicts"
    )
    made.add_argument("--again", action="store_true", help="with --resume: first hunt the survivors again")
    made.add_argument("--ledger", type=Path, default=LEDGER, help="file of verdicts [benchmarks/results/mutants.jsonl]")
    made.add_argument("--seed", type=int, default=0, help="of the choice and of all that is random [a fresh one]")
    made.add_argument("--jobs", type=int, default=multiprocessing.cpu_count(), help="mutants at a time [all cores]")
    made.add_argument("--part", choices=PARTS, help="a part beyond the verified core, instead of it: a sample")
    made.add_argument("--kind", choices=KINDS, default="both", help="with --part: by syntax, of meaning [both]")
    made.add_argument("--write", action="store_true", help=f"with --part: keep the result in {OF_PARTS.name}/NAME.json")
    made.add_argument("--seconds", type=float, default=float("inf"), help="end after so long [no limit]")
    return made


def equivalent() -> dict[str, str]:
    """Mutants without an observable effect, with reasons: lines `name # reason`."""
    pairs = [line.rsplit(" # ", 1) for line in EQUIVALENT.read_text().splitlines() if line and not line.startswith("#")]
    return {name.strip(): reason for name, reason in pairs}


def of_part(arguments: argparse.Namespace, seed: int) -> list[Hunted]:
    """A sample of a part's mutants in random order, half of each kind if both are wanted."""
    draw, found, kinds = random.Random(seed), list[Hunted](), KINDS[arguments.kind]
    for meaning in kinds:
        every = [
            mutant for path in source_files(PARTS[arguments.part].sources) for mutant in thinned(living(path, meaning), seed)
        ]
        every = [mutant for mutant in every if arguments.only in mutant.name]
        many = len(every) if arguments.all else min(arguments.count // len(kinds), len(every))
        found += [Hunted(mutant, arguments.part) for mutant in draw.sample(every, many)]
    draw.shuffle(found)
    return found


def living(path: Path, meaning: bool) -> list[Mutant]:
    """The mutants of a file, except those known to be equivalent."""
    known = equivalent()
    return [mutant for mutant in mutants_of(path, meaning) if mutant.name not in known]


def chosen(arguments: argparse.Namespace, seed: int) -> tuple[list[Hunted], Counter[str]]:
    """The mutants of this run, in random order, and the number of equivalent mutants in each file."""
    if arguments.part:
        return of_part(arguments, seed), Counter()
    known, stale, every, counts = equivalent(), set(equivalent()), list[Hunted](), Counter[str]()
    for group, parts in GROUPS.items():
        for path in source_files(parts):
            mutants = mutants_of(path)
            stale -= {mutant.name for mutant in mutants}
            mutants = [mutant for mutant in mutants if arguments.only in mutant.name]
            living = [mutant for mutant in mutants if mutant.name not in known]
            counts.update(mutant.file for mutant in mutants if mutant.name in known)
            every += [Hunted(mutant, group) for mutant in (living if arguments.every else thinned(living, seed))]
    for part in PARTS.values():
        for path in source_files(part.sources):
            stale -= {mutant.name for meaning in (False, True) for mutant in mutants_of(path, meaning)}
    if stale:
        raise SystemExit(f"{EQUIVALENT.name} has mutants that no rule makes any more:\n  " + "\n  ".join(sorted(stale)))
    many = len(every) if arguments.all else min(arguments.count, len(every))
    return random.Random(seed).sample(every, many), counts


def hunted_down(
    waiting: list[Hunted], killers: Killers, jobs: int, seed: int, until: float, part: str | None = None
) -> Iterator[Verdict]:
    """Hunt mutants.

    killers: killers of mutants in earlier runs.
    until: end time by time.monotonic().
    part: part with the mutants; None: the verified core.
    """
    tests = test_files() if part is None else PARTS[part].test_files()
    sources = list(GROUPS.values()) if part is None else [PARTS[part].sources]
    traced = [path for parts in sources for path in source_files(parts)]
    processes = Processes(jobs)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, closing(processes):
        reached = reach(processes, traced, seed, folder, tests, stages=part is None)
        collected = [str(Path(folder) / f"collected-{n}") for n in range(1 + (jobs - 1) // FORKS_EACH)]
        for path in collected:
            processes.serve(path, serve_tests, tests, seed, folder)
        for file in (file for file in traced if file.name == "page_allocator.py"):  # compile once, for all children
            for stage in STAGES.values():
                stage(Change("blinkpy.kv.page_allocator", file, file.read_text()), seed, 2.0)
        processes.served()
        yield from Hunt(processes, reached, killers, collected, seed, folder).verdicts(waiting, until)


def hunt_all(arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Hunt the chosen mutants without a verdict. Returns the figures of all verdicts."""
    until = time.monotonic() + arguments.seconds
    mutants, unchanging = chosen(arguments, seed)
    ledger, verdicts = Ledger(arguments.ledger), dict[str, Verdict]()
    for hunted in mutants if arguments.resume else []:
        if verdict := ledger.of(hunted.mutant, hunted.group):
            verdicts[verdict.name] = verdict
    waiting = [hunted for hunted in mutants if hunted.mutant.name not in verdicts]
    if arguments.again:
        waiting = [h for h in mutants if h.mutant.name in verdicts and not verdicts[h.mutant.name].by] + waiting
    print(f"seed {seed}: {len(waiting)} of {len(mutants)} mutants, {arguments.jobs} at a time", flush=True)
    if waiting and arguments.seconds > 0:
        known = Killers((hunted.mutant.name, by) for hunted in mutants if (by := ledger.killer(hunted.mutant)))
        for number, verdict in enumerate(hunted_down(waiting, known, arguments.jobs, seed, until, arguments.part), 1):
            verdicts[verdict.name] = verdict
            print(f"[{number}/{len(waiting)}] {verdict}", flush=True)
            if arguments.resume:
                ledger.add(verdict)
    return result([(hunted.mutant, hunted.group) for hunted in mutants], verdicts.values(), unchanging)


def judge(found: dict[str, Any], sample: bool) -> int:
    """Print the summary of a result. Returns the exit code."""
    print("\nsurvivors:" if found["survivors"] else "\nno survivors")
    print("".join(f"{survivor}\n" for survivor in found["survivors"]), end="")
    weak = []
    for file, counts in found["modules"].items() if not sample else ():
        killed, planted = counts["killed"], counts["killed"] + counts["survived"]
        if killed < MUST_DIE_EACH * planted:
            weak.append(f"fewer than {MUST_DIE_EACH:.0%} of {file}\n")
        print(f"{file}: {', '.join(f'{counts[name]} {name}' for name in COUNTS)}; {_shares(killed, planted)}")
    killed, planted = found["killed"], found["killed"] + found["survived"]
    print(f"{killed} of {planted} mutants were killed, {found['asked'] - planted} are left: {_shares(killed, planted)}")
    how = ", ".join(f"{how} {count}" for how, count in found["how"].items())
    print(f"noticed by {how}; without timeouts {(killed - found['how'][HOW[2]]) / max(1, planted):.1%}")
    print("".join(weak), end="")
    return 1 if weak or killed < MUST_DIE * planted else 0


def write_part(arguments: argparse.Namespace, seed: int, found: dict[str, Any]) -> None:
    """Write the result of a part, with its seed and the size of its sample."""
    kept = ("date", "commit", "machine", "software", "hunted", "killed", "survived", "interval", "how", "rules", "survivors")
    OF_PARTS.mkdir(exist_ok=True)
    write(OF_PARTS / f"{arguments.part}.json", {"seed": seed, "kind": arguments.kind} | {name: found[name] for name in kept})


def _shares(killed: int, planted: int) -> str:
    low, high = interval(killed, planted)
    return f"{killed / max(1, planted):.1%}, so {low:.0%} to {high:.0%} of such with 95 % confidence"


def main() -> int:
    arguments = parser().parse_args()
    if (arguments.resume and not arguments.all) or (arguments.again and not arguments.resume):
        parser().error("--again needs --resume, and that --all")
    if arguments.write and not arguments.part:
        parser().error("--write needs --part: results of the core come from --all --resume")
    if arguments.resume and (arguments.part or arguments.seed or arguments.every):
        parser().error("a full run has its own choice: --resume takes no --part, no --seed and no --every")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Hypothesis treats SystemExit as a failure of the tested function
    seed = FULL_SEED if arguments.resume else arguments.seed or secrets.randbelow(1 << 31) + 1
    adds = arguments.resume and arguments.seconds > 0
    try:
        with alone(arguments.ledger) if adds else nullcontext():
            found = hunt_all(arguments, seed)
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM
    if arguments.write:
        write_part(arguments, seed, found)
    if arguments.resume and not arguments.only:
        write(arguments.ledger.with_suffix(".json"), found)
    return judge(found, sample=not arguments.all)


if __name__ == "__main__":
    raise SystemExit(main())
