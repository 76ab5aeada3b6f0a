"""Gemma 4, text only: layers with a window and full layers differ in head size, and in key and value heads.

In E2B and E4B each layer has an embedding of tokens, and the last layers read the keys and values of an earlier one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.models.description.block_readers import FULL, SLIDING, periodic_windows, pre_norm_decoder, read_rope, rope_section
from blinkpy.models.description.blocks import Activation, Attention, Experts, Factors, Mlp, NormPlacement, QkNorm, RouterKind
from blinkpy.models.description.decoder_description import DecoderDescription, TensorNames
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.rope_tables import PROPORTIONAL, Rope
from blinkpy.models.families.family import family

PERIOD = 6  # of layers without a window
ROPES = {
    FULL: {"rope_type": PROPORTIONAL, "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
DEFAULTS: dict[str, Any] = {
    "vocab_size": 262144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "tie_word_embeddings": True,
    "rope_parameters": ROPES,
}
UNIFIED_DEFAULTS: dict[str, Any] = DEFAULTS | {
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 262144,
    "sliding_window": 1024,
    "use_bidirectional_attention": "vision",
}
NAMES = TensorNames(
    post_norm="pre_feedforward_layernorm",
    router="router.proj",
    expert_gate_up=("experts.{expert}.gate_proj", "experts.{expert}.up_proj"),  # of quantised checkpoints
    expert_down="experts.{expert}.down_proj",
    one_for_experts=("experts.gate_up_proj", "experts.down_proj"),
    shared_gate_up=("mlp.gate_proj", "mlp.up_proj"),
    shared_down="mlp.down_proj",
)
IGNORES = (
    *("hidden_act", "rope_theta", "cache_implementation"),
    *("vocab_size_per_layer_input", "use_double_wide_mlp"),  # without such embeddings, or shared layers
    *("num_experts", "top_k_experts", "moe_intermediate_size"),  # without enable_moe_block
    *("global_head_dim", "num_global_key_value_heads"),  # with per_layer_config, which replaces them
)
SIZES = ("head_dim", "num_key_value_heads")


def _refuse_missing_blocks(c: HfConfig) -> None:
    """Raise ConfigError for values of keys whose blocks are not supported."""
    if c["hidden_activation"] not in (None, "gelu_pytorch_tanh"):
        found = c["hidden_activation"]
        raise ConfigError(f"{c.where}: hidden_activation {found!r:.80} is not supported (supported: gelu_pytorch_tanh)")
    if c.integer("hidden_size_per_layer_input", low=0):
        vocab = c.integer("vocab_size_per_layer_input", default=DEFAULTS["vocab_size"])
        if vocab != c.integer("vocab_size"):
            raise ConfigError(f"{c.where}: vocab_size_per_layer_input ({vocab}) must equal vocab_size ({c['vocab_size']})")
    if c.get("use_bidirectional_attention") not in (None, "vision"):  # "vision" is for images alone
        found = c["use_bidirectional_attention"]
        raise ConfigError(f"{c.where}: use_bidirectional_attention {found!r:.80} is not supported (supported: null, 'vision')")


def _rope(c: HfConfig, layer_type: str, head_dim: int) -> Rope:
    """The rotary embedding of layers of a type."""
    sections = c.given("rope_parameters")
    if c.get("rope_scaling") or not isinstance(sections, Mapping) or not isinstance(sections.get(layer_type), Mapping):
        raise ConfigError(f"{c.where}: {c.name} needs rope_parameters with one section for each of {FULL}, {SLIDING}")
    section = rope_section(c, layer_type, frozenset())
    kind = section.get("rope_type") or "default"
    if kind == "default":
        return read_rope(c, head_dim, layer_type=layer_type)
    if kind != PROPORTIONAL:
        raise ConfigError(f"{section.where}: rope type {kind!r:.80} is not supported (supported: default, {PROPORTIONAL})")
    share, factor = section.number("partial_rotary_factor", 1.0), section.number("factor", 1.0)
    if share > 1 or head_dim % 2:
        raise ConfigError(f"{section.where}: partial_rotary_factor {share:g} of heads of {head_dim} elements is not supported")
    return Rope(PROPORTIONAL, section.number("rope_theta"), head_dim, factor=factor, turned=int(share * head_dim // 2))


def _sizes(c: HfConfig, full: list[int], sliding: list[int]) -> dict[str, tuple[int, int]]:
    """(head size, key and value heads) for layers of each type. full, sliding: the layers of each type. transformers saves sizes
    that differ between layers in per_layer_config; published configs use other keys.
    """
    usual = c.integer("head_dim"), c.integer("num_key_value_heads")
    if c.get("per_layer_config") is None:
        heads = c.integer("num_global_key_value_heads", default=usual[1]) if c.flag("attention_k_eq_v") else usual[1]
        return {FULL: (c.integer("global_head_dim"), heads), SLIDING: usual}
    of_layers = _sizes_of_layers(c, usual, len(full) + len(sliding))
    found = {kind: {of_layers[layer] for layer in layers} for kind, layers in ((FULL, full), (SLIDING, sliding))}
    for kind, sizes in found.items():
        if len(sizes) > 1:
            raise ConfigError(f"{c.where}: per_layer_config gives layers with {kind} different sizes, which is not supported")
    return {kind: next(iter(sizes), usual) for kind, sizes in found.items()}


def _sizes_of_layers(c: HfConfig, usual: tuple[int, int], layers: int) -> list[tuple[int, int]]:
    """The sizes of each layer from per_layer_config: {number of a layer: {key: value}}."""
    found, given = [usual] * layers, c["per_layer_config"]
    names = {str(layer): layer for layer in range(layers)}
    if not isinstance(given, Mapping) or not all(str(name) in names for name in given):
        raise ConfigError(f"{c.where}: per_layer_config must be an object with numbers of layers below {layers} as keys")
    for name, values in given.items():
        where = f"{c.where}: per_layer_config.{name}"
        if not isinstance(values, Mapping) or set(values) - set(SIZES):
            raise ConfigError(f"{where} must be an object with the keys {', '.join(SIZES)}, not {values!r:.80}")
        own = HfConfig(c.name, values, dict(zip(SIZES, usual, strict=True)), where)
        found[names[str(name)]] = own.integer(SIZES[0]), own.integer(SIZES[1])
    return found


def _keys_of(c: HfConfig, windows: Sequence[int]) -> list[int | None]:
    """For each layer, the earlier layer whose keys and values it reads, or None. The last layers read from the last layer of
    their type that has its own keys and values.
    """
    shared, first = c.integer("num_kv_shared_layers", default=0, low=0), len(windows)
    first -= shared
    if shared and first <= 0:
        raise ConfigError(f"{c.where}: num_kv_shared_layers ({shared}) must be below num_hidden_layers ({len(windows)})")
    own = {bool(window): layer for layer, window in enumerate(windows[:first])}  # the last one of each type
    for layer, window in enumerate(windows[first:], first):
        if bool(window) not in own:
            raise ConfigError(
                f"{c.where}: num_kv_shared_layers ({shared}) leaves layer {layer}, with {SLIDING if window else FULL}, no "
                "earlier layer of its type to share keys and values with"
            )
    return [None if layer < first else own[bool(window)] for layer, window in enumerate(windows)]


def _mlp(c: HfConfig, *, shares: bool) -> Mlp | Experts:
    """The MLP or experts of a layer. shares: keys and values of another layer."""
    wide = shares and c.flag("use_double_wide_mlp")
    if c.flag("enable_moe_block"):
        if wide:
            raise ConfigError(f"{c.where}: use_double_wide_mlp is not supported together with enable_moe_block")
        return _experts(c)
    return Mlp(c.integer("intermediate_size") * (2 if wide else 1), Activation.GELU_TANH)


def _experts(c: HfConfig) -> Experts:
    """Experts parallel to an MLP."""
    number, top_k = c.integer("num_experts"), c.integer("top_k_experts")
    if top_k > number:
        raise ConfigError(f"{c.where}: top_k_experts ({top_k}) is above num_experts ({number})")
    return Experts(
        number,
        top_k,
        c.integer("moe_intermediate_size"),
        RouterKind.SOFTMAX_TOP_K,
        Activation.GELU_TANH,
        normalize=True,
        shared=c.integer("intermediate_size"),
        parallel=True,
    )


@family(
    "Gemma4UnifiedForCausalLM",
    models="Gemma 4 12B, saved as text only",
    model_type="gemma4_unified_text",
    defaults=UNIFIED_DEFAULTS,
    ignores=IGNORES,
)
def gemma4_unified(c: HfConfig) -> DecoderDescription:
    return gemma4(c)


@family(
    "Gemma4ForCausalLM",
    models="Gemma 4 E2B, E4B, 26B-A4B and 31B, saved as text only",
    model_type="gemma4_text",
    defaults=DEFAULTS,
    ignores=IGNORES,
)
def gemma4(c: HfConfig) -> DecoderDescription:
    _refuse_missing_blocks(c)
    windows = (*periodic_windows(c, PERIOD)[:-1], 0)  # the last layer is a full one, whatever its type
    full, sliding = ([layer for layer, window in enumerate(windows) if bool(window) is has] for has in (False, True))
    sizes, heads, bias = _sizes(c, full, sliding), c.integer("num_attention_heads"), c.flag("attention_bias")
    attentions = {}
    for kind, (head_dim, kv_heads) in sizes.items():
        if heads % kv_heads:
            raise ConfigError(
                f"{c.where}: num_attention_heads ({heads}) is not a multiple of the {kv_heads} key and value heads of layers "
                f"with {kind}"
            )
        attentions[kind] = Attention(
            heads,
            kv_heads,
            head_dim,
            _rope(c, kind, head_dim),
            qk_norm=QkNorm.HEAD,
            qkv_bias=bias,
            o_bias=bias,
            scale=1.0,
            value_norm=True,
            keys_are_values=c.flag("attention_k_eq_v") and kind == FULL,
        )
    sources, mlps = _keys_of(c, windows), [_mlp(c, shares=shares) for shares in (False, True)]
    model = pre_norm_decoder(c, attentions[FULL], mlps[0], windows, NAMES)
    layers = tuple(
        layer._replace(
            attention=attentions[SLIDING if window else FULL]._replace(window=window, keys_of=source),
            mlp=mlps[source is not None],
            scaled=True,
        )
        for layer, window, source in zip(model.layers, windows, sources, strict=True)
    )
    softcap = 0.0 if c.get("final_logit_softcapping") is None else c.number("final_logit_softcapping")
    factors = Factors(embedding=model.hidden_size**0.5, rounded=True, softcap=softcap)
    inputs = c.integer("hidden_size_per_layer_input", low=0)
    return replace(model, layers=layers, placement=NormPlacement.SANDWICH, factors=factors, layer_inputs=inputs)
