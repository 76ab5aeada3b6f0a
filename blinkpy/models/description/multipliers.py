"""Constant factors of the projections of a layer, as in Falcon-H1 (technical report, arXiv 2507.22448)."""

from typing import NamedTuple

from blinkpy.models.description.blocks import Layer, Mlp
from blinkpy.models.description.recurrent_blocks import StateSpace

Runs = tuple[tuple[int, float], ...]
"""(rows, factor) of each run of rows of a matrix."""


class Multipliers(NamedTuple):
    """The factors of a layer's parts. At the start, weights and biases are multiplied by these factors in float32, then rounded
    once to their dtype. Steps need no multiplication.

    attention_in, attention_out: factors of attention's inputs and results.
    keys: factor of keys before their rotation.
    space_in, space_out: factors of a state space's inputs and results.
    space: factors of its projected gate, values, keys, queries, and time steps.
    gate: factor of an MLP's gate before the activation.
    down: factor of an MLP's results.
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    keys: float = 1.0
    space_in: float = 1.0
    space_out: float = 1.0
    space: tuple[float, ...] = (1.0,) * 5
    gate: float = 1.0
    down: float = 1.0

    @property
    def scaled_inputs(self) -> set[str]:
        """The matrices whose inputs have a factor, by their fields in LayerWeights."""
        return {field for field, factor in (("qkv", self.attention_in), ("space_in", self.space_in)) if factor != 1}

    def of_layer(self, layer: Layer, hidden: int) -> dict[str, Runs]:
        """The factors of the stored rows of a layer's weights, by their fields in LayerWeights. hidden: the model's width."""
        attention, space, found = layer.attention, layer.recurrence, dict[str, Runs]()
        rows = attention.q_size, attention.kv_size, attention.kv_size
        found |= self._projection("qkv", rows, (1.0, self.keys, 1.0), self.attention_in)
        found |= self._projection("o", (hidden,), (self.attention_out,))
        if isinstance(space, StateSpace):
            rows_of_group = space.groups * space.key_dim
            widths = space.value_size, space.value_size, rows_of_group, rows_of_group, space.heads
            found |= self._projection("space_in", widths, self.space, self.space_in)
            found |= self._projection("space_out", (hidden,), (self.space_out,))
        if isinstance(layer.mlp, Mlp):
            found |= self._projection("gate_up", (layer.mlp.size,) * 2, (self.gate, 1.0))
            found |= self._projection("down", (hidden,), (self.down,))
        return {field: runs for field, runs in found.items() if any(factor != 1 for _, factor in runs)}

    @staticmethod
    def _projection(field: str, rows: tuple[int, ...], factors: tuple[float, ...], of_inputs: float = 1.0) -> dict[str, Runs]:
        """The factors of a matrix and of its bias. of_inputs: a factor of the inputs, which does not apply to the bias."""
        return {
            field: tuple((count, factor * of_inputs) for count, factor in zip(rows, factors, strict=True)),
            f"{field}_bias": tuple(zip(rows, factors, strict=True)),
        }


NO_MULTIPLIERS = Multipliers()
