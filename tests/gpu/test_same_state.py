"""The scheduler compiled by njit, and as two CUDA kernels of 256 lanes: the same inputs leave the same state, bit for bit, step
by step. That plain Python does what njit does needs no GPU: tests/compiled/scheduler/test_executions.py.

Three front ends write random requests into the segment that the njit scheduler works on: cancels, slow readers, a crash and a
new claim, shared prefixes, and a page pool so small that pages are evicted and requests preempted; between such times there
are quiet ones, in which requests just decode. Before each step the front
ends' regions are copied to the segment of the kernel, so both see the same inputs at the same moment.
"""

import os
import secrets
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from blinkpy.device.array_trees import map_arrays
from blinkpy.dpu.link import queue_pair
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import InFlightRequest, NoRoomError, QueuePair
from blinkpy.kv.invariants.check_state import state_faults
from blinkpy.kv.limits import Limits, make_limits
from blinkpy.kv.state import FAST_PATH, ROWS, State
from blinkpy.kv.state_memory import differences, make_state, snapshot
from blinkpy.queues.header import EngineFacts
from blinkpy.queues.layout import QueueSizes
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.views import EngineViews
from blinkpy.queues.words import COUNTER, ENGINE_STATE, STATE_READY
from blinkpy.scheduler.cycle import make_phases
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.transport.segment import Segment, create_segment

STEPS = int(os.environ.get("BLINKPY_STEPS", "10000"))
PAIRS, VOCAB, LANES = 3, 50, 256
STEP_NS = 1_000_000
QUIET_STEPS = 100
ENGINE_WRITES = ("pair", "cq", "records", "engine")
FRONT_WRITES = ("front", "sq", "cancel", "hashes", "prompt", "control")


class KernelTwin:
    """The same scheduler on the GPU: its own state and segment in GPU memory."""

    def __init__(self, limits: Limits, state: State, queues: EngineViews):
        from numba import cuda
        from support.gpu.phase_kernels import phase_kernels

        from blinkpy.kernels.loop.loop_kernels import device_arguments

        self.state = map_arrays(lambda a: torch.from_numpy(a.copy()).cuda(), state)
        self.queues = map_arrays(lambda a: torch.from_numpy(np.ascontiguousarray(a)).cuda(), queues)
        # One memory, seen as int32 and as int64.
        self.queues = self.queues._replace(sq_long=self.queues.sq.view(torch.int64))
        kind, table = device_arguments(limits, self.queues, self.state)
        self._table, self._result = torch.from_numpy(table).cuda(), torch.zeros(1, dtype=torch.int64, device="cuda")
        self._ahead, self._decide = map(cuda.jit, phase_kernels(make_phases(), kind, len(table)))
        # As Numba arrays without a stream, so that a launch does not synchronize.
        self._arguments = [cuda.as_cuda_array(tensor.detach(), sync=False) for tensor in (self._table, self._result)]

    def step(self, queues: EngineViews, now_ns: int, sampled: np.ndarray, logprobs: np.ndarray) -> int:
        for name in FRONT_WRITES:
            getattr(self.queues, name).copy_(torch.from_numpy(np.ascontiguousarray(getattr(queues, name))))
        self.state.batch.sampled.copy_(torch.from_numpy(sampled))
        self.state.batch.logprobs.copy_(torch.from_numpy(logprobs))
        table, result = self._arguments
        self._ahead[1, LANES](table, np.int64(now_ns))
        self._decide[1, LANES](table, result)
        return int(self._result.item())

    def written(self) -> dict[str, np.ndarray]:
        state = map_arrays(lambda tensor: tensor.cpu().numpy(), self.state)
        return snapshot(state) | {name: getattr(self.queues, name).cpu().numpy() for name in ENGINE_WRITES}


class FrontEnds:
    """Random clients of the njit scheduler's segment. They act between two steps only."""

    def __init__(self, rng: np.random.Generator, segment: Segment, step: Callable[[], Any]):
        self.rng, self.segment, self.step = rng, segment, step
        self.pairs = [self.attach(i) for i in range(PAIRS)]
        self.live: list[set[InFlightRequest]] = [set() for _ in range(PAIRS)]
        self.prefixes = [rng.integers(0, VOCAB, 40).astype(np.int32) for _ in range(4)]
        self.finished = 0

    def attach(self, index: int) -> QueuePair:
        pair = QueuePair(attach_segment(self.segment.name, index, 1.0), engine_timeout_s=3600)
        # While it waits for the grant, the schedulers run: in its sleeps, so that nothing happens at the same time.
        with mock.patch.object(queue_pair, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda s: self.step())):
            pair.attach(10.0)
        return pair

    def act(self, quiet: bool) -> None:
        """What happens between two steps. quiet: nobody submits much, and all read at once."""
        rng = self.rng
        for index, pair in enumerate(self.pairs):
            if rng.random() < (0.02 if quiet else 0.3):
                self.submit(index, pair)
            if quiet or rng.random() < (0.05 if index == 0 else 0.6):  # the first one reads slowly
                for request, _, flags in pair.poll():
                    if flags & 0x0F:
                        self.live[index].discard(request)
                        self.finished += 1
            if self.live[index] and rng.random() < 0.02:
                pair.cancel(next(iter(self.live[index])))
            pair.heartbeat()
        if rng.random() < 0.001:  # a crash: nothing is closed in order, a successor claims the pair
            index = int(rng.integers(PAIRS))
            self.pairs[index].transport.close()
            self.live[index].clear()
            self.pairs[index] = self.attach(index)

    def submit(self, index: int, pair: QueuePair) -> None:
        rng = self.rng
        own = rng.integers(0, VOCAB, int(rng.integers(1, 30))).astype(np.int32)
        prefix = self.prefixes[rng.integers(4)][: int(rng.integers(0, 40))]
        sampling = RequestParameters(
            max_tokens=int(rng.integers(1, 40)),
            temperature=0.0,
            stop_ids=(3,),
            priority=int(rng.integers(3)),
            cache_salt=int(rng.integers(2)),
            logprobs=int(rng.integers(-1, 2)),
        )
        try:
            self.live[index].add(pair.submit(np.concatenate([prefix, own]), sampling))
        except NoRoomError:
            return


@pytest.mark.timeout(600)
def test_njit_and_the_kernels_leave_the_same_state(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = QueueSizes(PAIRS, 12, 16, 64, 2048, 256)
    facts = EngineFacts(1, 70001, 70003, 96, VOCAB, 8, 40, 16, 3_600_000)
    limits = make_limits(sizes, facts, max_num_batched_tokens=48)
    state = make_state(limits)
    segment = create_segment(f"same-{secrets.token_hex(6)}", sizes, facts)
    try:
        queues = segment.views()
        twin = KernelTwin(limits, state, queues)
        scheduler = Scheduler(limits, state)
        scheduler.attach(queues)
        queues.engine[ENGINE_STATE] = STATE_READY
        twin.queues.engine[ENGINE_STATE] = STATE_READY
        turns, steady = [0], [0]

        def step() -> None:
            turns[0] += 1
            now = turns[0] * STEP_NS
            sampled = rng.integers(0, VOCAB, limits.rows).astype(np.int32)
            logprobs = rng.integers(-(2**63), 2**63, state.batch.logprobs.shape)
            state.batch.sampled[:], state.batch.logprobs[:] = sampled, logprobs
            found = twin.step(queues, now, sampled, logprobs)
            assert scheduler.turn(now) == found
            steady[0] += int(state.counts[FAST_PATH])
            mine = snapshot(state) | {name: np.array(getattr(queues, name)) for name in ENGINE_WRITES}
            assert not differences(mine, twin.written()), f"step {turns[0]}: {differences(mine, twin.written())[:5]}"

        fronts = FrontEnds(rng, segment, step)
        for _ in range(STEPS):
            fronts.act(quiet=turns[0] // QUIET_STEPS % 2 == 1)
            step()
            if turns[0] % 500 == 0:
                assert not state_faults(limits, state)
        seen = {name: int(state.counters[i - COUNTER["requests_accepted"]]) for name, i in COUNTER.items()}
        print(f"{turns[0]} steps, {steady[0]} of them steady; {fronts.finished} finished")
        print(f"{seen}, last batch {int(state.batch.counts[ROWS])} rows")
        for name in ("requests_cancelled", "prefix_hit_tokens", "preemptions", "evictions", "reader_stalls"):
            assert seen[name] > 0 or STEPS < 2000, f"the inputs never caused {name}"
        assert STEPS < 2000 or STEPS // 100 < steady[0] < STEPS
    finally:
        segment.close()
