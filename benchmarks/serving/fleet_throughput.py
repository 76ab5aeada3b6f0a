"""Tokens a second of one, two, four and eight null engines behind one front end with one worker.

    python -m benchmarks.serving.fleet_throughput

Each engine runs the real scheduler over its own queues and makes tokens up, a step every --step-ms for up to --slots streams:
what one can give is slots / step. The clients keep all slots of all engines busy, each stream with one answer after the other.
`paced`: one engine is far below what the worker can do, and N must give N times as much. `fast`: steps of --fast-step-ms, with
which several engines offer more than one worker can take: there the worker's core is full, and what it delivers is the front
end's own limit. The worker has a core for itself where there are enough; engines and clients share the others. Tokens are
counted at the clients, within a window in which all streams run; every answer that has ended must be whole.
"""

import contextlib
import os
import random
import re
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common.harness import Flag, Run, check, on_cores, run_benchmark
from benchmarks.common.load import Request, Target, get, offer
from benchmarks.common.processor_time import cpu_s
from blinkpy.config import Config
from blinkpy.dpu.fleet.engine_list import engine_configs
from blinkpy.models.weights.model_folder import find_model
from blinkpy.processes import Child
from blinkpy.progress import ProgressCallback

CORES = sorted(os.sched_getaffinity(0))
CLIENTS = max(1, min(4, len(CORES) // 4))  # processes
FRONT_CORE, OTHER_CORES = CORES[0], CORES[1 : len(CORES) - CLIENTS] or CORES[-1:]
CLIENT_CORES = CORES[-CLIENTS:]
LEAST_TOKENS, MOST_TOKENS = 16, 400  # of an answer, which takes a second between these
LEAD_S, LATE_S, START_S, STOP_S = 2.0, 1.5, 600.0, 20.0
UP = re.compile(rb"_each_engine_up\{[^}]*\} 1")
CUT = {"unfinished", "not sent"}  # answers in progress, or not begun, at the end of the window
ADDS_UP, LIMIT_SHARE = 0.95, 0.9
WORDS = ("the", "king", "ship", "of", "and", "a", "sea", "old", "house", "night", "went", "said", "to", "with", "river", "long")


@contextlib.contextmanager
def engines(count: int, slots: int, step_us: int, report: ProgressCallback) -> Iterator[tuple[Config, list[str]]]:
    """Start `count` engines at the same time; yields their common config, and their names."""
    values = {"model": "demo", "device": "null", "load_format": "dummy", "slots": slots, "null_step_us": step_us}
    config = find_model(Config().with_options({**values, "max_num_seqs": slots, "log_level": "warning"}), report)
    names = [f"throughput-{os.getpid()}-{secrets.token_hex(4)}" for _ in range(count)]
    with contextlib.ExitStack() as stack:
        children = []
        for number, name in enumerate(names):
            with on_cores([OTHER_CORES[number % len(OTHER_CORES)]]):
                child = Child("engine", config.with_options({"name": name}))
            stack.callback(child.end, STOP_S)
            children.append(child)
        for child in children:
            child.wait_ready(START_S, report)
        yield config, names


@contextlib.contextmanager
def front_end(config: Config, names: list[str], report: ProgressCallback) -> Iterator[tuple[int, int]]:
    """A front end with one worker for some engines; yields (port, process id of the worker) when it has attached to
    all."""
    config = config.with_options({"engine": ",".join(names)} if len(names) > 1 else {"name": names[0]})
    check(len(engine_configs(config)) == len(names), "the front end has other engines")
    with on_cores([FRONT_CORE]):
        child = Child("frontend", config.with_options({"port": 0, "workers": 1, "shutdown_s": 1}))
    try:
        port = int((child.wait_ready(START_S, report) or {})["port"])
        workers = (Path(f"/proc/{child.pid}/task") / str(child.pid) / "children").read_text().split()
        check(len(workers) == 1, f"the front end has {len(workers)} workers, not one")
        deadline = time.monotonic() + START_S
        while True:
            reached = len(UP.findall(get("127.0.0.1", port, "/metrics")[1]))
            if reached == len(names) or (len(names) == 1 and get("127.0.0.1", port, "/health")[0] == 200):
                break
            check(time.monotonic() < deadline, "the front end does not reach all engines")
            time.sleep(0.05)
        yield port, int(workers[0])
    finally:
        child.end(STOP_S)


def throughput(port: int, pid: int, streams: int, seconds: float, per_s: float, seed: int) -> dict[str, Any]:
    """Token events per second of that number of streams. per_s: maximum tokens per second of one stream."""
    rng = random.Random(seed)
    tokens = max(LEAST_TOKENS, min(MOST_TOKENS, int(per_s)))
    rounds = int(1.5 * (seconds + 2 * LEAD_S) * per_s / tokens) + 2
    prompts = [" ".join(rng.choice(WORDS) for _ in range(8)) for _ in range(streams * rounds)]
    marks: list[tuple[float, float]] = []  # (seconds since the start, CPU seconds) at both ends of the window

    def tick(now: float) -> None:
        if (not marks and now >= LEAD_S) or (len(marks) == 1 and now >= marks[0][0] + seconds):
            marks.append((now, cpu_s(pid)))

    requests = [Request(0.0, prompt, tokens) for prompt in prompts]
    result = offer(Target("127.0.0.1", port, "demo"), requests, streams, CLIENTS, CLIENT_CORES, LEAD_S + seconds + LATE_S, tick)
    check(len(marks) == 2, "the answers ended before the window did")
    (opened, cpu_then), (closed, cpu_now) = marks
    failed = {record.error for record in result.records} - {"", *CUT}
    check(not failed, f"answers failed: {'; '.join(sorted(failed))}")
    times = [record.times for record in result.records]
    events = sum(int(((opened <= when) & (when < closed)).sum()) for when in times)
    whole = [record for record in result.records if not record.error]
    tokens_per_event = sum(record.tokens for record in whole) / max(1, sum(len(record.times) for record in whole))
    window = closed - opened
    return {
        "streams": streams,
        "tokens_per_s": round(events * tokens_per_event / window, 1),
        "tokens_per_event": round(tokens_per_event, 4),
        "worker_core_share": round((cpu_now - cpu_then) / window, 4),
        "busiest_client": round(result.busy, 3),
    }


def rows(run: Run, step_ms: float) -> list[dict[str, Any]]:
    """A row for each number of engines, at one pace."""
    options, found = run.options, list[dict[str, Any]]()
    with engines(max(options.engines), options.slots, int(1000 * step_ms), run.progress) as (config, names):
        for count in options.engines:
            run.progress(f"engines with a step of {step_ms:g} ms", len(found), len(options.engines))
            with front_end(config, names[:count], run.progress) as (port, pid):
                row = throughput(port, pid, count * options.slots, options.seconds, 1000 / step_ms, options.seed)
            found.append({"engines": count, "can_give": round(count * options.slots * 1000 / step_ms, 1), **row})
    return found


def benchmark(run: Run) -> None:
    check(len(CORES) >= 2, "this benchmark needs two cores")
    paced, fast = rows(run, run.options.step_ms), rows(run, run.options.fast_step_ms)
    first, last = paced[0], paced[-1]
    share = last["tokens_per_s"] / first["tokens_per_s"] / (last["engines"] / first["engines"])
    run.target(f"{last['engines']} paced engines, to as many times one", share, ADDS_UP, "", at_most=False)
    full = max(fast, key=lambda row: row["tokens_per_s"])
    run.target("worker's core where the front end is the limit", full["worker_core_share"], LIMIT_SHARE, "", at_most=False)
    results = {"paced": paced, "fast": fast, "front_end_limit_tokens_per_s": full["tokens_per_s"]}
    run.write(__doc__, {**results, "cores": {"worker": 1, "engines": len(OTHER_CORES), "clients": CLIENTS}})


if __name__ == "__main__":
    run_benchmark(
        "serving.fleet_throughput",
        "What engines give behind one front end.",
        benchmark,
        engines=Flag((1, 2, 4, 8), "of a front end", smoke=(1, 2)),
        slots=Flag(48, "streams of an engine", smoke=4),
        step_ms=Flag(20.0, "of an engine whose throughput adds up", smoke=40.0),
        fast_step_ms=Flag(2.0, "of one that is fast", smoke=5.0),
        seconds=Flag(8.0, "window of one row", smoke=1.5),
        seed=Flag(1, "of the prompts"),
    )
