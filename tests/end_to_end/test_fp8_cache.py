"""--kv-cache-dtype fp8_e4m3 on the CPU: against transformers over a cache that is rounded by torch, and whatever runs beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.models.model_zoo import MAX_MODEL_LEN, VOCAB, save_model
from support.models.paged_batch import PagedBatches, Sequence
from support.models.ring_storm import ring_storm

from blinkpy.llm import LLM
from blinkpy.models.arrays.numpy_decoder import NumpyDecoder
from blinkpy.models.arrays.numpy_products import NumpyProgress
from blinkpy.models.cache_scales import FP8, Scales
from blinkpy.models.cpu.cpu_decoders import lacking_without_torch
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.describe_model import describe_model
from blinkpy.models.paged_cache import ArrayCache, PagedCache
from blinkpy.models.ring_sizes import RingSizes
from blinkpy.models.weights.array_weights import load_array_weights
from blinkpy.models.weights.decoder_weights import load_weights
from blinkpy.sampling_params import SamplingParams

PAGE, PAGES, TOKENS = 8, 160, 240


def make_batches(rng: np.random.Generator) -> PagedBatches:
    return PagedBatches(rng, page_size=PAGE, num_pages=PAGES, slots=12, max_model_len=256, max_tokens=TOKENS, max_rows=12)


def make_decoder(
    folder: Path, scales: Scales | None, *, torchs: bool = True, dtype: torch.dtype = torch.float32,
    rings: RingSizes | None = None, invariant: bool = False,
) -> Any:  # fmt: skip
    """By torch or by NumPy, over a cache full of NaN."""
    model = describe_model(folder)
    if not torchs:
        arrays = ArrayCache(model, PAGES, PAGE, rings, scales)
        for array in arrays.keys + arrays.values:
            array.fill(0x7F if scales is not None else np.nan)
        progress = NumpyProgress(invariant=invariant)
        return NumpyDecoder(model, load_array_weights(model, folder), arrays, MAX_MODEL_LEN, TOKENS, progress)
    cache = PagedCache(model, PAGES, PAGE, dtype, rings=rings, scales=scales)
    for tensor in cache.keys + cache.values:
        tensor.fill_(float("nan"))
    return TorchDecoder(
        model, load_weights(model, folder, dtype), cache, MAX_MODEL_LEN, TOKENS, TorchProgress(invariant=invariant)
    )


def draw_scales(rng: np.random.Generator, model: DecoderDescription) -> Scales:
    """Of any value; the largest numbers of some heads saturate."""
    sizes = np.exp2(rng.uniform(-9, -6.5, (len(model.layers), 2, model.kv_heads)))
    return sizes.astype(np.float32)


class RoundedCache(transformers.DynamicCache):
    """What transformers puts into it comes out rounded to FP8, by torch."""

    def __init__(self, scales: Scales):
        super().__init__()
        self.scales = torch.from_numpy(scales)[..., None, None]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *more: Any, **options: Any) -> Any:
        rounded = (
            ((side / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(side.dtype) * scale).to(side.dtype)
            for side, scale in zip((keys, values), self.scales[layer], strict=True)
        )
        return super().update(*rounded, layer, *more, **options)


def forward(decoder: Any, batches: PagedBatches, work: list[tuple[Sequence, int]]) -> np.ndarray:
    """Logits of all tokens; sequences go on with the tokens that they have."""
    batch = batches.batch(work)
    logits = np.array(decoder.logits(decoder.forward(batch, batches.requests.page_table)))
    for sequence, count in work:
        sequence.computed += count
    return logits


def follow(decoder: Any, batches: PagedBatches, tokens: list[int], prompt: int, chunk: int) -> np.ndarray:
    """Logits of one sequence: its prompt in chunks, then token by token."""
    sequence, found = batches.add(tokens[:prompt]), []
    while sequence.computed < prompt:
        found.append(forward(decoder, batches, [(sequence, min(chunk, prompt - sequence.computed))]))
    for token in tokens[prompt:]:
        sequence.tokens.append(token)
        found.append(forward(decoder, batches, [(sequence, 1)]))
    return np.concatenate(found)


FAMILIES = ["llama3", "llama-biased-mqa", "qwen2-window-yarn", "qwen3", "smollm3", "granite", "phi3", "mistral-window"]
FAMILIES += ["gemma2", "gemma3", "olmo2", "gpt-oss", "glm4-moe", "qwen3-moe", "ministral3"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_a_rounded_cache(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """As near to the exact model as transformers with the same rounding is, and much nearer to that than either to the exact."""
    reference = save_model(name, tmp_path, int(rng.integers(2**31)))
    model = describe_model(tmp_path)
    scales, tokens = draw_scales(rng, model), rng.integers(0, VOCAB, 60).tolist()
    with torch.no_grad():
        exact, rounded = (
            reference(torch.tensor([tokens]), past_key_values=cache, use_cache=True).logits[0].numpy()
            for cache in (transformers.DynamicCache(), RoundedCache(scales))
        )
    makers = [True] if lacking_without_torch(model) else [True, False]
    for torchs in makers:
        decoder = make_decoder(tmp_path, scales, torchs=torchs)
        ours = follow(decoder, make_batches(rng), tokens, 44, int(rng.integers(5, 50)))
        theirs, own, apart = (np.abs(a - b).mean(-1) for a, b in ((rounded, exact), (ours, exact), (ours, rounded)))
        assert np.median(own) <= 1.5 * np.median(theirs), (np.median(own), np.median(theirs))
        assert np.median(apart) <= 0.1 * np.median(theirs), (np.median(apart), np.median(theirs))
