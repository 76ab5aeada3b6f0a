"""Experts parallel to a dense MLP on the GPU: the launches of a layer after its attention.

The MLP, the router and the experts each have a norm of the residual stream. Both results are normalised, then their sum.
"""

from typing import Any

from blinkpy.kernels.norm import rms_norm
from blinkpy.models.description.blocks import Activation, Experts
from blinkpy.models.gpu.attention_stage import part
from blinkpy.models.gpu.gpu_layer_inputs import factor_of_mlp
from blinkpy.models.weights.decoder_weights import LayerWeights


def launch_parallel(decoder: Any, layer: LayerWeights, block: Experts) -> None:
    """Launch the MLP and the experts of a layer, and add their sum to the residual stream.

    decoder: blinkpy.models.gpu.gpu_decoder.GpuDecoder, which imports this file.
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
    decoder._route(layer, of_router)
    decoder._routed(layer, block, decoder._norm(before), decoder.addend_of(routed), add=False)
    decoder.sum_over_ranks(routed)
    rms_norm(routed, behind, eps, counts, dense, add=True, pdl=pdl)
    rms_norm(dense, outer, eps, counts, hidden, add=True, factor=factor_of_mlp(layer), pdl=pdl)
