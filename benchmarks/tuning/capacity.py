"""Predicts a server's latencies from the times of its steps: which step sizes and which policy suit a load.

    python -m benchmarks.tuning.capacity --rate 8 16 20 --streams 64 256

The scheduler is the real one, compiled, behind a queue pair (blinkpy/verify/policy_check/timed_server.py); only the clock is
synthetic: a step that only decodes takes the measured time of its number of rows (interpolated in the logarithm) and context_ns
for each token of context; a step with prefill takes the root of order three of weights_ms^3 + (overhead_ms + tokens of its bucket
/ prefill_tokens_s)^3, context_ns for each token that its decodes attend to, and attention_ns for each pair of a prompt token and
one that it attends to. outside_ms is the way through the front end. Arrivals are Poisson, or each stream sends its next request
after an answer, and it takes 0 to 2 outside_ms to the engine, evenly distributed. An answer has the tokens that it had in the
data. ITL is between two tokens. docs/tuning.md says what to make of it, and how good the prediction is.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.distribution import rounded
from benchmarks.common.harness import ROOT, Flag, Run, UsageError, main, parser, table
from benchmarks.common.load import load_name
from benchmarks.serving.workload import DATA_SETS, poisson, read_dataset
from blinkpy.models.gpu.step_shapes import SMALLEST_MIXED, bucket_shapes
from blinkpy.scheduler.policies import SHIPPED
from blinkpy.verify.policy_check.check_workload import Workload
from blinkpy.verify.policy_check.timed_server import ServerModel, TimedSimulation, Work, serve

FIGURES: dict[str, Callable[[NDArray[np.float64]], Any]] = {
    "p50": np.median,
    "p99": lambda times: np.percentile(times, 99),
    "mean": np.mean,
    "max": np.max,
}
COLUMNS = ("ttft_p50", "ttft_mean", "ttft_p99", "ttft_max", "tpot_p50", "tpot_mean", "tpot_p99", "itl_p99", "itl_max", "e2e_mean")


@dataclass(frozen=True)
class StepTimes:
    """The times of steps.

    decode: (rows, ms at no context), ascending. The numbers are those of Llama-3-8B's shape on one H200, fitted to
    TTFT and TPOT of each request of a grid (2026-11-21, benchmarks/results/steps-of-2048-llama-3-8b.json).
    """

    decode: tuple[tuple[int, float], ...]
    context_ns: float = 42.0
    weights_ms: float = 5.6
    overhead_ms: float = 1.82
    prefill_tokens_s: float = 46_400.0
    attention_ns: float = 1.14
    outside_ms: float = 1.2

    def step_ms(self, work: Work) -> float:
        """The time of one step."""
        context = 1e-6 * self.context_ns * work.decode_context
        if work.prefill == 0:
            rows, times = zip(*self.decode, strict=True)
            return float(np.interp(np.log2(work.tokens), np.log2(rows), times)) + context
        products = self.overhead_ms + 1000 * max(work.tokens, SMALLEST_MIXED) / self.prefill_tokens_s
        both = float(np.cbrt(self.weights_ms**3 + products**3))
        return both + context + 1e-6 * self.attention_ns * work.prefill_context


@dataclass(frozen=True, kw_only=True)
class TimedMachine(ServerModel):
    """A server with these times, and with the steps of a GPU."""

    step_us: float = 0.0  # not used, as the next two
    row_us: float = 0.0
    token_us: float = 0.0
    times: StepTimes = dataclasses.field(default_factory=lambda: StepTimes(((1, 1.0),)))

    def step_ns(self, work: Work) -> int:
        return int(1e6 * self.times.step_ms(work))

    def buckets(self) -> list[tuple[int, int]]:
        return bucket_shapes(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(frozen=True)
class Choice:
    """Options of `serve` that decide the order. mixed, burst: 0 for steps of one size; burst_step: for steps of two
    sizes."""

    policy: str
    tokens: int
    mixed: int = 0
    burst: int = 0
    burst_step: int = 0

    @property
    def name(self) -> str:
        if not self.mixed:
            return f"{self.policy}, {self.tokens}"
        short = f", {self.tokens} for short prompts" if self.burst_step else ""
        return f"{self.policy}, {self.mixed} up to {self.burst} waiting, then {self.burst_step or self.tokens}{short}"


def read_decode(path: Path, context_ns: float) -> tuple[tuple[int, float], ...]:
    """(rows, ms at no context) from a result of benchmarks/parts/decode_step.py. Raises UsageError."""
    try:
        found = json.loads(path.read_text())
        context = found["prompt"] + found["new"] / 2
        rows = {int(rows): step["step_us"]["p50"] / 1000 for rows, step in found["rows"].items() if "step_us" in step}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} is not a result of benchmarks/parts/decode_step.py: {error}") from error
    return tuple((n, ms - 1e-6 * context_ns * context * n) for n, ms in sorted(rows.items()))


def requests_of(arrival_s: NDArray[np.float64], prompt: NDArray[Any], output: NDArray[Any]) -> Workload:
    """Requests that generate exactly max_tokens tokens."""
    arrival_ns = (1e9 * (arrival_s - arrival_s[0])).astype(np.int64)
    prompt, output = prompt.astype(np.int64), output.astype(np.int64)
    return Workload(arrival_ns, prompt, output, output, np.zeros_like(prompt))


def closed_loop(lengths: NDArray[Any], streams: int, rng: np.random.Generator, times: StepTimes) -> Workload:
    """Requests of streams, for a closed loop. lengths: int [n, 2], tokens of prompt and answer; n is a multiple of streams."""
    delays = rng.uniform(0, 2e6 * times.outside_ms, len(lengths)).astype(np.int64)
    return dataclasses.replace(requests_of(np.zeros(len(lengths)), lengths[:, 0], lengths[:, 1]), arrival_ns=delays)


def predict(
    choice: Choice, times: StepTimes, requests: Workload, options: argparse.Namespace, streams: int = 0
) -> dict[str, float]:
    """Latencies in ms of one choice under one load. streams: in flight in a closed loop; 0: each request at its own time."""
    pages = {"page_size": options.page_size, "num_pages": options.num_pages}
    steps = {"mixed_step_tokens": choice.mixed, "burst_tokens": choice.burst, "burst_step_tokens": choice.burst_step}
    machine = TimedMachine(options.max_num_seqs, choice.tokens, **pages, **steps, times=times)
    server = TimedSimulation(SHIPPED[choice.policy], machine, requests)
    out = serve(server, streams)
    ttft = 1000 * out.ttft_s + times.outside_ms
    long = requests.output > 1
    tpot = (out.ended - out.first_token)[long] / (requests.output[long] - 1) / 1e6
    itl = np.repeat(np.asarray(server.durations), server.decoding) / 1e6
    times_of = {"ttft": ttft, "tpot": tpot, "itl": itl, "e2e": 1000 * out.end_to_end_s + times.outside_ms}
    figures = {name: FIGURES[level](times_of[what]) for name in COLUMNS for what, _, level in [name.partition("_")]}
    return {name: rounded(value) for name, value in figures.items()}


def choices(options: argparse.Namespace) -> list[Choice]:
    """Every policy with every step size, and with every pair and triple of sizes under every threshold."""
    sizes = [(options.full, 0)] + ([(options.short, options.full)] if options.short else [])
    several = itertools.product(options.policy, options.mixed, sizes, options.burst)
    one = [Choice(policy, tokens) for policy, tokens in itertools.product(options.policy, options.steps)]
    return one + [Choice(policy, most, mixed, burst, step) for policy, mixed, (most, step), burst in several]


def offered(options: argparse.Namespace, times: StepTimes) -> list[tuple[dict[str, Any], Workload]]:
    """(description, requests) of each load: open loops, then closed ones. Lengths and arrivals follow from the seed."""
    data = read_dataset(options.data, options.max_model_len)
    closed = read_dataset(options.closed_data, options.max_model_len)
    loads: list[tuple[dict[str, Any], Workload]] = []
    for rate in options.rate:
        rng = np.random.default_rng([options.seed, round(1000 * rate)])
        due = poisson(rate, options.seconds, rng)
        lengths = data[rng.integers(0, len(data), len(due))]
        loads.append(({"rate": rate, "streams": 0}, requests_of(due, lengths[:, 0], lengths[:, 1])))
    for streams in options.streams:
        rng = np.random.default_rng([options.seed, streams])
        lengths = closed[rng.integers(0, len(closed), streams * options.rounds)]
        loads.append(({"rate": 0.0, "streams": streams}, closed_loop(lengths, streams, rng, times)))
    return loads


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        options.rate, options.seconds, options.steps, options.mixed, options.burst = [8.0], 4.0, [1024, 2048], [512], [4096]
        options.streams, options.rounds = [4], 1
    run = Run("tuning.capacity", options)
    constants = {field.name: getattr(options, field.name) for field in dataclasses.fields(StepTimes)[1:]}
    times = StepTimes(read_decode(ROOT / options.decode, options.context_ns), **constants)
    loads = []
    for load, requests in offered(options, times):
        found = []
        for i, choice in enumerate(every := choices(options)):
            run.progress(f"{load_name(**load)}: {choice.name}", i, len(every))
            figures = predict(choice, times, requests, options, load["streams"])
            found.append({"name": choice.name, **dataclasses.asdict(choice), **figures})
        loads.append({**load, "requests": len(requests), "choices": found})
    run.write(__doc__, {"times": dataclasses.asdict(times), "loads": loads})
    head = ["policy, step tokens", *(name.replace("_", " ") for name in COLUMNS)]
    for load in loads:
        rows = [[choice["name"], *(f"{choice[name]:g}" for name in COLUMNS)] for choice in load["choices"]]
        print(f"\n{load_name(load['rate'], load['streams'])}, ms\n\n{table(head, rows)}")


def options() -> argparse.Namespace:
    result = parser(
        "tuning.capacity",
        "Latencies under load, predicted from the times of steps.",
        **{field.name: Flag(field.default, "see the method") for field in dataclasses.fields(StepTimes)[1:]},
        seconds=Flag(600.0, "of arrivals"),
        rounds=Flag(4, "requests of each stream"),
        seed=Flag(1, "of lengths and arrivals"),
        steps=Flag((512, 1024, 2048, 4096, 8192), "max_num_batched_tokens"),
        burst=Flag((2048, 4096, 6144, 8192), "burst_tokens"),
        full=Flag(2048, "tokens of a step beside mixed_step_tokens, in a burst"),
        short=Flag(8192, "the same in a burst of short prompts; 0: only --full"),
        max_num_seqs=Flag(256),
        max_model_len=Flag(8192, "longer sequences of the data are left out"),
        page_size=Flag(16),
        num_pages=Flag(40_000, "of the KV cache"),
    )
    decode = "benchmarks/results/decode-llama-3-8b.json"
    result.add_argument("--decode", default=decode, metavar="FILE", help="decode steps, of benchmarks/parts/decode_step.py")
    result.add_argument("--data", default="azure", help=DATA_SETS)
    result.add_argument("--closed-data", default="fixed:128:256", metavar="DATA", help="lengths of the closed loops")
    result.add_argument("--rate", type=float, nargs="*", default=[8.0, 16.0, 20.0], help="requests a second")
    result.add_argument("--streams", type=int, nargs="*", default=[64, 256], help="requests in flight of each closed loop")
    result.add_argument("--mixed", type=int, nargs="*", default=[512], help="mixed_step_tokens")
    policies = ["fcfs", "short-prompts"]
    result.add_argument("--policy", nargs="+", choices=sorted(SHIPPED), default=policies, help="shipped policies")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
