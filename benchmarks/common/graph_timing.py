"""Times of launches on a GPU, as medians of CUDA graph replays."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable

import torch
import triton


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


def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
    """Normal random bfloat16 numbers on the GPU."""
    return (torch.randn(*shape, device="cuda") * scale).to(torch.bfloat16)


def header(rows: int, tokens: int, decode: int) -> torch.Tensor:
    """A step's header as kernels read it: rows, tokens, decode rows; [8] int64."""
    return torch.tensor([rows, tokens, decode, 0, 0, 0, 0, 0], device="cuda")


def about_tables() -> dict[str, str | None]:
    """What a table of measured configurations says of its origin."""
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    return {**versions, "date": datetime.date.today().isoformat()}
