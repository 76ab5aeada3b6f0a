"""--kv-cache-dtype fp8_e4m3 on the CPU: compared with transformers over a cache that torch rounds; chunks, hits and rings change
nothing."""

import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from support.engine_serving import generate, serving
from support.models.model_zoo import MAX_MODEL_LEN, VOCAB, save_model
from support.models.paged_batch import PagedBatches, Sequence
from support.models.ring_storm import ring_storm

from blinkpy.config import Config
from blinkpy.engine.devices.cpu_device import lacking_without_torch
from blinkpy.engine.engine import Engine, make_engine
from blinkpy.models.cpu.numpy_decoder import NumpyDecoder
from blinkpy.models.cpu.numpy_products import NumpyProgress
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_model
from blinkpy.models.paged_cache import ArrayCache, PagedCache, RingSizes, Scales, kv_bytes_per_page
from blinkpy.models.weights.array_weights import load_array_weights
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from blinkpy.models.weights.weight_loader import load_weights
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import COUNTER
from blinkpy.recording.recording_reader import RecordingReader
from blinkpy.scheduler.policies import short_prompts
from blinkpy.verify.replay.replayer import Replay

PAGE, PAGES, TOKENS = 8, 160, 240


def make_batches(rng: np.random.Generator) -> PagedBatches:
    return PagedBatches(rng, page_size=PAGE, num_pages=PAGES, slots=12, max_model_len=256, max_tokens=TOKENS, max_rows=12)


def make_decoder(
    folder: Path, scales: Scales | None, *, torchs: bool = True, dtype: torch.dtype = torch.float32,
    rings: RingSizes | None = None, invariant: bool = False,
) -> Any:  # fmt: skip
    """A decoder by torch or NumPy, over a cache full of NaN."""
    model = as_stored(describe_model(folder), folder)
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
    """Scales of any size; the largest numbers of some heads saturate."""
    sizes = np.exp2(rng.uniform(-9, -6.5, (len(model.layers), 2, model.kv_heads)))
    return sizes.astype(np.float32)


class RoundedCache(transformers.DynamicCache):
    """A cache of transformers whose values are rounded to FP8 by torch."""

    def __init__(self, scales: Scales):
        super().__init__()
        self.scales = torch.from_numpy(scales)[..., None, None]

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int, *more: Any, **options: Any) -> Any:
        rounded = (
            ((side / scale).clamp(-448, 448).to(torch.float8_e4m3fn).to(side.dtype) * scale).to(side.dtype)
            for side, scale in zip((keys, values), self.scales[layer, :, : keys.shape[1]], strict=True)
        )
        return super().update(*rounded, layer, *more, **options)


def forward(decoder: Any, batches: PagedBatches, work: list[tuple[Sequence, int]]) -> np.ndarray:
    """Logits of all tokens; sequences continue with their tokens."""
    batch = batches.batch(work)
    logits = np.asarray(decoder.logits(decoder.forward(batch, batches.requests.page_table)))
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
FAMILIES += ["gemma2", "gemma3", "gemma4-nested", "olmo2", "gpt-oss", "glm4-moe", "qwen3-moe", "ministral3", "llama4"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_are_those_of_a_rounded_cache(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """As close to the exact model as transformers with the same rounding, and much closer to that transformers model."""
    reference = save_model(name, tmp_path, int(rng.integers(2**31)))
    model = as_stored(describe_model(tmp_path), tmp_path)
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
        for part in (slice(44), slice(44, None)):  # computed in chunks, and one by one
            middle = [float(np.median(some[part])) for some in (theirs, own, apart)]
            assert middle[1] <= 1.5 * middle[0] and middle[2] <= 0.15 * middle[0], middle


def test_bfloat16_follows_float32(tmp_path: Path, rng: np.random.Generator) -> None:
    """As close to the exact model as transformers in bfloat16 with the same rounding."""
    reference = save_model("llama3", tmp_path, int(rng.integers(2**31)), dtype=torch.bfloat16)
    scales, tokens = draw_scales(rng, describe_model(tmp_path)), rng.integers(0, VOCAB, 60).tolist()
    exact = follow(make_decoder(tmp_path, None), make_batches(rng), tokens, 40, 60)
    ours = follow(make_decoder(tmp_path, scales, dtype=torch.bfloat16), make_batches(rng), tokens, 40, 17)
    with torch.no_grad():
        theirs = reference(torch.tensor([tokens]), past_key_values=RoundedCache(scales), use_cache=True).logits[0].float().numpy()
    assert np.abs(ours - exact).mean() <= 1.5 * np.abs(theirs - exact).mean()


@pytest.mark.parametrize(("name", "torchs"), [("gemma2", True), ("qwen3", True), ("mistral-window", False)])
def test_chunks_and_shared_pages_change_no_bit(name: str, torchs: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """Batch-invariant: the same bits for a prompt in one chunk, in several, and after pages that another sequence has computed.
    Such pages hold the same values, because new tokens are read from the cache, too."""
    save_model(name, tmp_path, int(rng.integers(2**31)))
    scales = draw_scales(rng, describe_model(tmp_path))
    decoder, batches = make_decoder(tmp_path, scales, torchs=torchs, invariant=True), make_batches(rng)
    tokens = rng.integers(0, VOCAB, 70).tolist()
    whole = follow(decoder, batches, tokens, 70, 70)
    assert np.array_equal(follow(decoder, batches, tokens, 50, int(rng.integers(1, 30))), whole)
    first = batches.add(tokens)
    forward(decoder, batches, [(first, 70)])
    pages = int(rng.integers(1, 8))
    second = batches.add(tokens, share=first, share_pages=pages)
    assert np.array_equal(forward(decoder, batches, [(second, 70 - pages * PAGE)]), whole[pages * PAGE :])


@pytest.mark.parametrize(("name", "torchs"), [("gemma3-nested", True), ("mistral-window", False)])
def test_window_rings(name: str, torchs: bool, tmp_path: Path, rng: np.random.Generator) -> None:
    """The same bits as with all tokens kept."""
    save_model(name, tmp_path, int(rng.integers(2**31)))
    model = as_stored(describe_model(tmp_path), tmp_path)
    scales, rings = draw_scales(rng, model), RingSizes.of(model, PAGE, 12, TOKENS, 6)
    batches = make_batches(rng)
    full, ring = (make_decoder(tmp_path, scales, torchs=torchs, rings=some) for some in (None, rings))
    for batch in ring_storm(rng, batches, VOCAB, longest=150, new_tokens=4, rows=6, tokens=TOKENS, prompts=5):
        both = [np.asarray(one.logits(one.forward(batch, batches.requests.page_table))) for one in (full, ring)]
        assert np.array_equal(*both)
        batch.sampled[:] = 1


SMALL: dict[str, object] = {"model": "demo", "device": "cpu", "dtype": "float32", "batch_invariant": True}
SMALL |= {"check_integrity": "always", "cpu_cache_mib": 2, "max_model_len": 256, "slots": 24, "max_num_seqs": 8}
SMALL |= {"max_num_batched_tokens": 64, "grammar_slots": 0}


def engine_of(**options: object) -> Engine:
    return make_engine(Config().with_options(SMALL | {"name": f"test-{secrets.token_hex(6)}"} | options))


def test_an_engine_has_more_pages_and_serves_the_same_from_hits(rng: np.random.Generator) -> None:
    """It has four times the pages of float32 in the same memory, and measures its scales. Requests get the same tokens with and
    without the prefix cache, and after a restart; the recording replays."""
    stem = rng.integers(10, 500, 90).tolist()
    prompts = [stem + rng.integers(10, 500, int(n)).tolist() for n in rng.integers(5, 60, 5)]
    greedy, found = RequestParameters(max_tokens=20, temperature=0.0), list[list[list[int]]]()
    for cached in (True, False):
        engine = engine_of(kv_cache_dtype="fp8_e4m3", enable_prefix_caching=cached)
        with serving(engine) as client:
            found += [generate(client, prompts, [greedy] * 5)[0] for _ in range(2)]
            assert (engine.views.engine[COUNTER["prefix_hit_tokens"]] > 300) == cached
            capture = RecordingReader(engine.config.engine.name).capture()
        replay = Replay(capture, short_prompts)
        assert [differences for _, differences in replay.run() if differences] == []
    assert found[0] == found[1] == found[2] == found[3]
    page = kv_bytes_per_page(describe_model(DEMO_FOLDER), engine.sizes.page_size, 1)
    assert engine.sizes.num_pages == (2 << 20) // page
