"""The phases of a turn as separate kernels, for tests that run them outside of the loop."""

from collections.abc import Callable

import numpy as np

from blinkpy.device.portable import register_cuda
from blinkpy.device.tables import TableType
from blinkpy.kernels.loop_kernels import table_reader
from blinkpy.scheduler.cycle import Phases


def phase_kernels(phases: Phases, kind: TableType, words: int) -> tuple[Callable[..., None], Callable[..., None]]:
    """The Python functions of two kernels of one block, the halves of a turn: overlap(table, now) and schedule(table, result),
    result[0] = the turn's decision. kind, words: type and number of words of the table, see device_arguments."""
    cuda = register_cuda()
    read = table_reader(kind)
    run_overlap, run_schedule, run_publish = phases.overlap, phases.schedule, phases.publish
    int64 = np.int64

    def overlap(table, now):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        arguments = read(table, cuda.shared.array(words, int64), lane, lanes)
        run_overlap(arguments.limits, arguments.queues, arguments.state, now, lane, lanes)

    def schedule(table, result):
        lane, lanes = cuda.threadIdx.x, cuda.blockDim.x
        arguments = read(table, cuda.shared.array(words, int64), lane, lanes)
        bucket = run_schedule(arguments.limits, arguments.queues, arguments.state, lane, lanes)
        run_publish(arguments.limits, arguments.queues, arguments.state, lane, lanes)
        if lane == 0:
            result[0] = bucket

    return overlap, schedule
