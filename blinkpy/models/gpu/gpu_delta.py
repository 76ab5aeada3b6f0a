"""Recurrent layers and gated attention on the GPU: the launches of a layer up to its last projection.

decoder: blinkpy.models.gpu.gpu_decoder.GpuDecoder, which imports this file.
"""

from dataclasses import replace
from typing import Any

import torch

from blinkpy.kernels.activation import gate_output
from blinkpy.kernels.delta.drafted_rows import hold
from blinkpy.kernels.delta.recurrence import DeltaSizes, DraftedStates, recur
from blinkpy.kernels.delta.short_convolution import convolve
from blinkpy.kernels.delta.state_copies import copy_states
from blinkpy.kernels.delta.state_space import SpaceRates, SpaceSizes, norm_groups, scan
from blinkpy.kernels.quantised_matrices import BLOCK, PackedMatrix
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.weights.decoder_weights import LayerWeights, Matrix


def launch_delta(decoder: Any, shape: StepShape, layer: LayerWeights, index: int, *, last_tokens_only: bool) -> torch.Tensor:
    """Launch the gated delta net of a layer. Returns the input of its last projection, [rows of the stream, value_size].

    last_tokens_only: advance the states by all tokens, but continue only with each row's last token.
    """
    model, view, pdl, buffers = decoder.model, decoder.view, decoder.pdl, decoder.buffers
    delta, states, tokens = model.layers[index].recurrence, decoder.cache.states.layers[index], shape.tokens
    taps, norm, strengths = layer.recurrent_conv, layer.recurrent_norm, layer.delta_ba
    if delta is None or states is None or taps is None or norm is None or strengths is None or layer.input_norm is None:
        raise ValueError(f"layer {index} has no gated delta net")
    if layer.recurrent_decay is None or layer.recurrent_bias is None:
        raise ValueError(f"layer {index} has no decays")
    projected, mixed, scores = buffers.recurrent_in[:tokens], buffers.recurrent_mixed[:tokens], buffers.delta_ba[:tokens]
    normed = decoder._norm(layer.input_norm)
    decoder._linear(normed, layer.qkv, projected)
    decoder._linear(normed, strengths, scores)
    held = decoder.cache.states.held
    convolve(projected, taps, states.inputs, held, view, mixed, rows=shape.rows, mixed=shape.mixed, pdl=pdl)
    if last_tokens_only:
        decoder._keep_last_tokens(shape)
    out, gates = buffers.recurrent_out[: decoder.stream.rows], projected[:, delta.channels :]
    rates = layer.recurrent_decay, layer.recurrent_bias
    recur(
        DeltaSizes(*delta[:4]), mixed, gates, scores, rates, (norm, model.norm.eps),
        DraftedStates(states.matrices, states.drafted, held), view, out,
        rows=shape.rows, last_tokens_only=last_tokens_only, by_blocks=by_blocks(decoder, shape), pdl=pdl,
    )  # fmt: skip
    return out


def launch_convolution(
    decoder: Any, shape: StepShape, layer: LayerWeights, index: int, *, last_tokens_only: bool
) -> torch.Tensor:  # fmt: skip
    """Launch the gated short convolution of a layer, as launch_delta. Returns [rows of the stream, channels]."""
    states, taps, projected = (
        decoder.cache.states.layers[index],
        layer.recurrent_conv,
        decoder.buffers.recurrent_in[: shape.tokens],
    )
    if states is None or taps is None or layer.input_norm is None:
        raise ValueError(f"layer {index} has no short convolution")
    decoder._linear(decoder.stream.hidden, layer.qkv, projected, norm=layer.input_norm, bias=layer.qkv_bias)
    if last_tokens_only:
        decoder._keep_last_tokens(shape)
    out: torch.Tensor = decoder.buffers.recurrent_out[: decoder.stream.rows]
    convolve(
        projected, taps, states.inputs, decoder.cache.states.held, decoder.view, out, rows=shape.rows, mixed=shape.mixed,
        bias=layer.recurrent_conv_bias, gated=True, last_tokens_only=last_tokens_only, pdl=decoder.pdl,
    )  # fmt: skip
    return out


def launch_space(decoder: Any, shape: StepShape, layer: LayerWeights, index: int, *, last_tokens_only: bool) -> torch.Tensor:
    """Launch the state space of a layer, as launch_delta, also if it is parallel to attention. Returns [rows of the stream,
    value_size].
    """
    states, tokens, taps, norm = decoder.cache.states, shape.tokens, layer.recurrent_conv, layer.recurrent_norm
    space, own = decoder.model.layers[index].recurrence, states.layers[index]
    log_rates, biases, skips = layer.recurrent_decay, layer.recurrent_bias, layer.recurrent_skip
    if own is None or taps is None or (norm is None and space.normed) or layer.input_norm is None:
        raise ValueError(f"layer {index} has no state space")
    if log_rates is None or biases is None or skips is None:
        raise ValueError(f"layer {index} has no rates")
    view, pdl, buffers = decoder.view, decoder.pdl, decoder.buffers
    projected, mixed = buffers.recurrent_in[:tokens], buffers.recurrent_mixed[:tokens]
    first, of_first = (layer.qkv, layer.qkv_bias) if layer.space_in is None else (layer.space_in, layer.space_in_bias)
    decoder._linear(decoder.stream.hidden, first, projected, norm=layer.input_norm, bias=of_first)
    bias, batch = layer.recurrent_conv_bias, {"rows": shape.rows, "pdl": pdl}
    convolve(projected, taps, own.inputs, states.held, view, mixed, mixed=shape.mixed, bias=bias, **batch)
    if last_tokens_only:
        decoder._keep_last_tokens(shape)
    out: torch.Tensor = buffers.recurrent_out[: decoder.stream.rows]
    gates, steps = projected[:, space.channels :].split([space.value_size, space.heads], 1)
    scan(
        SpaceSizes(*space[:4]), mixed, gates, steps,
        SpaceRates(log_rates, biases, skips), DraftedStates(own.matrices, own.drafted, states.held), view, out,
        last_tokens_only=last_tokens_only, by_blocks=by_blocks(decoder, shape), **batch,
    )  # fmt: skip
    if norm is not None:
        norm_groups(out, norm, decoder.model.norm.eps, decoder.stream.counts, groups=space.groups, pdl=pdl)
    return out


def by_blocks(decoder: Any, shape: StepShape) -> bool:
    """Whether chunks of prompts are computed by blocks of tokens. Not for batch-invariant results, which must not depend on block
    borders, and not for float32, which serves as a reference.
    """
    return shape.mixed and not decoder.invariant and decoder.buffers.recurrent_mixed.dtype == torch.bfloat16


def launch_copies(decoder: Any, shape: StepShape, *, save: bool) -> None:
    """Launch the copies of states from snapshots, before a step's layers, or with `save` to snapshots, after them. With drafts,
    then also record which tokens the states include.
    """
    states, requests = decoder.cache.states, decoder.requests
    if save and states.pool is not None and states.drafts:
        hold(states.held, decoder.view, rows=shape.rows, pdl=decoder.pdl)
    if states.kept is not None and shape.mixed:
        places = requests.snapshot_target if save else requests.snapshot_source
        copies = states.pool, states.kept, states.held, places, decoder.view
        copy_states(*copies, rows=shape.rows, save=save, pdl=decoder.pdl)


def project_gated(decoder: Any, layer: LayerWeights, qkv: torch.Tensor) -> None:
    """Launch the projection of queries, keys and values, and that of the gates of attention's output. qkv: [T, their width]."""
    if layer.input_norm is None:
        raise ValueError("a layer with gated attention needs a norm before it")
    normed, size, bias = decoder._norm(layer.input_norm), qkv.shape[1], layer.qkv_bias
    for rows, out in ((slice(0, size), qkv), (slice(size, None), decoder.buffers.gates[: len(qkv)])):
        decoder._linear(normed, _rows(layer.qkv, rows), out, bias=None if bias is None else bias[rows])


def gate_attended(decoder: Any, attended: torch.Tensor, tokens: int, *, last_tokens_only: bool) -> None:
    """Launch the gate of attention's output, in place. tokens: tokens of the step's shape."""
    starts = decoder.view.query_starts if last_tokens_only else None
    gate_output(attended, decoder.buffers.gates[:tokens], starts, decoder.stream.counts, pdl=decoder.pdl)


def _rows(weight: Matrix, rows: slice) -> Matrix:
    """Some rows of a matrix."""
    if isinstance(weight, PackedMatrix):
        return weight.rows(rows)
    if isinstance(weight, torch.Tensor):
        return weight[rows]
    stop = None if rows.stop is None else rows.stop // BLOCK
    scales = weight.scales[rows.start // BLOCK : stop] if weight.blocks else weight.scales[rows]
    return replace(weight, values=weight.values[rows], scales=scales)
