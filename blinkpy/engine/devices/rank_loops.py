"""One model on several GPUs, for its engine: a loop on each, in one process.

The host launches the loops and checks a few times per second whether they still run, as for one GPU
(gpu_loop.py). Only rank 0 has the queues of the front ends and the flight recorder. The protocol of the ranks
is in scheduler/rank_exchange.py. A fault of any rank ends all ranks: the others stop waiting at the exchange's deadline.
"""

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from cuda.bindings import runtime

from blinkpy.device.cuda import CudaError, check_cuda
from blinkpy.device.cuda.cuda_graphs import to_host
from blinkpy.engine.devices.device_contract import Setup
from blinkpy.engine.devices.gpu_parts import GpuParts
from blinkpy.engine.flight_recorder import PolicyFaultLog
from blinkpy.engine.link.gpu_queues import MappedSegment, views_at
from blinkpy.engine.link.pair_memory import QueueMemory
from blinkpy.engine.loop_graph import LoopGraph, StateCopies
from blinkpy.kernels.all_reduce import Peers
from blinkpy.kernels.loop_kernels import device_arguments, loop_code
from blinkpy.kv.invariants.check_state import state_faults
from blinkpy.kv.state import State
from blinkpy.kv.state_memory import differences, snapshot
from blinkpy.queues.layout import EngineViews, engine_views
from blinkpy.recording.gpu_recording import GpuRecording, place_state
from blinkpy.recording.recording_memory import state_offsets
from blinkpy.scheduler import rank_exchange as X
from blinkpy.transport.segment import Segment

WATCH_S = 0.05  # between two checks of the loops
END_S = 5.0  # time for the other loops to end after the first
OF_OTHERS = ("control", "front", "sq", "sq_long", "cancel", "hashes", "prompt")  # words of the queues that the scheduler reads
UNKNOWN = 999  # cudaErrorUnknown


@contextlib.contextmanager
def on_gpu(number: int) -> Iterator[None]:
    """Make a GPU this thread's current device, for torch and for direct calls of the CUDA runtime."""
    before = torch.cuda.current_device()
    with torch.cuda.device(number):
        check_cuda(runtime.cudaSetDevice(number), f"select GPU {number}")
        try:
            yield
        finally:
            check_cuda(runtime.cudaSetDevice(before), f"select GPU {before}")


def open_peer_access(gpus: Sequence[int]) -> None:
    """Let kernels on each GPU access the memory of all GPUs. Raises CudaError."""
    opened = runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
    for one in gpus:
        with on_gpu(one):
            for other in gpus:
                if one != other:
                    torch.zeros(1, device="cuda").copy_(torch.zeros(1, device=f"cuda:{other}"))  # a copy opens it
                    status = runtime.cudaDeviceEnablePeerAccess(other, 0)[0]
                    if status == opened:
                        runtime.cudaGetLastError()
                    else:
                        check_cuda((status,), f"open the memory of GPU {other} for GPU {one}")


class Rank:
    """One rank: the scheduler's state, the step graphs and the loop on its GPU.

    setup: rank 0 attaches its recorder to the state.
    """

    def __init__(self, setup: Setup, parts: GpuParts, peers: Peers):
        self.parts, self.peers, self.number, self.gpu = parts, peers, peers.rank, parts.stream.device.index
        self.loop: LoopGraph | None = None
        self.recording: GpuRecording | None = None
        self.keep: object = None  # keeps the owners of the loop table's addresses alive
        state = setup.recorder.attach(parts.state) if self.number == 0 else parts.state
        offsets, size = state_offsets(state)
        if self.number == 0 and setup.recorder.memory is not None:
            self.recording = GpuRecording(setup.recorder.memory, state)
            self.state, block = self.recording.state, self.recording.block
        else:
            block = torch.zeros(size, dtype=torch.uint8, device="cuda")
            self.state = place_state(state, offsets, block)
        self.watched = block.view(torch.int64)
        self.own = torch.zeros(X.OWN_WORDS, dtype=torch.int64, device="cuda")
        self.step = parts.make_step(self.state.batch, self.state.requests, self.state.grammars)

    def fault(self) -> tuple[int, int]:
        """(fault of this rank or 0, the rank that it blames). Call it after the loop's end."""
        own, late_sum = self.own.tolist(), self.peers.fault.tolist()
        if own[X.FAULT]:
            return own[X.FAULT], own[X.FAULT_RANK]
        return (X.RANK_LATE, late_sum[1]) if late_sum[0] else (0, 0)


class RankLoops:
    """A device_contract.Runner whose loops run on several GPUs. parts: each rank's part, with its peers.

    Raises CudaError if a GPU fails.
    """

    faults: tuple[type[BaseException], ...] = (CudaError,)
    pair_memory: QueueMemory | None = None

    def __init__(self, setup: Setup, parts: list[tuple[GpuParts, Peers]], trace_rows: int):
        self.setup, self._trace_rows = setup, trace_rows
        self.ranks: list[Rank] = []
        self.segment: MappedSegment | None = None
        try:
            for own, peers in parts:
                with on_gpu(own.stream.device.index):
                    self.ranks.append(Rank(setup, own, peers))
        except BaseException:
            self.close()
            raise

    def attach(self, segment: Segment) -> None:
        self.setup.report("compiling the scheduler and building the loops")
        with on_gpu(self.ranks[0].gpu):
            self.segment = MappedSegment(segment.buffer, segment.layout)
        self._fault_log = PolicyFaultLog(self.setup.config.scheduler.policy, self.setup.policy, segment.views().engine)
        views, host = engine_views(segment.buffer, segment.layout), int(np.frombuffer(segment.buffer, np.uint8).ctypes.data)

        def in_memory_of(rank: Rank) -> EngineViews:
            """Private queues in a GPU's memory, with the segment's sizes."""
            with on_gpu(rank.gpu):
                memory = torch.zeros(len(segment.buffer), dtype=torch.uint8, device="cuda")
            return views_at(views, host, memory.data_ptr(), memory)

        mirror, source = in_memory_of(self.ranks[0]), self.segment.device
        shared = self._shared_words()
        for rank in self.ranks:
            outputs = source if rank.number == 0 else in_memory_of(rank)
            queues = outputs._replace(**{name: getattr(mirror, name) for name in OF_OTHERS})
            late_sum = rank.peers.fault
            own: Any = (rank.own, late_sum, len(rank.watched), rank.watched)
            exchange = X.Exchange(rank.number, len(self.ranks), *shared, *own)
            rank.keep = (queues, source, exchange, shared)
            with on_gpu(rank.gpu):
                rank.loop = self._build_loop(rank, queues, source, exchange)
        for rank in self.ranks:
            torch.cuda.synchronize(rank.gpu)

    def _shared_words(self) -> Any:
        """The words of the exchange in rank 0's memory, in the order of their fields."""
        sizes = 1, 2, 1, len(self.ranks) * X.APART, len(self.ranks) * X.APART
        with on_gpu(self.ranks[0].gpu):
            return tuple(torch.zeros(size, dtype=torch.int64, device="cuda") for size in sizes)

    def _build_loop(self, rank: Rank, queues: EngineViews, source: EngineViews, exchange: X.Exchange) -> LoopGraph:
        """Build a rank's loop, ready for launch, on the current GPU."""
        kind, table = device_arguments(self.setup.limits, queues, rank.state, (source, exchange))
        capability = torch.cuda.get_device_capability()
        code = loop_code(self.setup.policy, self.setup.limits, kind, len(table), capability, ranked=True)
        copies, memory = None, self.setup.recorder.memory
        if rank.recording is not None and memory is not None:
            copies = StateCopies(rank.recording.capture(rank.parts.stream), memory.copy_every, rank.recording.progress)
        graphs, parts = (rank.step.graphs, rank.step.cut_graphs), rank.parts
        keep = (rank.keep, rank.state, rank.recording, rank.watched)
        return LoopGraph(code, table, *graphs, parts.graph_of, parts.stream, keep, self._trace_rows, copies)

    def run(self, budget_s: float) -> int:
        """See Runner.run. After budget_s seconds the loops end, and the result is TIME_OVER."""
        loops = self._loops()
        for rank, loop in zip(self.ranks, loops, strict=True):
            with on_gpu(rank.gpu):
                loop.launch(budget_s)
        while all(self._running()):
            time.sleep(WATCH_S)
            self._fault_log.look()
            if self.ranks[0].recording is not None:
                with on_gpu(self.ranks[0].gpu):
                    self.ranks[0].recording.fetch()
        self._await_end()
        self._require_no_fault()
        with on_gpu(self.ranks[0].gpu):
            return loops[0].result()

    def _loops(self) -> list[LoopGraph]:
        loops = [rank.loop for rank in self.ranks if rank.loop is not None]
        if len(loops) < len(self.ranks):
            raise RuntimeError("call attach() before run()")
        return loops

    def _running(self) -> list[bool]:
        """For each rank, whether its loop runs. Raises CudaError if a loop ended with a GPU fault."""
        found = []
        for rank, loop in zip(self.ranks, self._loops(), strict=True):
            with on_gpu(rank.gpu):
                found.append(loop.running())
        return found

    def _await_end(self) -> None:
        """Wait until all loops have ended. Raises CudaError after END_S."""
        end = time.monotonic() + END_S
        while any(running := self._running()):
            if time.monotonic() > end:
                raise CudaError(UNKNOWN, "timeout", f"rank {running.index(True)} does not end its loop after the others")
            time.sleep(WATCH_S / 10)

    def _require_no_fault(self) -> None:
        """Raise CudaError if any rank has a fault."""
        faults = [rank.fault() for rank in self.ranks]
        for fault, other in faults:
            if fault == X.STATES_DIFFER:
                found = self._differences(other)
                raise CudaError(UNKNOWN, "states differ", f"rank {other} is not in the scheduler's state of rank 0: {found}")
        for number, (fault, other) in enumerate(faults):
            if fault == X.RANK_LATE:
                raise CudaError(UNKNOWN, "timeout", f"rank {other} did not answer rank {number} in time")

    def _differences(self, other: int) -> str:
        """The first array and index at which a rank's state differs from rank 0's state."""
        first, second = (snapshot(self._host_state(number)) for number in (0, other))
        offsets, _ = state_offsets(self.ranks[0].parts.state)
        found = differences({name: first[name] for name in offsets}, second)
        return found[0] if found else "no difference is left"

    def _host_state(self, number: int) -> State:
        with on_gpu(self.ranks[number].gpu):
            return to_host(self.ranks[number].state)

    def check(self) -> list[str]:
        return [
            f"rank {rank.number}: {fault}"
            for rank in self.ranks
            for fault in state_faults(self.setup.limits, self._host_state(rank.number))
        ]

    def close(self) -> None:
        """Free the loops and the mapping."""
        with contextlib.suppress(CudaError):  # after a fault every call fails; the driver frees everything when the process ends
            if all(rank.loop is not None for rank in self.ranks):
                self._await_end()
            for rank in self.ranks:
                with on_gpu(rank.gpu):
                    for part in (rank.loop, rank.recording):
                        if part is not None:
                            part.close()
            if self.segment is not None:
                with on_gpu(self.ranks[0].gpu):
                    self.segment.close()
        self.ranks, self.segment = [], None
