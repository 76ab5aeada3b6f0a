"""The tuner of the linear layers: `python benchmarks/parts/kernel_times.py --tune`.

All candidates are compiled first, in parallel processes that only fill Triton's cache; then each is timed against cuBLAS,
and the fastest is stored. From 2 to 16 rows the work is the same, so those row counts share one measurement.
"""

# ruff: noqa: B023

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton

from blinkpy.kernels.linear.linear import LinearWorkspace, linear
from blinkpy.kernels.linear.linear_config import LinearConfig, LinearTable, key

MEASURED_ROWS = {1: (1,), 16: (2, 4, 8, 16), 32: (32,), 64: (64,), 128: (128,), 256: (256,), 448: (448,)}
"""Rows of the measurement -> rows of the table that it stands for."""
SHARED_MEMORY = 227 * 1024
CACHE_BYTES = 300_000_000
CUBLAS = LinearConfig(kind="cublas")
CUBLAS_HALVES = LinearConfig(kind="cublas-halves")
PRINTED = 3
"""Best candidates that are printed."""
MARGIN = 1.02
"""cuBLAS must be this much faster to be chosen: it does not fuse what lies around the layer."""


class Layer(NamedTuple):
    """A linear layer: outputs, inputs, whether a norm is before it, whether SwiGLU is fused, and the dtype of its result."""

    n: int
    k: int
    norm: bool
    swiglu: bool
    result: torch.dtype

    @property
    def weight_rows(self) -> int:
        return 2 * self.n if self.swiglu else self.n


def candidates(layer: Layer, rows: int, sm_count: int) -> Iterator[LinearConfig]:
    """A few dozen configurations around what is known to be good, for a GPU with so many multiprocessors."""
    halves = 2 if layer.swiglu else 1
    if rows == 1:
        for block_k in (1024, 2048, 4096):
            for kilobytes, warps in ((8, 4), (16, 4), (16, 8), (32, 8), (64, 16)):
                block_n = kilobytes * 512 // block_k // halves
                if 1 <= block_n <= 16 and layer.k % block_k == 0:
                    yield LinearConfig("gemv", 16, block_n, block_k, 1, warps)
        return
    # (block_n, block_k, split_k, swap, warps)
    if rows > 64:
        block_ms = (128, 256) if rows == 256 else (128,)
        shapes = [
            (64, 64, 1, False, 4), (64, 64, 1, False, 8), (64, 64, 2, False, 8), (128, 64, 1, False, 8), (128, 64, 2, False, 8),
            (128, 64, 4, False, 8),
        ]  # fmt: skip
    elif rows > 16:
        block_ms = (rows,)
        shapes = [
            (32, 128, 1, False, 4), (32, 256, 1, False, 4), (64, 64, 1, False, 4), (64, 128, 1, False, 4), (64, 64, 2, False, 4),
            (64, 128, 2, False, 4), (64, 128, 1, True, 4), (64, 128, 2, True, 4), (64, 128, 4, True, 4), (128, 64, 1, True, 4),
            (128, 64, 2, True, 4), (128, 64, 4, True, 4), (128, 64, 8, True, 4), (128, 128, 1, True, 4), (128, 64, 2, True, 8),
            (128, 128, 2, True, 8), (128, 128, 4, True, 4), (128, 64, 1, True, 8),
        ]  # fmt: skip
    else:
        block_ms = (16,)
        shapes = [
            (16, 256, 1, False, 4), (16, 256, 2, False, 4), (32, 128, 1, False, 4), (32, 256, 1, False, 4),
            (32, 256, 2, False, 4), (32, 256, 4, False, 4), (64, 64, 1, False, 8), (64, 128, 1, False, 4), (64, 128, 1, False, 8),
            (64, 128, 2, True, 4), (64, 256, 1, True, 4), (64, 256, 1, False, 8),
        ]  # fmt: skip
    for block_m, (block_n, block_k, split_k, swap, warps) in itertools.product(block_ms, shapes):
        programs = layer.n // block_n * split_k * max(1, rows // block_m)
        if block_k * split_k > layer.k or block_n > layer.n or (split_k > 1 and programs > 600):
            continue
        tile = (block_m + halves * block_n) * block_k * 2
        for share in (100_000, 200_000):  # of shared memory: two programs on a multiprocessor, or one
            stages = min(10, share // tile)
            if stages >= 3:
                yield LinearConfig("triton", block_m, block_n, block_k, split_k, warps, stages, swap)
    if rows >= 64:
        yield from tma_candidates(layer, rows, sm_count)


def tma_candidates(layer: Layer, rows: int, sm_count: int) -> Iterator[LinearConfig]:
    """Tiles for the tensor memory accelerator, of widths that leave few multiprocessors without one in the last wave."""
    halves = 2 if layer.swiglu else 1
    splits = (1,) if layer.swiglu or layer.result == torch.float32 else (1, 2, 4)
    for block_m, block_n, block_k, split_k in itertools.product((64, 128), (64, 96, 112, 128, 224, 256), (64, 128), splits):
        waves = -(-rows // block_m) * -(-layer.n // block_n) * split_k / sm_count
        width, columns = block_n * halves, block_k * split_k
        if block_m > rows or width > 256 or layer.k % columns or not 0.6 < waves < 8 or waves / -(-waves // 1) < 0.7:
            continue
        stages = min(8, 222_000 // ((block_m + width) * block_k * 2))
        if stages >= 3:
            warps = 8 if block_m * width > 128 * 128 else 4
            yield LinearConfig("tma", block_m, block_n, block_k, split_k, warps, stages, early=True)


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
        result = out
        if config.kind == "tma" and config.split_k > 1:  # the next norm adds the parts up
            result = workspace.partial[: config.split_k * out.numel()].view(config.split_k, *out.shape)
        for weight in weights:
            linear(x, weight, result, config, workspace, counts, norm=norm, swiglu=layer.swiglu, pdl=pdl)

    return run, copies


def compile_candidate(job: tuple[Layer, int, LinearConfig, bool]) -> bool:
    """In a worker process: compile one candidate into Triton's cache. False where it does not fit the GPU or spills."""
    aot_compile = importlib.import_module("benchmarks.common.aot_compile")
    triton.runtime.driver.set_active(aot_compile.CompileOnlyDriver())
    layer, rows, config, pdl = job
    run, _ = prepare(layer, rows, "meta", pdl)
    gate = aot_compile.Gate()
    gate.run("candidate", lambda: run(config))
    return not any(variant.problems() for variant in gate.variants)


def tune(
    models: dict[str, Any], gpu: str, about: dict[str, Any], graph_ms: Callable[..., float], pdl: bool, rows_wanted: list[int]
) -> Path:
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
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    jobs = [
        (layer, rows, config, pdl) for layer in layers for rows in rows_wanted for config in candidates(layer, rows, sm_count)
    ]
    print(f"compiling {len(jobs)} candidates", flush=True)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        fits = list(pool.map(compile_candidate, jobs, chunksize=8))
    usable = [job for job, fit in zip(jobs, fits, strict=True) if fit]
    for layer in layers:
        for rows in rows_wanted:
            run, copies = prepare(layer, rows, "cuda", pdl)
            times = {CUBLAS: graph_ms(lambda: run(CUBLAS), 10)}
            other = times[CUBLAS] / copies * 1e3
            if layer.swiglu and rows > 64:
                times[CUBLAS_HALVES] = graph_ms(lambda: run(CUBLAS_HALVES), 10) * MARGIN
            times[CUBLAS] *= MARGIN
            for measured, measured_rows, config, _ in usable:
                if measured == layer and measured_rows == rows:
                    times[config] = graph_ms(lambda: run(config), 10)
            ranked = sorted(times, key=lambda config: times[config])
            best = ranked[0]
            print(f"{layer.weight_rows}x{layer.k} rows {rows}: cuBLAS {other:.1f} us")
            for config in ranked[:PRINTED]:
                us = times[config] / copies * 1e3
                print(f"{us:9.1f} us {layer.weight_rows * layer.k * 2 / us / 1e3:6.0f} GB/s  {config}", flush=True)
            for row_count in MEASURED_ROWS[rows]:
                table.entries[key(layer.n, layer.k, row_count, torch.bfloat16, layer.swiglu)] = best
    return table.save(gpu, about | {"dependent_launches": pdl})
