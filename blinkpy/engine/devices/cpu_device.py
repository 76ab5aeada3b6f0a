"""--device cpu: the model's step on the processor, by NumPy and Numba, or by torch (blinkpy/engine/devices/cpu_device.py)."""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING

from blinkpy.config import STEP_TOKENS, Config, ConfigError
from blinkpy.engine.devices.device_contract import HostDevice, Runner, Setup
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.array_weights import unknown_parts
from blinkpy.models.weights.compute_dtype import dtype_name
from blinkpy.packages import installed

if TYPE_CHECKING:
    import torch

    from blinkpy.kv.state import State
    from blinkpy.models.cpu.cpu_step import CpuStep
    from blinkpy.models.cpu.step_progress import StepProgress
    from blinkpy.models.description.decoder_description import DecoderDescription
    from blinkpy.models.weights.array_weights import ArrayWeights
    from blinkpy.models.weights.decoder_weights import Weights


# Chooses the CPU decoder: NumPy's in float32, or torch's if torch is installed.

TORCH = "pip install 'blinkpy-serve[torch]'"


def torch_dtype_name(model: DecoderDescription, requested: str) -> str | None:
    """The dtype in which torch computes a model; None: NumPy computes it in float32.

    requested: value of --dtype; "auto": the checkpoint's dtype with torch, otherwise float32.

    Raises ConfigError if the model needs torch and it is not installed.
    """
    name, has_torch = dtype_name(model, requested, "cpu"), installed("torch")
    if name != "float32":
        if has_torch:
            return name
        if requested != "auto":
            raise ConfigError(f"dtype {name} on the CPU needs torch ({TORCH}); float32 does not")
    lacking = lacking_without_torch(model)
    if not lacking:
        return None
    if not has_torch:
        raise ConfigError(f"{model.name} needs {', '.join(lacking)}, which needs torch on the CPU: {TORCH}")
    return "float32"


def lacking_without_torch(model: DecoderDescription) -> list[str]:
    """The blocks and weights of a model that NumPy's decoder does not support."""
    from blinkpy.models.cpu.numpy_decoder import BLOCKS

    return model.lacking_blocks(BLOCKS) or unknown_parts(model)


@functools.cache
def numpy_speed_once(threads: int, invariant: bool) -> float:
    """numpy_speed with this number of threads, measured once per process."""
    from blinkpy.models.cpu.numpy_products import ThreadTeam, numpy_speed

    return numpy_speed(ThreadTeam(threads), invariant=invariant)


@functools.cache
def torch_speed_once(dtype: torch.dtype, threads: int, invariant: bool) -> float:
    """torch_speed with this dtype, measured once per process and number of torch threads."""
    from blinkpy.models.cpu.torch_progress import torch_speed

    return torch_speed(dtype, invariant=invariant)


def machine_memory() -> int:
    """Total memory of this machine, bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


STEP_S = 1.0  # target duration of a full step on an idle machine
PIECE_S = 0.02  # duration of one piece of a step; front ends see progress after each piece


class CpuDevice(HostDevice):
    """See blinkpy.engine.devices.device_contract.Device."""

    name, reads_weights, has_draft_layers = "cpu", True, True

    def auto_rank(self) -> int:
        return 1

    def step_tokens(self, config: Config, model: DecoderDescription) -> int:
        from blinkpy.models.cpu.step_progress import tokens_within

        return tokens_within(self._speed(config, model) * STEP_S, model, STEP_TOKENS)

    def _speed(self, config: Config, model: DecoderDescription) -> float:
        """Multiply-adds per second of the engine's threads. Sets torch's number of threads."""
        from blinkpy.engine.devices.cpu_device import torch_dtype_name

        threads, invariant = config.engine.threads, config.engine.batch_invariant
        if torch_dtype_name(model, config.model.dtype) is None:
            return numpy_speed_once(threads, invariant)
        import torch

        from blinkpy.models.weights.decoder_weights import choose_dtype

        if threads:
            torch.set_num_threads(threads)
        return torch_speed_once(choose_dtype(model, config.model.dtype, "cpu"), torch.get_num_threads(), invariant)

    def page_bytes(self, config: Config, model: DecoderDescription) -> int:
        from blinkpy.engine.devices.cpu_device import torch_dtype_name
        from blinkpy.models.paged_cache import page_bytes_of

        return page_bytes_of(config, model, 2 if torch_dtype_name(model, config.model.dtype) == "bfloat16" else 4)

    def cache_bytes(self, config: Config, model: DecoderDescription) -> int:
        from blinkpy.engine.devices.cpu_device import torch_dtype_name
        from blinkpy.models.paged_cache import cache_itemsize, ring_bytes, ring_sizes

        itemsize = cache_itemsize(config, 2 if torch_dtype_name(model, config.model.dtype) == "bfloat16" else 4)
        whole, rings = config.cache.cpu_cache_mib << 20, ring_bytes(model, ring_sizes(config, model), itemsize)
        if rings > whole and not config.cache.num_pages:
            raise ConfigError(
                f"the window rings of {config.all_slots} slots take {rings / 2**20:.1f} MiB, but "
                f"cpu_cache_mib is {whole >> 20}: lower slots or raise cpu_cache_mib"
            )
        self._require_states(config, model)
        return whole - rings

    def slots(self, config: Config, model: DecoderDescription) -> int:
        """The most slots whose recurrent states take at most a quarter of the machine's memory."""
        from blinkpy.models.recurrent_states import settled_slots

        return settled_slots(config, model, 4, machine_memory() // 4)

    def snapshots(self, config: Config, model: DecoderDescription) -> int:
        """The number of state snapshots, at most a sixteenth of the machine's memory in total."""
        from blinkpy.models.recurrent_states import settled_snapshots

        return settled_snapshots(config, model, 4, machine_memory() // 16)

    def _require_states(self, config: Config, model: DecoderDescription) -> None:
        """Raise ConfigError if the recurrent states of all slots exceed the machine's memory."""
        from blinkpy.models.recurrent_states import pool_bytes, snapshot_bytes

        states, memory = pool_bytes(config, model, 4), machine_memory()
        if 0 < states <= memory < states + (kept := snapshot_bytes(config, model, 4)):
            raise ConfigError(
                f"{config.cache.state_snapshots} snapshots of recurrent states take {kept / 2**30:.1f} GiB in addition to all "
                f"slots ({states / 2**30:.1f} GiB), but this machine has {memory / 2**30:.1f} GiB of memory: lower "
                "state_snapshots"
            )
        if states > memory:
            slots = config.all_slots
            raise ConfigError(
                f"the recurrent states of {slots} slots take {states / 2**30:.1f} GiB, {states / slots / 2**20:.1f} MiB each, "
                f"but this machine has {memory / 2**30:.1f} GiB of memory: lower slots"
            )

    def load(self, setup: Setup) -> Runner:
        from blinkpy.engine.devices.host_loop import HostLoop
        from blinkpy.scheduler.starting_scheduler import start_scheduler

        state = setup.recorder.attach(setup.make_state(), share_inputs=True)
        if setup.config.engine.check_integrity == "always":  # checking every turn needs compiled code
            return HostLoop(setup, state, *self._step(setup, state))
        scheduler = start_scheduler(setup.limits, state, setup.policy)  # a child process compiles it meanwhile
        try:
            return HostLoop(setup, state, *self._step(setup, state), scheduler)
        except BaseException:
            scheduler.close()
            raise

    def _step(self, setup: Setup, state: State) -> tuple[CpuStep, StepProgress]:
        from blinkpy.models.cpu.cpu_step import CpuStep, measure_cache
        from blinkpy.models.paged_cache import choose_scales, ring_sizes

        sizes, model = setup.sizes, setup.model
        weights, progress = self._weights(setup, int(self._speed(setup.config, model) * PIECE_S))
        setup.report("preparing the model's step")
        page_size = sizes.page_size
        scales = choose_scales(setup.config, model, weights.layers, lambda: measure_cache(model, weights, page_size, progress))
        tokens = setup.config.scheduler.max_num_batched_tokens
        grammars = state.grammars if setup.limits.grammar_share else None
        pages, rings = (sizes.num_pages, sizes.page_size), ring_sizes(setup.config, model)
        step = CpuStep(
            model,
            weights,
            *pages,
            sizes.max_model_len,
            tokens,
            grammars,
            progress,
            rings,
            scales,
            sizes.slots,
            setup.limits.snapshots,
            setup.limits.draft_tokens,
            setup.limits.step_drafts,
        )
        return step, progress

    def _weights(self, setup: Setup, piece: int) -> tuple[ArrayWeights | Weights, StepProgress]:
        """(weights of the model, progress of the matrix products). piece: multiply-adds between two updates of the progress."""
        from blinkpy.engine.devices.cpu_device import torch_dtype_name

        invariant = setup.config.engine.batch_invariant
        if torch_dtype_name(setup.model, setup.config.model.dtype) is None:
            from blinkpy.models.cpu.numpy_products import NumpyProgress, ThreadTeam

            team = ThreadTeam(setup.config.engine.threads)
            return setup.load_array_weights(), NumpyProgress(piece, team, invariant=invariant)
        from blinkpy.models.cpu.torch_progress import TorchProgress
        from blinkpy.models.weights.decoder_weights import choose_dtype

        dtype = choose_dtype(setup.model, setup.config.model.dtype, "cpu")
        return setup.load_weights(dtype, "cpu"), TorchProgress(piece, invariant=invariant)


DEVICE = CpuDevice
