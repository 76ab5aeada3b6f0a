"""Drafts of a checkpoint's own layer on the CPU engine equal those of transformers; tokens are the same with and without
drafts."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.drafted_requests import constrained_requests, outputs, requests_of
from support.engine_serving import collect, config_for, serving
from support.models import model_zoo
from support.models.draft_heads import FAMILIES, RECURRENT_FAMILIES, RecurrentReference, save_drafting_model
from support.models.redrawn_cases import redrawn_at_ties
from support.near_ties import check_same_outputs
from support.part_of_cases import part_of
from support.waiting import wait_for
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from blinkpy.config import ConfigError
from blinkpy.engine.engine import make_engine
from blinkpy.kv.state import Batch, Requests
from blinkpy.models.cpu.draft_chain import DraftChain, drafting_rows
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_CANCELLED, GAUGE

CPU = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 96, "num_pages": 128, "page_size": 16}
EXACT = CPU | {"batch_invariant": True}  # no near tie is decided by rounding
EXACT_FAMILIES = ("glm4-moe", "glm4-moe-air")  # families without latent attention
MTP = {"speculative": "mtp", "speculative_tokens": 4}
TIE = 1e-3  # between the two largest logits of a draft


class Reference:
    """transformers' draft layer of a checkpoint."""

    def __init__(self, folder: Path):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        config = self.model.config
        layers = config.num_hidden_layers
        self.model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layers}.*"]  # hard-coded in transformers
        config.num_mtp_layers = 1  # GLM-4.7-Flash's class lacks this field and the next
        config.mtp_mlp_layer_types = ["sparse"]
        self.drafter = MtpModel.from_pretrained(self.model)

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[tuple[int, float]]:
        """(Draft, distance from the next most probable token) of each draft after some tokens. The layer runs repeatedly."""
        hidden, cache = self.model.model(torch.tensor([tokens[:-1]])).last_hidden_state, MtpCache()
        following, found = torch.tensor([tokens[1:]]), list[tuple[int, float]]()
        positions = torch.arange(1, len(tokens))[None]
        while len(found) < count:
            hidden = self.drafter.forward_layer(0, hidden, positions, cache, input_ids=following)
            hidden, positions = hidden[:, -1:], positions[:, -1:] + 1
            best = self.model.lm_head(hidden)[0, -1].topk(2)
            found.append((int(best.indices[0]), float(best.values[0] - best.values[1])))
            following = best.indices[None, :1]
        return found


@pytest.mark.parametrize("family", [*part_of(FAMILIES, 2), *part_of(RECURRENT_FAMILIES)])
@redrawn_at_ties
def test_drafts_are_those_of_transformers(
    family: str, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In steps of several requests, with prompts in chunks."""
    save_drafting_model(family, tmp_path, int(rng.integers(2**31)))
    seen, run = list[tuple[list[int], list[int], int]](), DraftChain.run

    def noting(self: DraftChain, batch: Batch, requests: Requests, hidden: torch.Tensor) -> None:
        run(self, batch, requests, hidden)
        found = drafting_rows(batch, requests)
        for row, last, final in zip(*(rows.tolist() for rows in found), strict=True):
            slot = batch.row_slots[row]
            known = requests.tokens[slot, : requests.length[slot]].tolist() + batch.sampled[row : last + 1].tolist()
            seen.append((known, batch.drafted[row].tolist(), -(-int(batch.context_lengths[final]) // 16) * 16))

    monkeypatch.setattr(DraftChain, "run", noting)
    options = CPU | MTP | {"max_num_batched_tokens": 24, "max_num_seqs": 12, "enable_prefix_caching": False}
    with serving(make_engine(config_for(tmp_path, **options))) as client:
        sampling = [RequestParameters(max_tokens=30, temperature=0.8 * (i % 2), seed=i) for i in range(3)]
        prompts = [rng.integers(0, model_zoo.VOCAB, int(rng.integers(2, 60))).astype(np.int32) for _ in sampling]
        collect(client, [client.submit(prompt, own) for prompt, own in zip(prompts, sampling, strict=True)])
    reference, ties = (RecurrentReference if family in RECURRENT_FAMILIES else Reference)(tmp_path), 0
    assert len(seen) > 20
    if family in RECURRENT_FAMILIES:  # transformers takes a second for each draft
        seen = [seen[i] for i in rng.permutation(len(seen))[:12]]
    for known, drafts, room in seen:
        made = [draft for draft in drafts if draft >= 0]
        assert drafts == made + [-1] * (4 - len(made))
        assert len(made) == min(4, max(1, room - len(known) + 2))
        for draft, (expected, distance) in zip(made, reference.drafts(known, len(made)), strict=True):
            if distance < TIE:
                ties += 1
                break
            assert draft == expected
    assert ties <= len(seen) // 4


@pytest.mark.parametrize(("family", "pages"), part_of(product([*FAMILIES, *RECURRENT_FAMILIES], [128, 16]), 5))
def test_drafts_change_no_token(family: str, pages: int, rng: np.random.Generator, tmp_path: Path) -> None:
    """With 16 pages, requests are preempted. Half of the prompts begin with the same pages."""
    save_drafting_model(family, tmp_path, int(rng.integers(2**31)))
    requests = requests_of(rng)
    without, before = outputs(tmp_path, requests, **CPU | {"num_pages": pages})
    drafted, after = outputs(tmp_path, requests, **CPU | MTP | {"num_pages": pages})
    ties = check_same_outputs(tmp_path, requests, drafted, without)
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] < after["draft_tokens"]
    assert (after["preemptions"] > 0) == (pages == 16)
    for name in ("prompt_tokens", "requests_finished", *([] if ties else ["generated_tokens"])):
        assert before[name] == after[name]


def test_drafts_change_no_output_with_a_grammar(rng: np.random.Generator, tmp_path: Path) -> None:
    """The draft layer ignores grammars: drafts are cut at the first refused draft."""
    save_drafting_model(str(rng.choice(EXACT_FAMILIES)), tmp_path, int(rng.integers(2**31)))
    requests = constrained_requests(rng, tmp_path)
    without, _ = outputs(tmp_path, requests, **EXACT)
    drafted, after = outputs(tmp_path, requests, **EXACT | MTP)
    assert drafted == without
    assert after["draft_tokens_accepted"] > 0 < after["draft_tokens_refused"]


def test_a_cancelled_request_ends_like_any_other(rng: np.random.Generator, tmp_path: Path) -> None:
    save_drafting_model("glm4-moe", tmp_path, int(rng.integers(2**31)))
    with serving(engine := make_engine(config_for(tmp_path, **EXACT, **MTP))) as client:
        words, sampling = engine.views.engine, RequestParameters(max_tokens=150, temperature=1.0, seed=1)
        prompts = [rng.integers(0, model_zoo.VOCAB, 9).astype(np.int32) for _ in range(4)]
        sent = [client.submit(prompt, sampling) for prompt in prompts]
        for request in sent[::2]:
            client.cancel(request)
        ended = collect(client, sent)
        wait_for(lambda: words[GAUGE["pages_held"]] == 0)
        again = collect(client, [client.submit(prompts[1], sampling)])
    assert {finish for _, finish in ended[::2]} <= {FINISH_CANCELLED}
    assert again[0] == ended[1] and len(ended[1][0]) == 150


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (None, "speculative mtp needs .* exactly one layer .* LlamaForCausalLM has no layer"),
        ({"num_nextn_predict_layers": 0}, "speculative mtp needs .* exactly one layer .* Glm4MoeForCausalLM has no layer"),
        ({"num_nextn_predict_layers": 2}, "speculative mtp needs .* exactly one layer .* Glm4MoeForCausalLM has 2 layers"),
        ({"num_nextn_predict_layers": "1"}, "num_nextn_predict_layers must be an integer from 0 to 16, not '1'"),
    ],
)
def test_a_config_without_a_draft_layer_is_refused(change: dict[str, Any] | None, reason: str, tmp_path: Path) -> None:
    if change is None:
        model_zoo.save_model("llama3", tmp_path, 1)
    else:
        save_drafting_model("glm4-moe", tmp_path, 1)
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(ConfigError, match=reason):
        make_engine(config_for(tmp_path, **CPU, **MTP)).start()


@pytest.mark.parametrize(
    ("part", "shape", "reason"),
    [
        ("eh_proj.weight", None, r"lacks model\.layers\.3\.eh_proj\.weight, which Glm4MoeForCausalLM needs"),
        ("shared_head.norm.weight", None, r"lacks model\.layers\.3\.shared_head\.norm\.weight"),
        ("mlp.experts.5.up_proj.weight", None, r"lacks model\.layers\.3\.mlp\.experts\.5\.up_proj\.weight"),
        ("eh_proj.weight", (64, 64), r"3\.eh_proj\.weight has shape \[64, 64\], but config\.json requires \[64, 128\]"),
        ("enorm.weight", (32,), r"3\.enorm\.weight has shape \[32\], but config\.json requires \[64\]"),
    ],
)
def test_a_draft_layer_that_does_not_fit_is_refused(
    part: str, shape: tuple[int, ...] | None, reason: str, tmp_path: Path
) -> None:
    """Only with drafts: without drafts, the engine does not read the layer."""
    save_drafting_model("glm4-moe", tmp_path, 1)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[f"model.layers.3.{part}"]
    if shape is not None:
        tensors[f"model.layers.3.{part}"] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=reason):
        make_engine(config_for(tmp_path, **CPU, **MTP)).start()
    outputs(tmp_path, [([1, 2, 3], RequestParameters(max_tokens=2))], **CPU)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"device": "null"}, "speculative mtp needs device cuda or cpu, not null"),
        ({"window_cache": "ring"}, "window_cache ring"),
        ({"speculative_match": 3}, r"speculative_match \(3\) has no effect with speculative mtp: set speculative to ngram"),
        ({"max_num_seqs": 1}, "speculative mtp needs max_num_seqs of at least 2"),
    ],
)
def test_options_that_draft_layers_exclude(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    save_drafting_model("glm4-moe", tmp_path, 1)
    with pytest.raises(ConfigError, match=reason):
        make_engine(config_for(tmp_path, **CPU | MTP | options)).start()
