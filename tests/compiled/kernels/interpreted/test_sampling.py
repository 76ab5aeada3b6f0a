"""Sampling kernels in the interpreter, compared with the CPU sampler; small capacities make every search path run."""

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from support.models import kernel_reference, triton_interpreter
from support.models.kernel_cases.sampling_cases import AT_THE_EDGE, PARAMETERS, PENALTIES, sampling_case
from support.models.random_grammars import GRAMMARS, RULES, RandomGrammars

from blinkpy.kernels import launch
from blinkpy.kernels.launch import BatchView
from blinkpy.kernels.sampling import candidates, record_logprobs, sampler
from blinkpy.kernels.sampling.candidates import THRESHOLDS, apply_rules, section_of
from blinkpy.kernels.sampling.draw import first_distances
from blinkpy.kernels.sampling.record_logprobs import write_logprobs
from blinkpy.kernels.sampling.sampler import VARIANTS, RequestView, SamplingCall, SamplingWorkspace, sample_tokens
from blinkpy.models.cpu.cpu_sampler import read_parameters, sample_rows, uniform
from blinkpy.queues import submission as E
from blinkpy.queues.token_rules import ANY_TOKEN, TokenRules
from blinkpy.queues.words import LOGPROB_ENTRIES, LOGPROB_ENTRY, TOP_LOGPROBS


@triton.jit
def copy_some(in_ptr, out_ptr, loads, stores):
    index = tl.arange(0, 8)
    some = (index < loads) & (tl.load(in_ptr) >= 0)  # of integers in the interpreter
    tl.store(out_ptr + index, tl.load(in_ptr + index + 8 * (loads == 0), mask=some, other=0), mask=index < stores)


@pytest.mark.parametrize(("loads", "stores", "fine"), [(5, 4, True), (0, 4, True), (6, 4, False), (5, 5, False)])
def test_out_of_bounds_reads_are_detected(loads: int, stores: int, fine: bool) -> None:
    given, out = torch.arange(5, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    with nullcontext() if fine else pytest.raises(triton.runtime.errors.InterpreterError, match="outside of all tensors"):
        copy_some[(1,)](given, out, loads, stores)


# Flat: searches in the whole row; peaked: the head suffices.
@pytest.mark.parametrize(("spread", "ties"), [(0.8, True), (0.5, False), (4.0, False)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_sampling(rng: np.random.Generator, spread: float, ties: bool, variant: str) -> None:
    make = {"rows": 5, "bucket": 6, "vocabulary": 300, "spread": spread, "ties": ties, "variant": variant}
    workspace = SamplingWorkspace.allocate(6, 300, "cpu", chunk=128, capacity=32, block=256)
    sampling_case(rng, "cpu", workspace=workspace, **make)


def test_small_vocabulary(rng: np.random.Generator) -> None:
    """Fewer tokens than requested log probabilities, and one chunk."""
    workspace = SamplingWorkspace.allocate(8, 11, "cpu", chunk=16, capacity=32, block=16)
    sampling_case(rng, "cpu", rows=8, bucket=8, vocabulary=11, spread=1.0, workspace=workspace)


def test_a_bitmask_is_no_banned_sequence(rng: np.random.Generator) -> None:
    """The words after the sequences look like a sequence that bans token 5 after any token."""
    allowed = [*range(480), 480, 482]
    rules = TokenRules(512, {}, allowed, [[7, 8]])
    assert rules.words()[-16:].tolist() == [ANY_TOKEN] * 15 + [5]
    logits, none = torch.from_numpy(rng.normal(size=512).astype(np.float32)), torch.zeros(1, dtype=torch.int32)
    out = torch.empty(512)
    apply_rules[(1,)](logits, out, 0, 512, torch.from_numpy(rules.words().copy()), none, 0, 0, TOKENS=512)
    assert torch.isfinite(out).nonzero()[:, 0].tolist() == allowed


def test_programs_with_several_rows(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than programs for log probabilities; some rows request none."""
    monkeypatch.setattr("blinkpy.kernels.sampling.record_logprobs.PROGRAMS", 3)
    workspace = SamplingWorkspace.allocate(11, 40, "cpu", chunk=64, capacity=32, block=64)
    sampling_case(rng, "cpu", rows=10, bucket=11, vocabulary=40, spread=1.0, workspace=workspace)


@triton.jit
def store_first_distances(out_ptr):
    tl.store(out_ptr + tl.arange(0, THRESHOLDS), first_distances())


def test_the_first_pass_cuts_densely_near_the_largest_logit() -> None:
    """Any distances give the same tokens, but these determine the number of passes."""
    out = torch.empty(THRESHOLDS.value)
    store_first_distances[(1,)](out)
    assert out.tolist() == pytest.approx([0.4 * n * n for n in range(1, 8)] + [3.0e38])


@triton.jit
def store_section(short_ptr, counts_ptr, out_ptr):
    index = tl.arange(0, THRESHOLDS)
    tl.store(out_ptr, section_of(tl.load(short_ptr + index) != 0, tl.load(counts_ptr + index)))


def test_a_target_past_all_candidates_is_in_the_section_of_the_last(rng: np.random.Generator) -> None:
    """Only rounding leads to this case."""
    thresholds = THRESHOLDS.value
    for reached in range(thresholds + 1):
        counts = np.sort(rng.integers(0, 4, thresholds).astype(np.int32))
        short, out = np.arange(thresholds) < reached, torch.zeros(1, dtype=torch.int32)
        store_section[(1,)](torch.from_numpy(short.astype(np.int32)), torch.from_numpy(counts), out)
        assert out.item() == min(reached, counts.tolist().index(counts[-1])), (short, counts)


# Flat distributions, of which a filter keeps more than one sort can hold, and peaked distributions, of which it keeps a few.
FLAT, PEAKED = {"rows": 4, "vocabulary": 300, "spread": 0.5}, {"rows": 12, "vocabulary": 60, "spread": 2.0}


@pytest.mark.parametrize(
    ("made", "filters"),
    [
        *((FLAT, filters) for filters in ({E.WORD_TOP_K: 120}, {E.WORD_TOP_P: 0.9}, {E.WORD_MIN_P: 0.2}, {})),
        *(
            (PEAKED, filters)
            for filters in ({E.WORD_TOP_K: 1}, {E.WORD_TOP_K: 3}, {E.WORD_TOP_P: 0.6}, {E.WORD_TOP_P: 0.0}, {E.WORD_MIN_P: 0.3})
        ),
    ],
)
def test_filters(rng: np.random.Generator, made: dict[str, Any], filters: dict[int, float]) -> None:
    """Half of the draws are for the last token that a filter keeps."""
    chunk = 512 if made is FLAT else 64
    workspace = SamplingWorkspace.allocate(made["rows"], made["vocabulary"], "cpu", chunk=chunk, capacity=32, block=chunk)
    off = {E.WORD_TOP_K: 0, E.WORD_TOP_P: 1.0, E.WORD_MIN_P: 0.0, E.WORD_TEMPERATURE: 1.7}
    sampling_case(rng, "cpu", bucket=made["rows"], workspace=workspace, fixed=off | filters, **made)


@pytest.mark.parametrize("word", [E.WORD_REPETITION_PENALTY, E.WORD_PRESENCE_PENALTY, E.WORD_FREQUENCY_PENALTY])
def test_penalties(rng: np.random.Generator, word: int) -> None:
    """Greedy with few tokens, so that a wrong penalty of any token shows."""
    workspace = SamplingWorkspace.allocate(30, 20, "cpu", chunk=16, capacity=32, block=16)
    fixed = {name: 1.0 if name == E.WORD_REPETITION_PENALTY else 0.0 for name in PARAMETERS} | {word: 1.4}
    sampling_case(rng, "cpu", rows=30, bucket=30, vocabulary=20, spread=1.0, workspace=workspace, history=60, fixed=fixed)


@pytest.mark.parametrize("least", [1000, AT_THE_EDGE])
@pytest.mark.parametrize("word", [None, E.WORD_FREQUENCY_PENALTY])
def test_stop_ids_before_min_tokens(rng: np.random.Generator, word: int | None, least: int) -> None:
    """Few tokens, many of them stop ids: draws from the wrong logits show, with penalties and without."""
    workspace = SamplingWorkspace.allocate(30, 20, "cpu", chunk=16, capacity=32, block=16)
    fixed = {name: 1.0 if name == E.WORD_REPETITION_PENALTY else 0.0 for name in PENALTIES}
    fixed |= {E.WORD_MIN_TOKENS: least, E.WORD_TEMPERATURE: 1.7} | ({} if word is None else {word: 1.4})
    sampling_case(rng, "cpu", rows=30, bucket=30, vocabulary=20, spread=1.0, workspace=workspace, fixed=fixed)


@triton.jit
def numbers_kernel(seed, positions, out, count: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[i] = the number of positions[i]. positions, out: [count]."""
    places = tl.arange(0, count)
    tl.store(out + places, tl.rand(seed, tl.load(positions + places)))


def test_the_cpu_samplers_numbers_are_tritons(rng: np.random.Generator) -> None:
    positions = rng.integers(0, 2**20, 64, dtype=np.int32)
    for seed in (0, 7, *rng.integers(0, 2**63, 4).tolist()):
        found = torch.empty(64)
        numbers_kernel[(1,)](seed, torch.from_numpy(positions), found, 64)
        assert found.tolist() == [float(uniform(np.int64(seed), position)) for position in positions]


ROWS, VOCABULARY = 3, 40


def small_call(rng: np.random.Generator, constrained: bool = False, **entry: float) -> SamplingCall:
    """A call with random logits, whose rows all emit and need log probabilities. constrained: rows have grammars, if enough
    tokens remain. entry: fields of the submission entries."""
    entries = E.neutral_entries(ROWS)
    for name, value in {"logprobs": 0, **entry}.items():
        entries[name] = value
    words, grammars = entries.view(np.int32).reshape(ROWS, -1), RandomGrammars(rng, ROWS, VOCABULARY)
    grammars.choose(rng, rng.integers(0, GRAMMARS, ROWS) if constrained else np.full(ROWS, -1))
    grammars.ruled[:] = GRAMMARS + rng.integers(0, RULES, ROWS) if constrained else -1
    grammars.constrain(words)
    ids, counts = torch.arange(ROWS, dtype=torch.int32), torch.zeros(8, dtype=torch.int64)
    counts[0] = ROWS
    other = torch.zeros_like(ids)
    batch = BatchView(counts, ids, other, torch.full_like(ids, 5), torch.ones_like(ids), other, other)
    tokens = torch.zeros(ROWS, 9, dtype=torch.int32)
    requests = RequestView(torch.from_numpy(words), tokens, torch.full_like(ids, 2))
    workspace = SamplingWorkspace.allocate(ROWS, VOCABULARY, "cpu", chunk=16, capacity=32, block=16)
    records = torch.zeros(ROWS, LOGPROB_ENTRIES, dtype=torch.int64)
    sampled, logits = torch.full_like(ids, -7), torch.randn(ROWS, VOCABULARY)
    return SamplingCall(logits, requests, grammars.view(rng, "cpu"), batch, sampled, records, workspace)


# The tensors of a call, by the names in messages.
BOTH = {"logits": "logits", "row_slots": "batch.row_slots", "emits": "batch.emits", "counts": "batch.counts"}
BOTH |= {"sampled": "sampled", "entry": "requests.entry"}
SAMPLE = {"context_lengths": "batch.context_lengths", "tokens": "requests.tokens", "prompt_length": "requests.prompt_length"}
SAMPLE |= {
    "adjusted": "workspace.adjusted",
    "grammar": "grammars.slot",
    "grammar_state": "grammars.state",
    "rules": "grammars.rules",
    "draft_states": "grammars.draft_states",
}
SAMPLE |= {"grammar words": "grammars.words", "token_place": "grammars.token_place", "token_bytes": "grammars.token_bytes"}
LOGPROBS = {"records": "records", "keys": "workspace.keys"}
ANY_ROWS = {"logits", "entry", "grammar words", "token_place", "token_bytes"}  # other shapes follow from theirs, or no shape does


def replaced(owner: Any, place: str, value: Any) -> Any:
    name, _, rest = place.partition(".")
    changed = {name: replaced(getattr(owner, name), rest, value) if rest else value}
    return owner._replace(**changed) if hasattr(owner, "_replace") else dataclasses.replace(owner, **changed)


@pytest.mark.parametrize(
    ("function", "name", "place"),
    [
        *((function, *named) for function in (sample_tokens, write_logprobs) for named in BOTH.items()),
        *((sample_tokens, *named) for named in SAMPLE.items()),
        *((write_logprobs, *named) for named in LOGPROBS.items()),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    rng: np.random.Generator, function: Callable[[SamplingCall], None], name: str, place: str
) -> None:
    """Each tensor with another dtype, and, if other tensors determine its shape, with a row or column too few."""
    call = small_call(rng)
    function(call)
    tensor: Any = functools.reduce(getattr, place.split("."), call)
    narrow = {"entry": -1, "adjusted": -1, "records": -1, "token_place": -1}
    cut = [tensor[:-1]] if name not in ANY_ROWS else []
    cut += [tensor[:, : narrow[name]].contiguous()] if name in narrow else []
    for wrong, error in [(tensor.double(), TypeError), *((short, ValueError) for short in cut)]:
        with pytest.raises(error, match=f"^{name}: "):
            function(replaced(call, place, wrong))


def test_a_workspace_too_narrow_for_log_probabilities_is_refused_where_it_is_made(rng: np.random.Generator) -> None:
    call, most = small_call(rng), LOGPROB_ENTRIES - 1
    with pytest.raises(ValueError, match=f"^workspace of sampling: capacity {most} must be a power of two of at least 32$"):
        replaced(call, "workspace.keys", call.workspace.keys[:, :most].contiguous())


def test_the_variant_that_is_named_is_launched(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """sample_tokens takes the variant from VARIANTS, by default the first, but rejects tensors that do not fit."""
    call, launched = small_call(rng), list[tuple[str, SamplingCall]]()
    variants = {
        name: SimpleNamespace(launch=lambda call, name=name: launched.append((name, call))) for name in ("first", "other")
    }
    monkeypatch.setattr("blinkpy.kernels.sampling.sampler.VARIANTS", variants)
    for variant in ("", "other", "first"):
        sample_tokens(call, variant)
    assert launched == [("first", call), ("other", call), ("first", call)]
    for place in ("requests.tokens", "requests.prompt_length"):  # one slot for each entry
        tensor: Any = functools.reduce(getattr, place.split("."), call)
        with pytest.raises(ValueError, match=f"^{place.partition('.')[2]}: "):
            sample_tokens(replaced(call, place, tensor[1:]))
    assert len(launched) == 3


def test_rows_of_a_wider_tensor_are_read_and_masked_in_place(rng: np.random.Generator) -> None:
    call = small_call(rng, constrained=True, temperature=1.0)
    wide = torch.full((ROWS, 2 * VOCABULARY + 3), 5.0)
    wide[:, :VOCABULARY] = call.logits
    others = {"sampled": call.sampled.clone(), "records": call.records.clone()}
    strided = dataclasses.replace(call, logits=wide[:, :VOCABULARY], **others)
    for each in (call, strided):
        sample_tokens(each)
        write_logprobs(each)
    assert torch.equal(strided.sampled, call.sampled) and torch.equal(strided.records, call.records)
    assert torch.equal(wide[:, :VOCABULARY], call.logits) and (wide[:, VOCABULARY:] == 5.0).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rules_that_leave_no_token_give_none(rng: np.random.Generator, temperature: float) -> None:
    call = small_call(rng, temperature=temperature)
    words = torch.from_numpy(TokenRules(VOCABULARY, {}, [3], [[3]]).words().copy())
    call.grammars.words[GRAMMARS, : len(words)] = words
    call.grammars.rules.fill_(GRAMMARS)
    call.requests.entry[:, E.WORD_RULES_WORDS] = len(words)
    sample_tokens(call)
    assert call.sampled.tolist() == [-1] * ROWS


@pytest.mark.parametrize("rows", [1, ROWS])
def test_kernels_are_launched_with_sizes_that_a_gpu_has(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The interpreter accepts any sizes, but warps and sizes of blocks must be powers of two."""
    launched = dict[str, dict[str, Any]]()
    for module, name in ((sampler, "_adjust"), (sampler, "_sample_tokens"), (record_logprobs, "_write_logprobs")):
        taking = functools.partial(launched.__setitem__, name)

        class Launches:
            def __init__(self, take: Callable[[Any], None]) -> None:
                self.take = take

            def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
                return lambda *tensors, **options: self.take(options)

        monkeypatch.setattr(module, name, Launches(taking))
    call = small_call(rng)
    monkeypatch.setattr(record_logprobs, "PROGRAMS", rows)
    sample_tokens(call)
    write_logprobs(call)
    sizes = {"VOCAB_CHUNK", "MASK_BLOCK", "CHUNKS", "MAX_CANDIDATES", "BLOCK", "EACH", "num_warps"}
    assert sizes == {size for options in launched.values() for size in options} & sizes
    for name, options in launched.items():
        for size, value in options.items():
            assert size not in sizes or value & (value - 1) == 0 < value, (name, size, value)
        assert options["num_warps"] <= 32, name
    assert launched["_write_logprobs"]["EACH"] * rows >= ROWS


def test_log_probabilities_whichever_block_has_the_best(rng: np.random.Generator) -> None:
    """Blocks of 16 tokens: the best token is the first of a row, in the middle, or the last."""
    call = small_call(rng)
    call.logits[torch.arange(ROWS), torch.tensor([0, 20, VOCABULARY - 1])] = 5.0
    call.sampled.copy_(torch.tensor([39, 0, 20]))
    write_logprobs(call)
    records = call.records.numpy().view(LOGPROB_ENTRY)
    for row in range(ROWS):
        every, top = kernel_reference.top_logprobs(call.logits[row].numpy(), TOP_LOGPROBS)
        order = [int(call.sampled[row]), *top.tolist()]
        assert records["token"][row].tolist() == order
        np.testing.assert_allclose(records["logprob"][row], every[order], atol=1e-5)


def test_greedy_takes_the_lowest_of_equal_tokens(rng: np.random.Generator) -> None:
    """All tokens equal; two in different chunks; two in one chunk."""
    call = small_call(rng, temperature=0.0)
    call.logits.zero_()
    call.logits[1, [20, 35]] = call.logits[2, [17, 18]] = 1.0
    sample_tokens(call)
    assert call.sampled.tolist() == [0, 20, 17]


def test_the_first_token_beyond_the_share_is_drawn(rng: np.random.Generator) -> None:
    """Of two equal tokens, with a number that is exactly the first token's share; the CPU sampler draws the same."""
    seed, length = 19_511_990, 5
    assert uniform(seed, length) == 0.5
    call = small_call(rng, temperature=1.0, seed=seed)
    call.logits.fill_(-torch.inf)
    call.logits[:, [3, 20]] = 0.0
    sample_tokens(call)
    entries = E.neutral_entries(1)
    entries["temperature"], entries["seed"] = 1.0, seed
    row = call.logits[:1].numpy().copy()
    assert call.sampled.tolist() == [20] * ROWS
    assert sample_rows(row, read_parameters(entries), np.array([length], np.int32)).tolist() == [20]


@pytest.mark.parametrize("below", [-5.0, -0.01], ids=["in the head", "by a separate pass"])
def test_min_p_of_1_keeps_all_equal_to_the_best(rng: np.random.Generator, below: float) -> None:
    """A weight of exactly min_p is kept, a smaller weight is not."""
    best, found = [3, 20, 21, 35], []
    for seed in range(4):
        call = small_call(rng, temperature=1.0, min_p=1.0, seed=seed)
        call.logits.fill_(below)
        call.logits[:, best] = 0.0
        sample_tokens(call)
        found += call.sampled.tolist()
    assert 1 < len(set(found)) and set(found) <= set(best)


@pytest.mark.parametrize("fields", [{}, {"top_k": 5}, {"top_p": 0.5}, {"min_p": 0.1}])
@pytest.mark.parametrize("peaked", [True, False])
def test_one_pass_is_enough_where_the_head_decides(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, fields: dict[str, float], peaked: bool
) -> None:
    """The head has all except a millionth of the distribution, or nothing: more equal tokens than one sort can hold."""
    passes, measure = list[int](), candidates.measure

    def measuring(*arguments: Any) -> Any:
        passes.append(1)
        return measure(*arguments)

    monkeypatch.setattr(candidates, "measure", measuring)
    call = small_call(rng, temperature=1.0, seed=int(rng.integers(1000)), **fields)
    call.logits[:] = -0.5 * torch.arange(VOCABULARY) if peaked else 0.0
    sample_tokens(call)
    assert (len(passes) == ROWS) == peaked and len(passes) >= ROWS
    assert not call.workspace.adjusted.any()  # logits do not change, so they are not copied


def test_scratch_has_the_shapes_that_it_declares() -> None:
    scratch = SamplingWorkspace.allocate(3, 70, "cpu", chunk=16, capacity=64, block=32)
    shapes = [tuple(getattr(scratch, name).shape) for name in ("adjusted", "chunk_max", "chunk_id", "keys")]
    assert shapes == [(3, 70), (3, 5), (3, 5), (3, 64)] and (scratch.chunk, scratch.block) == (16, 32)


def test_what_threads_store_others_load_behind_barriers(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules whose banned tokens have biases; stores wait for the next barrier, and may have any order."""
    rules = TokenRules(64, dict.fromkeys(range(0, 64, 2), 2.0), range(48), [[1, 4], [5], [2, 8], [1, 50]])
    logits, out = torch.from_numpy(rng.normal(size=64).astype(np.float32)), torch.full((64,), 7.0)
    expected = logits + torch.where(torch.arange(64) % 2 == 0, 2.0, 0.0)
    expected[48:] = expected[[4, 5]] = float("-inf")
    triton_interpreter.store_late(monkeypatch)
    history = torch.tensor([2, 1], dtype=torch.int32)
    apply_rules[(1,)](logits, out, 0, 64, torch.from_numpy(rules.words().copy()), history, 0, 2, TOKENS=64)
    assert torch.equal(out, expected)


def test_biases_are_of_as_many_tokens_as_there_are(rng: np.random.Generator) -> None:
    """The biases follow the ids of biases: a bias of 0.0 must not be read as token 0."""
    rules = TokenRules(64, {3: 0.0, 5: 1.5}, None, [[7]])
    logits, out = torch.from_numpy(rng.normal(size=64).astype(np.float32)), torch.full((64,), 7.0)
    expected = logits.clone()
    expected[5] += 1.5
    expected[7] = float("-inf")
    history = torch.tensor([2, 1], dtype=torch.int32)
    apply_rules[(1,)](logits, out, 0, 64, torch.from_numpy(rules.words().copy()), history, 0, 2, TOKENS=64)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("chunks", [1, 3])
def test_broken_logits_give_a_token(rng: np.random.Generator, chunks: int) -> None:
    """Rows of NaN, of -inf, and with an infinity among NaN have no distribution."""
    call = small_call(rng, temperature=1.0)
    inf = float("inf")
    call.logits[0], call.logits[1], call.logits[2] = float("nan"), -inf, float("nan")
    call.logits[2, 17] = inf
    workspace = SamplingWorkspace.allocate(ROWS, VOCABULARY, "cpu", chunk=64 // chunks & -16, capacity=32, block=16)
    sample_tokens(dataclasses.replace(call, workspace=workspace))
    assert call.sampled.tolist() == [0, 0, 17]


@pytest.mark.parametrize(
    "fields", [{"temperature": 0.0}, {"temperature": 1.0, "frequency_penalty": 0.5}, {"temperature": 0.0, "constrained": True}]
)
def test_kernels_wait_before_they_touch_results(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    """Every program starts its successor once, and waits once.

    Until then, all results of the step's kernels are zero: an early read gets zeros, and an early write is lost.
    """
    call, calls = small_call(rng, **fields), list[str]()
    given = call.logits.clone()
    scratch = (getattr(call.workspace, name) for name in ("adjusted", "chunk_max", "chunk_id", "keys"))
    results = [call.logits, call.sampled, call.records, *scratch]
    sample_tokens(call)
    write_logprobs(call)
    expected, kept = (call.sampled.clone(), call.records.clone()), list[torch.Tensor]()

    def release(pdl: bool) -> None:
        calls.append("release")
        kept[:] = [tensor.clone() for tensor in results]
        for tensor in results:
            tensor.zero_()

    def wait(pdl: bool) -> None:
        calls.append("wait")
        for tensor, its in zip(results, kept, strict=True):
            tensor.copy_(its)

    monkeypatch.setattr(launch, "release_successor", release)
    monkeypatch.setattr(launch, "wait_for_predecessor", wait)
    call.logits.copy_(given)  # without tokens that the grammars do not allow
    for tensor in results[1:]:
        tensor.zero_()
    call = dataclasses.replace(call, pdl=True)
    sample_tokens(call)
    write_logprobs(call)
    assert calls == ["release", "wait"] * (call.workspace.chunk_max.numel() + ROWS + ROWS)
    assert call.sampled.tolist() == expected[0].tolist()
    assert torch.equal(call.records, expected[1])
