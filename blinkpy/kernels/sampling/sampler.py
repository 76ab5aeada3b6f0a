"""Sampling by search: penalties, min_tokens, temperature, top-k, top-p, min-p, a seeded uniform.

Two kernels. The first works on chunks of the vocabulary. It masks tokens that a grammar forbids, applies
token rules and penalties, masks the stop ids before min_tokens, and finds the maximum of each chunk. The
second takes one row per program. A greedy row ends there with the best chunk; other rows collect the head of
the distribution, sort it, filter it and draw. If the head is not enough (a flat distribution without
filters), the boundaries are searched in the whole row (candidates.py).

A row's token depends only on its own logits, history, grammar, rules, seed and position. Order of the
filters: grammar, token rules, repetition, presence and frequency penalty, stop ids, temperature, top_k,
top_p (of the tokens kept by top_k), min_p (relative to the largest probability). If the rules allow no token,
the row's token is -1. A row whose prompt is scored gets the prompt's next token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.config_files import check_power_of_two
from blinkpy.kernels.launch import COUNT_ROWS, AtLeast, BatchView, by_name, check_tensors
from blinkpy.kernels.sampling.candidates import MASK_BLOCK, GrammarView, apply_rules, mask_illegal
from blinkpy.kernels.sampling.draw import draw
from blinkpy.kv import state
from blinkpy.queues import submission
from blinkpy.queues.submission import SQ_ENTRY_WORDS

# The inputs of sampling (logits, requests, scratch memory), and the interface of its variants.


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch of the sampling kernels, for up to `rows` rows."""

    adjusted: torch.Tensor  # float32 [rows, V]
    chunk_max: torch.Tensor  # float32 [rows, chunks]
    chunk_id: torch.Tensor  # int32 [rows, chunks]
    keys: torch.Tensor  # int64 [rows, capacity]
    chunk: int
    block: int

    def __post_init__(self) -> None:
        """Raise ConfigError for sizes that the kernels can't be built from."""
        for name, value, least in (("chunk", self.chunk, 16), ("block", self.block, 16), ("capacity", self.keys.shape[1], 32)):
            check_power_of_two(f"workspace of sampling: {name}", value, least)

    @classmethod
    def allocate(
        cls, rows: int, vocabulary: int, device: str, *, chunk: int = 2048, capacity: int = 1024, block: int = 1024
    ) -> Self:
        """chunk: tokens per program of the first kernel.
        capacity: candidates sorted together, at least 32.
        block: tokens per iteration of the second kernel.

        All are powers of two; tests use small ones.
        """
        chunks = triton.cdiv(vocabulary, chunk)
        return cls(
            torch.zeros(rows, vocabulary, dtype=torch.float32, device=device),
            torch.zeros(rows, chunks, dtype=torch.float32, device=device),
            torch.zeros(rows, chunks, dtype=torch.int32, device=device),
            torch.zeros(rows, capacity, dtype=torch.int64, device=device),
            chunk,
            block,
        )


class RequestView(NamedTuple):
    """The fields of `blinkpy.kv.state.Requests` that sampling reads, by slot."""

    entry: torch.Tensor  # int32 [S, words] submission entries
    tokens: torch.Tensor  # int32 [S, L] prompt and output
    prompt_length: torch.Tensor  # int32 [S]

    @classmethod
    def of(cls, requests: Any) -> Self:
        """The view of a `kv.state.Requests` of tensors."""
        return cls(*(getattr(requests, name) for name in cls._fields))


@dataclass(frozen=True)
class SamplingCall:
    """The next token of each emitting row, from its logits and its request's parameters; other rows stay
    unchanged.
    """

    logits: torch.Tensor  # float32 [B, V], rows of any stride; tokens that a grammar forbids become -inf
    requests: RequestView
    grammars: GrammarView
    batch: BatchView  # context_lengths are the positions of the new tokens
    sampled: torch.Tensor  # int32 [B] result: token ids
    records: torch.Tensor  # int64 [B, LOGPROB_ENTRIES] result of `write_logprobs`
    workspace: SamplingWorkspace
    pdl: bool = False


@dataclass(frozen=True)
class SamplingVariant:
    """One way to sample. A new variant is a file, and an entry in VARIANTS of sampler.py."""

    name: str
    launch: Callable[[SamplingCall], None]
    """Launches the kernels, which write `sampled`. The call is checked."""
    kernels: tuple[Any, ...] = ()
    """The Triton kernels that `launch` starts."""


ENTRY_WORDS = tl.constexpr(submission.SQ_ENTRY_WORDS)
WORD_SEED = tl.constexpr(submission.WORD_SEED)
WORD_TEMPERATURE = tl.constexpr(submission.WORD_TEMPERATURE)
WORD_TOP_P = tl.constexpr(submission.WORD_TOP_P)
WORD_MIN_P = tl.constexpr(submission.WORD_MIN_P)
WORD_TOP_K = tl.constexpr(submission.WORD_TOP_K)
WORD_REPETITION_PENALTY = tl.constexpr(submission.WORD_REPETITION_PENALTY)
WORD_PRESENCE_PENALTY = tl.constexpr(submission.WORD_PRESENCE_PENALTY)
WORD_FREQUENCY_PENALTY = tl.constexpr(submission.WORD_FREQUENCY_PENALTY)
WORD_MIN_TOKENS = tl.constexpr(submission.WORD_MIN_TOKENS)
WORD_OUTPUT_TOKENS = tl.constexpr(submission.WORD_OUTPUT_TOKENS)
WORD_STOP_IDS = tl.constexpr(submission.WORD_STOP_IDS)
STOP_IDS = tl.constexpr(submission.STOP_IDS)
WORD_GRAMMAR_WORDS = tl.constexpr(submission.WORD_GRAMMAR_WORDS)
WORD_RULES_WORDS = tl.constexpr(submission.WORD_RULES_WORDS)
WORD_FLAGS = tl.constexpr(submission.WORD_FLAGS)
SUBMIT_SCORE_PROMPT = tl.constexpr(submission.SUBMIT_SCORE_PROMPT)

HISTORY_BLOCK = tl.constexpr(512)
DRAFT = tl.constexpr(state.DRAFT)


@triton.jit
def float_word(entry_ptr, word):
    """A float32 field of a submission entry."""
    return tl.load(entry_ptr + word).to(tl.float32, bitcast=True)


@triton.jit
def is_emitting(counts_ptr, emits_ptr, row):
    """Whether a row produces a token in this step. Reads only the batch, so it may be called before the
    wait.
    """
    rows = tl.load(counts_ptr + COUNT_ROWS, cache_modifier=".cg")
    return (row < rows) & (tl.load(emits_ptr + row, cache_modifier=".cg") != 0)


@triton.jit
def has_penalty(entry_ptr):
    """Whether a penalty changes logits of this request."""
    changed = float_word(entry_ptr, WORD_REPETITION_PENALTY) != 1.0
    changed = changed | (float_word(entry_ptr, WORD_PRESENCE_PENALTY) != 0.0)
    return changed | (float_word(entry_ptr, WORD_FREQUENCY_PENALTY) != 0.0)


@triton.jit
def scores_prompt(entry_ptr, prompt_length_ptr, slot, length):
    """Whether the next token of a request is a token of its prompt, because the prompt is scored.

    length: tokens before the next one.
    Requests without scores need only one load of a cached line.
    """
    asked = (tl.load(entry_ptr + WORD_FLAGS) & SUBMIT_SCORE_PROMPT) != 0
    return asked & (length < tl.load(prompt_length_ptr + slot, mask=asked, other=0))


@triton.jit
def is_before_min_tokens(entry_ptr, prompt_length_ptr, slot, length):
    """Whether the stop ids of this request are still impossible.

    length: tokens before the new one.
    Requests without min_tokens need only one load of a cached line.
    """
    least = tl.load(entry_ptr + WORD_MIN_TOKENS)
    wanted = least > 0
    return wanted & (length - tl.load(prompt_length_ptr + slot, mask=wanted, other=0) < least)


@triton.jit
def output_begin(entry_ptr, prompt_length_ptr, slot):
    """The position of a request's first output token. It is in the prompt if another engine generated the
    first tokens.
    """
    return tl.load(prompt_length_ptr + slot) - tl.load(entry_ptr + WORD_OUTPUT_TOKENS)


@triton.jit
def _adjust(
    logits_ptr,  # float32 [B, V], rows logits_stride elements apart: tokens that a grammar forbids become -inf
    adjusted_ptr,  # float32 [B, V], rows adjusted_stride apart: written for requests whose logits change
    chunk_max_ptr,  # float32 [B, chunks] largest logit of each chunk
    chunk_id_ptr,  # int32 [B, chunks] its lowest token id
    entry_ptr,  # int32 [S, 64] submission entries
    tokens_ptr,  # int32 [S, L] prompt and generated tokens
    prompt_length_ptr,  # int32 [S]
    row_slots_ptr, emits_ptr,  # int32 [B]
    context_lengths_ptr,  # int32 [B] tokens before the new one
    counts_ptr,  # int64 [8] batch header
    grammar_ptr,  # int32 [S]
    grammar_state_ptr,  # int64 [S]
    rules_ptr,  # int32 [S]
    draft_states_ptr,  # int64 [S, PLACES]
    grammar_words_ptr, grammar_classes_ptr, grammar_cells_ptr,  # int32 [G, W], and the same memory as uint8 and as int16
    token_place_ptr,  # int64 [V]
    token_bytes_ptr,  # int32 [n]
    vocabulary,  # V
    logits_stride, adjusted_stride,
    history_stride,  # L
    grammar_width,  # W
    PLACES: tl.constexpr, VOCAB_CHUNK: tl.constexpr, MASK_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    row = tl.program_id(1)
    launch.release_successor(PDL)
    emitting = is_emitting(counts_ptr, emits_ptr, row)
    slot = tl.load(row_slots_ptr + row, cache_modifier=".cg").to(tl.int64)
    entry = entry_ptr + slot * ENTRY_WORDS
    # The entry of a row was written before the step, like the batch.
    constrained = tl.load(entry + WORD_GRAMMAR_WORDS, mask=emitting, other=0, cache_modifier=".cg") != 0
    ruled = tl.load(entry + WORD_RULES_WORDS, mask=emitting, other=0, cache_modifier=".cg") != 0
    ids = chunk * VOCAB_CHUNK + tl.arange(0, VOCAB_CHUNK)
    inside = ids < vocabulary
    row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
    launch.wait_for_predecessor(PDL)
    # Load the logits before it is known whether grammar or rules change them: most rows use them, and no load waits for entries.
    logit = tl.load(row_ptr + ids, mask=inside & emitting, other=float("-inf"))
    if emitting:
        first_id = chunk * VOCAB_CHUNK
        length = tl.load(context_lengths_ptr + row)
        if constrained:
            if scores_prompt(entry, prompt_length_ptr, slot, length) == 0:
                position = tl.load(grammar_state_ptr + slot)
                if PLACES > 1:
                    drafted = tl.load(emits_ptr + row) == DRAFT
                    drafts_ptr = draft_states_ptr + slot * PLACES + length % PLACES
                    position = tl.where(drafted, tl.load(drafts_ptr, mask=drafted, other=0), position)
                mask_illegal(
                    row_ptr, first_id, vocabulary, entry, length + 1 - tl.load(prompt_length_ptr + slot),
                    tl.load(grammar_ptr + slot), position,
                    grammar_words_ptr, grammar_classes_ptr, grammar_cells_ptr, grammar_width,
                    token_place_ptr, token_bytes_ptr, VOCAB_CHUNK, MASK_BLOCK,
                )  # fmt: skip
        if ruled:
            source, row_ptr = row_ptr, adjusted_ptr + row.to(tl.int64) * adjusted_stride
            apply_rules(
                source, row_ptr, first_id, vocabulary, grammar_words_ptr + tl.load(rules_ptr + slot).to(tl.int64) * grammar_width,
                tokens_ptr + slot * history_stride, output_begin(entry, prompt_length_ptr, slot), length, VOCAB_CHUNK,
            )  # fmt: skip
        if constrained | ruled:
            logit = tl.load(row_ptr + ids, mask=inside, other=float("-inf"))
        logit = tl.where(logit == logit, logit, float("-inf"))
        penalized = has_penalty(entry)
        masked = is_before_min_tokens(entry, prompt_length_ptr, slot, length)
        if penalized:
            begin = output_begin(entry, prompt_length_ptr, slot)
            history = tokens_ptr + slot * history_stride
            seen = tl.zeros([VOCAB_CHUNK], tl.int32)  # times in prompt and output
            generated = tl.zeros([VOCAB_CHUNK], tl.int32)  # times in the output
            for first in range(0, length, HISTORY_BLOCK):
                index = first + tl.arange(0, HISTORY_BLOCK)
                token = tl.load(history + index, mask=index < length, other=-1) - first_id
                here = (token >= 0) & (token < VOCAB_CHUNK) & (index < length)
                token = tl.where(here, token, 0)
                seen += tl.histogram(token, VOCAB_CHUNK, mask=here)
                generated += tl.histogram(token, VOCAB_CHUNK, mask=here & (index >= begin))
            repetition = float_word(entry, WORD_REPETITION_PENALTY)
            repeated = tl.where(logit > 0, logit / repetition, logit * repetition)
            logit = tl.where(seen > 0, repeated, logit)
            logit -= tl.where(generated > 0, float_word(entry, WORD_PRESENCE_PENALTY), 0.0)
            logit -= generated.to(tl.float32) * float_word(entry, WORD_FREQUENCY_PENALTY)
        if masked:
            for i in tl.static_range(STOP_IDS):
                logit = tl.where(ids == tl.load(entry + WORD_STOP_IDS + i), float("-inf"), logit)
        if penalized | masked | ruled:
            tl.store(adjusted_ptr + row.to(tl.int64) * adjusted_stride + ids, logit, mask=inside)
        best, best_index = tl.max(logit, 0, return_indices=True, return_indices_tie_break_left=True)
        at = row.to(tl.int64) * tl.num_programs(0) + chunk
        tl.store(chunk_max_ptr + at, best)
        tl.store(chunk_id_ptr + at, first_id + best_index)


@triton.jit
def _sample_tokens(
    logits_ptr,  # float32 [B, V], rows logits_stride elements apart
    adjusted_ptr,  # float32 [B, V], rows adjusted_stride apart
    chunk_max_ptr,  # float32 [B, chunks]
    chunk_id_ptr,  # int32 [B, chunks]
    keys_ptr,  # int64 [B, MAX_CANDIDATES] scratch
    sampled_ptr,  # int32 [B] output
    entry_ptr,  # int32 [S, 64]
    tokens_ptr,  # int32 [S, L] prompt and generated tokens
    prompt_length_ptr,  # int32 [S]
    row_slots_ptr, emits_ptr,  # int32 [B]
    context_lengths_ptr,  # int32 [B] position of the new token
    counts_ptr,  # int64 [8] batch header
    vocabulary,  # V
    chunks, logits_stride, adjusted_stride,
    history_stride,  # L
    CHUNKS: tl.constexpr,  # power of two >= chunks
    MAX_CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    launch.release_successor(PDL)
    emitting = is_emitting(counts_ptr, emits_ptr, row)
    slot = tl.load(row_slots_ptr + row, cache_modifier=".cg").to(tl.int64)
    launch.wait_for_predecessor(PDL)
    if emitting:
        entry = entry_ptr + slot * ENTRY_WORDS
        chunk = tl.arange(0, CHUNKS)
        at = row.to(tl.int64) * chunks + chunk
        maxima = tl.load(chunk_max_ptr + at, mask=chunk < chunks, other=float("-inf"))
        maximum, best = tl.max(maxima, 0, return_indices=True, return_indices_tie_break_left=True)
        token = tl.load(chunk_id_ptr + row.to(tl.int64) * chunks + best)
        temperature = float_word(entry, WORD_TEMPERATURE)
        position = tl.load(context_lengths_ptr + row)
        ruled = tl.load(entry + WORD_RULES_WORDS) != 0
        token = tl.where(ruled & (maximum == float("-inf")), -1, token)
        if (temperature > 0.0) & (maximum > float("-inf")) & (maximum < float("inf")):
            if has_penalty(entry) | ruled | is_before_min_tokens(entry, prompt_length_ptr, slot, position):
                row_ptr = adjusted_ptr + row.to(tl.int64) * adjusted_stride
            else:
                row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
            seed_low = tl.load(entry + WORD_SEED).to(tl.uint32, bitcast=True).to(tl.uint64)
            seed_high = tl.load(entry + WORD_SEED + 1).to(tl.uint32, bitcast=True).to(tl.uint64)
            top_k, top_p, min_p = tl.load(entry + WORD_TOP_K), float_word(entry, WORD_TOP_P), float_word(entry, WORD_MIN_P)
            uniform = tl.rand((seed_high << 32) | seed_low, position)
            scratch = keys_ptr + row.to(tl.int64) * MAX_CANDIDATES
            token = draw(row_ptr, vocabulary, maximum, temperature, top_k, top_p, min_p, uniform, scratch, MAX_CANDIDATES, BLOCK)
        if scores_prompt(entry, prompt_length_ptr, slot, position):
            token = tl.load(tokens_ptr + slot * history_stride + position)
        tl.store(sampled_ptr + row, token)


def search(call: SamplingCall) -> None:
    """Sample by search. The uniform of a token is Philox4x32-10 of the request's seed at the token's
    position, as in triton.language.rand.
    """
    logits, (entry, tokens, prompt_length), batch, scratch, pdl = call.logits, call.requests, call.batch, call.workspace, call.pdl
    (rows, vocabulary), chunks, g = logits.shape, scratch.chunk_max.shape[1], call.grammars
    automata = (g.slot, g.state, g.rules, g.draft_states, g.words, g.words.view(torch.uint8), g.words.view(torch.int16))
    by_row = (batch.row_slots, batch.emits, batch.context_lengths)
    _adjust[(chunks, rows)](
        logits, scratch.adjusted, scratch.chunk_max, scratch.chunk_id, entry, tokens, prompt_length, *by_row, batch.counts,
        *automata, g.token_place.view(torch.int64), g.token_bytes,
        vocabulary, logits.stride(0), scratch.adjusted.stride(0), tokens.shape[1], g.words.shape[1],
        PLACES=g.draft_states.shape[1], VOCAB_CHUNK=scratch.chunk, MASK_BLOCK=min(MASK_BLOCK, scratch.chunk),
        PDL=pdl, num_warps=8, maxnreg=64, **launch.options(pdl),
    )  # fmt: skip
    _sample_tokens[(rows,)](
        logits, scratch.adjusted, scratch.chunk_max, scratch.chunk_id, scratch.keys, call.sampled, entry, tokens, prompt_length,
        *by_row, batch.counts, vocabulary, chunks, logits.stride(0), scratch.adjusted.stride(0), tokens.shape[1],
        CHUNKS=triton.next_power_of_2(chunks), MAX_CANDIDATES=scratch.keys.shape[1], BLOCK=scratch.block,
        PDL=pdl, num_warps=8, **launch.options(pdl),
    )  # fmt: skip


VARIANT = SamplingVariant("search", search, (_adjust, _sample_tokens))


VARIANTS: dict[str, SamplingVariant] = by_name(VARIANT)  # the default first


def sample_tokens(call: SamplingCall, variant: str = "") -> None:
    """sampled[row] = the next token of each emitting row. variant: its name; "": the default. Raises ValueError
    or TypeError if the tensors do not match.
    """
    check_call(call)
    VARIANTS[variant or next(iter(VARIANTS))].launch(call)


def check_call(call: SamplingCall) -> None:
    """Raise ValueError or TypeError unless the tensors fit together."""
    (rows, vocabulary), slots, scratch = call.logits.shape, len(call.requests.entry), call.workspace
    check_tensors(
        (call.logits, "logits", (rows, vocabulary), torch.float32, True),
        (call.requests.entry, "entry", (slots, SQ_ENTRY_WORDS), torch.int32),
        (call.requests.tokens, "tokens", (slots, None), torch.int32),
        (call.requests.prompt_length, "prompt_length", (slots,), torch.int32),
        (call.grammars.slot, "grammar", (slots,), torch.int32),
        (call.grammars.state, "grammar_state", (slots,), torch.int64),
        (call.grammars.rules, "rules", (slots,), torch.int32),
        (call.grammars.draft_states, "draft_states", (slots, None), torch.int64),
        (call.grammars.words, "grammar words", (None, None), torch.int32),
        (call.grammars.token_place, "token_place", (None, 2), torch.int32),
        (call.grammars.token_bytes, "token_bytes", (None,), torch.int32),
        (call.sampled, "sampled", (AtLeast(rows),), torch.int32),
        (scratch.adjusted, "adjusted", (AtLeast(rows), vocabulary), torch.float32),
        *call.batch.declared(rows, "row_slots", "emits", "context_lengths"),
    )
