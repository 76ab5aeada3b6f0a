"""The states of recurrent layers: one for each request slot, and snapshots for the prefix cache. The
other layers have pages.

A step with drafts (docs/speculation.md) does not yet know which drafts are correct, and a matrix can't be rolled back. So the
step's matrices include only each request's own token. For each draft, the state stores the draft's key, value, strength and
decay, and its input of the convolution. The request's next step first repeats the recurrence over the drafts that were correct.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import DEFAULT_SLOTS, Config, ConfigError
from blinkpy.kv.state import DRAFT, ROWS, Batch
from blinkpy.models.description.decoder_description import DecoderDescription

if TYPE_CHECKING:
    import torch


SLOTS_STEP = 8
DEFAULT_SNAPSHOTS = 128
"""Most snapshots of states if the user set no number."""


class LayerStates(NamedTuple):
    """The states of one layer. A request whose first token is at position 0 ignores what its slot holds.

    matrices: float32 [slots, value_heads, key_dim, value_dim]; no heads with a short convolution.
    inputs: [slots, taps - 1 + drafts, channels] in the dtype of activations, but float32 on a CPU: inputs of the convolution.
        First come the last inputs that the matrices include, oldest first, then those of drafts.
    drafted: [slots, drafts, value_heads, key_dim + value_dim + 2] in the dtype of `inputs`: key, value, strength and decay of
        each draft. On a CPU the key is normalised, and strength and decay are factors; on a GPU they are as projected. With a
        state space key, value and time step, one number less; on a CPU the key times the time step, the value, and the decay.
    """

    matrices: torch.Tensor
    inputs: torch.Tensor
    drafted: torch.Tensor


class StatePool(NamedTuple):
    """The states of all R recurrent layers, one per place; a place is a request slot or a snapshot."""

    matrices: torch.Tensor  # float32 [R, places, value_heads, key_dim, value_dim]
    inputs: torch.Tensor  # [R, places, taps - 1, channels]; of request slots [R, slots, taps - 1 + drafts, channels]

    def copy(self, places: NDArray[np.int32], source: StatePool, sources: NDArray[np.int32]) -> None:
        """Replace the states in some places by states of another pool, without drafts."""
        import torch

        to, of = torch.from_numpy(places.astype(np.int64)), torch.from_numpy(sources.astype(np.int64))
        self.matrices[:, to] = source.matrices[:, of]
        kept = min(self.inputs.shape[2], source.inputs.shape[2])
        self.inputs[:, to, :kept] = source.inputs[:, of, :kept]


class RecurrentStates:
    """The states of all layers, for `slots` requests, and `snapshots` copies of them.

    drafts: maximum drafts of a request in one step.
    layers: None for a layer without a state.
    pool, kept: all states of the slots and of the snapshots; None without them.
    held: int32 [slots], number of the request's tokens that its matrices include; unused without drafts.
    """

    def __init__(
        self,
        model: DecoderDescription,
        slots: int,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
        snapshots: int = 0,
        drafts: int = 0,
    ):
        import torch

        self.slots, self.drafts = slots, drafts
        self.pool = _make_pool(model, slots, dtype, device, drafts) if model.recurrence is not None else None
        self.kept = _make_pool(model, snapshots, dtype, device) if model.recurrence is not None and snapshots else None
        self.held = torch.zeros(slots, dtype=torch.int32, device=device)
        self.layers: list[LayerStates | None] = []
        recurrent = 0
        for layer in model.layers:
            if layer.recurrence is None or self.pool is None:
                self.layers.append(None)
                continue
            shape = slots, drafts, layer.recurrence.matrices[0], layer.recurrence.drafted_size
            drafted = torch.zeros(shape, dtype=dtype, device=device)
            self.layers.append(LayerStates(self.pool.matrices[recurrent], self.pool.inputs[recurrent], drafted))
            recurrent += 1

    def load(self, slots: NDArray[np.int32], sources: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Copy snapshots into the states of request slots; a slot with a source of -1 is skipped. On a CPU.

        tokens: the number of tokens that each snapshot includes.
        """
        chosen = sources >= 0
        if self.pool is not None and self.kept is not None and chosen.any():
            self.pool.copy(slots[chosen], self.kept, sources[chosen])
            self.held.numpy()[slots[chosen]] = tokens[chosen]

    def save(self, slots: NDArray[np.int32], targets: NDArray[np.int32]) -> None:
        """Copy the states of request slots into snapshots; a slot with a target of -1 is skipped. On a CPU."""
        chosen = targets >= 0
        if self.pool is not None and self.kept is not None and chosen.any():
            self.kept.copy(targets[chosen], self.pool, slots[chosen])

    def hold(self, batch: Batch) -> None:
        """Record that the matrices include a batch's tokens, except its drafts. On a CPU; call it after all layers."""
        own = np.flatnonzero(batch.emits[: int(batch.counts[ROWS])] != DRAFT)
        self.held.numpy()[batch.row_slots[own]] = batch.context_lengths[own]


def _make_pool(
    model: DecoderDescription, places: int, dtype: torch.dtype, device: str | torch.device, drafts: int = 0
) -> StatePool:
    import torch

    block: Any = model.recurrence
    matrices = torch.zeros(model.recurrent_layers, places, *block.matrices, device=device)
    inputs = torch.zeros(model.recurrent_layers, places, block.taps - 1 + drafts, block.channels, dtype=dtype, device=device)
    return StatePool(matrices, inputs)


def require_recurrent(config: Config, model: DecoderDescription) -> None:
    """Raise ConfigError if the number of snapshots is set, but snapshots have no effect with the model or the prefix cache."""
    count, caching = config.cache.state_snapshots, config.cache.enable_prefix_caching
    if count and (model.recurrence is None or not caching):
        why = f"{model.name} has no recurrent layers" if model.recurrence is None else "prefix caching is off"
        raise ConfigError(f"state_snapshots ({count}) has no effect: {why}; leave it out")


def settled_snapshots(config: Config, model: DecoderDescription, itemsize: int, space: int) -> int:
    """Snapshots of states: the number that the user set, or as many as fit into `space` bytes, at most DEFAULT_SNAPSHOTS.
    0 without recurrent layers or prefix caching.

    itemsize: bytes of an activation.
    """
    if model.recurrence is None or not config.cache.enable_prefix_caching:
        return 0
    return config.cache.state_snapshots or min(DEFAULT_SNAPSHOTS, max(0, space) // model.state_bytes(itemsize))


def snapshot_bytes(config: Config, model: DecoderDescription, itemsize: int) -> int:
    """Bytes of the snapshots, if their number is set. itemsize: bytes of an activation."""
    return config.cache.state_snapshots * model.state_bytes(itemsize)


def settled_slots(config: Config, model: DecoderDescription, itemsize: int, space: int) -> int:
    """Default request slots of a worker: as many as the memory for states permits, at most DEFAULT_SLOTS.

    itemsize: bytes of an activation. space: bytes for the states of all workers.
    """
    each = config.frontend.workers * model.state_bytes(itemsize, config.scheduler.draft_tokens)
    slots = min(DEFAULT_SLOTS, max(1, space // each)) if each else DEFAULT_SLOTS
    return slots - slots % SLOTS_STEP if slots > SLOTS_STEP else slots


def pool_bytes(config: Config, model: DecoderDescription, itemsize: int) -> int:
    """Bytes of the states of all request slots. itemsize: bytes of an activation."""
    return config.all_slots * model.state_bytes(itemsize, config.scheduler.draft_tokens)
