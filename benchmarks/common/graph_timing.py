"""Times of launches on a GPU: medians of CUDA graph replays, and the read bandwidth that they are held against."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _read(x_ptr: Any, out_ptr: Any, n: Any, BLOCK: tl.constexpr) -> None:
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK):
        at = first + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + tl.program_id(0), tl.sum(total, 0))


def graph_ms(launch: Callable[[], object], replays: int = 30) -> float:
    """Median time of one replay of the captured launches, ms."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch()
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            launch()
        for _ in range(3):
            graph.replay()
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def read_bandwidth() -> float:
    """Best measured read bandwidth, GB/s."""
    x = torch.randn(2**29, device="cuda").view(torch.bfloat16)  # 2 GiB, beyond the cache
    sums = torch.zeros(132 * 16, device="cuda")
    best = 0.0
    for block in (4096, 8192):
        for programs in (132 * 4, 132 * 8, 132 * 16):
            read = partial(_read[(programs,)], x, sums, x.numel(), BLOCK=block, num_warps=8)
            best = max(best, x.numel() * 2 / graph_ms(read) / 1e6)
    return best


def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal random bfloat16 numbers on the GPU."""
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def header(rows: int, tokens: int, decode: int) -> torch.Tensor:
    """A step's header as kernels read it: rows, tokens, decode rows; [8] int64."""
    return torch.tensor([rows, tokens, decode, 0, 0, 0, 0, 0], device="cuda")
