"""Whole models in bfloat16 on the GPU: as close to float32 as transformers, with the same weights and tokens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.models import logits as model_logits
from support.models import model_zoo
from support.models.kernel_reference import relative_error

from benchmarks.common.model_shapes import SHAPES
from blinkpy.kernels.linear.linear_table import LinearTable
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.weight_loader import dummy_weights, load_weights

LIMIT = 1.5
"""Maximum ratio of our error to transformers' own."""
MODEL_TYPES = {"LlamaForCausalLM": "llama", "Qwen3MoeForCausalLM": "qwen3_moe"}


@pytest.fixture(autouse=True)
def exact_float32() -> None:
    """The reference uses real float32, without TF32."""
    assert torch.get_float32_matmul_precision() == "highest"


# transformers can't load MXFP4 on every machine.
@pytest.mark.parametrize("name", [name for name in model_zoo.ZOO if not name.endswith("mxfp4")])
def test_families(rng: np.random.Generator, tmp_path: Path, name: str) -> None:
    model_zoo.save_model(name, tmp_path, int(rng.integers(2**31)), dtype=torch.bfloat16)
    model = as_stored(describe_model(tmp_path), tmp_path)
    tokens, prompt = rng.integers(0, model.vocab_size, (64, 40)), int(rng.integers(20, 30))
    weights = load_weights(model, tmp_path, torch.bfloat16, "cuda")
    forced = model_logits.ForcedSteps(rng, model, weights, slots=8, length=128, limits=(8, 256))
    ours = forced.follow(tokens, prompt, 8)
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        reference = model_zoo.auto_class(name).from_pretrained(tmp_path, dtype=dtype).cuda()
        found.append(model_logits.logits_of(reference, tokens, prompt, 64))
    narrow, exact = found
    mine, theirs = relative_error(ours, exact), relative_error(narrow, exact)
    print(f"{name}: error {mine:.2e}, transformers' {theirs:.2e}, ratio {mine / theirs:.2f}")
    assert mine <= LIMIT * theirs


@pytest.mark.timeout(400)
@pytest.mark.whole_gpu  # it leaves no memory for other tests
@pytest.mark.parametrize("shape", ["llama-3-8b", "qwen3-30b-a3b"])
def test_full_size(rng: np.random.Generator, tmp_path: Path, shape: str) -> None:
    """Random weights at full depth; and the effect of a token's neighbours: none, 8, and 64."""
    facts: dict[str, Any] = SHAPES[shape]
    model = describe_config(facts)
    weights = dummy_weights(model, int(rng.integers(2**31)), torch.bfloat16, "cuda", spread=(3 / model.hidden_size) ** 0.5)
    table = LinearTable.load(torch.cuda.get_device_name())
    forced = model_logits.ForcedSteps(rng, model, weights, slots=64, length=128, limits=(64, 1024), table=table)
    tokens, prompt, alone = rng.integers(0, model.vocab_size, (64, 32)), 16, 32
    ours = {group: forced.follow(tokens[: alone if group == 1 else 64], prompt, group) for group in (64, 8, 1)}

    (tmp_path / "config.json").write_text(json.dumps({**facts, "model_type": MODEL_TYPES[facts["architectures"][0]]}))
    reference = model_logits.transformers_view(model, weights, transformers.AutoConfig.from_pretrained(tmp_path))
    narrow = model_logits.logits_of(reference, tokens, prompt)
    with model_logits.widened(reference):
        exact = model_logits.logits_of(reference, tokens, prompt)
    assert reference.lm_head.weight.dtype == torch.bfloat16

    greedy = ours[1].argmax(-1)
    for group, logits in ours.items():
        mine, theirs = (relative_error(some, exact[: len(logits)]) for some in (logits, narrow[: len(logits)]))
        changed = int((logits[:alone].argmax(-1) != greedy).sum())
        print(
            f"{shape}, {group} at a time: error {mine:.2e}, transformers' {theirs:.2e}, ratio {mine / theirs:.2f}; "
            f"greedy token other than alone: {changed} of {greedy.numel()}"
        )
        assert mine <= LIMIT * theirs
    model_logits.in_one_bucket(forced, rng, model.vocab_size)
