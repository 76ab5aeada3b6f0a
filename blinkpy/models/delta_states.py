"""The recurrent states of layers with a gated delta net: one for each request slot. The other layers have pages."""

from __future__ import annotations

from collections.abc import Container
from typing import TYPE_CHECKING, NamedTuple

from blinkpy.config import DEFAULT_SLOTS, Config, ConfigError
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_model

if TYPE_CHECKING:
    import torch


SLOTS_STEP = 8
NO_STATES_KEPT = "a cached page has no recurrent state with it"
"""Why a model with recurrent layers has no prefix cache."""


class LayerStates(NamedTuple):
    """The states of one layer. A request whose first token is at position 0 ignores what its slot holds.

    matrices: float32 [slots, value_heads, key_dim, value_dim].
    inputs: [slots, taps - 1, channels], the last inputs of the convolution, oldest first; in the dtype of activations, but
        float32 on a CPU.
    """

    matrices: torch.Tensor
    inputs: torch.Tensor


class DeltaStates:
    """The states of all layers, for `slots` requests. layers: None for a layer without a gated delta net."""

    def __init__(self, model: DecoderDescription, slots: int, dtype: torch.dtype, device: str | torch.device = "cpu"):
        import torch

        self.slots = slots
        self.layers: list[LayerStates | None] = []
        for layer in model.layers:
            if (delta := layer.delta) is None:
                self.layers.append(None)
                continue
            matrices = torch.zeros(slots, delta.value_heads, delta.key_dim, delta.value_dim, device=device)
            inputs = torch.zeros(slots, delta.taps - 1, delta.channels, dtype=dtype, device=device)
            self.layers.append(LayerStates(matrices, inputs))


def refuse_prefix_cache(config: Config, asked: Container[str]) -> None:
    """Raise ConfigError if the user asks for the prefix cache of a model with recurrent layers.

    config: with the model's folder.
    asked: names of the options that the user set.
    """
    if not config.cache.enable_prefix_caching or "enable_prefix_caching" not in asked:
        return
    model = describe_model(config.model.model, config.model.quantization)
    if model.delta is not None:
        raise ConfigError(f"enable_prefix_caching is not supported for {model.name}: {NO_STATES_KEPT}")


def settled_slots(config: Config, model: DecoderDescription, itemsize: int, room: int) -> int:
    """Request slots of a worker if the user set none: as many as have states within `room` bytes, at most DEFAULT_SLOTS.

    itemsize: of activations. room: for the states of all workers.
    """
    each = config.frontend.workers * model.state_bytes(itemsize)
    slots = min(DEFAULT_SLOTS, max(1, room // each)) if each else DEFAULT_SLOTS
    return slots - slots % SLOTS_STEP if slots > SLOTS_STEP else slots


def pool_bytes(config: Config, model: DecoderDescription, itemsize: int) -> int:
    """Bytes of the states of all request slots. itemsize: of activations."""
    return config.all_slots * model.state_bytes(itemsize)
