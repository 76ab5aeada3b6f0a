"""CPU time of one front-end worker for each token that it delivers, with the null engine.

    python -m benchmarks.parts.front_end_cpu

The worker has one core for itself, by pinning; the engine and the client share another one. The engine runs the real
scheduler over the real queues and makes tokens up.

    paced       64 streams, all in decode, one token each in every step of --step-ms: what the target is about
    turnover    the same with short answers, each replaced by the next when it ends: parsing, tokenizing, submitting included
    first       time to the first event of one request after another, engine unpaced: the way through all parts
    unpaced     64 streams from an engine that makes tokens as fast as it can: the most that one worker delivers
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import sys
import time
from typing import Any

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Run, check, main, parser, pinned
from benchmarks.common.server_processes import cpu_s, engine, front_end, system_share
from benchmarks.common.streams import Client, Stream, post
from blinkpy.config import Config

TARGET_US = 25.0
FRONT_CORE, OTHER_CORE = 0, 1
TURNOVER_TOKENS = 64
LEAD_S = 1.0  # of a load before it is measured
CHECKED = 4  # answers that are compared with what the same request gets alone
WORDS = ("the", "king", "ship", "of", "and", "a", "sea", "old", "house", "night", "went", "said", "to", "with", "river", "long")


def body(rng: random.Random, tokens: int) -> dict[str, Any]:
    """A request with a prompt of some 30 words."""
    prompt = " ".join(rng.choice(WORDS) for _ in range(30))
    options = {"include_usage": True}
    return {"prompt": prompt, "max_tokens": tokens, "seed": rng.getrandbits(31), "ignore_eos": True, "stream_options": options}


class Answers:
    """What was asked, to be checked when the load is over."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, Any], Stream]] = []

    def check(self, port: int) -> list[list[float]]:
        """Check all ended answers; the times of their token events."""
        times = []
        for i, (request, stream) in enumerate(self.asked):
            events = stream.events()
            check(events[-1][1].get("usage", {}).get("completion_tokens") == request["max_tokens"], "tokens are missing")
            parts = [(when, event["choices"][0]) for when, event in events[:-1]]
            check([part["finish_reason"] for _, part in parts] == [None] * (len(parts) - 1) + ["length"], "a wrong end")
            times.append([when for when, part in parts if part["finish_reason"] is None])
            if i < CHECKED:
                alone = {key: value for key, value in request.items() if key != "stream_options"}
                whole = post(port, "/v1/completions", {"model": "demo", **alone})
                streamed = "".join(part["text"] for _, part in parts)
                check(streamed == whole["choices"][0]["text"], "streamed and whole texts differ")
        return times


def load(port: int, pid: int, streams: int, tokens: int, seconds: float, turnover: bool, seed: int) -> dict[str, Any]:
    """Keep streams busy; the worker's CPU time for each token event within the window, and more."""
    rng, client, answers = random.Random(seed), Client(port), Answers()

    def start() -> None:
        request = body(rng, tokens)
        answers.asked.append((request, client.start(request)))

    try:
        for _ in range(streams):
            start()
        while not all(stream.pieces for _, stream in answers.asked[:streams]):
            for _ in client.turn():
                if turnover:
                    start()
        opens = time.perf_counter() + LEAD_S
        closes = opens + seconds
        marks: list[tuple[float, float]] = []
        early = 0
        while client.live:
            now = time.perf_counter()
            if (len(marks) == 0 and now >= opens) or (len(marks) == 1 and now >= closes):
                marks.append((now, cpu_s(pid)))
            for _ in client.turn(0.1):
                early += len(marks) < 2
                if turnover and now < closes:
                    start()
        check(len(marks) == 2, "the answers ended before the window did; ask for more tokens")
    finally:
        client.close()
    (opened, cpu_then), (closed, cpu_now) = marks
    times = answers.check(port)
    check(turnover or early == 0, "an answer ended within the window")
    events = sum(opened <= when < closed for stream in times for when in stream)
    ended = sum(opened <= stream.pieces[-1][0] < closed for _, stream in answers.asked)
    gaps = [b - a for stream in times for a, b in itertools.pairwise(stream) if opened <= a and b < closed]
    everything = sum(request["max_tokens"] for request, _ in answers.asked)
    return {
        "streams": streams,
        "seconds": round(closed - opened, 3),
        "token_events": events,
        "token_events_per_s": round(events / (closed - opened), 1),
        "tokens_per_s": round(events / (closed - opened) * everything / sum(map(len, times)), 1),
        "tokens_per_event": round(everything / sum(map(len, times)), 4),
        "answers_ended": ended,
        "cpu_us_per_token_event": round((cpu_now - cpu_then) / events * 1e6, 3),
        "worker_core_share": round((cpu_now - cpu_then) / (closed - opened), 4),
        "interval_ms": describe(1000 * np.array(gaps), "ms"),
    }


def first_events(port: int, count: int, seed: int) -> dict[str, Any]:
    """Time to the first token event of requests one after another, on one connection; ms."""
    rng, client, answers, times = random.Random(seed), Client(port), Answers(), []
    try:
        for i in range(count + 20):
            request = body(rng, 4)
            stream = client.start(request)
            answers.asked.append((request, stream))
            while client.live:
                client.turn()
            if i >= 20:
                times.append(stream.events()[0][0] - stream.began)
        answers.check(port)
    finally:
        client.close()
    return describe(1000 * np.array(times), "ms")


def idle(pid: int, seconds: float) -> float:
    """CPU share of a worker with nothing to do."""
    before, began = cpu_s(pid), time.perf_counter()
    time.sleep(seconds)
    return (cpu_s(pid) - before) / (time.perf_counter() - began)


def benchmark(options: argparse.Namespace) -> None:
    if options.smoke:
        options.seconds, options.step_ms, options.rounds, options.first, options.streams = 0.5, 10.0, 1, 20, 8
    run = Run("parts.front_end_cpu", options)
    streams, seconds = options.streams, options.seconds
    check(len(os.sched_getaffinity(0)) >= 2, "this benchmark needs two cores")
    # The context must hold an answer that outlasts the window; the null engine has no model that could limit it.
    steps = int(1.5 * (seconds + 2 * LEAD_S) / (options.step_ms / 1000)) + 50
    results: dict[str, Any] = {"paced": [], "turnover": [], "unpaced": []}
    common = {"device": "null", "load_format": "dummy"}
    with engine(run.progress, OTHER_CORE, null_step_us=int(1000 * options.step_ms), **common) as config:
        check(steps <= context(config), f"an answer of {steps} tokens does not fit: use a shorter --seconds")
        with front_end(config, run.progress, FRONT_CORE) as (port, pid), pinned(OTHER_CORE):
            results["idle_core_share"] = round(idle(pid, min(seconds, 2.0)), 5)
            for i in range(options.rounds):
                run.progress("paced streams", i, options.rounds)
                results["paced"].append(load(port, pid, streams, steps, seconds, False, options.seed + i))
                run.progress("paced streams with turnover", i, options.rounds)
                results["turnover"].append(load(port, pid, streams, TURNOVER_TOKENS, seconds, True, options.seed + 100 + i))
            results["system_share_of_cpu"] = round(system_share(pid), 3)
    with (
        engine(run.progress, OTHER_CORE, null_step_us=0, **common) as config,
        front_end(config, run.progress, FRONT_CORE) as (port, pid),
        pinned(OTHER_CORE),
    ):
        run.progress("time to the first event")
        results["first_ms"] = first_events(port, options.first, options.seed)
        for i in range(options.rounds):
            run.progress("unpaced streams", i, options.rounds)
            results["unpaced"].append(load(port, pid, streams, context(config) // 2, seconds, True, options.seed + 200 + i))
    for kind in ("paced", "turnover", "unpaced"):
        results[kind] = gather(results[kind])
    paced = results["paced"]["cpu_us_per_token_event"]
    run.target(f"CPU of a worker per token event, {streams} paced streams, median round", paced, TARGET_US, "us")
    run.write(
        """One worker pinned to one core; null engine and client on another. A token event is a server-sent event with text; CPU
        time is that of all of the worker's threads from /proc/PID/task/*/schedstat, the idle share not subtracted,
        divided by the token events that the client received within the window. Every answer is parsed and checked
        after the load: status, chunks, order, finish reason, usage, and for some the text against the same request
        answered whole. Requests go to /v1/completions with prompts of 30 words. Rounds alternate between the kinds;
        figures are medians of rounds. Where the engine is faster than the worker, an event has the text of several
        tokens: tokens_per_event, over whole answers, and tokens_per_s, which is token_events_per_s times that.
        interval_ms: between two token events of one stream, at the client.""",
        results,
    )


def context(config: Config) -> int:
    """Tokens that a prompt of body() leaves for the answer."""
    from blinkpy.models.description.decoder_description import read_architecture
    from blinkpy.models.weights.model_folder import resolve_model

    limit = config.model.max_model_len or read_architecture(resolve_model(config.model.model, weights=False)).max_position
    return limit - 200


def gather(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, and the rounds."""
    result: dict[str, Any] = {}
    for key in ("token_events_per_s", "tokens_per_s", "tokens_per_event", "cpu_us_per_token_event", "worker_core_share"):
        result[key] = float(f"{np.median([one[key] for one in rounds]):.5g}")
    result["rounds"] = rounds
    return result


def options() -> argparse.Namespace:
    result = parser("parts.front_end_cpu", "CPU time of a front-end worker per token event.")
    result.add_argument("--streams", type=int, default=64)
    result.add_argument("--step-ms", type=float, default=20.0, help="of the paced null engine")
    result.add_argument("--seconds", type=float, default=10.0, help="window of one round")
    result.add_argument("--rounds", type=int, default=5)
    result.add_argument("--first", type=int, default=500, help="requests for the time to the first event")
    result.add_argument("--seed", type=int, default=1, help="of the prompts")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
