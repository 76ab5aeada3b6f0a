"""Models split over ranks: the ranks' weights join to the whole, bit for bit, or a refusal names the layer.

Claim ranks/weights: Together, the ranks of a model have exactly the checkpoint's weights, for each family and form, or a
refusal names the layer.
"""

import random
import re
import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.fp8_checkpoints import SCHEMES, save_fp8
from support.models.joined_ranks import compare, exact
from support.models.model_zoo import ZOO, save_model
from support.models.packed_checkpoints import AWQ, FORMS, GPTQ, save_packed
from support.models.published_widths import BLOCK_SCALES, PACKINGS
from support.part_of_cases import part_of

from blinkpy.config import ConfigError
from blinkpy.models.description.blocks import Experts
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.split import Share, split_model
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.weights.checkpoint import as_stored, open_checkpoint
from blinkpy.models.weights.decoder_weights import Weights
from blinkpy.models.weights.parts.weight_parts import all_parts, expected_tensors, packed_tensors
from blinkpy.models.weights.parts.weight_sizes import weight_bytes
from blinkpy.models.weights.rank_checkpoint import rank_checkpoint, rank_description
from blinkpy.models.weights.stored_tensor import StoredTensor
from blinkpy.models.weights.weight_loader import dummy_weights, load_weights

PUBLISHED = runpy.run_path(str(Path(__file__).parents[3] / "tools" / "published_models.py"))
MODELS: list[Any] = [model for model in (*PUBLISHED["MODELS"], *PUBLISHED["ON_CPU"]) if not model.refusal]
ROW_SCALES = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
RECURRENT = ("qwen3-next", "qwen3.5", "lfm2", "granite4-h", "nemotron-h", "bamba", "falcon-h1")
REASONS = {  # families that can't be split
    **dict.fromkeys([name for name in ZOO if name.startswith(RECURRENT)], "recurrent states"),
    **dict.fromkeys([name for name in ZOO if name.startswith(("deepseek", "glm4-moe-lite", "mistral4"))], "latent attention"),
    **dict.fromkeys(["olmo2", "olmo3", "olmoe", "minimax-m2"], "over all heads together"),
    **dict.fromkeys(["gemma4-e", "gemma4-e-nested"], "embeddings of layers"),
}


def ranks_of(model: DecoderDescription, folder: Path, ranks: int) -> list[Weights]:
    return [load_weights(model, folder, torch.float32, share=Share(rank, ranks)) for rank in range(ranks)]


@pytest.mark.parametrize("name", part_of(ZOO, 2))
def test_each_family(name: str, tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    save_model(name, tmp_path, seed, sharded=bool(rng.integers(2)))
    model = as_stored(describe_model(tmp_path), tmp_path)
    if name in REASONS or name == "gpt-oss-mxfp4":
        reason = REASONS.get(name, "are not whole blocks of 32 MXFP4 weights")
        with pytest.raises(ConfigError, match=f"layer [01] of .* can't be split over 2 ranks: .*{reason}"):
            ranks_of(model, tmp_path, 2)
        return
    whole = load_weights(model, tmp_path, torch.float32)
    ranks = int(rng.choice([2, 4]))
    own, o = ranks_of(model, tmp_path, ranks), whole.layers[0].o
    assert compare(model, whole, own) >= 4 * len(model.layers)
    assert [tuple(exact(weights.layers[0].o).shape) for weights in own] == [(o.shape[0], o.shape[1] // ranks)] * ranks
    with pytest.raises(ConfigError, match=r"layer 0 of .* can't be split over 8 ranks: it has 4 query heads"):
        ranks_of(model, tmp_path, 8)


def test_mxfp4(tmp_path: Path, seed: int) -> None:
    save_model("gpt-oss-mxfp4", tmp_path, seed, intermediate_size=128)
    model = describe_model(tmp_path)
    whole = load_weights(model, tmp_path, torch.float32)
    for ranks in (2, 4):
        assert compare(model, whole, ranks_of(model, tmp_path, ranks)) == 15 * len(model.layers)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("name", ["qwen3-biased", "qwen3-moe", "glm4", "phi3", "granite"])
def test_fp8(name: str, blocks: bool, tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    scheme = str(rng.choice([scheme for scheme in SCHEMES if (SCHEMES[scheme][1] == "block") == blocks]))
    sizes = {}
    if blocks:
        sizes = {"head_dim": 128, "hidden_size": 512, "intermediate_size": 512}
        sizes |= {"moe_intermediate_size": 512} if "moe" in name else {}
    save_fp8(name, tmp_path, seed, scheme, **sizes)
    model = as_stored(describe_model(tmp_path), tmp_path)
    whole = load_weights(model, tmp_path, torch.float32)
    for ranks in (2, 4):
        compare(model, whole, ranks_of(model, tmp_path, ranks))


def test_quantised_while_loading(tmp_path: Path, seed: int) -> None:
    """A rank quantises its own columns, so that scales of rows differ from those of one GPU."""
    save_model("qwen2", tmp_path, seed)
    model = describe_model(tmp_path, "fp8")
    whole, ranks = load_weights(model, tmp_path, torch.float32), ranks_of(model, tmp_path, 2)
    compare(model, whole, ranks, loose=("o", "down"))
    plain = load_weights(describe_model(tmp_path), tmp_path, torch.float32)
    for layer, weights in enumerate(plain.layers):
        for field in ("o", "down"):
            joined = torch.cat([exact(getattr(own.layers[layer], field)) for own in ranks], -1)
            torch.testing.assert_close(joined, getattr(weights, field), rtol=1 / 16, atol=float(joined.abs().max()) / 448)


@pytest.mark.parametrize("zoo", ["qwen3-biased", "qwen3-moe"])
@pytest.mark.parametrize("form", FORMS)
def test_four_bits(form: str, zoo: str, tmp_path: Path, rng: np.random.Generator) -> None:
    save_packed(rng, tmp_path, form, zoo, intermediate_size=256, moe_intermediate_size=256, head_dim=64)
    model = describe_model(tmp_path)
    if "order" in form:
        with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.o_proj has its inputs in another order"):
            ranks_of(model, tmp_path, 2)
        return
    compare(model, load_weights(model, tmp_path, torch.float32), ranks_of(model, tmp_path, 2))


def test_an_order_that_only_the_file_has(tmp_path: Path, rng: np.random.Generator) -> None:
    """GPTQ's groups of inputs, in an order that config.json does not mention."""
    save_packed(rng, tmp_path, "gptq-order", "qwen3-biased", intermediate_size=256, head_dim=64)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"desc_act": true', '"desc_act": false'))
    model = describe_model(tmp_path)
    load_weights(model, tmp_path, torch.float32)
    with pytest.raises(ConfigError, match=r"o_proj\.g_idx reorders the inputs, so the columns can't be split"):
        ranks_of(model, tmp_path, 2)


def test_dummy_weights_agree_where_ranks_must(seed: int, tmp_path: Path) -> None:
    save_model("qwen3-moe", tmp_path, seed)
    model = describe_model(tmp_path)
    first, other = (dummy_weights(model, seed, torch.float32, share=Share(rank, 2)) for rank in range(2))
    assert torch.equal(first.embedding, other.embedding)
    for one, two in zip(first.layers, other.layers, strict=True):
        assert one.router is not None and two.router is not None and torch.equal(one.router, two.router)
        assert one.qkv.shape[0] == model.layers[0].attention.projected_size // 2


def test_a_rank_reads_its_part_alone(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of matrices that both ranks of two read together: those of the checkpoint, and replicated tensors twice."""
    save_model("llama2", tmp_path, seed)
    model = describe_model(tmp_path)
    read = Counter[str]()
    original = StoredTensor.read

    def counted(self: StoredTensor, memory: memoryview, file: Any, position: int, name: str) -> None:
        read[name] += len(memory)
        original(self, memory, file, position, name)

    monkeypatch.setattr(StoredTensor, "read", counted)
    ranks_of(model, tmp_path, 2)
    for name, stored in open_checkpoint(model, tmp_path).items():
        whole = name.endswith(("norm.weight", "embed_tokens.weight"))
        assert read[name] == int(np.prod(stored.shape)) * 4 * (2 if whole else 1), name


def stored_tensors(model: DecoderDescription) -> dict[str, StoredTensor]:
    """A checkpoint of the model as its headers would be."""
    shapes = expected_tensors(model) | {t.name: t.shape for t in packed_tensors(model) if not t.optional}
    dtypes = {tensor.name: tensor.dtypes[-1] for tensor in packed_tensors(model)}
    for part in all_parts(model):
        shapes |= {scale.names[0]: scale.shapes[0] for scale in part.stored_scales}
        dtypes |= dict.fromkeys((name for name, _, _, _ in part.sources if part.packed), "U8")
        if part.quantization is not None and part.quantization.stored:
            dtypes |= dict.fromkeys((name for name, _, _, _ in part.sources), "F8_E4M3")
    return {name: StoredTensor(Path("none"), dtypes.get(name, "BF16"), shape, 0) for name, shape in shapes.items()}


def check_cover(whole: dict[str, StoredTensor], ranks: list[dict[str, StoredTensor]]) -> int:
    """Assert that the parts of each tensor cover it, and are equal or disjoint. Returns the number of split tensors."""
    split = 0
    for name in whole:
        parts = [rank[name].part for rank in ranks if name in rank]
        if any(part is None for part in parts):
            assert all(part is None for part in parts)
            continue
        end, split = 0, split + 1
        for first, count in sorted({run for part in parts if part is not None for run in part.runs}):
            assert first == end, name
            end += count
        assert all(part is not None and part.pitch == end for part in parts), name
        assert len(parts) == len(ranks)
    return split


def refused(model: DecoderDescription, ranks: int) -> str:
    """Why a model can't be split, or ""."""
    try:
        rank_description(model, Share(0, ranks))
    except ConfigError as error:
        return str(error)
    return ""


def forms(config: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """The model as published, and in the other forms that it may have: config.json, value of --quantization."""
    found: list[tuple[dict[str, Any], str]] = [(config, "auto")]
    if "quantization_config" in config or "quantization_config" in config.get("text_config", {}):
        return found
    found.append((config, "fp8"))
    sections = (BLOCK_SCALES, *PACKINGS.values(), AWQ | {"group_size": 128}, GPTQ | {"group_size": 128})
    return found + [(config | {"quantization_config": section}, "auto") for section in sections]


def described(config: dict[str, Any], quantization: str) -> DecoderDescription | None:
    """One layer of each kind, with two experts. None: the form is refused on one rank, too."""
    try:
        model = describe_config(config, quantization)
        layers = [
            layer._replace(mlp=layer.mlp._replace(number=2)) if isinstance(layer.mlp, Experts) else layer
            for layer in model.layers
        ]
        model = replace(model, layers=tuple(dict.fromkeys(layers)))
        all_parts(model)
    except ConfigError:
        return None
    return model


@pytest.mark.parametrize("published", part_of(MODELS, 2), ids=lambda model: model.hub_id)
def test_every_published_model_in_every_form(published: Any, seed: int) -> None:
    """Either the ranks' parts cover the checkpoint, or a sentence names the layer or the matrix. Each form on 2, 4 or 8 ranks."""
    draw = random.Random(f"{seed} {published.hub_id}")
    for config, quantization in forms(published.config):
        if (model := described(config, quantization)) is not None:
            ranks = draw.choice((2, 4, 8))
            shares, stored = [Share(rank, ranks) for rank in range(ranks)], stored_tensors(model)
            refusal = refused(model, ranks)
            if refusal:
                assert re.match(rf"(layer \d+ of )?{model.name} can't be split over {ranks} ranks: ", refusal)
                assert re.search(r"layer \d+ |layers\.\d+\.", refusal) and "\n" not in refusal
                continue
            found = [rank_checkpoint(model, share, stored) for share in shares]
            assert check_cover(stored, [tensors for _, tensors in found]) >= 3 * len(model.layers)
            for own, tensors in found:
                expected = expected_tensors(own) | {t.name: t.shape for t in packed_tensors(own) if not t.optional}
                assert all(tensors[name].shape == shape for name, shape in expected.items())
                assert weight_bytes(own, 2) < weight_bytes(model, 2)


def fate(hub_id: str, section: dict[str, Any] | None = None) -> list[bool]:
    """Whether a published model can be split over 2, 4 and 8 ranks."""
    (published,) = [model for model in MODELS if model.hub_id == hub_id]
    model = described(published.config | ({"quantization_config": section} if section else {}), "auto")
    assert model is not None
    return [not refused(model, ranks) for ranks in (2, 4, 8)]


def test_known_models() -> None:
    """Worked out by hand from their heads and widths."""
    assert fate("meta-llama/Llama-3.3-70B-Instruct") == [True, True, True]
    assert fate("meta-llama/Llama-3.3-70B-Instruct", BLOCK_SCALES) == [True, True, True]  # 28672 / 8 = 28 * 128
    assert fate("Qwen/Qwen3-30B-A3B") == [True, True, True]  # 4 key heads, two ranks for each
    assert fate("Qwen/Qwen3-30B-A3B", BLOCK_SCALES) == [True, False, False]  # experts of 768 / 4 = 192
    assert fate("openai/gpt-oss-120b") == [True, False, False]  # experts of 2880 / 4 = 22.5 blocks of 32
    assert fate("microsoft/phi-4") == [True, False, False]  # 10 key heads
    assert fate("Qwen/Qwen2.5-7B-Instruct") == [True, True, False]  # 28 query heads
    assert fate("google/gemma-3-270m-it") == [True, True, False]  # 4 query heads, 1 key head
    assert fate("deepseek-ai/DeepSeek-V3") == [False, False, False]
    assert fate("allenai/Olmo-3-7B-Think") == [False, False, False]


def test_rows_of_the_output_head(rng: np.random.Generator) -> None:
    for _ in range(20):
        ranks = int(rng.integers(1, 17))
        vocab = int(rng.integers(8 * ranks, 300_000))
        found = [Share(rank, ranks).head(vocab) for rank in range(ranks)]
        assert [row for own in found for row in own] == list(range(vocab))
        assert all(len(own) > 0 and own.start % 8 == 0 for own in found)


def test_a_vocabulary_that_is_too_small(tmp_path: Path, seed: int) -> None:
    save_model("llama2", tmp_path, seed, vocab_size=31)
    with pytest.raises(ConfigError, match="can't be split over 4 ranks: its vocabulary has 31 tokens"):
        split_model(describe_model(tmp_path), Share(0, 4))
