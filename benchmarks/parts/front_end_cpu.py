"""CPU time of one front-end worker for each token that it delivers, with the null engine.

    python -m benchmarks.parts.front_end_cpu

The worker has one core for itself, by pinning; the engine and the client share another core. The engine runs the real scheduler
over the real queues, with synthetic tokens. A token event is a server-sent event with text. CPU time is the time of all the
worker's threads from /proc/PID/task/*/schedstat, the idle share included, divided by the token events that the client received
within the window. Every answer must have all of its tokens. Rounds alternate between the kinds; figures are medians of rounds.
interval_ms: time between two token events of one stream, at the client.

    paced       64 streams, all in decode, one token each in every step of --step-ms: the target applies to these
    turnover    the same with short answers, each replaced by the next when it ends: parsing, tokenizing, submitting included
"""

import contextlib
import os
import random
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, check, on_cores, run_benchmark
from benchmarks.common.load import Request, Target, get, offer
from benchmarks.common.processor_time import cpu_s
from blinkpy.config import Config
from blinkpy.models.weights.model_folder import find_model
from blinkpy.processes import Child
from blinkpy.progress import ProgressCallback

TARGET_US = 15.0
FRONT_CORE, OTHER_CORE = (sorted(os.sched_getaffinity(0)) * 2)[:2]
TURNOVER_TOKENS = 64
LEAD_S = 1.5  # of a load before it is measured
DRAIN_S = 60.0  # maximum time until the answers end
START_S, STOP_S = 600.0, 20.0
WORDS = ("the", "king", "ship", "of", "and", "a", "sea", "old", "house", "night", "went", "said", "to", "with", "river", "long")


@contextlib.contextmanager
def child(name: str, config: Config, core: int, report: ProgressCallback) -> Iterator[tuple[Child, dict[str, Any]]]:
    """A process of `blinkpy serve` ("engine" or "frontend"), pinned to a core; also yields the lines that it prints
    when ready."""
    with on_cores([core]):
        process = Child(name, config)
    try:
        yield process, process.wait_ready(START_S, report) or {}
    finally:
        process.end(STOP_S)


@contextlib.contextmanager
def serving(report: ProgressCallback, **options: Any) -> Iterator[tuple[int, int]]:
    """A null engine and a front end with one worker, each on its core; yields (port, process id of the worker)."""
    name = f"serve-benchmark-{os.getpid()}-{secrets.token_hex(4)}"
    values = {"name": name, "model": "demo", "device": "null", "load_format": "dummy", **options}
    config = find_model(Config().with_options(values), report)
    with child("engine", config, OTHER_CORE, report):
        config = config.with_options({"port": 0, "workers": 1, "log_level": "warning", "shutdown_s": 1})
        with child("frontend", config, FRONT_CORE, report) as (front, facts):
            workers = (Path(f"/proc/{front.pid}/task") / str(front.pid) / "children").read_text().split()
            check(len(workers) == 1, f"the front end has {len(workers)} workers, not one")
            port, deadline = int(facts["port"]), time.monotonic() + START_S
            while get("127.0.0.1", port, "/health")[0] != 200:
                check(time.monotonic() < deadline, "the front end found no engine")
                time.sleep(0.05)
            yield port, int(workers[0])


def load(port: int, pid: int, streams: int, rounds: int, tokens: int, seconds: float, seed: int) -> dict[str, Any]:
    """Keep streams busy with `rounds` answers each. Returns the figures of a window, which must end before the
    answers."""
    rng = random.Random(seed)
    prompts = [" ".join(rng.choice(WORDS) for _ in range(30)) for _ in range(streams * rounds)]
    marks: list[tuple[float, float]] = []  # (seconds since the start, CPU seconds) at both ends of the window

    def tick(now: float) -> None:
        if (not marks and now >= LEAD_S) or (len(marks) == 1 and now >= marks[0][0] + seconds):
            marks.append((now, cpu_s(pid)))

    requests = [Request(0.0, prompt, tokens) for prompt in prompts]
    limit_s = LEAD_S + seconds + DRAIN_S
    result = offer(Target("127.0.0.1", port, "demo"), requests, streams, 1, [OTHER_CORE], limit_s, tick)
    failed = {record.error for record in result.records} - {""}
    check(not failed, f"answers failed: {'; '.join(sorted(failed))}")
    check(len(marks) == 2, "the answers ended before the window did; ask for more tokens")
    (opened, cpu_then), (closed, cpu_now) = marks
    times = [record.times for record in result.records]
    inside = [when[(opened <= when) & (when < closed)] for when in times]
    events = sum(map(len, inside))
    last_stream = min(max(times[i][-1] for i in range(stream, len(times), streams)) for stream in range(streams))
    check(last_stream >= closed, "a stream had nothing more to ask within the window")
    window, everything = closed - opened, sum(record.tokens for record in result.records)
    return {
        "streams": streams,
        "seconds": round(window, 3),
        "token_events": events,
        "token_events_per_s": round(events / window, 1),
        "tokens_per_event": round(everything / sum(map(len, times)), 4),
        "answers_ended": int(sum(opened <= when[-1] < closed for when in times)),
        "cpu_us_per_token_event": round((cpu_now - cpu_then) / events * 1e6, 3),
        "worker_core_share": round((cpu_now - cpu_then) / window, 4),
        "interval_ms": describe(1000 * np.concatenate([np.diff(when) for when in inside]), "ms"),
    }


def benchmark(run: Run) -> None:
    options = run.options
    check(FRONT_CORE != OTHER_CORE, "this benchmark needs two cores")
    # The answers outlast the window by a half and a second. The null engine has no model that could limit them.
    steps = int(1.5 * (options.seconds + 2 * LEAD_S) / (options.step_ms / 1000)) + 50
    answers = -(-steps // TURNOVER_TOKENS)
    kinds = {"paced": (1, steps), "turnover": (answers, TURNOVER_TOKENS)}  # answers of a stream, and their tokens
    rounds: dict[str, list[dict[str, Any]]] = {kind: [] for kind in kinds}
    with serving(run.progress, null_step_us=int(1000 * options.step_ms)) as (port, pid), on_cores([OTHER_CORE]):
        for i in range(options.rounds):
            for kind, sizes in kinds.items():
                run.progress(f"{kind} streams", i, options.rounds)
                rounds[kind].append(load(port, pid, options.streams, *sizes, options.seconds, options.seed + i))
    results = {kind: gather(rounds[kind]) for kind in kinds}
    paced = results["paced"]["cpu_us_per_token_event"]
    run.target(f"CPU of a worker per token event, {options.streams} paced streams, median round", paced, TARGET_US, "us")
    run.write(__doc__, results)


def gather(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over rounds, and the rounds."""
    names = ("token_events_per_s", "tokens_per_event", "cpu_us_per_token_event", "worker_core_share")
    return {name: float(f"{np.median([one[name] for one in rounds]):.5g}") for name in names} | {"rounds": rounds}


if __name__ == "__main__":
    run_benchmark(
        "parts.front_end_cpu",
        "CPU time of a front-end worker per token event.",
        benchmark,
        streams=Flag(64, smoke=8),
        step_ms=Flag(20.0, "of the paced null engine", smoke=10.0),
        seconds=Flag(10.0, "window of one round", smoke=0.5),
        rounds=Flag(5, smoke=1),
        seed=Flag(1, "of the prompts"),
    )
