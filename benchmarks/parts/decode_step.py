"""Time of a decode step on one GPU, inside the loop, compared with the floor that memory bandwidth sets.

    python -m benchmarks.parts.decode_step --shape llama-3-8b --out results/decode.json

The engine runs in this process with random weights; a client in another thread submits requests through the real queues. Times
are of the GPU's clock, in microseconds: median and 99th percentile. By batch size:

- the step: from the end of one step to the end of the next, scheduling included;
- the scheduler: from the moment at which its kernel sees that the step is complete until it has decided. Turns of the fast
  path, whose tokens are published next to the next step, and of the full path count separately;
- its other half: how long before that moment it was complete;
- the gap: from the end of a step's last kernel to the start of the next step. Kernels of one thread note both: after that
  kernel, and at the root of each step graph.

With --spin-us, each step is one kernel that does nothing for that long: the scheduler with warm caches, at any number of rows.
"""

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]

from support.engine_serving import collect, config_for  # noqa: E402

from benchmarks.common.harness import check  # noqa: E402
from benchmarks.common.json_grammar import ENDLESS, byte_level_tokenizer, endless_objects  # noqa: E402
from benchmarks.common.model_shapes import SHAPES  # noqa: E402
from benchmarks.common.nvml import gpu_environment  # noqa: E402
from benchmarks.common.roofline import floor_us  # noqa: E402
from blinkpy.device.cuda.cuda_graphs import StepGraph  # noqa: E402
from blinkpy.dpu.link.connect_shm import attach_segment  # noqa: E402
from blinkpy.dpu.link.queue_pair import QueuePair  # noqa: E402
from blinkpy.engine.devices.cuda_device import CudaDevice  # noqa: E402
from blinkpy.engine.devices.gpu_loop import GpuLoop  # noqa: E402
from blinkpy.engine.engine import Engine, make_engine  # noqa: E402
from blinkpy.kernels import loop_kernels as L  # noqa: E402
from blinkpy.models.description.decoder_description import DecoderDescription  # noqa: E402
from blinkpy.models.families.family import describe_model  # noqa: E402
from blinkpy.queues.byte_automaton import ByteAutomaton  # noqa: E402
from blinkpy.queues.request_parameters import RequestParameters  # noqa: E402
from blinkpy.queues.words import FINISH_LENGTH  # noqa: E402

ARGUMENTS = ("shape", "control", "pdl", "spin_us", "prompt", "new", "grammar", "quantization", "kv_cache_dtype")  # in the result


def percentiles(values: np.ndarray) -> dict[str, float]:
    return {"p50": round(float(np.percentile(values, 50)), 2), "p99": round(float(np.percentile(values, 99)), 2)}


class Spinning(GpuLoop):
    """Every step is one spinning kernel, and its tokens are constant."""

    cycles = 0

    def build_loop(self, queues: Any) -> Any:
        state = cast(Any, self.device_state)
        with torch.cuda.stream(self.stream):
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            graph.capture_begin(capture_error_mode="relaxed")
            torch.cuda._sleep(1)  # a step's first kernel
            torch.cuda._sleep(self.cycles)
            for _ in range(4):  # with the spinning kernel, as many kernels as a model's output has
                state.batch.sampled.fill_(7)
            graph.capture_end()
        self.step.graphs[:] = [StepGraph(graph, layers=1)] * len(self.step.graphs)
        return super().build_loop(queues)


def drive(
    engine: Engine,
    sizes: list[int],
    prompt: int,
    new: int,
    grammar: ByteAutomaton | None,
    out: dict[int, dict[str, float]],
    failures: list[BaseException],
) -> None:
    """The client: for each batch size, that many concurrent requests; then it stops the engine.

    out: gets, for each size, the seconds by wall clock and the number of tokens.
    failures: gets what went wrong; WrongAnswer if an output is not `new` tokens long.
    """
    try:
        rng = np.random.default_rng(1)
        pair = QueuePair(attach_segment(engine.config.engine.name, 0, 30))
        pair.attach(30)
        for rows in sizes:
            prompts = rng.integers(0, min(30000, pair.facts.vocab_size), (rows, prompt), np.int32)
            greedy = RequestParameters(max_tokens=new, temperature=0.0)
            began = time.monotonic()
            ended = collect(pair, [pair.submit(one, greedy, grammar=grammar) for one in prompts])
            out[rows] = {"wall_s": round(time.monotonic() - began, 4), "tokens": sum(len(tokens) for tokens, _ in ended)}
            short = Counter((len(tokens), finish) for tokens, finish in ended if (len(tokens), finish) != (new, FINISH_LENGTH))
            check(not short, f"of {rows} outputs, {short.total()} do not have {new} tokens; (tokens, FINISH_*): {dict(short)}")
        pair.close()
    except BaseException as error:
        failures.append(error)
    finally:
        engine.stop()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[arguments.shape]))
        # Needed only for grammars, but part of a model's folder.
        vocab_size = int(SHAPES[arguments.shape]["vocab_size"])
        (Path(folder) / "tokenizer.json").write_text(byte_level_tokenizer(vocab_size) if arguments.grammar else "{}")
        grammar = endless_objects(arguments.grammar) if arguments.grammar else None
        config = config_for(
            folder,
            load_format="dummy",
            max_num_seqs=max(arguments.rows),
            max_num_batched_tokens=2048,
            slots=max(arguments.rows),
            prompt_arena_tokens=max(1 << 17, 2 * max(arguments.rows) * arguments.prompt),
            num_pages=0 if not arguments.spin_us else max(arguments.rows) * (arguments.prompt + arguments.new) // 8,
            max_model_len=max(4096, arguments.prompt + arguments.new),
            control=arguments.control,
            record_steps=arguments.record_steps,
            batch_invariant=arguments.batch_invariant,
            quantization=arguments.quantization,
            kv_cache_dtype=arguments.kv_cache_dtype,
        )
        loop = Spinning if arguments.spin_us else GpuLoop
        engine = make_engine(config, device=CudaDevice(trace_rows=200_000, pdl=arguments.pdl, loop=loop))
        Spinning.cycles = arguments.spin_us * torch.cuda.get_device_properties(0).clock_rate // 1000
        engine.start()
        try:
            return _measure(engine, describe_model(folder, arguments.quantization), arguments, grammar)
        finally:
            engine.close()


def _measure(
    engine: Engine, a: DecoderDescription, arguments: argparse.Namespace, grammar: ByteAutomaton | None
) -> dict[str, Any]:
    wall: dict[int, dict[str, float]] = {}
    failures: list[BaseException] = []
    load = arguments.rows, arguments.prompt, arguments.new, grammar, wall, failures
    client = threading.Thread(target=drive, args=(engine, *load), daemon=True)
    client.start()
    engine.run(budget_s=arguments.budget)
    client.join(20)
    if failures:
        raise failures[0]
    result: dict[str, Any] = {
        **{name: getattr(arguments, name) for name in ARGUMENTS},
        "start_s": {name: round(seconds, 2) for name, seconds in engine.timings.items()},
        "environment": gpu_environment(),
        "rows": {},
    }
    runner = engine.runner
    if not isinstance(runner, GpuLoop) or runner.loop is None:
        return result | {"rows": {rows: {"wall": seen} for rows, seen in wall.items()}}
    result["scheduler_kernels"] = {name: asdict(needs) for name, needs in runner.loop.kernel_resources.items()}
    trace = runner.loop.traced()
    interval = np.diff(trace[:, L.TRACE_BEGIN]) / 1e3
    shapes = runner.step.shapes
    context = arguments.prompt + arguments.new // 2
    for rows in arguments.rows:
        decode = np.array([not shapes[g].mixed for g in trace[:, L.TRACE_GRAPH]])
        steady = decode & (trace[:, L.TRACE_ROWS] == rows)
        pairs = steady[:-1] & steady[1:]
        if not pairs.any():
            print(f"no two decode steps in a row had {rows} rows: raise --new", file=sys.stderr)
            continue
        step = percentiles(interval[pairs])
        result["rows"][rows] = {
            "steps": int(pairs.sum()),
            "step_us": step,
            **scheduler_times(trace[:-1], trace[1:], pairs),
            "wall": wall.get(rows),
        }
        if not arguments.spin_us:
            floor = floor_us(a, rows, context, fp8_cache=arguments.kv_cache_dtype != "auto")
            result["rows"][rows] |= {"floor_us": round(floor, 1), "share_of_floor": round(floor / step["p50"], 3)}
    return result


def scheduler_times(turn: np.ndarray, following: np.ndarray, chosen: np.ndarray) -> dict[str, Any]:
    """Times of the scheduler in the chosen turns. turn, following: rows of the trace, and the row after each."""
    times = (turn[:, L.TRACE_END] - turn[:, L.TRACE_BEGIN]) / 1e3
    gap = (following[:, L.TRACE_STEP_BEGIN] - turn[:, L.TRACE_STEP_END]) / 1e3
    chosen = chosen & (turn[:, L.TRACE_STEP_END] > turn[:, L.TRACE_STEP_BEGIN])  # otherwise its stamp came too late
    steady = turn[:, L.TRACE_FAST_PATH] == 1
    result: dict[str, Any] = {}
    for name, kind in (("", chosen & steady), ("general_", chosen & ~steady)):
        if kind.any():
            result[f"{name}turns"] = int(kind.sum())
            result[f"{name}scheduler_us"] = percentiles(times[kind])
            result[f"{name}gap_us"] = percentiles(gap[kind])
    result["scheduler_began_after_us"] = percentiles((turn[:, L.TRACE_BEGIN] - turn[:, L.TRACE_STEP_END])[chosen] / 1e3)
    result["ahead_us"] = percentiles((turn[:, L.TRACE_OVERLAP_END] - turn[:, L.TRACE_OVERLAP_BEGIN])[chosen] / 1e3)
    result["ahead_done_before_us"] = percentiles((turn[:, L.TRACE_BEGIN] - turn[:, L.TRACE_OVERLAP_END])[chosen] / 1e3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 64, 128, 256])
    parser.add_argument("--prompt", type=int, default=128, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128, help="tokens to generate")
    parser.add_argument("--control", choices=["gpu", "host"], default="gpu")
    parser.add_argument("--spin-us", type=int, default=0, help="a step does nothing but take this long (0: it is the model's)")
    parser.add_argument("--no-pdl", dest="pdl", action="store_false", help="no programmatic dependent launches")
    parser.add_argument("--batch-invariant", action="store_true", help="one order of sums in every bucket")
    parser.add_argument("--quantization", default="auto", help="the engine's")
    parser.add_argument("--kv-cache-dtype", default="auto", help="the engine's")
    parser.add_argument("--grammar", choices=list(ENDLESS), default="", help="all requests write JSON of this schema")
    parser.add_argument("--record-steps", type=int, default=2048, help="flight recorder: steps kept (0: off)")
    parser.add_argument("--budget", type=float, default=120, help="seconds after which the loop ends by itself")
    parser.add_argument("--out", type=Path, help="JSON file")
    arguments = parser.parse_args()
    result = measure(arguments)
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}))
    for rows, values in result["rows"].items():
        print(rows, json.dumps(values))


if __name__ == "__main__":
    main()
