"""Steps that are cut into groups of layers: what the borders cost, and how long a latency-sensitive prompt waits for one.

    python -m benchmarks.parts.interrupted_steps --shape llama-3-8b --groups 1 8 63 1

For each number of groups an engine with random weights runs in this process, one after another; a client uses the real queues, in
shared memory. Prompts of best effort, as long as a step, follow each other. First, latency-sensitive prompts of 16 tokens arrive
one at a time: wait_ms is the time from one's submission to its token, less the median of the same on the idle engine. Its moment
is drawn from the end of the prompt before: in steps that are not cut few lie soon after a border, so waits are shorter there than
at moments drawn evenly. Then nobody interrupts, and step_ms is the time from the first prompt's token to the last one's, by their
number less one: the GPU has computed for long enough that its power limit sets the clock. cost: step_ms over the mean of the
engines whose steps are not cut (one group), less one.
"""

import secrets
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

sys.path[:0] = [str(Path(__file__).parents[2] / "tests")]

from support.engine_serving import serving  # noqa: E402

from benchmarks.common.distribution import describe, rounded  # noqa: E402
from benchmarks.common.harness import Flag, Run, check, run_benchmark, table  # noqa: E402
from benchmarks.common.model_shapes import SHAPES  # noqa: E402
from benchmarks.common.random_engines import measured_on, model_options, one_by_one  # noqa: E402
from blinkpy.config import Config  # noqa: E402
from blinkpy.dpu.link.queue_pair import InFlightRequest, QueuePair  # noqa: E402
from blinkpy.engine.engine import make_engine  # noqa: E402
from blinkpy.queues.request_parameters import RequestParameters  # noqa: E402
from blinkpy.queues.words import (  # noqa: E402
    COUNTER,
    FINISH_LENGTH,
    FINISH_MASK,
)

SHORT, QUEUED = 16, 3  # tokens of a latency-sensitive prompt; prompts of best effort that wait or run
IDLE_SAMPLES = 30
LONGEST_S = 200.0  # of one engine's measurements
LEVELS = (50, 90, 99)


class Client:
    """A client whose requests generate one token each. It records the times of submissions and tokens."""

    def __init__(self, pair: QueuePair, vocabulary: int):
        self._pair, self._vocabulary, self._rng = pair, vocabulary, np.random.default_rng(1)
        self._began = dict[InFlightRequest, float]()
        self._classes = dict[InFlightRequest, int]()
        self._deadline, self._beat = time.monotonic() + LONGEST_S, 0.0
        self.open = Counter[int]()  # by class: 1 is of best effort

    def submit(self, length: int, best_effort: int) -> None:
        prompt = self._rng.integers(0, self._vocabulary, length).astype(np.int32)
        parameters = RequestParameters(max_tokens=1, temperature=0.0, best_effort=best_effort)
        began = time.perf_counter()
        request = self._pair.submit(prompt, parameters)
        self._began[request], self._classes[request] = began, best_effort
        self.open[best_effort] += 1

    def poll(self) -> list[tuple[int, float, float]]:
        """(class, time of submission, time of the token) of each request that has ended."""
        ended = []
        for request, _, flags in self._pair.poll():
            now = time.perf_counter()
            check(flags & FINISH_MASK == FINISH_LENGTH, "a request ended otherwise than by its length")
            kind = self._classes.pop(request)
            self.open[kind] -= 1
            ended.append((kind, self._began.pop(request), now))
        now = time.monotonic()
        check(now < self._deadline, f"not done within {LONGEST_S:g} s")
        if now > self._beat:
            self._pair.heartbeat()
            self._beat = now + 0.2
        return ended

    def idle_s(self) -> float:
        """Median time of a latency-sensitive prompt alone."""
        times = []
        for _ in range(IDLE_SAMPLES):
            self.submit(SHORT, 0)
            while not (ended := self.poll()):
                pass
            times.append(ended[0][2] - ended[0][1])
        return float(np.median(times))

    def waits_s(self, length: int, samples: int, gap_s: float) -> list[float]:
        """Times of latency-sensitive prompts during best-effort steps of `length` tokens. gap_s: mean time between two
        prompts."""
        times, due = list[float](), time.perf_counter() + 1.0  # the first steps are not counted
        while len(times) < samples:
            if self.open[1] < QUEUED:
                self.submit(length, 1)
            if not self.open[0] and time.perf_counter() > due:
                self.submit(SHORT, 0)
            for kind, began, ended in self.poll():
                if kind == 0:
                    times.append(ended - began)
                    due = time.perf_counter() + gap_s * (0.5 + float(self._rng.random()))
        return times

    def step_s(self, length: int, steps: int) -> float:
        """Time of a best-effort step without interruption."""
        while self.open.total():
            self.poll()
        tokens = list[float]()
        while len(tokens) <= steps:
            if self.open[1] < QUEUED:
                self.submit(length, 1)
            tokens += [ended for _, _, ended in self.poll()]
        return (tokens[-1] - tokens[0]) / steps


def measure(config: Config, groups: int, vocabulary: int, run: Run) -> dict[str, Any]:
    """The figures of one engine. Raises ConfigError if the engine is not possible."""
    options = run.options
    length = config.scheduler.max_num_batched_tokens - 1  # and a token that it leads to
    run.progress(f"{groups} groups: starting", 0, 3)
    engine = make_engine(config.with_options({"step_groups": groups, "name": f"cut-{secrets.token_hex(6)}"}))
    with serving(engine) as pair:
        client = Client(pair, vocabulary)
        idle_s = client.idle_s()
        run.progress(f"{groups} groups: prompts that wait", 1, 3)
        waits = 1e3 * (np.array(client.waits_s(length, options.samples, options.gap)) - idle_s)
        suspensions = int(engine.views.engine[COUNTER["suspensions"]])
        run.progress(f"{groups} groups: steps", 2, 3)
        step_ms = 1e3 * client.step_s(length, options.steps)
    check(suspensions > 0 or groups == 1, "no step was suspended")
    found = describe(waits, "ms", percentiles=LEVELS, tail=0)
    facts = {"groups": groups, "step_ms": rounded(step_ms, 5), "idle_ms": rounded(1e3 * idle_s)}
    return facts | {"wait_ms": found, "suspensions": suspensions}


def benchmark(run: Run) -> None:
    options = run.options
    with tempfile.TemporaryDirectory() as folder:
        vocabulary = 4096 if options.smoke else int(SHAPES[options.shape]["vocab_size"])
        sizes = dict.fromkeys(("max_num_batched_tokens", "mixed_step_tokens", "burst_step_tokens"), options.tokens)
        sizes |= {"max_model_len": options.tokens, "max_num_seqs": 32, "slots": 64}
        sizes |= {"cut_step_tokens": options.tokens // 2, "num_pages": options.tokens // 2, "record_steps": 0, "grammar_slots": 0}
        config = Config().with_options({**model_options(folder, run), **sizes, "enable_prefix_caching": False})
        found = [one for _, one in one_by_one(options.groups, lambda groups: measure(config, groups, vocabulary, run))]
    whole = [one["step_ms"] for one in found if one["groups"] == 1]
    for one in found:
        one["cost"] = rounded(one["step_ms"] / float(np.mean(whole)) - 1) if whole else None
    run.write(__doc__, {**measured_on(run), "step_tokens": options.tokens, "engines": found})
    rows = []
    for one in found:
        waits = " / ".join(f"{one['wait_ms'][f'p{level}']['value']:.3g}" for level in LEVELS)
        rows.append([str(one["groups"]), f"{one['step_ms']:.5g}", f"{one['cost'] or 0:.2%}", waits])
    print(table(("groups", "step ms", "cost of the borders", "wait ms, p50 / p90 / p99"), rows))


if __name__ == "__main__":
    run_benchmark(
        "parts.interrupted_steps",
        "What cut steps cost, and how long a latency-sensitive prompt waits for one.",
        benchmark,
        shape=Flag("llama-3-8b", "of the model", "demo"),
        tokens=Flag(8192, "of a step", 256),
        groups=Flag((1, 8, 24, 63, 1), "that steps are cut into: an engine for each", (1, 3)),
        samples=Flag(120, "latency-sensitive prompts for each engine", 5),
        steps=Flag(20, "whose time is measured", 2),
        gap=Flag(0.15, "mean time between two latency-sensitive prompts, s", 0.05),
    )
