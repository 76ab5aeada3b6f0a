"""A long step on the CPU shows that it computes, and how long a step is."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.models.model_zoo import BASE, LATENT, MOE, OSS
from support.models.paged_batch import PagedBatches
from support.models.redrawn_cases import redrawn_at_ties

from blinkpy.config import Config
from blinkpy.engine.devices import cpu_device
from blinkpy.models.cpu import cpu_attention, numpy_decoder, numpy_products
from blinkpy.models.cpu import step_progress as cpu_speed
from blinkpy.models.cpu.numpy_decoder import NumpyDecoder
from blinkpy.models.cpu.numpy_products import NumpyProgress, ThreadTeam, numpy_speed
from blinkpy.models.cpu.step_progress import FEWEST_TOKENS, StepProgress
from blinkpy.models.cpu.torch_decoder import TorchDecoder
from blinkpy.models.cpu.torch_progress import TorchProgress, torch_speed
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_config
from blinkpy.models.paged_cache import ArrayCache, PagedCache
from blinkpy.models.weights.array_weights import dummy_array_weights
from blinkpy.models.weights.weight_loader import dummy_weights

PAGE, PAGES, CONTEXT, TOKENS = 8, 100, 256, 256
SHAPES = {
    "dense": {**BASE, "architectures": ["LlamaForCausalLM"], "mlp_bias": True},
    "experts": {**BASE, **MOE, "architectures": ["Qwen3MoeForCausalLM"]},
    "latent": {**BASE, **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "n_group": 1, "topk_group": 1},
    "mxfp4": {**BASE, **OSS, "architectures": ["GptOssForCausalLM"], "quantization_config": {"quant_method": "mxfp4"}},
}


def test_products_in_pieces_are_the_products(rng: np.random.Generator) -> None:
    for tokens in (0, 1, int(rng.integers(2, 200))):
        width, out = (int(n) for n in rng.integers(1, 40, 2))
        x, weight, bias, before = (
            torch.from_numpy(rng.normal(size=s)) for s in ((tokens, width), (out, width), out, (tokens, out))
        )
        progress = TorchProgress(int(rng.integers(1, 60 * width * out)))
        size = max(FEWEST_TOKENS, progress.piece // (width * out))
        for some in (None, bias):
            added = 0 if some is None else bias
            assert torch.allclose(progress.linear(x, weight, some), x @ weight.T + added)
            assert torch.allclose(progress.add_linear(before, x, weight, some), before + x @ weight.T + added)
        assert progress.word[0] == 4 * -(-tokens // size)


class Watched:
    """Work of each product and each attention that torch computes, in multiply-adds, and the word when it begins."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, progress: StepProgress):
        self.progress, self.products, self.others, self.words = progress, list[int](), list[int](), list[int]()
        linear, addmm, attention, threads = F.linear, torch.addmm, F.scaled_dot_product_attention, cpu_attention.run_on_threads

        def note(kind: list[int], work: int) -> None:
            kind.append(work)
            self.words.append(int(progress.word[0]))

        def noted_linear(x: torch.Tensor, weight: torch.Tensor, bias: Any = None) -> torch.Tensor:
            note(self.products, len(x) * weight.numel())
            return linear(x, weight, bias)

        def noted_addmm(x: torch.Tensor, inner: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
            note(self.products, len(x) * weight.numel())
            return addmm(x, inner, weight, **options)

        def noted_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
            note(self.others, 2 * q.numel() * k.shape[2])
            return attention(q, k, v, **options)

        def noted_threads(*arguments: Any) -> None:
            note(self.others, 0)
            threads(*arguments)

        monkeypatch.setattr(F, "linear", noted_linear)
        monkeypatch.setattr(torch, "addmm", noted_addmm)
        monkeypatch.setattr(F, "scaled_dot_product_attention", noted_attention)
        monkeypatch.setattr(cpu_attention, "run_on_threads", noted_threads)


def decoder_of(shape: str, progress: TorchProgress) -> tuple[DecoderDescription, TorchDecoder]:
    model = describe_config(SHAPES[shape])
    weights = dummy_weights(model, 7, torch.float32, spread=0.2)
    return model, TorchDecoder(model, weights, PagedCache(model, PAGES, PAGE, torch.float32), CONTEXT, TOKENS, progress)


def all_logits(decoder: TorchDecoder | NumpyDecoder, seed: int, lengths: list[int]) -> torch.Tensor:
    """Of prompts in two chunks: the first token alone, then the others."""
    rng = np.random.default_rng(seed)
    batches = PagedBatches(rng, page_size=PAGE, num_pages=PAGES, slots=4, max_model_len=CONTEXT, max_tokens=TOKENS, max_rows=4)
    sequences = [batches.add(rng.integers(0, 199, length).tolist()) for length in lengths]
    seen = []
    for counts in ([1] * len(lengths), [length - 1 for length in lengths]):
        batch = batches.batch([(s, count) for s, count in zip(sequences, counts, strict=True) if count])
        seen.append(torch.as_tensor(decoder.logits(decoder.forward(batch, batches.requests.page_table))))
        batches.commit(batch)
    return torch.cat(seen)


@pytest.mark.parametrize("shape", SHAPES)
@redrawn_at_ties
def test_pieces_of_any_size_compute_the_same(shape: str, rng: np.random.Generator) -> None:
    seed, piece = int(rng.integers(2**31)), int(rng.choice([1, 100_000, 1_000_000]))
    expected = all_logits(decoder_of(shape, TorchProgress())[1], seed, [120, 40])
    assert torch.allclose(all_logits(decoder_of(shape, TorchProgress(piece))[1], seed, [120, 40]), expected, atol=1e-4)


@pytest.mark.parametrize("shape", ["dense", "experts"])
def test_the_word_moves_between_pieces_of_bounded_work(
    shape: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed, piece = int(rng.integers(2**31)), 200_000
    model, decoder = decoder_of(shape, TorchProgress(piece))
    watched = Watched(monkeypatch, decoder.progress)
    all_logits(decoder, seed, [120, 40])
    assert max(watched.others) <= max(piece, FEWEST_TOKENS * 2 * model.q_size * 120)
    assert max(watched.products) <= max(piece, FEWEST_TOKENS * max(199, model.q_size + 2 * model.kv_size) * model.hidden_size)
    assert len(watched.products) > 60 and all(a < b for a, b in zip(watched.words, watched.words[1:], strict=False))


@pytest.mark.parametrize(("gathered", "work"), [(1, 1), (45, 1 << 12), (1 << 20, 1 << 40)])
def test_parts_of_any_size_attend_alike(
    gathered: int, work: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys of one prompt or of several at a time; one key head or all together."""
    seed, lengths = int(rng.integers(2**31)), [40, 5, 70, 30]
    expected = all_logits(decoder_of("dense", TorchProgress())[1], seed, lengths)
    monkeypatch.setattr(numpy_decoder, "GATHERED", gathered)
    monkeypatch.setattr(numpy_decoder, "PART_WORK", work)
    model, progress = describe_config(SHAPES["dense"]), NumpyProgress(team=ThreadTeam(2))
    weights, cache = dummy_array_weights(model, 7, 0.2), ArrayCache(model, PAGES, PAGE)
    decoder = NumpyDecoder(model, weights, cache, CONTEXT, TOKENS, progress)
    assert torch.allclose(all_logits(decoder, seed, lengths), expected, atol=1e-4)


@pytest.mark.parametrize("shape", ["dense", "experts"])
@redrawn_at_ties
def test_the_word_moves_between_pieces_without_torch(
    shape: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As above, on one thread: between two products the word moves, except between the two of an attention."""
    seed, piece = int(rng.integers(2**31)), 200_000
    expected = all_logits(decoder_of(shape, TorchProgress())[1], seed, [120, 40])
    model, progress = describe_config(SHAPES[shape]), NumpyProgress(piece, ThreadTeam(1))
    weights, cache = dummy_array_weights(model, 7, 0.2), ArrayCache(model, PAGES, PAGE)
    decoder = NumpyDecoder(model, weights, cache, CONTEXT, TOKENS, progress)
    products, attentions, words, multiply, matmul = list[int](), list[int](), list[int](), numpy_products.multiply, np.matmul

    def noted_multiply(team: ThreadTeam, x: np.ndarray, weight: np.ndarray, out: np.ndarray, **options: bool) -> None:
        products.append(len(x) * weight.size)
        words.append(int(progress.word[0]))
        multiply(team, x, weight, out, **options)

    def noted_matmul(x: np.ndarray, y: np.ndarray, **options: Any) -> np.ndarray:
        if not options:  # those of the attention
            attentions.append(x.size * y.shape[-1])
            words.extend([int(progress.word[0])] * (len(attentions) % 2))
        return matmul(x, y, **options)

    monkeypatch.setattr(numpy_products, "multiply", noted_multiply)
    monkeypatch.setattr(np, "matmul", noted_matmul)
    assert torch.allclose(all_logits(decoder, seed, [120, 40]), expected, atol=1e-4)
    assert max(attentions) <= max(piece, model.q_size * 120)
    assert max(products) <= max(piece, FEWEST_TOKENS * max(199, model.q_size + 2 * model.kv_size) * model.hidden_size)
    assert len(products) > 60 and len(attentions) > 20 and all(a < b for a, b in itertools.pairwise(words))


@pytest.mark.parametrize("shape", sorted(SHAPES.keys() - {"latent"}))  # which multiplies with kv_b head by head
def test_the_work_of_a_token_is_that_of_its_products(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, decoder = decoder_of(shape, TorchProgress())
    watched = Watched(monkeypatch, decoder.progress)
    all_logits(decoder, 5, [2])
    head = 199 * model.hidden_size
    assert cpu_speed.work_per_token(model) == sum(watched.products) // 2 - head


def test_steps_fit_the_speed_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    model = describe_config(SHAPES["dense"])
    work = cpu_speed.work_per_token(model)
    for share, tokens in ((0.4, 1), (1.0, 1), (100.5, 64), (1e9, 2048)):
        assert cpu_speed.tokens_within(share * work, model, 2048) == tokens
        monkeypatch.setattr(numpy_products, "numpy_speed", lambda team, invariant, share=share: share * work)
        cpu_device.numpy_speed_once.cache_clear()
        assert cpu_device.CpuDevice().step_tokens(Config(), model) == tokens
    cpu_device.numpy_speed_once.cache_clear()
    monkeypatch.undo()
    assert all(1e6 < speed < 1e15 for speed in (torch_speed(torch.float32), numpy_speed(ThreadTeam())))


def test_the_speed_of_batch_invariant_products_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds, calls, multiply, linear = list[bool](), list[int](), numpy_products.multiply, F.linear

    def noted_multiply(*arrays: Any, invariant: bool) -> None:
        kinds.append(invariant)
        multiply(*arrays, invariant=invariant)

    def noted_linear(x: torch.Tensor, *more: Any) -> torch.Tensor:
        calls.append(len(x))
        return linear(x, *more)

    monkeypatch.setattr(numpy_products, "multiply", noted_multiply)
    monkeypatch.setattr(F, "linear", noted_linear)
    for invariant in (False, True):
        kinds.clear(), calls.clear()
        assert 1e6 < numpy_speed(ThreadTeam(1), invariant=invariant) < 1e15
        assert 1e6 < torch_speed(torch.float32, invariant=invariant) < 1e15
        assert set(kinds) == {invariant} and set(calls) <= ({1} if invariant else {cpu_speed.FEW, cpu_speed.TOKENS})


@pytest.mark.parametrize(("token_s", "calls"), [(0.001, [4, 128, 128, 128, 128]), (10.0, [4])])
def test_the_speed_of_a_very_slow_machine_is_that_of_a_few_tokens(token_s: float, calls: list[int]) -> None:
    clock, asked = [0.0], list[int]()

    def multiply(tokens: int) -> None:
        asked.append(tokens)
        clock[0] += token_s * tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("blinkpy.models.cpu.step_progress.time.perf_counter", lambda: clock[0])
        found = cpu_speed.measured_speed(multiply)
    assert found == pytest.approx(cpu_speed.INPUTS * cpu_speed.OUTPUTS / token_s) and asked == calls
