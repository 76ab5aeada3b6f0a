"""The phases of a turn as kernels of their own, for tests that run them outside of the loop."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from blinkpy.device.portable import register_cuda
from blinkpy.device.tables import TreeType
from blinkpy.kernels.loop.loop_arguments import table_reader
from blinkpy.scheduler.cycle import Phases


def phase_kernels(phases: Phases, kind: TreeType, words: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The Python functions of two kernels of one block, the halves of a turn: ahead(table, now) and decide(table, result),
    result[0] = what the turn decided. kind, words: type and number of words of the table, see device_arguments."""
    cuda = register_cuda()
    read = table_reader(kind)
    run_ahead, run_decide, run_report = phases.ahead, phases.decide, phases.report
    int64 = np.int64

    def ahead(table, now):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        arguments = read(table, cuda.shared.array(words, int64), lane, lanes)
        run_ahead(arguments.limits, arguments.queues, arguments.state, now, lane, lanes)

    def decide(table, result):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        arguments = read(table, cuda.shared.array(words, int64), lane, lanes)
        bucket = run_decide(arguments.limits, arguments.queues, arguments.state, lane, lanes)
        run_report(arguments.limits, arguments.queues, arguments.state, lane, lanes)
        if lane == 0:
            result[0] = bucket

    return ahead, decide
