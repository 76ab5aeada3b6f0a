"""How much faster steps would have to be for the tails that were promised.

    python -m benchmarks.headroom

The requests of a measured load, the real scheduler with a server's default step sizes, and steps that take the predicted time,
or are a part of the way nearer to the least that a GPU needs for them. docs/evaluation.md says what came of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.common.hand_batches import prompts
from benchmarks.common.harness import RESULTS, ROOT, Run, UsageError, main, parser
from benchmarks.common.model_shapes import SHAPES
from benchmarks.common.roofline import READ_GBPS, floor_us, multiplications
from benchmarks.report.headroom_table import page, way
from benchmarks.report.serving_tables import HEADLINE_RATE, OURS
from benchmarks.tuning.capacity import Choice, StepTimes, predict, read_decode, requests_of
from blinkpy.config import SchedulerOptions, step_sizes
from blinkpy.models.description.decoder_description import Architecture, parse_architecture
from blinkpy.verify.policy_check.check_workload import Workload
from blinkpy.verify.policy_check.timed_server import Work

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
PRODUCT_TFLOPS = 743.0
"""Of the fastest matrix product that was seen in whole steps on an H200, gate and up of a Llama-3-8B layer for 1,024 tokens."""
LONG_PROMPT = 2048  # tokens, of which the work for one is taken
FIGURES = ("ttft_p50", "ttft_mean", "ttft_p99", "tpot_mean", "tpot_p99", "e2e_mean")
METHOD = """As benchmarks.tuning.capacity, with the requests of a measured load without neighbours, and step sizes and policy as a
server has them by default on a GPU. A step takes slow + share x (least - slow), where slow is the predicted time of today's
step, and least is a model of a GPU that does nothing but what it must: weights and cached context are read once, at the
bandwidth of an H200's memory as measured; linear layers of prompts run at product_tflops; attention of prompts, all other
kernels and the gaps between them take no time."""


@dataclass(frozen=True)
class Between:
    """Times of steps that are a share of the way from slow to least."""

    slow: StepTimes
    least: StepTimes
    share: float

    @property
    def outside_ms(self) -> float:
        return self.slow.outside_ms

    def step_ms(self, work: Work) -> float:
        slow, least = self.slow.step_ms(work), self.least.step_ms(work)
        return slow + self.share * (least - slow)


def least_times(a: Architecture, slow: StepTimes, product_tflops: float = PRODUCT_TFLOPS) -> StepTimes:
    """The least that steps can take: see METHOD. slow: for the numbers of rows, and for what is outside of steps."""
    per_token = 2 * multiplications(a, prompts(1, LONG_PROMPT), last_tokens_only=True).linear / LONG_PROMPT
    return replace(
        slow,
        decode=tuple((rows, floor_us(a, rows, 0) / 1e3) for rows, _ in slow.decode),
        context_ns=2 * 2 * a.layers * a.kv_size / READ_GBPS,
        weights_ms=floor_us(a, 1, 0) / 1e3,
        overhead_ms=0.0,
        prefill_tokens_s=product_tflops * 1e12 / per_token,
        attention_ns=0.0,
    )


def default_choice(options: SchedulerOptions, a: Architecture) -> Choice:
    """Policy and step sizes as on a GPU."""
    sizes = step_sizes(options, gpu=True, experts=any(a.sparse))
    mixed, burst = sizes["mixed_step_tokens"], sizes["burst_step_tokens"]
    return Choice(options.policy, sizes["max_num_batched_tokens"], mixed, 2 * burst, burst)


def measured(path: Path) -> tuple[str, Workload, dict[str, dict[str, float]]]:
    """The model, the requests at the headline rate, and each system's figures under them. Raises UsageError."""
    try:
        results = json.loads(path.read_text())["results"]
        cells = {
            cell["cell"]["system"]: cell
            for cell in results["cells"]
            if (cell["cell"]["rate"], cell["cell"]["mode"], cell["cell"]["repeat"]) == (HEADLINE_RATE, "isolated", 0)
        }
        columns = (np.asarray(cells[OURS]["samples"][name]) for name in ("due_ms", "prompt_tokens", "tokens"))
        due, prompt, output = columns
        figures = {
            system: {f"{name}_p99": cell[f"{name}_ms"]["p99"]["value"] for name in ("ttft", "tpot")}
            | {"e2e_mean": cell["e2e_ms"]["mean"]}
            for system, cell in cells.items()
        }
        return results["model"], requests_of(due / 1000, prompt, output), figures
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{path} has no load of {OURS} at {HEADLINE_RATE:g} requests/s: {error}") from error


def benchmark(options: argparse.Namespace) -> None:
    run = Run("headroom", options)
    model, requests, figures = measured(ROOT / options.load)
    if model not in SHAPES:
        raise UsageError(f"{options.load} is of {model}, whose shape is not known: {', '.join(SHAPES)} are")
    a, defaults = parse_architecture(SHAPES[model]), SchedulerOptions()
    slow = StepTimes(read_decode(ROOT / options.decode, StepTimes.context_ns))
    least, choice = least_times(a, slow), default_choice(defaults, a)
    limits = argparse.Namespace(
        max_num_seqs=defaults.max_num_seqs, page_size=16, num_pages=65536, slo_ttft_ms=1000.0, slo_tpot_ms=50.0
    )
    rows = []
    for done, share in enumerate(shares := SHARES[:: len(SHARES) - 1] if options.smoke else SHARES):
        run.progress(way(share), done, len(shares))
        found = predict(choice, Between(slow, least, share), requests, limits)
        rows.append({"share": share, **{name: found[name] for name in FIGURES}})
    results = {"model": model, "choice": choice.name, "product_tflops": PRODUCT_TFLOPS, "measured": figures, "shares": rows}
    run.write(METHOD, results)
    print(page(results))


def options() -> argparse.Namespace:
    result = parser("headroom", "How much faster steps would have to be for the tails that were promised.")
    folder = RESULTS.relative_to(ROOT)
    result.add_argument("--load", default=f"{folder}/alone-llama-3-8b.json", metavar="FILE", help="of benchmarks.serving.grid")
    decode = f"{folder}/decode-llama-3-8b.json"
    result.add_argument("--decode", default=decode, metavar="FILE", help="decode steps, of benchmarks/parts/decode_step.py")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
