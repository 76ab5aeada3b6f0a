"""A scheduling policy whose module breaks the GPU on request. Not a test.

A policy's file is the only user code that the engine of `blinkpy serve` runs, so a test uses it to run code in that process. Once
the file named by BLINKPY_TEST_FAULT exists, a kernel reads far outside of its memory.
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch

from blinkpy.engine.engine import Engine

unbroken_run = Engine.run


def rank(request: Any) -> int:
    return request.arrival_us


def run(engine: Engine, budget_s: float = 0) -> None:
    values, good = torch.zeros(8, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
    bad = good + (1 << 40)
    values[good].sum()  # loaded now: a later load would wait until the loop ends
    torch.cuda.synchronize()

    def wait() -> None:
        side, reported = torch.cuda.Stream(), Path(os.environ["BLINKPY_TEST_FAULT"])
        while not reported.exists():
            time.sleep(0.01)
        with torch.cuda.stream(side):
            values[bad]

    threading.Thread(target=wait, daemon=True).start()
    unbroken_run(engine, budget_s or 120)


setattr(Engine, "run", run)  # noqa: B010
