"""--device: which engine runs the model on this machine."""

from __future__ import annotations

from blinkpy.config import Config, ConfigError
from blinkpy.engine.engine import Engine
from blinkpy.engine.link.pair_memory import HOST
from blinkpy.packages import installed, require_packages
from blinkpy.progress import ProgressCallback
from blinkpy.transport.verbs import RdmaOptions

GPU_PACKAGES = ("triton", "cuda.bindings", "numba_cuda")


def make_engine(config: Config, report: ProgressCallback | None = None) -> Engine:
    """The engine that --device asks for; "auto" is the GPU where there is one and its packages are installed, else the CPU.

    Nothing is allocated yet. Raises ConfigError when the device can't be had.
    """
    device = config.engine.device
    if device == "auto":
        device = "cuda" if gpu_usable() else "cpu"
    check_queue_memory(config, device)
    if device != "cuda":
        if config.engine.control == "gpu":
            raise ConfigError(f"--control gpu needs --device cuda; the engine would run on {device}")
        return Engine(config.with_options({"device": device}), report)
    require_packages("--device cuda", *GPU_PACKAGES, extra="gpu")
    from blinkpy.engine.devices.cuda_device import CudaEngine

    return CudaEngine(config.with_options({"device": device}), report)


def check_queue_memory(config: Config, device: str) -> None:
    """Raise ConfigError when queues in GPU memory don't fit the other options."""
    option = f"--queue-memory {config.extension(RdmaOptions).queue_memory}"
    if config.extension(RdmaOptions).queue_memory == HOST:
        return
    if config.transport.transport != "rdma":
        raise ConfigError(f"{option} needs --transport rdma: front ends on this machine reach host memory alone")
    if device != "cuda":
        raise ConfigError(f"{option} needs --device cuda; the engine would run on {device}")
    if config.engine.control == "host":
        raise ConfigError(f"{option} needs --control gpu: a scheduler on the host reads its queues in host memory")


def gpu_usable() -> bool:
    """Whether torch sees a GPU and everything that drives it is installed."""
    if not all(installed(name) for name in ("torch", *GPU_PACKAGES)):
        return False
    import torch

    return torch.cuda.is_available()
