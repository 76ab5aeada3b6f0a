"""Every family compared with transformers, on small random checkpoints that transformers saved; half of the models in each
run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from support.models.expected_logits import expected_logits, experts_of_a_token
from support.models.model_zoo import MAX_MODEL_LEN, VOCAB, ZOO, save_model
from support.models.paged_batch import PagedBatches, Sequence
from support.models.redrawn_cases import TooManyTiesError, redrawn_at_ties
from support.models.ring_storm import ring_storm
from support.part_of_cases import part_of
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

from blinkpy.engine.devices.cpu_device import lacking_without_torch
from blinkpy.models.cpu.cpu_step import emitting_tokens
from blinkpy.models.cpu.numpy_decoder import NumpyDecoder
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.description.blocks import Factors
from blinkpy.models.families.family import describe_config, describe_model
from blinkpy.models.paged_cache import ArrayCache, PagedCache, RingSizes
from blinkpy.models.weights.array_weights import load_array_weights
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.decoder_weights import embedding_factor
from blinkpy.models.weights.weight_loader import load_weights

PAGE = 8
NEW_TOKENS = 32
TOLERANCE = 1e-4
MOST_OFTEN = 3e-4  # 99th percentile of the errors of logits
MOST_PROMPTS, FOLLOWED = 20, 25  # minimum number of tokens with the same experts in bfloat16
WITHOUT_TORCH = {"llama2", "llama3", "llama-biased-mqa", "mistral", "mistral-window", "ministral", "qwen2", "qwen2-window-yarn"}
WITHOUT_TORCH |= {"qwen3", "qwen3-biased", "qwen3-moe", "qwen3-moe-mixed", "qwen3-moe-stride", "mixtral", "smollm3"}
WITHOUT_TORCH |= {"smollm3-window", "granite", "granite-biased", "granite4-micro", "granite4-nope", "phi3", "phi4-mini-short"}
WITHOUT_TORCH |= {"phi4-mini-long"}
Seen = list[tuple[Sequence, int, np.ndarray]]


def make_batches(rng: np.random.Generator) -> PagedBatches:
    return PagedBatches(rng, page_size=PAGE, num_pages=160, slots=12, max_model_len=256, max_tokens=512, max_rows=12)


def make_decoder(
    folder: Path, dtype: torch.dtype = torch.float32, rings: RingSizes | None = None, max_model_len: int = MAX_MODEL_LEN
) -> TorchDecoder:
    model = as_stored(describe_model(folder), folder)
    cache = PagedCache(model, 160, PAGE, dtype, rings=rings, slots=12)
    states = [tensor for states in cache.states.layers if states is not None for tensor in states]
    for tensor in cache.keys + cache.values + states:  # the content of unwritten pages must not matter
        tensor.fill_(float("nan"))
    return TorchDecoder(model, load_weights(model, folder, dtype), cache, max_model_len, 512)


def make_numpy_decoder(folder: Path, rings: RingSizes | None = None) -> NumpyDecoder:
    """As make_decoder, without torch."""
    model = as_stored(describe_model(folder), folder)
    cache = ArrayCache(model, 160, PAGE, rings)
    for array in cache.keys + cache.values:
        array.fill(np.nan)
    return NumpyDecoder(model, load_array_weights(model, folder), cache, MAX_MODEL_LEN, 512)


def run(decoder: TorchDecoder | NumpyDecoder, batches: PagedBatches, work: list[tuple[Sequence, int]]) -> Seen:
    """One greedy step. Returns (sequence, position, logits [vocab]) of every token of the batch."""
    batch = batches.batch(work)
    logits = np.asarray(decoder.logits(decoder.forward(batch, batches.requests.page_table)))
    seen = []
    for row, (sequence, count) in enumerate(batches.work):
        start = batch.query_starts[row]
        seen += [(sequence, sequence.computed + i, logits[start + i]) for i in range(count)]
    last = emitting_tokens(batch)
    batch.sampled[: len(batches.work)][batch.emits[: len(batches.work)] == 1] = logits[last].argmax(axis=1)
    batches.commit(batch)
    return seen


def tolerance(config: Any) -> float:
    """The tolerance of logits. Sums over the whole past of a delta net or state space grow, and so does the rounding of more
    layers than the usual three. A delta net's norm enlarges the rounding of a result near 0: one token in thousands has ten times
    the usual error."""
    if hasattr(config, "linear_num_key_heads"):
        return 1e-3
    state_space = any(hasattr(config, name) for name in ("mamba_d_state", "ssm_state_size"))
    return MOST_OFTEN if state_space or config.num_hidden_layers > 3 else TOLERANCE


def compare(model: torch.nn.Module, seen: Seen, minimum: int) -> None:
    """Compare our logits, of `minimum` tokens or more, with those of transformers over the same tokens."""
    assert len(seen) >= minimum
    errors, spread = list[float](), 0.0
    for sequence in {id(s): s for s, _, _ in seen}.values():
        expected, end = expected_logits(model, sequence.tokens, experts_of_a_token(model.config.get_text_config()))
        spread, most = max(spread, float(expected.std())), tolerance(model.config.get_text_config())
        for _, position, ours in (item for item in seen if item[0] is sequence and item[1] < end):
            error = float(np.abs(ours - expected[position]).max())
            assert error < most, f"position {position} of {len(sequence.tokens)} is off by {error}"
            errors.append(error)
    if len(errors) <= 0.5 * len(seen):
        raise TooManyTiesError(f"of {len(seen)} results, {len(errors)} do not depend on experts that were nearly equal")
    assert np.quantile(errors, 0.99) < MOST_OFTEN
    assert spread > 0.5, "the logits are too flat to show an error"


def prompt(rng: np.random.Generator, length: int) -> list[int]:
    return rng.integers(0, VOCAB, length).tolist()


@pytest.mark.parametrize("name", part_of(ZOO))
@redrawn_at_ties
def test_mixed_batches(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """With torch's decoder, and NumPy's if it has all blocks."""
    model = save_model(name, tmp_path, int(rng.integers(2**31)), sharded=bool(rng.integers(2)))
    mixed_batches(model, make_decoder(tmp_path), rng)
    lacking = lacking_without_torch(describe_model(tmp_path))
    assert not lacking or name not in WITHOUT_TORCH
    if not lacking:
        mixed_batches(model, make_numpy_decoder(tmp_path), rng)


def mixed_batches(model: torch.nn.Module, decoder: TorchDecoder | NumpyDecoder, rng: np.random.Generator) -> None:
    """A sequence alone: its prompt in one chunk, then tokens whose heads are divided among the threads. Then decodes and prefill
    chunks together, two rows on shared pages, and a preempted sequence that is recomputed."""
    batches, seen = make_batches(rng), list[Any]()
    common = prompt(rng, 3 * PAGE)
    first = batches.add(common + prompt(rng, int(rng.integers(1, 30))))
    for count in (len(first.tokens), *[1] * 8):
        seen += run(decoder, batches, [(first, count)])
    sequences = [first, *(batches.add(prompt(rng, int(rng.integers(18, 70)))) for _ in range(3))]

    preempted_at = int(rng.integers(6, 20))
    for step in range(200):
        if step == 8:
            pages = 3 if decoder.model.recurrence is None else 0  # models with recurrent layers share no pages
            sequences.append(batches.add(common + prompt(rng, int(rng.integers(1, 20))), share=first, share_pages=pages))
        if step == preempted_at:
            batches.preempt(sequences[1])
        work, budget = [], 40
        for sequence in rng.permutation(np.arange(len(sequences))).tolist():
            chosen = sequences[sequence]
            left = len(chosen.tokens) - chosen.computed
            if len(chosen.tokens) - chosen.prompt_length >= NEW_TOKENS or budget == 0:
                continue
            count = min(left, budget, int(rng.integers(1, 24)))
            budget -= count
            work.append((chosen, count))
        if not work:
            break
        seen += run(decoder, batches, work)
    assert all(len(s.tokens) - s.prompt_length == NEW_TOKENS for s in sequences)
    compare(model, seen, 5 * (18 + NEW_TOKENS))


LONG = 500  # tokens


@pytest.mark.parametrize("name", part_of(ZOO, 4))
@redrawn_at_ties
def test_a_long_context(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """In chunks, then a few single tokens."""
    model = save_model(name, tmp_path, int(rng.integers(2**31)))
    decoder = make_decoder(tmp_path, max_model_len=LONG + PAGE)
    batches = PagedBatches(rng, page_size=PAGE, num_pages=160, slots=2, max_model_len=LONG + PAGE, max_tokens=512, max_rows=2)
    sequence, seen = batches.add(prompt(rng, LONG - 4)), list[Any]()
    while len(sequence.tokens) < LONG:
        left = len(sequence.tokens) - sequence.computed
        seen += run(decoder, batches, [(sequence, min(left, int(rng.integers(1, 200))))])
    compare(model, seen, LONG - 4)


WINDOWS = ["gemma2", "gemma3-nested", "gpt-oss", "olmo3", "mistral-window", "ministral", "phi3", "llama4", "llama4-nested"]
WINDOWS += ["cohere2"]
WINDOWS += ["exaone4", "granite-swa", "gemma4", "gemma4-e", "gemma4-e-nested", "gemma4-moe", "gemma4-nested", "gemma4-unified"]


@pytest.mark.parametrize("name", part_of(WINDOWS, 2))
@redrawn_at_ties
def test_window_rings(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Sequences of many times the window, chunks of up to six rings, preemptions, and reused slots. Logits equal, to the bit,
    those with all tokens kept, and match transformers'; by torch, and by NumPy if it has all blocks.

    Supports claim outputs/rings.
    """
    model, described = save_model(name, tmp_path, int(rng.integers(2**31))), describe_model(tmp_path)
    makers: list[Any] = [make_decoder, *([] if lacking_without_torch(described) else [make_numpy_decoder])]
    assert len(makers) == 1 + (name in WITHOUT_TORCH)
    for make in makers:
        batches = make_batches(rng)
        full, ring = make(tmp_path), make(tmp_path, rings=RingSizes.of(described, PAGE, 12, 240, 6))
        seen = list[Any]()
        for batch in ring_storm(rng, batches, VOCAB, longest=180, new_tokens=12, rows=6, tokens=240, prompts=7):
            both = [np.asarray(one.logits(one.forward(batch, batches.requests.page_table))) for one in (full, ring)]
            assert np.array_equal(*both)
            for row, (sequence, count) in enumerate(batches.work):
                start = batch.query_starts[row]
                seen += [(sequence, sequence.computed + i, both[1][start + i]) for i in range(count)]
            last = emitting_tokens(batch)
            batch.sampled[: len(batches.work)][batch.emits[: len(batches.work)] == 1] = both[1][last].argmax(axis=1)
        compare(model, seen, 250)


IN_BFLOAT16 = ["llama3", "qwen3-moe", "qwen3.5", "mixtral", "phi3", "granite", "glm4-moe", "gemma2", "gemma3", "gemma4", "olmo3"]
IN_BFLOAT16 += ["gpt-oss-mxfp4", "llama4"]


@pytest.mark.parametrize("name", part_of(IN_BFLOAT16, 6))
def test_bfloat16_follows_float32(name: str, tmp_path: Path, rng: np.random.Generator) -> None:
    """Logits in bfloat16 are as close to those in float32 as transformers' own."""
    model = save_model(name, tmp_path, int(rng.integers(2**31)), dtype=torch.bfloat16)
    architecture = describe_model(tmp_path)
    assert architecture.dtype == "bfloat16"
    ours, theirs = bfloat16_errors(model, tmp_path, rng)
    if not any(architecture.expert_layers):
        assert np.median(ours) < 0.1 and ours.mean() < 1.5 * theirs.mean()
        return
    # A token may go to the other of two nearly equal experts, and then most later tokens differ: only earlier tokens count.
    usual, followed = 6 * np.quantile(theirs, 0.1), list[tuple[float, float]]()
    for _ in range(MOST_PROMPTS):
        changed = np.flatnonzero(np.maximum(ours, theirs) > usual)
        end = int(changed[0]) if changed.size else len(ours)
        followed += zip(ours[:end], theirs[:end], strict=True)
        if len(followed) >= FOLLOWED:
            break
        ours, theirs = bfloat16_errors(model, tmp_path, rng)
    assert len(followed) >= FOLLOWED, f"experts change in {MOST_PROMPTS} prompts, too early"
    own, other = np.array(followed).mean(0)
    assert own < 2 * other


def bfloat16_errors(model: Any, folder: Path, rng: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean errors of each token's bfloat16 logits, relative to their deviation: ours and those of transformers, for a new
    prompt."""
    tokens, results = prompt(rng, 40), []
    for dtype in (torch.float32, torch.bfloat16):
        decoder, batches = make_decoder(folder, dtype), make_batches(rng)
        sequence = batches.add(tokens[:24])
        seen = run(decoder, batches, [(sequence, 24)])
        for token in tokens[24:]:
            sequence.tokens[-1] = token  # the same tokens for both, regardless of the samples
            seen += run(decoder, batches, [(sequence, 1)])
        results.append(np.array([logits for _, _, logits in seen]))
    exact, ours = results
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0].float().numpy()
    own, other = (np.abs(some - exact).mean(-1) / exact.std() for some in (ours, theirs))
    return own, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_factor_of_embeddings_is_rounded_as_their_dtype(dtype: torch.dtype, rng: np.random.Generator) -> None:
    """If transformers makes the factor a tensor of that dtype. The same bits, at the sizes of Gemma 3 and of other models."""
    plain = describe_config(
        {"architectures": ["Gemma3ForCausalLM"], "hidden_size": 64, "intermediate_size": 8, "num_hidden_layers": 1}
    )
    for hidden in (640, 1152, 2560, 3840, 5376, *rng.integers(8, 4096, 8).tolist()):
        theirs = Gemma3TextScaledWordEmbedding(7, hidden, 0, hidden**0.5).to(dtype)
        model = replace(plain, factors=plain.factors._replace(embedding=hidden**0.5))
        assert torch.equal(theirs(torch.arange(7)), theirs.weight * embedding_factor(model, dtype))
    assert embedding_factor(replace(model, factors=Factors(3.3)), dtype) == 3.3
