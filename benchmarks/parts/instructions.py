"""Instructions that a piece of Python takes, counted by Valgrind: other processes and the clock have no part in them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys

from benchmarks.common.harness import ROOT, UsageError

COUNTED = re.compile(r"I +refs: +([\d,]+)")
LIMIT_S = 600
# One thread, and the same order of everything in each run.
FIXED = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}


def can_count() -> bool:
    return shutil.which("valgrind") is not None


def instructions_each(program: str, few: int, many: int) -> float:
    """Instructions of one round, in user mode. program: Python text that does {rounds} rounds, from the repository's root.

    It is run with few rounds and with many: what start and end take is in both. Raises UsageError when Valgrind can't run it.
    """
    return (_instructions(program.format(rounds=many)) - _instructions(program.format(rounds=few))) / (many - few)


def _instructions(program: str) -> int:
    valgrind = ["valgrind", "--tool=cachegrind", "--cache-sim=no", "--cachegrind-out-file=/dev/null"]
    command = [*valgrind, sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | FIXED, capture_output=True, text=True, timeout=LIMIT_S)
    found = COUNTED.search(done.stderr)
    if done.returncode != 0 or found is None:
        raise UsageError(f"valgrind failed: {(done.stderr.strip() or 'no message').splitlines()[-1]}")
    return int(found[1].replace(",", ""))
