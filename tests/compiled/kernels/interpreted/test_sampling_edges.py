"""Edges of the sampling kernels in the interpreter, each compared with a small model: bounds that are just met, and rows of
several blocks of each kind."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.models import triton_interpreter
from support.models.kernel_cases.sampling_cases import sampling_case

from blinkpy.kernels.sampling import candidates, sampler
from blinkpy.kernels.sampling import candidates as rules_kernel
from blinkpy.kernels.sampling.candidates import GrammarView, apply_rules
from blinkpy.kernels.sampling.draw import draw
from blinkpy.kernels.sampling.sampler import SamplingWorkspace, is_before_min_tokens
from blinkpy.queues import submission as E
from blinkpy.queues.token_rules import TokenRules

CAPACITY = 32
LARGEST = 1 - 2.0**-24  # below 1
ROUNDED = 1.0  # LARGEST after a multiplication by a sum that rounding has increased


# ---- draws ---------------------------------------------------------------------------------------------------------------


@triton.jit
def draw_each(
    logits_ptr, uniform_ptr, keys_ptr, out_ptr, vocabulary, maximum, temperature, top_k, top_p, min_p,
    MAX_CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program for each number, all with the same row."""
    at = tl.program_id(0)
    uniform, keys = tl.load(uniform_ptr + at), keys_ptr + at * MAX_CANDIDATES
    token = draw(logits_ptr, vocabulary, maximum, temperature, top_k, top_p, min_p, uniform, keys, MAX_CANDIDATES, BLOCK)
    tl.store(out_ptr + at, token)


def draws(
    logits: np.ndarray, uniforms: list[float], top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, block: int = 64
) -> list[int]:
    """The token of a row at temperature 1 for each number."""
    out, keys = torch.full((len(uniforms),), -7, dtype=torch.int32), torch.zeros(len(uniforms), CAPACITY, dtype=torch.int64)
    row, numbers = torch.from_numpy(logits.astype(np.float32)), torch.tensor(uniforms, dtype=torch.float32)
    highest = float(row.max())
    draw_each[(len(uniforms),)](row, numbers, keys, out, len(row), highest, 1.0, top_k, top_p, min_p, CAPACITY, block)
    return out.tolist()


LN2 = np.float32(np.log(2.0))
assert np.exp(-LN2) == 0.5 and np.exp(-2 * LN2) == 0.25  # so that all sums of weights are exact


def drawn(levels: np.ndarray, uniform: float, top_k: int, top_p: float, min_p: float) -> int:
    """The token that a number draws from tokens with weights 2 ** -level."""
    order = np.lexsort((np.arange(len(levels)), levels))
    order = order[:top_k] if top_k > 0 else order
    weights = 2.0 ** -levels[order]
    before = weights.cumsum() - weights
    kept = weights >= min_p
    if top_p < 1:
        kept &= before < top_p * weights.sum()
    kept[0] = True
    through = weights[kept].cumsum()
    return int(order[kept][min(int((through <= uniform * through[-1]).sum()), len(through) - 1)])


@pytest.mark.parametrize("vocabulary", [20, 90])
@pytest.mark.parametrize("top_k", [0, 6, CAPACITY, 60])
@pytest.mark.parametrize(("top_p", "min_p"), [(1.0, 0.0), (2.0, -1.0), (0.5, 0.0), (0.0, 0.0), (1.0, 0.5), (0.75, 0.25)])
def test_bounds_that_are_just_met(vocabulary: int, top_k: int, top_p: float, min_p: float, rng: np.random.Generator) -> None:
    """Weights of 1, 1/2 and 1/4: numbers and bounds fall on their sums, so that rounding decides nothing.

    With fewer tokens than one sort holds, and with more, also with single weights.
    """
    shares = np.eye(3)[rng.integers(3)] if rng.random() < 0.3 else rng.dirichlet([1.0, 1.0, 1.0])
    levels = rng.choice(3, vocabulary, p=shares)
    levels -= levels.min()
    uniforms = [0.0, 0.5, int(rng.integers(1, 64)) / 64, LARGEST, ROUNDED]
    expected = [drawn(levels, uniform, top_k, top_p, min_p) for uniform in uniforms]
    assert draws(-LN2 * levels, uniforms, top_k, top_p, min_p) == expected, levels


@pytest.mark.parametrize("top_p", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("at_level", [(16, 32, 0), (70, 0, 0), (8, 16, 40)])
def test_bounds_that_are_just_met_in_the_whole_row(at_level: tuple[int, ...], top_p: float) -> None:
    """The head has no such candidate, or exactly the share from which the number draws."""
    levels, uniforms = np.repeat(np.arange(3), at_level), [0.25, 0.5, 0.75, ROUNDED]
    assert draws(-LN2 * levels, uniforms, top_p=top_p) == [drawn(levels, uniform, 0, top_p, 0.0) for uniform in uniforms]


def test_a_top_p_that_rounds_to_zero_keeps_the_best_token() -> None:
    """Even if the search begins with empty sections."""
    levels = np.repeat([2, 0], [20, 70])
    assert draws(-LN2 * levels, [0.0, 0.5, LARGEST], top_k=6, top_p=1e-60) == [20] * 3


def test_many_tokens_far_behind_the_best() -> None:
    """Together they have 8e-6 of the best token's weight: a number just below 1 draws from them."""
    logits = np.full(4096, -20.0)
    logits[100] = 0.0
    lowest, highest = draws(logits, [0.0, LARGEST], block=1024)
    assert lowest == 100 != highest and 0 <= highest < 4096


@triton.jit
def sort_some(logits_ptr, keys_ptr, out_ptr, MAX_CANDIDATES: tl.constexpr):
    index = tl.arange(0, MAX_CANDIDATES)
    found = candidates.collect(logits_ptr, 20, 0.0, 1.0, candidates.NO_KEY, candidates.LAST_FINITE, keys_ptr, MAX_CANDIDATES, 16)
    tl.store(out_ptr + index, found)
    tl.debug_barrier()


def test_collected_keys_are_loaded_behind_a_barrier(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    logits, keys, out = -rng.random(20), torch.zeros(CAPACITY, dtype=torch.int64), torch.zeros(CAPACITY, dtype=torch.int64)
    triton_interpreter.store_late(monkeypatch)
    sort_some[(1,)](torch.from_numpy(logits.astype(np.float32)), keys, out, CAPACITY)
    assert (out[:20] & 0xFFFFFFFF).tolist() == np.argsort(-logits.astype(np.float32)).tolist()
    assert set(out[20:].tolist()) == {candidates.PAST_ALL.value}


# ---- before the draw -----------------------------------------------------------------------------------------------------


@triton.jit
def store_whether_before(entry_ptr, prompt_length_ptr, lengths_ptr, out_ptr):
    at = tl.program_id(0)
    before = is_before_min_tokens(entry_ptr + at * 64, prompt_length_ptr, at, tl.load(lengths_ptr + at))
    tl.store(out_ptr + at, before.to(tl.int32))


def test_stop_ids_count_from_min_tokens_on() -> None:
    """`made` output tokens so far; tokens of a scored prompt do not count."""
    cases = [(least, made) for least in range(4) for made in range(-2, 5)]
    entries = E.neutral_entries(len(cases))
    entries["min_tokens"] = [least for least, _ in cases]
    words = torch.from_numpy(entries.view(np.int32).reshape(len(cases), E.SQ_ENTRY_WORDS))
    prompts, out = torch.arange(3, 3 + len(cases), dtype=torch.int32), torch.full((len(cases),), -7, dtype=torch.int32)
    lengths = prompts + torch.tensor([made for _, made in cases], dtype=torch.int32)
    store_whether_before[(len(cases),)](words, prompts, lengths, out)
    assert out.tolist() == [0 < least > made for least, made in cases]


PIECE, IDS, BEYOND = 8, 20, 4  # tokens of a program, all tokens, and space after them


def under_rules(rules: TokenRules, logits: np.ndarray, output: list[int]) -> np.ndarray:
    changed = logits.copy()
    for token, bias in rules.biases.items():
        changed[token] += np.float32(bias)
    if rules.allowed is not None:
        changed[[token for token in range(len(changed)) if token not in rules.allowed]] = -np.inf
    for *before, last in rules.banned:
        if not before or output[-len(before) :] == before:
            changed[last] = -np.inf
    return changed


@pytest.mark.parametrize("block", [16, 4])
def test_token_rules(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Banned sequences of up to fifteen tokens before the last; empty and longer outputs. A sequence in the output begins with
    its first or second token, and does not count if it includes a token of the prompt. Stores wait for barriers."""
    monkeypatch.setattr(rules_kernel, "BIAS_BLOCK", tl.constexpr(block))
    monkeypatch.setattr(rules_kernel, "SEQUENCE_BLOCK", tl.constexpr(block))
    triton_interpreter.store_late(monkeypatch)
    for begin, made in ((0, 0), (0, 3), (2, 1), (3, 15), (1, 18)):
        history = rng.integers(0, 3, begin + made).tolist()
        ends = [history[-n:] for n in (1, 2, made - 1, made, made + 1) if 0 < n <= min(15, len(history))]
        banned = [[*end, int(rng.integers(IDS))] for end in ends] + [[int(token)] for token in rng.choice(IDS, 2, replace=False)]
        banned += [[*rng.integers(0, 3, int(rng.integers(1, 4))).tolist(), int(rng.integers(IDS))] for _ in range(6)]
        biases = {int(token): float(rng.normal()) for token in np.sort(rng.choice(IDS, 9, replace=False))}
        rules = TokenRules(
            IDS, biases, sorted(rng.choice(IDS, 12, replace=False).tolist()) if rng.random() < 0.7 else None, banned
        )
        logits = rng.normal(size=IDS).astype(np.float32)
        for vocabulary in (IDS, IDS - 3):
            out = torch.full((IDS + BEYOND,), 7.0)
            for first in range(0, IDS, PIECE):
                words, tokens = torch.from_numpy(rules.words().copy()), torch.tensor([*history, 0], dtype=torch.int32)
                given = torch.from_numpy(logits)
                apply_rules[(1,)](given, out, first, vocabulary, words, tokens, begin, len(history), TOKENS=PIECE)
            expected = under_rules(rules, logits, history[begin:])[:vocabulary]
            np.testing.assert_array_equal(out[:vocabulary].numpy(), expected, err_msg=f"{rules}, {history} from {begin}")
            assert (out[vocabulary:] == 7.0).all(), "a write beyond the vocabulary"


def test_blocks_that_are_smaller_than_what_a_row_has(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of tokens that grammars check, and of the history."""
    monkeypatch.setattr(sampler, "MASK_BLOCK", 16)
    monkeypatch.setattr(sampler, "HISTORY_BLOCK", tl.constexpr(16))
    workspace = SamplingWorkspace.allocate(12, 90, "cpu", chunk=64, capacity=CAPACITY, block=32)
    sampling_case(rng, "cpu", rows=12, bucket=12, vocabulary=90, spread=1.0, workspace=workspace, history=50)


def test_a_grammar_view_has_each_tensor_in_its_place() -> None:
    def named(*names: str) -> Any:
        return SimpleNamespace(**{name: name for name in names})

    grammars = named("epoch", "digest", "words", "token_place", "token_bytes", "used")
    found = GrammarView.of(grammars, named("grammar", "grammar_state", "rules", "status", "draft_states"))
    assert found._asdict() == {
        "words": "words", "token_place": "token_place", "token_bytes": "token_bytes",
        "slot": "grammar", "state": "grammar_state", "rules": "rules",
        "draft_states": "draft_states",
    }  # fmt: skip
