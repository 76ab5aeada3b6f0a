"""Whole steps of a model on one GPU, back to back, at the power that they draw: decode steps, prompts alone, and both together.

    python -m benchmarks.parts.whole_steps --shape llama-3-8b

A server with its defaults captures the same step graphs, with kernels chained by programmatic dependent launch. The host
replays each graph on one batch made by hand, two groups of about 50 ms ahead, for long enough that its power limit sets the
clock. No scheduler runs. Weights are random; keys and values are noise of the same size, on pages drawn from all of the pool;
sampling is greedy.

step_ms: after 0.3 s, the median over groups of the time of a group, by CUDA events, divided by its steps.
lowest_ms, highest_ms: the same of single groups.
mean_w: slope of NVML's energy counter, read every 20 ms.
joules: energy of a step, mean_w times step_ms.
clock_mhz: mean of the multiprocessors' clock by NVML, read every 0.1 s.
tflop: two operations for each multiplication of linear layers and attention that the batch needs, without a graph's padding.
floor_ms: time to read weights and cached context once, at the measured bandwidth of an H200's memory.
"""

import argparse
import contextlib
import json
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common.distribution import rounded
from benchmarks.common.hand_batches import Rows, decoding, graph_index, mixed, prompts, put
from benchmarks.common.harness import RESULTS, Flag, Run, UsageError, check, main, parser
from benchmarks.common.model_shapes import SHAPES
from benchmarks.common.nvml import EnergyMeter
from benchmarks.common.roofline import floor_us, multiplications
from blinkpy.config import Config, ConfigError, step_sizes
from blinkpy.engine.devices.cuda_device import CudaDevice
from blinkpy.engine.devices.gpu_loop import GpuLoop
from blinkpy.engine.engine import make_engine
from blinkpy.models.description.decoder_description import DecoderDescription
from blinkpy.models.families.family import describe_model
from blinkpy.models.weights.weight_loader import DUMMY_RANGE

DECODE_CONTEXT, MIXED_CONTEXT = 256, 1100  # decode rows and tokens: in separate steps, and together with a chunk
TOKENS = (256, 448, 512, 1024, 2048, 4096, 8192)
PROMPTS = ((1, 512), (1, 2048), (1, 8192), (64, 128))  # number, length
CACHED, CACHED_STEP = 4000, 1024  # a chunk after this many tokens of its prompt, and the tokens of its step
MOST_ROWS, LONGEST = 256, 8192  # max_num_seqs and max_model_len, or the model's if those are less
WARM_S = 0.3
GROUP_S = 0.05  # steps between two events
AHEAD = 2  # groups submitted ahead of the GPU, so that it never waits for the host
PERIOD_S, CLOCK_EVERY = 0.02, 5  # between two readings of the energy counter; readings of it per reading of the clock
SIZES = ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "page_size", "num_pages")


class Case(NamedTuple):
    """A step to measure. kind: decode, prompts or mixed. cached: tokens of its prompt before the chunk."""

    kind: str
    rows: Rows
    cached: int = 0

    def facts(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "rows": len(self.rows.lengths),
            "tokens": self.rows.tokens,
            "decodes": self.rows.decodes,
            "decode_context": self.rows.contexts[0] if self.rows.decodes else 0,
            "prompts": [length for length in self.rows.lengths if length > 1],
            "cached": self.cached,
        }


class Timing(NamedTuple):
    """Uninterrupted replays of one graph, from began to ended (time.perf_counter()). group_ms: ms per step of each
    group."""

    steps: int
    group_ms: list[float]
    began: float
    ended: float


class NoLoop(GpuLoop):
    """Builds only the step graphs, without the loop; run() is not available."""

    def build_loop(self, queues: Any) -> None:
        return None


def cases(decode_rows: list[int], step_tokens: list[int], decodes: int, most_tokens: int) -> list[Case]:
    """The measured cases. Raises UsageError if a requested step exceeds most_tokens, or leaves no space for a chunk."""
    if not 0 <= decodes < MOST_ROWS or not all(1 <= rows <= MOST_ROWS for rows in decode_rows):
        raise UsageError(f"a step has 1 to {MOST_ROWS} rows, that of a chunk among them")
    if not all(decodes + 1 < tokens <= most_tokens for tokens in step_tokens):
        raise UsageError(f"--tokens must be {decodes + 2} to {most_tokens}: {decodes} rows decode, and a chunk has two or more")
    found = [Case("decode", decoding(rows, DECODE_CONTEXT)) for rows in decode_rows]
    found += [Case("prompts", prompts(count, length)) for count, length in PROMPTS if count * length <= most_tokens]
    for tokens in step_tokens:
        found.append(Case("mixed", mixed(decodes, MIXED_CONTEXT, tokens - decodes)))
        if tokens == CACHED_STEP:
            found.append(Case("mixed", mixed(decodes, MIXED_CONTEXT, tokens - decodes, CACHED), CACHED))
    return found


def replayed(graph: Any, seconds: float, warm_s: float = WARM_S) -> Timing:
    """Replay a graph for some seconds, after some seconds of warm-up."""

    def event() -> Any:
        result = torch.cuda.Event(enable_timing=True)
        result.record()
        return result

    graph.replay()
    first = event()
    graph.replay()
    second = event()
    second.synchronize()
    group = max(1, round(GROUP_S * 1e3 / first.elapsed_time(second)))
    marks, warm, began = [event()], 0, time.perf_counter()
    while True:
        for _ in range(group):
            graph.replay()
        marks.append(event())
        if len(marks) > AHEAD:
            marks[-1 - AHEAD].synchronize()
        now = time.perf_counter()
        if not warm and now - began >= warm_s:
            warm, began = len(marks) - 1, now
        elif warm and now - began >= seconds:
            break
    marks[-1].synchronize()
    times = [a.elapsed_time(b) / group for a, b in zip(marks[warm:], marks[warm + 1 :], strict=False)]
    return Timing(group * len(times), times, began, now)


def measured(
    engine: Any, a: DecoderDescription, case: Case, meter: EnergyMeter, seconds: float, pages: np.ndarray
) -> dict[str, Any]:
    """One case on a started engine. pages: int32, of the pool, in the order in which rows take them."""
    step, state, rows = engine.runner.step, engine.runner.device_state, case.rows
    index = graph_index(step, rows)
    shape = step.shapes[index]
    put(state, rows, engine.sizes.page_size, pages, a.vocab_size)
    torch.cuda.synchronize()
    timing = replayed(step.graphs[index].graph, seconds)
    count = len(rows.lengths)
    check_tokens(step.decoder.buffers.logits[:count], state.batch.sampled[:count], case.kind)
    step_ms = statistics.median(timing.group_ms)
    counted = multiplications(a, rows, last_tokens_only=shape.last_tokens_only)
    result: dict[str, Any] = {
        **case.facts(),
        "graph": shape.name,
        "steps": timing.steps,
        "step_ms": rounded(step_ms, 5),
        "lowest_ms": rounded(min(timing.group_ms), 5),
        "highest_ms": rounded(max(timing.group_ms), 5),
        "tflop": {"linear": rounded(2e-12 * counted.linear, 5), "attention": rounded(2e-12 * counted.attention, 5)},
        "tflop_per_s": rounded(counted.tflop / step_ms * 1e3, 5),
    }
    watts, mhz = meter.power_w(timing.began, timing.ended), meter.clock_mhz(timing.began, timing.ended)
    if watts is not None:
        result |= {"mean_w": round(watts, 1), "joules": rounded(watts * step_ms / 1e3, 5)}
    if mhz is not None:
        result["clock_mhz"] = round(mhz)
    if case.kind == "decode":
        floor_ms = floor_us(a, count, DECODE_CONTEXT) / 1e3
        result |= {"floor_ms": rounded(floor_ms, 5), "share_of_floor": round(floor_ms / step_ms, 3)}
    return result


def check_tokens(logits: torch.Tensor, sampled: torch.Tensor, what: str) -> None:
    """Raise WrongAnswer unless logits float32 [rows, vocab] are numbers and sampled int32 [rows] are the largest of each row."""
    check(bool(torch.isfinite(logits).all()), f"{what}: logits are not numbers")
    check(bool(((sampled >= 0) & (sampled < logits.shape[1])).all()), f"{what}: tokens that the vocabulary doesn't have")
    chosen = logits.gather(1, sampled.long()[:, None])[:, 0]
    check(torch.equal(chosen, logits.max(1).values), f"{what}: tokens are not the likeliest")


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        options.shape, options.seconds = "small", 0.3
    elif options.output is None:
        options.output = RESULTS / f"steps-{options.shape}.json"
    run = Run("parts.whole_steps", options)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[options.shape]))
        a = describe_model(folder)
        values = {"model": folder, "device": "cuda", "load_format": "dummy", "name": f"steps-{secrets.token_hex(6)}"}
        sizes = {"max_num_seqs": MOST_ROWS, "max_model_len": min(a.max_position, LONGEST), "record_steps": 0}
        config = Config().with_options({**values, **sizes})
        most = step_sizes(config.scheduler, gpu=True, experts=any(a.expert_layers))["max_num_batched_tokens"]
        chosen = cases(options.rows, options.tokens or [n for n in TOKENS if n <= most], options.decodes, most)
        try:
            with contextlib.closing(make_engine(config, run.progress, CudaDevice(loop=NoLoop))) as engine:
                engine.start()
                results = measure(engine, a, chosen, options.seconds, run)
        except ConfigError as error:
            raise UsageError(str(error)) from error
    run.write(__doc__, {"shape": options.shape, **results})
    for step in results["steps"]:
        print(f"{step['kind']:8}{step['tokens']:6,} tokens {step['step_ms']:8.3g} ms {step.get('mean_w', 0):6.0f} W")


def measure(engine: Any, a: DecoderDescription, chosen: list[Case], seconds: float, run: Run) -> dict[str, Any]:
    """All cases in turn, on a started engine."""
    step, sizes = engine.runner.step, engine.sizes
    for tensor in (*step.decoder.cache.keys, *step.decoder.cache.values):
        tensor.normal_(std=DUMMY_RANGE * (a.hidden_size / 3) ** 0.5)  # as random weights make them from a normed token
    for index in {graph_index(step, case.rows) for case in chosen}:
        step.graphs[index].graph.instantiate()
    pages = np.random.default_rng(1).permutation(sizes.num_pages).astype(np.int32)
    with EnergyMeter(period_s=PERIOD_S, clock_every=CLOCK_EVERY) as meter:
        results: dict[str, Any] = {
            "gpu": meter.facts or {"gpu": torch.cuda.get_device_name()},
            "start_s": {name: round(took, 2) for name, took in engine.timings.items()},
            "sizes": {name: getattr(sizes, name) for name in SIZES},
            "steps": [],
        }
        if meter.missing:
            results["missing"] = meter.missing
            run.progress.say(f"blinkpy: no power and no clock: {meter.missing}")
        for done, case in enumerate(chosen):
            run.progress(case.kind, done, len(chosen))
            results["steps"].append(measured(engine, a, case, meter, seconds, pages))
    return results


def options() -> argparse.Namespace:
    result = parser(
        "parts.whole_steps",
        "Whole steps on one GPU, back to back, with their power.",
        rows=Flag((1, 8, 32, 64, 128, 256), "of the decode steps"),
        decodes=Flag(30, "decode rows of a mixed step"),
        seconds=Flag(1.5, "for which each step is replayed, after 0.3 that don't count"),
    )
    result.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b", help="of the model; writes steps-SHAPE.json")
    result.add_argument("--tokens", type=int, nargs="+", help=f"of mixed steps (default: those of {TOKENS} that fit into a step)")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
