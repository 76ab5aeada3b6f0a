"""A model on several ranks computes as on one: each family that can be split, in mixed batches, with prefix hits.

Claim ranks/results: Two and four ranks compute the same tokens as one, and all ranks the same bits.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models.fp8_checkpoints import save_fp8
from support.models.model_zoo import MAX_MODEL_LEN, VISION_SECTIONS, VOCAB, ZOO, save_model
from support.models.packed_checkpoints import save_packed
from support.models.paged_batch import PagedBatches, Sequence
from support.models.ranked_decoder import RankedCache, RankedDecoder
from support.part_of_cases import part_of

from blinkpy.config import ConfigError
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.cpu.torch_progress import TorchProgress
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.description.split import Share
from blinkpy.models.families.family import describe_model
from blinkpy.models.paged_cache import PagedCache, RingSizes, Scales
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.weight_loader import load_weights

PAGE, PAGES, TOKENS, SLOTS = 8, 96, 128, 6
TOLERANCE = 3e-4  # of log probabilities, in float32
NOT_SPLIT = (
    "qwen3-next", "qwen3.5", "deepseek", "glm4-moe-lite", "mistral4", "olmo2", "olmo3", "olmoe", "minimax-m2", "gemma4-e",
    "lfm2", "granite4-h", "nemotron-h", "bamba", "falcon-h1",
)  # fmt: skip
"""Families with a block that is not supported on several ranks (docs/tensor-parallel.md)."""
FAMILIES = [name for name, (kind, _) in ZOO.items() if not name.startswith(NOT_SPLIT) and kind not in VISION_SECTIONS]
Decoder = TorchDecoder | RankedDecoder


def decoder(
    model: DecoderDescription,
    folder: Path,
    ranks: int,
    dtype: torch.dtype = torch.float32,
    rings: RingSizes | None = None,
    scales: Scales | None = None,
) -> Decoder:
    if ranks == 1:
        cache = PagedCache(model, PAGES, PAGE, dtype, rings=rings, scales=scales, slots=SLOTS)
        return TorchDecoder(model, load_weights(model, folder, dtype), cache, MAX_MODEL_LEN, TOKENS)
    weights = [load_weights(model, folder, dtype, share=Share(rank, ranks)) for rank in range(ranks)]
    return RankedDecoder(model, weights, RankedCache(model, ranks, PAGES, PAGE, dtype, rings, scales), MAX_MODEL_LEN, TOKENS)


def storm(decoders: list[Decoder], rng: np.random.Generator, hits: bool = True) -> list[np.ndarray]:
    """Log probabilities of each decoder in the same steps, [emitting rows of all steps, vocab].

    The steps mix chunks of prompts with decode rows; a request begins with another's pages, and one is preempted.
    """
    batches = PagedBatches(
        rng, page_size=PAGE, num_pages=PAGES, slots=SLOTS, max_model_len=MAX_MODEL_LEN, max_tokens=TOKENS, max_rows=SLOTS
    )
    running = [batches.add(rng.integers(0, VOCAB, int(rng.integers(17, 40))).tolist()) for _ in range(3)]
    found: list[list[np.ndarray]] = [[] for _ in decoders]
    for step in range(8):
        if step == 4:
            pages = min(2, running[0].computed // PAGE) if hits else 0
            prompt = running[0].tokens[: pages * PAGE] + rng.integers(0, VOCAB, 7).tolist()
            running.append(batches.add(prompt, share=running[0], share_pages=pages))
            batches.preempt(running[1])
        work = list[tuple[Sequence, int]]()
        for sequence in running:
            left = len(sequence.tokens) - sequence.computed
            work.append((sequence, left if left == 1 else int(rng.integers(1, min(left, 24) + 1))))
        batch = batches.batch(work)
        rows = np.flatnonzero(batch.emits[: len(work)])
        wanted = batch.query_starts[1 : len(work) + 1][rows].astype(np.int64) - 1
        for own, kept in zip(decoders, found, strict=True):
            logits = own.logits(own.forward(batch, batches.requests.page_table, wanted))
            kept.append(logits.log_softmax(-1).numpy())
        batch.sampled[rows] = found[0][-1].argmax(1)
        batches.commit(batch)
    return [np.concatenate(of_one) for of_one in found]


def difference(found: list[np.ndarray], of_rows: Callable[[np.ndarray], Any] = np.max) -> float:
    """Of log probabilities from those of the first decoder. of_rows: np.median if roundings may choose other experts, which
    later tokens of a sequence see.
    """
    assert found[0].std() > 0.1 and len(found[0]) > 3
    return max(float(of_rows(np.abs(found[0] - other).max(1))) for other in found[1:])


def agree_once(make: Callable[[], list[Decoder]], rng: np.random.Generator) -> bool:
    """Whether the decoders agree in one of six storms. A number near the middle between two FP8 numbers may round the other way,
    which later tokens see; not in six storms in succession.
    """
    return any(difference(storm(make(), rng), np.median) < TOLERANCE for _ in range(6))


@pytest.mark.parametrize("name", part_of(FAMILIES))
def test_each_family(name: str, tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    save_model(name, tmp_path, seed, **({"intermediate_size": 128} if name == "gpt-oss-mxfp4" else {}))
    model = as_stored(describe_model(tmp_path), tmp_path)
    of_rows = np.median if any(model.expert_layers) else np.max
    assert difference(storm([decoder(model, tmp_path, ranks) for ranks in (1, 2, 4)], rng), of_rows) < TOLERANCE


@pytest.mark.parametrize("scheme", ["modelopt", "block"])
def test_fp8_weights(scheme: str, tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """With forms that quantise the inputs of a rank's columns as on one rank: a stored scale, or one for 128 columns."""
    sizes = {"head_dim": 128, "hidden_size": 256, "intermediate_size": 512} if scheme == "block" else {}
    save_fp8("qwen3-biased", tmp_path, seed, scheme, **sizes)
    model = describe_model(tmp_path)
    assert agree_once(lambda: [decoder(model, tmp_path, ranks) for ranks in (1, 2)], rng)


def test_four_bit_weights(tmp_path: Path, rng: np.random.Generator) -> None:
    form = str(rng.choice(["w4a16", "w4a16-zeros", "awq", "gptq"]))
    save_packed(rng, tmp_path, form, "qwen3-moe", moe_intermediate_size=256, head_dim=64)
    model = describe_model(tmp_path)
    assert difference(storm([decoder(model, tmp_path, ranks) for ranks in (1, 2)], rng), np.median) < TOLERANCE


def test_window_rings(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    save_model("gemma3", tmp_path, seed)
    model = describe_model(tmp_path)
    rings = RingSizes.of(model, PAGE, SLOTS, TOKENS, SLOTS)
    decoders = [decoder(model, tmp_path, ranks, rings=rings) for ranks in (1, 2)]
    assert difference(storm(decoders, rng, hits=False)) < TOLERANCE


@pytest.mark.parametrize("ranks", [2, 4])
def test_fp8_cache(ranks: int, tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """Each rank has the scales of its key heads, which are so small that large numbers are clipped."""
    save_model("qwen3", tmp_path, seed)
    model = describe_model(tmp_path)
    scales = (2.0 ** rng.integers(-10, -7, (len(model.layers), 2, model.kv_heads))).astype(np.float32)
    assert agree_once(lambda: [decoder(model, tmp_path, n, scales=scales) for n in (1, ranks)], rng)
    wrong = decoder(model, tmp_path, ranks, scales=np.ascontiguousarray(scales[:, :, ::-1]) * 8)
    assert difference(storm([decoder(model, tmp_path, 1, scales=scales), wrong], rng), np.median) > TOLERANCE


def test_largest_of_the_cache(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """Scales that are measured on ranks are those of one rank."""
    save_model("gemma4", tmp_path, seed)
    model = describe_model(tmp_path)
    one, many = decoder(model, tmp_path, 1), decoder(model, tmp_path, 4)
    storm([one, many], rng)
    assert isinstance(one, TorchDecoder) and isinstance(many, RankedDecoder)
    np.testing.assert_allclose(many.cache.largest(), one.attention.cache.largest(), rtol=1e-4)


def test_the_same_bits_in_every_batch(tmp_path: Path, seed: int, rng: np.random.Generator) -> None:
    """With batch-invariant products, no sum over ranks depends on the other rows."""
    save_model("qwen3-moe", tmp_path, seed)
    model = describe_model(tmp_path)
    tokens = rng.integers(0, VOCAB, 20).tolist()
    found = []
    for others in (0, 3):
        weights = [load_weights(model, tmp_path, torch.bfloat16, share=Share(rank, 2)) for rank in range(2)]
        cache = RankedCache(model, 2, PAGES, PAGE, torch.bfloat16)
        own = RankedDecoder(model, weights, cache, MAX_MODEL_LEN, TOKENS, TorchProgress(invariant=True))
        batches = PagedBatches(
            rng, page_size=PAGE, num_pages=PAGES, slots=SLOTS, max_model_len=MAX_MODEL_LEN, max_tokens=TOKENS, max_rows=SLOTS
        )
        sequence = batches.add(tokens)
        work = [(sequence, 20)] + [(batches.add(rng.integers(0, VOCAB, 9).tolist()), 9) for _ in range(others)]
        batch = batches.batch(work)
        row = next(row for row, (one, _) in enumerate(batches.work) if one is sequence)
        logits = own.logits(own.forward(batch, batches.requests.page_table))
        found.append(logits[int(batch.query_starts[row + 1]) - 1])
    assert torch.equal(*found)


def test_a_model_that_can_not_be_split(tmp_path: Path, seed: int) -> None:
    save_model("olmo2", tmp_path, seed)
    model = describe_model(tmp_path)
    with pytest.raises(ConfigError, match=r"layer 0 of .* can't be split over 2 ranks: its norm of queries and keys"):
        RankedCache(model, 2, PAGES, PAGE, torch.float32)
