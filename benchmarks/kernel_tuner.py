"""The tuner of the linear layers: `python benchmarks/kernels.py --tune`.

All candidates are compiled first, in parallel processes that only fill Triton's cache; then each is timed at 16, 32 and
64 rows against cuBLAS, and the fastest is stored. Up to 16 rows the work is the same, so those row counts share one
entry's measurement.
"""

# ruff: noqa: B023

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from blinkpy.kernels.linear import LinearWorkspace, linear
from blinkpy.kernels.linear_config import LinearConfig, LinearTable, key

MEASURED_ROWS = {16: (1, 2, 4, 8, 16), 32: (32,), 64: (64,)}
"""Rows of the measurement -> rows of the table that it stands for."""
SHARED_MEMORY = 227 * 1024
CACHE_BYTES = 300_000_000
CUBLAS = LinearConfig(kind="cublas")
MARGIN = 1.02
"""cuBLAS must be this much faster to be chosen: it does not fuse what lies around the layer."""


class Layer(NamedTuple):
    """A linear layer: outputs, inputs, what is fused into it, and the dtype of its result."""

    n: int
    k: int
    norm: bool
    swiglu: bool
    result: torch.dtype

    @property
    def weight_rows(self) -> int:
        return 2 * self.n if self.swiglu else self.n


def candidates(layer: Layer, rows: int) -> Iterator[LinearConfig]:
    """A few dozen configurations around what is known to be good."""
    block_m = rows if rows > 16 else 16
    for block_n, block_k, split_k, swap in [
        (16, 256, 1, False), (32, 128, 1, False), (32, 256, 1, False), (64, 128, 1, False), (64, 128, 1, True),
        (64, 256, 1, True), (16, 256, 2, False), (32, 256, 2, False), (64, 128, 2, True), (32, 256, 4, False),
        (64, 128, 4, True), (128, 64, 1, True), (128, 64, 4, True), (64, 64, 1, False),
    ]:  # fmt: skip
        if split_k > 1 and (layer.norm or layer.n > 16_384):
            continue
        if block_k * split_k > layer.k or block_n > layer.n:
            continue
        for stages in (3, 4, 6):
            used = stages * (block_m + (2 if layer.swiglu else 1) * block_n) * block_k * 2
            if 40_000 < used < SHARED_MEMORY * 0.9:
                yield LinearConfig("triton", block_m, block_n, block_k, split_k, 4, stages, swap)


def prepare(layer: Layer, rows: int, device: str, pdl: bool) -> tuple[Callable[[LinearConfig], None], int]:
    """A function that runs the layer over several copies of its weights, more than the cache holds; and their number."""
    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    copies = 1 if device == "meta" else max(2, CACHE_BYTES // (layer.weight_rows * layer.k * 2))
    weights = [torch.empty(layer.weight_rows, layer.k, **make).normal_(std=layer.k**-0.5) for _ in range(copies)]
    x, scale = torch.empty(rows, layer.k, **make).normal_(), torch.ones(layer.k, **make)
    out = torch.zeros(rows, layer.n, dtype=layer.result, device=device)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    scratch = rows * (layer.k + layer.weight_rows)
    workspace = LinearWorkspace.allocate(device, torch.bfloat16, partial=2**24, rows=scratch)
    norm = (scale, 1e-5) if layer.norm else None

    def run(config: LinearConfig) -> None:
        for weight in weights:
            linear(x, weight, out, config, workspace, counts, norm=norm, swiglu=layer.swiglu, pdl=pdl)

    return run, copies


def compile_candidate(job: tuple[Layer, int, LinearConfig, bool]) -> bool:
    """In a worker process: compile one candidate into Triton's cache. False where it does not fit the GPU or spills."""
    sys.path[:0] = [str(Path(__file__).parents[1] / "tests" / "kernels")]
    triton_aot = importlib.import_module("triton_aot")
    triton.runtime.driver.set_active(triton_aot.CompileOnlyDriver())
    layer, rows, config, pdl = job
    run, _ = prepare(layer, rows, "meta", pdl)
    gate = triton_aot.Gate()
    gate.run("candidate", lambda: run(config))
    return not any(variant.problems() for variant in gate.variants)


def tune(models: dict[str, Any], gpu: str, about: dict[str, Any], graph_ms: Callable[..., float], pdl: bool) -> Path:
    """Measure every linear layer of `models`; returns the path of the table. Its entries of other shapes are kept."""
    table = LinearTable.load(gpu)
    layers = sorted(
        {
            Layer(*(*shape, torch.float32 if name in ("lm_head", "router") else torch.bfloat16))
            for model in models.values()
            for name, shape in model.linears().items()
        },
        key=str,
    )
    jobs = [(layer, rows, config, pdl) for layer in layers for rows in MEASURED_ROWS for config in candidates(layer, rows)]
    print(f"compiling {len(jobs)} candidates", flush=True)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        fits = list(pool.map(compile_candidate, jobs, chunksize=8))
    usable = [job for job, fit in zip(jobs, fits, strict=True) if fit]
    for layer in layers:
        for rows, stands_for in MEASURED_ROWS.items():
            run, copies = prepare(layer, rows, "cuda", pdl)
            times = {CUBLAS: graph_ms(lambda: run(CUBLAS), 10)}
            other = times[CUBLAS] / copies * 1e3
            times[CUBLAS] *= MARGIN
            for measured, measured_rows, config, _ in usable:
                if measured == layer and measured_rows == rows:
                    times[config] = graph_ms(lambda: run(config), 10)
            best = min(times, key=lambda config: times[config])
            us = times[best] / copies * 1e3
            speed = layer.weight_rows * layer.k * 2 / us / 1e3
            name = f"{layer.weight_rows}x{layer.k} rows {rows}"
            print(f"{name:28}{us:9.1f} us {speed:6.0f} GB/s, cuBLAS {other:.1f} us; {best}", flush=True)
            for row_count in stands_for:
                table.entries[key(layer.n, layer.k, row_count, torch.bfloat16, layer.norm, layer.swiglu)] = best
    return table.save(gpu, about | {"dependent_launches": pdl})
