"""Runs tests/kernels/interpreted in one process with TRITON_INTERPRET=1, which must be set before Triton is
imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_kernels_in_the_interpreter(seed: int) -> None:
    environment = os.environ | {"TRITON_INTERPRET": "1", "BLINKPY_SEED": str(seed), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", str(HERE / "interpreted")]
    done = subprocess.run(command, env=environment, cwd=HERE.parents[1], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout[-8000:]}\n{done.stderr[-2000:]}"
    assert " passed" in done.stdout
