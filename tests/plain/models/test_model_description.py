"""config.json to DecoderDescription: published models in their own spelling, and everything that has to be refused."""

import json
import re
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import Activation, Attention, Experts, Factors, Layer, Mlp, NormPlacement, RouterKind
from blinkpy.models.families.describe_model import describe_config, describe_model
from blinkpy.models.families.family import families
from blinkpy.models.weights.checkpoint import weight_elements

SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size",
    "max_position_embeddings",
)  # fmt: skip


def config(name: str, *sizes: int, rms_norm_eps: float = 1e-5, **more: Any) -> dict[str, Any]:
    """A config.json of a published model. sizes: as in SIZES. more: the other keys that it has, with their values."""
    common = {"architectures": [f"{name}ForCausalLM"], "hidden_act": "silu", "torch_dtype": "bfloat16"}
    return common | {"tie_word_embeddings": False, "rms_norm_eps": rms_norm_eps} | dict(zip(SIZES, sizes, strict=True)) | more


LLAMA3_ROPE = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}
QWEN3 = {"head_dim": 128, "attention_bias": False, "rope_scaling": None, "sliding_window": None, "use_sliding_window": False}
QWEN3_EXPERTS = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
PHI3 = {"original_max_position_embeddings": 4096, "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}
MIXTRAL = {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02}

LLAMA_31_8B = config(
    "Llama", 4096, 14336, 32, 32, 8, 128256, 131072, rope_theta=500000.0, rope_scaling=LLAMA3_ROPE, model_type="llama",
    attention_bias=False, mlp_bias=False, pretraining_tp=1,
)  # fmt: skip
MISTRAL_7B = config("Mistral", 4096, 14336, 32, 32, 8, 32000, 32768, rope_theta=10000.0, sliding_window=4096)
QWEN25_7B = config(
    "Qwen2", 3584, 18944, 28, 28, 4, 152064, 32768, rms_norm_eps=1e-6, rope_theta=1000000.0, max_window_layers=28,
    sliding_window=131072, use_sliding_window=False,
)  # fmt: skip
QWEN3_30B_A3B = config(
    "Qwen3Moe", 2048, 6144, 48, 32, 4, 151936, 40960, rms_norm_eps=1e-6, rope_theta=1000000.0, max_window_layers=48,
    **QWEN3, **QWEN3_EXPERTS,
)  # fmt: skip
QWEN3_8B = config(
    "Qwen3", 4096, 12288, 36, 32, 8, 151936, 40960, rms_norm_eps=1e-6, rope_theta=1000000.0, max_window_layers=36, **QWEN3
)
PHI3_MINI = config("Phi3", 3072, 8192, 32, 32, 32, 32064, 4096, rope_theta=1e4, rope_scaling=None, sliding_window=2047, **PHI3)
PHI4_MINI = config(
    "Phi3", 3072, 8192, 32, 24, 8, 200064, 131072, rope_theta=10000.0, rope_scaling=LONGROPE, partial_rotary_factor=0.75,
    sliding_window=262144, **PHI3 | {"tie_word_embeddings": True},
)  # fmt: skip
PHI4 = config("Phi3", 5120, 17920, 40, 40, 10, 100352, 16384, rope_theta=250000, rope_scaling=None, sliding_window=None, **PHI3)
MIXTRAL_8X7B = config("Mixtral", 4096, 14336, 32, 32, 8, 32000, 32768, rope_theta=1000000.0, sliding_window=None, **MIXTRAL)
SMOLLM3_3B = config(
    "SmolLM3", 2048, 11008, 36, 16, 4, 128256, 65536, rms_norm_eps=1e-6, rope_theta=5e6, rope_scaling=None, mlp_bias=False,
    attention_bias=False, no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0] * 9, layer_types=["full_attention"] * 36,
    use_sliding_window=False, sliding_window=None, max_window_layers=28, tie_word_embeddings=True,
)  # fmt: skip
GRANITE_31_8B = config(
    "Granite", 4096, 12800, 40, 32, 8, 49155, 131072, rope_theta=1e7, rope_scaling=None, attention_bias=False, mlp_bias=False,
    attention_multiplier=0.0078125, embedding_multiplier=12.0, residual_multiplier=0.22, logits_scaling=16.0,
    tie_word_embeddings=True,
)  # fmt: skip
GPT_OSS_20B = config(
    "GptOss", 2880, 2880, 24, 64, 8, 201088, 131072, model_type="gpt_oss", head_dim=64, attention_bias=True, sliding_window=128,
    layer_types=["sliding_attention", "full_attention"] * 12, num_local_experts=32, num_experts_per_tok=4, experts_per_token=4,
    initial_context_length=4096, swiglu_limit=7.0, rope_theta=150000, quantization_config={"quant_method": "mxfp4"},
    rope_scaling={
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False, "beta_fast": 32.0,
        "beta_slow": 1.0,
    },
)  # fmt: skip
GRANITE4 = config(
    "GraniteMoeHybrid", 2560, 8192, 8, 40, 8, 100352, 131072, num_local_experts=0, shared_intermediate_size=8192,
    layer_types=["attention"] * 8, position_embedding_type="rope",
)  # fmt: skip
PUBLISHED = {  # name -> config, parameters
    "Llama-3.1-8B": (LLAMA_31_8B, 8_030_261_248),
    "Mistral-7B": (MISTRAL_7B, 7_241_732_096),
    "Qwen2.5-7B": (QWEN25_7B, 7_615_616_512),
    "Qwen3-30B-A3B": (QWEN3_30B_A3B, 30_532_122_624),
    "Qwen3-8B": (QWEN3_8B, 8_190_735_360),
    "Phi-3-mini": (PHI3_MINI, 3_821_079_552),
    "Phi-4-mini": (PHI4_MINI, 3_836_021_760),
    "Phi-4": (PHI4, 14_659_507_200),
    "Mixtral-8x7B": (MIXTRAL_8X7B, 46_702_792_704),
    "SmolLM3-3B": (SMOLLM3_3B, 3_075_098_624),
    "Granite-3.1-8B": (GRANITE_31_8B, 8_170_848_256),
    "gpt-oss-20b": (GPT_OSS_20B, 20_914_757_184),
    "gpt-oss-120b": (GPT_OSS_20B | {"num_hidden_layers": 36, "num_local_experts": 128, "layer_types": None}, 116_829_156_672),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_size(name: str) -> None:
    config, parameters = PUBLISHED[name]
    assert weight_elements(describe_config(config)) == parameters


def test_fields_of_published_models() -> None:
    model = describe_config(LLAMA_31_8B)
    rope = model.attention.rope
    assert (model.head_dim, model.q_size, model.kv_size, model.dtype) == (128, 4096, 1024, "bfloat16")
    assert (rope.kind, rope.theta, rope.factor, rope.original_max_position) == ("llama3", 500000.0, 8.0, 8192)
    assert model.layers == (Layer(Attention(32, 8, 128, rope), Mlp(14336)),) * 32
    assert not model.tied_embeddings
    assert windows(MISTRAL_7B) == (4096,) * 32
    assert windows({k: v for k, v in MISTRAL_7B.items() if k != "sliding_window"}) == (4096,) * 32
    model = describe_config(QWEN25_7B)
    assert (model.attention.qkv_bias, model.attention.o_bias, windows(QWEN25_7B)) == (True, False, (0,) * 28)
    changes = {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}
    assert windows(QWEN25_7B | changes) == (0,) * 20 + (4096,) * 8
    model = describe_config(QWEN3_30B_A3B)
    assert model.attention.qk_norm
    assert all(model.expert_layers)
    assert model.experts == Experts(128, 8, 768, RouterKind.SOFTMAX_TOP_K, Activation.SILU, normalize=True)
    model = describe_config(QWEN3_30B_A3B | {"decoder_sparse_step": 2, "mlp_only_layers": [1, 5]})
    assert model.expert_layers[:8] == (False, False, False, True, False, False, False, True)
    assert (model.mlp_size, model.experts.size) == (6144, 768)
    model = describe_config(MIXTRAL_8X7B)
    assert all(model.expert_layers)
    assert model.experts == Experts(8, 2, 14336, RouterKind.TOP_K_SOFTMAX, Activation.SILU, normalize=True)
    assert (model.attention.rope.theta, windows(MIXTRAL_8X7B)) == (1e6, (0,) * 32)
    assert windows(PHI3_MINI) == (2047,) * 32
    model = describe_config(SMOLLM3_3B)
    assert [layer.attention.rope.kind for layer in model.layers] == ["default", "default", "default", "none"] * 9
    assert describe_config({k: v for k, v in SMOLLM3_3B.items() if k != "no_rope_layers"}) == model
    model = describe_config(GRANITE_31_8B)
    assert (model.attention.score_scale, model.factors) == (1 / 128, Factors(12.0, 0.22, 1 / 16))
    rope = describe_config(PHI4_MINI).attention.rope
    assert (rope.kind, rope.rotary_dim, rope.original_max_position, rope.factor) == ("longrope", 96, 4096, 32.0)
    assert abs(rope.attention_factor - 1.1902380714238083) < 1e-9


def windows(config: dict[str, Any]) -> tuple[int, ...]:
    return tuple(layer.attention.window for layer in describe_config(config).layers)


def test_a_stated_factor_multiplies_the_context() -> None:
    """As Qwen's and Vicuna's pages have it; where config.json states the product already, it stays."""
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    for config, changes, context in (
        (QWEN25_7B, {"rope_scaling": yarn}, 131072),
        (QWEN3_8B, {"rope_scaling": yarn}, 131072),
        (QWEN25_7B, {"rope_scaling": yarn, "max_position_embeddings": 131072}, 131072),
        (QWEN25_7B, {"rope_scaling": {"type": "yarn", "factor": 2.5}}, 81920),
        (LLAMA_31_8B, {"max_position_embeddings": 4096, "rope_scaling": {"type": "linear", "factor": 4.0}}, 16384),
        (LLAMA_31_8B, {}, 131072),
        (LLAMA_31_8B, {"rope_scaling": {"type": "linear", "factor": 1e300}}, 1 << 31),
    ):
        model = describe_config(config | changes)
        assert model.max_position == model.default_context == context


def test_longrope_keeps_to_its_short_factors_unless_more_is_asked_for() -> None:
    model = describe_config(PHI4_MINI)
    assert (model.max_position, model.default_context) == (131072, 4096)


def test_dynamic_scaling_begins_beyond_the_context_and_inert_parameters_change_nothing() -> None:
    for scaling in ({"type": "dynamic", "factor": 2.0}, {"type": "dynamic", "factor": 4.0, "finetuned": True}):
        assert describe_config(QWEN25_7B | {"rope_scaling": scaling}) == describe_config(QWEN25_7B)
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    assert describe_config(QWEN25_7B | {"rope_scaling": yarn | {"finetuned": False}}) == describe_config(
        QWEN25_7B | {"rope_scaling": yarn}
    )


def test_mistral_has_windows_where_its_layers_say_so() -> None:
    types = ["full_attention", "sliding_attention"] * 16
    assert windows(MISTRAL_7B | {"layer_types": types}) == (0, 4096) * 16


def test_both_spellings_give_the_same() -> None:
    """rope_theta, rope_scaling, torch_dtype; or rope_parameters, dtype as transformers 5 writes them."""

    def modern(config: dict[str, Any]) -> dict[str, Any]:
        config = dict(config)
        scaling = dict(config.pop("rope_scaling", None) or {})
        parameters = {"rope_theta": config.pop("rope_theta"), "rope_type": scaling.pop("type", "default"), **scaling}
        if "partial_rotary_factor" in config:
            parameters["partial_rotary_factor"] = config.pop("partial_rotary_factor")
        return config | {"rope_parameters": parameters, "dtype": config.pop("torch_dtype")}

    for config in (LLAMA_31_8B, MISTRAL_7B, QWEN3_30B_A3B, PHI3_MINI, PHI4_MINI):
        assert "rope_theta" not in modern(config)
        assert describe_config(modern(config)) == describe_config(config)
    for old in ("su", "yarn"):
        assert describe_config(PHI4_MINI | {"rope_scaling": LONGROPE | {"type": old}}) == describe_config(PHI4_MINI)


@pytest.mark.parametrize(
    ("config", "changes", "words"),
    [
        (LLAMA_31_8B, {"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel is not supported .*Qwen3MoeForCausalLM"),
        (LLAMA_31_8B, {"architectures": []}, "architectures"),
        (LLAMA_31_8B, {"architectures": None, "model_type": "mamba"}, "mamba"),
        (LLAMA_31_8B, {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (LLAMA_31_8B, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (LLAMA_31_8B, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        (LLAMA_31_8B, {"sliding_window": 4096}, "sliding_window is not supported by LlamaForCausalLM"),
        (LLAMA_31_8B, {"rope_interleaved": True}, "rope_interleaved"),
        (LLAMA_31_8B, {"layer_types": ["sliding_attention"] * 32}, "sliding_attention, but sliding_window is not set"),
        (LLAMA_31_8B, {"hidden_size": None}, "hidden_size is missing"),
        (LLAMA_31_8B, {"hidden_size": "4096"}, "hidden_size must be an integer"),
        (LLAMA_31_8B, {"num_hidden_layers": 0}, "num_hidden_layers"),
        (LLAMA_31_8B, {"num_hidden_layers": True}, "num_hidden_layers"),
        (LLAMA_31_8B, {"num_key_value_heads": 5}, "num_key_value_heads"),
        (LLAMA_31_8B, {"hidden_size": 4095}, "head_dim is missing"),
        (LLAMA_31_8B, {"head_dim": 127}, "even"),
        (LLAMA_31_8B, {"vocab_size": 1 << 25}, "vocab_size"),
        (LLAMA_31_8B, {"rms_norm_eps": 0}, "rms_norm_eps"),
        (LLAMA_31_8B, {"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (LLAMA_31_8B, {"attention_bias": "yes"}, "attention_bias"),
        (LLAMA_31_8B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        (LLAMA_31_8B, {"rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "'ntk'.*longrope"),
        (LLAMA_31_8B, {"rope_scaling": {**LLAMA3_ROPE, "factor": None}}, "factor is missing"),
        (LLAMA_31_8B, {"rope_scaling": {**LLAMA3_ROPE, "factor": float("nan")}}, "factor"),
        (LLAMA_31_8B, {"rope_scaling": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor"),
        (LLAMA_31_8B, {"rope_scaling": {**LLAMA3_ROPE, "mrope_section": [16, 24, 24]}}, "mrope_section"),
        (LLAMA_31_8B, {"rope_scaling": "linear"}, "rope_scaling"),
        (LLAMA_31_8B, {"rope_scaling": {"full_attention": {"rope_type": "default"}}}, "per layer type"),
        (PHI4_MINI, {"rope_scaling": {**LONGROPE, "short_factor": [1.0] * 47}}, "short_factor must have 48"),
        (PHI4_MINI, {"rope_scaling": {**LONGROPE, "long_factor": None}}, "long_factor"),
        (MIXTRAL_8X7B, {"layer_types": ["full_attention", "sliding_attention"] * 16, "sliding_window": 9}, "layer_types"),
        (MISTRAL_7B, {"attention_bias": True}, "attention_bias"),
        (QWEN25_7B, {"layer_types": ["linear_attention"] * 28}, "linear_attention"),
        (QWEN25_7B, {"mlp_bias": True}, "mlp_bias"),
        (QWEN3_30B_A3B, {"num_experts_per_tok": 129}, "num_experts_per_tok"),
        (QWEN3_30B_A3B, {"mlp_only_layers": [48]}, "mlp_only_layers"),
        (MIXTRAL_8X7B, {"num_experts_per_tok": 9}, "num_experts_per_tok"),
        (MIXTRAL_8X7B, {"attention_bias": True}, "attention_bias is not supported by MixtralForCausalLM"),
        (SMOLLM3_3B, {"no_rope_layers": [1] * 35}, "no_rope_layers must be a list of 36 zeros and ones"),
        (SMOLLM3_3B, {"no_rope_layers": [2] * 36}, "no_rope_layers"),
        (GRANITE_31_8B, {"residual_multiplier": 0}, "residual_multiplier"),
        (LLAMA_31_8B, {"residual_multiplier": 0.5}, "residual_multiplier is not supported by LlamaForCausalLM"),
        (GRANITE4, {"layer_types": ["mamba", "attention"] * 4}, "attention in all layers"),
        (GRANITE4, {"num_local_experts": 62}, "without experts"),
        (GRANITE4, {"position_embedding_type": "alibi"}, "alibi"),
        (QWEN3_30B_A3B, {"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size"),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config 'fp8' is not supported by GptOss"),
        (GPT_OSS_20B, {"quantization_config": ["mxfp4"]}, "quantization_config"),
        (GPT_OSS_20B, {"quantization_config": {"quant_method": "mxfp4", "group_size": 64}}, "group_size not supported"),
        (GPT_OSS_20B, {"hidden_size": 2864}, "multiples of 32"),
        (GPT_OSS_20B, {"swiglu_limit": 0}, "swiglu_limit"),
        (GPT_OSS_20B, {"hidden_act": "gelu"}, "hidden_act"),
    ],
)
def test_refusals(config: dict[str, Any], changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        describe_config(config | changes)


# What published models and other software add, and what does not change the computation.
ADDED: dict[str, Any] = {
    **dict.fromkeys(["mlp_bias", "attention_bias", "lm_head_bias", "use_mrope", "rope_interleaved"], False),
    "_name_or_path": "somewhere",
    "attention_dropout": 0.0,
    "auto_map": {},
    "bos_token_id": 1,
    "eos_token_id": [1, 2],
    "initializer_range": 0.02,
    "pretraining_tp": 1,
    "transformers_version": "4.46.0",
    "use_cache": True,
    "vision_config": None,
    "unsloth_version": "2025.1",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_keys_without_an_effect_load_in_silence(name: str, caplog: pytest.LogCaptureFixture) -> None:
    config, _ = PUBLISHED[name]
    assert describe_config(ADDED | config) == describe_config(config)
    assert caplog.messages == []


NAMES = ["Llama", "Mistral", "Ministral", "Qwen2", "Qwen3", "Qwen3Moe", "Phi3", "Mixtral", "SmolLM3", "Granite", "GptOss"]


@pytest.mark.parametrize("name", NAMES)
def test_defaults_are_those_of_transformers(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """All that transformers writes loads in silence, and what is left out means what transformers takes it for."""
    transformers = pytest.importorskip("transformers")
    written = json.loads(getattr(transformers, f"{name}Config")().to_json_string(use_diff=False))
    written["architectures"] = [f"{name}ForCausalLM"]
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    model = describe_config({key: written[key] for key in (*sizes, "architectures")})
    assert describe_config(written) == model
    assert len(model.layers) == written["num_hidden_layers"]
    assert caplog.messages == []


def test_unknown_keys_are_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    keys = [f"unheard_of_{secrets.token_hex(4)}" for _ in range(2)]
    for _ in range(2):
        describe_config(LLAMA_31_8B | dict.fromkeys(keys, 1))
    assert caplog.messages == [f"config.json: keys unknown to LlamaForCausalLM are ignored: {', '.join(sorted(keys))}"]


def test_every_kind_of_block_has_both_implementations_or_is_refused() -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from blinkpy.models.cpu import torch_decoder
    from blinkpy.models.gpu import gpu_decoder

    assert torch_decoder.BLOCKS.keys() == gpu_decoder.BLOCKS.keys()
    plain = describe_config(LLAMA_31_8B)
    plain.require_blocks(torch_decoder.BLOCKS, "it")
    for changed, block in (
        (replace(plain, placement=NormPlacement.SANDWICH), "NormPlacement.SANDWICH"),
        (replace(plain, layers=(Layer(plain.attention, Mlp(8, Activation.GELU_TANH)),)), "Activation.GELU_TANH"),
    ):
        with pytest.raises(ConfigError, match=f"LlamaForCausalLM needs {block}, which it does not support"):
            changed.require_blocks(torch_decoder.BLOCKS, "it")


def test_gpt_oss_has_a_window_in_every_second_layer_and_its_clamp() -> None:
    for layer_types in (GPT_OSS_20B["layer_types"], None):
        model = describe_config(GPT_OSS_20B | {"layer_types": layer_types, "swiglu_alpha": 1.5})
        assert [layer.attention.window for layer in model.layers] == [128, 0] * 12
    assert model.experts.clamp == (1.5, 7.0)
    assert (model.dtype, model.max_position, model.attention.sinks) == ("bfloat16", 131072, True)
    assert describe_config(GPT_OSS_20B | {"sliding_window": None, "layer_types": None}).layers[0].attention.window == 0


def test_layers_that_differ_by_more_than_the_window_are_refused() -> None:
    plain = describe_config(LLAMA_31_8B)
    for other in (
        Layer(plain.attention._replace(heads=8), plain.layers[0].mlp),
        Layer(plain.attention, Mlp(99)),
    ):
        with pytest.raises(ConfigError, match="layers that differ by more than window and rope"):
            replace(plain, layers=(plain.layers[0], other))
    replace(plain, layers=(plain.layers[0], Layer(plain.attention._replace(window=7), Experts(8, 2, 16))))


def test_model_type_stands_in_for_a_missing_class() -> None:
    for name, family in families().items():
        base = GRANITE4 if family.model_type == "granitemoehybrid" else QWEN3_30B_A3B
        config = {k: v for k, v in base.items() if k != "architectures"} | {"model_type": family.model_type}
        assert describe_config(config).name == name


def test_the_page_has_each_family_and_the_zoo_a_model_of_each() -> None:
    """What the page says runs is compared with transformers."""
    pytest.importorskip("transformers")
    from support.models.model_zoo import ZOO

    table = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    listed = re.findall(r"`(\w+ForCausalLM)`", table)
    assert sorted(listed) == sorted(families())
    zoo = {f"{kind.removesuffix('Config')}ForCausalLM" for kind, _ in ZOO.values()}
    assert zoo == set(listed)


def test_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't read .*config\.json"):
        describe_model(tmp_path)
    for content, words in (
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[]", "object"),
        ('{"architectures": ["X"]}', f"{tmp_path}.*X is not supported"),
    ):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(ConfigError, match=words):
            describe_model(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_31_8B))
    assert len(describe_model(tmp_path).layers) == 32
