"""The tuner of the linear layers: `python benchmarks/parts/kernel_times.py --tune`.

All candidates are compiled first, in parallel processes that only fill Triton's cache; then each is timed against cuBLAS,
and the fastest is stored. From 2 to 16 rows the work is the same, so those row counts share one measurement.
"""

# ruff: noqa: B023

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import aot_compile
from blinkpy.kernels.linear.linear import VARIANTS, leaves_partials, linear
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_table import LinearTable, key
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearShape, LinearWorkspace

MEASURED_ROWS = {1: (1,), 16: (2, 4, 8, 16), 32: (32,), 64: (64,), 128: (128,), 256: (256,), 448: (448,)}
"""Rows of the measurement -> rows of the table that it stands for."""
CACHE_BYTES = 300_000_000
CUBLAS = LinearConfig("cublas")
PRINTED = 3
"""Best candidates that are printed."""
MARGIN = 1.02
"""A variant without kernels of ours must be this much faster to be chosen: it does not fuse what is around the layer."""


def prepare(shape: LinearShape, device: str, pdl: bool) -> tuple[Callable[[LinearConfig], None], int]:
    """A function that runs the layer over several copies of its weights, more than the cache holds; and their number."""
    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    copies = 1 if device == "meta" else max(2, CACHE_BYTES // (shape.weight_rows * shape.k * 2))
    weights = [torch.empty(shape.weight_rows, shape.k, **make).normal_(std=shape.k**-0.5) for _ in range(copies)]
    x, scale = torch.empty(shape.rows, shape.k, **make).normal_(), torch.ones(shape.k, **make)
    out = torch.zeros(shape.rows, shape.n, dtype=shape.result, device=device)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    scratch = shape.rows * (shape.k + shape.weight_rows)
    workspace = LinearWorkspace.allocate(device, torch.bfloat16, partial=2**24, rows=scratch)
    norm = (scale, 1e-5) if shape.norm else None

    def run(config: LinearConfig) -> None:
        result = out
        if leaves_partials(config):  # the next norm adds them up
            result = workspace.partial[: config.split_k * out.numel()].view(config.split_k, *out.shape)
        for weight in weights:
            linear(LinearCall(x, weight, result, workspace, counts, norm=norm, swiglu=shape.swiglu, pdl=pdl), config)

    return run, copies


def compile_candidate(job: tuple[LinearShape, LinearConfig, bool]) -> bool:
    """In a worker process: compile one candidate into Triton's cache. False where it does not fit the GPU or spills."""
    shape, config, pdl = job
    run, _ = prepare(shape, "meta", pdl)
    return aot_compile.fits(lambda: run(config))


def layer_shapes(models: dict[str, Any], rows_wanted: list[int]) -> list[LinearShape]:
    """The linear layers of `models`, each once, at each row count."""
    found = {
        LinearShape(rows, n, k, norm, swiglu=swiglu, result=torch.float32 if name in ("lm_head", "router") else torch.bfloat16)
        for model in models.values()
        for name, (n, k, norm, swiglu) in model.linears().items()
        for rows in rows_wanted
    }
    return sorted(found, key=str)


def tune(
    models: dict[str, Any], gpu: str, about: dict[str, Any], graph_ms: Callable[..., float], pdl: bool, rows_wanted: list[int]
) -> Path:
    """Measure every linear layer of `models`; returns the path of the table. Its entries of other shapes are kept."""
    table = LinearTable.load(gpu)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    jobs = [
        (shape, config, pdl)
        for shape in layer_shapes(models, rows_wanted)
        for variant in VARIANTS.values()
        if variant.supports(shape)
        for config in variant.candidates(shape, sm_count)
    ]
    print(f"compiling {len(jobs)} candidates", flush=True)
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        fits = list(pool.map(compile_candidate, jobs, chunksize=8))
    usable = [job for job, fit in zip(jobs, fits, strict=True) if fit]
    for shape in dict.fromkeys(shape for shape, *_ in jobs):
        run, copies = prepare(shape, "cuda", pdl)
        times = {config: graph_ms(lambda: run(config), 10) for measured, config, _ in usable if measured == shape}
        other, size = times[CUBLAS] / copies * 1e3, shape.weight_rows * shape.k * 2
        ranked = sorted(times, key=lambda config: times[config] * (1 if VARIANTS[config.variant].kernels else MARGIN))
        print(f"{shape.weight_rows}x{shape.k} rows {shape.rows}: cuBLAS {other:.1f} us")
        for config in ranked[:PRINTED]:
            us = times[config] / copies * 1e3
            print(f"{us:9.1f} us {size / us / 1e3:6.0f} GB/s  {config}", flush=True)
        for row_count in MEASURED_ROWS[shape.rows]:
            table.entries[key(shape.n, shape.k, row_count, torch.bfloat16, shape.swiglu)] = ranked[0]
    return table.save(gpu, about | {"dependent_launches": pdl})
