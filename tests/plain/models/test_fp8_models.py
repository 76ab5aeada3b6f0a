"""Models with FP8 weights on the CPU: every family and every published layout against transformers with fake-quantised inputs.

If a number is between two FP8 numbers, the roundings before it decide, and all later values depend on it: most
tokens are compared.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models.fp8_checkpoints import BLOCKS, SCHEMES, FakeFp8, by_rows, quantised, rounded, save_fp8
from support.models.model_zoo import MAX_MODEL_LEN, VOCAB, ZOO, make_model, save_model
from support.models.paged_batch import PagedBatches
from support.part_of_cases import part_of

from blinkpy.config import ConfigError
from blinkpy.engine.devices.cpu_device import lacking_without_torch
from blinkpy.kernels.quantised_matrices import Fp8Matrix, quantised_rows
from blinkpy.models.cpu import torch_progress as cpu_fp8
from blinkpy.models.cpu.numpy_decoder import NumpyDecoder
from blinkpy.models.cpu.numpy_products import NumpyProgress
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.paged_cache import ArrayCache, PagedCache
from blinkpy.models.weights import array_loader
from blinkpy.models.weights import array_weights as fp8_arrays
from blinkpy.models.weights.array_weights import ArrayFp8, ArrayWeights, dummy_array_weights, load_array_weights
from blinkpy.models.weights.checkpoint import as_stored, check_names, open_checkpoint
from blinkpy.models.weights.decoder_weights import Weights
from blinkpy.models.weights.parts.weight_parts import layer_parts
from blinkpy.models.weights.parts.weight_sizes import weight_bytes
from blinkpy.models.weights.tensor_loader import QuantisedRows, load_tensors
from blinkpy.models.weights.weight_loader import dummy_weights, load_weights

FAMILIES = [name for name in ZOO if not name.startswith("gpt-oss")]
FAMILIES = [name for name in FAMILIES if name not in ("phi4-mini-long", "llama4-nested")]  # it needs long texts, and images
FAMILIES = [name for name in FAMILIES if name not in ("voxtral", "qwen2-audio")]  # whose audio towers have the same names
TOGETHER = ("qwen3-vl-moe", "mistral4", "mistral4-nested", "granite4-h-moe")  # all experts in one tensor
FAMILIES = [name for name in FAMILIES if name not in TOGETHER]
NO_BLOCKS: tuple[str, ...] = ("phi4-mini-short", "llama-biased-mqa", "gemma3-mqa")  # their heads are too small, or too few
NO_BLOCKS += ("gemma4-e", "gemma4-e-nested")
NO_BLOCKS += (
    "cohere2",
    "cohere2-biased",
    "olmoe",
    "qwen2-vl",
    "qwen2.5-vl",
    "glm4v",
    "glm4v-moe",
    "granite4-h",
    "nemotron-h",
    "nemotron-h-moe",
    "nemotron-h-mixed",
    "bamba",
    "bamba-biased",
    "falcon-h1",
    "falcon-h1-normed",
    "lfm2",
    "lfm2-biased",
    "lfm2-moe",
)  # their heads have one size in transformers
NO_BLOCKS += ("qwen3-next", "qwen3.5", "qwen3.5-moe", "qwen3.5-nested", "qwen3.5-moe-nested")  # below
GATED = ("qwen2-moe", "qwen2-moe-mixed", "qwen3-next", "qwen3.5-moe", "qwen3.5-moe-nested")
NOT_STATIC = dict.fromkeys(GATED, "shared_expert.down_proj are gated")
NOT_STATIC |= dict.fromkeys(("llama4", "llama4-wide"), "experts.0.gate_proj are scaled")
NOT_STATIC |= dict.fromkeys(("falcon-h1", "falcon-h1-normed"), "q_proj are multiplied first")
ROWS, LENGTH = 16, 4
KEPT = {  # entries of each layout that leave layer 1 and all output projections unquantised
    "compressed-tensors": {"ignore": ["lm_head", r"re:.*layers\.1\.", *(f"model.layers.{i}.self_attn.o_proj" for i in range(3))]},
    "fp8": {"modules_to_not_convert": ["model.layers.1", "self_attn.o_proj", "lm_head"]},
    "modelopt": {"ignore": ["model.layers.1*", "*.o_proj", "lm_head"]},
}


def logits(
    model: DecoderDescription, weights: Weights | ArrayWeights, tokens: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """float32 [*tokens.shape, vocab] by our decoder: all tokens but the last of each row in one step, then these."""
    batches = PagedBatches(
        rng, page_size=8, num_pages=64, slots=ROWS, max_model_len=MAX_MODEL_LEN, max_tokens=tokens.size, max_rows=ROWS
    )
    decoder: Any
    if isinstance(weights, ArrayWeights):
        decoder = NumpyDecoder(model, weights, ArrayCache(model, 64, 8), MAX_MODEL_LEN, tokens.size)
    else:
        decoder = TorchDecoder(model, weights, PagedCache(model, 64, 8, weights.dtype, slots=ROWS), MAX_MODEL_LEN, tokens.size)
    rows, found = [batches.add(row[:-1].tolist()) for row in tokens], np.empty((*tokens.shape, model.vocab_size), np.float32)
    for step in (slice(0, -1), slice(-1, None)):
        batch = batches.batch([(row, len(range(*step.indices(tokens.shape[1])))) for row in rows])
        some = np.asarray(decoder.logits(decoder.forward(batch, batches.requests.page_table))).reshape(ROWS, -1, model.vocab_size)
        for number, row in enumerate(batches.rows):
            found[rows.index(row), step] = some[number]
        batches.commit(batch)
        for row, given in zip(rows, tokens, strict=True):
            row.tokens[-1] = given[-1]
    return found


def check(folder: Path, made: tuple[torch.nn.Module, FakeFp8], rng: np.random.Generator) -> None:
    """The logits of a checkpoint equal those of transformers, by torch's decoder and, if it has all blocks, by
    NumPy's."""
    model, mode = made
    tokens = rng.integers(0, VOCAB, (ROWS, LENGTH))
    with torch.no_grad():
        plain = model(torch.tensor(tokens)).logits.numpy()
        with mode:
            expected = model(torch.tensor(tokens)).logits.numpy()
    described, spread = describe_model(folder), float(expected.std())
    noise = float(np.median(np.abs(plain - expected).max(-1)))
    assert mode.products > 0 and noise > 0.01, "the inputs were not rounded"
    makers: list[Any] = [lambda: load_weights(described, folder, torch.float32)]
    if not lacking_without_torch(described):
        makers.append(lambda: load_array_weights(described, folder))
    for make in makers:
        errors = np.abs(logits(described, make(), tokens, rng) - expected).max(-1)
        assert np.median(errors) < 1e-5 * (1 + spread), f"{np.median(errors)} of {spread}, and rounding made {noise}"
        assert errors.mean() < noise / 2


@pytest.mark.parametrize("name", part_of(FAMILIES))
def test_families(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    schemes = [scheme for scheme in SCHEMES if SCHEMES[scheme][1] != "block" or name not in NO_BLOCKS]
    if name in NOT_STATIC:
        with pytest.raises(ConfigError, match=f"does not support static input scales: .*{NOT_STATIC[name]}"):
            save_fp8(name, tmp_path, 1, "modelopt")
            describe_model(tmp_path)
        schemes = [scheme for scheme in schemes if not SCHEMES[scheme][3]]
    scheme = schemes[int(rng.integers(len(schemes)))]
    sizes = BLOCKS if SCHEMES[scheme][1] == "block" else {}
    print(scheme)
    check(tmp_path, save_fp8(name, tmp_path, int(rng.integers(2**31)), scheme, **sizes), rng)


@pytest.mark.parametrize(
    ("name", "scheme"), [("qwen3-moe", "channel"), ("cohere", "block"), ("deepseek-v3", "block"), ("granite", "channel")]
)
def test_unquantised_inputs(name: str, scheme: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Weights are dequantised at the start, unless --quantization fp8 asks for inputs of 8 bits."""
    sizes = BLOCKS if scheme == "block" else {}
    model, _ = save_fp8(name, tmp_path, int(rng.integers(2**31)), scheme, **sizes)
    facts = json.loads((tmp_path / "config.json").read_text())
    facts["quantization_config"]["config_groups"]["group_0"]["input_activations"] = None
    (tmp_path / "config.json").write_text(json.dumps(facts))
    described, tokens = describe_model(tmp_path), rng.integers(0, VOCAB, (ROWS, LENGTH))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    weights = load_weights(described, tmp_path, torch.float32)
    fields = [value for layer in weights.layers for value in vars(layer).values() if value is not None]
    assert not any(isinstance(value, Fp8Matrix) for value in fields) and lacking_without_torch(described)
    outer = {value.data_ptr(): value for value in (weights.embedding, weights.final_norm, weights.lm_head)}.values()
    tensors = [value for value in (*fields, *outer) if isinstance(value, torch.Tensor)]
    assert weight_bytes(described, 4) == sum(value.numel() * 4 for value in tensors)
    errors = np.abs(logits(described, weights, tokens, rng) - expected).max(-1)
    assert np.median(errors) < 1e-5 * (1 + float(expected.std()))
    asked = describe_model(tmp_path, "fp8")
    assert isinstance(load_weights(asked, tmp_path, torch.float32).layers[0].o, Fp8Matrix)
    assert weight_bytes(asked, 4) < weight_bytes(described, 4)


@pytest.mark.parametrize("name", TOGETHER)
def test_experts_in_one_tensor_are_refused(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    save_fp8(name, tmp_path, int(rng.integers(2**31)), next(iter(SCHEMES)))
    with pytest.raises(ConfigError, match="has the matrices of all experts in one tensor, which is not supported with FP8"):
        load_weights(as_stored(describe_model(tmp_path), tmp_path), tmp_path, torch.float32)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-static"])
@pytest.mark.parametrize("name", ["mistral4", "mistral4-nested"])
def test_experts_in_one_tensor_with_a_scale_each(name: str, scheme: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """As Mistral Small 4 is published: the scales are next to the tensor, one for each expert."""
    check(tmp_path, save_fp8(name, tmp_path, int(rng.integers(2**31)), scheme, stacked=True), rng)


@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5"])
def test_gated_delta_nets_in_blocks(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """As published: heads of whole blocks are reordered with their scales; strengths and decays are not quantised."""
    kept = [f"model.layers.{layer}.linear_attn.in_proj_{kind}" for layer in range(3) for kind in ("a", "b", "ba")]
    sizes = {"head_dim": 128, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_value_heads": 4}
    seed, ignored = int(rng.integers(2**31)), {"modules_to_not_convert": [*kept, "lm_head"]}
    made = save_fp8(name, tmp_path, seed, "fp8-block", lambda name: name in kept, ignored, **BLOCKS | sizes)
    layers = load_weights(describe_model(tmp_path), tmp_path, torch.float32).layers
    assert all(isinstance(layer.qkv, Fp8Matrix) and not isinstance(layer.delta_ba, Fp8Matrix) for layer in layers)
    check(tmp_path, made, rng)


def test_experts_in_one_tensor_or_apart(tmp_path: Path, rng: np.random.Generator) -> None:
    """Both forms of Qwen3.5's experts have the same weights, also if they are quantised as they are loaded."""
    apart, together = tmp_path / "apart", tmp_path / "together"
    save_model("qwen3.5-moe", apart, int(rng.integers(2**31)), dtype=torch.bfloat16)
    tensors = load_file(apart / "model.safetensors")
    names = {apart: list(tensors)}
    experts = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    for layer in range(3):
        stem, each = f"model.layers.{layer}.mlp.experts", dict[str, torch.Tensor]()
        for kind in ("gate", "up", "down"):
            each[kind] = torch.stack([experts[f"{stem}.{number}.{kind}_proj.weight"] for number in range(8)])
        gate_up = torch.cat([each["gate"], each["up"]], 1).contiguous()
        tensors |= {f"{stem}.gate_up_proj": gate_up, f"{stem}.down_proj": each["down"]}
    together.mkdir()
    save_file(tensors, together / "model.safetensors", metadata={"format": "pt"})
    shutil.copy(apart / "config.json", together)
    names[together] = list(tensors)
    for quantization in ("auto", "fp8"):
        found = []
        for folder in (apart, together):
            model = as_stored(describe_model(folder, quantization), folder)
            check_names(model, names[folder], folder)
            found.append(load_weights(model, folder, torch.bfloat16).layers)
        for one, other in zip(*found, strict=True):
            for name in ("gate_up", "down"):
                both = getattr(one, name), getattr(other, name)
                if quantization == "fp8":
                    assert torch.equal(both[0].scales, both[1].scales)
                    both = both[0].values.float(), both[1].values.float()
                assert torch.equal(*both)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", ["llama2", "qwen3-moe"])
def test_layouts_that_leave_matrices_as_they_are(name: str, scheme: str, tmp_path: Path, rng: np.random.Generator) -> None:
    config, share, _, _ = SCHEMES[scheme]
    made = save_fp8(
        name, tmp_path, int(rng.integers(2**31)), scheme, lambda name: ".layers.1." in name or name.endswith("o_proj"),
        KEPT[config["quant_method"]], **(BLOCKS if share == "block" else {}),
    )  # fmt: skip
    layers = load_weights(describe_model(tmp_path), tmp_path, torch.float32).layers
    assert [isinstance(layer.qkv, Fp8Matrix) for layer in layers] == [True, False, True]
    assert not any(isinstance(layer.o, Fp8Matrix) for layer in layers)
    check(tmp_path, made, rng)


@pytest.mark.parametrize("name", ["llama2", "phi3", "granite", "qwen2-moe", "gemma3-nested", "qwen3-next"])
def test_quantised_as_it_is_loaded(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """The bits of each matrix, quantised as a whole: by both loaders, of a checkpoint in bfloat16."""
    save_model(name, tmp_path, int(rng.integers(2**31)), dtype=torch.bfloat16)
    plain, model = (describe_model(tmp_path, quantization) for quantization in ("auto", "fp8"))
    assert plain.quantization is None and model.quantization is not None and not model.quantization.stored
    plain = replace(plain, factors=plain.factors._replace(residual=1.0))
    exact, found = (load_weights(some, tmp_path, torch.float32) for some in (plain, model))
    arrays = None if lacking_without_torch(model) else load_array_weights(model, tmp_path)
    seen = 0
    for index in range(len(model.layers)):
        for part in layer_parts(model, index):
            ours, theirs = getattr(found.layers[index], part.field), getattr(exact.layers[index], part.field)
            if part.quantization is None:
                assert torch.equal(ours, theirs)
                continue
            seen += 1
            values, scales = by_rows(theirs)
            assert torch.equal(ours.values.float(), values) and ours.input_scale is None
            assert torch.equal(ours.scales, scales[..., 0] * part.factor)
            if arrays is not None:
                same = getattr(arrays.layers[index], part.field)
                assert np.array_equal(same.values, values) and np.array_equal(same.scales, ours.scales)
    assert seen >= 4 * len(model.layers)


def test_pieces_of_whole_rows(tmp_path: Path, rng: np.random.Generator) -> None:
    save_model("llama2", tmp_path, int(rng.integers(2**31)), dtype=torch.bfloat16)
    stored = open_checkpoint(describe_model(tmp_path), tmp_path)["model.layers.0.mlp.down_proj.weight"]
    whole = torch.empty(64, 96)
    load_tensors([("down", stored, whole)], torch.device("cpu"))
    values, scales = by_rows(whole)
    for piece in (2 * 96, 2 * 96 * 5 + 30, 1 << 20):
        rows = QuantisedRows(torch.empty(64, 96, dtype=torch.float8_e4m3fn), torch.empty(64))
        load_tensors([("down", stored, rows)], torch.device("cpu"), piece_bytes=piece)
        assert torch.equal(rows.values.float(), values) and torch.equal(rows.scales, scales[:, 0])


@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_bfloat16_follows_float32(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Logits in bfloat16 are as close to the model without rounded inputs, in float32, as those of transformers with the same
    roundings."""
    model, mode = save_fp8(name, tmp_path, int(rng.integers(2**31)), "channel")
    described, tokens = describe_model(tmp_path), rng.integers(0, VOCAB, (ROWS, 16))
    with torch.no_grad():
        exact = model(torch.tensor(tokens)).logits.numpy()
        ours = logits(described, load_weights(described, tmp_path, torch.bfloat16), tokens, rng)
        with mode:
            theirs = model(torch.tensor(tokens)).logits.numpy()
    assert np.abs(ours - exact).mean() < 1.5 * np.abs(theirs - exact).mean()


@pytest.mark.parametrize("share", ["row", "tensor", "block"])
@pytest.mark.parametrize("static", [False, True])
def test_products(share: str, static: bool, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Odd sizes, rows of zeros and inputs beyond a static scale, against float64, with torch and without."""
    monkeypatch.setattr(cpu_fp8, "UNPACKED_BYTES", 1)  # so that 128 rows are unpacked at a time
    for _ in range(6):
        tokens, outputs, columns = (int(n) for n in rng.integers(1, (40, 400, 400)))
        x = torch.from_numpy(rng.normal(0, 3, (tokens, columns)).astype(np.float32))
        x[rng.integers(tokens)] = 0
        weight = torch.from_numpy(rng.normal(0, 1, (outputs, columns)).astype(np.float32))
        values, scales, exact = quantised(weight, share)
        scales = scales.reshape(-1).expand(outputs) if share == "tensor" else scales[:, 0] if share == "row" else scales
        input_scale = 0.01 if static and share != "block" else None
        groups = x.split(128, 1) if share == "block" else (x,)
        pairs = [(rounded(g / 0.01), torch.tensor(0.01)) if input_scale else by_rows(g) for g in groups]
        inputs = torch.cat([a.double() * b.double() for a, b in pairs], 1)
        expected = inputs @ (exact.double().T)
        bias = torch.from_numpy(rng.normal(0, 1, outputs).astype(np.float32))
        fp8 = Fp8Matrix(values.to(torch.float8_e4m3fn), scales.contiguous(), input_scale)
        arrays = ArrayFp8(values.numpy(), scales.contiguous().numpy(), input_scale)
        added = torch.from_numpy(rng.normal(0, 1, (tokens, outputs)).astype(np.float32))
        mine = TorchProgress(piece=1), NumpyProgress(piece=1)
        for found, other in (
            (mine[0].linear(x, fp8, bias), expected + bias),
            (mine[0].add_linear(added, x, fp8, None), expected + added),
            (mine[1].linear(x.numpy(), arrays, bias.numpy()), expected + bias),
            (mine[1].add_linear(added.numpy().copy(), x.numpy(), arrays, None), expected + added),
        ):
            np.testing.assert_allclose(np.asarray(found), other, rtol=1e-4, atol=1e-4 * float(expected.abs().max() + 1))


def test_rounding(rng: np.random.Generator) -> None:
    """Every number of FP8, the middle between two, and its neighbours; and all larger numbers."""
    numbers = array_loader.FP8_NUMBERS
    assert np.array_equal(numbers, torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float(), equal_nan=True)
    exact = np.sort(numbers[np.isfinite(numbers)])
    middle = (exact[1:] + exact[:-1]) / 2
    tried = np.concatenate([exact, middle, np.nextafter(middle, 1e9), np.nextafter(middle, -1e9), rng.normal(0, 100, 1000)])
    tried = np.concatenate([tried, [448.1, 463.9, 464, 465, -500, 1e30], rng.normal(0, 0.01, 1000)]).astype(np.float32)
    found = fp8_arrays.round_to_fp8(tried)
    assert np.isin(found, exact).all()
    assert (np.abs(found - np.clip(tried, -448, 448)) <= np.abs(exact[:, None] - np.clip(tried, -448, 448)).min(0)).all()
    by_torch, _ = quantised_rows(torch.from_numpy(tried), 1.0)
    assert np.array_equal(found, by_torch.float()) and np.array_equal(found, rounded(torch.from_numpy(tried)))


@pytest.mark.parametrize("scheme", ["channel", "fp8-static", "fp8-block", "modelopt"])
def test_random_weights(scheme: str, rng: np.random.Generator) -> None:
    config, share, _, static = SCHEMES[scheme]
    facts = {**make_model("qwen3-moe-mixed", 0, **BLOCKS).config.to_dict(), "quantization_config": config}
    model, seed = describe_config(json.loads(json.dumps(facts))), int(rng.integers(2**31))
    first, second = dummy_weights(model, seed, torch.float32), dummy_array_weights(model, seed)
    for one, other in zip(first.layers, second.layers, strict=True):
        assert isinstance(one.gate_up, Fp8Matrix) and isinstance(other.gate_up, ArrayFp8)
        assert one.gate_up.blocks == other.gate_up.blocks == (share == "block")
        assert one.gate_up.input_scale == other.gate_up.input_scale and (one.gate_up.input_scale is not None) == static
        assert np.array_equal(one.gate_up.values.float(), other.gate_up.values)
        assert np.array_equal(one.gate_up.scales, other.gate_up.scales)
        drawn = one.gate_up.values.float() * one.gate_up.scales.flatten()[0]
        assert 0.9e-3 < drawn.abs().max() < 1.01e-3 and 5e-4 < drawn.std() < 7e-4
    assert np.isfinite(logits(model, first, rng.integers(0, VOCAB, (ROWS, LENGTH)), rng)).all()
