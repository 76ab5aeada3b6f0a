"""The draw of one token: filters and inverse distribution function over the candidates of a row."""

import triton
import triton.language as tl

from blinkpy.kernels.sampling import candidates as search
from blinkpy.kernels.sampling.candidates import LAST_FINITE, NO_KEY, THRESHOLDS

HEAD = tl.constexpr(0)
TOP_K = tl.constexpr(1)
TOP_P = tl.constexpr(2)
MIN_P = tl.constexpr(3)
DRAW = tl.constexpr(4)
DONE = tl.constexpr(5)
"""Stages of `draw`."""


@triton.jit
def first_distances():
    """[THRESHOLDS] distances of the first pass: 0.4, 1.6, 3.6 ... 19.6, infinity."""
    step = tl.arange(0, THRESHOLDS).to(tl.float32)
    return tl.where(step < THRESHOLDS - 1, 0.4 * (step + 1) * (step + 1), 3.0e38)


@triton.jit
def draw_from_head(
    keys,  # int64 [MAX_CANDIDATES] sorted, of the head
    each,  # float32 [MAX_CANDIDATES] their weights
    inside,  # their number
    head_distance,  # float32, the largest in the head
    candidates,  # number in the whole row, with a finite logit
    kept_weight,  # weight of all candidates
    top_k, top_p, min_p, uniform, token, stage, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """(token, stage): the sampled token's key and DRAW if the head is sufficient; otherwise unchanged."""
    index = tl.arange(0, MAX_CANDIDATES)
    in_top_k = index < tl.minimum(top_k, inside)
    each = tl.where(in_top_k, each, 0.0)
    sums = tl.cumsum(each, 0)
    head_weight = tl.sum(each, 0)
    complete = top_k <= inside  # the head contains all candidates that top_k keeps
    known = complete | (top_k == candidates)  # the weight of the candidates that top_k keeps is known
    nucleus = top_p * tl.where(complete, head_weight, kept_weight)
    nucleus = tl.where(top_p < 1.0, nucleus, float("inf"))
    # The kept candidates end inside the head if any filter ends there.
    ends = complete | (nucleus <= head_weight) | ((min_p > 0.0) & (tl.exp(-head_distance) < min_p))
    kept = in_top_k & ((((sums - each) < nucleus) & (each >= min_p)) | (index == 0))
    total = tl.where(ends, tl.sum(tl.where(kept, each, 0.0), 0), kept_weight)
    goal = uniform * total
    unfiltered = (top_p >= 1.0) & (min_p <= 0.0)
    if known & (ends | (unfiltered & (goal < head_weight))):
        at = tl.sum((kept & (sums <= goal)).to(tl.int32), 0)
        at = tl.minimum(at, tl.sum(kept.to(tl.int32), 0) - 1)
        token = tl.sum(tl.where(index == at, keys, 0), 0)
        stage = tl.full([], DRAW, tl.int32)  # finished
    return token, stage


@triton.jit
def find_in_bracket(
    keys,  # int64 [MAX_CANDIDATES] sorted, of the bracket
    each,  # float32 [MAX_CANDIDATES] their weights
    inside,  # their number
    count,  # candidates below the bracket
    weight,  # their weight
    goal,  # weight
    top_k, limit, kept_weight, stage, MAX_CANDIDATES: tl.constexpr,
):  # fmt: skip
    """(key found by the stage, limit, kept weight). The key of a filter is the last candidate that it keeps."""
    index = tl.arange(0, MAX_CANDIDATES)
    sums = weight + tl.cumsum(each, 0)
    short = tl.where(stage == TOP_P, sums < goal, sums <= goal)  # top_p keeps no candidate after a sum that reaches it exactly
    at = tl.sum(((index < inside) & short).to(tl.int32), 0)
    at = tl.where(stage == TOP_K, top_k - count - 1, at)
    at = tl.maximum(tl.minimum(at, inside - 1), 0)
    token = tl.sum(tl.where(index == at, keys, 0), 0)
    if stage != DRAW:
        limit = token
        kept_weight = tl.sum(tl.where(index == at, sums, 0.0), 0)
    return token, limit, kept_weight


@triton.jit
def next_stage(stage, top_k, candidates, top_p, min_p):
    """The next stage; filters that keep every candidate are skipped."""
    stage += 1
    if (stage == TOP_K) & (top_k >= candidates):
        stage += 1
    if (stage == TOP_P) & (top_p >= 1.0):
        stage += 1
    if (stage == MIN_P) & (min_p <= 0.0):
        stage += 1
    return stage


@triton.jit
def draw(
    row_ptr,  # float32 [V] logits of the row
    vocabulary,
    maximum,  # float32 largest logit
    temperature,
    top_k,  # int32, <= 0: off
    top_p,  # float32, >= 1: off
    min_p,  # float32, <= 0: off
    uniform,  # float32 in [0, 1)
    keys_ptr,  # int64 [MAX_CANDIDATES] scratch
    MAX_CANDIDATES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The sampled token id, in stages of one or more passes over the row. HEAD collects as many of the best
    candidates as fit, and is usually sufficient. Otherwise TOP_K, TOP_P and MIN_P each find the last key that
    they keep, and DRAW finds the token.
    """
    nothing = tl.full([], NO_KEY, tl.int64)
    steps = first_distances()
    thresholds = search.distance_key(steps)
    top_p = tl.maximum(top_p, 1.0e-38)  # keep at least the best token
    limit = tl.full([], LAST_FINITE, tl.int64)  # the last key that the previous filters keep
    low, high = nothing, limit  # the bracket, and the weight below it
    count, weight = tl.zeros([], tl.int32), tl.zeros([], tl.float32)
    candidates, kept_weight = tl.zeros([], tl.int32), tl.zeros([], tl.float32)  # of finite logit; up to `limit`
    token = tl.zeros([], tl.int64)
    stage = tl.full([], HEAD, tl.int32)
    while stage < DONE:
        counts, weights = search.measure(row_ptr, vocabulary, maximum, temperature, low, thresholds, BLOCK)
        head_distance = tl.zeros([], tl.float32)
        if stage == HEAD:
            candidates, kept_weight = search.pick(counts, THRESHOLDS - 1), search.pick(weights, THRESHOLDS - 1)
            top_k = tl.where((top_k <= 0) | (top_k > candidates), candidates, top_k)
            fits = tl.sum((counts <= MAX_CANDIDATES).to(tl.int32), 0) - 1  # counts ascend; -1: not even the first
            head_distance, inside = search.pick(steps, fits), search.pick(counts, fits)
            high = search.distance_key(head_distance)
            ready, finished = inside > 0, inside <= 0
        elif stage == MIN_P:
            kept_weight = search.pick(weights, 0)
            inside, ready, finished = 0, False, True
        else:
            goal = tl.where(stage == TOP_P, top_p, uniform) * kept_weight
            short = tl.where(stage == TOP_P, weight + weights < goal, weight + weights <= goal)
            short = tl.where(stage == TOP_K, count + counts < top_k, short)
            section = search.section_of(short, counts)
            inside = search.pick(counts, section) - search.pick(counts, section - 1)
            count += search.pick(counts, section - 1)
            weight += search.pick(weights, section - 1)
            high = search.pick(thresholds, section)
            low = tl.where(section > 0, search.pick(thresholds, section - 1), low)
            ready = inside <= MAX_CANDIDATES
            finished = ready
        if ready:
            keys = search.collect(row_ptr, vocabulary, maximum, temperature, low, high, keys_ptr, MAX_CANDIDATES, BLOCK)
            each = search.weights_of(keys)
            if stage == HEAD:
                token, stage = draw_from_head(
                    keys, each, inside, head_distance, candidates, kept_weight, top_k, top_p, min_p, uniform, token, stage,
                    MAX_CANDIDATES,
                )  # fmt: skip
            else:
                goal = tl.where(stage == TOP_P, top_p, uniform) * kept_weight
                token, limit, kept_weight = find_in_bracket(
                    keys, each, inside, count, weight, goal, top_k, limit, kept_weight, stage, MAX_CANDIDATES
                )
            finished = True
        if finished:
            stage = next_stage(stage, top_k, candidates, top_p, min_p)
            low, high = nothing, limit
            count, weight = tl.zeros([], tl.int32), tl.zeros([], tl.float32)
        thresholds = search.split(low, high)
        if stage == MIN_P:
            limit = tl.minimum(limit, search.distance_key(tl.maximum(-tl.log(min_p), 0.0)))
            thresholds = tl.zeros([THRESHOLDS], tl.int64) + limit
    return (token & 0x7FFFFFFF).to(tl.int32)
