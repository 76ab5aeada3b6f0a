"""The scheduler compiled by njit, and as two CUDA kernels of 256 lanes: the same inputs leave the same state, bit for bit, after
every step. In these storms every strided loop runs several tiles (tests/support/tile_storms.py).
tests/compiled/scheduler/test_executions.py compares plain Python and several lanes with njit, without a GPU.

Claim state/gpu: The loop on a GPU leaves the same state, too.
"""

import os
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.tile_storms import Mirror, run_storms

from blinkpy.device.portable import device
from blinkpy.kv.limits import Limits
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.policies import SHIPPED, RequestFields, fair, fcfs, priority, short_prompts, shortest_first

STEPS = int(os.environ.get("BLINKPY_STEPS", "10000"))  # of each shape of storm
SECONDS = float(os.environ.get("BLINKPY_SECONDS", "300"))  # after the first storm; then no further storm begins
TURNS, LANES = 300, 256

for _policy in SHIPPED.values():
    device(_policy)


def each_in_turn(request: RequestFields) -> int:
    """Every shipped policy in one kernel, which takes long to compile: each policy ranks the requests of other queue pairs."""
    if request.pair % 5 == 0:
        return fcfs(request)
    if request.pair % 5 == 1:
        return priority(request)
    if request.pair % 5 == 2:
        return fair(request)
    if request.pair % 5 == 3:
        return short_prompts(request)
    return shortest_first(request)


class KernelTwin:
    """The scheduler on the GPU: kernels, compiled at the first turn, over the mirrors of all storms."""

    def __init__(self) -> None:
        self._kernels: list[Callable[..., None]] = []

    def turn_on(self, limits: Limits, mirror: Mirror) -> Callable[[int], int]:
        from numba import cuda
        from support.gpu.phase_kernels import phase_kernels

        from blinkpy.kernels.loop_kernels import device_arguments

        kind, words = device_arguments(limits, mirror.queues, mirror.state)
        self._kernels = self._kernels or [cuda.jit(half) for half in phase_kernels(make_phases(each_in_turn), kind, len(words))]
        overlap, schedule = self._kernels
        tensors = torch.from_numpy(words).cuda(), torch.zeros(1, dtype=torch.int64, device="cuda")
        # As Numba arrays without a stream, so that a launch does not synchronize.
        table, result = (cuda.as_cuda_array(tensor.detach(), sync=False) for tensor in tensors)

        def turn(now_ns: int) -> int:
            overlap[1, LANES](table, np.int64(now_ns))
            schedule[1, LANES](table, result)
            return int(tensors[1].item())

        return turn


@pytest.mark.timeout(600)
@pytest.mark.whole_gpu  # with other tests on the GPU, too few storms fit its time
def test_njit_and_the_kernels_leave_the_same_state(seed: int) -> None:
    assert set(SHIPPED.values()) == {fair, fcfs, priority, short_prompts, shortest_first}
    seen = run_storms(LANES, seed, STEPS, TURNS, each_in_turn, KernelTwin().turn_on, "cuda", SECONDS)
    print(f"{seen.steps} steps; {dict(seen.most)}; {dict(seen.happened)}")
    assert STEPS < 2000 or not seen.missing(LANES)
