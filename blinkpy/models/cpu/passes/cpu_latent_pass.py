"""The compiled pass of cpu_latent.py: latent attention of decode rows over the paged cache.

A pass is compiled for each item type, page size P, cached size W and rank R, as in cpu_attention_pass.py. A
page is read once for all heads of a unit of work.
"""

import functools
from typing import Any

import numpy as np
from numba import carray, types

from blinkpy.device.compile_cache import cached_cfunc
from blinkpy.models.cpu.passes.cpu_attention_pass import fetch, inlined, load, score_page, softmax, store
from blinkpy.models.cpu.passes.njit_math import FAST, pointer_to, take_number

_ADDRESSES = (
    "queries",  # items [tokens, heads, W]
    "out",  # items [tokens, heads, R]; the rows of decode tokens are written
    "cache",  # items [num_pages, P, W], of the layer
    *("row_slots", "contexts"),  # int32 [rows]
    "page_table",  # int32 [slots, table_width]
    "query",  # float32 [threads, heads, W], scratch
    "sums",  # float32 [threads, heads, R], scratch
    "scores",  # float32 [threads, heads, capacity], scratch
    "begun",  # int64 [2], numbers of threads and units of work that have begun: 0 before each pass
    "progress",  # int64, counts units of work, for the watchdog
)
_SIZES = (
    *("tokens", "rows", "decode_rows"),  # decode rows come first, and are one token each
    *("threads", "heads", "num_pages", "slots", "table_width"),
    "step",  # heads of a unit of work
    "capacity",  # tokens of the largest context, in whole pages
)
ARGUMENTS = np.dtype([*((name, np.int64) for name in (*_ADDRESSES, *_SIZES)), ("scale", np.float32)], align=True)
"""The arguments of the pass for one layer of one step."""


@functools.lru_cache(maxsize=16)
def compile_pass(bfloat16: bool, page_size: int, cached: int, rank: int) -> Any:
    """Compile the pass for one item type (bfloat16 or float32), page size (a multiple of 4), size of a cached
    vector, and number of its first elements that are values.

    Returns Numba's CFunc, whose `address` is of a C function void(ARGUMENTS *), which every thread of a team
    calls.
    """
    P, W, R, item = page_size, cached, rank, np.int16 if bfloat16 else np.float32

    def latent_pass(arguments):  # type: ignore[no-untyped-def]
        a = carray(arguments, (1,), ARGUMENTS)[0]
        thread = take_number(a.begun)
        queries = carray(pointer_to(a.queries), (a.tokens, a.heads, W), item)
        out = carray(pointer_to(a.out), (a.tokens, a.heads, R), item)
        cache = carray(pointer_to(a.cache), (a.num_pages, P, W), item)
        row_slots = carray(pointer_to(a.row_slots), (a.rows,), np.int32)
        contexts = carray(pointer_to(a.contexts), (a.rows,), np.int32)
        page_table = carray(pointer_to(a.page_table), (a.slots, a.table_width), np.int32)
        q = carray(pointer_to(a.query), (a.threads, a.heads, W), np.float32)[thread]
        sums = carray(pointer_to(a.sums), (a.threads, a.heads, R), np.float32)[thread]
        scores = carray(pointer_to(a.scores), (a.threads, a.heads, a.capacity), np.float32)[thread]
        parts = (a.heads + a.step - 1) // a.step
        unit = take_number(a.begun + 8)
        while unit < a.decode_rows * parts:
            row = unit // parts
            first = (unit - row * parts) * a.step
            last = min(first + a.step, a.heads)
            context, pages = np.int64(contexts[row]), page_table[row_slots[row]]
            end = (context + P - 1) // P
            for h in range(first, last):
                for d in range(W):
                    q[h, d] = load(queries[row, h, d])
                for d in range(R):
                    sums[h, d] = np.float32(0)
            for p in range(end):
                page = np.int64(pages[p])
                fetch(cache[np.int64(pages[min(p + 1, end - 1)])])
                for h in range(first, last):
                    score_page(q[h], cache[page], a.scale, scores[h], p * P)
            for h in range(first, last):
                softmax(scores[h], 0, context, np.float32(-np.inf))
            for p in range(end):
                page, valid = np.int64(pages[p]), min(P, context - p * P)
                fetch(cache[np.int64(pages[min(p + 1, end - 1)])])
                for h in range(first, last):
                    add_latents(scores[h], p * P, cache[page], valid, sums[h])
            for h in range(first, last):
                store(sums[h], out[row, h])
            take_number(a.progress)
            unit = take_number(a.begun + 8)

    key = (bfloat16, page_size, cached, rank)
    return cached_cfunc(latent_pass, types.void(types.voidptr), key, error_model="numpy", fastmath=FAST)


@inlined
def add_latents(weights, base, page, valid, sums):  # type: ignore[no-untyped-def]
    """sums += weights[base + t] * the first elements of page[t], summed over the first `valid` tokens; the rest
    is never read.

    weights: float32 [capacity]; page: items [P, W]; sums: float32 [R].
    """
    R, full = len(sums), valid - valid % 4
    for t in range(0, full, 4):
        a, b, c, e = weights[base + t], weights[base + t + 1], weights[base + t + 2], weights[base + t + 3]
        for d in range(R):
            sums[d] += (a * load(page[t, d]) + b * load(page[t + 1, d])) + (c * load(page[t + 2, d]) + e * load(page[t + 3, d]))
    for t in range(full, valid):
        a = weights[base + t]
        for d in range(R):
            sums[d] += a * load(page[t, d])
