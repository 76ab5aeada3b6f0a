"""Joins the weights of all ranks by the rules of the split; shares no code with the loader."""

from dataclasses import fields

import torch

from blinkpy.kernels.quantised_matrices import Fp8Matrix, PackedMatrix
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.decoder_weights import LayerWeights, Weights
from blinkpy.models.weights.packed_matrix import dense

BY_COLUMNS = ("o", "down", "shared_down", "down_scales")
ONCE = ("o_bias", "down_bias")  # the sum over ranks adds them


def exact(weight: torch.Tensor | Fp8Matrix | PackedMatrix) -> torch.Tensor:
    """The numbers of a weight; MXFP4 as bytes."""
    if isinstance(weight, torch.Tensor):
        return weight
    rows = weight.values if isinstance(weight, Fp8Matrix) else weight.words
    if rows.ndim == 2:
        return dense(weight, torch.float32)
    return torch.stack([dense(_expert(weight, expert), torch.float32) for expert in range(len(rows))])


def _expert(weight: Fp8Matrix | PackedMatrix, expert: int) -> Fp8Matrix | PackedMatrix:
    if isinstance(weight, PackedMatrix):
        return weight[expert]
    return Fp8Matrix(weight.values[expert], weight.scales[expert], weight.input_scale)


def join(model: DecoderDescription, layer: int, field: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """A field of LayerWeights, joined from the fields of all ranks."""
    ranks, attention = len(parts), model.layers[layer].attention
    if field in ("qkv", "qkv_bias"):
        heads, keys = attention.heads // ranks, max(1, attention.kv_heads // ranks)
        counts = [heads, keys, keys] + ([heads] if attention.gate else [])
        found = [part.split([count * attention.head_dim for count in counts]) for part in parts]
        step = max(1, ranks // attention.kv_heads)  # number of ranks that share a key head
        for first in range(0, ranks, step):
            for other in found[first : first + step]:
                assert all(torch.equal(one, two) for one, two in zip(found[first][1:3], other[1:3], strict=True))
        steps = [1, step, step, 1]
        return torch.cat([torch.cat([part[kind] for part in found[:: steps[kind]]]) for kind in range(len(counts))])
    if field.startswith(("gate_up", "shared_gate_up")):
        axis = -1 if field.endswith("_bias") else -2
        halves = [part.chunk(2, axis) for part in parts]
        return torch.cat([torch.cat([half[kind] for half in halves], axis) for kind in (0, 1)], axis)
    if field in BY_COLUMNS:
        return torch.cat(parts, -1)
    if field in ONCE:
        return torch.stack(parts).sum(0)
    if field == "sinks":
        return torch.cat(parts)
    assert all(torch.equal(part, parts[0]) for part in parts), field
    return parts[0]


def compare(model: DecoderDescription, whole: Weights, ranks: list[Weights], loose: tuple[str, ...] = ()) -> int:
    """Assert that the ranks' weights join to the whole. Returns the number of fields. loose: fields not compared."""
    compared = 0
    assert torch.equal(whole.lm_head, torch.cat([own.lm_head for own in ranks]))
    for field in ("embedding", "final_norm"):
        assert all(torch.equal(getattr(whole, field), getattr(own, field)) for own in ranks)
    for layer, weights in enumerate(whole.layers):
        for field in (field.name for field in fields(LayerWeights) if field.name not in loose):
            expected, parts = getattr(weights, field), [getattr(own.layers[layer], field) for own in ranks]
            if expected is None or isinstance(expected, float):
                assert all(part == expected for part in parts)
                continue
            found = join(model, layer, field, [exact(part) for part in parts])
            assert torch.equal(found, exact(expected)), f"{field} of layer {layer}"
            compared += 1
    return compared
