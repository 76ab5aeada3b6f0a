"""Log probabilities of the sampled token and of the most likely tokens, from the model's own logits."""

import torch
import triton
import triton.language as tl

from blinkpy.kernels import launch
from blinkpy.kernels.launch import COUNT_ROWS
from blinkpy.kernels.sampling import candidates as search
from blinkpy.kernels.sampling.candidates import LAST_FINITE, NO_KEY, STAGES
from blinkpy.kernels.sampling.sampler import ENTRY_WORDS, SamplingCall
from blinkpy.queues import submission
from blinkpy.queues.words import LOGPROB_ENTRIES, TOP_LOGPROBS

TOP = tl.constexpr(TOP_LOGPROBS)
ENTRIES = tl.constexpr(LOGPROB_ENTRIES)
WORD_LOGPROBS = tl.constexpr(submission.WORD_LOGPROBS)

PROGRAMS = 128
"""Maximum number of programs. Only one fits on an SM, so a step without requested log probabilities takes one
wave.
"""


@triton.jit
def logprob_entry(token, logprob):
    """An int64 word of a record: the token id in the lower half, the bits of the float32 in the upper one."""
    return (logprob.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (token.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def write_record(
    row, logits_ptr, sampled_ptr, records_ptr, keys_ptr, vocabulary, logits_stride, MAX_CANDIDATES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The record of one row; arguments as in _write_logprobs."""
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
    sampled_value = tl.load(row_ptr + token, mask=token >= 0, other=float("-inf")) - maximum - log_sum
    # Narrow the bracket until it ends at or after the last wanted candidate, with few enough candidates before it.
    nothing = tl.full([], NO_KEY, tl.int64)
    low = nothing
    high = tl.full([], LAST_FINITE, tl.int64)
    count = tl.zeros([], tl.int32)
    target = tl.minimum(tl.sum(finite, 0), TOP)
    inside = tl.full([], MAX_CANDIDATES, tl.int32)
    temperature = tl.full([], 1.0, tl.float32)
    while count + inside > MAX_CANDIDATES - 1:
        thresholds = search.split(low, high)
        counts, _ = search.measure(row_ptr, vocabulary, maximum, temperature, low, thresholds, BLOCK)
        section = search.section_of(count + counts < target, counts)
        inside = search.pick(counts, section) - search.pick(counts, section - 1)
        count += search.pick(counts, section - 1)
        high = search.pick(thresholds, section)
        low = tl.where(section > 0, search.pick(thresholds, section - 1), low)
    scratch = keys_ptr + row.to(tl.int64) * MAX_CANDIDATES
    keys = search.collect(row_ptr, vocabulary, maximum, temperature, nothing, high, scratch, MAX_CANDIDATES, BLOCK)
    index = tl.arange(0, MAX_CANDIDATES)
    known = keys <= LAST_FINITE
    record = records_ptr + row.to(tl.int64) * ENTRIES
    values = tl.where(known, -search.distance_of(keys) - log_sum, float("-inf"))
    ids = tl.where(known, keys & 0x7FFFFFFF, -1)
    tl.store(record, logprob_entry(token, sampled_value))
    tl.store(record + 1 + index, logprob_entry(ids, values), mask=index < TOP)


@triton.jit(do_not_specialize=["rows"])
def _write_logprobs(
    logits_ptr,  # float32 [B, V], rows logits_stride elements apart
    sampled_ptr,  # int32 [B]
    records_ptr,  # int64 [B, 1 + TOP] output: the sampled token's entry, then the largest in descending order
    keys_ptr,  # int64 [B, MAX_CANDIDATES] scratch
    entry_ptr,  # int32 [S, 64]
    row_slots_ptr, emits_ptr,  # int32 [B]
    counts_ptr,  # int64 [8] batch header
    rows,  # B
    vocabulary,  # V
    logits_stride,
    EACH: tl.constexpr,  # rows of one program, a power of two
    MAX_CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    # In nearly every step, no row requests log probabilities, and this is the whole work: three parallel loads, then one.
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
                row = program + i * programs
                write_record(
                    row, logits_ptr, sampled_ptr, records_ptr, keys_ptr, vocabulary, logits_stride, MAX_CANDIDATES, BLOCK
                )


def write_logprobs(call: SamplingCall) -> None:
    """Record log probabilities (before penalties and temperature) of the emitting rows whose entry requests
    them; other records are unchanged.

    logits: the model's logits.
    sampled: the tokens.
    records: int64 [at least B, LOGPROB_ENTRIES] of LOGPROB_ENTRY. The sampled token is first, then the most likely tokens in
        descending order, the lower id first among equals; token -1 with -inf if fewer tokens have finite logits. Raises
        ValueError or TypeError if the tensors do not match.
    """
    logits, entry, batch, scratch = call.logits, call.requests.entry, call.batch, call.workspace
    (rows, vocabulary), capacity = logits.shape, scratch.keys.shape[1]
    rows_or_more = launch.AtLeast(rows)
    launch.check_tensors(
        (logits, "logits", (rows, vocabulary), torch.float32, True),
        (entry, "entry", (None, submission.SQ_ENTRY_WORDS), torch.int32),
        (call.records, "records", (rows_or_more, LOGPROB_ENTRIES), torch.int64),
        (call.sampled, "sampled", (rows_or_more,), torch.int32),
        (scratch.keys, "keys", (rows_or_more, launch.AtLeast(LOGPROB_ENTRIES)), torch.int64),
        *batch.declared(rows, "row_slots", "emits"),
    )
    programs = min(rows, PROGRAMS)
    _write_logprobs[(programs,)](
        logits, call.sampled, call.records, scratch.keys, entry, batch.row_slots, batch.emits, batch.counts, rows, vocabulary,
        logits.stride(0),
        EACH=triton.next_power_of_2(triton.cdiv(rows, programs)), MAX_CANDIDATES=capacity, BLOCK=scratch.block,
        PDL=call.pdl, num_warps=8, **launch.options(call.pdl),
    )  # fmt: skip
