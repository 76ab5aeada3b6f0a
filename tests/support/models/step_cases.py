"""Steps of the GPU's decoder against the CPU engine's step, for any device: small and interpreted, or on a GPU."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support.models import fp8_reference, kernel_reference, model_zoo
from support.models.paged_batch import PagedBatches, Sequence
from support.models.random_grammars import no_grammars
from support.models.ring_storm import ring_storm

from blinkpy.device.tables import map_arrays
from blinkpy.kernels.all_reduce import Peers
from blinkpy.kernels.linear.linear_table import LinearTable, quantises
from blinkpy.kernels.linear.linear_variants import LinearConfig, LinearShape
from blinkpy.kernels.moe.expert_variants import ExpertTable
from blinkpy.kernels.quantised_matrices import Fp8Matrix
from blinkpy.kv.limits import step_kind
from blinkpy.kv.state import DRAFT, ROWS, TOKENS, Batch, Requests
from blinkpy.models.cpu.cpu_step import CpuStep
from blinkpy.models.cpu.cpu_step import measure_cache as measure_on_cpu
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_model
from blinkpy.models.gpu.gpu_decoder import GpuDecoder
from blinkpy.models.gpu.gpu_step import GpuStep, measure_cache
from blinkpy.models.gpu.step_shapes import StepShape, bucket_shapes, step_shapes
from blinkpy.models.paged_cache import PagedCache, RingSizes, scales_for
from blinkpy.models.weights.checkpoint import as_stored
from blinkpy.models.weights.decoder_weights import LayerWeights, Weights
from blinkpy.models.weights.head_loader import load_head, with_draft_head
from blinkpy.models.weights.weight_loader import load_weights
from blinkpy.queues.submission import WORD_LOGPROBS
from blinkpy.queues.words import LOGPROB_ENTRY, TOP_LOGPROBS

LENGTH, ROWS_AT_MOST, STEP_DRAFTS, DRAFTS_AT_MOST = 128, 8, 3, 5
# The interpreter takes milliseconds for each program. Pages of 8 share the CPU engine's compiled attention with other tests.
TOKENS_AT_MOST, PAGE = (64, 16) if torch.cuda.is_available() else (32, 8)
# Maximum relative error of keys and values, by dtype and whether matrices are FP8. An FP8 number that rounds the other way has an
# error of 6 %, and a GPU's sums of FP8 products have fewer bits than float32.
CACHE_LIMITS = {
    (torch.float32, False): 1e-4, (torch.bfloat16, False): 3e-2, (torch.float32, True): 0.1, (torch.bfloat16, True): 0.15,
}  # fmt: skip
READ = ("page_table", "entry", "tokens", "prompt_length", "snapshot_source", "snapshot_target")  # by a step, of requests


class OnDevice:
    """A GpuStep over tensors on a device, and its batches. slots: number of requests; length: tokens of each; limits: rows and
    tokens of the largest step; drafts: maximum running requests for drafts, or 0."""

    def __init__(
        self, rng: np.random.Generator, model: DecoderDescription, weights: Weights, *, slots: int, length: int = LENGTH,
        limits: tuple[int, int] = (ROWS_AT_MOST, TOKENS_AT_MOST), table: LinearTable | None = None, invariant: bool = False,
        rings: bool = False, fp8_cache: bool = False, drafts: int = 0, peers: Peers | None = None, snapshots: int = 0,
    ):  # fmt: skip
        device, (rows, tokens) = str(weights.device), limits
        self.device, self.pages = device, slots * -(-length // PAGE)
        self.batches = PagedBatches(
            rng, page_size=PAGE, num_pages=self.pages, slots=slots, max_model_len=length, max_tokens=tokens, max_rows=rows
        )
        self.batches.step_drafts = STEP_DRAFTS if model.drafts_tokens else 1
        empty, requests = self.batches.batch([]), self.batches.requests
        self.batch = map_arrays(lambda array: torch.from_numpy(array.copy()).to(device), empty)
        tensors = {name: torch.from_numpy(getattr(requests, name).copy()).to(device) for name in READ}
        self.requests = requests._replace(**tensors)
        self.buckets = bucket_shapes(*limits)
        self.shapes, self.graph_of = step_shapes(self.buckets, whole=invariant or model.drafts_tokens, drafts=drafts)
        sizes = RingSizes.of(model, PAGE, slots, tokens, rows) if rings else None
        table, pdl = table or LinearTable(), device != "cpu"
        self.largest = measure_cache(model, weights, PAGE, table, pdl, invariant=invariant) if fp8_cache else None
        self.scales = None if self.largest is None else scales_for(self.largest)
        places = slots, snapshots, DRAFTS_AT_MOST if drafts else 0
        self.cache = PagedCache(model, self.pages, PAGE, weights.dtype, device, sizes, self.scales, *places)
        head = None if model.draft_head is None else PagedCache(model.draft_head, self.pages, PAGE, weights.dtype, device)
        decoder = GpuDecoder(
            model, weights, self.cache, self.batch, self.requests, self.shapes, length, table, pdl,
            expert_table=ExpertTable.load(torch.cuda.get_device_name()) if pdl else None, invariant=invariant, peers=peers,
            head_cache=head,
        )  # fmt: skip
        self.step = GpuStep(decoder, no_grammars(slots, device))

    def give(self, batch: Batch) -> StepShape:
        """Copy a batch to the device; returns the shape of the graph that runs it."""
        requests = self.batches.requests
        for target, source in zip(self.batch, batch, strict=True):
            target.copy_(torch.from_numpy(source))
        for name in READ:
            getattr(self.requests, name).copy_(torch.from_numpy(getattr(requests, name)))
        counts = batch.counts
        bucket = next(i for i, (t, r) in enumerate(self.buckets) if t >= counts[TOKENS] and r >= counts[ROWS])
        return self.shapes[self.graph_of[bucket, step_kind(counts)]]


def parameters(rng: np.random.Generator, index: int) -> dict[str, float]:
    """Greedy for even requests, sampled with filters and penalties for odd ones, both with and without log probabilities."""
    if index % 2 == 0:
        return {"logprobs": 2} if index % 4 == 0 else {}
    return {
        "logprobs": 20 if index % 4 == 1 else -1,
        "seed": int(rng.integers(-(2**62), 2**62)),
        "temperature": 0.9,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.02,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
    }


class ChosenTable(LinearTable):
    """Configurations from a function of outputs and rows; the default if it returns None."""

    def __init__(self, choose: Callable[[int, int], LinearConfig | None]):
        super().__init__()
        self._choose = choose

    def config(self, shape: LinearShape) -> LinearConfig:
        return self._choose(shape.n, shape.rows) or super().config(shape)


class PackedTable(LinearTable):
    """Split sums for every 4-bit product."""

    def config(self, shape: LinearShape) -> LinearConfig:
        if not shape.packed:
            return super().config(shape)
        return LinearConfig("packed", block_m=16, block_n=32, block_k=64 if shape.fp4 else 32, split_k=2, stages=3)


HIDDEN = model_zoo.BASE["hidden_size"]
# Sums in two parts, which the residual stream's norms then add if possible. For one row, only sums that end in that stream: a
# matrix-vector product with a fused norm reads it.
SUMS = LinearConfig(block_m=16, block_n=32, block_k=32, split_k=2)
SPLIT_TABLE = ChosenTable(lambda n, rows: None if rows == 1 and n != HIDDEN else SUMS)
# 4-bit products whose sums have two parts, which norms of the residual stream add if possible.
PACKED_TABLE = PackedTable()
# Every product by cuBLAS (on the CPU, by torch): norms and SwiGLU are their own kernels then, with scratch between.
CUBLAS_TABLE = ChosenTable(lambda n, rows: LinearConfig("cublas"))
# Every product by the kernel for many rows; products that end in the residual stream have two parts. bfloat16.
WIDE = {parts: LinearConfig("tma", block_m=16, block_n=48, block_k=32, split_k=parts, stages=3) for parts in (1, 2)}
TMA_TABLE = ChosenTable(lambda n, rows: WIDE[2 if n == HIDDEN else 1])


def step_case(
    rng: np.random.Generator, device: str, name: str, folder: Path, dtype: torch.dtype, *, steps: int, sampled: bool = True,
    graphs: bool = False, table: LinearTable | None = None, rows: int = ROWS_AT_MOST, invariant: bool = False,
    quantise: Callable[[Weights], Weights] | None = None, fp8_cache: bool = False, save: Callable[[Path], object] | None = None,
    drafts: bool = False, draft_layer: bool = False, prompts: tuple[int, ...] = (1, 40, 17, 23, 5),
    head: Callable[[Path], Path] | None = None, draft_requests: int = 0, chunk: int = 13,
) -> float:  # fmt: skip
    """Serve a few requests with both engines, step by step: the same tokens in float32. Returns the largest error of the logits.

    In bfloat16, and with FP8, the next step uses the CPU's tokens, even if the other engine's differ. graphs: run captured
    graphs. rows: maximum rows of a step. quantise: makes matrices FP8, or packs them. save: writes the model, instead of the
    named model. drafts: in steps without chunks, half of the requests get drafts in the spare rows, most of them wrong. Without a
    draft layer, half of the drafts nevertheless count as correct. draft_layer: run the model's draft layer, which returns drafts;
    in float32 they must be equal. prompts: their tokens; one prompt begins in each step except the second. head: writes a draft
    head next to the model, and returns its folder. draft_requests: larger batches of decode rows return no drafts. chunk: maximum
    tokens of a prompt in a step.
    """
    exact = dtype == torch.float32 and quantise is None and not fp8_cache
    on = on_device(
        rng,
        device,
        name,
        folder,
        dtype,
        table,
        rows,
        invariant,
        quantise,
        fp8_cache,
        save,
        draft_requests or rows * drafts,
        draft_layer,
        head,
    )
    model, batches = on.step.decoder.model, on.batches
    weights, returns = load_weights(model, folder, dtype), draft_layer or head is not None
    if quantise is not None:
        weights = quantise(weights)
    if model.draft_head is not None:
        load_head(model.draft_head, folder / "head", weights, None)
    slots = len(batches.requests.page_table)
    of_drafts = {"drafts": DRAFTS_AT_MOST * (drafts or draft_requests > 0), "step_drafts": STEP_DRAFTS * returns}
    cpu = CpuStep(model, weights, on.pages, PAGE, LENGTH, TOKENS_AT_MOST, scales=on.scales, slots=slots, **of_drafts)
    returned, of_states = 0, cpu.cache.states
    states = [tensor for one in of_states.layers if one is not None for tensor in (one.matrices, one.inputs, one.drafted)]
    if on.largest is not None:
        np.testing.assert_allclose(on.largest, measure_on_cpu(model, weights, PAGE), rtol=1e-3 if dtype == torch.float32 else 0.3)
    waiting = []
    for i, n in enumerate(prompts):
        chosen = parameters(rng, i) if sampled and exact else {}
        waiting.append(batches.add(rng.integers(0, model.vocab_size, n).tolist(), **chosen))
    stream = torch.cuda.Stream() if graphs else None
    if stream is not None:
        on.step.capture(stream)
    running: list[Sequence] = []
    worst, drafted, without = 0.0, 0, 0
    for number in range(steps):
        if waiting and len(running) < rows and number != 1:  # in the second step the first request decodes alone
            running.append(waiting.pop(0))
        budget, work = TOKENS_AT_MOST, []
        for sequence in running:
            count = min(len(sequence.tokens) - sequence.computed, chunk, budget)
            budget -= count
            work.append((sequence, count))
        batch = batches.batch(work, draw_drafts(rng, work, rows, model.vocab_size) if drafts else None)
        shape, given = on.give(batch), batch.logprobs.copy()
        drafted += shape.drafted and bool((batch.emits == DRAFT).any())
        buffers = on.step.decoder.buffers
        for buffer in (buffers.last_hidden, buffers.last, buffers.logits):  # nothing of the previous step may be read
            buffer.fill_(float("nan"))
        cpu.decoder.weights = as_computed(on.step.decoder, shape, weights)
        held, before_step = of_states.held.clone(), [state.clone() for state in states]
        cpu.decoder.attention.layers = cpu.decoder.weights.layers
        cpu.run(batch, batches.requests)
        if stream is not None:
            with torch.cuda.stream(stream):
                torch.cuda.current_stream().wait_stream(torch.cuda.default_stream())
                on.step.graphs[on.shapes.index(shape)].graph.replay()
            stream.synchronize()
        else:
            on.step.launch(shape)
        emitting = np.flatnonzero(batch.emits[: int(batch.counts[ROWS])])
        for state, before in zip((of_states.held, *states), (held, *before_step), strict=True):
            state.copy_(before)
        expected = _cpu_logits(cpu, batch, batches.requests, emitting)
        if of_states.drafts and of_states.pool is not None:
            of_states.hold(batch)
        if len(emitting) and not draft_layer:  # its logits replace the model's
            worst = max(worst, kernel_reference.relative_error(on.step.decoder.buffers.logits[emitting.tolist()], expected))
        if exact:
            found = on.batch.sampled.cpu().numpy()
            assert found[emitting].tolist() == batch.sampled[emitting].tolist(), f"{name}, step of {shape.name}"
            made = batch.drafted[: int(batch.counts[ROWS])]
            if not shape.returns_drafts:
                made = np.full_like(made, -1)
                without += 1
            assert on.batch.drafted.cpu().numpy()[: len(made)].tolist() == made.tolist(), f"{name}, drafts of {shape.name}"
            returned += int((made >= 0).sum())
            _check_records(expected, batch, given, batches.requests, batch.logprobs, emitting)
            _check_records(expected, batch, given, batches.requests, on.batch.logprobs.cpu().numpy(), emitting)
        if drafts and not draft_layer:
            accept_drafts(rng, batch)
        batches.commit(batch)
    # In bfloat16 rounding may choose another expert if two are nearly equal.
    if exact or not any(model.expert_layers):
        limit = (0.15 if dtype == torch.bfloat16 else 3e-2) if fp8_cache else CACHE_LIMITS[dtype, quantise is not None]
        _compare_caches(cpu.cache, on.cache, running, limit)
        if cpu.head is not None and on.step.decoder.head is not None:
            _compare_caches(cpu.head.attention.cache, on.step.decoder.head.own.cache, running, limit)
        taken = [sequence.slot for sequence in running]
        for ours, theirs in zip(on.cache.states.layers, of_states.layers, strict=True):
            if ours is not None and theirs is not None:  # drafts depend on inputs of earlier steps, too
                for mine, other in ((ours.matrices, theirs.matrices), (ours.inputs, theirs.inputs)):
                    assert kernel_reference.relative_error(mine[taken].cpu(), other[taken]) < limit
        if of_states.drafts and of_states.pool is not None:
            assert on.cache.states.held.tolist() == of_states.held.tolist()
    assert drafted > 0 or not drafts, "no step had drafts"
    assert returned > 0 or not returns or not exact, "no step returned drafts"
    assert without > 0 or not draft_requests, "each step returned drafts"
    return worst


def snapshot_case(
    rng: np.random.Generator, device: str, name: str, folder: Path, dtype: torch.dtype, *, graphs: bool = False
) -> float:
    """A request whose first step starts from another request's snapshot, and the same tokens without a snapshot. Returns the
    largest difference of their logits. Both steps have other rows, too.
    """
    model_zoo.save_model(name, folder, int(rng.integers(2**31)))
    model = as_stored(describe_model(folder), folder)
    on = OnDevice(rng, model, load_weights(model, folder, dtype, device), slots=6, snapshots=3)
    batches, stream = on.batches, torch.cuda.Stream() if graphs else None
    states = on.cache.states
    assert states.pool is not None and states.kept is not None
    for tensor in (*states.pool, *states.kept):
        tensor.fill_(float("nan"))
    if stream is not None:
        on.step.capture(stream)

    def run(*work: tuple[Sequence, int]) -> torch.Tensor:
        batch = batches.batch(list(work))
        shape = on.give(batch)
        if stream is None:
            on.step.launch(shape)
        else:
            with torch.cuda.stream(stream):
                on.step.graphs[on.shapes.index(shape)].graph.replay()
            stream.synchronize()
        batch.sampled[:] = on.batch.sampled.cpu().numpy()
        batches.commit(batch)
        batches.requests.snapshot_source[:] = batches.requests.snapshot_target[:] = -1
        return on.step.decoder.buffers.logits[: len(work)].clone()

    def drawn(count: int) -> list[int]:
        found: list[int] = rng.integers(0, model.vocab_size, count).tolist()
        return found

    stem, rest = drawn(PAGE), drawn(9)
    first, other = batches.add(stem + drawn(7)), batches.add(drawn(5))
    batches.requests.snapshot_target[first.slot] = 1
    run((first, PAGE), (other, 5))
    run((other, 1), (first, 7))
    second = batches.add(stem + rest, share=first, share_pages=1)
    whole = batches.add(stem + rest)
    run((whole, PAGE), (first, 1))
    batches.requests.snapshot_source[second.slot] = 1
    logits = run((second, 9), (whole, 9))
    return kernel_reference.relative_error(logits[0], logits[1])


def draw_drafts(rng: np.random.Generator, work: list[tuple[Sequence, int]], rows: int, vocabulary: int) -> dict[int, list[int]]:
    """Random drafts by slot; none in a step with chunks."""
    drafts, left = dict[int, list[int]](), rows - len(work)
    for sequence, _ in work if all(one.decodes(count) for one, count in work) else []:
        most = min(left, LENGTH - len(sequence.tokens) - 1, DRAFTS_AT_MOST)
        if most > 0 and (rng.integers(2) or not drafts):
            drafts[sequence.slot] = rng.integers(0, vocabulary, int(rng.integers(1, most + 1))).tolist()
            left -= len(drafts[sequence.slot])
    return drafts


def accept_drafts(rng: np.random.Generator, batch: Batch) -> None:
    """Make half of a computed batch's drafts equal the tokens sampled before them."""
    for row in np.flatnonzero(batch.emits[: int(batch.counts[ROWS])] == DRAFT).tolist():
        if rng.integers(2):
            batch.sampled[row - 1] = batch.token_ids[batch.query_starts[row]]


def as_computed(decoder: GpuDecoder, shape: StepShape, weights: Weights) -> Weights:
    """The weights with which the CPU computes the same as the decoder. Products of few rows do not quantise their inputs, so they
    equal products with the matrix in full precision."""

    def layer(index: int, of: LayerWeights) -> LayerWeights:
        rows = shape.rows if shape.last_tokens_only and index == len(weights.layers) - 1 else shape.tokens
        found = {}
        for name in fp8_reference.MATRICES:
            matrix = getattr(of, name)
            if not isinstance(matrix, Fp8Matrix):
                continue
            if matrix.values.dim() == 3:
                quantised = decoder.experts is None or decoder.experts.plans[rows].variant != "gemv"
            else:
                sizes = (matrix, shape.tokens if name in ("qkv", "q_b") else rows)
                quantised = quantises(decoder._config(*sizes, swiglu="gate_up" in name), matrix)
            if not quantised:
                found[name] = fp8_reference.exact(matrix).to(weights.dtype)
        return replace(of, **found)

    return replace(weights, layers=[layer(*item) for item in enumerate(weights.layers)])


def ring_case(
    rng: np.random.Generator, device: str, name: str, folder: Path, dtype: torch.dtype, steps: Callable[..., Iterator[Batch]], *,
    tokens: int = TOKENS_AT_MOST, invariant: bool = False, graphs: bool = False, fp8_cache: bool = False,
) -> None:  # fmt: skip
    """Serve the same steps with window rings and with all tokens kept, and compare bits. steps: makes steps from rng,
    PagedBatches and the maximum tokens. graphs: run captured graphs."""
    model_zoo.save_model(name, folder, int(rng.integers(2**31)), dtype=dtype)
    model = as_stored(describe_model(folder), folder)
    weights = load_weights(model, folder, dtype, device)
    options: dict[str, Any] = {"slots": 5, "limits": (4, tokens), "invariant": invariant, "fp8_cache": fp8_cache}
    full, ring = OnDevice(rng, model, weights, **options), OnDevice(rng, model, weights, **options, rings=True)
    ring.batches = full.batches
    for on in (full, ring) if graphs else ():
        on.step.capture(torch.cuda.Stream())
    assert full.cache.rings is None and ring.cache.rings is not None
    spilled = 0
    for batch in steps(rng, full.batches, tokens):
        rows, logits = int(batch.counts[ROWS]), []
        for on in (full, ring):
            shape = on.give(batch)
            if graphs:
                on.step.graphs[on.shapes.index(shape)].graph.replay()
            else:
                on.step.decoder.layers(shape)
                on.step.decoder.output(shape)
            logits.append(on.step.decoder.buffers.logits[:rows].float().cpu())
        assert torch.equal(*logits), f"{name}, step of {shape.name}"
        batch.sampled[:rows] = logits[0].argmax(1).numpy()
        assert ring.step.decoder.rings is not None
        places = ring.step.decoder.rings.cache_slots.cpu().numpy()[: int(batch.counts[TOKENS])]
        spilled += bool((places >= ring.cache.rings.layer_pages * PAGE - ring.cache.rings.spill * PAGE).any())
    assert spilled > 1, "too few steps had spill pages"


def few_ring_steps(rng: np.random.Generator, batches: PagedBatches, tokens: int) -> Iterator[Batch]:
    """A long prompt in whole steps, a short prompt next to its end, and tokens after both; few enough for the interpreter."""
    first, second = (batches.add(rng.integers(0, model_zoo.VOCAB, length).tolist()) for length in (3 * tokens + 1, 5))
    whole = [(first, tokens)]
    for work in (whole, whole, whole, [(first, 1), (second, 5)], [(first, 1), (second, 1)]):
        batch = batches.batch(work)
        yield batch
        batches.commit(batch)


def many_ring_steps(rng: np.random.Generator, batches: PagedBatches, tokens: int) -> Iterator[Batch]:
    """Sequences of many times the window, preemptions, and reused slots."""
    return ring_storm(rng, batches, model_zoo.VOCAB, longest=LENGTH - 12, new_tokens=8, rows=4, tokens=tokens)


def on_device(
    rng: np.random.Generator, device: str, name: str, folder: Path, dtype: torch.dtype, table: LinearTable | None = None,
    rows: int = ROWS_AT_MOST, invariant: bool = False, quantise: Callable[[Weights], Weights] | None = None,
    fp8_cache: bool = False, save: Callable[[Path], object] | None = None, drafts: int = 0, draft_layer: bool = False,
    head: Callable[[Path], Path] | None = None,
) -> OnDevice:  # fmt: skip
    """The step of a random model over an empty batch."""
    if save is None:
        model_zoo.save_model(name, folder, int(rng.integers(2**31)), dtype=dtype)
    else:
        save(folder)
    described = describe_model(folder)
    model = as_stored(described.with_draft_layer() if draft_layer else described, folder)
    if head is not None:
        model = with_draft_head(model, head(folder), weights=True)
    weights, limits = load_weights(model, folder, dtype, device), (rows, TOKENS_AT_MOST)
    if model.draft_head is not None:
        load_head(model.draft_head, folder / "head", weights, None)
    weights, slots = weights if quantise is None else quantise(weights), ROWS_AT_MOST + 2
    options: dict[str, Any] = {"table": table, "invariant": invariant, "fp8_cache": fp8_cache, "drafts": drafts}
    return OnDevice(rng, model, weights, slots=slots, limits=limits, **options)


def _cpu_logits(cpu: CpuStep, batch: Batch, requests: Requests, emitting: np.ndarray) -> torch.Tensor:
    """float32 [emitting rows, V]."""
    hidden = cpu.decoder.forward(batch, requests.page_table)  # a second time: it only rewrites the same keys, values and states
    last = torch.from_numpy(batch.query_starts[emitting + 1].astype(np.int64) - 1)
    return cpu.decoder.logits(hidden[last])


def _check_records(
    logits: torch.Tensor, batch: Batch, given: np.ndarray, requests: Requests, records: np.ndarray, emitting: np.ndarray
) -> None:
    """Compare log probabilities of rows whose request needs them, within rounding; other records must be unchanged."""
    asked = np.flatnonzero(requests.entry[batch.row_slots[emitting], WORD_LOGPROBS] >= 0)
    others = np.setdiff1d(np.arange(len(records)), emitting[asked])
    assert (records[others] == given[others]).all(), "log probabilities without a request for them"
    every = torch.log_softmax(logits.double(), -1)
    for index in asked.tolist():
        row = emitting[index]
        pairs = records[row].view(LOGPROB_ENTRY)
        assert pairs["token"][0] == batch.sampled[row]
        assert len(set(pairs["token"][1:].tolist())) == TOP_LOGPROBS
        own = every[index][pairs["token"].tolist()]
        np.testing.assert_allclose(pairs["logprob"], own, atol=1e-3)
        np.testing.assert_allclose(pairs["logprob"][1:], every[index].topk(TOP_LOGPROBS).values, atol=1e-3)


def _compare_caches(a: PagedCache, b: PagedCache, sequences: list[Sequence], limit: float) -> None:
    """Compare keys and values of all computed tokens."""
    for sequence in sequences:
        pages = sequence.pages[: -(-sequence.computed // PAGE)]
        for mine, other in ((a.keys, b.keys), (a.values, b.values)):
            for x, y in zip(mine, other, strict=True):
                if len(x) == 0:  # a layer with a state
                    continue
                first, second = (
                    t.float()[pages].transpose(1, 2).reshape(-1, t.shape[1] * t.shape[3])[: sequence.computed] for t in (x, y)
                )
                error = kernel_reference.relative_error(second, first)
                assert error < limit, f"cache differs by {error:.2e}"
