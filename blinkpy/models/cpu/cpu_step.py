"""One engine step on the CPU: forward pass, grammars, token rules, penalties, sampling, log probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from blinkpy.kv import state as S
from blinkpy.kv.grammars import most_distance, position_at
from blinkpy.kv.state import Batch, Grammars, Requests
from blinkpy.models.cpu.cpu_sampler import (
    apply_rules,
    logprob_records,
    mask_illegal,
    mask_stop_ids,
    penalize,
    read_parameters,
    sample_rows,
    warm_up,
    warm_up_rules,
)
from blinkpy.models.cpu.draft_chain import DraftChain
from blinkpy.models.cpu.numpy_decoder import NumpyDecoder
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.paged_cache import ArrayCache, RingSizes, Scales, calibration_batch, calibration_tokens
from blinkpy.models.weights.array_weights import ArrayWeights
from blinkpy.queues.submission import SQ_ENTRY, SUBMIT_SCORE_PROMPT

if TYPE_CHECKING:
    from blinkpy.models.cpu.draft_head import DraftHead
    from blinkpy.models.weights.decoder_weights import Weights


class CpuStep:
    """A model with its KV cache, ready to run batches, by NumPy or torch according to its weights.

        num_pages, page_size: size of the KV cache.
    max_model_len: largest context, tokens.
    max_tokens: largest batch, tokens.
    grammars: grammars of the scheduler's state; None: requests have no grammars.
    progress: NumpyProgress or TorchProgress, which advances during the work.
    rings: window rings of the layers that have them, or None.
    scales: scales of an FP8 KV cache.
    slots: number of request slots with a recurrent state.
    snapshots: number of snapshots of recurrent states.
    drafts: maximum drafts of a request in a batch; 0: no row is a draft.
    step_drafts: drafts per row from a draft layer or head; 0 without either.
    """

    def __init__(
        self,
        model: DecoderDescription,
        weights: ArrayWeights | Weights,
        num_pages: int,
        page_size: int,
        max_model_len: int,
        max_tokens: int,
        grammars: Grammars | None = None,
        progress: Any = None,
        rings: RingSizes | None = None,
        scales: Scales | None = None,
        slots: int = 1,
        snapshots: int = 0,
        drafts: int = 0,
        step_drafts: int = 0,
    ):
        self.cache: Any
        self._snapshots, self._rolls_back = snapshots, model.recurrence is not None and drafts > 0
        self.decoder: Any
        if isinstance(weights, ArrayWeights):
            self.cache = ArrayCache(model, num_pages, page_size, rings, scales)
            self.decoder = NumpyDecoder(model, weights, self.cache, max_model_len, max_tokens, progress)
        else:
            from blinkpy.models.cpu.torch_decoder import TorchDecoder
            from blinkpy.models.paged_cache import PagedCache

            sizes: dict[str, Any] = {"slots": slots, "snapshots": snapshots, "drafts": drafts}
            self.cache = PagedCache(model, num_pages, page_size, weights.dtype, rings=rings, scales=scales, **sizes)
            self.decoder = TorchDecoder(model, weights, self.cache, max_model_len, max_tokens, progress)
        self.head: DraftHead | None = None
        if model.draft_head is not None:
            self.head = self._draft_head(model.draft_head, weights, max_model_len, max_tokens, progress)
        drafter = self.head or (self.decoder if model.drafting else None)
        self._chain = None if drafter is None else DraftChain(drafter, max_model_len, page_size, step_drafts)
        self._grammars, self._layers = grammars, model.own_layers
        self._stream: Any = None  # residual stream of a cut step after its last completed layer group
        self._taken: Any = None  # residual streams of a cut step, for the draft head
        warm_up()
        if grammars is not None:
            warm_up_rules(grammars)

    def _draft_head(
        self, head: DecoderDescription, weights: Any, max_model_len: int, max_tokens: int, progress: Any
    ) -> DraftHead:
        from blinkpy.models.cpu.draft_head import DraftHead
        from blinkpy.models.paged_cache import PagedCache

        own, tokens = weights.draft_head, weights.head_tokens
        cache = PagedCache(head, self.cache.num_pages, self.cache.page_size, weights.dtype)
        return DraftHead(head, own, tokens, cache, max_model_len, max_tokens, progress)

    def run(self, batch: Batch, requests: Requests) -> None:
        """Compute a batch and write batch.sampled.

        batch, requests: the scheduler's state (blinkpy.kv.state). It reads these fields of the requests: page_table, tokens,
        length, prompt_length, entry, grammars, rules, and the snapshots to copy.

        Keys and values of every token are written to the cache. For each emitting row, batch.sampled gets the
        new token: the prompt's next token if the prompt is scored, -1 if token rules allow no token.
        batch.logprobs gets the row's record if requested. Other rows are unchanged. A cut step computes one layer group per call
        (Batch.counts), and only the last group yields tokens. Other steps may run between two groups. With a draft layer or head,
        batch.drafted gets the drafts of the batch's rows.
        """
        group, groups = int(batch.counts[S.GROUP]), max(1, int(batch.counts[S.GROUPS]))
        layers = range(self._layers * group // groups, self._layers * (group + 1) // groups)
        stream = self._stream if group else None
        rows = slice(int(batch.counts[S.DECODE_ROWS]), int(batch.counts[S.ROWS]))
        chunks = batch.row_slots[rows]  # only chunks copy states
        if self._snapshots and group == 0:
            before = batch.context_lengths[rows] - np.diff(batch.query_starts[rows.start : rows.stop + 1])
            self.cache.states.load(chunks, requests.snapshot_source[chunks], before)
        wanted = emitting_tokens(batch) if self._chain is None else None  # the draft layer reads all tokens
        head: dict[str, Any] = {}
        if self.head is not None:
            head["taken"] = self._taken if group else {}
        hidden = self.decoder.forward(batch, requests.page_table, wanted, layers, stream, **head)
        if groups > 1:
            self._stream, self._taken = (hidden, head.get("taken")) if group + 1 < groups else (None, None)
        if group + 1 < groups:
            return
        if self._rolls_back:
            self.cache.states.hold(batch)
        if self._snapshots:
            self.cache.states.save(chunks, requests.snapshot_target[chunks])
        emitting = hidden if self._chain is None else hidden[emitting_tokens(batch)]
        if len(emitting):
            self._sample(batch, requests, np.asarray(self.decoder.logits(emitting)))
        if self._chain is not None:
            inputs = self.decoder.normed(hidden) if self.head is None else self.head.fused(head["taken"])
            self._chain.run(batch, requests, inputs)

    def _sample(self, batch: Batch, requests: Requests, logits: NDArray[np.float32]) -> None:
        """Write the tokens of the emitting rows, and their log probabilities. logits: [emitting rows, vocab]."""
        rows = np.flatnonzero(batch.emits[: int(batch.counts[S.ROWS])])
        slots, contexts = batch.row_slots[rows], batch.context_lengths[rows]
        entries = requests.entry[slots].view(SQ_ENTRY)[:, 0]
        p, prompts = read_parameters(entries), requests.prompt_length[slots]
        begins = prompts - entries["output_tokens"]  # start of the output, possibly in the prompt after a move
        scored = ((entries["flags"] & SUBMIT_SCORE_PROMPT) != 0) & (contexts < prompts)
        for index in np.flatnonzero((entries["grammar_words"] != 0) & ~scored).tolist():
            assert self._grammars is not None  # otherwise intake refuses grammars
            slot, stop_ids = slots[index], np.ascontiguousarray(entries["stop_ids"][index])
            position, generated = int(position_at(requests, slot, contexts[index])), contexts[index] + 1 - prompts[index]
            most = most_distance(self._grammars, requests, slot, position, generated)
            mask_illegal(logits[index], self._grammars, int(requests.grammar[slot]), position, stop_ids, most)
        asked = np.flatnonzero(entries["logprobs"] >= 0)
        unchanged = logits[asked]  # a copy: penalties work in place
        ruled = np.flatnonzero((entries["rules_words"] != 0) & ~scored)
        for index in ruled.tolist():
            assert self._grammars is not None
            slot, known = slots[index], contexts[index]
            words = self._grammars.words[requests.rules[slot]]
            apply_rules(logits[index], words, requests.tokens[slot, begins[index] : known])
        penalized = (p.repetition_penalty != 1) | (p.presence_penalty != 0) | (p.frequency_penalty != 0)
        for index in np.flatnonzero(penalized).tolist():
            slot, known = slots[index], contexts[index]
            penalize(logits, index, p, requests.tokens[slot, :known], int(begins[index]))
        mask_stop_ids(logits, entries, contexts - prompts)
        sampled = sample_rows(logits, p, contexts)
        sampled[ruled[np.isneginf(logits[ruled].max(axis=1))]] = -1
        sampled[scored] = requests.tokens[slots[scored], contexts[scored]]
        batch.sampled[rows] = sampled
        if len(asked):
            batch.logprobs[rows[asked]] = logprob_records(unchanged, batch.sampled[rows[asked]])


def measure_cache(
    model: DecoderDescription, weights: ArrayWeights | Weights, page_size: int, progress: Any = None
) -> NDArray[np.float32]:
    """The largest key and value of each head, float32 [layers, 2, kv_heads], for blinkpy.models.paged_cache."""
    batch, tokens = calibration_batch(model), calibration_tokens(model)
    pages = -(-tokens // page_size)
    step = CpuStep(model, weights, pages, page_size, tokens, tokens, progress=progress)
    table, none = np.arange(pages, dtype=np.int32)[None], np.zeros(0, np.int64)
    hidden = step.decoder.forward(batch, table, None if model.drafting else none)
    if model.drafting:
        step.decoder.draft(batch, table, np.roll(batch.token_ids, -1), step.decoder.normed(hidden), none)
    largest: NDArray[np.float32] = step.cache.largest()
    return largest


def emitting_tokens(batch: Batch) -> NDArray[np.int64]:
    """Index of the last token of each row that produces a token in this step, int64 [emitting rows]."""
    rows = int(batch.counts[S.ROWS])
    return batch.query_starts[1 : rows + 1][batch.emits[:rows] != 0].astype(np.int64) - 1
