"""The CPU engine with the demonstration model: token rate by number of streams, and an engine step next to the bare forward.

    python -m benchmarks.parts.cpu_engine

rates    an engine process as `blinkpy serve` starts it, with requests from this process over a queue pair: tokens per second
         while all streams decode, for 1 to 32 streams
step     in this process, the engine's own loop at 16 streams, and after each of its steps the bare torch forward
         (tests/support/models/bare_forward.py: the same weights, batch and context; dense cache, no sampling, no scheduler), so
         that both meet the same disturbances: a ratio for each step
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import ROOT, Run, check, main, parser
from benchmarks.common.server_processes import PREFIX, START_S, engine
from blinkpy.config import Config
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.kv.state import DECODE_ROWS, MAX_CONTEXT, ROWS, Batch, Requests
from blinkpy.queues.completion import FINISH_LENGTH, FINISH_MASK, HAS_TOKEN
from blinkpy.queues.header import EngineFacts
from blinkpy.queues.request_parameters import Sampling

STREAMS = (1, 4, 8, 16, 32)
STEP_STREAMS = 16
PROMPT_TOKENS = 48
RATE_RATIO, STEP_RATIO = 3.0, 1.3
POLL_S = 0.0005
ATTACH_S = 30.0
ANSWER_S = 300.0  # for one round
MOST_BEHIND = 0.02  # of the largest logit: some roundings of bfloat16
LEASE_MS = 600_000
SETTLE = 16  # steps that are not measured
APART = 16  # tokens, that the contexts of the streams may differ by in a measured step


@dataclass
class Request:
    """One stream. times: of its tokens, s."""

    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish: int = 0


def prompts(facts: EngineFacts, count: int) -> list[np.ndarray]:
    """Different prompts of one length; no two share a page."""
    rng = np.random.default_rng(0)
    return [rng.integers(16, facts.vocab_size, PROMPT_TOKENS, dtype=np.int32) for _ in range(count)]


def serve_round(pair: QueuePair, given: list[np.ndarray], tokens: int) -> list[Request]:
    """Submit all prompts at once, greedy, and wait until each has its tokens."""
    sampling = Sampling(max_tokens=tokens, temperature=0.0)
    requests = [Request() for _ in given]
    for prompt, request in zip(given, requests, strict=True):
        pair.submit(prompt, sampling, request)
    deadline = time.monotonic() + ANSWER_S
    while pair.in_flight:
        events = pair.poll()
        now = time.perf_counter()
        for handle, token, flags in events:
            own: Request = handle.owner
            if flags & HAS_TOKEN:
                own.tokens.append(token)
                own.times.append(now)
            own.finish = flags & FINISH_MASK
        if not events:
            check(time.monotonic() < deadline, "the engine did not finish")
            time.sleep(POLL_S)
    pair.heartbeat()
    check(all(r.finish == FINISH_LENGTH and len(r.tokens) == tokens for r in requests), "a stream ended early")
    return requests


def decode_rate(requests: list[Request]) -> float:
    """Tokens per second from when the last stream has its first token until the first one has its last."""
    begin, end = max(r.times[0] for r in requests), min(r.times[-1] for r in requests)
    return sum(begin < when <= end for r in requests for when in r.times) / (end - begin)


def rates(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    found: dict[int, list[float]] = {count: [] for count in options.streams}
    intervals: dict[int, list[float]] = {count: [] for count in options.streams}
    same = total = 0
    with engine(run.progress, device="cpu", lease_ms=LEASE_MS, enable_prefix_caching=False, threads=options.threads) as config:
        pair = QueuePair(attach_segment(config.engine.name, 0))
        pair.attach(ATTACH_S)
        given = prompts(pair.facts, max(options.streams))
        alone = [serve_round(pair, [prompt], 8)[0].tokens for prompt in given]
        behind = behind_the_best(given[:2], alone[:2])
        check(behind <= MOST_BEHIND, f"the engine's tokens are not the bare forward's: {behind:.3g} behind its best ones")
        for i in range(options.rounds):
            for count in options.streams:
                run.progress("token rates", i * len(options.streams), options.rounds * len(options.streams))
                requests = serve_round(pair, given[:count], options.tokens)
                found[count].append(decode_rate(requests))
                intervals[count] += [1000 * d for r in requests for d in np.diff(r.times[1:])]
                same += sum(r.tokens[:8] == tokens for r, tokens in zip(requests, alone, strict=False))
                total += count
        pair.close()
    # Sums of floating-point numbers may differ with the batch's size, and then the most likely token now and then.
    check(same >= 0.9 * total, f"only {same} of {total} streams began as they do alone")
    return {
        "begin_as_alone": f"{same} of {total}",
        "tokens_per_s": {str(count): describe(values, "tokens/s") for count, values in found.items()},
        "interval_ms": {str(count): describe(values, "ms") for count, values in intervals.items()},
    }


# ---- one step, next to the bare forward -----------------------------------------------------------------------------------


def bare_model(rows: int, room: int) -> Any:
    """The bare forward of the demonstration model."""
    sys.path.append(str(ROOT / "tests"))
    from support.models.bare_forward import BareForward  # type: ignore[import-not-found,unused-ignore]

    from blinkpy.models.description.decoder_description import read_architecture
    from blinkpy.models.weights.decoder_weights import choose_dtype, load_weights
    from blinkpy.models.weights.model_folder import resolve_model

    folder = resolve_model("demo")
    architecture = read_architecture(folder)
    return BareForward(architecture, load_weights(architecture, folder, choose_dtype(architecture, "auto", "cpu")), rows, room)


def behind_the_best(given: list[np.ndarray], answers: list[list[int]]) -> float:
    """How far the answers' tokens are, at most, behind the most likely ones of the bare forward, which is fed with them one
    after another: the difference of their logits, relative to the largest logit. Equal sums in another order differ, so the
    tokens themselves may: which they do on processors that multiply bfloat16 numbers in tiles."""
    import torch

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
    """A step around the engine's, that takes the time and runs the bare forward after it."""

    def __init__(self, inner: Any, rows: int, room: int):
        import torch

        self._inner, self._rows, self._torch = inner, rows, torch
        self._bare = bare_model(rows, room)
        self._left = 0.0  # when the engine's last step ended, and the bare forward after it
        self.samples: list[tuple[float, float, float, int]] = []  # scheduling, step, bare (ms), context

    def run(self, batch: Batch, requests: Requests) -> None:
        entered = time.perf_counter()
        self._inner.run(batch, requests)
        done = time.perf_counter()
        rows, context = int(batch.counts[ROWS]), int(batch.counts[MAX_CONTEXT])
        full = rows == self._rows == int(batch.counts[DECODE_ROWS])
        # The engine may begin before all are submitted: they are then a few tokens apart, which is nothing against a context.
        if full and context - int(batch.context_lengths[:rows].min()) <= APART:
            ids = self._torch.from_numpy(batch.token_ids[:rows].astype(np.int64))
            began = time.perf_counter()
            self._bare(ids, context - 1)
            bare = time.perf_counter() - began
            if self._left:
                self.samples.append((1000 * (entered - self._left), 1000 * (done - entered), 1000 * bare, context))
            self._left = time.perf_counter()
        else:
            self._left = 0.0


def steps(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    """The engine's loop in this process; a client thread that sleeps while it is measured."""
    from blinkpy.engine.engine import Engine

    name = f"{PREFIX}{os.getpid()}-steps"
    limit = PROMPT_TOKENS + options.step_tokens + 1
    values = {"device": "cpu", "model": "demo", "name": name, "lease_ms": LEASE_MS, "threads": options.threads}
    instance = Engine(Config().with_options({**values, "max_model_len": limit}), run.progress)
    instance.start()
    watch = Watch(instance._step, STEP_STREAMS, limit)
    instance._step = watch
    problems: list[BaseException] = []

    def client() -> None:
        try:
            pair = QueuePair(attach_segment(name, 0))
            pair.attach(ATTACH_S)
            for prompt in prompts(pair.facts, STEP_STREAMS):
                pair.submit(prompt, Sampling(max_tokens=options.step_tokens, seed=1, temperature=options.temperature), Request())
            finished, deadline = 0, time.monotonic() + START_S
            while finished < STEP_STREAMS:
                time.sleep(0.5)
                finished += sum(flags & FINISH_MASK == FINISH_LENGTH for _, _, flags in pair.poll())
                check(time.monotonic() < deadline, "the engine did not finish")
            pair.close()
        except BaseException as error:
            problems.append(error)
        finally:
            instance.stop()

    thread = threading.Thread(target=client)
    try:
        run.progress("engine steps next to the bare forward")
        thread.start()
        instance.run()
    finally:
        thread.join()
        instance.close()
    if problems:
        raise problems[0]
    samples = np.array(watch.samples[SETTLE:])
    check(len(samples) >= 10, f"only {len(samples)} steps had all streams")
    scheduling, step, bare, contexts = samples.T
    return {
        "streams": STEP_STREAMS,
        "contexts": [int(contexts[0]), int(contexts[-1])],
        "scheduling_ms": describe(scheduling, "ms"),
        "step_ms": describe(step, "ms"),
        "engine_ms": describe(scheduling + step, "ms"),
        "bare_ms": describe(bare, "ms"),
        "ratio": describe((scheduling + step) / bare, ""),
        "ratio_of_medians": round(float(np.median(scheduling + step) / np.median(bare)), 4),
    }


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        options.rounds, options.tokens, options.step_tokens, options.streams = 1, 24, 64, [1, 16]
    run = Run("parts.cpu_engine", options)
    import torch

    if options.threads:
        torch.set_num_threads(options.threads)
    results: dict[str, Any] = {"torch_threads": torch.get_num_threads()}
    results["step"] = steps(options, run)
    results["rates"] = rates(options, run)
    found = {int(count): item["p50"]["value"] for count, item in results["rates"]["tokens_per_s"].items()}
    if 1 in found and STEP_STREAMS in found:
        ratio = found[STEP_STREAMS] / found[1]
        results["rates"]["ratio_16_to_1"] = round(ratio, 3)
        run.target(f"token rate of {STEP_STREAMS} streams to that of one", ratio, RATE_RATIO, "x", at_most=False)
    ratio = results["step"]["ratio"]["p50"]["value"]
    run.target(f"engine step to bare forward at {STEP_STREAMS} streams, median of the steps' ratios", ratio, STEP_RATIO, "x")
    run.write(
        f"""Built-in demonstration model, prompts of {PROMPT_TOKENS} tokens, all of one length. rates: greedy, rounds alternate
        over the numbers of streams; a rate counts tokens from when every stream has its first until one has its last; the first
        streams' tokens are compared with the bare forward's, the others with what they are alone. step: one sample for each step
        with all {STEP_STREAMS} streams in decode; engine_ms is everything from the end of one step to the end of the next,
        scheduling and sampling (temperature {options.temperature:g}) included; ratio is engine_ms to bare_ms of that step.""",
        results,
    )


def options() -> argparse.Namespace:
    result = parser("parts.cpu_engine", "The CPU engine with the demonstration model.")
    result.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    result.add_argument("--rounds", type=int, default=10)
    result.add_argument("--tokens", type=int, default=128, help="of each stream, for the rates")
    result.add_argument("--step-tokens", type=int, default=1000, help="of each stream, for the steps")
    result.add_argument("--temperature", type=float, default=0.8, help="of the streams whose steps are measured")
    result.add_argument("--threads", type=int, default=0, help="torch threads (0: one for each core)")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
