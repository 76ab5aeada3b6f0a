"""Which FP8 checkpoints are taken, what is read of them, and in which words others are refused before anything is allocated."""

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.fp8_checkpoints import BLOCKS, GROUP, SCHEMES, TENSOR, TOKEN, compressed, save_fp8
from support.models.model_zoo import BASE, save_model
from support.models.packed_checkpoints import AWQ, GPTQ
from support.models.published_widths import PACKINGS
from transformers.integrations.finegrained_fp8 import Fp8Quantize
from transformers.quantizers.quantizers_utils import should_convert_module

from blinkpy.config import Config, ConfigError
from blinkpy.kernels.quantised_matrices import Fp8Matrix
from blinkpy.models.description.hf_config import HfConfig
from blinkpy.models.description.quantization_reader import read_quantization
from blinkpy.models.families.family import describe_model
from blinkpy.models.weights import array_weights, weight_loader
from blinkpy.models.weights.array_weights import load_array_weights
from blinkpy.models.weights.checkpoint import open_checkpoint
from blinkpy.models.weights.parts.weight_sizes import weight_bytes
from blinkpy.models.weights.weight_loader import load_weights
from blinkpy.serving.model_facts import model_facts

Q = "model.layers.1.self_attn.q_proj"
CHANNEL = {"strategy": "channel"}


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def configure(folder: Path, section: Any) -> None:
    facts = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**facts, "quantization_config": section}))


def test_what_a_list_keeps_is_what_transformers_keeps(rng: np.random.Generator) -> None:
    """Names, starts and ends of names, and patterns: of whole modules, not of all that begin alike."""
    parts = ["self_attn.q_proj", "mlp.gate", "mlp.gate_proj", "mlp.experts.1.down_proj", "mlp.experts.11.down_proj"]
    names = ["lm_head", *(f"model.layers.{layer}.{part}" for layer in (1, 10, 11, 100) for part in parts)]
    patterns = [*names, "model.layers.1", "model.layers.*", "model.layers.1|lm", "experts.1", "gate", "q_proj", ".*mlp.gate"]
    for _ in range(200):
        ignored = rng.choice(patterns, rng.integers(1, 4)).tolist()
        ignored = [pattern[: rng.integers(1, len(pattern) + 1)] if rng.random() < 0.5 else pattern for pattern in ignored]
        section = {"quantization_config": FP8 | {"modules_to_not_convert": ignored}}
        quantization = read_quantization(HfConfig("a model", section, {}))
        assert quantization is not None
        for name in names:
            assert quantization.keeps(name) != should_convert_module(name, ignored), (name, ignored)


LISTS = {"compressed-tensors": ("ignore",), "fp8": ("modules_to_not_convert", "ignored_layers")}
LISTS |= {"modelopt": ("ignore", "exclude_modules"), "awq": ("modules_to_not_convert",), "gptq": ("modules_to_not_convert",)}


def test_each_list_of_each_layout_keeps_its_names_and_no_others(rng: np.random.Generator) -> None:
    """Of 8 and 4 bits. Names that begin alike, and names in two lists of one section."""
    parts = ["self_attn.q_proj", "mlp.gate", "mlp.gate_proj", "mlp.experts.1.down_proj", "mlp.experts.11.down_proj"]
    names = [f"model.layers.{layer}.{part}" for layer in (1, 10, 11) for part in parts]
    plain = [section for section, *_ in SCHEMES.values()] + [*PACKINGS.values(), AWQ, GPTQ]
    assert {section["quant_method"] for section in plain} >= LISTS.keys()
    for section in plain:
        keys = LISTS[section["quant_method"]]
        for _ in range(5):
            listed = {key: rng.choice(names, rng.integers(0, 4), replace=False).tolist() for key in keys}
            found = read_quantization(HfConfig("a model", {"quantization_config": section | listed}, {}))
            assert found is not None
            kept = {name for own in listed.values() for name in own}
            assert {name for name in names if found.keeps(name)} == kept, section
            assert not any(found.keeps(f"{name}_x") for name in names), section


@pytest.fixture
def static(tmp_path: Path, rng: np.random.Generator) -> Path:
    save_fp8("llama2", tmp_path, int(rng.integers(2**31)), "tensor")
    return tmp_path


def changed(keys: str, value: Any) -> dict[str, Any]:
    """The section of a supported checkpoint with one other value. keys: the names that lead to the value."""
    section = copy.deepcopy(SCHEMES["channel"][0])
    *path, last = keys.split(".")
    inner = section
    for key in path:
        inner = inner[key]
    inner[last] = value
    return section


WEIGHTS, INPUTS = "config_groups.group_0.weights.", "config_groups.group_0.input_activations."
FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
REFUSED: list[tuple[Any, str]] = [
    *(
        (({"quant_method": name, "bits": 4}), f"quant_method '{name}' is not supported for Llama")
        for name in ("hqq", "bitsandbytes", "x")
    ),
    ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ' is not supported"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "weights": 4}, "weights not supported"),
    ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "num_bits '4'"),
    (7, "must be an object"),
    (FP8 | {"weight_block_size": [64, 128]}, r"weight_block_size '\[64, 128\]' is not supported \(supported: \[128, 128\]"),
    (FP8 | {"weight_block_size": [128, 128], "activation_scheme": "static"}, "'static' together with weight_block_size"),
    (FP8 | {"activation_scheme": "none"}, "activation_scheme 'none'"),
    (FP8 | {"fmt": "e5m2"}, "fmt 'e5m2'"),
    (FP8 | {"scale_fmt": "ue9m0"}, "scale_fmt 'ue9m0'"),
    (FP8 | {"expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
    (FP8 | {"dequantize": True}, "dequantize not supported"),
    (FP8 | {"modules_to_not_convert": "lm_head"}, "must be a list"),
    (FP8 | {"modules_to_not_convert": [""]}, "names of 1 to 1000 characters"),
    (FP8 | {"modules_to_not_convert": ["x" * 1001]}, "names of 1 to 1000 characters"),
    (FP8 | {"modules_to_not_convert": ["("]}, "not a regular expression"),
    (changed("format", "pack-quantized"), "weights: num_bits '8' is not supported"),
    (changed("format", "mixed-precision"), "format 'mixed-precision'"),
    (changed("format", "int-quantized"), "'int-quantized' .8-bit integers. is not supported; use a checkpoint with FP8 weights"),
    (changed("config_groups.group_0.format", "mxfp8-quantized"), "group_0: format .* .MXFP8. is not supported; use"),
    (changed("format", ["float-quantized"]), "format .*is not supported"),
    (changed("quantization_status", "frozen"), "quantization_status 'frozen'"),
    (changed("sparsity_config", {"format": "sparse-bitmask"}), "sparsity_config is not supported"),
    (changed("transform_config", {"config_groups": {"R1": {}}}), "transform_config not supported"),
    (changed("ignore", ["re:*"]), "not a regular expression"),
    (changed("config_groups", {}), "0 config_groups"),
    (changed("config_groups.group_1", {}), "2 config_groups"),
    (changed("config_groups.group_0.targets", ["re:.*q_proj"]), "targets"),
    (changed("config_groups.group_0.output_activations", {"num_bits": 8}), "output_activations not supported"),
    (changed(WEIGHTS + "num_bits", 4), "weights: num_bits '4'"),
    (changed(WEIGHTS + "type", "int"), "weights: type 'int'"),
    (changed(WEIGHTS + "symmetric", False), "symmetric 'False'"),
    (changed(WEIGHTS + "strategy", "group"), "weights: strategy 'group'"),
    (changed(WEIGHTS + "actorder", "weight"), "actorder not supported"),
    (changed(WEIGHTS + "dynamic", True), "dynamic 'True'"),
    (changed(INPUTS + "strategy", "group"), "input_activations: strategy 'group'"),
    (changed(INPUTS + "dynamic", "local"), "dynamic 'local'"),
    (compressed(CHANNEL, TENSOR | {"dynamic": True}), "dynamic 'True'"),
    (compressed(CHANNEL, TOKEN | {"dynamic": False}), "dynamic 'False'"),
    (compressed({"strategy": "block", "block_structure": [64, 64]}, GROUP), "block_structure"),
    (compressed({"strategy": "block", "block_structure": [128, 128]}, GROUP | {"group_size": 64}), "group_size '64'"),
    (compressed({"strategy": "block", "block_structure": [128, 128]}, TOKEN), "input_activations: strategy 'token'"),
    (changed("kv_cache_scheme", {"num_bits": 8, "type": "int", "strategy": "tensor"}), "kv_cache_scheme: type 'int'"),
    (changed("kv_cache_scheme", {"num_bits": 8, "type": "float", "strategy": "attn_head"}), "kv_cache_scheme: strategy"),
]


@pytest.mark.parametrize(("section", "words"), REFUSED)
def test_schemes_that_are_refused(section: Any, words: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({**BASE, "architectures": ["LlamaForCausalLM"], "quantization_config": section})
    )
    with pytest.raises(ConfigError, match=words):
        describe_model(tmp_path)
    facts = model_facts(tmp_path, Config(), hub_id="", gpus={"x": 1 << 37})
    assert facts.problems and not facts.shape


def test_matrices_that_can_not_be_fp8(tmp_path: Path, static: Path) -> None:
    configure(static, changed("ignore", [f"{Q}"]))
    with pytest.raises(
        ConfigError, match=rf"{Q} is not quantised, but model.layers.1.self_attn.k_proj is; blinkpy fuses the two"
    ):
        describe_model(static)
    configure(static, FP8 | {"weight_block_size": [128, 128]})
    with pytest.raises(ConfigError, match=r"layers.0.self_attn.k_proj does not start at a multiple of 128 rows"):
        describe_model(static)
    save_model("gpt-oss", tmp_path / "oss", 1)
    with pytest.raises(ConfigError, match=r"mlp.experts.gate_up_proj has the matrices of all experts"):
        describe_model(tmp_path / "oss", "fp8")
    save_model("llama4", tmp_path / "llama4", 1)
    with pytest.raises(ConfigError, match=r"feed_forward.experts.gate_up_proj has the matrices of all experts"):
        describe_model(tmp_path / "llama4", "fp8")
    configure(tmp_path / "llama4", FP8)
    with pytest.raises(ConfigError, match=r"lacks model.layers.1.feed_forward.experts.0.gate_proj.weight"):
        load_weights(describe_model(tmp_path / "llama4"), tmp_path / "llama4", torch.float32)
    configure(tmp_path / "llama4", FP8 | {"weight_block_size": [128, 128]})
    path = tmp_path / "llama4" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"head_dim": 192}))
    with pytest.raises(ConfigError, match=r"q_proj has heads of 192 rows, which have to be reordered"):
        describe_model(tmp_path / "llama4")
    save_model("gpt-oss-mxfp4", tmp_path / "mxfp4", 1)
    with pytest.raises(ConfigError, match=r"--quantization fp8 .* MXFP4"):
        describe_model(tmp_path / "mxfp4", "fp8")


def replaced(name: str, value: torch.Tensor | None) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = value

    return change


BAD_TENSORS: list[tuple[str, torch.Tensor | None, str]] = [
    (f"{Q}.weight_scale", None, f"lacks {Q}.weight_scale"),
    (f"{Q}.input_scale", None, f"lacks {Q}.input_scale"),
    (f"{Q}.weight_scale", torch.ones(64), f"{Q}.weight_scale has shape .64., but config.json requires .. or .1."),
    (f"{Q}.input_scale", torch.ones(2), f"{Q}.input_scale has shape"),
    (f"{Q}.weight_scale", torch.ones(1, dtype=torch.int64), f"{Q}.weight_scale is I64"),
    (f"{Q}.weight", torch.ones(64, 64), f"{Q}.weight is F32; supported: F8_E4M3"),
    ("lm_head.weight", torch.ones(199, 64).to(torch.float8_e4m3fn), r"lm_head.weight is F8_E4M3; .* \(no quantization\)"),
    (f"{Q}.weight_zero_point", torch.ones(1), f"has {Q}.weight_zero_point, which"),
    ("model.layers.1.self_attn.k_scale", torch.ones(2), "self_attn.k_scale has shape"),
]
BAD_NUMBERS = [float("nan"), float("inf"), 0.0, -1.0]


@pytest.mark.parametrize(("name", "value", "words"), BAD_TENSORS)
def test_scales_and_weights_that_do_not_fit(name: str, value: torch.Tensor | None, words: str, static: Path) -> None:
    rewrite(static, replaced(name, value))
    with pytest.raises(ConfigError, match=words):
        open_checkpoint(describe_model(static), static)


@pytest.mark.parametrize("name", [f"{Q}.weight_scale", f"{Q}.input_scale", "model.layers.1.self_attn.v_scale"])
def test_scales_that_are_no_scales(name: str, static: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is allocated: by both loaders."""
    for module in (weight_loader, array_weights):
        monkeypatch.setattr(module, "_assemble", lambda *arguments: pytest.fail("something was allocated"))
    for number in BAD_NUMBERS:
        rewrite(static, replaced(name, torch.tensor([number])))
        for load in (
            lambda: load_weights(describe_model(static), static, torch.float32),
            lambda: load_array_weights(describe_model(static), static),
        ):
            with pytest.raises(ConfigError, match=rf"{name} has the value {number:g}; scales must be finite and above 0"):
                load()
    rewrite(static, replaced(name, torch.tensor([1e300], dtype=torch.float64)))
    with pytest.raises(ConfigError, match=f"{name} has the value inf"):
        load_array_weights(describe_model(static), static)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scales_of_any_float_type(dtype: torch.dtype, static: Path, rng: np.random.Generator) -> None:
    scale = torch.tensor(float(rng.uniform(0.5, 2))).to(dtype)
    rewrite(static, replaced(f"{Q}.weight_scale", scale))
    rewrite(static, replaced(f"{Q}.input_scale", scale.view(1, 1)))
    model = describe_model(static)
    matrix, array = load_weights(model, static, torch.float32).layers[1].qkv, load_array_weights(model, static).layers[1].qkv
    assert isinstance(matrix, Fp8Matrix) and bool((matrix.scales[:64] == scale.float()).all())
    assert np.array_equal(matrix.scales, array.scales)
    assert matrix.input_scale == array.input_scale == float(scale.float())


def test_scales_of_a_cache(static: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Scales are read in both spellings, if stored; scales of queries and of other layers' attention are ignored."""
    model = describe_model(static)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_scale"] = torch.tensor(0.25)
        tensors["model.layers.0.self_attn.v_scale"] = torch.tensor([0.5])
        tensors["model.layers.2.self_attn.k_proj.k_scale"] = torch.tensor(2.0, dtype=torch.bfloat16)
        tensors["model.layers.2.self_attn.q_scale"] = torch.tensor(2.0)

    rewrite(static, add)
    with caplog.at_level(logging.WARNING):
        layers = load_weights(model, static, torch.float32).layers
    assert [(layer.k_scale, layer.v_scale) for layer in layers] == [(0.25, 0.5), (None, None), (2.0, None)]
    assert [layer.k_scale for layer in load_array_weights(model, static).layers] == [0.25, None, 2.0]
    assert "ignoring unused tensors: model.layers.2.self_attn.q_scale" in caplog.text


def test_a_model_of_which_the_cache_alone_is_fp8(tmp_path: Path) -> None:
    save_model("llama2", tmp_path, 1)
    section = compressed(CHANNEL, TOKEN, kv_cache_scheme={"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False})
    configure(tmp_path, section | {"config_groups": {}})
    assert describe_model(tmp_path).quantization is None


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_numbers_that_can_not_be_quantised(number: float, tmp_path: Path) -> None:
    save_model("llama2", tmp_path, 1)

    def damage(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{Q}.weight"][3, 5] = number

    rewrite(tmp_path, damage)
    model = describe_model(tmp_path, "fp8")
    for load in (lambda: load_weights(model, tmp_path, torch.float32), lambda: load_array_weights(model, tmp_path)):
        with pytest.raises(ConfigError, match=f"{Q}.weight, or a matrix fused with it, has non-finite values"):
            load()


@pytest.mark.parametrize("blocks", [None, [128, 128]])
def test_what_transformers_quantises(blocks: list[int] | None, tmp_path: Path, rng: np.random.Generator) -> None:
    """Its own operation makes the tensors of FineGrainedFP8."""
    save_model("qwen3-moe", tmp_path, int(rng.integers(2**31)), **({**BLOCKS, "hidden_size": 256} if blocks else {}))
    settings = SimpleNamespace(weight_block_size=blocks, scale_fmt="float")
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=settings))
    plain = load_file(tmp_path / "model.safetensors")

    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            made = quantise.convert({name: tensors.pop(name)})
            tensors |= {key: value.reshape(()) if blocks is None and "scale" in key else value for key, value in made.items()}

    rewrite(tmp_path, change)
    configure(tmp_path, FP8 | {"weight_block_size": blocks, "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]})
    layer = load_weights(describe_model(tmp_path), tmp_path, torch.float32).layers[2]
    assert isinstance(layer.down, Fp8Matrix) and layer.down.blocks == (blocks is not None)
    scales = layer.down.scales
    every = scales[..., None] if blocks is None else scales.repeat_interleave(128, 1).repeat_interleave(128, 2)
    for expert in range(8):
        exact = plain[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"]
        found = layer.down.values[expert].float() * every[expert]
        assert (found - exact).abs().max() <= exact.abs().max() / 28


def test_weight_bytes_and_scheme_are_described(static: Path, tmp_path: Path) -> None:
    """The description counts the bytes of the loaded weights; check-model names the scheme."""
    save_fp8("qwen3-moe", tmp_path / "block", 1, "fp8-block", **BLOCKS)
    save_model("llama2", tmp_path / "plain", 1, dtype=torch.bfloat16)
    cases = (
        (static, "auto", "a scale for each matrix, inputs have one for each matrix"),
        (tmp_path / "plain", "fp8", "quantised as it is loaded"),
    )
    for folder, asked, words in (*cases, (tmp_path / "block", "auto", "block of 128 x 128, inputs have one for 128 columns")):
        model = describe_model(folder, asked)
        weights, found = load_weights(model, folder, torch.bfloat16), 0
        for values in (vars(weights), *map(vars, weights.layers)):
            for value in values.values():
                tensors = (value.values, value.scales) if isinstance(value, Fp8Matrix) else (value,)
                found += sum(one.nbytes for one in tensors if isinstance(one, torch.Tensor))
        assert weight_bytes(model, 2) == found
        config = Config().with_options({"quantization": asked, "dtype": "bfloat16"})
        facts = model_facts(folder, config, hub_id="", gpus={"x": 1 << 37})
        assert words in facts.quantization and sum(facts.weight_bytes.values()) == found
        assert all("tokenizer" in problem for problem in facts.problems)
