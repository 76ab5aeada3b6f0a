"""The interface between an engine and the device that runs its model.

A device is a file NAME_device.py in this folder with its class as `DEVICE`; --device selects it. The files
are light: torch, Numba and CUDA are imported when a device computes its sizes or loads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from blinkpy.config import DEFAULT_SLOTS, STEP_TOKENS, Config
from blinkpy.engine.link.pair_memory import HOST, QueueMemory
from blinkpy.models.recurrent_states import settled_snapshots
from blinkpy.packages import modules_of
from blinkpy.transport.segment import Segment
from blinkpy.transport.verbs import RdmaOptions

if TYPE_CHECKING:
    import torch

    from blinkpy.engine.flight_recorder import FlightRecorder
    from blinkpy.engine.sizing import EngineSizes
    from blinkpy.kv.limits import Limits
    from blinkpy.kv.state import State
    from blinkpy.kv.token_bytes import TokenBytes
    from blinkpy.models.description.decoder_description import DecoderDescription
    from blinkpy.models.description.split import Share
    from blinkpy.models.weights.array_weights import ArrayWeights
    from blinkpy.models.weights.decoder_weights import Weights
    from blinkpy.progress import TimedPhases
    from blinkpy.scheduler.policies import Policy

SUFFIX = "_device"


class BrokenStateError(RuntimeError):
    """The scheduler's state violates an invariant. faults: descriptions."""

    def __init__(self, faults: list[str]):
        super().__init__("the scheduler's state is broken: " + "; ".join(faults))
        self.faults = faults


def require_integrity(faults: list[str]) -> None:
    """Raise BrokenStateError if there are faults. faults: the result of Runner.check()."""
    if faults:
        raise BrokenStateError(faults)


@dataclass(frozen=True)
class Setup:
    """The settings of an engine when its device loads.

    folder: the folder of the model that `model` describes.
    tokens: bytes of each token, if requests may have grammars.
    report: callback for the phases of the start.
    """

    config: Config
    folder: Path
    model: DecoderDescription
    sizes: EngineSizes
    limits: Limits
    tokens: TokenBytes | None
    policy: Policy
    recorder: FlightRecorder
    report: TimedPhases

    def make_state(self, buckets: Sequence[tuple[int, int]] = ()) -> State:
        """The scheduler's memory: see blinkpy.kv.state_memory.make_state."""
        from blinkpy.kv.state_memory import make_state

        return make_state(self.limits, buckets, checked=self.config.engine.check_integrity == "always", tokens=self.tokens)

    def load_weights(self, dtype: torch.dtype, device: str, share: Share | None = None) -> Weights:
        """The model's weights, or a rank's share of them, with those of its draft head; random ones for --load-format dummy."""
        from blinkpy.models.description.split import WHOLE
        from blinkpy.models.weights.head_loader import load_head
        from blinkpy.models.weights.weight_loader import dummy_weights, load_weights

        self.report("loading weights")
        dummy = self.config.model.load_format == "dummy"
        if dummy:
            weights = dummy_weights(self.model, self.config.model.seed, dtype, device, share=share or WHOLE)
        else:
            weights = load_weights(
                self.model, self.folder, dtype, device, lambda done: self.report("loading weights", done, 1), share or WHOLE
            )
        if self.model.draft_head is not None:
            load_head(
                self.model.draft_head, self.config.model.speculative_model, weights, self.config.model.seed if dummy else None
            )
        return weights

    def load_array_weights(self) -> ArrayWeights:
        """The model's weights as float32 NumPy arrays."""
        from blinkpy.models.weights.array_weights import dummy_array_weights, load_array_weights

        self.report("loading weights")
        if self.config.model.load_format == "dummy":
            return dummy_array_weights(self.model, self.config.model.seed)
        return load_array_weights(self.model, self.folder, lambda share: self.report("loading weights", share, 1))


class Runner(Protocol):
    """A loaded model and its scheduler, which serve the queue pairs of one segment."""

    faults: tuple[type[BaseException], ...]
    """Exceptions of run() after which no party writes the engine's words."""
    pair_memory: QueueMemory | None
    """The memory of the queue pairs for a network card, if not the segment. After attach()."""

    def attach(self, segment: Segment) -> None:
        """Prepare to serve a segment, including the remaining compilation. Raises ConfigError."""

    def run(self, budget_s: float) -> int:
        """Serve until a control word ends it. Returns STOPPED or DRAINED, or another result when budget_s seconds are over.
        budget_s 0: no limit.
        """

    def check(self) -> list[str]:
        """Descriptions of faults in the scheduler's state; empty if the state is valid. Call it only while run() does not run."""

    def close(self) -> None:
        """Free all resources. Call it only while run() does not run."""


class Device(Protocol):
    """One way to run a model. An instance serves one engine.

    gpu: whether it uses the step sizes of a GPU.
    reads_weights: whether it needs the model's weights.
    has_draft_layers: whether its steps can run a draft layer or an EAGLE-3 head.
    """

    name: str
    gpu: bool
    reads_weights: bool
    has_draft_layers: bool

    def auto_rank(self) -> int:
        """The rank for --device auto, which takes the highest; 0: never chosen."""

    def unusable(self, config: Config) -> str:
        """Why the device is unusable with these options on this machine; "" if it is usable."""

    def step_tokens(self, config: Config, model: DecoderDescription) -> int:
        """Default of --max-num-batched-tokens if steps have one size and no sequence needs more."""

    def slots(self, config: Config, model: DecoderDescription) -> int:
        """Default of --slots. With recurrent layers, each slot holds a recurrent state."""

    def snapshots(self, config: Config, model: DecoderDescription) -> int:
        """Number of state snapshots: --state-snapshots or its default. 0 without recurrent layers or prefix caching, or if no
        snapshot fits.
        """

    def page_bytes(self, config: Config, model: DecoderDescription) -> int:
        """Bytes of one page of the KV cache, keys and values of all layers."""

    def cache_bytes(self, config: Config, model: DecoderDescription) -> int:
        """Bytes available for the KV cache. Raises ConfigError if the model does not fit."""

    def start_errors(self, report: TimedPhases) -> AbstractContextManager[object]:
        """A context manager that converts errors during the start to ConfigError if the user can correct them."""

    def load(self, setup: Setup) -> Runner:
        """Load the model and make the scheduler's state. Raises ConfigError."""

    def near_cores(self) -> frozenset[int]:
        """Cores of the NUMA node for the queue memory; empty if any node is suitable. Call it after load()."""


class HostDevice:
    """Base class of the devices without a GPU."""

    name: str
    gpu = has_draft_layers = False
    start_errors = nullcontext

    def step_tokens(self, config: Config, model: DecoderDescription) -> int:
        return STEP_TOKENS

    def slots(self, config: Config, model: DecoderDescription) -> int:
        return DEFAULT_SLOTS

    def snapshots(self, config: Config, model: DecoderDescription) -> int:
        return settled_snapshots(config, model, 4, 1 << 62)

    def near_cores(self) -> frozenset[int]:
        return frozenset()

    def unusable(self, config: Config) -> str:
        queue_memory = config.extension(RdmaOptions).queue_memory
        if queue_memory != HOST:
            return f"--queue-memory {queue_memory} needs --device cuda; the engine would run on {self.name}"
        if config.engine.control == "gpu":
            return f"--control gpu needs --device cuda; the engine would run on {self.name}"
        if (ranks := config.engine.tensor_parallel_size) > 1:
            return f"--tensor-parallel-size {ranks} needs --device cuda; the engine would run on {self.name}"
        return ""


def device_kinds() -> dict[str, Callable[[], Device]]:
    """The classes of all devices by their names."""
    modules = modules_of("blinkpy.engine.devices", f"*{SUFFIX}", "DEVICE")
    return {name.removesuffix(SUFFIX): module.DEVICE for name, module in modules.items()}


def choose_device(name: str) -> Device:
    """The device with this name, or for "auto" the device with the highest rank on this machine."""
    devices = {each: kind() for each, kind in device_kinds().items()}
    return devices[name] if name != "auto" else max(devices.values(), key=lambda device: device.auto_rank())
