"""One worker with a crowd: the streams that it holds, short requests at the same time, and /health.

    python -m benchmarks.serving.crowd [--server-cores 0-1 --client-cores 2-15 --clients 4]

The null engine gives each stream a token in each step of --step-ms. There are three loads: the streams alone; short requests at
--rate per second alone (one token, streamed, on connections that stay open); and both at the same time.

health_ms: a connection, GET /health and the answer, 25 times a second.
answer_ms: the same for a request of one token.
lag_ms: delay of the clients' own loop.
failed: requests that were refused or not answered, and streams that ended early; the other figures exclude these.

The server's cores run its engine, its front end and all of their threads. The clients have their own cores, and the probes the
last of these; without --client-cores, all share the server's cores.
"""

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, check, on_cores, run_benchmark
from benchmarks.common.load import UNFINISHED, LoadResult, Request, Target, offer
from benchmarks.common.processor_time import cpu_s
from benchmarks.serving.null_server import MODEL, PAUSES_S, PROBE_S, START_S, Probes, front_end, null_engine, worker_of
from benchmarks.serving.systems import Cores, parse_cores, running

MOST_HEALTH_MS = 50.0
LEAD_S = 6.0  # in which the streams begin, one after another
SETTLE_S = 2.0  # before the window
DRAIN_S = 3.0  # after it, in which short requests continue coming, and again for the last ones to end
SPARE = 96  # slots and connections beyond those of the load


Marks = Sequence[tuple[float, float]]  # begin and end of a window, seconds since the start, and the worker's CPU seconds then
Between = Callable[[str, float, float], Sequence[tuple[float, int]]]  # as Probes.between


def one_load(name: str, port: int, worker: int, cores: Cores, streams: int, rate: float, options: Any) -> dict[str, Any]:
    """Figures of a window. streams: held; rate: of short requests."""
    opens, closes = LEAD_S + SETTLE_S, LEAD_S + SETTLE_S + options.seconds
    tokens = int(2000 * (closes + 2 * DRAIN_S) / options.step_ms)  # of a stream: more than the time allows
    held = [Request(LEAD_S * i / streams, "the sea", tokens) for i in range(streams)]
    shorts = [Request(LEAD_S + i / rate, "the king", 1) for i in range(int(rate * (closes + DRAIN_S - LEAD_S)))]
    marks: list[tuple[float, float]] = []  # (seconds since the start, CPU seconds of the worker)

    def tick(now: float) -> None:
        if now >= (opens if not marks else closes) and len(marks) < 2:
            marks.append((now, cpu_s(worker)))

    requests = sorted([*held, *shorts], key=lambda request: request.due)
    probes = Probes(port)
    try:
        target, spin = Target("127.0.0.1", port, "demo"), cores.spare(options.clients)
        load = offer(target, requests, 0, options.clients, cores.loading, closes + 2 * DRAIN_S, tick, spin)
    finally:
        probes.close()
    check(len(marks) == 2, f"{name}: the answers ended before the window did")
    return {"load": name, **figures(requests, load, marks, probes.between)}


def figures(requests: Sequence[Request], load: LoadResult, marks: Marks, between: Between) -> dict[str, Any]:
    """The outcome of a load in a window. requests: of one token, and streams that outlast the load."""
    (begin, cpu_then), (end, cpu_now) = marks
    seconds, failed, waits = end - begin, Counter[str](), list[float]()
    gaps: list[NDArray[np.float64]] = []  # of each stream
    for record, request in zip(load.records, requests, strict=True):
        times = record.times
        if request.max_tokens > 1 and record.error == UNFINISHED and len(times) and times[-1] >= end:
            gaps.append(np.diff(times)[(begin <= times[1:]) & (times[1:] < end)])
        elif request.max_tokens > 1:
            failed[f"stream: {record.error or 'ended'}"] += 1
        elif record.error:
            failed[f"request: {record.error}"] += 1
        elif begin <= times[-1] < end:
            waits.append(times[-1] - record.due)
    samples = {"gap_ms": np.concatenate([*gaps, []]), "request_ms": np.array(waits)}
    described = {name: describe(1000 * found, "ms") for name, found in samples.items() if len(found)}
    for kind in PAUSES_S:
        asked = between(kind, load.began + begin, load.began + end)
        failed += Counter(f"{kind}: status {status or 'none'}" for _, status in asked if status != 200)
        if asked:
            described[f"{kind}_ms"] = describe([1000 * taken for taken, _ in asked], "ms", tail=1)
    return {
        "streams": len(gaps),
        "seconds": round(seconds, 2),
        "requests_per_s": round(len(waits) / seconds, 1),
        "token_events_per_s": round(len(samples["gap_ms"]) / seconds, 1),
        "worker_core_share": round((cpu_now - cpu_then) / seconds, 3),
        "failed": dict(failed),
        **described,
        "lag_ms": describe(1000 * load.lags_s, "ms"),
        "client_busy": round(load.busy, 3),
    }


def benchmark(run: Run) -> None:
    options, rows = run.options, list[dict[str, Any]]()
    server_cores, client_cores = parse_cores(options.server_cores), parse_cores(options.client_cores)
    cores = Cores(server_cores or tuple(sorted(os.sched_getaffinity(0))), client_cores)
    slots = options.streams + int(options.rate * 4 * options.step_ms / 1000) + SPARE
    sizes = {"slots": slots, "max_num_seqs": min(4096, slots), "num_pages": 32 * slots}
    with contextlib.ExitStack() as stack:
        with on_cores(cores.server):
            segment = stack.enter_context(null_engine(run, null_step_us=int(1000 * options.step_ms), **sizes))
        log = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "log"
        system = front_end(segment, f"--shutdown-s 1 --max-connections {2 * slots}")
        server = stack.enter_context(running(system, MODEL, cores, log, START_S, run.progress))
        worker = worker_of(server)
        stack.enter_context(on_cores(cores.watching))  # the probes, which are threads of this process
        loads = {"streams": (options.streams, 0.0), "requests": (0, options.rate), "both": (options.streams, options.rate)}
        for number, (name, load) in enumerate(loads.items()):
            run.progress(f"load: {name}", number, len(loads))
            rows.append(one_load(name, server.port, worker, cores, *load, options))
            time.sleep(2.0)
    both = rows[-1]
    run.target("streams held by one worker", both["streams"], options.streams, "streams", at_most=False)
    run.target("requests beside them", both["requests_per_s"], 0.98 * options.rate, "requests/s", at_most=False)
    asked = both.get("health_ms", {"max": 1000 * PROBE_S})  # no request was answered in the whole window
    slowest = asked.get("p99", {"value": asked["max"]})["value"]  # of a short run: the slowest
    run.target("P99 of /health meanwhile", slowest, MOST_HEALTH_MS, "ms")
    run.target("what failed, in all loads", sum(sum(row["failed"].values()) for row in rows), 0, "requests")
    placed = {"server": list(cores.server), "clients": list(cores.loading), "probes": list(cores.watching)}
    run.write(__doc__, {"cores": placed, "loads": rows})


if __name__ == "__main__":
    run_benchmark(
        "serving.crowd",
        "One worker with thousands of streams and requests.",
        benchmark,
        streams=Flag(2000, smoke=20),
        rate=Flag(2000.0, "short requests a second", smoke=50.0),
        step_ms=Flag(200.0, "of the null engine", smoke=20.0),
        clients=Flag(1, "client processes"),
        server_cores=Flag("", "cores of engine and front end, as 0-1; empty: all"),
        client_cores=Flag("", "cores of the clients, the last one for the probes; empty: any"),
        seconds=Flag(20.0, "window of a load", smoke=2.0),
    )
