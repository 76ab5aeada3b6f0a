"""In every run of the tests, each side of each condition of the rules decides in some world."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_stored_worlds_decide_every_side_of_the_rules() -> None:
    """The oracle judges the scheduler on both sides of each condition, and when compared values are equal.

    Supports claim decisions/rules.
    """
    paths = os.pathsep.join(str(ROOT / name) for name in (".", "tests", "tools"))
    words = [sys.executable, "-m", "decisions", "--check"]
    done = subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
