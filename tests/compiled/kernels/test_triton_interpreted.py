"""Runs tests/compiled/kernels/interpreted in a separate process, because TRITON_INTERPRET=1 must be set before Triton
is imported. Whole steps take most of the time, so they run in one process, and all other tests in another."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
NIGHTLY = os.environ.get("BLINKPY_PROFILE") == "nightly"
STEPS = HERE / "interpreted" / "test_gpu_step.py"


@pytest.mark.timeout(1220)
@pytest.mark.parametrize("part", ["steps", "kernels"])
def test_kernels_in_the_interpreter(part: str, seed: int, left_out: Callable[[str], None]) -> None:
    if not NIGHTLY:
        omitted = {
            "steps": "most steps of each kind",
            "kernels": "half of the cases of each test, most of those of experts and ranks, and one dtype of each case",
        }
        left_out(f"{omitted[part]}, with seed {seed}")
    environment = os.environ | {"TRITON_INTERPRET": "1", "BLINKPY_SEED": str(seed), "OMP_NUM_THREADS": "1"}
    if part == "kernels" and not NIGHTLY:
        environment["CASES_OF"] = "2"
    files = [str(STEPS)] if part == "steps" else [str(HERE / "interpreted"), f"--ignore={STEPS}"]
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", *files]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
