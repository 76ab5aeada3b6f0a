"""Log probabilities of the sampled token and of the most likely ones, from the model's own logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blinkpy import queues
from blinkpy.kernels.candidates import LAST_FINITE, NO_KEY, STAGES, collect, distance_of, measure, pick, section_of, split
from blinkpy.kernels.launch import check, check_one_device, options, release_successor, wait_for_predecessor
from blinkpy.kernels.sampling import ENTRY_WORDS, TOP_LOGPROBS, WORD_LOGPROBS, SamplingWorkspace, is_emitting

TOP = tl.constexpr(TOP_LOGPROBS)


@triton.jit
def _logprobs(
    logits_ptr,  # float32 [B, V], rows logits_stride elements apart
    sampled_ptr,  # int32 [B]
    values_ptr,  # float32 [B, 1 + TOP] output: the sampled token's, then the largest in descending order
    ids_ptr,  # int32 [B, 1 + TOP] output: token ids; -1 where the vocabulary is smaller
    keys_ptr,  # int64 [B, CAPACITY] scratch
    entry_ptr,  # int32 [S, 32]
    row_slots_ptr,  # int32 [B]
    emits_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    vocabulary,  # V
    logits_stride,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0)
    release_successor(PDL)
    wait_for_predecessor(PDL)
    wanted = is_emitting(counts_ptr, emits_ptr, row)
    slot = tl.load(row_slots_ptr + row, mask=wanted, other=0).to(tl.int64)
    wanted = wanted & (tl.load(entry_ptr + slot * ENTRY_WORDS + WORD_LOGPROBS, mask=wanted, other=-1) >= 0)
    if wanted:
        row_ptr = logits_ptr + row.to(tl.int64) * logits_stride
        best = tl.full([BLOCK], float("-inf"), tl.float32)
        for first in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
            ids = first + tl.arange(0, BLOCK)
            logit = tl.load(row_ptr + ids, mask=ids < vocabulary, other=float("-inf"))
            best = tl.maximum(best, tl.where(logit == logit, logit, float("-inf")))
        maximum = tl.max(best, 0)
        weight = tl.zeros([BLOCK], tl.float32)
        finite = tl.zeros([BLOCK], tl.int32)
        for first in tl.range(0, vocabulary, BLOCK, num_stages=STAGES):
            ids = first + tl.arange(0, BLOCK)
            logit = tl.load(row_ptr + ids, mask=ids < vocabulary, other=float("-inf"))
            exists = logit > float("-inf")  # false for NaN
            weight += tl.where(exists, tl.exp(logit - maximum), 0.0)
            finite += exists.to(tl.int32)
        log_sum = tl.log(tl.sum(weight, 0))
        token = tl.load(sampled_ptr + row)
        sampled_value = tl.load(row_ptr + token) - maximum - log_sum
        # Narrow the bracket until it ends at or behind the last one wanted, with few enough up to there.
        nothing = tl.full([], NO_KEY, tl.int64)
        low = nothing
        high = tl.full([], LAST_FINITE, tl.int64)
        count = tl.zeros([], tl.int32)
        target = tl.minimum(tl.sum(finite, 0), TOP)
        inside = tl.full([], CAPACITY, tl.int32)
        temperature = tl.full([], 1.0, tl.float32)
        while count + inside > CAPACITY - 1:
            thresholds = split(low, high)
            counts, _ = measure(row_ptr, vocabulary, maximum, temperature, low, thresholds, BLOCK)
            section = section_of(count + counts < target, counts)
            inside = pick(counts, section) - pick(counts, section - 1)
            count += pick(counts, section - 1)
            high = pick(thresholds, section)
            low = tl.where(section > 0, pick(thresholds, section - 1), low)
        scratch = keys_ptr + row.to(tl.int64) * CAPACITY
        keys = collect(row_ptr, vocabulary, maximum, temperature, nothing, high, scratch, CAPACITY, BLOCK)
        index = tl.arange(0, CAPACITY)
        known = keys <= LAST_FINITE
        at = row.to(tl.int64) * (TOP + 1)
        values = tl.where(known, -distance_of(keys) - log_sum, float("-inf"))
        tl.store(values_ptr + at + 1 + index, values, mask=index < TOP)
        tl.store(ids_ptr + at + 1 + index, tl.where(known, keys & 0x7FFFFFFF, -1).to(tl.int32), mask=index < TOP)
        tl.store(values_ptr + at, sampled_value)
        tl.store(ids_ptr + at, token)


def logprobs(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    entry: torch.Tensor,
    row_slots: torch.Tensor,
    emits: torch.Tensor,
    counts: torch.Tensor,
    values: torch.Tensor,
    ids: torch.Tensor,
    workspace: SamplingWorkspace,
    *,
    pdl: bool = False,
) -> None:
    """Log probabilities (before penalties and temperature) for the emitting rows whose entry asks for them; others
    stay.

    logits: float32 [B, V] as the model gave them; sampled, row_slots, emits: int32 [at least B]; entry: int32 [S, 32];
    values: float32 [B, 1 + TOP_LOGPROBS], the sampled token's first, then the largest, descending, lower id first among
    equals; ids: int32 of the same shape, -1 (value -inf) where there are fewer tokens of finite logit.
    """
    rows, vocabulary = logits.shape
    check(logits, "logits", (None, None), torch.float32, row_strided=True)
    check(entry, "entry", (None, queues.SQ_ENTRY_WORDS), torch.int32)
    check(counts, "counts", (8,), torch.int64)
    check(values, "values", (rows, TOP_LOGPROBS + 1), torch.float32)
    check(ids, "ids", (rows, TOP_LOGPROBS + 1), torch.int32)
    for name, tensor in {"sampled": sampled, "row_slots": row_slots, "emits": emits}.items():
        check(tensor, name, (None,), torch.int32)
        if len(tensor) < rows:
            raise ValueError(f"{name} [{len(tensor)}] too short for {rows} rows")
    capacity = workspace.keys.shape[1]
    if workspace.keys.shape[0] < rows or capacity < TOP_LOGPROBS + 1:
        raise ValueError(f"sampling workspace {list(workspace.keys.shape)} is too small for {rows} rows of {TOP_LOGPROBS}")
    check_one_device(logits, sampled, entry, row_slots, emits, counts, values, ids, workspace.keys)
    _logprobs[(rows,)](
        logits,
        sampled,
        values,
        ids,
        workspace.keys,
        entry,
        row_slots,
        emits,
        counts,
        vocabulary,
        logits.stride(0),
        CAPACITY=capacity,
        BLOCK=workspace.block,
        PDL=pdl,
        num_warps=8,
        **options(pdl),
    )
