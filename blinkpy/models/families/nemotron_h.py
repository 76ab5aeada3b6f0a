"""Nemotron-H, Nemotron Nano 2 and Nemotron 3 Nano: state spaces (Mamba-2), attention without rotation, MLPs or experts without a
gate, which all count as layers. Here an MLP belongs to the layer before it.
"""

from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import pre_norm_decoder
from blinkpy.models.description.blocks import Activation, Attention, Experts, Layer, Mlp, Norm
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.expert_readers import biased_sigmoid_experts
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.recurrent_blocks import StateSpace
from blinkpy.models.description.rope_tables import NONE, Rope
from blinkpy.models.description.space_readers import MOST_TAPS, require_free_time_steps
from blinkpy.models.families.family import family

FULL, RECURRENT, MLP, MOE = "full_attention", "linear_attention", "mlp", "moe"
MIXERS = FULL, RECURRENT
TYPES = {"attention": FULL, "mamba": RECURRENT, **{name: name for name in (*MIXERS, MLP, MOE)}}
LETTERS = {"M": RECURRENT, "*": FULL, "-": MLP, "E": MOE}  # of hybrid_override_pattern
DEFAULT_LAYERS = [RECURRENT, MOE, FULL, MLP]
DEFAULTS: dict[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "moe_shared_expert_intermediate_size": 7688,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
}
NAMES = TensorNames(
    embedding="model.embeddings",
    final_norm="model.norm_f",
    input_norm="norm",
    post_norm="norm",
    qkv=("mixer.q_proj", "mixer.k_proj", "mixer.v_proj"),
    o="mixer.o_proj",
    gate_up=("mixer.up_proj",),
    down="mixer.down_proj",
    router="mixer.gate",
    selection_bias="mixer.gate.e_score_correction_bias",
    expert_gate_up=("mixer.experts.{expert}.up_proj",),
    expert_down="mixer.experts.{expert}.down_proj",
    shared_gate_up=("mixer.shared_experts.up_proj",),
    shared_down="mixer.shared_experts.down_proj",
    counts_mlps=True,
    recurrent_in=("mixer.in_proj",),
    recurrent_conv="mixer.conv1d",
    recurrent_decay="mixer.A_log",
    recurrent_bias="mixer.dt_bias",
    recurrent_norm="mixer.norm",
    recurrent_skip="mixer.D",
    recurrent_out="mixer.out_proj",
    renamed=(("backbone.", "model."),),
    spare=("mtp.",),
)
INERT = """
    intermediate_size moe_intermediate_size moe_shared_expert_intermediate_size n_routed_experts num_experts_per_tok n_group
    topk_group norm_topk_prob routed_scaling_factor moe_shared_expert_overlap output_router_logits mlp_bias
    chunk_size expand time_step_min time_step_max time_step_floor time_step_limit mamba_ssm_cache_dtype use_mamba_kernels
    num_nextn_predict_layers mtp_layers_block_type mtp_hybrid_override_pattern num_logits_to_keep rescale_prenorm_residual
    residual_in_fp32 norm_eps rms_norm_eps rope_theta rope_parameters rope_scaling partial_rotary_factor hidden_act"""
SUPPORTED = (  # of keys with one supported value
    ("mlp_hidden_act", "relu2"),
    ("mamba_hidden_act", "silu"),
    ("mamba_proj_bias", False),
    ("moe_latent_size", None),
    ("n_shared_experts", 1),
)


@family(
    "NemotronHForCausalLM",
    models="Nemotron-H, Nemotron Nano 2, Nemotron 3 Nano; without the layers for multi-token prediction",
    model_type="nemotron_h",
    defaults=DEFAULTS,
    ignores=tuple(INERT.split()),
)
def nemotron_h(c: HfConfig) -> DecoderDescription:
    for key, value in SUPPORTED:
        if c.get(key) not in (None, value):
            raise ConfigError(f"{c.where}: {key} {c[key]!r:.80} is not supported for {c.name} (supported: {value})")
    types = _layer_types(c)
    mixers = [number for number, name in enumerate(types) if name in MIXERS]
    behind = [types[number + 1] if number + 1 < len(types) else FULL for number in mixers]
    blocks = {name: _mlp(c) if name == MLP else _experts(c) for name in (MLP, MOE) if name in types}
    attention, space = _attention(c), _state_space(c) if RECURRENT in types else None
    layers = tuple(
        Layer(attention, blocks.get(follows), space if types[number] == RECURRENT else None)
        for number, follows in zip(mixers, behind, strict=True)
    )
    norm = Norm(c.number("layer_norm_epsilon", below=1))
    model = pre_norm_decoder(c, attention, Mlp(1), (0,) * len(layers), NAMES, norm=norm)
    return replace(model, layers=layers)


def _layer_types(c: HfConfig) -> list[str]:
    """The kind of each layer of the checkpoint. Raises ConfigError unless each MLP follows attention or a state space."""
    pattern, types = c.get("hybrid_override_pattern"), _stated_types(c)
    if types is None and pattern is not None:
        if not isinstance(pattern, str) or set(pattern) - set(LETTERS):
            raise ConfigError(f"{c.where}: hybrid_override_pattern must be a text of {' '.join(LETTERS)}, not {pattern!r:.80}")
        types = [LETTERS[letter] for letter in pattern]
    types = DEFAULT_LAYERS if types is None else types
    for number, name in enumerate(types):
        if name not in MIXERS and (number == 0 or types[number - 1] not in MIXERS):
            raise ConfigError(
                f"{c.where}: layers_block_type: layer {number} is {name}; it must follow a layer of {RECURRENT} or {FULL}"
            )
    if FULL not in types:
        raise ConfigError(f"{c.where}: layers_block_type needs at least one layer of {FULL}")
    count = c.integer("num_hidden_layers", default=len(types))
    if count != len(types):
        raise ConfigError(f"{c.where}: num_hidden_layers ({count}) must be the number of kinds of layers ({len(types)})")
    return types


def _stated_types(c: HfConfig) -> list[str] | None:
    """The kinds of layers, if they are listed."""
    listed = [c.get(key) for key in ("layers_block_type", "layer_types")]
    found = next((types for types in listed if types is not None), None)
    if found is None:
        return None
    if not isinstance(found, list) or not all(isinstance(name, str) and name in TYPES for name in found):
        raise ConfigError(f"{c.where}: layers_block_type must be a list of names, each of {', '.join(TYPES)}, not {found!r:.200}")
    return [TYPES[name] for name in found]


def _attention(c: HfConfig) -> Attention:
    heads, size = c.integer("num_attention_heads"), c.integer("head_dim")
    kv_heads = heads if c.is_null("num_key_value_heads") else c.integer("num_key_value_heads")
    if heads % kv_heads:
        raise ConfigError(f"{c.where}: num_attention_heads ({heads}) is not a multiple of num_key_value_heads ({kv_heads})")
    if size % 2:
        raise ConfigError(f"{c.where}: head_dim must be even, not {size}")
    if c.integer("attention_head_dim", default=size) != size:
        raise ConfigError(f"{c.where}: attention_head_dim ({c['attention_head_dim']}) must be head_dim ({size})")
    return Attention(heads, kv_heads, size, Rope(NONE, 1e4, size))


def _mlp(c: HfConfig) -> Mlp:
    return Mlp(c.integer("intermediate_size"), Activation.SQUARED_RELU, c.flag("mlp_bias"))


def _experts(c: HfConfig) -> Experts:
    if c.flag("mlp_bias"):
        raise ConfigError(f"{c.where}: mlp_bias is not supported for {c.name} with experts")
    shared, factor = c.integer("moe_shared_expert_intermediate_size"), c.number("routed_scaling_factor", 1.0)
    experts = biased_sigmoid_experts(c, shared=shared, factor=factor, normalize=c.flag("norm_topk_prob"))
    return experts._replace(activation=Activation.SQUARED_RELU)


def _state_space(c: HfConfig) -> StateSpace:
    require_free_time_steps(c)
    heads, groups = c.integer("mamba_num_heads"), c.integer("n_groups", "mamba_n_groups")
    if heads % groups:
        raise ConfigError(f"{c.where}: mamba_num_heads ({heads}) must be a multiple of n_groups ({groups})")
    taps = c.integer("conv_kernel", "mamba_d_conv", low=2, high=MOST_TAPS)
    conv_bias = "mamba_conv_bias" if "mamba_conv_bias" in c else "use_conv_bias"
    sizes, bias = (c.integer("ssm_state_size"), c.integer("mamba_head_dim")), c.flag("use_bias")
    return StateSpace(heads, groups, *sizes, taps, bias, c.flag(conv_bias), bias)
