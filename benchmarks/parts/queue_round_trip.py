"""Round trip over the shared memory of a queue pair, between two processes on two cores.

    python -m benchmarks.parts.queue_round_trip

The other process is an engine reduced to its polling loop, compiled by njit with the engine's own memory primitives: it waits
for the doorbell and immediately publishes completions. The benchmark measures the front end's side, in Python: a sample is the
time from ShmTransport.ring_doorbell until ShmTransport.read_completions sees the completion word. Samples follow one another;
the garbage collector runs only between rounds. Every word is compared.
"""

import contextlib
import gc
import mmap
import multiprocessing
import os
import secrets
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, check, on_cores, run_benchmark
from blinkpy.device.portable import load_acquire, load_relaxed, now_ns, store_relaxed, store_release
from blinkpy.dpu.link.connect_shm import ShmTransport, attach_segment
from blinkpy.queues import words as W
from blinkpy.queues.layout import EngineFacts, QueueSizes, engine_views
from blinkpy.queues.words import FINISH_LENGTH, FLAG_SHIFT, HAS_TOKEN, LAP_SHIFT, LAPS, TOKEN_MASK, TOKEN_SHIFT, lap_of
from blinkpy.transport.segment import create_segment, segment_path

TARGET_US = 5.0
SIZES = QueueSizes(pairs=1, slots=256, sq_entries=256, cq_entries=8192, prompt_tokens=1 << 16, hash_entries=1 << 12)
FACTS = EngineFacts(secrets.randbits(62) | 1, 65_537, 131_071, 8192, 4096, 16, 1 << 14, 256, 3_600_000)
SILENCE_NS = 20_000_000_000  # timeout of the engine's side
READY_S = 60.0
DEADLINE_S = 5.0  # of one round trip
WARM = 200  # warm-up round trips
FLAGS = HAS_TOKEN | FINISH_LENGTH


@njit(nogil=True)
def serve(queues, cq_entries):  # type: ignore[no-untyped-def]
    """The engine's side: answer each doorbell with one completion, until the stop signal."""
    head = 0
    last = now_ns()
    turns = 0
    while True:
        if load_acquire(queues.front, (0, W.FRONT_DOORBELL)) & W.POSITION_MASK != head & W.POSITION_MASK:
            lap = head // cq_entries % LAPS + 1
            word = (head & TOKEN_MASK) << TOKEN_SHIFT | FLAGS << FLAG_SHIFT | lap << LAP_SHIFT
            store_release(queues.cq, (0, head % cq_entries), word)
            head += 1
            store_relaxed(queues.pair, (0, W.PAIR_SQ_HEAD), head)
            store_relaxed(queues.pair, (0, W.PAIR_CQ_TAIL), head)
            last = now_ns()
            continue
        turns += 1
        stopped = turns & 0xFFF == 0 and load_relaxed(queues.control, W.CONTROL_COMMAND) == W.COMMAND_STOP
        if stopped or (turns & 0xFFF == 0 and now_ns() - last > SILENCE_NS):
            return head


def engine_process(name: str, core: int, ready: Any) -> None:
    """The other process: creates the segment, and answers until the stop signal."""
    os.sched_setaffinity(0, {core})
    segment = create_segment(name, SIZES, FACTS)
    views = segment.views()
    views.control[W.CONTROL_COMMAND] = W.COMMAND_STOP
    serve(views, SIZES.cq_entries)  # compiles
    views.control[W.CONTROL_COMMAND] = 0
    views.engine[W.ENGINE_STATE] = W.STATE_READY
    ready.set()
    serve(views, SIZES.cq_entries)
    segment.close()


@contextlib.contextmanager
def engine(core: int) -> Iterator[ShmTransport]:
    """Start the other process on a core; yields the transport to it."""
    context = multiprocessing.get_context("spawn")
    name, ready = f"serve-benchmark-{secrets.token_hex(6)}", context.Event()
    process = context.Process(target=engine_process, args=(name, core, ready), daemon=True)
    process.start()
    check(ready.wait(READY_S), "the other process did not start")
    transport = attach_segment(name, 0)
    try:
        yield transport
    finally:
        with open(segment_path(name), "r+b") as file:
            views = engine_views(memoryview(mmap.mmap(file.fileno(), 0)), transport.layout)
        views.control[W.CONTROL_COMMAND] = W.COMMAND_STOP
        process.join(READY_S)
        transport.close()


def round_trips(transport: ShmTransport, first: int, count: int) -> NDArray[np.float64]:
    """Round trips of a doorbell and one completion word; us."""
    times, clock, size = np.empty(count), time.perf_counter_ns, SIZES.cq_entries
    ring, read = transport.ring_doorbell, transport.read_completions
    for i in range(count):
        position = first + i
        lap, index = lap_of(position, size), position & size - 1
        began = clock()
        ring(position + 1)
        spins = 0
        while read(index, 1)[0] >> LAP_SHIFT != lap:
            spins += 1
            if spins & 0xFFFFF == 0:
                check(clock() - began < DEADLINE_S * 1e9, "no completion came")
        times[i] = clock() - began
        check(read(index, 1)[0] >> TOKEN_SHIFT & TOKEN_MASK == position & TOKEN_MASK, "a wrong word")
    return times / 1000


def benchmark(run: Run) -> None:
    options, allowed = run.options, sorted(os.sched_getaffinity(0))
    check(len(allowed) >= 2, "this benchmark needs two cores")
    times = []
    gc.disable()
    with on_cores(allowed[:1]), engine(allowed[1]) as transport:
        round_trips(transport, 0, WARM)
        for i in range(options.rounds):
            run.progress("doorbell and completion word", i, options.rounds)
            times.append(round_trips(transport, WARM + i * options.count, options.count))
            gc.collect()
    gc.enable()
    found = describe(np.concatenate(times), "us")
    run.target("round trip through the transport, median", found["p50"]["value"], TARGET_US, "us")
    run.write(__doc__, {"transport": found})


if __name__ == "__main__":
    run_benchmark(
        "parts.queue_round_trip",
        "Round trip over a queue pair in shared memory.",
        benchmark,
        rounds=Flag(20, smoke=2),
        count=Flag(2000, "round trips in a round", smoke=200),
    )
