"""What a user reads when a GPU's memory runs out after the plan was made: another process took what was free then."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from blinkpy.config import ConfigError
from blinkpy.models.gpu.gpu_memory_plan import MemoryPlan, gib
from blinkpy.progress import TimedPhases


@contextlib.contextmanager
def memory_errors(plan: MemoryPlan, report: TimedPhases) -> Iterator[None]:
    """Raise ConfigError where torch finds no memory within the block. report: has the phase in which that happens."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info()
        raise ConfigError(
            f"out of GPU memory while {report.phase}: {gib(free)} of {gib(total)} are free, and the plan was "
            f"{plan.describe()}; stop what else uses this GPU, or lower gpu_memory_utilization"
        ) from error
