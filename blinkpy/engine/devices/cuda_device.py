"""--device cuda: an NVIDIA GPU, with the scheduler in a loop on it, or on the host (--control)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from blinkpy.config import STEP_TOKENS, TARGETS, Config, ConfigError
from blinkpy.engine.devices.device_contract import Runner, Setup
from blinkpy.engine.link.pair_memory import HOST
from blinkpy.packages import installed, missing_packages
from blinkpy.transport.verbs import RdmaOptions

if TYPE_CHECKING:
    import torch

    from blinkpy.engine.devices.gpu_loop import GpuLoop
    from blinkpy.kernels.sampling.sampler import SamplingCall
    from blinkpy.models.description.decoder_description import DecoderDescription
    from blinkpy.models.gpu.gpu_memory_plan import MemoryPlan
    from blinkpy.progress import TimedPhases

logger = logging.getLogger("blinkpy.engine")
PACKAGES = ("triton", "cuda.bindings", "numba_cuda")
OLDEST_CAPABILITY = (8, 0)  # the first with bfloat16 tensor cores
OLDEST_FP8 = (8, 9)  # FP8 conversions
OLDEST_DRIVER = 12080  # the first with SWITCH conditional nodes (CUDA 12.8)
MINIMUM_TOKENS = 2  # smallest useful KV cache, tokens


def gpu_usable() -> bool:
    """Whether torch sees a GPU and the GPU's packages are installed."""
    if not all(installed(name) for name in ("torch", *PACKAGES)):
        return False
    import torch

    return torch.cuda.is_available()


def gpu_problem(control: str) -> str:
    """Why no GPU is usable, for example too old a GPU or driver for --control; "" if a GPU is usable."""
    import torch
    from cuda.bindings import runtime

    if not torch.cuda.is_available():
        return "no usable NVIDIA GPU was found (torch.cuda.is_available() is false); --device cpu needs no GPU"
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    if capability < OLDEST_CAPABILITY:
        found, wanted = (".".join(map(str, c)) for c in (capability, OLDEST_CAPABILITY))
        return f"{name} has compute capability {found}; {wanted} or newer is needed"
    status, version = runtime.cudaDriverGetVersion()
    if int(status) != 0:
        return f"the version of the NVIDIA driver can't be read ({status})"
    if control != "host" and version < OLDEST_DRIVER:
        return (
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}; conditional graph nodes, which the loop "
            f"on the GPU is made of, need {OLDEST_DRIVER // 1000}.{OLDEST_DRIVER % 1000 // 10} (or use --control host)"
        )
    return ""


def fp8_problem(kv_cache_dtype: str) -> str:
    """Why this GPU does not support this --kv-cache-dtype; "" if it does."""
    import torch

    capability = torch.cuda.get_device_capability()
    if kv_cache_dtype == "auto" or capability >= OLDEST_FP8:
        return ""
    found, wanted = (".".join(map(str, c)) for c in (capability, OLDEST_FP8))
    return f"kv_cache_dtype {kv_cache_dtype} needs a GPU of compute capability {wanted} or newer, but this GPU has {found}"


def memory_bandwidth() -> float:
    """Peak bandwidth of the GPU's memory in bytes per second; 0 if the driver does not report it."""
    from cuda.bindings import runtime

    asked = runtime.cudaDeviceAttr
    answers = [
        runtime.cudaDeviceGetAttribute(what, 0)
        for what in (asked.cudaDevAttrMemoryClockRate, asked.cudaDevAttrGlobalMemoryBusWidth)
    ]
    kilohertz, bits = (0 if int(status) else int(value) for status, value in answers)
    return 2 * kilohertz * 1e3 * bits / 8


def check_pace(name: str, target_ms: int, model: DecoderDescription, itemsize: int, bandwidth: float) -> None:
    """Raise ConfigError if even the shortest step exceeds a target.

    name: name of the target's option.
    itemsize: bytes of a weight.
    bandwidth: bytes per second.
    """
    from blinkpy.models.weights.parts.weight_sizes import decode_weight_bytes

    read = decode_weight_bytes(model, itemsize, 1)
    if bandwidth and read / bandwidth * 1e3 > target_ms:
        raise ConfigError(
            f"{name} ({target_ms}) is shorter than one step: reading {read / 1e9:.1f} GB of weights takes "
            f"{read / bandwidth * 1e3:.1f} ms at this GPU's {bandwidth / 1e9:,.0f} GB/s"
        )


class CudaDevice:
    """The model on an NVIDIA GPU (a device_contract.Device). The parameters are for benchmarks.

    trace_rows: number of turns whose times the loop records.
    pdl: whether kernels are chained by programmatic dependent launch.
    loop: replaces GpuLoop.
    sample: replaces sample_tokens.
    gpus: numbers of the GPUs that share the model; empty: the first --tensor-parallel-size GPUs.
    """

    name, gpu, reads_weights, has_draft_layers = "cuda", True, True, True

    def __init__(
        self,
        *,
        trace_rows: int = 0,
        pdl: bool = True,
        loop: type[GpuLoop] | None = None,
        sample: Callable[[SamplingCall], None] | None = None,
        gpus: tuple[int, ...] = (),
    ):
        self.plan: MemoryPlan
        self._gpus = gpus
        self._trace_rows = trace_rows
        self._pdl = pdl
        self._loop = loop
        self._sample = sample

    def _gpus_of(self, config: Config) -> tuple[int, ...]:
        return self._gpus or tuple(range(config.engine.tensor_parallel_size))

    def auto_rank(self) -> int:
        return 2 if gpu_usable() else 0

    def step_tokens(self, config: Config, model: DecoderDescription) -> int:
        return STEP_TOKENS

    def unusable(self, config: Config) -> str:
        queue_memory = config.extension(RdmaOptions).queue_memory
        if queue_memory != HOST and config.engine.control == "host":
            return f"--queue-memory {queue_memory} needs --control gpu: a scheduler on the host reads its queues in host memory"
        if config.scheduler.step_groups > 1 and config.engine.control == "host":
            return "--step-groups needs --control gpu: a step that the host launches is not cut"
        missing = missing_packages("--device cuda", *PACKAGES, extra="gpu") or gpu_problem(config.engine.control)
        missing = missing or fp8_problem(config.cache.kv_cache_dtype)
        if len(gpus := self._gpus_of(config)) > 1 and not missing:
            from blinkpy.engine.devices.rank_parts import ranks_problem

            missing = ranks_problem(config, gpus)
        if missing:
            return missing
        from blinkpy.engine.link.pair_placement import placement_problem

        return placement_problem(queue_memory)

    def near_cores(self) -> frozenset[int]:
        from cuda.bindings import runtime

        from blinkpy.device.cuda import CudaError, check_cuda
        from blinkpy.engine.sizing import cores_near

        try:
            address: bytes = check_cuda(runtime.cudaDeviceGetPCIBusId(32, 0), "ask for the GPU's PCI address")
        except CudaError:  # serve without pinning
            return frozenset()
        return cores_near(address.split(b"\0")[0].decode().lower())

    def _dtype(self, config: Config, model: DecoderDescription) -> torch.dtype:
        import torch

        from blinkpy.models.weights.decoder_weights import choose_dtype

        dtype = choose_dtype(model, config.model.dtype, "cuda")
        # The kernels support two dtypes, and bfloat16 covers the range of float16.
        return torch.bfloat16 if dtype == torch.float16 else dtype

    def page_bytes(self, config: Config, model: DecoderDescription) -> int:
        from blinkpy.models.paged_cache import page_bytes_of

        return page_bytes_of(config, self._part(config, model), self._dtype(config, model).itemsize)

    def slots(self, config: Config, model: DecoderDescription) -> int:
        from blinkpy.models.gpu.gpu_memory_plan import slots_that_fit

        return slots_that_fit(self._plan(config, model), config, self._part(config, model), self._dtype(config, model).itemsize)

    def _part(self, config: Config, model: DecoderDescription) -> DecoderDescription:
        """The part of the model on each GPU. Raises ConfigError if the model can't be split."""
        from blinkpy.models.description.split import Share
        from blinkpy.models.weights.rank_checkpoint import rank_description

        return rank_description(model, Share(0, len(self._gpus_of(config))))

    def snapshots(self, config: Config, model: DecoderDescription) -> int:
        from blinkpy.models.gpu.gpu_memory_plan import snapshots_that_fit

        return snapshots_that_fit(self._plan(config, model), config, model, self._dtype(config, model).itemsize)

    def _plan(self, config: Config, model: DecoderDescription) -> MemoryPlan:
        import torch

        from blinkpy.engine.link.gpu_queues import pairs_length
        from blinkpy.engine.sizing import queue_sizes
        from blinkpy.models.gpu.gpu_memory_plan import plan_memory, require_kernels
        from blinkpy.queues.layout import QueueLayout

        gpus = self._gpus_of(config)
        require_kernels(part := self._part(config, model))
        free, total = min(map(torch.cuda.mem_get_info, gpus))
        asked, queue_memory = config.model.max_model_len, config.extension(RdmaOptions).queue_memory
        in_host_memory = queue_memory == HOST and len(gpus) == 1  # several ranks each have a copy of the queues
        queues = 0 if in_host_memory else pairs_length(QueueLayout(queue_sizes(config, asked or model.default_context)))
        itemsize, page_bytes = self._dtype(config, model).itemsize, self.page_bytes(config, model)
        return plan_memory(config, part, itemsize, page_bytes, free, total, queues, len(gpus))

    def cache_bytes(self, config: Config, model: DecoderDescription) -> int:
        from blinkpy.engine.sizing import pages_for

        itemsize = self._dtype(config, model).itemsize
        for name in TARGETS:
            if target_ms := getattr(config.scheduler, name):
                check_pace(name, target_ms, self._part(config, model), itemsize, memory_bandwidth())
        self.plan = self._plan(config, model)
        pages = config.cache.num_pages or pages_for(config.model.max_model_len or MINIMUM_TOKENS, config.cache.page_size)
        self.plan.require(pages * self.page_bytes(config, model))
        return self.plan.cache

    @contextlib.contextmanager
    def start_errors(self, report: TimedPhases) -> Iterator[None]:
        import torch

        from blinkpy.models.gpu.gpu_memory_plan import gib

        try:
            yield
        except torch.cuda.OutOfMemoryError as error:  # another process allocated memory after the plan was made
            free, total = torch.cuda.mem_get_info()
            raise ConfigError(
                f"out of GPU memory while {report.phase}: {gib(free)} of {gib(total)} are free; the plan was "
                f"{self.plan.describe()}; stop other processes on this GPU, or lower gpu_memory_utilization"
            ) from error

    def load(self, setup: Setup) -> Runner:
        from blinkpy.engine.devices.gpu_parts import GpuOptions, load_gpu

        self.plan.require(setup.sizes.num_pages * self.page_bytes(setup.config, setup.model))
        how = GpuOptions(self._dtype(setup.config, setup.model), self._pdl, self._sample)
        if len(gpus := self._gpus_of(setup.config)) > 1:
            from blinkpy.engine.devices.rank_loops import RankLoops
            from blinkpy.engine.devices.rank_parts import load_ranks

            return RankLoops(setup, load_ranks(setup, how, gpus), self._trace_rows)
        parts = load_gpu(setup, how)
        if setup.config.engine.control != "host":
            from blinkpy.engine.devices.gpu_loop import GpuLoop  # imported here, because --control host works without numba-cuda

            return (self._loop or GpuLoop)(setup, *parts, self._trace_rows)
        from blinkpy.engine.devices.host_loop import HostLoop
        from blinkpy.models.gpu.gpu_step import HostDrivenStep, pin_state

        state = setup.recorder.attach(pin_state(parts.state))
        return HostLoop(setup, state, HostDrivenStep(state, *parts[1:]))


DEVICE = CudaDevice
