"""A model that no kernel supports is refused at the start, in one line with layer, number and alternative."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources

from blinkpy.config import ConfigError
from blinkpy.kernels.launch import noted
from blinkpy.kernels.linear.linear import VARIANTS, linear
from blinkpy.kernels.linear.linear_table import LinearTable, default_config, key
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearConfig, LinearShape, LinearVariant, LinearWorkspace
from blinkpy.kernels.moe.expert_variants import ExpertTable
from blinkpy.models.families.family import describe_config
from blinkpy.models.gpu.gpu_memory_plan import require_kernels
from blinkpy.models.gpu.gpu_step import compiler_errors
from blinkpy.models.gpu.kernel_tables import KernelTables, linear_layers

MODELS: dict[str, Any] = {
    model.hub_id: model
    for model in runpy.run_path(str(Path(__file__).parents[3] / "tools" / "published_models.py"))["MODELS"]
    if not model.refusal
}
GPU, BF16 = "NVIDIA H200", torch.bfloat16
LLAMA, QWEN, OSS = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b"


def test_every_published_model_is_within_the_limits() -> None:
    for model in MODELS.values():
        require_kernels(describe_config(model.config))


@pytest.mark.parametrize(
    ("name", "sizes", "quantization", "words"),
    [
        (LLAMA, {"head_dim": 520}, "auto", "model.layers.0.self_attn: head size 520, and the kernels take sizes from 16 to 512"),
        (LLAMA, {"head_dim": 8}, "auto", "model.layers.0.self_attn: head size 8,"),
        (LLAMA, {"num_attention_heads": 64, "num_key_value_heads": 2}, "auto", "64 query heads over 2 key and value heads"),
        (LLAMA, {"hidden_size": 65536, "head_dim": 128}, "auto", "model.layers.0.input_layernorm: hidden size 65536 is over"),
        (
            LLAMA,
            {"intermediate_size": 65664},
            "fp8",
            "mlp.down_proj: 65664 inputs as FP8, .*; serve it without --quantization fp8",
        ),
        (QWEN, {"moe_intermediate_size": 70_000}, "fp8", "experts.0.down_proj: 70000 inputs as FP8"),
        (QWEN, {"num_experts": 2048}, "auto", "model.layers.0.mlp.gate: 8 of 2048 experts"),
    ],
)
def test_a_size_that_no_kernel_takes_is_refused_by_its_layer(
    name: str, sizes: dict[str, int], quantization: str, words: str
) -> None:
    model = describe_config(MODELS[name].config | sizes, quantization)
    with pytest.raises(ConfigError, match=words) as refused:
        require_kernels(model)
    assert "--device cpu serves this model" in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", [LLAMA, QWEN])
@pytest.mark.parametrize("group", [32, 128, -1])
def test_layers_with_4_bit_weights_have_configurations(name: str, group: int) -> None:
    """Even in a batch-invariant decoder, and with columns in another order."""
    for changed in ({}, {"desc_act": True}):
        section = {"quant_method": "gptq", "bits": 4, "group_size": group} | changed
        model = describe_config(MODELS[name].config | {"quantization_config": section})
        require_kernels(model)
        shapes = linear_layers(model, BF16)
        assert sum(shape.packed for shape in shapes.values()) >= 2
        assert all(shape.group == max(0, group) for shape in shapes.values() if shape.packed)
        for invariant in (False, True):
            KernelTables.load(GPU).require(model, BF16, {1, 8, 64, 70, 2048}, invariant=invariant)


def test_a_table_is_checked_before_anything_is_loaded_and_the_layer_is_named() -> None:
    """An entry that fits its own shape, but not this model's rows: no kernel may meet it later."""
    model, rows = describe_config(MODELS[LLAMA].config), {1, 64, 2048}
    KernelTables.load(GPU).require(model, BF16, rows)
    shape = linear_layers(model, BF16)["model.layers.0.self_attn.o_proj"]
    assert (shape.n, shape.k, shape.swiglu) == (4096, 4096, False)
    wide = object.__new__(LinearConfig)  # bypasses its constructor, as a change of the code might
    object.__setattr__(wide, "__dict__", vars(LinearConfig("triton", 64, 64, 64)) | {"block_n": 3})
    broken = KernelTables(GPU, LinearTable({key(shape._replace(rows=64)): wide}), ExpertTable())
    with pytest.raises(ConfigError, match=r"model\.layers\.0\.self_attn\.o_proj: .*block_n 3 must be a power of two"):
        broken.require(model, BF16, rows)
    broken.require(model, BF16, rows, invariant=True)  # which has only defaults


def test_the_engine_says_whether_a_table_or_defaults_are_used() -> None:
    tables, none = KernelTables.load(GPU), KernelTables.load("Some Other GPU")
    llama, qwen = describe_config(MODELS[LLAMA].config), describe_config(MODELS[QWEN].config)
    assert f"linear layers: measured on {GPU}; attention: by its rule" in tables.describe(llama, BF16)
    assert f"experts: measured on {GPU}" in tables.describe(qwen, BF16)
    assert "linear layers: defaults; attention" in none.describe(llama, BF16)
    assert "experts: defaults" in none.describe(qwen, BF16)
    assert "linear layers: defaults" in tables.describe(llama, torch.float32)
    assert "because of --batch-invariant" in tables.describe(llama, BF16, invariant=True)
    wider = describe_config(MODELS[LLAMA].config | {"intermediate_size": 14_464})
    known, every = tables.measured(wider, BF16)["linear layers"]
    assert 0 < known < every
    assert f"{known} of {every} shapes measured on {GPU}, defaults for the others" in tables.describe(wider, BF16)


@pytest.mark.parametrize(
    "error", [CompilationError("", None, "arange's range must be a power of 2"), OutOfResources(300, 232, "x")]
)
def test_a_compilers_message_never_reaches_a_user(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Users see layer, shape, configuration and remedy instead."""

    def fail(call: LinearCall, config: LinearConfig) -> None:
        raise error

    shape = LinearShape(64, 32, 64, dtype=torch.float32)
    x, weight, out = torch.zeros(64, 64), torch.zeros(32, 64), torch.zeros(64, 32)
    call = LinearCall(x, weight, out, LinearWorkspace.allocate("cpu", torch.float32), torch.zeros(8, dtype=torch.int64))
    config = default_config(shape)
    monkeypatch.setitem(VARIANTS, config.variant, LinearVariant(config.variant, fail, frozenset({"bias"}), ()))
    with (
        pytest.raises(ConfigError) as refused,
        compiler_errors("a step of decode 64x64"),
        noted(lambda: "MLP of layer 3"),
    ):
        linear(call, config)
    words = str(refused.value)
    assert "arange" not in words
    assert "\n" not in words
    assert f"MLP of layer 3, {config} for" in words
    assert "n=32, k=64" in words
    assert "a step of decode 64x64" in words
    assert "blinkpy doctor" in words
