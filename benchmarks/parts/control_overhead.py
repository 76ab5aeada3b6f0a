"""Control overhead of the host's loop: from the end of one model step to the start of the next, with everything but the model.

    python -m benchmarks.parts.control_overhead

The scheduler runs as in the engine (Scheduler.turn, compiled by njit, called from Python, real queue pair). A synthetic step
replaces the model: it writes tokens that follow from the request's seed and the position. Then it reads as much memory as a
small model has weights, so that the scheduler finds the caches as cold as in an engine. A client on the same queue pair submits
requests and takes completions, outside of the measured time. One thread, no pinning. The benchmark compares every request's
tokens with the model's, and checks the scheduler's state after each load.

Loads: "steady" decodes without arrivals. "churn" immediately replaces each finished request, with shared prompt prefixes,
geometric output lengths (64 tokens on average) and some cancelled requests. "warm" is steady without the reading.
"""

import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, check, run_benchmark
from blinkpy.config import Config, SchedulerOptions
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.queue_pair import InFlightRequest, QueuePair
from blinkpy.kv.limits import make_limits
from blinkpy.kv.state import DECODE_ROWS, EMITS, ROWS, RUNNING_COUNT
from blinkpy.kv.state_memory import make_state
from blinkpy.queues.layout import EngineFacts, QueueSizes
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import LONG_SEED
from blinkpy.queues.words import COUNTER, ENGINE_STATE, FINISH_CANCELLED, FINISH_LENGTH, FINISH_MASK, HAS_TOKEN, STATE_READY
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.transport.segment import create_segment

TARGETS_US = {64: 100.0, 256: 300.0}  # medians
VOCAB, MODEL_LEN, PAGE = 4096, 8192, 16
PROMPT_TOKENS = (64, 192)  # tokens of a steady request
PREFIXES, PREFIX_TOKENS, TAIL_TOKENS = 8, 64, (16, 96)  # tokens of a churning request
MEAN_OUTPUT, LONGEST_OUTPUT = 64, 512
CANCELLED = 0.02  # share of the churning requests
WEIGHTS = 16 << 20  # bytes that the synthetic step reads
SETTLE = 200  # steps of a load before it is measured


def token_of(seeds: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The synthetic model: a token for each (seed of the request, position of the token)."""
    mixed = (seeds & 0xFFFFFFFF) * 2654435761 + positions * 40503
    return (mixed ^ mixed >> 17) % VOCAB


@dataclass
class Owner:
    """One request as its client sees it. cancel_at: tokens after which the client cancels it, -1 for never."""

    seed: int
    prompt_length: int
    max_tokens: int
    cancel_at: int = -1
    tokens: list[int] = field(default_factory=list)


class World:
    """A scheduler with `running` requests on one queue pair."""

    def __init__(self, running: int, rng: np.random.Generator):
        self.running, self.rng = running, rng
        rows = max(running, Config().scheduler.max_num_seqs)
        sizes = QueueSizes(pairs=1, slots=rows, sq_entries=rows, cq_entries=8192, prompt_tokens=1 << 18, hash_entries=1 << 14)
        pages = running * MODEL_LEN // PAGE
        facts = EngineFacts(secrets.randbits(62) | 1, 65_537, 131_071, MODEL_LEN, VOCAB, PAGE, pages, rows, 3_600_000)
        self.limits = make_limits(sizes, facts, SchedulerOptions(max_num_batched_tokens=max(rows, 2048)))
        self.state = make_state(self.limits)
        self.scheduler = Scheduler(self.limits, self.state)
        name = f"serve-benchmark-{secrets.token_hex(6)}"
        self.segment = create_segment(name, sizes, facts)
        self.views = self.segment.views()
        self.views.engine[ENGINE_STATE] = STATE_READY
        self.scheduler.attach(self.views)
        self.pair = QueuePair(attach_segment(name, 0))
        self.weights = np.ones(WEIGHTS // 8)
        self.prefixes = rng.integers(0, VOCAB, (PREFIXES, PREFIX_TOKENS), dtype=np.int32)
        self.rows_seen: list[int] = []
        self.finished = 0
        self.scheduler.turn(time.monotonic_ns())  # compiles, the first time
        claim = threading.Thread(target=self.pair.attach, args=(60.0,))  # granted in this thread
        claim.start()
        while claim.is_alive():
            self.scheduler.turn(time.monotonic_ns())
            time.sleep(0.001)
        claim.join()
        check(self.pair.epoch > 0, "the scheduler did not grant the queue pair")

    def close(self) -> None:
        self.pair.close()
        self.segment.close()

    # ---- the client

    def submit_steady(self, max_tokens: int) -> None:
        length = int(self.rng.integers(*PROMPT_TOKENS))
        self._submit(self.rng.integers(0, VOCAB, length, dtype=np.int32), max_tokens)

    def submit_churn(self) -> None:
        tail = self.rng.integers(0, VOCAB, int(self.rng.integers(*TAIL_TOKENS)), dtype=np.int32)
        output = min(int(self.rng.geometric(1 / MEAN_OUTPUT)), LONGEST_OUTPUT)
        cancel_at = int(self.rng.integers(1, output)) if output > 1 and self.rng.random() < CANCELLED else -1
        self._submit(np.concatenate((self.prefixes[self.rng.integers(PREFIXES)], tail)), output, cancel_at)

    def _submit(self, prompt: NDArray[np.int32], max_tokens: int, cancel_at: int = -1) -> None:
        owner = Owner(int(self.rng.integers(1 << 31)), len(prompt), max_tokens, cancel_at)
        self.pair.submit(prompt, RequestParameters(max_tokens=max_tokens, seed=owner.seed), owner)

    def take(self, churn: bool) -> None:
        """Take completions, check the requests that ended, and replace them if the load churns."""
        for request, token, flags in self.pair.poll():
            owner: Owner = request.owner
            if flags & HAS_TOKEN:
                owner.tokens.append(token)
                if len(owner.tokens) == owner.cancel_at:
                    self.pair.cancel(request)
            if flags & FINISH_MASK:
                self._check(request, flags & FINISH_MASK)
                if churn:
                    self.submit_churn()

    def _check(self, request: InFlightRequest, finish: int) -> None:
        owner: Owner = request.owner
        count = len(owner.tokens)
        positions = owner.prompt_length + np.arange(count)
        expected = token_of(np.full(count, owner.seed, np.int64), positions).tolist()
        check(owner.tokens == expected, f"a request of {count} tokens got other tokens than the model made")
        if finish == FINISH_CANCELLED:
            check(request.cancelled, "a request was cancelled that nobody wanted to cancel")
        else:
            check(finish == FINISH_LENGTH and count == owner.max_tokens, f"{count} of {owner.max_tokens} tokens, end {finish}")
            self.finished += 1

    # ---- the engine's loop

    def fake_step(self) -> None:
        """The model's part of a step: tokens into batch.sampled."""
        batch, requests = self.state.batch, self.state.requests
        rows = int(batch.counts[ROWS])
        slots = batch.row_slots[:rows]
        seeds = requests.entry[slots].view(np.int64)[:, LONG_SEED]
        batch.sampled[:rows] = token_of(seeds, batch.context_lengths[:rows].astype(np.int64))

    def steps(self, count: int, *, cold: bool, churn: bool) -> NDArray[np.float64]:
        """Run steps. Returns the time of each scheduler call, us."""
        times = np.empty(count)
        schedule, clock = self.scheduler.turn, time.perf_counter_ns
        for i in range(count):
            began = clock()
            bucket = schedule(time.monotonic_ns())
            times[i] = clock() - began
            if bucket >= 0:
                self.fake_step()
                self.rows_seen.append(int(self.state.batch.counts[ROWS]))
            if cold:
                self.weights.sum()
            self.take(churn)
        return times / 1000

    def counters(self) -> NDArray[np.int64]:
        """Requests that finished, and tokens that were prefix hits, so far."""
        return np.array([self.finished, self.views.engine[COUNTER["prefix_hit_tokens"]]])

    def drain(self) -> None:
        """Cancel all requests, and check that all pages are free and the state is valid."""
        for request in self.pair.live():
            self.pair.cancel(request)
        for _ in range(4):
            self.steps(1, cold=False, churn=False)
        check(not self.pair.live(), "requests did not end")
        problems = self.scheduler.check()
        check(not problems, "the scheduler's state is broken: " + "; ".join(problems[:3]))


def measure(running: int, steps: int, seed: int, run: Run) -> dict[str, Any]:
    """All loads at one number of running requests."""
    world = World(running, np.random.default_rng(seed))
    try:
        idle = world.steps(max(steps // 4, 20), cold=True, churn=False)
        result: dict[str, Any] = {"max_num_seqs": world.limits.rows, "idle": describe(idle, "us")}
        settle = min(SETTLE, steps)
        for _ in range(running):
            world.submit_steady(MODEL_LEN - PROMPT_TOKENS[1])
        while int(world.state.batch.counts[DECODE_ROWS]) < running:
            world.steps(1, cold=False, churn=False)
        for load, cold in (("warm", False), ("steady", True)):
            run.progress(f"{running} running: {load}")
            world.steps(settle, cold=cold, churn=False)
            world.rows_seen.clear()
            result[load] = describe(world.steps(steps, cold=cold, churn=False), "us")
            check(min(world.rows_seen) == running and len(world.rows_seen) == steps, "a step did not have all requests")
        check(int(world.state.counts[RUNNING_COUNT]) == running and int(world.state.batch.counts[EMITS]) == running, "rows")
        world.drain()
        run.progress(f"{running} running: churn")
        for _ in range(running):
            world.submit_churn()
        world.steps(settle, cold=True, churn=True)
        world.rows_seen.clear()
        before = world.counters()
        churn = describe(world.steps(steps, cold=True, churn=True), "us")
        finished, hits = world.counters() - before
        churn |= {"finished_per_step": round(finished / steps, 3), "hit_tokens_per_step": round(hits / steps, 1)}
        result["churn"] = churn | {"rows_mean": round(float(np.mean(world.rows_seen)), 1)}
        world.drain()
        return result
    finally:
        world.close()


def benchmark(run: Run) -> None:
    options = run.options
    run.progress("compiling the scheduler")
    World(1, np.random.default_rng(0)).close()
    results = {str(count): measure(count, options.steps, options.seed, run) for count in options.running}
    for count, limit in TARGETS_US.items():
        for load in ("steady", "churn"):
            if str(count) in results:
                median = results[str(count)][load]["p50"]["value"]
                run.target(f"scheduler call at {count} running, {load}, median", median, limit, "us")
    run.write(__doc__, results)


if __name__ == "__main__":
    run_benchmark(
        "parts.control_overhead",
        "Control overhead of the njit loop, per step.",
        benchmark,
        running=Flag((1, 16, 64, 128, 256, 1024), "running sequences", smoke=(1, 16)),
        steps=Flag(2500, "measured steps of each load", smoke=30),
        seed=Flag(1, "of the prompts and lengths"),
    )
