"""4-bit weights: each stored form is read as an independent unpacking reads it, and the CPU computes with them."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from safetensors.torch import load_file, save_file
from support.models.model_zoo import make_model
from support.models.packed_checkpoints import AWQ, FORMS, GROUP, MXFP4, SIZES, Stored, is_linear, save, save_packed
from support.models.paged_batch import PagedBatches

from blinkpy.config import ConfigError
from blinkpy.kernels.quantised_matrices import PackedMatrix
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.description.packing import Layout
from blinkpy.models.description.packing_reader import FOUR_BITS, read_packing
from blinkpy.models.description.quantization_section import Section
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.gpu.gpu_memory_plan import require_kernels
from blinkpy.models.paged_cache import PagedCache
from blinkpy.models.weights.packed_matrix import dense
from blinkpy.models.weights.weight_loader import dummy_weights, load_weights

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def unpacked(matrix: PackedMatrix) -> torch.Tensor:
    """[N, K], of the inputs in their order."""
    found = matrix.unpack(slice(None), torch.float32)
    if matrix.columns is None:
        return found
    return torch.empty_like(found).index_copy_(1, matrix.columns.long(), found)


def logits(folder: Path, tokens: list[int], rng: np.random.Generator) -> np.ndarray:
    model = describe_model(folder)
    batches = PagedBatches(rng, page_size=8, num_pages=32, slots=2, max_model_len=64, max_tokens=64, max_rows=2)
    decoder = TorchDecoder(
        model, load_weights(model, folder, torch.float32), PagedCache(model, 32, 8, torch.float32, slots=2), 64, 64
    )
    sequence, parts = batches.add(tokens), []
    for count in (len(tokens) - 3, 3):
        batch = batches.batch([(sequence, count)])
        parts.append(np.asarray(decoder.logits(decoder.forward(batch, batches.requests.page_table))))
        batches.commit(batch)
    return np.concatenate(parts)


OF_EXPERTS = ("w4a16", "awq", "gptq-order")
# The effects of values that a section may have, on the fields of the Packing; all other values have no effect.
EFFECTS: dict[str, dict[Any, dict[str, Any]]] = {
    "actorder": {"group": {"ordered": True}, "dynamic": {"ordered": True}},
    "desc_act": {True: {"ordered": True}},
    "checkpoint_format": {"gptq_v2": {"zero_offset": 0}},
    "format": {"gptq_v2": {"zero_offset": 0}},
    "symmetric": {False: {"zeros": True}},
    "group_size": {-1: {"group": 0}, **{size: {"group": size} for size in (16, 32, 64, 128)}},
    "strategy": {"channel": {"group": 0}},
    "packing_format": {"auto_round:auto_awq": {"layout": Layout.AWQ, "zero_offset": 0}},
}
NEUTRAL = {"ordered": False, "zeros": False, "group": GROUP}  # else as GPTQ's


@pytest.mark.parametrize("form", [form for form in FORMS if form != "w4a16-channel"])
def test_each_accepted_value_has_its_effect(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each key, for all values that the reader declares: new values need an entry in EFFECTS."""
    config = json.loads(json.dumps(FORMS[form][0]))
    declared: list[tuple[dict[str, Any], str, tuple[Any, ...]]] = []
    one_of = Section.one_of

    def noted(section: Section, key: str, *supported: Any) -> Any:
        declared.append((section.values, key, supported))
        return one_of(section, key, *supported)

    monkeypatch.setattr(Section, "one_of", noted)
    base = read_packing(Section(config, "config"))
    assert base is not None and declared
    monkeypatch.undo()
    for values, key, supported in declared:
        for value in supported:
            before = values.get(key)
            if (key == "format" and (values.get("checkpoint_format") or base.layout == Layout.COMPRESSED)) or value == before:
                continue
            values[key] = value
            found = read_packing(Section(config, "config"))
            values[key] = before
            neutral = NEUTRAL | {"zero_offset": 1, "layout": Layout.GPTQ}
            effects = EFFECTS.get(key, {})
            wanted = {name: neutral[name] for effect in effects.values() for name in effect}
            wanted |= next((effect for some, effect in effects.items() if some == value and type(some) is type(value)), {})
            if wanted.get("group") == 0 and base.layout == Layout.COMPRESSED:
                wanted["ordered"] = False
            assert found == replace(base, **wanted), f"{key} {value!r}"


@pytest.mark.parametrize(
    ("form", "first", "second"),
    [
        ("gptq", ("checkpoint_format",), ("format",)),
        ("w4a16", ("format",), ("config_groups", "group_0", "format")),
    ],
)
def test_two_entries_for_one_fact_agree_or_are_refused(form: str, first: tuple[str, ...], second: tuple[str, ...]) -> None:
    """Each pair of values, and each value next to an absent entry: neither entry has a silent priority."""
    alone = dict[Any, Any]()
    kinds = ("gptq", "gptq_v2") if form == "gptq" else tuple(FOUR_BITS)
    for one, other in product((None, *kinds), repeat=2):
        config = json.loads(json.dumps(FORMS[form][0]))
        for path, value in ((first, one), (second, other)):
            place = config
            for key in path[:-1]:
                place = place[key]
            place.pop(path[-1], None)
            place |= {} if value is None else {path[-1]: value}
        if one and other and one != other:
            with pytest.raises(ConfigError, match="contradict"):
                read_packing(Section(config, "config"))
        elif form == "gptq" or (one or other) == "pack-quantized":
            found = read_packing(Section(config, "config"))
            assert alone.setdefault(one or other, found) == found is not None
    assert alone.keys() == ({None, *kinds} if form == "gptq" else {"pack-quantized"})


PAIRS = [*((form, "qwen3-biased") for form in FORMS), *((form, "qwen3-moe") for form in OF_EXPERTS), ("gptq", "granite")]
PAIRS += [("mxfp4", "qwen3-biased"), ("mxfp4", "qwen3-moe"), ("mxfp4", "granite")]


@pytest.mark.parametrize(("form", "zoo"), PAIRS)
def test_each_form(form: str, zoo: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Weights to the bit, and logits as those of the same weights without a quantization."""
    _, exact = save_packed(rng, tmp_path / "packed", form, zoo)
    model = describe_model(tmp_path / "packed")
    layers = load_weights(model, tmp_path / "packed", torch.float32).layers
    for index, layer in enumerate(layers):
        prefix = f"model.layers.{index}."
        assert isinstance(layer.qkv, PackedMatrix) and isinstance(layer.gate_up, PackedMatrix)
        assert torch.equal(unpacked(layer.qkv), torch.cat([exact[f"{prefix}self_attn.{one}_proj.weight"] for one in "qkv"]))
        if "moe" in zoo:
            for expert in range(model.experts.number):
                each = [exact[f"{prefix}mlp.experts.{expert}.{one}_proj.weight"] for one in ("gate", "up")]
                assert torch.equal(unpacked(layer.gate_up[expert]), torch.cat(each))
        else:
            assert torch.equal(
                unpacked(layer.gate_up), torch.cat([exact[f"{prefix}mlp.{one}_proj.weight"] for one in ("gate", "up")])
            )
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text((tmp_path / "packed" / "config.json").read_text())
    config = json.loads((plain / "config.json").read_text())
    config.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(config))
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    tokens = rng.integers(0, 199, 20).tolist()
    ours, theirs = logits(tmp_path / "packed", tokens, rng), logits(plain, tokens, rng)
    assert theirs.std() > 0.05
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


@pytest.mark.parametrize("form", OF_EXPERTS)
def test_gated_attention_and_delta_nets(form: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Queries and gates of a stored projection are reordered; the first projections of delta nets are not quantised here."""
    _, exact = save_packed(rng, tmp_path, form, "qwen3.5", linear_value_head_dim=32)
    config = json.loads((tmp_path / "config.json").read_text())
    section = config.pop("quantization_config")
    section |= {"ignore": [*section["ignore"], "re:.*in_proj.*"]} if "ignore" in section else {}
    section |= (
        {"modules_to_not_convert": [f"linear_attn.in_proj_{kind}" for kind in ("qkv", "z", "b", "a")]}
        if "modules_to_not_convert" in section
        else {}
    )
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
    layers = load_weights(describe_model(tmp_path), tmp_path, torch.float32).layers
    assert [isinstance(layer.qkv, PackedMatrix) for layer in layers] == [False, True]
    assert all(isinstance(layer.o, PackedMatrix) for layer in layers)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_text(json.dumps(config))
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    tokens = rng.integers(0, 199, 20).tolist()
    ours, theirs = logits(tmp_path, tokens, rng), logits(plain, tokens, rng)
    assert theirs.std() > 0.05
    np.testing.assert_allclose(ours, theirs, atol=1e-3)


@pytest.mark.parametrize("form", ["w4a16-zeros", "awq", "mxfp4"])
@pytest.mark.parametrize("zoo", ["glm4", "granite", "ernie4.5", "falcon-h1"])
def test_rows_and_scales_are_rearranged_as_of_other_weights(
    form: str, zoo: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    """Heads with neighbours rotated together, and matrices with a factor of the residual stream or of runs of rows."""
    more = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16} if zoo == "falcon-h1" else {}
    _, exact = save_packed(rng, tmp_path / "packed", form, zoo, **more)
    plain = tmp_path / "plain"
    plain.mkdir()
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config.pop("quantization_config")
    (plain / "config.json").write_text(json.dumps(config))
    save_file(exact, plain / "model.safetensors", metadata={"format": "pt"})
    ours, theirs = (load_weights(describe_model(folder), folder, torch.float32) for folder in (tmp_path / "packed", plain))
    for layer, other in zip(ours.layers, theirs.layers, strict=True):
        for field in ("qkv", "o", "space_in", "space_out", "gate_up", "down"):
            matrix, expected = getattr(layer, field), getattr(other, field)
            if isinstance(matrix, PackedMatrix):
                torch.testing.assert_close(dense(matrix, torch.float32), expected, rtol=2e-6, atol=0)
        packed = [layer.qkv, layer.down] + [layer.space_in, layer.space_out] * (zoo == "falcon-h1")
        assert all(isinstance(matrix, PackedMatrix) for matrix in packed)


@pytest.mark.parametrize("zoo", ["qwen3-biased", "granite"])
@pytest.mark.parametrize("of_modelopt", [False, True])
def test_nvfp4(of_modelopt: bool, zoo: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """compressed-tensors' form, packed by it, and modelopt's. granite: its factor of residuals is in the weights."""
    make_model(zoo, int(rng.integers(2**31)), **SIZES).save_pretrained(tmp_path)
    whole, exact, tensors = load_file(tmp_path / "model.safetensors"), Stored(), Stored()
    for name, weight in whole.items():
        if not is_linear(name):
            tensors[name] = weight
            continue
        rows, width = weight.shape
        values = torch.tensor(E2M1)[torch.from_numpy(rng.integers(0, 8, (rows, width)))]
        values = values * torch.from_numpy(rng.choice([-1.0, 1.0], (rows, width))).float()
        scales = torch.from_numpy(rng.uniform(1, 400, (rows, width // 16))).float().to(torch.float8_e4m3fn)
        factor = float(np.float32(rng.uniform(2e-5, 8e-5)))
        stem, packed = name.removesuffix("weight"), pack_fp4_to_uint8(values.to(torch.bfloat16))
        if of_modelopt:
            every = scales.float() * torch.tensor(factor)
            tensors |= {name: packed, f"{stem}weight_scale": scales, f"{stem}weight_scale_2": torch.tensor(factor)}
            tensors[f"{stem}input_scale"] = torch.tensor(0.1)
        else:
            every = scales.float() / torch.tensor(1 / factor)
            tensors |= {f"{stem}weight_packed": packed, f"{stem}weight_scale": scales}
            tensors[f"{stem}weight_global_scale"] = torch.tensor([1 / factor])
        exact[name] = values * every.repeat_interleave(16, 1)
    numbers = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": numbers, "input_activations": numbers | {"dynamic": "local"}}}
    section = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }
    modelopt = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": ["lm_head"],
        "producer": {"name": "x"},
    }
    save(tmp_path, tensors, modelopt if of_modelopt else section)
    model = describe_model(tmp_path)
    for index, layer in enumerate(load_weights(model, tmp_path, torch.float32).layers):
        assert isinstance(layer.o, PackedMatrix)
        wanted = exact[f"model.layers.{index}.self_attn.o_proj.weight"] * model.factors.residual
        torch.testing.assert_close(unpacked(layer.o), wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("form", "section", "words"),
    [
        ("awq", {"bits": 8}, "bits '8' is not supported"),
        ("awq", {"version": "gemv"}, "version 'gemv' is not supported"),
        ("awq", {"zero_point": False}, "zero_point 'False' is not supported"),
        ("awq", {"group_size": 48}, "group_size '48' is not supported"),
        ("awq", {"group_size": 128}, "96 inputs are not a multiple of 128"),
        ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not supported"),
        ("gptq", {"unheard_of": 5}, "unheard_of not supported"),
        ("round-awq", {"packing_format": "auto_round:other"}, "packing_format 'auto_round:other' is not supported"),
        ("round-gptq", {"extra_config": {"lm_head": {"bits": 8}}}, "extra_config of 'lm_head' is not supported"),
        ("w4a16", {"sparsity_config": {"format": "sparse-24"}}, "sparsity_config is not supported"),
    ],
)
def test_sections_that_are_refused(
    form: str, section: dict[str, Any], words: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    tensors, _ = save_packed(rng, tmp_path, form, "qwen3-biased")
    save(tmp_path, tensors, FORMS[form][0] | section)
    with pytest.raises(ConfigError) as caught:
        describe_model(tmp_path)
    assert words in str(caught.value) and "\n" not in str(caught.value)


LAYER = "model.layers.1.self_attn.o_proj."


@pytest.mark.parametrize(
    ("form", "tensor", "change", "words"),
    [
        ("gptq", "scales", lambda x: x * torch.inf, "has scales that are not finite"),
        ("gptq", "scales", None, "the checkpoint lacks"),
        ("gptq", "scales", lambda x: x[:, :-8].contiguous(), "has shape"),
        ("gptq", "qzeros", None, "the checkpoint lacks"),
        ("gptq", "qweight", lambda x: x.float(), "is F32; supported: I32"),
        ("gptq-order", "g_idx", lambda x: x * 0, "does not name 4 groups of 32 inputs each"),
        ("gptq-order", "g_idx", lambda x: x - 1, "does not name 4 groups"),
        ("w4a16-zeros", "weight_zero_point", lambda x: x[:-1].contiguous(), "has shape"),
        ("w4a16-order", "weight_g_idx", lambda x: x.flip(0) + 100, "does not name"),
        ("mxfp4", "weight_scale", lambda x: x | 255, "has scales that are not finite"),
        ("mxfp4", "weight_scale", lambda x: torch.stack([x[:, 0] * 0 + 90, x[:, 0] * 0 + 121, *x.T[2:]], 1), "more than 2**30"),
        ("mxfp4", "weight_scale", lambda x: x.view(torch.float8_e4m3fn), "is F8_E4M3; supported: U8"),
        ("mxfp4", "weight_packed", lambda x: x[:, 1:].contiguous(), "has shape"),
    ],
)
def test_tensors_that_are_refused(
    form: str, tensor: str, change: Any, words: str, tmp_path: Path, rng: np.random.Generator
) -> None:
    tensors, _ = save_packed(rng, tmp_path, form, "qwen3-biased")
    name = LAYER + tensor
    tensors = {key: value for key, value in tensors.items() if key != name or change is not None}
    if change is not None:
        tensors[name] = change(tensors[name])
    save(tmp_path, tensors, FORMS[form][0] if form in FORMS else MXFP4)
    with pytest.raises(ConfigError) as caught:
        load_weights(describe_model(tmp_path), tmp_path, torch.float32)
    assert words in str(caught.value) and tensor in str(caught.value) and "\n" not in str(caught.value)


def test_a_gpu_refuses_groups_of_16_in_one_line(tmp_path: Path, rng: np.random.Generator) -> None:
    save_packed(rng, tmp_path, "awq", "qwen3-moe")
    model = describe_model(tmp_path)
    require_kernels(model)
    assert isinstance(dummy_weights(model, 5, torch.float32).layers[0].qkv, PackedMatrix)
    with pytest.raises(ConfigError, match="--quantization fp8 is not supported for this model"):
        describe_model(tmp_path, "fp8")
    save_packed(rng, tmp_path / "dense", "gptq", "qwen3-biased")
    dense = describe_model(tmp_path / "dense")
    require_kernels(dense)
    assert dense.packing is not None
    narrow = replace(dense, packing=replace(dense.packing, group=16))
    with pytest.raises(ConfigError, match="q_proj: a scale for each 16 inputs, and the kernels take multiples of 32; --device"):
        require_kernels(narrow)


def test_fused_matrices_with_different_orders(tmp_path: Path, rng: np.random.Generator) -> None:
    tensors, _ = save_packed(rng, tmp_path, "gptq-order", "qwen3-biased")
    name = "model.layers.0.self_attn.k_proj.g_idx"
    tensors[name] = tensors[name].roll(1)
    save(tmp_path, tensors, FORMS["gptq-order"][0])
    with pytest.raises(ConfigError, match=r"k_proj and .*q_proj have their inputs in different orders"):
        load_weights(describe_model(tmp_path), tmp_path, torch.float32)


def test_llama4_has_a_matrix_for_each_expert() -> None:
    config = {"architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4, "quantization_config": AWQ}
    assert describe_config(config).packing is not None
