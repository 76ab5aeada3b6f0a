"""Attention over the paged cache on the CPU: one compiled pass per layer, straight over the pages.

Gathering pages into a dense batch for torch costs as much as the attention itself, because both are bound by memory. Here
norms, rotation, the write into the cache and the attention of decode rows are one function over all rows, which runs on
torch's threads. Prefill chunks, which have work for a matrix product, attend through torch (attention.attend).

bfloat16 is handled as its bits: Numba has no such type. All arithmetic is float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from numba import carray, types
from numba.extending import register_jitable
from numpy.typing import NDArray

from blinkpy.config import ConfigError
from blinkpy.kernels.njit_cache import cached_cfunc
from blinkpy.kv.state import DECODE_ROWS, MAX_CONTEXT, ROWS, TOKENS, Batch
from blinkpy.models.architecture import Architecture
from blinkpy.models.attention import attend, prompt_rows
from blinkpy.models.cache import PagedCache
from blinkpy.models.cpu_threads import name_thread_calls, run_on_threads, team_size
from blinkpy.models.intrinsics import (
    FAST,
    bits_of,
    exp2,
    float_of,
    pointer_to,
    prefetch,
    team_members,
    thread_number,
)
from blinkpy.models.weights import LayerWeights

# Words of the argument block: int64, pointers as integers. One row per layer.
_NAMES = (
    *("qkv", "out", "keys", "values", "q_norm", "k_norm", "cos", "sin", "positions", "cache_slots", "row_slots"),
    *("contexts", "page_table", "scratch", "rows", "decode_rows", "tokens", "table_width", "num_pages", "heads"),
    *("kv_heads", "half", "window", "context_room", "eps_bits"),
)
WORDS = len(_NAMES)
WORD = {name: index for index, name in enumerate(_NAMES)}
W_QKV, W_OUT, W_KEYS, W_VALUES, W_Q_NORM, W_K_NORM = (WORD[n] for n in ("qkv", "out", "keys", "values", "q_norm", "k_norm"))
W_COS, W_SIN, W_POSITIONS, W_CACHE_SLOTS = (WORD[n] for n in ("cos", "sin", "positions", "cache_slots"))
W_ROW_SLOTS, W_CONTEXTS, W_TABLE, W_SCRATCH = (WORD[n] for n in ("row_slots", "contexts", "page_table", "scratch"))
W_ROWS, W_DECODE_ROWS, W_TOKENS, W_TABLE_WIDTH = (WORD[n] for n in ("rows", "decode_rows", "tokens", "table_width"))
W_PAGES, W_HEADS, W_KV_HEADS, W_HALF = (WORD[n] for n in ("num_pages", "heads", "kv_heads", "half"))
W_WINDOW, W_ROOM, W_EPS = (WORD[n] for n in ("window", "context_room", "eps_bits"))


@register_jitable(fastmath=FAST, error_model="numpy")
def _largest(x, start, end):  # type: ignore[no-untyped-def]
    result = x[start]
    for i in range(start, end):
        result = max(result, x[i])
    return result


@register_jitable(fastmath=FAST, error_model="numpy")
def _exponentials(x, start, end, largest):  # type: ignore[no-untyped-def]
    """x[start:end] = exp(x - largest), in place; returns their sum."""
    total = np.float32(0)
    for i in range(start, end):
        value = exp2(max((x[i] - largest) * np.float32(1.44269504), np.float32(-126)))
        x[i] = value
        total += value
    return total


class _Compiled(NamedTuple):
    """address: of the C function void(int64 *arguments). keep: what has to stay alive with it."""

    address: int
    keep: Any


@functools.lru_cache(maxsize=32)
def _compile(bfloat16: bool, page_size: int, head_dim: int) -> _Compiled:
    """The pass for one page size and head size; both are constants in it, so that inner loops have known lengths."""
    P, D = page_size, head_dim
    LINE = 64 // (2 if bfloat16 else 4)  # elements in a cache line
    item = np.int16 if bfloat16 else np.float32
    threaded = name_thread_calls()

    if bfloat16:

        @register_jitable(inline="always")
        def load(x):  # type: ignore[no-untyped-def]
            return float_of(np.int32(x) << np.int32(16))

        @register_jitable(inline="always")
        def store(x):  # type: ignore[no-untyped-def]
            bits = bits_of(x)  # round to nearest, ties to even
            return np.int16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16))
    else:

        @register_jitable(inline="always")
        def load(x):  # type: ignore[no-untyped-def]
            return x

        @register_jitable(inline="always")
        def store(x):  # type: ignore[no-untyped-def]
            return x

    @register_jitable(fastmath=FAST, error_model="numpy")
    def prepare(source, norm, use_norm, eps, cos, sin, half, target):  # type: ignore[no-untyped-def]
        """target[:] = one head of a query or key, normalised if the model does that, and rotated. float32 [head_dim]."""
        scale = np.float32(1)
        if use_norm:
            square = np.float32(0)
            for d in range(D):
                x = load(source[d])
                square += x * x
            scale = np.float32(1) / np.sqrt(square / np.float32(D) + eps)
            for d in range(D):
                target[d] = load(source[d]) * scale * load(norm[d])
        else:
            for d in range(D):
                target[d] = load(source[d])
        for d in range(half):
            low, high = target[d], target[d + half]
            target[d] = low * cos[d] - high * sin[d]
            target[d + half] = high * cos[d] + low * sin[d]

    @register_jitable(fastmath=FAST, error_model="numpy")
    def scores_of_page(q, page, scale, out, base):  # type: ignore[no-untyped-def]
        """out[base:base + P] = scale * q . each key. Four keys at a time keep four independent sums going."""
        for t in range(0, P, 4):
            a = np.float32(0)
            b = np.float32(0)
            c = np.float32(0)
            e = np.float32(0)
            for d in range(D):
                x = q[d]
                a += x * load(page[t, d])
                b += x * load(page[t + 1, d])
                c += x * load(page[t + 2, d])
                e += x * load(page[t + 3, d])
            out[base + t] = a * scale
            out[base + t + 1] = b * scale
            out[base + t + 2] = c * scale
            out[base + t + 3] = e * scale

    @register_jitable(fastmath=FAST, error_model="numpy")
    def add_page(weights, base, page, valid, out):  # type: ignore[no-untyped-def]
        """out += sum of weights[base + t] * page[t] over the first `valid` tokens; what lies behind them is never read."""
        full = valid - valid % 4
        for t in range(0, full, 4):
            a, b, c, e = weights[base + t], weights[base + t + 1], weights[base + t + 2], weights[base + t + 3]
            for d in range(D):
                out[d] += (a * load(page[t, d]) + b * load(page[t + 1, d])) + (
                    c * load(page[t + 2, d]) + e * load(page[t + 3, d])
                )
        for t in range(full, valid):
            a = weights[base + t]
            for d in range(D):
                out[d] += a * load(page[t, d])

    @register_jitable
    def fetch(side, index):  # type: ignore[no-untyped-def]
        """Ask for a page of one head: the processor can't foresee where a sequence goes on. Saves a third of the time."""
        start = index * (P * D)
        for i in range(start, start + P * D, LINE):
            prefetch(side, i)

    @register_jitable(fastmath=FAST, error_model="numpy")
    def attend_heads(q, keys, values, pages, context, window, first, last, group, scores, sums, scale):  # type: ignore[no-untyped-def]
        """Attention of one token for key heads [first, last). q, sums: float32 [heads, D]; scores: float32 [heads, room]."""
        start = max(context - window, 0) if window > 0 else 0
        kv_heads = keys.shape[1]
        start_page = start // P
        base = start_page * P  # scores are stored from this token on
        end_page = (context + P - 1) // P
        for p in range(start_page, end_page):
            page, coming = np.int64(pages[p]), np.int64(pages[min(p + 1, end_page - 1)])
            for h in range(first, last):
                fetch(keys, coming * kv_heads + h)
                for g in range(h * group, (h + 1) * group):
                    scores_of_page(q[g], keys[page, h], scale, scores[g], p * P - base)
        for g in range(first * group, last * group):
            row = scores[g]
            total = _exponentials(row, start - base, context - base, _largest(row, start - base, context - base))
            inverse = np.float32(1) / total
            for t in range(start - base):
                row[t] = np.float32(0)
            for t in range(start - base, context - base):
                row[t] *= inverse
            for d in range(D):
                sums[g, d] = np.float32(0)
        for p in range(start_page, end_page):
            page, coming = np.int64(pages[p]), np.int64(pages[min(p + 1, end_page - 1)])
            valid = min(P, context - p * P)
            for h in range(first, last):
                fetch(values, coming * kv_heads + h)
                for g in range(h * group, (h + 1) * group):
                    add_page(scores[g], p * P - base, values[page, h], valid, sums[g])

    def run(arguments):  # type: ignore[no-untyped-def]
        w = carray(arguments, (WORDS,))
        if threaded:
            thread, threads_here = np.int64(thread_number()), np.int64(team_members())
        else:
            thread, threads_here = np.int64(0), np.int64(1)
        rows, decode_rows, tokens = w[W_ROWS], w[W_DECODE_ROWS], w[W_TOKENS]
        heads, kv_heads, half, window, room = w[W_HEADS], w[W_KV_HEADS], w[W_HALF], w[W_WINDOW], w[W_ROOM]
        width = heads + 2 * kv_heads
        group = heads // kv_heads
        eps = float_of(np.int32(w[W_EPS]))
        scale = np.float32(1) / np.sqrt(np.float32(D))
        qkv = carray(pointer_to(w[W_QKV]), (tokens, width, D), item)
        out = carray(pointer_to(w[W_OUT]), (tokens, heads, D), item)
        keys = carray(pointer_to(w[W_KEYS]), (w[W_PAGES], kv_heads, P, D), item)
        values = carray(pointer_to(w[W_VALUES]), (w[W_PAGES], kv_heads, P, D), item)
        use_norm = w[W_Q_NORM] != 0
        q_norm = carray(pointer_to(w[W_Q_NORM]), (D,), item)
        k_norm = carray(pointer_to(w[W_K_NORM]), (D,), item)
        limit = np.int64(1) << 40  # tables are indexed by positions, which the scheduler keeps in range
        cos = carray(pointer_to(w[W_COS]), (limit // max(half, 1), half), np.float32)
        sin = carray(pointer_to(w[W_SIN]), (limit // max(half, 1), half), np.float32)
        positions = carray(pointer_to(w[W_POSITIONS]), (tokens,), np.int32)
        cache_slots = carray(pointer_to(w[W_CACHE_SLOTS]), (tokens,), np.int32)
        row_slots = carray(pointer_to(w[W_ROW_SLOTS]), (rows,), np.int32)
        contexts = carray(pointer_to(w[W_CONTEXTS]), (rows,), np.int32)
        table = carray(pointer_to(w[W_TABLE]), (limit // w[W_TABLE_WIDTH], w[W_TABLE_WIDTH]), np.int32)
        # Scratch of this thread: queries, sums and scores of one token, float32.
        own = heads * (2 * D + room)
        scratch = carray(pointer_to(w[W_SCRATCH] + thread * own * 4), (own,), np.float32)
        q = scratch[: heads * D].reshape(heads, D)
        sums = scratch[heads * D : 2 * heads * D].reshape(heads, D)
        scores = scratch[2 * heads * D :].reshape(heads, room)

        # A unit of work is a token with some of its key heads: all of them when there are tokens enough for the threads.
        parts = np.int64(1) if tokens >= 2 * threads_here else kv_heads
        step = kv_heads // parts
        for unit in range(thread, tokens * parts, threads_here):
            token = unit // parts
            first = (unit - token * parts) * step
            last = first + step
            position, place = np.int64(positions[token]), np.int64(cache_slots[token])
            for h in range(first, last):
                for g in range(h * group, (h + 1) * group):
                    prepare(qkv[token, g], q_norm, use_norm, eps, cos[position], sin[position], half, q[g])
                # Keys pass through the sums' memory, which is not in use yet.
                prepare(qkv[token, heads + h], k_norm, use_norm, eps, cos[position], sin[position], half, sums[h])
                key, value = keys[place // P, h, place % P], values[place // P, h, place % P]
                for d in range(D):
                    key[d] = store(sums[h, d])
                    value[d] = qkv[token, heads + kv_heads + h, d]
            if token < decode_rows:
                attend_heads(
                    q,
                    keys,
                    values,
                    table[row_slots[token]],
                    np.int64(contexts[token]),
                    window,
                    first,
                    last,
                    group,
                    scores,
                    sums,
                    scale,
                )
                for g in range(first * group, last * group):
                    for d in range(D):
                        out[token, g, d] = store(sums[g, d])
            else:
                for g in range(first * group, last * group):
                    for d in range(D):
                        qkv[token, g, d] = store(q[g, d])

    kind, key = types.void(types.CPointer(types.int64)), (bfloat16, page_size, head_dim, threaded)
    compiled = cached_cfunc(run, kind, key, error_model="numpy", fastmath=FAST)
    return _Compiled(compiled.address, compiled)


class CpuAttention:
    """The same as TorchAttention, on the CPU and fast. max_model_len, max_tokens: largest context and batch (tokens)."""

    def __init__(
        self,
        a: Architecture,
        layers: list[LayerWeights],
        cache: PagedCache,
        cos: torch.Tensor,
        sin: torch.Tensor,
        max_model_len: int,
        max_tokens: int,
    ):
        if cache.page_size % 4:
            raise ConfigError(f"page_size must be a multiple of 4 on the CPU, not {cache.page_size}")
        self.a, self.cache, self.threads = a, cache, team_size()
        dtype = cache.keys[0].dtype
        self.compiled = _compile(dtype == torch.bfloat16, cache.page_size, a.head_dim)
        room = self.room = -(-max_model_len // cache.page_size) * cache.page_size
        self.out = torch.empty(max_tokens, a.heads, a.head_dim, dtype=dtype)
        self.scratch = torch.empty(self.threads, a.heads * (2 * a.head_dim + room), dtype=torch.float32)
        self.kept = (layers, cos, sin)  # the argument block points into them
        block = np.zeros((a.layers, len(WORD)), np.int64)
        for name, value in {
            "out": self.out.data_ptr(),
            "cos": cos.data_ptr(),
            "sin": sin.data_ptr(),
            "scratch": self.scratch.data_ptr(),
            "num_pages": cache.num_pages,
            "heads": a.heads,
            "kv_heads": a.kv_heads,
            "half": a.rope.rotary_dim // 2,
            "context_room": room,
            "eps_bits": int(np.float32(a.rms_norm_eps).view(np.int32)),
        }.items():
            block[:, WORD[name]] = value
        for layer, weights in enumerate(layers):
            block[layer, W_KEYS], block[layer, W_VALUES] = cache.keys[layer].data_ptr(), cache.values[layer].data_ptr()
            block[layer, W_WINDOW] = a.windows[layer]
            if weights.q_norm is not None and weights.k_norm is not None:
                block[layer, W_Q_NORM], block[layer, W_K_NORM] = weights.q_norm.data_ptr(), weights.k_norm.data_ptr()
        self.block = block
        self.addresses = [block[layer].ctypes.data for layer in range(a.layers)]

    def begin(self, batch: Batch, page_table: NDArray[np.int32]) -> None:
        """Take over the metadata of one step. page_table: int32 [slots, pages]."""
        block, counts = self.block, batch.counts
        self.tokens = int(counts[TOKENS])
        # The compiled pass trusts these: without the check a mistake elsewhere would write beyond our memory.
        if self.tokens > len(self.out) or counts[MAX_CONTEXT] > self.room or not page_table.flags.c_contiguous:
            raise ValueError(f"{self.tokens} tokens with contexts up to {counts[MAX_CONTEXT]} are more than was allocated")
        block[:, W_ROWS], block[:, W_DECODE_ROWS], block[:, W_TOKENS] = counts[ROWS], counts[DECODE_ROWS], self.tokens
        block[:, W_POSITIONS], block[:, W_CACHE_SLOTS] = batch.positions.ctypes.data, batch.cache_slots.ctypes.data
        block[:, W_ROW_SLOTS], block[:, W_CONTEXTS] = batch.row_slots.ctypes.data, batch.context_lengths.ctypes.data
        block[:, W_TABLE], block[:, W_TABLE_WIDTH] = page_table.ctypes.data, page_table.shape[1]
        self.prompts = [
            (start, end, context, torch.from_numpy(pages.astype(np.int64)))
            for start, end, context, pages in prompt_rows(batch, page_table, int(counts[DECODE_ROWS]))
        ]

    def run(self, layer: int, qkv: torch.Tensor) -> torch.Tensor:
        """qkv: [tokens, q_size + 2 * kv_size], contiguous, changed in place.

        Returns [tokens, q_size], valid until the next run.
        """
        a, out = self.a, self.out[: self.tokens]
        self.block[layer, W_QKV] = qkv.data_ptr()
        run_on_threads(self.compiled.address, self.addresses[layer], self.threads)
        if self.prompts:
            q = qkv[:, : a.q_size].unflatten(-1, (a.heads, a.head_dim))
            keys, values = self.cache.keys[layer], self.cache.values[layer]
            for start, end, context, pages in self.prompts:
                attend(q[start:end], keys, values, pages, context, a.windows[layer], out[start:end])
        return out.view(self.tokens, a.q_size)
