"""The loop on the GPU, for its engine. The host launches the loop, and checks a few times per second whether it still runs. The
loop serves even while the host process is stopped. If the GPU faults, run() raises CudaError, and only the host writes the
queues' words.
"""

import time
from collections.abc import Callable

import numpy as np
import torch

from blinkpy.device.cuda import CudaError
from blinkpy.device.cuda.cuda_graphs import to_device, to_host
from blinkpy.engine.devices.device_contract import Setup
from blinkpy.engine.flight_recorder import PolicyFaultLog
from blinkpy.engine.link.pair_memory import QueueMemory
from blinkpy.engine.link.pair_placement import PlacedPairs, place_pairs
from blinkpy.engine.loop_graph import LoopGraph, StateCopies
from blinkpy.kernels.loop_kernels import device_arguments, loop_code
from blinkpy.kv.invariants.check_state import state_faults
from blinkpy.kv.state import Batch, Grammars, Requests, State
from blinkpy.models.gpu.gpu_step import GpuStep
from blinkpy.queues.layout import EngineViews
from blinkpy.recording.gpu_recording import GpuRecording
from blinkpy.transport.segment import Segment
from blinkpy.transport.verbs import RdmaOptions

WATCH_S = 0.05  # between two checks of the loop
MakeStep = Callable[[Batch, Requests, Grammars], GpuStep]


class GpuLoop:
    """A device_contract.Runner whose loop runs on the GPU.

    state: the scheduler's state, on the host.
    make_step: captures step graphs for batch, requests and grammars on the GPU, and returns them.
    graph_of, trace_rows: see LoopGraph.
    """

    faults: tuple[type[BaseException], ...] = (CudaError,)

    def __init__(
        self, setup: Setup, state: State, make_step: MakeStep, graph_of: np.ndarray, stream: torch.cuda.Stream, trace_rows: int
    ):
        self.setup = setup
        self.limits = setup.limits
        self.stream = stream
        self.pair_memory: QueueMemory | None = None
        self.placed_pairs: PlacedPairs | None = None
        self.loop: LoopGraph | None = None
        self._graph_of, self._trace_rows = graph_of, trace_rows
        state = setup.recorder.attach(state)
        memory = setup.recorder.memory
        self._recording = GpuRecording(memory, state) if memory is not None else None
        self.device_state: State = to_device(state) if self._recording is None else self._recording.state
        try:
            own = self.device_state
            self.step = make_step(own.batch, own.requests, own.grammars)
        except BaseException:
            self.close()
            raise

    def attach(self, segment: Segment) -> None:
        self.setup.report("compiling the scheduler and building the loop")
        queue_memory = self.setup.config.extension(RdmaOptions).queue_memory
        self.placed_pairs, self.pair_memory = place_pairs(segment, queue_memory)
        self._fault_log = PolicyFaultLog(self.setup.config.scheduler.policy, self.setup.policy, segment.views().engine)
        self.loop = self.build_loop(self.placed_pairs.device)

    def build_loop(self, queues: EngineViews) -> LoopGraph | None:
        """Build the loop over queues that the GPU can access, ready for launch."""
        kind, table = device_arguments(self.limits, queues, self.device_state)
        code = loop_code(self.setup.policy, self.limits, kind, len(table), torch.cuda.get_device_capability())
        copies, recording, memory = None, self._recording, self.setup.recorder.memory
        if recording is not None and memory is not None:
            copies = StateCopies(recording.capture(self.stream), memory.copy_every, recording.progress)
        keep = (queues, self.device_state, recording)
        graphs = self.step.graphs, self.step.cut_graphs
        return LoopGraph(code, table, *graphs, self._graph_of, self.stream, keep, self._trace_rows, copies)

    def run(self, budget_s: float) -> int:
        """See Runner.run. After budget_s seconds the loop ends, and the result is TIME_OVER."""
        if self.loop is None:
            raise RuntimeError("call attach() before run()")
        self.loop.launch(budget_s)
        while self.loop.running():
            time.sleep(WATCH_S)
            self._fault_log.look()
            if self._recording is not None:
                self._recording.fetch()
        return self.loop.result()

    def check(self) -> list[str]:
        return state_faults(self.limits, to_host(self.device_state))

    def close(self) -> None:
        """Free the loop and the mapping."""
        try:
            for part in (self.loop, self.placed_pairs, self._recording):
                if part is not None:
                    part.close()
        except CudaError:
            pass  # after a GPU fault every call fails; the driver frees everything at process exit
        self.loop = self.placed_pairs = self._recording = None
