"""All linear layers of a model, bfloat16 beside FP8: the best FP8 configurations, and what each kind takes and draws when it runs
for longer than a burst.

    python -m benchmarks.tuning.linear_stack --out results/linear_stack.json

Of each layer the candidates are compiled and timed until `--budget` is used up, and the best become entries of the shipped table
with --save. Then all layers run from CUDA graphs for --seconds each, in turns: at the power limit a burst says little.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.model_shapes import SHAPES
from benchmarks.tuning.kernel_tuner import (
    MEASURED_ROWS,
    about_tables,
    compile_candidate,
    compiled,
    layer_shapes,
    layer_us,
    prepare,
)  # fmt: skip
from blinkpy.kernels.linear.linear import VARIANTS, can_fuse
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_table import ROW_BUCKETS, LinearTable, key
from blinkpy.kernels.linear.linear_variants import LinearShape

ROWS = (1, 64, 256, 16, 2048)  # in the order in which the budget goes
COPIES = 3
CUBLAS = LinearConfig("cublas")


def table_key(shape: LinearShape, rows: int) -> str:
    return key(shape.n, shape.k, rows, shape.dtype, shape.swiglu, shape.blocks)


def tune(shapes: list[LinearShape], budget_s: float) -> dict[LinearShape, dict[LinearConfig, float]]:
    """Microseconds of the candidates of each shape, best first, as far as there is time."""
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    jobs = [
        (shape, config, True)
        for shape in shapes
        for variant in VARIANTS.values()
        if variant.supports(shape._replace(partials=False))
        for config in variant.candidates(shape, sm_count)
        if shape.fp8 or variant.name == "gemv"
    ]
    began = time.monotonic()
    usable = compiled(compile_candidate, jobs)
    print(f"{len(usable)} of {len(jobs)} candidates, compiled in {time.monotonic() - began:.0f} s", flush=True)
    found: dict[LinearShape, dict[LinearConfig, float]] = {}
    for shape in shapes:
        if time.monotonic() - began > budget_s:
            break
        run, copies = prepare(shape, "cuda", True)
        times = {config: layer_us(partial(run, config), copies, 4) for measured, config, _ in usable if measured == shape}
        found[shape] = dict(sorted(times.items(), key=lambda item: item[1]))
        for config, us in list(found[shape].items())[:2]:
            print(f"{tuple(shape)[:3]} blocks {shape.blocks} {us:8.1f} us {config}", flush=True)
    return found


def stack(shapes: list[LinearShape], configs: list[LinearConfig]) -> Callable[[], None]:
    """A graph of `COPIES` layers."""
    runs = [(prepare(shape, "cuda", True, COPIES)[0], config) for shape, config in zip(shapes, configs, strict=True)]

    def launch() -> None:
        for run, config in runs:
            run(config)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def sustained(launch: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Milliseconds of a launch, and watts (nan without NVML), after half as long to warm up."""

    def run(until: float) -> int:
        count = 0
        while time.monotonic() < until:
            for _ in range(4):
                launch()
            torch.cuda.synchronize()
            count += 4
        return count

    run(time.monotonic() + seconds / 2)
    joules, began = energy(), time.monotonic()
    count = run(began + seconds)
    took = time.monotonic() - began
    return took / count * 1e3, (energy() - joules) / took


def energy() -> float:
    """Joules of the first GPU so far."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(pynvml.nvmlDeviceGetHandleByIndex(0))) / 1000
    except Exception:  # the library makes its classes at run time
        return float("nan")


def stacks(
    model: str, rows: int, table: LinearTable, fp8: LinearTable
) -> dict[str, tuple[list[LinearShape], list[LinearConfig]]]:
    """By name: all layers at this many rows, with the configurations of a table."""

    def of(kind: str, chosen: LinearTable, fixed: LinearConfig | None = None) -> tuple[list[LinearShape], list[LinearConfig]]:
        shapes, configs = layer_shapes([model], [rows], kind), []
        shapes = [shape for shape in shapes if shape.result != torch.float32]
        for i, s in enumerate(shapes):
            configs.append(fixed or chosen.config(s.n, s.k, rows, s.dtype, swiglu=s.swiglu, blocks=s.blocks))
            shapes[i] = s._replace(norm=s.norm and can_fuse(configs[-1], "norm"))
        return shapes, configs

    found = {"bfloat16": of("", table), "FP8 rows": of("rows", fp8), "FP8 blocks": of("blocks", fp8)}
    if rows > 1:
        found["FP8 rows, cuBLAS"] = of("rows", fp8, CUBLAS)
    else:
        found["bfloat16, tuned again"] = of("", fp8)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="llama-3-8b", choices=list(SHAPES))
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256, 2048], help="of the sustained runs")
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--budget", type=float, default=100, help="seconds for candidates")
    parser.add_argument(
        "--kinds", nargs="+", choices=["one", "rows", "blocks"], default=["one", "rows", "blocks"], help="candidates"
    )
    parser.add_argument("--save", action="store_true", help="write the best into the shipped table")
    parser.add_argument("--out", type=Path, required=True, help="JSON file")
    options = parser.parse_args()
    gpu = torch.cuda.get_device_name()
    table, fp8 = LinearTable.load(gpu), LinearTable.load(gpu)
    layers = [s for kind in options.kinds if kind != "one" for s in layer_shapes([options.model], list(ROWS), kind)]
    layers.sort(key=lambda s: (s.blocks, ROWS.index(s.rows)))
    one = [s for s in layer_shapes([options.model], [1]) if s.result != torch.float32] if "one" in options.kinds else []
    found = tune([*one, *layers], options.budget)
    for shape, times in found.items():
        best = next(iter(times))
        below = max((rows for rows in ROWS if rows < shape.rows), default=0)
        for rows in (*(n for n in ROW_BUCKETS if below < n <= shape.rows), *MEASURED_ROWS.get(shape.rows, ())):
            fp8.entries[table_key(shape, rows)] = best
    if options.save:
        print("wrote", fp8.save(gpu, about_tables() | {"dependent_launches": True}))
    result: dict[str, Any] = {
        "gpu": gpu,
        "model": options.model,
        "entries": {name: fp8.to_json(config) for name, config in fp8.entries.items() if table.entries.get(name) != config},
        "candidates": {
            f"{table_key(shape, shape.rows)}": [[round(us, 2), fp8.to_json(config)] for config, us in list(times.items())[:6]]
            for shape, times in found.items()
        },
        "ms of all layers, watts": {},
    }
    write(options.out, result)
    count = int(SHAPES[options.model]["num_hidden_layers"])
    for rows in options.rows:
        measured: dict[str, Any] = {}
        for name, (shapes, configs) in stacks(options.model, rows, table, fp8).items():
            try:
                ms, watts = sustained(stack(shapes, configs), options.seconds)
                measured[name] = [round(ms * count / COPIES, 3), round(watts)]
            except (RuntimeError, ValueError) as error:
                measured[name] = str(error).splitlines()[0][:200]
        result["ms of all layers, watts"][rows] = measured
        print(rows, json.dumps(measured), flush=True)
        write(options.out, result)


def write(path: Path, result: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
