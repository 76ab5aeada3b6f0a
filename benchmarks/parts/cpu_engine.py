"""The CPU engine with the demonstration model: token rate by number of streams, and an engine step next to the bare forward.

    python -m benchmarks.parts.cpu_engine

rates    the engine's own loop in this process, with requests from a thread over a queue pair: tokens per second while all streams
         decode greedily, for 1 to 32 streams, by the time from the end of one step to the end of the next; rounds alternate over
         the numbers of streams, and the first tokens of some streams are compared with the bare forward's
step     the same at 16 streams, and after each step the bare torch forward (tests/support/models/bare_forward.py: the same
         weights, batch and context; dense cache, no sampling, no scheduler), so that both meet the same disturbances; engine_ms
         is everything from the end of one step to the end of the next, and ratio is engine_ms to bare_ms of that step
"""

import contextlib
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common.distribution import describe
from benchmarks.common.harness import ROOT, Flag, Run, check, run_benchmark
from blinkpy.config import Config
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.kv.state import DECODE_ROWS, MAX_CONTEXT, ROWS, Batch, Requests
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.words import FINISH_LENGTH, FINISH_MASK, HAS_TOKEN

STEP_STREAMS = 16
PROMPT_TOKENS = 48
RATE_RATIO, STEP_RATIO = 3.0, 1.3
ATTACH_S, ANSWER_S = 30.0, 600.0
POLL_S = 0.5
COMPARED, COMPARED_TOKENS = 2, 8  # answers whose first tokens are compared with those of the bare forward
MOST_BEHIND = 0.02  # of the largest logit: some roundings of bfloat16
LEASE_MS = 600_000
SETTLE = 16  # warm-up steps
APART = 16  # maximum difference of the streams' contexts in a measured step, in tokens


def bare_model(rows: int, capacity: int) -> Any:
    """The bare forward of the demonstration model."""
    sys.path.append(str(ROOT / "tests"))
    from support.models.bare_forward import BareForward  # type: ignore[import-not-found,unused-ignore]

    from blinkpy.models.families.family import describe_model
    from blinkpy.models.weights.decoder_weights import choose_dtype
    from blinkpy.models.weights.model_folder import resolve_model
    from blinkpy.models.weights.weight_loader import load_weights

    folder = resolve_model("demo")
    model = describe_model(folder)
    return BareForward(model, load_weights(model, folder, choose_dtype(model, "auto", "cpu")), rows, capacity)


def behind_the_best(given: list[np.ndarray], answers: list[list[int]]) -> float:
    """The maximum distance of the answers' tokens from the most likely tokens of the bare forward.

    The bare forward gets the answers' tokens one by one. The distance is the difference of the logits, relative to the
    largest. Sums in another order may give other tokens.
    """
    model = bare_model(len(given), PROMPT_TOKENS + len(answers[0]))
    tokens = torch.tensor([[*prompt.tolist(), *answer] for prompt, answer in zip(given, answers, strict=True)])
    behind = 0.0
    for at in range(tokens.shape[1] - 1):
        logits = model(tokens[:, at], at).float()
        if at >= PROMPT_TOKENS - 1:
            chosen = logits.gather(1, tokens[:, at + 1, None])
            behind = max(behind, ((logits.amax(1, keepdim=True) - chosen) / logits.abs().amax()).max().item())
    return behind


class Watch:
    """The engine's step, timed, optionally followed by the bare forward."""

    def __init__(self, inner: Any, rows: int, bare: Any = None):
        self._inner, self._rows, self._bare = inner, rows, bare
        self._left = 0.0  # when the engine's last step ended, and the bare forward after it
        self.samples: list[tuple[float, float, float, int]] = []  # scheduling, step, bare (ms), context

    def run(self, batch: Batch, requests: Requests) -> None:
        entered = time.perf_counter()
        self._inner.run(batch, requests)
        done = time.perf_counter()
        rows, context = int(batch.counts[ROWS]), int(batch.counts[MAX_CONTEXT])
        full = rows == self._rows == int(batch.counts[DECODE_ROWS])
        # The engine may begin before all are submitted. Their contexts then differ by a few tokens, which is negligible.
        if not full or context - int(batch.context_lengths[:rows].min()) > APART:
            self._left = 0.0
            return
        began = time.perf_counter()
        if self._bare:
            self._bare(torch.from_numpy(batch.token_ids[:rows].astype(np.int64)), context - 1)
        bare = time.perf_counter() - began
        if self._left:
            self.samples.append((1000 * (entered - self._left), 1000 * (done - entered), 1000 * bare, context))
        self._left = time.perf_counter()


def decode(run: Run, streams: int, tokens: int, temperature: float, bare: bool) -> Any:
    """Let the engine's loop answer streams. Returns the samples of Watch, float64 [n, 4], and (prompt, tokens) of some
    streams."""
    from blinkpy.engine.engine import make_engine

    name = f"serve-benchmark-{os.getpid()}-{streams}-{int(bare)}"
    limit = PROMPT_TOKENS + tokens + 1
    values = {"device": "cpu", "model": "demo", "name": name, "lease_ms": LEASE_MS, "threads": run.options.threads}
    values |= {"max_model_len": limit, "enable_prefix_caching": False}
    instance = make_engine(Config().with_options(values), run.progress)
    instance.start()
    loop: Any = instance.runner
    watch = loop.step = Watch(loop.step, streams, bare_model(streams, limit) if bare else None)
    answers: list[tuple[NDArray[np.int32], list[int]]] = []

    def client() -> None:
        try:
            pair = QueuePair(attach_segment(name, 0))
            pair.attach(ATTACH_S)
            rng = np.random.default_rng(0)
            for prompt in rng.integers(16, pair.facts.vocab_size, (streams, PROMPT_TOKENS), dtype=np.int32):
                answers.append((prompt, []))
                pair.submit(prompt, RequestParameters(max_tokens=tokens, seed=1, temperature=temperature), answers[-1][1])
            deadline = time.monotonic() + ANSWER_S
            while pair.in_flight:
                time.sleep(POLL_S)
                for request, token, flags in pair.poll():
                    if flags & HAS_TOKEN:
                        request.owner.append(token)
                    check(flags & FINISH_MASK in (0, FINISH_LENGTH), "a stream ended early")
                check(time.monotonic() < deadline, "the engine did not finish")
            pair.close()
            check(all(len(found) == tokens for _, found in answers), "tokens are missing")
        finally:
            instance.stop()

    with contextlib.closing(instance), ThreadPoolExecutor(1) as pool:
        done = pool.submit(client)
        instance.run()
        done.result()
    samples = np.array(watch.samples[SETTLE:])
    check(len(samples) >= 4, f"only {len(samples)} steps had all {streams} streams")
    return samples, answers[:COMPARED]


def rates(run: Run) -> dict[str, Any]:
    """Tokens per second by number of streams; rounds alternate over these."""
    options = run.options
    found: dict[int, list[float]] = {count: [] for count in options.streams}
    for i in range(options.rounds):
        for count in options.streams:
            run.progress("token rates", i * len(options.streams), options.rounds * len(options.streams))
            samples, answers = decode(run, count, options.tokens, 0.0, False)
            found[count].append(1000 * count * len(samples) / float(samples[:, :2].sum()))
            if i == 0:
                behind = behind_the_best([prompt for prompt, _ in answers], [words[:COMPARED_TOKENS] for _, words in answers])
                check(behind <= MOST_BEHIND, f"the engine's tokens are not the bare forward's: {behind:.3g} behind its best ones")
    return {"tokens_per_s": {str(count): describe(values, "tokens/s") for count, values in found.items()}}


def steps(run: Run) -> dict[str, Any]:
    """Compare steps of the engine with the bare forward."""
    run.progress("engine steps next to the bare forward")
    samples, _ = decode(run, STEP_STREAMS, run.options.step_tokens, run.options.temperature, True)
    scheduling, step, bare, contexts = samples.T
    return {
        "streams": STEP_STREAMS,
        "contexts": [int(contexts[0]), int(contexts[-1])],
        "scheduling_ms": describe(scheduling, "ms"),
        "step_ms": describe(step, "ms"),
        "engine_ms": describe(scheduling + step, "ms"),
        "bare_ms": describe(bare, "ms"),
        "ratio": describe((scheduling + step) / bare, ""),
    }


def benchmark(run: Run) -> None:
    options = run.options
    if options.threads:
        torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    results["step"] = steps(run)
    results["rates"] = rates(run)
    found = {int(count): item["p50"]["value"] for count, item in results["rates"]["tokens_per_s"].items()}
    if 1 in found and STEP_STREAMS in found:
        ratio = found[STEP_STREAMS] / found[1]
        results["rates"]["ratio_16_to_1"] = round(ratio, 3)
        run.target(f"token rate of {STEP_STREAMS} streams to that of one", ratio, RATE_RATIO, "x", at_most=False)
    ratio = results["step"]["ratio"]["p50"]["value"]
    run.target(f"engine step to bare forward at {STEP_STREAMS} streams, median of the steps' ratios", ratio, STEP_RATIO, "x")
    run.write(__doc__, results)


if __name__ == "__main__":
    run_benchmark(
        "parts.cpu_engine",
        "The CPU engine with the demonstration model.",
        benchmark,
        streams=Flag((1, 4, 8, 16, 32), smoke=(1, 16)),
        rounds=Flag(10, smoke=1),
        tokens=Flag(128, "of each stream, for the rates", smoke=32),
        step_tokens=Flag(1000, "of each stream, for the steps", smoke=64),
        temperature=Flag(0.8, "of the streams whose steps are measured"),
        threads=Flag(0, "torch threads; 0: one for each core"),
    )
