"""A small world around the scheduler: front ends that follow the queue protocol, a made-up model, and a clock.

The model makes mistakes of the scheduler visible: the "keys and values" of a token are numbers written to its cache slot,
and the next token is a hash of all numbers that the page table leads to. So a wrong page, slot, position or row gives a
wrong token, and the front ends know the right ones from the prompt alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blinkpy import queues as q
from blinkpy.kernels.lanes import Team
from blinkpy.kernels.policies import Policy, fcfs
from blinkpy.kernels.scheduler import Scheduler, make_phases, make_schedule, plain
from blinkpy.kv.integrity import check_integrity
from blinkpy.kv.limits import Limits, make_limits
from blinkpy.kv.memory import make_state
from blinkpy.kv.state import EMITS, EMPTY, ROWS, TOKENS, State

MODULUS = 1_000_003
MULTIPLIERS = (1_234_567, 7_654_321)
TICK_NS = 50_000


def value_of(tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What the made-up model caches for tokens at positions."""
    return (tokens.astype(np.int64) * 7919 + positions * 104_729 + 13) % MODULUS


def next_token(values: np.ndarray, vocab_size: int) -> int:
    """The token after cached values, in order."""
    weights = np.arange(1, len(values) + 1, dtype=np.int64)
    return int((values * weights).sum() % MODULUS % vocab_size)


def generate(prompt: list[int], max_tokens: int, min_tokens: int, stop_ids: list[int], vocab_size: int) -> tuple[list[int], int]:
    """All tokens that a request must get, and its finish reason."""
    tokens = list(prompt)
    while True:
        array = np.array(tokens, np.int64)
        tokens.append(next_token(value_of(array, np.arange(len(tokens))), vocab_size))
        generated = len(tokens) - len(prompt)
        if generated > min_tokens and tokens[-1] in stop_ids:
            return tokens[len(prompt) :], q.FINISH_STOP
        if generated == max_tokens:
            return tokens[len(prompt) :], q.FINISH_LENGTH


def record_of(token: int, context: int) -> np.ndarray:
    """Log probabilities of the made-up model, int64 [RECORD_PAIRS]: numbers that say where they belong."""
    return (token << 40) + (context << 20) + np.arange(q.RECORD_PAIRS)


@dataclass(frozen=True)
class Sizes:
    """The world's parameters; small, so that everything runs out often."""

    pairs: int = 2
    slots: int = 4
    cq_entries: int = 16
    rows: int = 4
    tokens: int = 16
    page_size: int = 4
    pages: int = 16
    max_model_len: int = 32
    vocab_size: int = 50
    lease_ms: int = 1
    prefix_caching: bool = True
    multipliers: tuple[int, int] = MULTIPLIERS
    intake_entries: int = 4
    intake_tokens: int = 32768
    record_calls: int = 0

    def queue_sizes(self) -> q.QueueSizes:
        sq = max(2, 1 << (self.slots - 1).bit_length())
        arena, pages = sq * self.max_model_len, self.max_model_len // self.page_size + 1
        return q.QueueSizes(self.pairs, self.slots, sq, self.cq_entries, max(16, arena), sq * pages)

    def facts(self) -> q.EngineFacts:
        sizes = (self.max_model_len, self.vocab_size, self.page_size, self.pages, self.rows, self.lease_ms)
        return q.EngineFacts(1, *self.multipliers, *sizes)


@dataclass
class Sent:
    """A request as its front end knows it."""

    request_id: int
    prompt: list[int]
    expected: list[int]
    finish: int
    got: list[int] = field(default_factory=list)
    cancelled: bool = False
    ended: int = q.FINISH_NONE
    reason: int = 0  # of a rejection
    logprobs: int = -1


class Front:
    """One front-end worker: the protocol of queues.py, in plain Python."""

    def __init__(self, world: World, pair: int) -> None:
        self.world, self.pair = world, pair
        self.views, self.sizes = world.views, world.sizes
        self.epoch, self.alive, self.counter = 0, True, 0
        self.slots: list[Sent | None] = [None] * self.sizes.slots
        self.done: list[Sent] = []
        self.lost: list[Sent] = []  # of an earlier life of this pair

    def word(self, index: int) -> int:
        return int(self.views.pair[self.pair, index])

    def beat(self) -> None:
        """Show that this front end lives."""
        self.views.front[self.pair, q.FRONT_HEARTBEAT] += 1

    @property
    def attached(self) -> bool:
        return self.epoch > 0 and self.word(q.PAIR_EPOCH) == self.epoch and self.word(q.PAIR_ATTACHED) == 1

    def claim(self) -> None:
        """Ask for the pair; what was in flight is lost. Complete once `settle` was called and `attached`."""
        self.lost += [sent for sent in self.slots if sent is not None]
        self.slots = [None] * self.sizes.slots
        self.epoch = 0
        self.views.front[self.pair, q.FRONT_CLAIM] = self.word(q.PAIR_EPOCH) + 1

    def settle(self) -> bool:
        """Take over the pair if the claim was granted."""
        claim = int(self.views.front[self.pair, q.FRONT_CLAIM])
        if self.epoch == 0 and self.word(q.PAIR_EPOCH) == claim and self.word(q.PAIR_ATTACHED) == 1:
            self.epoch, self.sq_tail, self.cq_head = claim, self.word(q.PAIR_SQ_HEAD), self.word(q.PAIR_CQ_TAIL)
        return self.epoch > 0

    def free_slot(self) -> int | None:
        full = self.sq_tail - self.word(q.PAIR_SQ_HEAD) >= self.world.queue.sq_entries
        return None if full else next((i for i, sent in enumerate(self.slots) if sent is None), None)

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        min_tokens: int = 0,
        stop_ids: tuple[int, ...] = (),
        slot: int | None = None,
        ring: bool = True,
        **fields: Any,
    ) -> Sent:
        """Write a request and, unless ring is False, the doorbell. fields: of the entry, as they are, to break the rules."""
        chosen = self.free_slot() if slot is None else slot
        assert chosen is not None
        world, where = self.world, self.sq_tail % self.world.queue.sq_entries
        self.counter += 1
        entry = np.zeros(1, q.SQ_ENTRY)
        salt = fields.get("cache_salt", 0)
        hashes = q.page_hashes(np.array(prompt, np.int32), self.sizes.page_size, self.sizes.multipliers, salt)
        offset, hash_offset = where * self.sizes.max_model_len, where * (world.queue.hash_entries // world.queue.sq_entries)
        values = {
            "request_id": self.epoch << 32 | self.counter,
            "seed": 5,
            "epoch": self.epoch,
            "slot": chosen,
            "prompt_offset": offset,
            "prompt_length": len(prompt),
            "hash_offset": hash_offset,
            "hash_count": len(hashes),
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "top_p": 1,
            "repetition_penalty": 1,
            "logprobs": -1,
        } | fields
        entry["stop_ids"] = -1
        entry["stop_ids"][0, : len(stop_ids)] = stop_ids
        for name, value in values.items():
            entry[name] = value
        room = min(len(prompt), world.queue.prompt_tokens - offset)
        self.views.prompt[self.pair, offset : offset + room] = prompt[:room]
        room = min(len(hashes), world.queue.hash_entries - hash_offset)
        self.views.hashes[self.pair, hash_offset : hash_offset + room] = hashes[:room]
        self.views.sq[self.pair, where] = entry.view(np.int32)
        self.sq_tail += 1
        if ring:
            self.ring()
        most = max(1, min(max_tokens, self.sizes.max_model_len - len(prompt)))
        expected, finish = generate(prompt, most, min_tokens, list(stop_ids), self.sizes.vocab_size)
        sent = Sent(int(entry["request_id"][0]), prompt, expected, finish, logprobs=int(entry["logprobs"][0]))
        if 0 <= chosen < self.sizes.slots and self.slots[chosen] is None:
            self.slots[chosen] = sent
        return sent

    def ring(self) -> None:
        self.views.front[self.pair, q.FRONT_DOORBELL] = self.epoch << 32 | self.sq_tail & q.POSITION_MASK

    def cancel(self, slot: int) -> None:
        sent = self.slots[slot]
        if sent is not None:
            sent.cancelled = True
            self.views.cancel[self.pair, slot] = sent.request_id

    def poll(self, most: int = 1 << 30) -> None:
        """Read completions and check each: the right token of the right request, in order, once."""
        for _ in range(most):
            word = int(self.views.cq[self.pair, self.cq_head % self.sizes.cq_entries])
            completion = q.unpack_completion(word)
            if completion.lap != q.lap_of(self.cq_head, self.sizes.cq_entries):
                break
            record = self.views.records[self.pair, self.cq_head % self.sizes.cq_entries]
            self.cq_head += 1
            self._take(completion, record)
        self.views.front[self.pair, q.FRONT_CQ_HEAD] = self.epoch << 32 | self.cq_head & q.POSITION_MASK

    def _take(self, completion: q.Completion, record: np.ndarray) -> None:
        sent = self.slots[completion.slot]
        assert sent is not None, f"a completion for nobody: {completion}"
        if completion.has_token:
            sent.got.append(completion.token)
            assert sent.got == sent.expected[: len(sent.got)], (sent.got, sent.expected)
            assert completion.has_logprobs == (sent.logprobs >= 0)
            if completion.has_logprobs:
                assert (record == record_of(completion.token, len(sent.prompt) + len(sent.got) - 1)).all()
        else:
            assert not completion.has_logprobs
        if completion.finish:
            sent.ended = completion.finish
            sent.reason = completion.token if completion.finish == q.FINISH_REJECTED else 0
            if completion.finish in (q.FINISH_STOP, q.FINISH_LENGTH):
                assert sent.got == sent.expected
                assert sent.finish == completion.finish
            elif completion.finish == q.FINISH_CANCELLED:
                assert sent.cancelled
            self.slots[completion.slot] = None
            self.done.append(sent)
        else:
            assert len(sent.got) < len(sent.expected)

    @property
    def busy(self) -> bool:
        return any(sent is not None for sent in self.slots)


Runner = Callable[[int], int]


class World:
    """Queues, scheduler, model and front ends.

    mode: "python", "njit", a number of lanes in plain Python, or "general": plain Python that never takes a short way.
    """

    def __init__(self, sizes: Sizes, mode: str | int = "python", policy: Policy = fcfs, seed: int = 0) -> None:
        self.sizes, self.queue = sizes, sizes.queue_sizes()
        layout = q.QueueLayout(self.queue)
        self.segment = memoryview(bytearray(layout.total_bytes))
        q.write_header(self.segment, self.queue, sizes.facts())
        self.views = q.engine_views(self.segment, layout)
        self.limits: Limits = make_limits(
            self.queue,
            sizes.facts(),
            max_num_batched_tokens=sizes.tokens,
            prefix_caching=sizes.prefix_caching,
            intake_entries=sizes.intake_entries,
            intake_tokens=sizes.intake_tokens,
            record_calls=sizes.record_calls,
        )
        self.state: State = make_state(self.limits)
        self.now = 1
        self._schedule = self._runner(mode, policy, seed)
        self.cache = np.full((sizes.pages, sizes.page_size), -1, np.int64)
        self.fronts = [Front(self, pair) for pair in range(sizes.pairs)]
        self.bucket = -1

    def _runner(self, mode: str | int, policy: Policy, seed: int) -> Runner:
        if mode == "general":
            general, state, queues = make_phases(policy, short_ways=False).schedule, plain(self.state), plain(self.views)
            return lambda now: general(self.limits, queues, state, now, 0, 1)
        if isinstance(mode, str):
            scheduler = Scheduler(self.limits, self.state, policy, mode=mode)  # type: ignore[arg-type]
            scheduler.attach(self.views)
            return scheduler.step
        function, team, queues, state = make_schedule(policy), Team(mode, seed), plain(self.views), plain(self.state)

        def run(now: int) -> int:
            results = team.run(lambda lane, lanes: function(self.limits, queues, state, now, lane, lanes))
            assert len(set(results)) == 1, f"lanes return different results: {results}"
            return results[0]

        return run

    def counter(self, name: str) -> int:
        return int(self.views.engine[q.COUNTER[name]])

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
                if requests.entry[batch.row_slots[row], q.WORD_LOGPROBS] >= 0:
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


def random_sizes(seed: int) -> Sizes:
    """Parameters of a random small world."""
    draw = random.Random(seed)
    rows = draw.randint(1, 6)
    return Sizes(
        pairs=draw.randint(1, 5),
        slots=draw.randint(1, 6),
        cq_entries=draw.choice((2, 4, 16, 64)),
        rows=rows,
        tokens=rows + draw.randint(0, 20),
        page_size=draw.choice((1, 2, 4, 8)),
        pages=draw.randint(3, 24),
        max_model_len=draw.randint(8, 48),
        prefix_caching=draw.random() < 0.85,
        multipliers=draw.choice((MULTIPLIERS, MULTIPLIERS, (0, 0))),  # 0: hashes say little, so that they collide
    )


class Story:
    """A random course of events in a world, from one seed: submissions with shared prefixes, cancels, slow readers, crashes
    and returns, late writes of owners that are gone."""

    def __init__(self, world: World, seed: int, load: float = 0.6) -> None:
        self.world, self.random, self.load = world, random.Random(seed), load
        draw = self.random
        sizes = world.sizes
        length = sizes.max_model_len - 2
        self.stems = [[draw.randrange(sizes.vocab_size) for _ in range(length)] for _ in range(3)]
        self.slow = [draw.random() < 0.3 for _ in world.fronts]
        world.attach()

    def prompt(self) -> list[int]:
        draw, sizes = self.random, self.world.sizes
        stem = draw.choice(self.stems)
        longest = min(sizes.max_model_len - 2, sizes.pages * sizes.page_size - 2)
        length = draw.randint(1, max(1, longest)) if draw.random() < 0.5 else draw.randint(1, max(1, longest // 3))
        own = draw.randint(0, min(3, length - 1))
        return stem[: length - own] + [draw.randrange(sizes.vocab_size) for _ in range(own)]

    def tick(self) -> None:
        world, draw = self.world, self.random
        for pair, front in enumerate(world.fronts):
            if draw.random() < 0.01:
                self._crash(front)
            if not front.alive:
                if draw.random() < 0.08:
                    front.alive = True
                    front.claim()
                elif draw.random() < 0.2:  # what is still on its way
                    world.views.front[pair, q.FRONT_DOORBELL] = draw.choice((0, front.epoch << 32 | draw.randrange(1 << 20)))
                continue
            if not front.settle():
                continue
            if not front.attached:
                front.claim()
                continue
            self._act(front)
        world.step()
        if draw.random() < 0.002:
            world.now += 2 * world.limits.lease_ns  # nobody is heard for a while

    def _crash(self, front: Front) -> None:
        front.alive = False
        front.lost += [sent for sent in front.slots if sent is not None]
        front.slots = [None] * front.sizes.slots

    def _act(self, front: Front) -> None:
        draw, sizes = self.random, self.world.sizes
        while draw.random() < self.load and front.free_slot() is not None:
            prompt = self.prompt()
            room = min(sizes.max_model_len, sizes.pages * sizes.page_size + 1) - len(prompt)
            stop_ids = tuple(draw.randrange(sizes.vocab_size) for _ in range(draw.choice((0, 0, 3))))
            broken = draw.choice(({"temperature": -1}, {"hash_offset": -1})) if draw.random() < 0.05 else {}
            front.submit(
                prompt,
                draw.randint(1, max(1, min(room, 12))),
                min_tokens=draw.choice((0, 0, 2)),
                stop_ids=stop_ids,
                priority=draw.randint(-2, 2),
                cache_salt=draw.choice((0, 0, 0, 9)),
                flags=draw.choice((0, 0, 0, q.SUBMIT_NO_PREFIX_CACHE)),
                logprobs=draw.choice((-1, -1, 0, 20)),
                ring=draw.random() < 0.8,
                **broken,
            )
        if draw.random() < 0.5:
            front.ring()
        for slot in range(sizes.slots):
            if draw.random() < 0.03:
                front.cancel(slot)
        if not self.slow[front.pair]:
            front.poll()
        elif draw.random() < 0.2:
            front.poll(draw.randint(0, 4))
        if draw.random() < 0.02:
            self.slow[front.pair] = not self.slow[front.pair]

    def end(self) -> None:
        """Everybody reads again; all requests must end, and all pages come back."""
        world = self.world
        for front in world.fronts:
            if not front.alive or front.epoch == 0 or not front.attached:
                front.claim()
            front.alive = True
        for _ in range(3):
            for front in world.fronts:
                if front.settle():
                    front.ring()
            world.step()
        world.finish()
        assert (world.state.pages.refcount == 0).all()
