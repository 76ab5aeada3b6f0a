"""`make soak`: a server with the null engine under random requests, while engine and workers are killed and stopped.

Requests are streams and whole answers of text, tokens, several choices, grammars, schemas and scores; some are cancelled. Each
answer, whole or cut, is compared with the null engine's expected text, computed independently (tools/soak/expected_text.py). A
request must not fail if nothing is disturbed from its start to its end: stops shorter than every timeout disturb nothing.

For DISTURBED_SHARE of the time the server is disturbed. Then its processes stay, and their private memory (RssAnon, while no
request runs) may grow at most by LIMIT. The measurement begins after a quarter of this second part, once workers have answered
each request of the pool some times. In that quarter CROWD more requests run at a time, because an allocator keeps the memory of
the largest crowd, which would otherwise occur late. The growth is the median slope between any two of LOOKS looks. At the end
SIGTERM must leave no process, segment, recording link or socket.
"""

import asyncio
import json
import re
import secrets
import socket
import sys
import tempfile
import time
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from support.commands import Command

from benchmarks.common.harness import Flag, Run, check, run_benchmark
from benchmarks.serving.process_memory import open_files, resident
from benchmarks.serving.systems import alive, tree
from blinkpy.models.weights.model_folder import DEMO_FOLDER
from soak.disturbances import Disturbances, parts
from soak.soak_clients import Calm, Clients
from soak.soak_requests import Judge, draw

ADDRESS = re.compile(r"blinkpy serves \S+ on (http://\S+) ")
DISTURBED_SHARE = 0.6
LIMIT = 1.0  # percent that private memory may grow
POOL, AT_ONCE, CROWD, WORKERS = 200, 24, 40, 2
VISITS = 6 * WORKERS  # of the pool, until caches are full
SHORTEST_REST_S = 40.0
LEASE_MS, TIMEOUT_MS, LONG_S = 3000, 2000, 6.0
LOOKS = 16  # measurements of the memory, evenly spread
GLANCES, GLANCE_PAUSE_S = 5, 0.3  # samples per measurement; the minimum counts
SAID_S = 30.0
END_S = 60.0
# Few pages, so that some are evicted and requests are preempted; few slots, so that some requests are refused.
OPTIONS = (
    *("--device", "null", "--null-step-us", "2000", "--workers", str(WORKERS), "--slots", "20", "--num-pages", "192"),
    *("--lease-ms", str(LEASE_MS), "--engine-timeout-ms", str(TIMEOUT_MS), "--log-level", "warning", "--no-access-log"),
    *("--max-lag-ms", "20000"),  # on a shared machine the worker may lag behind, and such a 503 is not a fault
)


async def sizes(server: int, clients: Clients) -> dict[int, tuple[str, int, int]]:
    """Name, private memory in KiB and open files of each process, while no request runs."""
    await clients.pause()
    await asyncio.sleep(1.0)
    looks = []
    for _ in range(GLANCES):
        looks.append(
            {pid: (name, round(1024 * resident(pid, "RssAnon")), open_files(pid)) for pid, name in parts(server).items()}
        )
        await asyncio.sleep(GLANCE_PAUSE_S)
    clients.go.set()
    return {pid: min(look[pid] for look in looks if pid in look) for pid in looks[-1]}


def growth(looks: list[tuple[float, dict[int, tuple[str, int, int]]]]) -> list[dict[str, Any]]:
    """The private memory of each process at each measurement, in KiB, and its growth in percent.

    The growth is the median slope between two measurements (Theil and Sen), since an allocator takes and returns
    memory in steps. looks: measurements with their times, s.
    """
    (first_at, first), *_, (last_at, last) = looks
    check(all(look.keys() == first.keys() for _, look in looks), f"processes came or went: {first} became {last}")
    rows = []
    for pid, (name, _, files) in first.items():
        check(last[pid][2] <= files, f"{name} has {last[pid][2]} open files, and had {files}")
        points = [(at, look[pid][1]) for at, look in looks]
        slope = median((b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2))
        percent = round(100 * slope * (last_at - first_at) / points[0][1], 3)
        rows.append({"process": name, "looks": [kib for _, kib in points], "percent": percent})
    return rows


async def soak(run: Run, server: int, url: str, seed: int, seconds: float) -> dict[str, Any]:
    """Run the clients and disturb the server. Returns the counts and faults."""
    rng = np.random.default_rng(seed)
    vocabulary = json.loads((DEMO_FOLDER / "config.json").read_text())["vocab_size"]
    pool, calm = [draw(rng, vocabulary) for _ in range(POOL)], Calm()
    clients = Clients(url, pool, Judge(pool), calm, rng)
    disturbances = Disturbances(server, url, calm, LONG_S, rng)
    began, said = time.monotonic(), 0.0
    working = asyncio.create_task(clients.run(AT_ONCE))

    async def stay(until: float) -> None:
        nonlocal said
        while (now := time.monotonic() - began) < until and not clients.faults:
            if working.done():
                working.result()
            run.progress("soak", now, seconds)
            if now - said >= SAID_S:
                said = now
                reported = ", ".join(f"{count:,} {name}" for name, count in clients.outcomes.most_common())
                print(f"{now:.0f} s: {reported}; {sum(disturbances.done.values())} disturbances", flush=True)
            await asyncio.sleep(0.5)

    disturbing = asyncio.create_task(disturbances.run(began + DISTURBED_SHARE * seconds))
    while not disturbing.done() and not clients.faults:
        await stay(time.monotonic() - began + 1)
    if clients.faults:
        disturbing.cancel()
        check(False, "; ".join(clients.faults[:20]))
    disturbing.result()
    rest = max(SHORTEST_REST_S, seconds - (time.monotonic() - began))
    warm, calm_from = clients.outcomes["whole"] + VISITS * POOL, time.monotonic() + rest / 4
    crowd = asyncio.create_task(clients.run(CROWD, lambda: time.monotonic() < calm_from))
    await stay(calm_from - began)
    await crowd
    while clients.outcomes["whole"] < warm and not clients.faults:
        await stay(time.monotonic() - began + 1)
    looks = [(time.monotonic(), await sizes(server, clients))]
    while len(looks) < LOOKS:
        await stay(time.monotonic() - began + 3 * rest / 4 / (LOOKS - 1))
        looks.append((time.monotonic(), await sizes(server, clients)))
    clients.stop()
    await working
    check(not clients.faults, "; ".join(clients.faults[:20]))
    check(bool(disturbances.done) and clients.outcomes["whole"] > POOL, "too little happened")
    return {
        "requests": dict(clients.outcomes.most_common()),
        "disturbances": dict(disturbances.done.most_common()),
        "slowest until well again": {"value": round(disturbances.slowest_s, 1), "unit": "s"},
        "wrong or lost": len(clients.faults),
        "looked at, s": [round(at - looks[0][0]) for at, _ in looks],
        "private memory, KiB": growth(looks),
    }


def left_behind(server: int, seen: set[int], url: str) -> list[str]:
    """Resources that an ended server left behind. seen: its processes."""
    found = [path.name for path in Path("/dev/shm").glob(f"blinkpy*serve-{server}-*")]
    found += [f"process {pid}" for pid in seen if alive(pid)]
    address = urlsplit(url)
    with socket.socket() as sock:
        if sock.connect_ex((address.hostname or "", address.port or 0)) == 0:
            found.append("somebody who listens")
    return found


def main(run: Run) -> None:
    options = run.options
    options.seed = options.seed or secrets.randbelow(1 << 31)
    print(f"seed {options.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        command = Command("serve", "--port", "0", "--record-folder", folder, *OPTIONS)
        server = command.process.pid
        try:
            url = command.find(ADDRESS)[1]
            results = asyncio.run(soak(run, server, url, options.seed, options.seconds))
            seen = set(tree(server))
            command.process.terminate()
            check(command.wait(END_S) == 0, "the server did not end in order")
            complaints = [line for line in command.said if "Traceback" in line or "stray" in line.lower()]
            check(not complaints, f"the server complains: {complaints[:5]}")
            left = left_behind(server, seen, url)
            check(not left, f"left behind: {left}")
        except BaseException:
            sys.stderr.write("".join(command.said[-40:]))
            raise
        finally:
            command.kill()
    results["left behind"] = 0
    most = max(row["percent"] for row in results["private memory, KiB"])
    run.target("growth of a process's private memory", most, LIMIT, "%")
    run.write(__doc__, results)
    check(most <= LIMIT, f"a process grew by {most} %")


if __name__ == "__main__":
    run_benchmark(
        "tools.soak",
        "A server under random requests, kills and stops.",
        main,
        seconds=Flag(3600.0, "how long", 120.0),
        seed=Flag(0, "of all; 0: a random one"),
    )
