"""Embeddings of tokens for each layer in the steps of the GPU's decoder: the vectors of a step, and their use in a layer.

DecoderDescription.layer_inputs defines them. The vectors of all layers are computed at the start of a step, because they
depend only on the tokens.
"""

from typing import Any

import torch

from blinkpy.kernels.layer_inputs import gate_inputs, mix_inputs
from blinkpy.models.gpu.attention_stage import part
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.weights.decoder_weights import LayerWeights, layer_embedding_factor


def factor_of_mlp(layer: LayerWeights) -> torch.Tensor | None:
    """The factor of the residual stream after a layer's MLP; None if it is applied later. It multiplies a layer's output."""
    return layer.layer_scale if layer.layer_input_gate is None else None


def inputs_of_step(decoder: Any, shape: StepShape) -> torch.Tensor:
    """The buffer with the vectors of a step, [tokens of the shape, layers * layer_inputs].

    decoder: blinkpy.models.gpu.gpu_decoder.GpuDecoder, which imports this file.
    """
    buffers = decoder.buffers
    inputs: torch.Tensor = (buffers.cut_layer_inputs if shape.groups > 1 else buffers.layer_inputs)[: shape.tokens]
    return inputs


def launch_inputs(decoder: Any, shape: StepShape) -> None:
    """Launch the vectors of a step's tokens for all layers, after the embedding. Raises ValueError without their weights."""
    model, weights, hidden = decoder.model, decoder.weights, decoder.stream.hidden
    table, projection, weight = weights.layer_embedding, weights.layer_projection, weights.layer_projection_norm
    if table is None or projection is None or weight is None:
        raise ValueError("embeddings for each layer need weights")
    inputs, eps = inputs_of_step(decoder, shape), model.norm.eps * model.hidden_size  # the norm's inputs lack hidden ** -0.5
    decoder._linear(hidden, projection, inputs)
    factor = layer_embedding_factor(model, hidden.dtype)
    mix_inputs(inputs, decoder.batch.token_ids, table, weight, eps, decoder.batch.counts, factor=factor, pdl=decoder.pdl)


def add_inputs(decoder: Any, shape: StepShape, layer: LayerWeights, index: int, *, last_tokens_only: bool) -> None:
    """Launch the end of a layer: the product of a gate with the tokens' vectors, its projection, a norm, and the layer's factor.

    last_tokens_only: the residual stream has only each row's last token.
    Raises ValueError if the layer lacks a weight, or the residual stream is not complete.
    """
    stream, width = decoder.stream, decoder.model.layer_inputs
    gate, projection = layer.layer_input_gate, layer.layer_input_projection
    if gate is None or projection is None or layer.layer_input_norm is None:
        raise ValueError("embeddings for each layer need weights")
    if stream.partials is not None:
        raise ValueError("the gate of embeddings for each layer reads a complete residual stream")
    inputs = inputs_of_step(decoder, shape)[:, index * width : (index + 1) * width]
    gated = part(decoder.buffers.gated_inputs, stream.rows, width)
    decoder._linear(stream.hidden, gate, gated)
    batch = decoder.view if last_tokens_only else None
    gate_inputs(gated, inputs, stream.counts, batch, pdl=decoder.pdl)
    norm, factor = layer.layer_input_norm, layer.layer_scale
    decoder._add_linear(gated, projection, None, norm, norm_follows=not decoder._ends_group, factor=factor)
