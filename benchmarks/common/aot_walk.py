"""Compiles the whole list of kernels in pieces. A journal has each compiled kernel, so that a later run continues.

    python -m benchmarks.common.aot_walk JOURNAL [--seconds N] [--model TEXT] [--kernel NAME]

The list is that of aot_compile.py: some 9,000 kernels, which take hours. First come kernels of which no other has the same flags,
tile and types; kernels that differ only in the sizes of a model follow. A kernel is compiled again if its source or Triton's
version changed. The command prints each kernel with a problem, and at the end the numbers of kernels that were compiled and that
are left. The exit status is 1 if a kernel of the list has a problem.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import triton

from benchmarks.common.aot_cases import case_launches
from benchmarks.common.aot_compile import Gate, Recorded, Variant, compiled_of, record_steps
from benchmarks.common.aot_models import all_forms, steps_of


class Walk(NamedTuple):
    """The result of a walk.

    compiled: kernels of the list that the journal has. left: the others.
    problems: of compiled kernels, by kernel and label.
    """

    compiled: int
    left: int
    problems: dict[str, list[str]]


def identity(recorded: Recorded) -> str:
    """A name from the kernel's source, constants, types and options, the same in each process."""
    text = f"{recorded.asked.key} {recorded.function.cache_key} {triton.__version__}"
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def rare_first(recorded: Iterable[Recorded]) -> list[Recorded]:
    """One kernel of each set of choices, then a second one of each, and so on."""
    seen = Counter[Any]()

    def place(kernel: Recorded) -> int:
        choices = kernel.asked.facts | kernel.asked.others
        seen[choices] += 1
        return seen[choices]

    return sorted(recorded, key=place)


def walk(
    recorded: Iterable[Recorded], journal: Path, seconds: float, compile_one: Callable[[Recorded], Variant] = compiled_of
) -> Walk:
    """Compile kernels that the journal lacks until the time is over, and append each to the journal.

    journal: one JSON object per line; an incomplete last line is compiled again.
    seconds: no kernel is begun later.
    """
    ends = time.monotonic() + seconds
    known: dict[str, tuple[str, list[str]]] = {}
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    for line in lines:
        if line.endswith("\n"):
            known.update(_entry(line))
    order = rare_first(recorded)
    with journal.open("a") as file:
        if lines and not lines[-1].endswith("\n"):
            file.write("\n")
        for kernel in order:
            if identity(kernel) not in known and time.monotonic() < ends:
                found = compile_one(kernel)
                words = {"id": identity(kernel), "kernel": found.kernel, "label": found.label, "problems": found.problems()}
                line = json.dumps(words | {"registers": found.registers, "stack_frame": found.stack_frame}) + "\n"
                file.write(line)
                file.flush()
                known.update(_entry(line))
    of_list = [known[identity(kernel)] for kernel in order if identity(kernel) in known]
    return Walk(len(of_list), len(order) - len(of_list), {label: problems for label, problems in of_list if problems})


def _entry(line: str) -> dict[str, tuple[str, list[str]]]:
    try:
        read = json.loads(line)
        return {read["id"]: (f"{read['kernel']} {read['label']}", read["problems"])}
    except (ValueError, KeyError, TypeError):  # cut off by an earlier run that was ended
        return {}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journal", type=Path, help="of the kernels that were compiled; made if it is missing")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no kernel is begun later")
    parser.add_argument("--model", default="", metavar="TEXT", help="only of models with this in their name")
    parser.add_argument("--kernel", default="", metavar="NAME", help="only this kernel, such as rms_norm")
    options = parser.parse_args()
    forms = [form for form in all_forms() if options.model.lower() in form.hub_id.lower()]
    if not forms:
        parser.error(f"no published model has {options.model!r} in its name")
    gate = Gate()
    for label, launch in [] if options.model else case_launches():
        gate.record(label, launch)
    record_steps(gate, (step for form in forms for step in steps_of(form)))
    kernels = [kernel for kernel in gate.recorded.values() if options.kernel in ("", kernel.function.__name__.lstrip("_"))]
    if not kernels:
        parser.error(f"no step launches a kernel {options.kernel!r}")
    found = walk(kernels, options.journal, options.seconds)
    problems = {variant.label: variant.problems() for variant in gate.refused} | found.problems
    for label, words in problems.items():
        print(label, *words, sep="\n    ")
    print(f"{found.compiled} kernels compiled, {len(problems)} problems, {found.left} kernels left", file=sys.stderr)
    return int(bool(problems))


if __name__ == "__main__":
    raise SystemExit(main())
