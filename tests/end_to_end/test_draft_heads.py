"""EAGLE-3 heads on the CPU engine: drafts equal those of a plain computation, and outputs are the same with and without heads."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.drafted_requests import outputs, requests_of
from support.engine_serving import collect, config_for, serving
from support.models import model_zoo
from support.models.eagle_heads import Reference, save_head, save_quiet_model
from support.near_ties import check_same_outputs

from blinkpy.engine.engine import make_engine
from blinkpy.kv.state import Batch, Requests
from blinkpy.models.cpu.draft_chain import DraftChain, drafting_rows
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER

CPU = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 96, "num_pages": 128, "page_size": 16}
DRAFTS = 5
TIE = 1e-3  # between the two largest logits of a draft
LLAMA3 = {"rope_scaling": model_zoo.LLAMA3, "rope_theta": 1e4}
BEFORE = {"eagle_config": None, "eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
BIASED = {"num_key_value_heads": 1, "attention_bias": True, "embedding": True}
CUT = {"step_groups": 3, "cut_step_tokens": 4}
CASES: dict[str, tuple[str, int, dict[str, Any], tuple[int, ...], dict[str, Any]]] = {
    # (model and layers, changes of the head, layers before which it reads, options of the engine)
    "hits, chunks": ("llama3", 3, LLAMA3 | BEFORE | BIASED, (0, 2, 3), {"max_num_batched_tokens": 24, "max_num_seqs": 12}),
    "preemption": ("qwen3", 7, {"eagle_config": None}, (2, 3, 4), {"num_pages": 14, "max_model_len": 128}),
}


@pytest.mark.parametrize("case", CASES)
def test_drafts_are_those_of_a_plain_computation(
    case: str, rng: np.random.Generator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of several requests, with each prompt twice. Then each page's last key belongs to the same next token."""
    name, layers, changes, read, options = CASES[case]
    model_zoo.save_model(name, tmp_path, int(rng.integers(2**31)), num_hidden_layers=layers)
    head = save_head(tmp_path, tmp_path / "head", int(rng.integers(2**31)), **changes)
    seen, run = list[tuple[list[int], list[int], int]](), DraftChain.run

    def noting(self: DraftChain, batch: Batch, requests: Requests, hidden: Any) -> None:
        run(self, batch, requests, hidden)
        for row, last, final in zip(*(rows.tolist() for rows in drafting_rows(batch, requests)), strict=True):
            slot = batch.row_slots[row]
            known = requests.tokens[slot, : requests.length[slot]].tolist() + batch.sampled[row : last + 1].tolist()
            seen.append((known, batch.drafted[row].tolist(), -(-int(batch.context_lengths[final]) // 16) * 16))

    monkeypatch.setattr(DraftChain, "run", noting)
    engine = make_engine(config_for(tmp_path, **CPU | {"speculative_model": str(head), "speculative_tokens": DRAFTS} | options))
    tokens = 60 if case == "preemption" else 20  # three requests of 34 tokens outgrow 14 pages
    with serving(engine) as client:
        prompts = [rng.integers(0, model_zoo.VOCAB, int(length)).astype(np.int32) for length in rng.integers(34, 60, 4)]
        for temperature in (0.8,) if case == "preemption" else (0.0, 0.8):
            sampling = [RequestParameters(max_tokens=tokens, temperature=temperature, seed=i) for i in range(4)]
            collect(client, [client.submit(prompt, own) for prompt, own in zip(prompts, sampling, strict=True)])
        counted = {name: int(engine.views.engine[index]) for name, index in COUNTER.items()}
    assert (counted["preemptions"] > 0) == (case == "preemption")
    assert counted["prefix_hit_tokens"] > 0 or case == "preemption"
    reference, ties = Reference(tmp_path, head, read), 0
    assert len(seen) > 50
    whole = sorted((known for known, _, _ in seen), key=len, reverse=True)
    states = dict[tuple[int, ...], torch.Tensor]()
    for known, drafts, room in [seen[i] for i in rng.permutation(len(seen))[:30]]:
        longest = tuple(next(one for one in whole if one[: len(known)] == known))
        if longest not in states:
            states[longest] = reference.states(list(longest))
        made = [draft for draft in drafts if draft >= 0]
        assert drafts == made + [-1] * (DRAFTS - len(made))
        assert len(made) == min(DRAFTS, max(1, room - len(known) + 2))
        for draft, (expected, distance) in zip(made, reference.drafts(known, len(made), states[longest]), strict=True):
            if distance < TIE:
                ties += 1
                break
            assert draft == expected
    assert ties < 12


@pytest.mark.parametrize(("pages", "options"), [(128, CUT), (16, {})], ids=["cut steps", "preemption"])
def test_drafts_change_no_token(pages: int, options: dict[str, Any], rng: np.random.Generator, tmp_path: Path) -> None:
    save_quiet_model("qwen3", tmp_path, int(rng.integers(2**31)))
    head = save_head(tmp_path, tmp_path / "head", int(rng.integers(2**31)), right=True)
    requests = requests_of(rng)
    without, before = outputs(tmp_path, requests, **CPU | {"num_pages": pages})
    drafted, after = outputs(tmp_path, requests, **CPU | {"num_pages": pages, "speculative_model": str(head)} | options)
    ties = check_same_outputs(tmp_path, requests, drafted, without)
    assert before["draft_tokens"] == 0 < after["draft_tokens_accepted"] < after["draft_tokens"]
    assert (after["preemptions"] > 0) == (pages == 16)
    for name in ("prompt_tokens", "requests_finished", *([] if ties else ["generated_tokens"])):
        assert before[name] == after[name]
