"""Experts in the steps of the GPU's decoder: the launches of a layer's router, experts and additional MLP.

decoder: blinkpy.models.gpu.gpu_decoder.GpuDecoder, which imports this file.
"""

from collections.abc import Callable
from typing import Any

import torch

from blinkpy.kernels.moe.expert_variants import GELU, SILU, Clamp, ExpertCall
from blinkpy.kernels.moe.experts import experts, gate_shared
from blinkpy.kernels.moe.routing import FUSED_ROUTER_TOKENS, Selection, router_logits
from blinkpy.kernels.norm import rms_norm
from blinkpy.kernels.quantised_matrices import Fp8Matrix, PackedMatrix
from blinkpy.models.description.blocks import Activation, Experts, RouterKind
from blinkpy.models.gpu.attention_stage import part
from blinkpy.models.gpu.gpu_layer_inputs import factor_of_mlp
from blinkpy.models.gpu.rank_addends import write_addend
from blinkpy.models.weights.decoder_weights import LayerWeights

SELECTIONS: dict[RouterKind, Callable[[Experts, Any], Selection]] = {
    # Whether the kernels scale a token's shares to a sum of 1. If so, a softmax over all experts equals a softmax over the top k.
    RouterKind.SOFTMAX_TOP_K: lambda block, bias: Selection(block.normalize, 1.0, block.groups, block.kept_groups),
    RouterKind.TOP_K_SOFTMAX: lambda block, bias: Selection(normalize=True),
    RouterKind.SIGMOID_TOP_K: lambda block, bias: Selection(block.normalize, 1.0, block.groups, block.kept_groups, bias),
    RouterKind.TOP_K_SIGMOID: lambda block, bias: Selection(block.normalize, sigmoid=True),
    RouterKind.BIASED_SOFTMAX_TOP_K: lambda block, bias: Selection(block.normalize, bias=bias.flatten(), softmax=True),
}
"""How a kind of router selects experts."""


def launch_experts(decoder: Any, layer: LayerWeights, block: Experts) -> None:
    """Launch the experts of a layer, with the MLP that all tokens visit, and add their sum to the residual stream.

    Raises ValueError if the layer lacks a weight.
    """
    if block.parallel:
        _launch_parallel(decoder, layer, block)
        return
    if layer.post_norm is None:
        raise ValueError("an expert layer needs a norm before it")
    normed = _route(decoder, layer, layer.post_norm)
    hidden, only_rank = decoder.stream.hidden, decoder.peers is None
    _routed(decoder, layer, block, normed, decoder.addend_of(hidden), add=only_rank)
    if layer.shared_gate_up is not None and layer.shared_down is not None:
        rows, counts = decoder.stream.rows, decoder.stream.counts
        inner = part(decoder.buffers.inner, rows, block.shared)
        decoder.activated(normed, layer.shared_gate_up, inner, block.activation)
        if layer.shared_gate is not None:
            gate_shared(normed, layer.shared_gate, inner, counts, pdl=decoder.pdl)
        if only_rank:
            decoder._add_linear(inner, layer.shared_down, None, None, norm_follows=not decoder._ends_group)
        else:
            write_addend(decoder, inner, layer.shared_down, None, add=True)
    decoder.sum_over_ranks(hidden, add=True)


def _launch_parallel(decoder: Any, layer: LayerWeights, block: Experts) -> None:
    """Launch experts parallel to a dense MLP. The MLP, the router and the experts each have a norm of the residual stream. Both
    results are normalised, then their sum.

    Raises ValueError if the layer lacks a weight, or the residual stream is not complete.
    """
    stream, buffers, eps, pdl = decoder.stream, decoder.buffers, decoder.model.norm.eps, decoder.pdl
    gate_up, down, outer = layer.shared_gate_up, layer.shared_down, layer.mlp_out_norm
    of_router, before, behind = layer.router_norm, layer.experts_in_norm, layer.experts_out_norm
    if gate_up is None or down is None or layer.shared_out_norm is None:
        raise ValueError("an MLP parallel to experts needs weights")
    if of_router is None or before is None or behind is None or outer is None:
        raise ValueError("experts parallel to an MLP need norms")
    if stream.partials is not None:
        raise ValueError("experts parallel to an MLP read a complete residual stream")
    rows, counts, hidden = stream.rows, stream.counts, stream.hidden
    inner, (dense, routed) = part(buffers.inner, rows, block.shared), buffers.parallel[:, :rows]
    decoder._linear(hidden, gate_up, inner, norm=layer.post_norm, swiglu=True, gelu=block.activation == Activation.GELU_TANH)
    decoder._linear(inner, down, decoder.addend_of(dense))
    decoder.sum_over_ranks(dense)
    rms_norm(dense, layer.shared_out_norm, eps, counts, dense, pdl=pdl)
    _route(decoder, layer, of_router)
    _routed(decoder, layer, block, decoder._norm(before), decoder.addend_of(routed), add=False)
    decoder.sum_over_ranks(routed)
    rms_norm(routed, behind, eps, counts, dense, add=True, pdl=pdl)
    rms_norm(dense, outer, eps, counts, hidden, add=True, factor=factor_of_mlp(layer), pdl=pdl)


def _route(decoder: Any, layer: LayerWeights, norm: torch.Tensor) -> torch.Tensor:
    """Launch the router; its logits are then in the experts' buffers. Returns the norm of the residual stream, [rows, hidden]."""
    scratch, router, rows = decoder.experts, layer.router, decoder.stream.rows
    if scratch is None or router is None:
        raise ValueError("an expert layer needs a router, and buffers")
    logits = scratch.router[:rows]
    if rows <= FUSED_ROUTER_TOKENS and not decoder.invariant:
        normed: torch.Tensor = decoder.buffers.normed[:rows]
        hidden, counts, norm_and_eps = decoder.stream.hidden, decoder.stream.counts, (norm, decoder.model.norm.eps)
        router_logits(hidden, norm_and_eps, router, counts, normed, logits, layer.router_bias, pdl=decoder.pdl)
        return normed
    normed = decoder._norm(norm)
    decoder._linear(normed, router, logits, bias=layer.router_bias)
    return normed


def _routed(decoder: Any, layer: LayerWeights, block: Experts, normed: torch.Tensor, out: torch.Tensor, *, add: bool) -> None:
    """Launch the experts that the router's logits select. normed: their inputs, [rows, hidden]. add: to out."""
    scratch, rows, activation = decoder.experts, decoder.stream.rows, GELU if block.activation == Activation.GELU_TANH else SILU
    if scratch is None:
        raise ValueError("an expert layer needs buffers")
    selection = SELECTIONS[block.router](block, layer.selection_bias)
    selection = selection._replace(factor=block.factor, scales_inputs=block.scales_inputs, factors=layer.expert_factors)
    clamp = activation if block.clamp is None else Clamp(*block.clamp)
    gate_up, down = layer.gate_up, layer.down
    fp8 = (gate_up, down) if isinstance(gate_up, Fp8Matrix) and isinstance(down, Fp8Matrix) else None
    packed = (gate_up, down) if isinstance(gate_up, PackedMatrix) and isinstance(down, PackedMatrix) else None
    if fp8 is not None:
        gate_up, down = fp8[0].values, fp8[1].values
    if packed is not None:
        gate_up, down = packed[0].words, packed[1].words
    if not isinstance(gate_up, torch.Tensor) or not isinstance(down, torch.Tensor):  # checked by ExpertBuffers
        raise TypeError("the two matrices of an expert must both be FP8 or have 4 bits, or neither")
    call = ExpertCall(
        normed,
        scratch.router[:rows],
        gate_up,
        down,
        decoder.stream.counts,
        out,
        scratch.workspace,
        block.top_k,
        selection,
        decoder.pdl,
        clamp,
        _both(layer.gate_up_bias, layer.down_bias),
        fp8,
        _both(layer.gate_up_scales, layer.down_scales),
        add,
        packed,
    )
    experts(call, scratch.plans[rows])


def _both(first: torch.Tensor | None, second: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Two tensors of a layer that exist together, or None."""
    return None if first is None or second is None else (first, second)
