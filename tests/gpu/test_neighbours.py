"""The influence of other requests on a request's logits: none within a bucket, last bits between buckets."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import logits as model_logits
from support.models import model_zoo
from support.models.kernel_reference import relative_error

from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.models.families.family import describe_model
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.models.weights.weight_loader import load_weights


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3-moe", "mixtral", "glm4-moe", "qwen2-moe"])
def test_outputs_are_equal_within_a_bucket(rng: np.random.Generator, tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    model_zoo.save_model(name, tmp_path, int(rng.integers(2**31)), dtype=dtype)
    model = as_stored(describe_model(tmp_path), tmp_path)
    forced = model_logits.ForcedSteps(rng, model, load_weights(model, tmp_path, dtype, "cuda"), slots=20)
    model_logits.in_one_bucket(forced, rng, model.vocab_size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", ["llama3", "mistral-window", "qwen3-moe", "mixtral", "gemma2", "gpt-oss"])
def test_batch_invariant_outputs_are_equal_across_buckets(
    rng: np.random.Generator, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    model_zoo.save_model(name, tmp_path, int(rng.integers(2**31)), dtype=dtype)
    model = as_stored(describe_model(tmp_path), tmp_path)
    weights = load_weights(model, tmp_path, dtype, "cuda")
    for limits in ((6, 64), (6, 256)):
        forced = model_logits.ForcedSteps(rng, model, weights, slots=6, limits=limits, invariant=True)
        # Longer than a tile of positions, of either dtype.
        assert model_logits.in_all_batches(forced, rng, model.vocab_size, length=110) > 20


def test_few_tokens_differ_between_buckets(rng: np.random.Generator) -> None:
    """A trained model on English text: prints the number of greedy tokens that differ from those of a request alone, which must
    be few."""
    model = describe_model(DEMO_FOLDER)
    text = (Path(__file__).parents[2] / "README.md").read_text() + (DEMO_FOLDER / "README.md").read_text()
    ids = Tokenizer(DEMO_FOLDER).encode(text)
    starts = rng.integers(0, len(ids) - 64, 64)
    tokens = np.stack([ids[start : start + 64] for start in starts])
    weights = load_weights(model, DEMO_FOLDER, torch.bfloat16, "cuda")
    forced = model_logits.ForcedSteps(rng, model, weights, slots=64, limits=(64, 1024))
    alone = forced.follow(tokens, 16, 1)
    for group in (8, 64):
        logits = forced.follow(tokens, 16, group)
        changed, count = int((logits.argmax(-1) != alone.argmax(-1)).sum()), alone.argmax(-1).numel()
        error = relative_error(logits, alone)
        print(f"demonstration model, {group} at a time: {changed} of {count} greedy tokens other than alone, error {error:.1e}")
        assert changed <= count // 50
