"""Logits of given sequences on any device: by the GPU's step, regardless of its samples, and by transformers with the same
weights."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from support.models.model_zoo import text_model
from support.models.paged_batch import Sequence
from support.models.step_cases import OnDevice

from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.gpu.step_shapes import StepShape
from blinkpy.models.weights.decoder_weights import Weights
from blinkpy.models.weights.parts.weight_parts import layer_parts


class ForcedSteps(OnDevice):
    """A model's step on a device, run on given tokens. ran: shapes of its steps."""

    def __init__(self, rng: np.random.Generator, model: DecoderDescription, weights: Weights, **options: Any):
        super().__init__(rng, model, weights, **options)
        self.ran: list[StepShape] = []
        self._graphs: dict[StepShape, torch.cuda.CUDAGraph] = {}

    def logits(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Compute the next tokens of each sequence. Returns the logits after the last token, float32 [len(work), vocab]."""
        batch = self.batches.batch(work)
        self._run(self.give(batch))
        rows = {id(sequence): row for row, sequence in enumerate(self.batches.rows)}
        for sequence, count in work:
            sequence.computed += count
        return self.step.decoder.buffers.logits[[rows[id(sequence)] for sequence, _ in work]].clone()

    def _run(self, shape: StepShape) -> None:
        """Launch a shape the first time, which compiles its kernels; later run its graph."""
        if shape not in self.ran or self.device == "cpu":
            self.step.launch(shape)
        else:
            if shape not in self._graphs:
                self._graphs[shape] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(self._graphs[shape]):
                    self.step.launch(shape)
            self._graphs[shape].replay()
        self.ran.append(shape)

    def follow(self, tokens: np.ndarray, prompt: int, group: int) -> torch.Tensor:
        """Compute sequences, int [S, L], `group` at a time: their first `prompt` tokens as a prompt, the rest one by one.

        Returns the logits from the prompt's last token on, float32 [S, L - prompt + 1, vocab].
        """
        found = []
        for first in range(0, len(tokens), group):
            some = tokens[first : first + group].tolist()
            sequences = [self.batches.add(row[:prompt]) for row in some]
            steps = [self.logits([(sequence, prompt) for sequence in sequences])]
            for position in range(prompt, tokens.shape[1]):
                for sequence, row in zip(sequences, some, strict=True):
                    sequence.tokens.append(row[position])
                steps.append(self.logits([(sequence, 1) for sequence in sequences]))
            found.append(torch.stack(steps, 1))
            for sequence in sequences:
                drop(self, sequence)
        return torch.cat(found)


def in_one_bucket(forced: ForcedSteps, rng: np.random.Generator, vocab: int) -> None:
    """Assert that prompts and decode rows give the same bits, regardless of other requests in the same bucket.

    Needs 20 slots of 128 tokens, and steps of 8 rows and 64 tokens.
    """

    def some(n: int) -> list[int]:
        return rng.integers(0, vocab, n).tolist()

    begin = forced.batches.add
    prompts, more = [some(int(n)) for n in rng.integers(20, 41, 5)], [some(4) for _ in range(5)]

    def run(crowded: bool) -> tuple[list[torch.Tensor], list[StepShape]]:
        """All logits of the five prompts, and the shapes of their steps; crowded: among other, longer requests, in any order."""
        mine = [begin(prompt) for prompt in prompts]
        others = [begin(some(60)) for _ in range(3)] if crowded else []
        for other in others:
            forced.logits([(other, 60)])
        found, before = [], len(forced.ran)
        for sequence in mine:
            beside = [(begin(some(20)), 20)] if crowded else []
            found.append(forced.logits([(sequence, len(sequence.tokens)), *beside])[0])
        for index in range(4):
            for sequence, tokens in zip(mine, more, strict=True):
                sequence.tokens.append(tokens[index])
            for other in others:
                other.tokens += some(1)
            work = [(sequence, 1) for sequence in [*mine, *others]]
            order = rng.permutation(len(work))
            logits = forced.logits([work[i] for i in order])
            found += [logits[int(np.flatnonzero(order == i)[0])] for i in range(len(mine))]
        for sequence in mine:  # one more time, next to a prompt
            sequence.tokens.append(sequence.tokens[0])
        chunk = int(rng.integers(30, 50)) if crowded else 30
        found += list(forced.logits([*((sequence, 1) for sequence in mine), (begin(some(chunk)), chunk)])[: len(mine)])
        return found, forced.ran[before:]

    (alone, shapes), (crowded, same_shapes) = run(False), run(True)
    assert shapes == same_shapes
    assert {(shape.tokens, shape.mixed) for shape in shapes} == {(8, False), (64, True)}
    different = [i for i, (x, y) in enumerate(zip(alone, crowded, strict=True)) if not torch.equal(x, y)]
    assert not different, f"{len(different)} of {len(alone)} rows depend on their neighbours, the first is {different[0]}"


def in_all_batches(forced: Any, rng: np.random.Generator, vocab: int, count: int = 4, length: int = 44) -> int:
    """Assert that a batch-invariant decoder's logits do not depend on the batch, to the last bit. The logits of `count` sequences
    of `length` tokens equal those of each sequence alone, token by token: for all cuts of its prompt, all neighbours, and
    recomputation. Returns the number of compared logits.

    Needs 6 slots of 128 tokens, and steps of at least 6 rows and 64 tokens.
    """
    texts = rng.integers(0, vocab, (count, length)).tolist()
    alone = []
    for text in texts:
        one = forced.batches.add(text[:1])
        alone.append([forced.logits([(one, 1)])[0]])
        for token in text[1:]:
            one.tokens.append(token)
            alone[-1].append(forced.logits([(one, 1)])[0])
        drop(forced, one)
    sequences = [forced.batches.add(text[: int(rng.integers(1, length - 3))]) for text in texts]
    compared = 0
    while any(sequence.computed < len(text) for sequence, text in zip(sequences, texts, strict=True)):
        work: list[tuple[Sequence, int]] = []
        for index in rng.permutation(count)[: rng.integers(1, count + 1)].tolist():
            sequence = sequences[index]
            if sequence.computed == len(sequence.tokens) == len(texts[index]):
                continue
            if sequence.computed == len(sequence.tokens):
                sequence.tokens.append(texts[index][sequence.computed])
            elif 2 * sequence.computed > length and rng.random() < 0.1:
                forced.batches.preempt(sequence)
            work.append((sequence, int(rng.integers(1, min(14, len(sequence.tokens) - sequence.computed) + 1))))
        if not work:
            continue
        beside = forced.batches.add(rng.integers(0, vocab, 9).tolist()) if rng.random() < 0.3 else None
        logits = forced.logits([*work, *([] if beside is None else [(beside, 9)])])
        if beside is not None:
            drop(forced, beside)
        for found, (sequence, _) in zip(logits, work, strict=False):
            if sequence.computed == len(sequence.tokens):
                expected = alone[sequences.index(sequence)][sequence.computed - 1]
                assert torch.equal(found, expected), f"logits behind token {sequence.computed} depend on the batch"
                compared += 1
    for sequence in sequences:
        drop(forced, sequence)
    return compared


def drop(forced: Any, sequence: Sequence) -> None:
    """Free a sequence's pages and slot."""
    forced.batches.preempt(sequence)
    forced.batches.free_slots.append(sequence.slot)


def transformers_view(model: DecoderDescription, weights: Weights, config: Any) -> transformers.PreTrainedModel:
    """The transformers model over our weights: its parameters are views, so it needs no memory."""
    config._experts_implementation = "eager"
    with torch.device("meta"):
        reference = transformers.AutoModelForCausalLM.from_config(config, dtype=weights.dtype)
    state = {"model.embed_tokens.weight": weights.embedding, "model.norm.weight": weights.final_norm}
    state["lm_head.weight"] = weights.lm_head
    for index, layer in enumerate(weights.layers):
        for part in layer_parts(model, index):
            tensor = getattr(layer, part.field)
            if model.expert_layers[index] and part.field in ("gate_up", "down"):
                state[f"model.layers.{index}.mlp.experts.{part.field}_proj"] = tensor
                continue
            for name, shape, _, row in part.sources:
                state[name] = tensor[row : row + shape[0]]
    reference.load_state_dict(state, assign=True)
    # Its buffers do not belong to the state.
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config).to(weights.device)
    return reference.eval()


@contextlib.contextmanager
def widened(model: transformers.PreTrainedModel) -> Iterator[None]:
    """Within the block the model computes in float32: each part's weights are widened only while the part runs."""
    handles = []

    def widen(module: torch.nn.Module, arguments: Any) -> None:
        for parameter in module.parameters():
            narrow[parameter] = parameter.data
            parameter.data = parameter.data.float()

    def restore(module: torch.nn.Module, arguments: Any, result: Any) -> None:
        for parameter in module.parameters():
            parameter.data = narrow.pop(parameter)

    narrow: dict[torch.nn.Parameter, torch.Tensor] = {}
    for part in (model.model.embed_tokens, *model.model.layers, model.model.norm, model.lm_head):
        handles += [part.register_forward_pre_hook(widen), part.register_forward_hook(restore)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.inference_mode()
def logits_of(model: transformers.PreTrainedModel, tokens: np.ndarray, prompt: int, batch: int = 16) -> torch.Tensor:
    """The result of ForcedSteps.follow, by transformers: whole sequences, `batch` of them at a time."""
    ids, text = torch.from_numpy(tokens).to(model.device), text_model(model)
    return torch.cat([text(some, use_cache=False).logits[:, prompt - 1 :].float() for some in ids.split(batch)])


def is_greedy(reference: torch.nn.Module, prompt: np.ndarray, tokens: list[int], rounding: float = 1e-3) -> bool:
    """Whether each token is the most probable after the prompt and the previous tokens, or as probable within rounding."""
    ids = torch.tensor([*map(int, prompt), *tokens])
    with torch.inference_mode():
        logits = reference(ids[None, :-1]).logits[0, len(prompt) - 1 :]
    chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return bool((logits.amax(dim=-1) - chosen <= rounding).all())
