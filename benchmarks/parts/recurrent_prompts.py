"""Prompts of recurrent layers on a GPU by blocks of tokens, against token by token: single layers, and whole models.

    python -m benchmarks.parts.recurrent_prompts --models ibm-granite/granite-4.0-h-tiny

A layer is the recurrence of gated delta nets or of state spaces, at published sizes, with random inputs in bfloat16. The norm or
the gate of its results is part of it. Both ways compute the same new sequences, and their results must agree. Times are medians
by CUDA events. Whole models have random weights, and each way has its own engine. Its step graphs are replayed on batches made by
hand, as in whole_steps. A model's prompts share one step of at most 8,192 tokens; larger sizes are left out.

us, ms: a layer's or step's time. tokens_per_s: tokens divided by it.

With --smoke, small layers run in Triton's interpreter, and no model.
"""

import contextlib
import json
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

if "--smoke" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]

import torch  # noqa: E402

from benchmarks.common.harness import Flag, Run, check, run_benchmark, table  # noqa: E402
from benchmarks.common.nvml import gpu_environment  # noqa: E402
from blinkpy.kernels.delta.recurrence import DeltaSizes, DraftedStates, recur  # noqa: E402
from blinkpy.kernels.delta.state_space import SpaceRates, SpaceSizes, scan  # noqa: E402
from blinkpy.kernels.launch import BatchView  # noqa: E402

LAYERS: dict[str, DeltaSizes | SpaceSizes] = {
    "Qwen3-Next-80B-A3B": DeltaSizes(16, 32, 128, 128),
    "Granite-4.0-h-small": SpaceSizes(128, 1, 128, 64),
    "Nemotron-H-8B": SpaceSizes(128, 8, 128, 64),
}
SMALL: dict[str, DeltaSizes | SpaceSizes] = {"delta net": DeltaSizes(1, 2, 16, 16), "state space": SpaceSizes(2, 1, 16, 16)}
WAYS = {"tokens": False, "blocks": True}
DTYPE = torch.bfloat16
STEP_TOKENS, MOST_ROWS = 8192, 8
WARM_S = 0.2
LIMITS = 2e-2, 1e-3  # differences of results and of states, as shares of the largest number


def new_sequences(count: int, length: int, device: str) -> BatchView:
    """The batch of `count` whole prompts of `length` tokens."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    header = torch.tensor([count, count * length, 0, 0, 0, 0, 0, 0], device=device)
    rows, contexts = ints(*range(count)), ints(*[length] * count)
    return BatchView(header, rows, ints(*range(0, (count + 1) * length, length)), contexts, ints(*[1] * count), rows, rows)


def layer_of(
    sizes: DeltaSizes | SpaceSizes, count: int, length: int, device: str, seed: int
) -> tuple[Callable[[bool], None], torch.Tensor, torch.Tensor]:
    """The launch of one recurrence, by blocks or not; its results [T, value_size], and its states, of `count` sequences."""
    generator, tokens = torch.Generator(device).manual_seed(seed), count * length

    def draw(*shape: int, dtype: torch.dtype = DTYPE) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    def floats(*shape: int) -> torch.Tensor:
        return draw(*shape, dtype=torch.float32)

    heads, dk, dv = (sizes.value_heads if isinstance(sizes, DeltaSizes) else sizes.heads), sizes.key_dim, sizes.value_dim
    batch, out = new_sequences(count, length, device), torch.zeros(tokens, heads * dv, dtype=DTYPE, device=device)
    matrices, held = floats(count, heads, dk, dv), torch.zeros(count, dtype=torch.int32, device=device)
    states = DraftedStates(matrices, draw(count, 0, heads, 1), held)
    if isinstance(sizes, DeltaSizes):
        mixed, gates = draw(tokens, 2 * sizes.key_heads * dk + heads * dv), draw(tokens, heads * dv)
        strengths, rates, norm = draw(tokens, 2 * heads), (floats(heads) - 2, floats(heads)), (draw(dv), 1e-6)

        def launch(by_blocks: bool) -> None:
            recur(sizes, mixed, gates, strengths, rates, norm, states, batch, out, rows=count, by_blocks=by_blocks)
    else:
        mixed, both = draw(tokens, heads * dv + 2 * sizes.groups * dk), draw(tokens, heads * dv + heads)
        gates, steps = both.split([heads * dv, heads], 1)
        constants = SpaceRates(floats(heads) - 2, floats(heads), floats(heads))

        def launch(by_blocks: bool) -> None:
            scan(sizes, mixed, gates, steps, constants, states, batch, out, rows=count, by_blocks=by_blocks)

    return launch, out, matrices


def median_us(launch: Callable[[], None], repeats: int, device: str) -> float:
    """Median time of some launches, after the first ones: a GPU that rests takes some time to raise its clocks."""
    times, began = list[float](), time.perf_counter()
    while device != "cpu" and time.perf_counter() - began < WARM_S:
        launch()
        torch.cuda.synchronize()
    for _ in range(repeats + 1):
        if device == "cpu":
            began = time.perf_counter()
            launch()
            times.append((time.perf_counter() - began) * 1e6)
            continue
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        launch()
        marks[1].record()
        marks[1].synchronize()
        times.append(marks[0].elapsed_time(marks[1]) * 1e3)
    return statistics.median(times[1:])


def largest_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """As a share of the largest number."""
    return float((one.float() - other.float()).abs().max() / one.float().abs().max())


def measured_layer(name: str, sizes: DeltaSizes | SpaceSizes, count: int, length: int, run: Run) -> dict[str, Any]:
    """Times of both ways. Raises WrongAnswer unless they agree."""
    device = "cpu" if run.options.smoke else "cuda"
    launch, out, matrices = layer_of(sizes, count, length, device, run.options.seed)
    found: dict[str, Any] = {"layer": name, "sequences": count, "length": length}
    seen = []
    for way, by_blocks in WAYS.items():
        out.fill_(float("nan"))
        us = median_us(lambda by_blocks=by_blocks: launch(by_blocks), run.options.repeats, device)  # type: ignore[misc]
        found[way] = {"us": round(us, 1), "tokens_per_s": round(count * length / us * 1e6)}
        seen.append((out.clone(), matrices.clone()))
    for what, limit, one, other in zip(("results", "states"), LIMITS, *seen, strict=True):
        difference = largest_difference(one, other)
        check(difference < limit, f"{name}, {count} x {length}: {what} differ by {difference:.1e}")
        found[f"{what}_differ"] = float(f"{difference:.2g}")
    return found


@contextlib.contextmanager
def way_of_models(by_blocks: bool) -> Iterator[None]:
    """Decoders that are made in this context compute prompts by blocks, or token by token."""
    from blinkpy.models.gpu import gpu_delta

    chosen = gpu_delta.by_blocks if by_blocks else lambda decoder, shape: False
    with patch.object(gpu_delta, "by_blocks", chosen):
        yield


def measured_model(hub_id: str, by_blocks: bool, run: Run) -> list[dict[str, Any]]:
    """Times of steps of prompts. Raises ConfigError if the model does not fit."""
    import numpy as np

    from benchmarks.common.aot_models import published
    from benchmarks.common.hand_batches import graph_index, prompts, put
    from benchmarks.parts.whole_steps import NoLoop, check_tokens, replayed
    from blinkpy.config import Config
    from blinkpy.engine.devices.cuda_device import CudaDevice
    from blinkpy.engine.engine import make_engine
    from blinkpy.models.families.family import describe_model

    config = next(model.config for model in published() if model.hub_id == hub_id)
    found = []
    with tempfile.TemporaryDirectory() as folder, way_of_models(by_blocks):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        values = {"model": folder, "device": "cuda", "load_format": "dummy", "name": f"prompts-{secrets.token_hex(6)}"}
        values |= {"quantization": run.options.quantization}
        sizes = {
            "max_num_seqs": MOST_ROWS,
            "slots": MOST_ROWS,
            "max_num_batched_tokens": STEP_TOKENS,
            "max_model_len": STEP_TOKENS,
        }
        sizes |= {"record_steps": 0, "enable_prefix_caching": False}
        options = Config().with_options({**values, **sizes})
        with contextlib.closing(make_engine(options, run.progress, CudaDevice(loop=NoLoop))) as engine:
            engine.start()
            runner: Any = engine.runner
            vocabulary = describe_model(folder).vocab_size
            pages = np.arange(engine.sizes.num_pages, dtype=np.int32)
            for count in run.options.sequences:
                for length in run.options.lengths:
                    if count * length > STEP_TOKENS:
                        continue
                    rows = prompts(count, length)
                    put(runner.device_state, rows, engine.sizes.page_size, pages, vocabulary)
                    graph = runner.step.graphs[graph_index(runner.step, rows)].graph
                    graph.instantiate()
                    timing = replayed(graph, run.options.seconds)
                    logits, sampled = runner.step.decoder.buffers.logits[:count], runner.device_state.batch.sampled[:count]
                    check_tokens(logits, sampled, f"{hub_id}, {count} x {length}")
                    ms = statistics.median(timing.group_ms)
                    found.append({"sequences": count, "length": length, "ms": round(ms, 3)})
                    found[-1]["tokens_per_s"] = round(count * length / ms * 1e3)
    return found


def benchmark(run: Run) -> None:
    options, rows = run.options, []
    if options.smoke:
        from support.models import triton_interpreter

        triton_interpreter.install()
    layers = SMALL if options.smoke else LAYERS
    cases = [(name, count, length) for name in layers for count in options.sequences for length in options.lengths]
    found = []
    for done, (name, count, length) in enumerate(cases):
        run.progress(name, done, len(cases))
        found.append(measured_layer(name, layers[name], count, length, run))
        one, other = found[-1]["tokens"], found[-1]["blocks"]
        each = f"{one['tokens_per_s']:,}", f"{other['tokens_per_s']:,}", f"{one['us'] / other['us']:.1f}"
        rows.append([name, str(count), f"{length:,}", *each])
    models: dict[str, Any] = {}
    chosen = [hub_id for hub_id in options.models if hub_id and not options.smoke]
    if chosen:
        from benchmarks.common.random_engines import one_by_one

        keys = [(hub_id, way) for hub_id in chosen for way in WAYS]
        for (hub_id, way), steps in one_by_one(keys, lambda key: measured_model(key[0], WAYS[key[1]], run)):
            models.setdefault(hub_id, {})[way] = steps
    for hub_id, ways in models.items():
        for one, other in zip(ways["tokens"], ways["blocks"], strict=True):
            each = f"{one['tokens_per_s']:,}", f"{other['tokens_per_s']:,}", f"{one['ms'] / other['ms']:.1f}"
            rows.append([hub_id, str(one["sequences"]), f"{one['length']:,}", *each])
    run.write(__doc__, {"environment": {} if options.smoke else gpu_environment(), "layers": found, "models": models})
    print(table(("layer or model", "sequences", "tokens of each", "tokens/s by tokens", "by blocks", "faster"), rows))


if __name__ == "__main__":
    run_benchmark(
        "parts.recurrent_prompts",
        "Prompts of recurrent layers by blocks of tokens, against token by token.",
        benchmark,
        lengths=Flag((128, 1024, 8192), "tokens of each prompt", (17, 70)),
        sequences=Flag((1, 8), "prompts in a step", (1, 2)),
        models=Flag(("ibm-granite/granite-4.0-h-tiny", "Qwen/Qwen3.6-35B-A3B"), 'whole models, by their ids; "" for none'),
        quantization=Flag("auto", "of the models"),
        repeats=Flag(20, "launches of a layer", 1),
        seconds=Flag(0.5, "for which each step is replayed"),
        seed=Flag(1, "of the inputs"),
    )
