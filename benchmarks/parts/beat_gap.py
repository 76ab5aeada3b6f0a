"""Delay of the heartbeat by work on the event loop's thread, if a thread or a separate process gives the heartbeat.

    python -m benchmarks.parts.beat_gap

The main thread repeats one kind of work without a pause, like a blocked event loop. Meanwhile a thread of the same process
beats every BEAT_S, as the link thread of a worker does, and so does another process. gap_ms: the longest time between two
beats; call_ms: the longest call. The switch interval is a worker's. Work that holds the GIL during a call delays the thread by
the whole call, but no other process. Pure Python delays the thread by the switch interval. The sizes are those of a worker's
event loop and threads (64 KiB) and, for comparison, of its child processes (8 MiB).
"""

import gc
import json
import multiprocessing
import re
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
from tokenizers import Tokenizer as Encoder

from benchmarks.common.harness import Flag, Run, run_benchmark
from blinkpy.dpu.worker import SWITCH_S
from blinkpy.models.weights.model_folder import DEMO_FOLDER

BEAT_S = 0.01
LEAST_LEASE_S = 5.0  # --lease-ms by default
LARGE, SMALL = 8 << 20, 64 << 10  # bytes


def beats(stop: Callable[[], bool]) -> float:
    """Beat until stop(). Returns the longest time between two beats, s."""
    longest, last = 0.0, time.monotonic()
    while not stop():
        time.sleep(BEAT_S)
        now = time.monotonic()
        longest, last = max(longest, now - last), now
    return longest


def beat_process(stop: Any, result: Any) -> None:
    """`beats` in a separate process."""
    result.value = beats(stop.is_set)


def json_of(size: int) -> bytes:
    """A body of small values, bytes: the slowest JSON for its size."""
    return b"[" + b"[1,null]," * (size // 9) + b"0]"


def kinds() -> dict[str, Callable[[], object]]:
    """Name -> one call."""
    text = "the old king went to the river and said " * (LARGE // 40)
    encoder = Encoder.from_file(str(DEMO_FOLDER / "tokenizer.json"))
    objects = [{"number": i} for i in range(1_000_000)]
    small, large = json_of(SMALL), json_of(LARGE)
    return {
        "pure Python": lambda: sum(i & 7 for i in range(1_000_000)),
        "time.sleep(1): a system call that blocks": lambda: time.sleep(1),
        "orjson, 64 KiB": lambda: orjson.loads(small),
        "orjson, 8 MiB": lambda: orjson.loads(large),
        "json, 8 MiB": lambda: json.loads(large),
        "tokenizers, 64 KiB": lambda: encoder.encode(text[:SMALL]),
        "tokenizers, 1 MiB": lambda: encoder.encode(text[: 1 << 20]),
        "re that backtracks, 22 characters": lambda: re.match(r"(a|aa)+$", "a" * 22 + "b"),
        "re that backtracks, 30 characters": lambda: re.match(r"(a|aa)+$", "a" * 30 + "b"),
        "NumPy, sort of 8 MiB": lambda: np.sort(np.arange(1 << 20)[::-1]),
        "garbage collection, a million objects": lambda: (len(objects), gc.collect()),
    }


def gaps(work: Callable[[], object], seconds: float) -> dict[str, float]:
    """Longest gaps while the main thread does this work, ms."""
    context = multiprocessing.get_context("spawn")
    stop, result = context.Event(), context.Value("d", 0.0)
    process = context.Process(target=beat_process, args=(stop, result))
    process.start()
    found, ended = list[float](), threading.Event()
    thread = threading.Thread(target=lambda: found.append(beats(ended.is_set)))
    time.sleep(1.0)  # for the process to begin
    thread.start()
    calls, until = 0.0, time.monotonic() + seconds
    while (began := time.monotonic()) < until:
        work()
        calls = max(calls, time.monotonic() - began)
    ended.set()
    stop.set()
    thread.join()
    process.join()
    named = {"call_ms": calls, "thread_gap_ms": found[0], "process_gap_ms": result.value}
    return {name: float(f"{1000 * seconds:.4g}") for name, seconds in named.items()}


def benchmark(run: Run) -> None:
    sys.setswitchinterval(SWITCH_S)
    rows, found = list[dict[str, Any]](), kinds()
    for number, (name, work) in enumerate(found.items()):
        run.progress("kinds of work", number, len(found))
        rows.append({"work": name, **gaps(work, run.options.seconds)})
    ours = [row["thread_gap_ms"] for row in rows if "MiB" not in row["work"]]
    run.target("longest gap of the link thread's beats, work of a worker's size", max(ours), 1000 * LEAST_LEASE_S / 4, "ms")
    run.write(__doc__, {"work": rows})


if __name__ == "__main__":
    run_benchmark(
        "parts.beat_gap",
        "How long work on the event loop's thread delays the heartbeat.",
        benchmark,
        seconds=Flag(10.0, "of each kind of work", smoke=0.5),
    )
