"""--batch-invariant: a request's logits and its text do not depend on the batch, to the last bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.logits import in_all_batches
from support.models.model_zoo import save_model
from support.models.paged_batch import PagedBatches, Sequence

from blinkpy.llm import LLM
from blinkpy.models.cpu.numpy_decoder import NumpyDecoder
from blinkpy.models.cpu.numpy_products import NumpyProgress
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.families.family import describe_model
from blinkpy.models.paged_cache import ArrayCache, PagedCache
from blinkpy.models.weights.array_weights import load_array_weights
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.weight_loader import load_weights
from blinkpy.sampling_params import SamplingParams

PAGE, PAGES, SLOTS, LENGTH, TOKENS, ROWS = 16, 48, 6, 128, 64, 8


class CpuSteps:
    """A model's forward passes over hand-made batches."""

    def __init__(self, rng: np.random.Generator, folder: Path, dtype: torch.dtype | None, *, invariant: bool):
        model = as_stored(describe_model(folder), folder)
        self.vocab = model.vocab_size
        self.batches = PagedBatches(
            rng, page_size=PAGE, num_pages=PAGES, slots=SLOTS, max_model_len=LENGTH, max_tokens=TOKENS, max_rows=ROWS
        )
        self.decoder: Any
        if dtype is None:
            progress, cache = NumpyProgress(invariant=invariant), ArrayCache(model, PAGES, PAGE)
            self.decoder = NumpyDecoder(model, load_array_weights(model, folder), cache, LENGTH, TOKENS, progress)
        else:
            weights, kept = load_weights(model, folder, dtype), PagedCache(model, PAGES, PAGE, dtype)
            self.decoder = TorchDecoder(model, weights, kept, LENGTH, TOKENS, TorchProgress(invariant=invariant))

    def logits(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Compute the next tokens of each sequence. Returns the logits after the last token, float32 [len(work), vocab]."""
        batch = self.batches.batch(work)
        rows = {id(sequence): row for row, sequence in enumerate(self.batches.rows)}
        for sequence, count in work:
            sequence.computed += count
        last = np.array([batch.query_starts[rows[id(sequence)] + 1] - 1 for sequence, _ in work], np.int64)
        order = np.argsort(last)
        hidden = self.decoder.forward(batch, self.batches.requests.page_table, last[order])
        return torch.as_tensor(np.asarray(self.decoder.logits(hidden)))[np.argsort(order)].clone()


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16], ids=["numpy", "torch", "torch-bfloat16"])
@pytest.mark.parametrize("name", ["mistral-window", "qwen3-moe-mixed"])
def test_logits_do_not_depend_on_the_batch(
    rng: np.random.Generator, tmp_path: Path, name: str, dtype: torch.dtype | None
) -> None:
    save_model(name, tmp_path, int(rng.integers(2**31)), dtype=dtype or torch.float32)
    steps = CpuSteps(rng, tmp_path, dtype, invariant=True)
    assert in_all_batches(steps, rng, steps.vocab) > 20


def test_without_the_option_logits_may_depend_on_the_batch(rng: np.random.Generator, tmp_path: Path) -> None:
    """This proves that the test above can fail."""
    save_model("mistral-window", tmp_path, int(rng.integers(2**31)))
    steps = CpuSteps(rng, tmp_path, None, invariant=False)
    with pytest.raises(AssertionError, match="depend on the batch"):
        for _ in range(5):
            in_all_batches(steps, rng, steps.vocab)


def test_same_seed_same_text(rng: np.random.Generator) -> None:
    """In an engine: alone, and among requests that arrive before and after it."""
    with LLM("demo", device="cpu", batch_invariant=True, max_model_len=256, num_pages=160) as llm:
        params = SamplingParams(temperature=1.0, max_tokens=40, seed=int(rng.integers(2**31)))
        prompt = rng.integers(10, 500, int(rng.integers(2, 60))).tolist()
        others = [rng.integers(10, 500, int(rng.integers(1, 90))).tolist() for _ in range(9)]
        (alone,) = llm.generate([prompt], params)
        among = llm.generate([*others, prompt, *others], params)[len(others)]
        assert among.outputs[0].token_ids == alone.outputs[0].token_ids
