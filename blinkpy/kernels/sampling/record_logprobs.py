"""Log probabilities of the sampled token and of the most likely ones, from the model's own logits."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from blinkpy.kernels.launch import COUNT_ROWS, check, check_one_device, options, release_successor, wait_for_predecessor
from blinkpy.kernels.sampling.candidates import (
    LAST_FINITE,
    NO_KEY,
    STAGES,
    collect,
    distance_of,
    measure,
    pick,
    section_of,
    split,
)
from blinkpy.kernels.sampling.sampler import ENTRY_WORDS, SamplingWorkspace
from blinkpy.queues import submission
from blinkpy.queues.logprob_record import RECORD_PAIRS, TOP_LOGPROBS

TOP = tl.constexpr(TOP_LOGPROBS)
PAIRS = tl.constexpr(RECORD_PAIRS)
WORD_LOGPROBS = tl.constexpr(submission.WORD_LOGPROBS)

PROGRAMS = 128
"""At most so many programs, since only one of them fits on a multiprocessor: a step where nobody asks waits for one wave."""


@triton.jit
def record_pair(token, logprob):
    """An int64 word of a record: the token id in the lower half, the bits of the float32 in the upper one."""
    return (logprob.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (token.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def write_record(
    row,
    logits_ptr,
    sampled_ptr,
    records_ptr,
    keys_ptr,
    vocabulary,
    logits_stride,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The record of one row; arguments as of _logprobs."""
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
    record = records_ptr + row.to(tl.int64) * PAIRS
    values = tl.where(known, -distance_of(keys) - log_sum, float("-inf"))
    ids = tl.where(known, keys & 0x7FFFFFFF, -1)
    tl.store(record, record_pair(token, sampled_value))
    tl.store(record + 1 + index, record_pair(ids, values), mask=index < TOP)


@triton.jit(do_not_specialize=["rows"])
def _logprobs(
    logits_ptr,  # float32 [B, V], rows logits_stride elements apart
    sampled_ptr,  # int32 [B]
    records_ptr,  # int64 [B, 1 + TOP] output: the sampled token's pair, then the largest in descending order
    keys_ptr,  # int64 [B, CAPACITY] scratch
    entry_ptr,  # int32 [S, 64]
    row_slots_ptr,  # int32 [B]
    emits_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    rows,  # B
    vocabulary,  # V
    logits_stride,
    EACH: tl.constexpr,  # rows of one program, a power of two
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    program, programs = tl.program_id(0), tl.num_programs(0)
    release_successor(PDL)
    wait_for_predecessor(PDL)
    # In nearly every step nobody asks, and this is all that is done: three loads at once, then one.
    index = tl.arange(0, EACH)
    own = program + index * programs
    inside = own < rows
    emits = tl.load(emits_ptr + own, mask=inside, other=0)
    slots = tl.load(row_slots_ptr + own, mask=inside, other=-1).to(tl.int64)
    wanted = (own < tl.load(counts_ptr + COUNT_ROWS)) & (emits != 0)
    asked = (tl.load(entry_ptr + slots * ENTRY_WORDS + WORD_LOGPROBS, mask=wanted, other=-1) >= 0).to(tl.int32)
    if tl.sum(asked, 0) > 0:
        for i in range(EACH):
            if tl.sum(tl.where(index == i, asked, 0), 0) > 0:
                write_record(
                    program + i * programs,
                    logits_ptr,
                    sampled_ptr,
                    records_ptr,
                    keys_ptr,
                    vocabulary,
                    logits_stride,
                    CAPACITY,
                    BLOCK,
                )


def logprobs(
    logits: torch.Tensor,
    sampled: torch.Tensor,
    entry: torch.Tensor,
    row_slots: torch.Tensor,
    emits: torch.Tensor,
    counts: torch.Tensor,
    records: torch.Tensor,
    workspace: SamplingWorkspace,
    *,
    pdl: bool = False,
) -> None:
    """Log probabilities (before penalties and temperature) for the emitting rows whose entry asks for them; others stay.

    logits: float32 [B, V] as the model gave them; sampled, row_slots, emits: int32 [at least B]; entry: int32 [S, 64];
    records: int64 [at least B, RECORD_PAIRS] of RECORD_PAIR, the sampled token's first, then the largest, descending,
    lower id first among equals; token -1 with -inf where there are fewer tokens of finite logit.
    """
    rows, vocabulary = logits.shape
    check(logits, "logits", (None, None), torch.float32, row_strided=True)
    check(entry, "entry", (None, submission.SQ_ENTRY_WORDS), torch.int32)
    check(counts, "counts", (8,), torch.int64)
    check(records, "records", (None, RECORD_PAIRS), torch.int64)
    by_row = {"sampled": sampled, "row_slots": row_slots, "emits": emits}
    for name, tensor in by_row.items():
        check(tensor, name, (None,), torch.int32)
    for name, tensor in {**by_row, "records": records}.items():
        if len(tensor) < rows:
            raise ValueError(f"{name} [{len(tensor)}] too short for {rows} rows")
    capacity = workspace.keys.shape[1]
    if workspace.keys.shape[0] < rows or capacity < RECORD_PAIRS:
        raise ValueError(f"sampling workspace {list(workspace.keys.shape)} is too small for {rows} rows of {TOP_LOGPROBS}")
    check_one_device(logits, entry, counts, records, workspace.keys, *by_row.values())
    programs = min(rows, PROGRAMS)
    _logprobs[(programs,)](
        logits,
        sampled,
        records,
        workspace.keys,
        entry,
        row_slots,
        emits,
        counts,
        rows,
        vocabulary,
        logits.stride(0),
        EACH=triton.next_power_of_2(triton.cdiv(rows, programs)),
        CAPACITY=capacity,
        BLOCK=workspace.block,
        PDL=pdl,
        num_warps=8,
        **options(pdl),
    )
