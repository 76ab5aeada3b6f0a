"""Round trip over the shared memory of a queue pair, between two processes on two cores.

    python -m benchmarks.parts.queue_round_trip

The other process is an engine reduced to its polling loop: compiled by njit with the engine's own memory primitives, it
waits for the doorbell and publishes completions at once. What is measured from the front end's side, in Python:

    transport    ShmTransport.ring -> ShmTransport.read_completions sees the completion word
    request_N    QueuePair.submit of a prompt of N tokens -> QueuePair.poll returns its final completion; the engine's side
                 reads the entry and the whole prompt, and answers with a checksum of them
"""

from __future__ import annotations

import argparse
import gc
import mmap
import multiprocessing
import os
import secrets
import sys
import time
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Run, check, main, parser
from blinkpy.device.portable import load_acquire, load_relaxed, now_ns, store_relaxed, store_release
from blinkpy.dpu.link.connect_shm import ShmTransport, attach_segment
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.queues.completion import (
    FINISH_LENGTH,
    FLAG_SHIFT,
    HAS_TOKEN,
    LAP_MASK,
    LAP_SHIFT,
    LAPS,
    TOKEN_MASK,
    TOKEN_SHIFT,
    lap_of,
)
from blinkpy.queues.header import EngineFacts
from blinkpy.queues.layout import QueueSizes
from blinkpy.queues.request_parameters import Sampling
from blinkpy.queues.submission import WORD_PROMPT_LENGTH, WORD_PROMPT_OFFSET, WORD_SLOT
from blinkpy.queues.views import EngineViews, engine_views
from blinkpy.queues.words import (
    COMMAND_STOP,
    CONTROL_COMMAND,
    ENGINE_STATE,
    EPOCH_SHIFT,
    FRONT_CLAIM,
    FRONT_DOORBELL,
    PAIR_ATTACHED,
    PAIR_CQ_TAIL,
    PAIR_EPOCH,
    PAIR_SQ_HEAD,
    POSITION_MASK,
    STATE_READY,
)
from blinkpy.transport.segment import Segment, create_segment, segment_path

TARGET_US = 5.0
SIZES = QueueSizes(pairs=1, slots=256, sq_entries=256, cq_entries=8192, prompt_tokens=1 << 16, hash_entries=1 << 12)
PROMPTS = (1, 32, 128, 1024)  # tokens
SILENCE_NS = 20_000_000_000  # after which the engine's side gives up
READY_S = 60.0
DEADLINE_S = 5.0  # of one round trip
FLAGS = HAS_TOKEN | FINISH_LENGTH


# ---- the engine's side ----------------------------------------------------------------------------------------------------


@njit(nogil=True)
def serve(queues, cq_entries, sq_entries, whole):  # type: ignore[no-untyped-def]
    """Answer doorbells until told to stop. whole: 1 reads entries and prompts, 0 the doorbell word alone."""
    epoch, head, tail = 0, 0, 0
    last = now_ns()
    turns = 0
    while True:
        doorbell = load_acquire(queues.front, (0, FRONT_DOORBELL))
        if (whole == 0 or doorbell >> EPOCH_SHIFT == epoch) and doorbell & POSITION_MASK != head & POSITION_MASK:
            slot, token = 0, head & TOKEN_MASK
            if whole == 1:
                entry = queues.sq[0, head % sq_entries]
                slot, start = entry[WORD_SLOT], entry[WORD_PROMPT_OFFSET]
                token = checksum(queues.prompt[0, start : start + entry[WORD_PROMPT_LENGTH]])
            head += 1
            lap = tail // cq_entries % LAPS + 1
            word = slot | token << TOKEN_SHIFT | FLAGS << FLAG_SHIFT | lap << LAP_SHIFT
            store_release(queues.cq, (0, tail % cq_entries), word)
            tail += 1
            store_relaxed(queues.pair, (0, PAIR_SQ_HEAD), head)
            store_relaxed(queues.pair, (0, PAIR_CQ_TAIL), tail)
            last = now_ns()
            continue
        turns += 1
        if turns & 0xFFF == 0:
            claim = load_relaxed(queues.front, (0, FRONT_CLAIM))
            if claim == epoch + 1:
                epoch = claim
                store_relaxed(queues.pair, (0, PAIR_EPOCH), epoch)
                store_release(queues.pair, (0, PAIR_ATTACHED), 1)
            if load_relaxed(queues.control, CONTROL_COMMAND) == COMMAND_STOP or now_ns() - last > SILENCE_NS:
                return head


@njit
def checksum(tokens):  # type: ignore[no-untyped-def]
    """A number that tells whether all of a prompt has arrived."""
    total = 0
    for i in range(len(tokens)):
        total = (total * 31 + tokens[i]) & TOKEN_MASK
    return total


def engine_process(name: str, whole: bool, core: int, ready: Any) -> None:
    """The other process: makes the segment and answers until it is told to stop."""
    os.sched_setaffinity(0, {core})
    facts = EngineFacts(secrets.randbits(62) | 1, 65_537, 131_071, 8192, 4096, 16, 1 << 14, 256, 3_600_000)
    segment: Segment = create_segment(name, SIZES, facts)
    views = segment.views()
    views.control[CONTROL_COMMAND] = COMMAND_STOP
    serve(views, SIZES.cq_entries, SIZES.sq_entries, int(whole))  # compiles
    views.control[CONTROL_COMMAND] = 0
    views.engine[ENGINE_STATE] = STATE_READY
    ready.set()
    serve(views, SIZES.cq_entries, SIZES.sq_entries, int(whole))
    segment.close()


class Engine:
    """The other process, as a context: gives the transport to it, and views of the whole segment."""

    def __init__(self, whole: bool, core: int):
        context = multiprocessing.get_context("spawn")
        self.name, self._ready = f"serve-benchmark-{secrets.token_hex(6)}", context.Event()
        self._process = context.Process(target=engine_process, args=(self.name, whole, core, self._ready), daemon=True)

    def __enter__(self) -> tuple[ShmTransport, EngineViews]:
        self._process.start()
        check(self._ready.wait(READY_S), "the other process did not start")
        self.transport = attach_segment(self.name, 0)
        with open(segment_path(self.name), "r+b") as file:
            self.views = engine_views(memoryview(mmap.mmap(file.fileno(), 0)), self.transport.layout)
        return self.transport, self.views

    def __exit__(self, *error: object) -> None:
        self.views.control[CONTROL_COMMAND] = COMMAND_STOP
        self._process.join(READY_S)
        self.transport.close()


# ---- the front end's side -------------------------------------------------------------------------------------------------


def transport_round_trips(transport: ShmTransport, first: int, count: int) -> NDArray[np.float64]:
    """Round trips of a doorbell and one completion word; us."""
    times, clock, size = np.empty(count), time.perf_counter_ns, SIZES.cq_entries
    ring, read = transport.ring, transport.read_completions
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
        word = read(index, 1)[0]
        check(word >> TOKEN_SHIFT & TOKEN_MASK == position & TOKEN_MASK and word >> LAP_SHIFT & LAP_MASK == lap, "a wrong word")
    return times / 1000


def request_round_trips(pair: QueuePair, length: int, count: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Round trips of whole requests, with prompts of `length` tokens; columns: round trip, submit alone, us."""
    times, clock, sampling = np.empty((count, 2)), time.perf_counter_ns, Sampling(max_tokens=1, seed=1)
    prompts = rng.integers(0, 4096, (min(count, 64), length), dtype=np.int32)
    sums = [checksum(prompt) for prompt in prompts]
    submit, poll = pair.submit, pair.poll
    for i in range(count):
        prompt = prompts[i % len(prompts)]
        began = clock()
        request = submit(prompt, sampling)
        submitted = clock()
        events = poll()
        spins = 0
        while not events:
            events = poll()
            spins += 1
            if spins & 0xFFFF == 0:
                check(clock() - began < DEADLINE_S * 1e9, "no completion came")
        times[i] = clock() - began, submitted - began
        check(events == [(request, sums[i % len(prompts)], FLAGS)], f"a wrong completion: {events[:3]}")
    return times / 1000


def measure(options: argparse.Namespace, run: Run) -> dict[str, Any]:
    allowed = sorted(os.sched_getaffinity(0))
    check(len(allowed) >= 2, "this benchmark needs two cores")
    rng = np.random.default_rng(options.seed)
    rounds, count = options.rounds, options.count
    parts: dict[str, list[NDArray[np.float64]]] = {}

    def add(name: str, times: NDArray[np.float64]) -> None:
        parts.setdefault(name, []).append(times)

    os.sched_setaffinity(0, {allowed[0]})
    gc.disable()
    try:
        run.progress("doorbell and completion word")
        with Engine(False, allowed[1]) as (transport, _):
            position = min(count, 200)
            transport_round_trips(transport, 0, position)  # warm up, compile
            for _ in range(rounds):
                add("transport", transport_round_trips(transport, position, count))
                position += count
                gc.collect()
        run.progress("whole requests")
        with Engine(True, allowed[1]) as (transport, _):
            pair = QueuePair(transport)
            pair.attach(READY_S)
            for length in PROMPTS:
                request_round_trips(pair, length, min(count, 200), rng)
            for _ in range(rounds):
                for length in PROMPTS:
                    times = request_round_trips(pair, length, count, rng)
                    add(f"request_{length}", times[:, 0])
                    add(f"submit_{length}", times[:, 1])
                    gc.collect()
            check(pair.in_flight == 0 and pair.stray_completions == 0, "requests are left")
    finally:
        gc.enable()
        os.sched_setaffinity(0, allowed)
    return {name: describe(np.concatenate(times), "us") for name, times in parts.items()}


def benchmark(options: argparse.Namespace) -> None:
    run = Run("parts.queue_round_trip", options)
    if options.smoke:
        options.rounds, options.count = 2, 200
    results = measure(options, run)
    run.target("round trip through the transport, median", results["transport"]["p50"]["value"], TARGET_US, "us")
    run.write(
        """Front end pinned to one core, the polling engine to another. One sample is one round trip on the front end's clock,
        one request in flight at a time; rounds of the kinds alternate, the garbage collector runs between rounds only. Every
        word or checksum is compared. "transport" and "request_N" as in the module's text; "submit_N" is the part of
        request_N until QueuePair.submit returns.""",
        results,
    )


def options() -> argparse.Namespace:
    result = parser("parts.queue_round_trip", "Round trip over a queue pair in shared memory.")
    result.add_argument("--rounds", type=int, default=20, help="rounds, in each of which every kind is measured")
    result.add_argument("--count", type=int, default=2000, help="round trips of one kind in a round")
    result.add_argument("--seed", type=int, default=1, help="of the prompts")
    return result.parse_args()


if __name__ == "__main__":
    sys.exit(main(benchmark, options()))
