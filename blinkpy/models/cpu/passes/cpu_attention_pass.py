"""The compiled pass of cpu_attention.py: norms, rotation, the write to the cache, and the attention of decode
rows.

A pass is compiled for each item type, page size P and head size D. These are constants of a single function,
attention_pass, which gives them to its arrays as shapes. All other functions are inlined before type inference, so their inner
loops also have constant lengths. A separately compiled function would have to support any length. Inlined functions are also
compiled with its options, which permit reordering sums.

bfloat16 is handled as its bits, int16, and FP8 as its bits, uint8, because Numba has no such types. All
arithmetic is float32.
"""

import functools
from typing import Any

import numpy as np
from numba import carray, njit, types
from numba.extending import overload

from blinkpy.device.compile_cache import cached_cfunc
from blinkpy.models.cpu.passes.njit_math import (
    FAST,
    bits_of,
    exp2,
    exponentials,
    float_of,
    float_of_fp8,
    fp8_of,
    larger,
    pointer_to,
    prefetch,
    rescale,
    take_number,
)

_ADDRESSES = (
    "qkv",  # items [tokens, heads + 2 * kv_heads, D]; the queries of prefill tokens are replaced by prepared ones
    "out",  # items [tokens, heads, D]; the rows of decode tokens are written
    *("keys", "values"),  # items or FP8 [num_pages, kv_heads, P, D], the layer's cache
    "scales",  # float32 [4, kv_heads] of cached keys and values, then their inverses; 1 if the cache holds items
    *("q_norm", "k_norm"),  # float32 [D]; 0 if the model has no such norm
    "sinks",  # float32 [heads], scores of the sinks; -inf for heads without a sink
    *("cos", "sin"),  # float32 [max_positions, half]
    *("positions", "cache_slots"),  # int32 [tokens]
    *("row_slots", "contexts"),  # int32 [rows]
    "page_table",  # int32 [slots, table_width]
    *("queries", "sums"),  # float32 [threads, heads, D], scratch
    "scores",  # float32 [threads, heads, capacity], scratch
    "begun",  # int64 [2], numbers of threads and units of work that have begun: 0 before each pass
    "progress",  # int64, counts units of work, for the watchdog
)
_SIZES = (
    *("tokens", "rows", "decode_rows"),  # decode rows come first, and are one token each
    *("threads", "heads", "kv_heads", "num_pages", "max_positions", "half", "slots", "table_width"),
    "cached_heads",  # kv_heads; 0 if the layer projects only queries, which read another layer's cache
    "capacity",  # tokens of the largest context, in whole pages
    "window",  # number of the last tokens that a token sees, including itself; 0: all
    "chunked",  # 1: a token sees only its chunk of `window` tokens
)
ARGUMENTS = np.dtype(
    [*((name, np.int64) for name in (*_ADDRESSES, *_SIZES)), *((name, np.float32) for name in ("eps", "scale", "softcap"))],
    align=True,
)
"""The arguments of the pass for one layer of one step."""

LOG2_E = np.float32(1.44269504)

inlined = njit(inline="always")


@functools.lru_cache(maxsize=32)
def compile_pass(bfloat16: bool, fp8: bool, page_size: int, head_dim: int) -> Any:
    """Compile the pass for one item type (bfloat16 or float32), a cache of such items or of FP8 numbers, page
    size (a multiple of 4) and head size.

    Returns Numba's CFunc. Its `address` is of a C function void(ARGUMENTS *), which every thread of a team
    calls. It is valid while the CFunc lives.
    """
    P, D, item = page_size, head_dim, np.int16 if bfloat16 else np.float32
    cached = np.uint8 if fp8 else item

    def attention_pass(arguments):  # type: ignore[no-untyped-def]
        a = carray(arguments, (1,), ARGUMENTS)[0]
        thread, threads = take_number(a.begun), a.threads
        tokens, heads, kv_heads, half = a.tokens, a.heads, a.kv_heads, a.half
        qkv = carray(pointer_to(a.qkv), (tokens, heads + 2 * a.cached_heads, D), item)
        out = carray(pointer_to(a.out), (tokens, heads, D), item)
        keys = carray(pointer_to(a.keys), (a.num_pages, kv_heads, P, D), cached)
        values = carray(pointer_to(a.values), (a.num_pages, kv_heads, P, D), cached)
        scales = carray(pointer_to(a.scales), (4, kv_heads), np.float32)
        q_norm = carray(pointer_to(a.q_norm), (D if a.q_norm else 0,), np.float32)
        k_norm = carray(pointer_to(a.k_norm), (D if a.k_norm else 0,), np.float32)
        sinks = carray(pointer_to(a.sinks), (heads,), np.float32)
        cos = carray(pointer_to(a.cos), (a.max_positions, half), np.float32)
        sin = carray(pointer_to(a.sin), (a.max_positions, half), np.float32)
        positions = carray(pointer_to(a.positions), (tokens,), np.int32)
        cache_slots = carray(pointer_to(a.cache_slots), (tokens,), np.int32)
        row_slots = carray(pointer_to(a.row_slots), (a.rows,), np.int32)
        contexts = carray(pointer_to(a.contexts), (a.rows,), np.int32)
        page_table = carray(pointer_to(a.page_table), (a.slots, a.table_width), np.int32)
        q = carray(pointer_to(a.queries), (threads, heads, D), np.float32)[thread]
        sums = carray(pointer_to(a.sums), (threads, heads, D), np.float32)[thread]
        scores = carray(pointer_to(a.scores), (threads, heads, a.capacity), np.float32)[thread]
        decode_rows, window, eps = a.decode_rows, a.window, a.eps
        group = heads // kv_heads  # queries that share a key head

        # A unit of work is a token with some of its key heads: all of them if there are enough tokens for the
        # threads.
        parts = np.int64(1) if tokens >= 2 * threads else kv_heads
        step = kv_heads // parts
        unit = take_number(a.begun + 8)
        while unit < tokens * parts:
            token = unit // parts
            first = (unit - token * parts) * step
            last = first + step
            position, place = np.int64(positions[token]), np.int64(cache_slots[token])
            page, offset = place // P, place % P
            for h in range(first, last):
                for g in range(h * group, (h + 1) * group):
                    prepare(qkv[token, g], q_norm, eps, cos[position], sin[position], q[g])
                if a.cached_heads:  # keys use the memory of the sums, which are still unused
                    prepare(qkv[token, heads + h], k_norm, eps, cos[position], sin[position], sums[h])
                    keep(sums[h], keys[page, h, offset], scales[2, h], out)
                    keep(qkv[token, heads + kv_heads + h], values[page, h, offset], scales[3, h], out)
            if token < decode_rows:
                context, pages = np.int64(contexts[token]), page_table[row_slots[token]]
                start = first_seen(context, window, a.chunked)
                attend(q, keys, values, scales, pages, context, start, a.scale, a.softcap, sinks, first, last, scores, sums)
                for g in range(first * group, last * group):
                    store(sums[g], out[token, g])
            else:
                for g in range(first * group, last * group):
                    store(q[g], qkv[token, g])
            take_number(a.progress)
            unit = take_number(a.begun + 8)

    key = (bfloat16, fp8, page_size, head_dim)
    return cached_cfunc(attention_pass, types.void(types.voidptr), key, error_model="numpy", fastmath=FAST)


@inlined
def prepare(source, norm, eps, cos, sin, target):  # type: ignore[no-untyped-def]
    """target = one head of a query or key, normalised and rotated. float32 [D].

    source: items [D]. norm: float32 [D], empty without a norm. cos, sin: float32 [half].
    """
    D, half = len(target), len(cos)
    if len(norm):
        square = np.float32(0)
        for d in range(D):
            x = load(source[d])
            square += x * x
        scale = np.float32(1) / np.sqrt(square / np.float32(D) + eps)
        for d in range(D):
            target[d] = load(source[d]) * scale * norm[d]
    else:
        for d in range(D):
            target[d] = load(source[d])
    for d in range(half):
        low, high = target[d], target[d + half]
        target[d] = low * cos[d] - high * sin[d]
        target[d + half] = high * cos[d] + low * sin[d]


@inlined
def first_seen(context, window, chunked):  # type: ignore[no-untyped-def]
    """The first position that the last token of a context sees."""
    if window <= 0:
        return 0
    return (context - 1) // window * window if chunked else max(context - window, 0)


@inlined
def attend(q, keys, values, scales, pages, context, start, scale, softcap, sinks, first, last, scores, sums):  # type: ignore[no-untyped-def]
    """Attention of one token for key heads [first, last), and the queries that share them.

    q: float32 [heads, D].
    keys, values, scales: the cache.
    pages: int32, of the sequence.
    context: tokens, including this one.
    start: the first visible position.
    scale, softcap: factor and soft cap of the scores.
    sinks: float32 [heads].
    scores: float32 [heads, capacity], scratch.
    sums: float32 [heads, D], the result.
    """
    P, D = keys.shape[2], keys.shape[3]
    group = len(q) // keys.shape[1]
    start_page = start // P
    base = start_page * P  # position of the first stored score
    end_page = (context + P - 1) // P
    for p in range(start_page, end_page):
        page, coming = np.int64(pages[p]), np.int64(pages[min(p + 1, end_page - 1)])
        for h in range(first, last):
            fetch(keys[coming, h])
            for g in range(h * group, (h + 1) * group):
                score_page(q[g], keys[page, h], scale * scales[0, h], scores[g], p * P - base)
    for g in range(first * group, last * group):
        if softcap > 0:
            cap_scores(scores[g], start - base, context - base, softcap)
        softmax(scores[g], start - base, context - base, sinks[g])
        for d in range(D):
            sums[g, d] = np.float32(0)
    for p in range(start_page, end_page):
        page, coming = np.int64(pages[p]), np.int64(pages[min(p + 1, end_page - 1)])
        valid = min(P, context - p * P)
        for h in range(first, last):
            fetch(values[coming, h])
            for g in range(h * group, (h + 1) * group):
                add_page(scores[g], p * P - base, values[page, h], valid, sums[g])
    for g in range(first * group, last * group):
        for d in range(D):
            sums[g, d] *= scales[1, g // group]


@inlined
def fetch(page):  # type: ignore[no-untyped-def]
    """Prefetch a head's page, items [P, D], because the processor can't predict a sequence's next page. Saves a third of the
    time.
    """
    for i in range(0, page.shape[0] * page.shape[1], 64 // page.itemsize):  # by cache lines
        prefetch(page, i)


@inlined
def score_page(q, page, scale, scores, base):  # type: ignore[no-untyped-def]
    """scores[base:base + P] = scale * q . each key of a page. q: float32 [D]; page: items [P, D]; scores: float32 [capacity].

    Processing four keys at a time gives four independent sums.
    """
    P, D = page.shape
    for t in range(0, P, 4):
        a = b = c = e = np.float32(0)
        for d in range(D):
            x = q[d]
            a += x * load(page[t, d])
            b += x * load(page[t + 1, d])
            c += x * load(page[t + 2, d])
            e += x * load(page[t + 3, d])
        scores[base + t] = a * scale
        scores[base + t + 1] = b * scale
        scores[base + t + 2] = c * scale
        scores[base + t + 3] = e * scale


@inlined
def cap_scores(x, start, end, cap):  # type: ignore[no-untyped-def]
    """x[start:end] = cap * tanh(x / cap), in place. float32. tanh(y) = 1 - 2 / (1 + e ** 2y), to 1e-7."""
    to_exponent = np.float32(2 * 1.44269504) / cap
    for i in range(start, end):
        power = exp2(min(max(x[i] * to_exponent, np.float32(-126)), np.float32(126)))
        x[i] = cap - np.float32(2) * cap / (np.float32(1) + power)


@inlined
def softmax(x, start, end, sink):  # type: ignore[no-untyped-def]
    """Softmax of x[start:end] and a sink's score, in place; x[:start] = 0. float32."""
    seen = x[start:end]
    largest, total = exponentials(seen, sink, LOG2_E)
    # Without a sink this is 2 ** -126, which vanishes in the sum: the largest score adds 1.
    total += exp2(larger((sink - largest) * LOG2_E, np.float32(-126)))
    for i in range(start):
        x[i] = np.float32(0)
    rescale(seen, np.float32(1) / total)


@inlined
def add_page(weights, base, page, valid, sums):  # type: ignore[no-untyped-def]
    """sums += weights[base + t] * page[t], summed over the first `valid` tokens; the rest is never read.

    weights: float32 [capacity]; page: items [P, D]; sums: float32 [D].
    """
    D = page.shape[1]
    full = valid - valid % 4
    for t in range(0, full, 4):
        a, b, c, e = weights[base + t], weights[base + t + 1], weights[base + t + 2], weights[base + t + 3]
        for d in range(D):
            sums[d] += (a * load(page[t, d]) + b * load(page[t + 1, d])) + (c * load(page[t + 2, d]) + e * load(page[t + 3, d]))
    for t in range(full, valid):
        a = weights[base + t]
        for d in range(D):
            sums[d] += a * load(page[t, d])


@inlined
def store(source, target):  # type: ignore[no-untyped-def]
    """target = source, rounded to items if it is float32. source: float32 or items [D]; target: items [D]."""
    for d in range(len(target)):
        target[d] = rounded(source[d], target)


@inlined
def keep(source, target, inverse, like):  # type: ignore[no-untyped-def]
    """target = source, rounded to the item type of `like`, then to the cache's type: items or FP8.

    source: float32 or items [D].
    target: [D] of the cache.
    inverse: inverse of the scale.
    """
    for d in range(len(target)):
        target[d] = kept(rounded(source[d], like), inverse, target)


def load(item):  # type: ignore[no-untyped-def]
    """An item or an FP8 number as float32."""
    raise NotImplementedError("for compiled code only")


def rounded(x, target):  # type: ignore[no-untyped-def]
    """A float32 as an item of the array `target`, rounded to nearest, ties to even; an item is unchanged."""
    raise NotImplementedError("for compiled code only")


def kept(item, inverse, target):  # type: ignore[no-untyped-def]
    """An item as an element of the array `target`: unchanged, or multiplied by `inverse` and converted to FP8."""
    raise NotImplementedError("for compiled code only")


@overload(load)
def _load(item):  # type: ignore[no-untyped-def]
    if item == types.int16:
        return lambda item: float_of(np.int32(item) << np.int32(16))
    if item == types.uint8:
        return lambda item: float_of_fp8(item)
    return lambda item: item


@overload(rounded)
def _rounded(x, target):  # type: ignore[no-untyped-def]
    def to_bfloat16(x, target):  # type: ignore[no-untyped-def]
        bits = bits_of(x)
        return np.int16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16))

    return (lambda x, target: x) if x == target.dtype else to_bfloat16


@overload(kept)
def _kept(item, inverse, target):  # type: ignore[no-untyped-def]
    if item == target.dtype:
        return lambda item, inverse, target: item
    return lambda item, inverse, target: fp8_of(load(item) * inverse)
