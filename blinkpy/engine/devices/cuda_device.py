"""The engine on a GPU: everything that happens on the host before the loop runs, and the watch over it afterwards.

Order of a start: check the GPU, read the model, plan the memory, load weights, allocate, compile and load every kernel, capture
the step graphs, map the queues, instantiate the loop, launch. From then on the host only looks, a few times a second,
whether the loop still runs; it may as well be stopped. What it adds while it runs: when the GPU faults, it says so in the
control words, and front ends end their streams with an error.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from cuda.bindings import runtime

from blinkpy.config import Config, ConfigError
from blinkpy.device.cuda.cuda_calls import CudaError
from blinkpy.device.cuda.gpu_memory_views import to_device, to_host
from blinkpy.engine.engine import Engine
from blinkpy.engine.link.pair_placement import PlacedPairs, check_pair_memory, gpu_bytes, place_pairs
from blinkpy.engine.sizing import engine_sizes, pages_for, queue_sizes
from blinkpy.kernels.linear.linear_config import LinearTable
from blinkpy.kv import state as S
from blinkpy.kv.integrity import check_integrity
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import State
from blinkpy.kv.state_memory import make_state
from blinkpy.models.description.decoder_description import Architecture, read_architecture
from blinkpy.models.gpu.gpu_memory_plan import MemoryPlan, gib, plan_memory
from blinkpy.models.gpu.gpu_step import GpuStep
from blinkpy.models.gpu.host_driven_step import HostDrivenStep, device_side, pin_state
from blinkpy.models.gpu.step_shapes import bucket_shapes, step_shapes
from blinkpy.models.paged_cache import PagedCache, kv_bytes_per_page
from blinkpy.models.weights.decoder_weights import Weights, choose_dtype, dummy_weights, load_weights
from blinkpy.models.weights.model_folder import resolve_model
from blinkpy.progress import Report
from blinkpy.queues.layout import QueueLayout
from blinkpy.queues.views import EngineViews
from blinkpy.queues.words import ENGINE_STATE, STATE_READY, STATE_STOPPED
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.policy_check.guard import vetted_policy
from blinkpy.verify.recording.gpu_recording import GpuRecording

if TYPE_CHECKING:
    from blinkpy.engine.loop_graph import Executive

WATCH_S = 0.05  # between two looks at the loop
OLDEST_CAPABILITY = (8, 0)  # bfloat16 on the matrix units
OLDEST_DRIVER = 12080  # SWITCH conditional nodes came with CUDA 12.8
MINIMUM_TOKENS = 2  # tokens that an engine must be able to hold


def check_gpu(control: str) -> str:
    """The GPU's name. Raises ConfigError when there is none, or it or its driver is too old for what was asked."""
    if not torch.cuda.is_available():
        raise ConfigError("no usable NVIDIA GPU was found (torch.cuda.is_available() is false); --device cpu runs without one")
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        found, wanted = (".".join(map(str, c)) for c in (capability, OLDEST_CAPABILITY))
        raise ConfigError(f"{name} has compute capability {found}; {wanted} or newer is needed")
    status, version = runtime.cudaDriverGetVersion()
    if int(status) != 0:
        raise ConfigError(f"the version of the NVIDIA driver can't be read ({status})")
    if control == "gpu" and version < OLDEST_DRIVER:
        raise ConfigError(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}; conditional graph nodes, which the loop "
            f"on the GPU is made of, need {OLDEST_DRIVER // 1000}.{OLDEST_DRIVER % 1000 // 10} (or use --control host)"
        )
    return name


class CudaEngine(Engine):
    """One engine on one GPU. start(), run(), stop() and close() as of Engine; --control says who runs the scheduler.

    trace_rows: iterations whose times the loop records, for benchmarks. pdl: chain kernels by programmatic dependent launch.
    """

    on_gpu = True

    def __init__(self, config: Config, on_progress: Report | None = None, *, trace_rows: int = 0, pdl: bool = True):
        super().__init__(config, on_progress)
        self.control = "host" if config.engine.control == "host" else "gpu"
        self.limits: Limits
        self.device_state: State
        self.executive: Executive | None = None
        self.plan: MemoryPlan
        self.timings: dict[str, float] = {}
        self._trace_rows, self._pdl = trace_rows, pdl
        self.placed_pairs: PlacedPairs | None = None
        self._gpu_recording: GpuRecording | None = None
        self._phase_began = time.monotonic()
        self._phase = ""

    # ---- start ----------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See Engine.start. Raises ConfigError also when the model does not fit, before anything is loaded."""
        try:
            self._start()
        except torch.cuda.OutOfMemoryError as error:  # another process took what was free when the plan was made
            free, total = torch.cuda.mem_get_info()
            raise ConfigError(
                f"out of GPU memory while {self._phase}: {gib(free)} of {gib(total)} are free, and the plan was "
                f"{self.plan.describe()}; stop what else uses this GPU, or lower gpu_memory_utilization"
            ) from error

    def _start(self) -> None:
        config = self.config
        policy = vetted_policy(config.scheduler.policy)
        self._enter("reading the model")
        gpu = check_gpu(self.control)
        check_pair_memory(config.transport.queue_memory)
        folder = resolve_model(config.model.model, weights=config.model.load_format != "dummy", tokenizer=False)
        a = read_architecture(folder)
        config = self._settle(a)
        dtype = choose_dtype(a, config.model.dtype, "cuda")
        if dtype == torch.float16:
            dtype = torch.bfloat16  # the kernels know two types; its range holds what float16 does
        page_bytes = kv_bytes_per_page(a, config.cache.page_size, dtype)
        self.plan = self._plan(a, dtype, page_bytes)
        self.sizes = engine_sizes(config, a.max_position, page_bytes, self.plan.cache)
        self.plan.require(self.sizes.num_pages * page_bytes)
        facts = self._facts(a)

        weights = self._load(folder, a, dtype)
        self._enter("allocating the KV cache and the scheduler's state")
        cache = PagedCache(a, self.sizes.num_pages, self.sizes.page_size, dtype, "cuda")
        buckets = bucket_shapes(self.sizes.max_num_seqs, self.sizes.max_num_batched_tokens)
        self.limits = self._make_limits(facts)
        self.state = make_state(self.limits, buckets)
        stream = torch.cuda.Stream()
        shapes, graph_of = step_shapes(buckets)
        if self.control == "host":
            self.state = self._recorded(self.limits, pin_state(self.state), policy)
            batch, requests = device_side(self.state)
        else:
            self.state = self._recorded(self.limits, self.state, policy)
            if self._recording is not None:
                self._gpu_recording = GpuRecording(self._recording, self.state)
                self.device_state = self._gpu_recording.state
            else:
                self.device_state = to_device(self.state)
            batch, requests = self.device_state.batch, self.device_state.requests
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        table, length = LinearTable.load(gpu), self.sizes.max_model_len
        step = GpuStep(a, weights, cache, batch, requests, shapes, length, table, self._pdl, processors)
        self._enter("compiling kernels and capturing steps")
        step.capture(stream, lambda share: self._progress("compiling kernels and capturing steps", share, 1))
        self._gpu_step = step
        self._create_segment(facts)
        self.views = self.segment.views()
        if self.control == "host":
            self._enter("compiling the scheduler")
            self._step = HostDrivenStep(step, graph_of, self.state, batch, requests, self.sizes.page_size, stream)
            self._scheduler = Scheduler(self.limits, self.state, policy)
            self._scheduler.attach(self.views)
            self._scheduler.turn(time.monotonic_ns())
        else:
            self._enter("compiling the scheduler and building the loop")
            self.placed_pairs, self.pair_memory = place_pairs(self.segment, config.transport.queue_memory)
            self.executive = self._build_executive(policy, self.placed_pairs.device, graph_of, stream)
        self.views.engine[ENGINE_STATE] = STATE_READY
        self._enter("")

    def _build_executive(self, policy: Policy, queues: EngineViews, graph_of: np.ndarray, stream: torch.cuda.Stream) -> Executive:
        # Imported here: --control host works without numba-cuda.
        from blinkpy.engine.loop_graph import Copies, Executive, StepTable
        from blinkpy.engine.rehearsal import rehearsal_world
        from blinkpy.kernels.loop.loop_arguments import device_arguments
        from blinkpy.kernels.loop.loop_code import loop_code

        kind, table = device_arguments(self.limits, queues, self.device_state)
        code = loop_code(policy, kind, len(table), torch.cuda.get_device_capability())
        steps = StepTable(tuple(self._gpu_step.graphs), graph_of)
        copies, recording = None, self._gpu_recording
        if recording is not None and self._recording is not None:
            copies = Copies(recording.capture(stream), self._recording.copy_every, recording.progress)
        limits, state = rehearsal_world(self.limits)
        rehearsed = to_device(state)
        _, rehearsal = device_arguments(limits, queues, rehearsed)
        keep = (queues, self.device_state, recording, rehearsed)
        return Executive(code, table, steps, stream, keep, self._trace_rows, copies=copies, rehearsal=rehearsal)

    def _plan(self, a: Architecture, dtype: torch.dtype, page_bytes: int) -> MemoryPlan:
        config, (free, total) = self.config, torch.cuda.mem_get_info()
        asked = config.model.max_model_len
        queues = gpu_bytes(QueueLayout(queue_sizes(config, asked or a.max_position)), config.transport.queue_memory)
        plan = plan_memory(config, a, dtype.itemsize, page_bytes, free, total, queues)
        pages = config.cache.num_pages or pages_for(asked or MINIMUM_TOKENS, config.cache.page_size)
        plan.require(pages * page_bytes)
        return plan

    def _load(self, folder: Path, a: Architecture, dtype: torch.dtype) -> Weights:
        self._enter("loading weights")
        if self.config.model.load_format == "dummy":
            weights = dummy_weights(a, self.config.model.seed, dtype, "cuda")
        else:
            weights = load_weights(a, folder, dtype, "cuda", lambda share: self._progress("loading weights", share, 1))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return weights

    def _enter(self, phase: str) -> None:
        """Begin a phase of the start; the time of the last one is kept."""
        now = time.monotonic()
        if self._phase:
            self.timings[self._phase] = now - self._phase_began
        self._phase, self._phase_began = phase, now
        if phase:
            self._progress(phase)

    # ---- the time after -------------------------------------------------------------------------------------------------

    def run(self, budget_s: float = 0) -> None:
        """Launch the loop and watch it until it ends: stopped, drained, or by a fault, which is announced and raised.

        budget_s: seconds after which a loop on the GPU ends by itself, for tests and benchmarks; 0: never.
        """
        executive = self.executive
        if executive is None:
            super().run()
            return
        try:
            executive.launch(budget_s)
            while executive.running():
                time.sleep(WATCH_S)
                if self._gpu_recording is not None:
                    self._gpu_recording.fetch()
            result = executive.result()
        except CudaError as error:
            # The GPU writes nothing any more: its words are the host's now.
            self._announce_fault(error)
            raise
        self.views.engine[ENGINE_STATE] = STATE_STOPPED
        if result == S.DRAINED and self.config.engine.check_integrity != "never":
            problems = check_integrity(self.limits, to_host(self.device_state))
            if problems:
                raise RuntimeError("the scheduler's state is broken: " + "; ".join(problems[:5]))

    def close(self) -> None:
        """Free the loop and the mapping, and remove the segment. After run() has returned or raised."""
        try:
            if self.executive is not None:
                self.executive.close()
                self.executive = None
            if self.placed_pairs is not None:
                self.placed_pairs.close()
                self.placed_pairs = None
            if self._gpu_recording is not None:
                self._gpu_recording.close()
                self._gpu_recording = None
        except CudaError:
            # After a fault every call fails; the driver frees all of it with the process.
            self.executive = self.placed_pairs = self._gpu_recording = None
        super().close()
