"""The effect of attacks on a front end on well-behaved clients, and on the worker's memory.

    python -m benchmarks.serving.attacks                    # --attack NAME: some alone

One worker in front of the null engine, with default options, keys, and 1,024 descriptors for each process. Some streams get a
token in each step of --step-ms; next to them one connection after another asks /health, and another for a token. All this goes
on through a quiet while, the attack, and a while after it. Streams and probes share a key; attackers have another key. Attackers
(benchmarks/serving/attackers.py) run on the same cores, as strong as these allow.

gap_ms: between two tokens of a stream, by their arrival; next to an attack are those that touch its time, or the second after it.
health_ms, answer_ms: from connecting to the whole answer. worker_mib: resident memory of the worker before and after, and its
peak in between, by the kernel's count (VmHWM); family_mib: the most of the worker with the processes that it starts, shared
memory divided (Pss). seen: the answers that the attacker got.
"""

import multiprocessing
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, UsageError, check, run_benchmark
from benchmarks.common.load import UNFINISHED, LoadResult, Request, Target, offer
from benchmarks.serving.attack_grammar import Attack
from benchmarks.serving.attackers import ATTACKS, Site, attack
from benchmarks.serving.null_server import MODEL, PAUSES_S, START_S, Probes, front_end, null_engine, worker_of
from benchmarks.serving.process_memory import Memory
from benchmarks.serving.systems import Cores, Running, ServerError, running

MOST_TIMES, MOST_MIB = 3.0, 512.0  # limits: P99 gap during an attack relative to the quiet time; the worker's memory
DESCRIPTORS = 1024
LEAD_S = 1.5  # of the streams before they are measured
END_S = 60.0  # time for an attacker to stop
TRAIL_S = 1.0  # time after an attack in which gaps still count as its effect
KEYS = '[victim]\nkey = "victim"\n[attacker]\nkey = "attacker"\n'


class Assault:
    """One attack during the streams, in a separate process, which waits for its start.

    tick(): called some times per second, with the seconds since the start of the streams. began: of
    time.perf_counter(), 0 before.
    """

    def __init__(self, name: str, site: Site, worker: int, options: Any):
        self.began = 0.0
        self._name, self._begins = name, LEAD_S + options.quiet_s
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = (theirs, name, site, options.attack_s)
        self._process = multiprocessing.get_context("spawn").Process(target=attack, args=arguments, daemon=True)
        self._process.start()
        check(self._pipe.poll(START_S) and self._pipe.recv() == "ready", f"{name}: the attack does not begin")
        self.memory = Memory(worker)

    def tick(self, now: float) -> None:
        self.memory.look()
        if not self.began and now >= self._begins:
            self.began = time.perf_counter()
            self._pipe.send("begin")

    def seen(self) -> dict[str, int]:
        """The attacker's counts, after its end."""
        check(self._pipe.poll(END_S), f"{self._name}: the attack does not end")
        found: dict[str, int] = self._pipe.recv()
        return found

    def close(self) -> None:
        self._process.kill()


def described(name: str) -> str:
    """A one-line description of an attack."""
    found = ATTACKS[name]
    return str(found) if isinstance(found, Attack) else (found.__doc__ or "").strip()


def gaps(load: LoadResult, begin: float, end: float) -> list[float]:
    """Seconds between two tokens of a stream, for gaps that overlap this period of time.perf_counter(). The end of the
    load ends the last gap."""
    found: list[float] = []
    for record in load.records:
        times = np.append(record.times, load.limit_s) + load.began
        inside = (begin <= times[1:]) & (times[:-1] < end)
        found += np.diff(times)[inside].tolist()
    return found


def one_attack(name: str, server: Running, segment: str, options: Any) -> dict[str, Any]:
    """Run an attack on an otherwise idle server. Returns its figures."""
    assert server.process is not None
    assault = Assault(
        name, Site(server.port, "attacker", segment, server.process.pid, victim="victim"), worker_of(server), options
    )
    probes = Probes(server.port, "victim")
    limit_s = LEAD_S + options.quiet_s + options.attack_s + options.after_s + 2
    tokens = int(1250 * limit_s / options.step_ms)  # more than the time allows
    target, requests = Target("127.0.0.1", server.port, "demo", api_key="victim"), [Request(0.0, "the king", tokens)]
    try:
        load = offer(target, requests * options.streams, options.streams, 1, [], limit_s, assault.tick)
        broken = {record.error for record in load.records} - {UNFINISHED}
        check(assault.began > 0, f"{name}: the streams ended before it began: {sorted(broken)}")
        seen = assault.seen()
    finally:
        probes.close()
        assault.close()
    quiet = load.began + LEAD_S, load.began + LEAD_S + options.quiet_s
    times = {"quiet": quiet, "beside": (assault.began, assault.began + options.attack_s + TRAIL_S)}
    result: dict[str, Any] = {"attack": name, "what": described(name)}
    result["gap_ms"] = {when: describe(1000 * np.array(gaps(load, *span)), "ms", tail=2) for when, span in times.items()}
    result["broken_streams"] = sorted(broken)
    for kind in PAUSES_S:
        asked = {when: probes.between(kind, *span) for when, span in times.items()}
        result[f"{kind}_ms"] = {
            when: describe([1000 * seconds for seconds, _ in found], "ms", tail=1) for when, found in asked.items()
        }
        counts = Counter(status for _, status in asked["beside"])
        result[f"{kind}_statuses"] = {str(status or "none"): count for status, count in sorted(counts.items())}
    return result | assault.memory.figures() | {"seen": seen}


def benchmark(run: Run) -> None:
    chosen = list(ATTACKS) if tuple(run.options.attack) == ("all",) else run.options.attack
    if unknown := set(chosen) - set(ATTACKS):
        raise UsageError(f"unknown attack {unknown.pop()!r}: one of {', '.join(ATTACKS)}")
    cores, results = Cores(tuple(sorted(os.sched_getaffinity(0)))), []
    step_us = int(1000 * run.options.step_ms)
    # A long prompt takes several steps, so that hits in the prefix cache show in its time.
    with null_engine(run, null_step_us=step_us, max_num_batched_tokens=512) as segment, tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        keys.write_text(KEYS)
        keys.chmod(0o600)
        system = front_end(segment, f"--shutdown-s 600 --api-keys {keys}", f"prlimit --nofile={DESCRIPTORS}")
        for number, name in enumerate(chosen):
            run.progress(f"attack: {name}", number, len(chosen))
            try:
                with running(system, MODEL, cores, Path(folder) / "log", START_S, run.progress) as server:
                    results.append(one_attack(name, server, segment, run.options))
            except ServerError as error:
                check(False, f"{name}: {error}")
            row = results[-1]
            quiet, beside = (row["gap_ms"][when]["p99"]["value"] for when in ("quiet", "beside"))
            print(f"{name}: P99 gap {quiet:g} -> {beside:g} ms, {row['worker_mib']['peak']:g} MiB, {row['seen']}", flush=True)
    broken = {row["attack"]: row["broken_streams"] for row in results if row["broken_streams"]}
    check(not broken, f"streams broke: {broken}")
    hits = sum(row["seen"].get("hit tokens of another's prompts", 0) for row in results)
    check(not hits, f"{hits} tokens of another tenant's prompts were found in the prefix cache")
    worst = max(results, key=times_quiet)
    run.target(f"P99 gap of a stream to the quiet one, at worst ({worst['attack']})", times_quiet(worst), MOST_TIMES, "x")
    most = max(results, key=lambda row: row["worker_mib"]["peak"])
    run.target(f"memory of the worker, at most ({most['attack']})", most["worker_mib"]["peak"], MOST_MIB, "MiB")
    run.write(__doc__, {"attacks": results})


def times_quiet(row: dict[str, Any]) -> float:
    """The ratio of the P99 gap during an attack to the P99 gap without."""
    return float(row["gap_ms"]["beside"]["p99"]["value"] / row["gap_ms"]["quiet"]["p99"]["value"])


if __name__ == "__main__":
    run_benchmark(
        "serving.attacks",
        "Streams of those who behave, beside attacks on their front end.",
        benchmark,
        attack=Flag(("all",), "names of attacks"),
        streams=Flag(8),
        step_ms=Flag(20.0, "of the null engine"),
        quiet_s=Flag(8.0, "before an attack", smoke=1.0),
        attack_s=Flag(15.0, "of an attack", smoke=2.0),
        after_s=Flag(4.0, "after it", smoke=1.0),
    )
