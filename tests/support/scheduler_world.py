"""A small world around the scheduler: front ends that follow the queue protocol, a made-up model, and a clock.

The model makes mistakes of the scheduler visible: the "keys and values" of a token are numbers written to its cache slot,
and the next token is a hash of all numbers that the page table leads to. So a wrong page, slot, position or row gives a
wrong token, and the front ends know the right ones from the prompt alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from support.made_up_model import next_token, record_of, value_of
from support.protocol_front import Front

from blinkpy.device.array_trees import as_memoryviews
from blinkpy.device.lanes import Team
from blinkpy.kv.integrity import check_integrity
from blinkpy.kv.limits import Limits, make_limits
from blinkpy.kv.state import EMITS, EMPTY, ROWS, TOKENS, State
from blinkpy.kv.state_memory import make_state
from blinkpy.queues.header import EngineFacts, write_header
from blinkpy.queues.layout import QueueLayout, QueueSizes
from blinkpy.queues.submission import WORD_LOGPROBS
from blinkpy.queues.views import engine_views
from blinkpy.queues.words import COUNTER
from blinkpy.scheduler.cycle import make_phases, make_turn
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.policies import Policy, fcfs

MULTIPLIERS = (1_234_567, 7_654_321)
TICK_NS = 50_000


@dataclass(frozen=True)
class Sizes:
    """The world's parameters; small, so that everything runs out often."""

    pairs: int = 2
    slots: int = 4
    cq_entries: int = 16
    rows: int = 4
    tokens: int = 16
    mixed_tokens: int = 0
    burst_step_tokens: int = 0
    burst_tokens: int = 0
    page_size: int = 4
    pages: int = 16
    max_model_len: int = 32
    vocab_size: int = 50
    lease_ms: int = 1
    prefix_caching: bool = True
    multipliers: tuple[int, int] = MULTIPLIERS
    intake_entries: int = 4
    intake_tokens: int = 32768
    record_turns: int = 0

    def queue_sizes(self) -> QueueSizes:
        sq = max(2, 1 << (self.slots - 1).bit_length())
        arena, pages = sq * self.max_model_len, self.max_model_len // self.page_size + 1
        return QueueSizes(self.pairs, self.slots, sq, self.cq_entries, max(16, arena), sq * pages)

    def facts(self) -> EngineFacts:
        sizes = (self.max_model_len, self.vocab_size, self.page_size, self.pages, self.rows, self.lease_ms)
        return EngineFacts(1, *self.multipliers, *sizes)


Runner = Callable[[int], int]


class World:
    """Queues, scheduler, model and front ends.

    mode: "python", "njit", a number of lanes in plain Python, or "general": plain Python that never takes a short way.
    """

    def __init__(self, sizes: Sizes, mode: str | int = "python", policy: Policy = fcfs, seed: int = 0) -> None:
        self.sizes, self.queue = sizes, sizes.queue_sizes()
        layout = QueueLayout(self.queue)
        self.segment = memoryview(bytearray(layout.total_bytes))
        write_header(self.segment, self.queue, sizes.facts())
        self.views = engine_views(self.segment, layout)
        self.limits: Limits = make_limits(
            self.queue,
            sizes.facts(),
            max_num_batched_tokens=sizes.tokens,
            mixed_step_tokens=sizes.mixed_tokens,
            burst_step_tokens=sizes.burst_step_tokens,
            burst_tokens=sizes.burst_tokens,
            prefix_caching=sizes.prefix_caching,
            intake_entries=sizes.intake_entries,
            intake_tokens=sizes.intake_tokens,
            record_turns=sizes.record_turns,
        )
        self.state: State = make_state(self.limits)
        self.now = 1
        self._schedule = self._runner(mode, policy, seed)
        self.cache = np.full((sizes.pages, sizes.page_size), -1, np.int64)
        self.fronts = [Front(self, pair) for pair in range(sizes.pairs)]
        self.bucket = -1

    def _runner(self, mode: str | int, policy: Policy, seed: int) -> Runner:
        if mode == "general":
            general, state, queues = make_phases(policy, fast_path=False).turn, self.state, self.views
            state, queues = as_memoryviews(state), as_memoryviews(queues)
            return lambda now: general(self.limits, queues, state, now, 0, 1)
        if isinstance(mode, str):
            scheduler = Scheduler(self.limits, self.state, policy, mode=mode)  # type: ignore[arg-type]
            scheduler.attach(self.views)
            return scheduler.turn
        function, team = make_turn(policy), Team(mode, seed)
        queues, state = as_memoryviews(self.views), as_memoryviews(self.state)

        def run(now: int) -> int:
            results = team.run(lambda lane, lanes: function(self.limits, queues, state, now, lane, lanes))
            assert len(set(results)) == 1, f"lanes return different results: {results}"
            return results[0]

        return run

    def counter(self, name: str) -> int:
        return int(self.views.engine[COUNTER[name]])

    def attach(self) -> None:
        """All front ends claim their pairs."""
        for front in self.fronts:
            front.claim()
        self.step()
        assert all(front.settle() for front in self.fronts)

    def step(self, check: bool = True) -> int:
        """One call of schedule() and, if it asks for one, one step of the model."""
        self.now += TICK_NS
        for front in self.fronts:
            if front.alive:
                front.beat()
        self.bucket = self._schedule(self.now)
        if check:
            problems = check_integrity(self.limits, self.state)
            assert not problems, problems
        if self.bucket >= 0:
            self._compute()
        return self.bucket

    def _compute(self) -> None:
        batch, requests = self.state.batch, self.state.requests
        rows, tokens = int(batch.counts[ROWS]), int(batch.counts[TOKENS])
        self._check_padding(rows, tokens)
        slots = batch.cache_slots[:tokens]
        self.cache.reshape(-1)[slots] = value_of(batch.token_ids[:tokens], batch.positions[:tokens])
        batch.sampled[:], batch.logprobs[:] = -77, -77
        emitted = 0
        for row in range(rows):
            if batch.emits[row]:
                context, table = int(batch.context_lengths[row]), requests.page_table[batch.row_slots[row]]
                values = self.cache[table[: -(-context // self.sizes.page_size)]].reshape(-1)[:context]
                batch.sampled[row] = next_token(values, self.sizes.vocab_size)
                if requests.entry[batch.row_slots[row], WORD_LOGPROBS] >= 0:
                    batch.logprobs[row] = record_of(int(batch.sampled[row]), context)
                emitted += 1
        assert emitted == batch.counts[EMITS]

    def _check_padding(self, rows: int, tokens: int) -> None:
        batch, buckets = self.state.batch, self.state.buckets
        more, most = int(buckets.rows[self.bucket]), int(buckets.tokens[self.bucket])
        assert rows <= more
        assert tokens <= most
        assert self.bucket == 0 or buckets.tokens[self.bucket - 1] < tokens or buckets.rows[self.bucket - 1] < rows
        assert (batch.token_ids[tokens:most] == 0).all()
        assert (batch.positions[tokens:most] == 0).all()
        assert (batch.cache_slots[tokens:most] == -1).all()
        assert (batch.token_rows[tokens:most] == -1).all()
        assert (batch.row_slots[rows:more] == -1).all()
        assert (batch.query_starts[rows : more + 1] == tokens).all()
        assert (batch.context_lengths[rows:more] == 0).all()
        assert (batch.emits[rows:more] == 0).all()

    def finish(self, most_steps: int = 2000) -> int:
        """Run, with everybody reading, until all requests have ended. Returns the number of steps; bounded: nothing hangs."""
        for steps in range(most_steps):
            for front in self.fronts:
                if front.alive and front.attached:
                    front.poll()
            if not any(front.busy for front in self.fronts if front.alive) and (self.state.requests.status == EMPTY).all():
                return steps
            self.step()
        raise AssertionError(f"requests do not end within {most_steps} steps")
