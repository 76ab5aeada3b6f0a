"""The tuner of the linear layers: finds the fastest configuration of each on this GPU and writes the table that is shipped.

    python -m benchmarks.tuning.kernel_tuner
    python -m benchmarks.tuning.kernel_tuner --models Qwen3-8B Qwen3-32B --fp8 rows --rows 1 16 64 --times build/times.json

Models are those of benchmarks/common/model_shapes.py, and of tools/published_models.py by the last part of their hub id. All
candidates are compiled first, in parallel processes that only fill Triton's cache; then each is timed against cuBLAS, and the
fastest is stored. From 2 to 16 rows the work is the same, so those row counts share one measurement.
"""

import argparse
import datetime
import json
import os
import runpy
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import compress
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench_cudagraph

from benchmarks.common import aot_cases, aot_compile
from benchmarks.common.harness import ROOT
from benchmarks.common.model_shapes import SHAPES
from blinkpy.config import ConfigError
from blinkpy.kernels.linear.linear import VARIANTS, can_write_partials, check_config, linear, writes_partials
from blinkpy.kernels.linear.linear_table import LinearTable, key
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearConfig, LinearShape, LinearWorkspace
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_config
from blinkpy.models.weights.parts.weight_parts import layer_parts, outer_parts

MEASURED_ROWS = {
    1: (1,),
    16: (2, 4, 8, 16),
    32: (32,),
    64: (64,),
    128: (128,),
    256: (256,),
    448: (448,),
    2048: (1024, 2048),
}  # to rows of the table
CACHE_BYTES = 300_000_000
CUBLAS = LinearConfig("cublas")
PRINTED = 3  # best candidates
MARGIN = 1.02  # minimum advantage of a library's kernel, which does not fuse the operations around the layer


def prepare(shape: LinearShape, device: str, pdl: bool, copies: int = 0) -> tuple[Callable[[LinearConfig], None], int]:
    """A function that runs the layer over copies of its weights that exceed the cache, unless copies are given; and
    the number of copies. A shape with partials may leave them to the next norm."""
    make: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    copies = 1 if device == "meta" else copies or max(2, CACHE_BYTES // weight_bytes(shape))
    sizes, dtype = (shape.weight_rows, shape.k), shape.dtype
    weights = [torch.empty(*sizes, **make).normal_(std=shape.k**-0.5).to(dtype) for _ in range(copies)]
    x, scale = torch.empty(shape.rows, shape.k, **make).normal_(), torch.ones(shape.k, **make)
    as_stored = x.to(shape.dtype)
    scales = aot_cases.ones_for(shape, device) if shape.fp8 else None
    out = torch.zeros(shape.rows, shape.n, dtype=shape.out_dtype, device=device)
    counts = torch.zeros(8, dtype=torch.int64, device=device)
    scratch = shape.rows * (shape.k + shape.weight_rows)
    workspace = LinearWorkspace.allocate(device, torch.bfloat16, partial=2**24, rows=scratch)
    norm = (scale, 1e-5) if shape.norm else None

    def run(config: LinearConfig) -> None:
        result, quantised = out, VARIANTS[config.variant].quantised_inputs
        given = (as_stored, scales) if quantised or scales is None else (x, scales._replace(x=None))
        if writes_partials(config) or (shape.partials and can_write_partials(config)):  # the next norm sums them
            result = workspace.partial[: config.split_k * out.numel()].view(config.split_k, *out.shape)
        for weight in weights:
            linear(
                LinearCall(given[0], weight, result, workspace, counts, norm=norm, swiglu=shape.swiglu, pdl=pdl, scales=given[1]),
                config,
            )

    return run, copies


def weight_bytes(shape: LinearShape) -> int:
    return shape.weight_rows * shape.k * shape.dtype.itemsize


def compile_candidate(job: tuple[LinearShape, LinearConfig, bool]) -> bool:
    """In a worker process: compile one candidate into Triton's cache. Returns False if it does not fit the GPU or
    spills."""
    shape, config, pdl = job
    run, _ = prepare(shape, "meta", pdl)
    return aot_compile.fits(lambda: run(config))


def compiled(compile_one: Callable[[Any], bool], candidates: list[Any]) -> list[Any]:
    """The candidates that fit the GPU according to compile_one, called in worker processes."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        return list(compress(candidates, pool.map(compile_one, candidates, chunksize=8)))


def layer_us(launch: Callable[[], object], layers: int, rep_ms: int = 20) -> float:
    """Microseconds of one of the `layers` that this launches."""
    return float(do_bench_cudagraph(launch, rep=rep_ms, return_mode="median")) * 1e3 / layers


def about_tables() -> dict[str, str | None]:
    """The origin of a table of measured configurations."""
    versions = {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda}
    return {**versions, "date": datetime.date.today().isoformat()}


def fits(config: LinearConfig, shape: LinearShape) -> bool:
    """Whether a configuration passes its check for a shape."""
    try:
        check_config(config, shape)
    except ConfigError:
        return False
    return True


def described_model(name: str) -> DecoderDescription:
    """The model of a shape's name, or of the last part of a published model's hub id. Raises KeyError."""
    published = runpy.run_path(str(ROOT / "tools" / "published_models.py"))["MODELS"]
    return describe_config((SHAPES | {model.hub_id.split("/")[1]: model.config for model in published})[name])


def layer_shapes(models: list[str], rows_wanted: list[int], fp8: str = "") -> list[LinearShape]:
    """The linear layers of models, each once, at each row count. fp8: those that are FP8, with scales for "rows" or "blocks"."""
    found = set()
    for described in map(described_model, models):
        for part in [*layer_parts(described, 0), *outer_parts(described)]:
            if len(part.shape) == 2 and part.field != "embedding":
                n, k = part.shape
                norm, swiglu = part.field in ("qkv", "gate_up"), part.field == "gate_up"
                result = torch.float32 if part.field in ("lm_head", "router") else torch.bfloat16
                partials = bool(fp8) and part.field in ("o", "down")
                how: dict[str, Any] = {"swiglu": swiglu, "partials": partials, "result": result}
                found |= {LinearShape(m, n // (1 + swiglu), k, norm, **how) for m in rows_wanted}
    if fp8:
        how = {"dtype": torch.float8_e4m3fn, "result": None, "blocks": fp8 == "blocks"}
        # For many rows, the norm is a separate kernel, which quantises.
        found = {shape._replace(norm=shape.norm and shape.rows == 1, **how) for shape in found if shape.result != torch.float32}
    return sorted(found, key=str)


def main() -> None:
    """Measure every linear layer. The table's entries of other shapes are kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["llama-3-8b", "qwen3-30b-a3b", "phi-4"])
    parser.add_argument("--rows", type=int, nargs="+", choices=MEASURED_ROWS, default=list(MEASURED_ROWS)[:-1], help="row counts")
    parser.add_argument("--fp8", choices=["rows", "blocks"], default="", help="FP8 operands, and what has a scale")
    parser.add_argument("--pdl", action="store_true", help="with programmatic dependent launch")
    parser.add_argument("--times", type=Path, help="write the time of each candidate, as JSON")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    table = LinearTable.load(gpu)
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    jobs = [
        (shape, config, options.pdl)
        for shape in layer_shapes(options.models, options.rows, options.fp8)
        for variant in VARIANTS.values()
        if variant.supports(shape)
        for config in variant.candidates(shape, sm_count)
        if fits(config, shape)
    ]
    print(f"compiling {len(jobs)} candidates", flush=True)
    usable = compiled(compile_candidate, jobs)
    every = []
    for shape in dict.fromkeys(shape for shape, *_ in jobs):
        times = measure(shape, [config for measured, config, _ in usable if measured == shape], options.pdl)
        best = min(times, key=lambda config: weighted(config, times[config]))
        every += [{**_plain(shape), "config": asdict(config), "us": round(us, 3)} for config, us in times.items()]
        if options.times:  # after each shape, so that an early end of the run loses no result
            options.times.write_text(json.dumps({"gpu": gpu, **about_tables(), "times": every}))
        for row_count in MEASURED_ROWS[shape.rows]:
            table.entries[key(shape._replace(rows=row_count))] = best
    print("wrote", table.save(gpu, about_tables() | {"dependent_launches": options.pdl}))


def _plain(shape: LinearShape) -> dict[str, Any]:
    """A value for JSON."""
    return {
        name: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for name, value in shape._asdict().items()
    }


def weighted(config: LinearConfig, us: float) -> float:
    """The figure by which candidates are compared."""
    return us * (1 if VARIANTS[config.variant].kernels else MARGIN)


def measure(shape: LinearShape, configs: list[LinearConfig], pdl: bool) -> dict[LinearConfig, float]:
    """Microseconds of each configuration of a layer; prints the best few."""
    run, copies = prepare(shape, "cuda", pdl)
    times = {config: layer_us(partial(run, config), copies) for config in configs}
    size = weight_bytes(shape)
    print(f"{shape.weight_rows}x{shape.k} rows {shape.rows}: cuBLAS {times.get(CUBLAS, float('nan')):.1f} us")
    for config in sorted(times, key=lambda config: weighted(config, times[config]))[:PRINTED]:
        print(f"{times[config]:9.1f} us {size / times[config] / 1e3:6.0f} GB/s  {config}", flush=True)
    return times


if __name__ == "__main__":
    main()
