"""EAGLE-3 heads: a step's drafts against a plain computation, which notices planted bugs; and heads that do not fit."""

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.models import model_zoo
from support.models.eagle_heads import ROWS, Reference, save_head
from support.models.paged_batch import PagedBatches
from support.seeded_bugs import Bug, planted

from blinkpy.config import Config, ConfigError, check_asked
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.paged_cache import PagedCache, page_bytes_of
from blinkpy.models.weights.head_loader import load_head, with_draft_head
from blinkpy.models.weights.parts.weight_parts import all_parts
from blinkpy.models.weights.parts.weight_sizes import decode_weight_bytes, weight_bytes
from blinkpy.models.weights.weight_loader import load_weights

TRIES = 8
HEAD, LOADER, CHAIN, READER = "draft_head", "head_loader", "draft_chain", "draft_heads"
BUGS = (
    Bug("the map to tokens is subtracted", LOADER, "np.arange(rows) + _read", "np.arange(rows) - _read"),
    Bug("rows are taken for tokens", HEAD, "self._tokens[rows].numpy()", "rows.to(torch.int32).numpy()"),
    Bug("layers are read one too early", READER, "before or [number + 1 for", "before or [number for"),
    Bug("layers are read in another order", HEAD, "in self.model.inputs.layers]", "in self.model.inputs.layers[::-1]]"),
    Bug("a draft reads the hidden state of the one before it", HEAD, ".numpy(), x\n", ".numpy(), hidden[kept]\n"),
    Bug("a draft reads the normalised result", HEAD, ".numpy(), x\n", ".numpy(), self._norm(x, self.weights.final_norm)\n"),
    Bug("the hidden state comes before the embedding", HEAD,
        "torch.cat([embedded, self._norm(hidden, self.weights.draft_hidden_norm)], -1)",
        "torch.cat([self._norm(hidden, self.weights.draft_hidden_norm), embedded], -1)"),
    Bug("the residual stream is normalised", HEAD, "_after_attention(hidden,",
        "_after_attention(self._norm(hidden, self.weights.draft_hidden_norm),"),
    Bug("the two norms are exchanged", HEAD, "(following)), layer.input_norm)", "(following)), self.weights.draft_hidden_norm)"),
    Bug("all drafts have one position", CHAIN, "positions = positions + 1", "positions = positions + (1 if count == 0 else 0)"),
)  # fmt: skip


def mismatches(folder: Path, head: Path, reference: Reference, rng: np.random.Generator) -> int:
    """The number of wrong drafts in four steps: a chunk, the rest of the prompts, and two of which one has drafts to check."""
    step_module, loader = (importlib.import_module(f"blinkpy.models.{name}") for name in ("cpu.cpu_step", "weights.head_loader"))
    drawn = np.random.default_rng(int(rng.integers(2**62)))
    model = loader.with_draft_head(describe_model(folder), head, weights=True)
    weights = load_weights(model, folder, torch.float32)
    loader.load_head(model.draft_head, head, weights, None)
    batches = PagedBatches(drawn, page_size=16, num_pages=24, slots=3, max_model_len=128, max_tokens=96, max_rows=8)
    batches.step_drafts = 4
    step = step_module.CpuStep(model, weights, 24, 16, 128, 96, step_drafts=4)
    prompts = [batches.add(drawn.integers(0, model_zoo.VOCAB, length).tolist()) for length in (35, 20)]
    work: list[Any] = [[(prompts[0], 19)], [(prompts[0], 16), (prompts[1], 20)]]
    wrong = checked = 0
    for number in range(4):
        works = work[number] if number < 2 else [(one, 1) for one in prompts]
        batch = batches.batch(works, drafts={prompts[0].slot: [3, 4]} if number == 2 else None)
        step.run(batch, batches.requests)
        rows = [(row, one) for row, one in enumerate(batches.rows) if batch.emits[row] == 1]
        batches.commit(batch)
        for row, one in rows:
            made = batch.drafted[row].tolist()
            for draft, (expected, distance) in zip(made, reference.drafts(one.tokens, 4), strict=True):
                if distance < 1e-3 or draft < 0:
                    break
                wrong, checked = wrong + (draft != expected), checked + 1
                if draft != expected:
                    break
    assert wrong or checked > 8
    return wrong


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Reference]:
    folder = tmp_path_factory.mktemp("model")
    model_zoo.save_model("qwen3", folder, 1)
    head = save_head(folder, folder / "head", 2, num_key_value_heads=2)
    return folder, head, Reference(folder, head, (1, 2, 3))


def test_drafts_are_those_of_a_plain_computation(saved: tuple[Path, Path, Reference], rng: np.random.Generator) -> None:
    assert mismatches(*saved, rng) == 0


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.what)
def test_a_planted_bug_changes_the_drafts(bug: Bug, saved: tuple[Path, Path, Reference], rng: np.random.Generator) -> None:
    """By wrong drafts, or by a token outside of the vocabulary. A wrong position may change no draft of a few steps."""
    with planted(bug):
        try:
            wrong = any(mismatches(*saved, rng) > 0 for _ in range(TRIES))
        except ValueError as error:
            wrong = "maps row" in str(error)
    assert wrong


def test_memory_has_the_weights_and_pages_of_the_head(saved: tuple[Path, Path, Reference]) -> None:
    folder, head, _ = saved
    plain = describe_model(folder)
    model = with_draft_head(plain, head, weights=True)
    assert model.draft_head is not None and model.draft_head.inputs is not None and not model.draft_head.inputs.embedding
    tensors = {name: tensor for name, tensor in load_file(head / "model.safetensors").items() if name not in ("d2t", "t2d")}
    assert weight_bytes(model, 4) - weight_bytes(plain, 4) == sum(tensor.nbytes for tensor in tensors.values())
    assert sum(len(part.sources) for part in all_parts(model.draft_head)) == len(tensors)
    assert decode_weight_bytes(model, 2, 1) == decode_weight_bytes(plain, 2, 1)
    cache = PagedCache(model.draft_head, 3, 16, torch.float32)
    held = sum(side.nbytes for side in (*cache.keys, *cache.values))
    for kind in ("auto", "fp8_e4m3"):
        config = Config().with_options({"kv_cache_dtype": kind})
        assert page_bytes_of(config, model, 4) - page_bytes_of(config, plain, 4) == held // 3


def test_a_random_head_has_the_first_tokens(saved: tuple[Path, Path, Reference]) -> None:
    """--load-format dummy: only config.json is read."""
    folder, head, _ = saved
    model = with_draft_head(describe_model(folder), head, weights=False)
    weights = load_weights(describe_model(folder), folder, torch.float32)
    assert model.draft_head is not None
    load_head(model.draft_head, head, weights, 7)
    assert weights.head_tokens is not None and weights.head_tokens.tolist() == list(range(ROWS))
    assert weights.draft_head is not None and weights.draft_head.embedding is weights.embedding


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["Qwen3ForCausalLM"]}, r"architectures is \['Qwen3ForCausalLM'\], which is not an EAGLE-3 head"),
        ({"architectures": None}, "architectures is None"),
        ({"hidden_size": 32}, "target_hidden_size is 32, but a head of this Qwen3ForCausalLM needs 64"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, but a head of this Qwen3ForCausalLM needs 1"),
        ({"vocab_size": 300}, "vocab_size is 300, but a head of this Qwen3ForCausalLM needs 199"),
        ({"draft_vocab_size": 200}, r"draft_vocab_size \(200\) exceeds the model's vocabulary of 199"),
        ({"norm_before_residual": True}, "norm_before_residual is not supported"),
        ({"sliding_window": 64}, r"sliding_window is not supported for LlamaForCausalLMEagle3 \(found 64\)"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ({"eagle_config": {}}, r"before layers \[2, 1, 0\]; they must be 3 ascending numbers from 0 to 3, as .* has 3 layers"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1]}}, r"before layers \[1, 2\]; they must be 3"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}, r"before layers \[1, 2, 4\]"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "1"}}, "must be a list of numbers, not '1'"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}, r"is \[0, 1, 2\], .* is \[0, 1, 2\], which means \[1, 2, 3\]"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_head_of_another_model_is_refused(
    changes: dict[str, Any], reason: str, saved: tuple[Path, Path, Reference], tmp_path: Path
) -> None:
    folder, head, _ = saved
    config = json.loads((head / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ConfigError, match=f"^speculative_model .*{reason}"):
        with_draft_head(describe_model(folder), tmp_path, weights=False)


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("fc.weight", None, "lacks fc.weight, which LlamaForCausalLMEagle3 needs"),
        ("fc.weight", torch.zeros(64, 128), r"fc\.weight has shape \[64, 128\], but config\.json requires \[64, 192\]"),
        (
            "midlayer.self_attn.q_proj.weight",
            torch.zeros(64, 64),
            r"shape \[64, 64\], .* requires \[64, 128\]",
        ),
        ("midlayer.hidden_norm.weight", None, r"lacks midlayer\.hidden_norm\.weight"),
        ("lm_head.weight", torch.zeros(199, 64), r"lm_head\.weight has shape \[199, 64\], .* requires \[120, 64\]"),
        ("embed_tokens.weight", torch.zeros(9, 64), r"embed_tokens\.weight has shape \[9, 64\], .* requires \[199, 64\]"),
        ("midlayer.extra.weight", torch.zeros(3), r"has midlayer\.extra\.weight, which .* does not use"),
        ("d2t", None, "lacks d2t, which a head with 120 of 199 tokens needs"),
        ("d2t", torch.zeros(119, dtype=torch.int64), r"d2t is I64 \[119\]; needed: I32 or I64 \[120\]"),
        ("d2t", torch.zeros(120), r"d2t is F32 \[120\]"),
        ("d2t", torch.full((120,), 80), "d2t maps row 119 to token 199, but the model has 199 tokens"),
        ("d2t", torch.full((120,), -1), "d2t maps row 0 to token -1"),
    ],
    ids=lambda value: "" if isinstance(value, torch.Tensor) else str(value)[:50],
)
def test_tensors_that_do_not_fit_are_refused(
    name: str, tensor: torch.Tensor | None, reason: str, saved: tuple[Path, Path, Reference], tmp_path: Path
) -> None:
    folder, head, _ = saved
    tensors = load_file(head / "model.safetensors")
    tensors = {key: value for key, value in tensors.items() if key != name} | ({} if tensor is None else {name: tensor})
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((head / "config.json").read_text())
    with pytest.raises(ConfigError, match=f"^speculative_model: .*{reason}"):
        with_draft_head(describe_model(folder), tmp_path, weights=True)


def test_other_spellings_and_types_of_a_published_head(saved: tuple[Path, Path, Reference], tmp_path: Path) -> None:
    """Names of vLLM's classes, a 32-bit map, no map for a complete vocabulary, and the layers of a model with 32."""
    folder, head, _ = saved
    model, tensors = describe_model(folder), load_file(head / "model.safetensors")
    moved = {f"model.{name.replace('midlayer', 'layers.0')}": tensor.contiguous() for name, tensor in tensors.items()}
    moved |= {"d2t": tensors["d2t"].to(torch.int32)}
    del moved["model.d2t"], moved["model.t2d"]
    save_file(moved, tmp_path / "model.safetensors")
    config = json.loads((head / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Eagle3LlamaForCausalLM"]}))
    found = with_draft_head(model, tmp_path, weights=True).draft_head
    assert found is not None and found.layers == with_draft_head(model, head, weights=True).draft_head.layers  # type: ignore[union-attr]
    full = tmp_path / "full"
    save_head(folder, full, 3, draft_vocab_size=model_zoo.VOCAB)
    tensors = load_file(full / "model.safetensors")
    save_file({name: tensor for name, tensor in tensors.items() if name != "d2t"}, full / "model.safetensors")
    whole = with_draft_head(model, full, weights=True).draft_head
    assert whole is not None and whole.head_rows == model_zoo.VOCAB
    large = describe_config({"architectures": ["LlamaForCausalLM"], **model_zoo.BASE, "num_hidden_layers": 32})
    (full / "config.json").write_text(json.dumps(config | {"eagle_config": {}, "architectures": ["LlamaForCausalLM"]}))
    of_llama = with_draft_head(large, full, weights=False).draft_head
    assert of_llama is not None and of_llama.inputs is not None and of_llama.inputs.layers == (2, 16, 29)


def test_a_narrower_head_needs_its_own_embedding(saved: tuple[Path, Path, Reference], tmp_path: Path) -> None:
    folder, _, _ = saved
    narrow: dict[str, Any] = {"hidden_size": 48, "target_hidden_size": 64, "head_dim": 12}
    with_draft_head(describe_model(folder), save_head(folder, tmp_path, 4, embedding=True, **narrow), weights=True)
    save_head(folder, tmp_path, 4, **narrow)
    with pytest.raises(ConfigError, match=r"lacks embed_tokens\.weight"):
        with_draft_head(describe_model(folder), tmp_path, weights=True)


def test_options() -> None:
    config = Config().with_options({"speculative_model": "head"})
    assert config.scheduler.speculative == "eagle3"
    for options, reason in (
        ({"speculative": "eagle3"}, "speculative eagle3 needs speculative_model"),
        ({"speculative": "mtp", "speculative_model": "head"}, "needs speculative eagle3, which it implies, not mtp"),
        ({"speculative_model": "head", "speculative_tokens": 8}, r"speculative_tokens \(8\) must be at most 7 with .* eagle3"),
        ({"speculative_model": "head", "speculative_match": 3}, "speculative_match .* no effect with speculative eagle3"),
        ({"speculative_model": "head", "max_num_seqs": 1}, "speculative eagle3 needs max_num_seqs of at least 2"),
    ):
        with pytest.raises(ConfigError, match=reason):
            Config().with_options(options)
    with pytest.raises(ConfigError, match="speculative_model has no effect with speculative off"):
        check_asked({"speculative": "off", "speculative_model": "head"})
