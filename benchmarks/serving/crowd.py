"""One worker with a crowd: streams that it holds, short requests beside them, and /health meanwhile.

    python -m benchmarks.serving.crowd [--server-cores 0-1 --client-cores 2-15 --clients 4]

The null engine gives each stream a token in each step of --step-ms. Loads: the streams alone; short requests (a token, streamed,
on connections that stay open) at --rate a second alone; both at once. Each short request must be answered, and each stream must
live to the end. health_ms: a connection, GET /health and the answer, asked 25 times a second; answer_ms: the same for a request
of one token. lag_ms: how late the clients' own loop was. The server's cores are those of its engine, its front end and all of
their threads. Clients run on theirs, and the probes on the last of these; without --client-cores all share the server's.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, check, on_cores, run_benchmark
from benchmarks.common.load import UNFINISHED, Request, Target, offer
from benchmarks.common.processor_time import cpu_s
from benchmarks.serving.null_server import MODEL, PAUSES_S, START_S, Probes, front_end, null_engine, worker_of
from benchmarks.serving.systems import Cores, parse_cores, running

MOST_HEALTH_MS = 50.0
LEAD_S = 6.0  # in which the streams begin, one after another
SETTLE_S = 2.0  # before the window
DRAIN_S = 3.0  # after it, in which short requests go on coming, and again for the last ones to end
SPARE = 96  # slots and connections beyond those of the load


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
    (begin, cpu_then), (end, cpu_now) = marks
    streamed = [record for record, request in zip(load.records, requests, strict=True) if request.max_tokens > 1]
    short = [record for record, request in zip(load.records, requests, strict=True) if request.max_tokens == 1]
    broken = {record.error for record in streamed} - {UNFINISHED}
    check(not broken, f"{name}: streams broke: {sorted(broken)}")
    failed = {record.error for record in short} - {""}
    check(not failed, f"{name}: requests failed: {sorted(failed)}")
    answered = [record for record in short if begin <= record.times[-1] < end]
    gaps = [np.diff(record.times)[(begin <= record.times[1:]) & (record.times[1:] < end)] for record in streamed]
    return {
        "load": name,
        "streams": streams,
        "seconds": round(end - begin, 2),
        "requests_per_s": round(len(answered) / (end - begin), 1),
        "token_events_per_s": round(sum(map(len, gaps)) / (end - begin), 1),
        "worker_core_share": round((cpu_now - cpu_then) / (end - begin), 3),
        **({"gap_ms": describe(1000 * np.concatenate(gaps), "ms")} if streamed else {}),
        **({"request_ms": describe([1000 * (one.times[-1] - one.due) for one in answered], "ms")} if short else {}),
        **{f"{kind}_ms": probed(probes, kind, load.began + begin, load.began + end) for kind in PAUSES_S},
        "lag_ms": describe(1000 * load.lags_s, "ms"),
        "client_busy": round(load.busy, 3),
    }


def probed(probes: Probes, kind: str, begin: float, end: float) -> dict[str, Any]:
    """Times of the probes of a kind in a window, which must all be answered 200."""
    found = probes.between(kind, begin, end)
    wrong = {status for _, status in found} - {200}
    check(not wrong, f"probes were answered {sorted(wrong)}")
    return describe([1000 * seconds for seconds, _ in found], "ms", tail=1)


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
    slowest = both["health_ms"].get("p99", {"value": both["health_ms"]["max"]})["value"]  # of a short run: the slowest
    run.target("P99 of /health meanwhile", slowest, MOST_HEALTH_MS, "ms")
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
