"""Runs tests/compiled/kernels/interpreted in a separate process, because TRITON_INTERPRET=1 must be set before Triton
is imported."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(1220)
def test_kernels_in_the_interpreter(seed: int, left_out: Callable[[str], None]) -> None:
    if os.environ.get("BLINKPY_PROFILE") != "nightly":
        parts = "half to five sixths of the steps of a kind, two thirds of the cases of experts"
        left_out(f"{parts}, and one dtype of each case of experts and attention, with seed {seed}")
    environment = os.environ | {"TRITON_INTERPRET": "1", "BLINKPY_SEED": str(seed), "OMP_NUM_THREADS": "1"}
    flags = ["-q", "--no-header", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *flags, str(HERE / "interpreted")]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[2], capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
