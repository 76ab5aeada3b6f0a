"""A decoder's weights as torch tensors: shapes, order and dtypes."""

from dataclasses import dataclass

import torch

from blinkpy.kernels.quantised_matrices import Fp8Matrix, PackedMatrix
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.weights.compute_dtype import dtype_name
from blinkpy.models.weights.parts.part import Part

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Matrix = torch.Tensor | Fp8Matrix | PackedMatrix


@dataclass
class LayerWeights:
    """Weights of one layer. Projections are [out, in] and fused: qkv holds q, k and v heads; gate_up the
    gate, then up, or up alone without a gate. A layer without an MLP has neither gate_up nor down. A layer
    that reads another layer's keys and values has only queries in qkv, and no k_norm.

    An expert layer has a router [experts, hidden]. Its gate_up, down and their biases have a leading
    dimension for the expert, unlike its shared MLP. In MXFP4, gate_up, down and their scales are uint8: a
    byte has two weights, the first one in its lower half, so the last dimension is half as long. A scale is a
    power of two with an offset of 127. Norms with an offset are float32.

    A recurrent layer has its first projection in qkv, its last one in o, and the fields recurrent_... With a gated delta net, qkv
    has the channels, then the gate; with a state space also the time steps. A gate of attention's output comes after the values
    in qkv.

    k_scale, v_scale: factors of an FP8 cache's keys and values; None if the checkpoint has no such scales.

    With latent attention, qkv holds the rows of queries (with q_b, of its input), of the latent vector, and of the
    rotated part of keys. kv_b has for each head the rows of its keys' plain part, then those of its values. It is
    never quantised.
    """

    qkv: Matrix  # [(heads + 2 * kv_heads) * head_dim, hidden]
    o: Matrix  # [hidden, heads * head_dim]
    gate_up: Matrix | None = None  # [2 * intermediate, hidden] or [experts, 2 * expert_size, hidden]
    down: Matrix | None = None  # [hidden, intermediate] or [experts, hidden, expert_size]
    input_norm: torch.Tensor | None = None  # [hidden] before attention
    attention_out_norm: torch.Tensor | None = None  # [hidden] after attention
    post_norm: torch.Tensor | None = None  # [hidden] before the MLP
    mlp_out_norm: torch.Tensor | None = None  # [hidden] after the MLP
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None  # [head_dim] or [heads * head_dim]
    k_norm: torch.Tensor | None = None  # [head_dim] or [kv_heads * head_dim]
    router: torch.Tensor | None = None  # [experts, hidden]
    router_bias: torch.Tensor | None = None  # [experts]
    selection_bias: torch.Tensor | None = None  # float32 [experts], or [1, experts] with RouterKind.BIASED_SOFTMAX_TOP_K
    shared_gate_up: Matrix | None = None  # [2 * shared, hidden]
    shared_down: Matrix | None = None  # [hidden, shared]
    shared_gate: torch.Tensor | None = None  # [1, hidden]
    shared_out_norm: torch.Tensor | None = None  # [hidden], as the two below; of an MLP parallel to experts
    experts_in_norm: torch.Tensor | None = None
    experts_out_norm: torch.Tensor | None = None
    router_norm: torch.Tensor | None = None  # float32 [hidden]
    expert_factors: torch.Tensor | None = None  # float32 [experts]
    layer_scale: torch.Tensor | None = None  # [1]
    layer_input_gate: Matrix | None = None  # [layer_inputs, hidden]
    layer_input_projection: Matrix | None = None  # [hidden, layer_inputs]
    layer_input_norm: torch.Tensor | None = None  # [hidden]
    sinks: torch.Tensor | None = None  # [heads]
    delta_ba: Matrix | None = None  # [2 * value_heads, hidden], of strengths and of decays
    recurrent_conv: torch.Tensor | None = None  # [channels, taps], the last tap for the token itself
    recurrent_conv_bias: torch.Tensor | None = None  # [channels]
    recurrent_decay: torch.Tensor | None = None  # float32 [value_heads], logarithm of the rate
    recurrent_bias: torch.Tensor | None = None  # float32 [value_heads], of decays
    recurrent_norm: torch.Tensor | None = None  # [value_dim]; of a state space: [value_size]
    recurrent_skip: torch.Tensor | None = None  # float32 [heads]
    space_in: Matrix | None = None  # [in_size, hidden], of a state space parallel to attention, as the three below
    space_in_bias: torch.Tensor | None = None
    space_out: Matrix | None = None  # [hidden, value_size]
    space_out_bias: torch.Tensor | None = None
    gate_up_scales: torch.Tensor | None = None  # [experts, 2 * expert_size, hidden / 32]
    down_scales: torch.Tensor | None = None  # [experts, hidden, expert_size / 32]
    k_scale: float | None = None
    v_scale: float | None = None
    q_b: Matrix | None = None  # [heads * (plain + rotated), q_rank]
    kv_b: torch.Tensor | None = None  # [heads * (plain + value), rank]


@dataclass
class Weights:
    """All weights of a decoder, of one dtype except norms, and on one device. Tied embeddings: lm_head is the
    embedding.
    """

    embedding: torch.Tensor  # [vocab, hidden]
    layers: list[LayerWeights]
    final_norm: torch.Tensor  # [hidden]
    lm_head: torch.Tensor  # [vocab, hidden]
    layer_embedding: torch.Tensor | None = None  # [vocab, layers * layer_inputs]
    layer_projection: torch.Tensor | None = None  # [layers * layer_inputs, hidden]
    layer_projection_norm: torch.Tensor | None = None  # [layer_inputs]
    draft_embedding_norm: torch.Tensor | None = None  # [hidden], as the two below; around a draft layer
    draft_hidden_norm: torch.Tensor | None = None
    draft_norm: torch.Tensor | None = None
    # [hidden, 2 * hidden], of the embedding, then of the hidden state; of a draft head: [hidden, layers * hidden of the model]
    draft_projection: torch.Tensor | None = None
    draft_head: "Weights | None" = None
    head_tokens: torch.Tensor | None = None  # int32 [rows of a draft head's lm_head], the token of each

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        return self.embedding.device


def choose_dtype(model: DecoderDescription, requested: str, device: str) -> torch.dtype:
    """The dtype for computing: see dtype_name."""
    return TORCH_DTYPES[dtype_name(model, requested, device)]


def embedding_factor(model: DecoderDescription, dtype: torch.dtype) -> float:
    """The factor of embeddings in a dtype."""
    factor = model.factors.embedding
    return float(torch.tensor(factor).to(dtype)) if model.factors.rounded else factor


def layer_embedding_factor(model: DecoderDescription, dtype: torch.dtype) -> float:
    """The factor of the embeddings for each layer in a dtype."""
    return float(torch.tensor(model.layer_inputs**0.5).to(dtype))


def own_dtype(part: Part, dtype: torch.dtype) -> torch.dtype:
    """The dtype of a weight, for a decoder with weights of type `dtype`."""
    return torch.uint8 if part.packed else torch.float32 if part.wide else dtype
