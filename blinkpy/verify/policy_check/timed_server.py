"""A server in simulated time: the real scheduler, compiled with the policy, with one queue pair and a model of step durations.

So order, batches, chunks and preemptions equal those of an engine with these limits. Only the clock is simulated.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from heapq import heappop, heappush
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from blinkpy.config import BatchOptions, ConfigError, SchedulerOptions
from blinkpy.kv import state as S
from blinkpy.kv.limits import make_limits
from blinkpy.kv.state_memory import make_state
from blinkpy.queues.layout import EngineFacts, QueueLayout, QueueSizes, engine_views, write_header
from blinkpy.queues.page_hash import PageHasher
from blinkpy.queues.submission import neutral_entries
from blinkpy.queues.words import (
    COUNTER,
    EPOCH_SHIFT,
    FINISH_MASK,
    FLAG_MASK,
    FLAG_SHIFT,
    FRONT_CLAIM,
    FRONT_CQ_HEAD,
    FRONT_DOORBELL,
    FRONT_HEARTBEAT,
    GAUGE,
    PAIR_CQ_TAIL,
    SLOT_MASK,
    Int32,
)
from blinkpy.scheduler.host_scheduler import Scheduler
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.policy_check.check_workload import Workload

MOST_SLOTS = 4096  # maximum requests in the engine; further requests wait outside, in arrival order
COMPLETIONS = 1 << 14  # size of the completion ring: more than the rows of two steps
IDLE_NS = 1_000_000  # advance of the clock when no request can run or arrives
STOP, OTHER = 1, 0  # tokens
VOCAB = 1 << 16  # of prompts
MULTIPLIERS = (1_000_003, 1_000_033)  # of page hashes
NEVER = -1
NO_WORDS: Mapping[str, NDArray[np.int64]] = {}


class StuckError(RuntimeError):
    """Requests wait, no request runs, and no event will change that."""


class Work(NamedTuple):
    """The work of one step.

    tokens: tokens of its bucket, including padding.
    decoding: rows.
    prefill: tokens of prompt chunks.
    decode_context: total tokens that the decoding rows attend to.
    prefill_context: total tokens that the prompt tokens attend to.
    """

    tokens: int
    decoding: int
    prefill: int
    decode_context: int
    prefill_context: int


@dataclass(frozen=True, kw_only=True)
class ServerModel(BatchOptions):
    """A server with the batch options of `serve`, and the durations of its steps. A subclass may override
    step_ns.
    """

    page_size: int  # tokens
    num_pages: int
    step_us: float  # duration of an empty step
    row_us: float  # more per decoding row
    token_us: float  # more per prompt token
    border_us: float = 0.0  # duration of the turn between two groups of a cut step

    @classmethod
    def of(cls, options: Any) -> "ServerModel":
        """Build a model from an object with these option names."""
        return cls(**{item.name: getattr(options, item.name) for item in fields(cls)})

    @property
    def scheduler(self) -> SchedulerOptions:
        """The scheduler's options; pacing is off."""
        return SchedulerOptions(**{item.name: getattr(self, item.name) for item in fields(BatchOptions)})

    def step_ns(self, work: Work) -> int:
        """step_us + row_us for each decoding row + token_us for each token of a prompt."""
        return int(1000 * (self.step_us + self.row_us * work.decoding + self.token_us * work.prefill))

    def buckets(self) -> list[tuple[int, int]]:
        """(tokens, rows) of the available steps; empty for the scheduler's defaults."""
        return []


@dataclass
class ServerOutcome:
    """The outcome of each request, arrays [n]. Times are ns since the first arrival, or NEVER.

    waiting_s, ttft_s, end_to_end_s: seconds from the arrival to the first step, first token and last token.
    """

    arrival: NDArray[np.int64]
    started: NDArray[np.int64]  # start of the request's first step
    first_token: NDArray[np.int64]
    ended: NDArray[np.int64]
    preemptions: NDArray[np.int64]
    steps: int = 0

    @property
    def waiting_s(self) -> NDArray[np.float64]:
        return (self.started - self.arrival) / 1e9

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        return (self.first_token - self.arrival) / 1e9

    @property
    def end_to_end_s(self) -> NDArray[np.float64]:
        return (self.ended - self.arrival) / 1e9

    def overtakers(self) -> list[int]:
        """For each request, the number of later arrivals that started before it."""
        begun: list[int] = []
        counts = []
        for started in self.started[::-1].tolist():
            counts.append(bisect_left(begun, started))
            insort(begun, started)
        return counts[::-1]


class TimedSimulation:
    """One server, driven by submit() and turn().

    requests: the requests that may be submitted, by number.
    words: other parameters of the requests, arrays [n], by names of the submission entry's fields.
    prompts: int32 tokens in [0, VOCAB) of each request, for a server with a prefix cache; otherwise prompts
        have only a length.
    most_slots: maximum requests in the server.
    due: arrival of each request, ns; in a closed loop, known once a previous request ends.
    over: requests that ended before the last turn began, at read_ns.
    generated: tokens of each request, including those of the running step.
    free: slots without a request.
    durations: duration of each step so far, or layer group of a cut step, ns.
    decoding: per step, the rows that got a token other than their first.
    """

    def __init__(
        self,
        policy: Policy,
        machine: ServerModel,
        requests: Workload,
        words: Mapping[str, NDArray[np.int64]] = NO_WORDS,
        prompts: Sequence[Int32] | None = None,
        most_slots: int = MOST_SLOTS,
    ):
        self.machine = machine
        self.requests = requests
        self._words = words
        self._prompts = prompts
        n, longest = len(requests), requests.longest
        if longest > machine.num_pages * machine.page_size:
            raise ConfigError(
                f"the workload's longest request has up to {longest} tokens, "
                f"but {machine.num_pages} pages of {machine.page_size} hold {machine.num_pages * machine.page_size}: "
                f"increase num_pages"
            )
        slots = min(n, most_slots)
        ring = max(2, 1 << (slots - 1).bit_length())
        space = max(16, longest) if prompts is None else (slots + 2) * (longest + machine.page_size)
        sizes = QueueSizes(1, slots, ring, COMPLETIONS, space, 1 if prompts is None else space // machine.page_size)
        shape = (longest, 2 if prompts is None else VOCAB, machine.page_size, machine.num_pages, machine.max_num_seqs, 3_600_000)
        facts = EngineFacts(1, *MULTIPLIERS, *shape)
        layout = QueueLayout(sizes)
        memory = memoryview(bytearray(layout.total_bytes))
        write_header(memory, sizes, facts)
        self._views = engine_views(memory, layout)
        limits = make_limits(sizes, facts, machine.scheduler, prefix_caching=prompts is not None, intake_tokens=1 << 30)
        self._state = make_state(limits, machine.buckets())
        self._scheduler = Scheduler(limits, self._state, policy)
        self._scheduler.attach(self._views)
        self._entry = neutral_entries(1)
        self._entry["epoch"], self._entry["stop_ids"][0, 0] = 1, STOP
        self.now = 0
        self.free = list(range(slots))[::-1]
        self._hasher, self._offset = PageHasher(machine.page_size, MULTIPLIERS, VOCAB), 0
        self._number = np.full(slots, NEVER)  # request in each slot
        self.generated = np.zeros(n, np.int64)
        self._sq_tail = self._cq_head = 0
        self.due = requests.arrival_ns.copy()
        started, first_token, ended = (np.full(n, NEVER) for _ in range(3))
        self.outcome = ServerOutcome(self.due, started, first_token, ended, np.zeros(n, np.int64))
        self.durations: list[int] = []
        self.decoding: list[int] = []
        self.ended = 0
        self.over: list[int] = []
        self.read_ns = 0
        self._views.front[0, FRONT_CLAIM] = 1
        self._scheduler.turn(0)

    def submit(self, number: int) -> None:
        """Submit a request to the server."""
        slot, entry, requests = self.free.pop(), self._entry, self.requests
        self._number[slot] = number
        entry["request_id"] = 1 << 32 | self._sq_tail + 1
        entry["slot"], entry["prompt_length"] = slot, requests.prompt[number]
        entry["max_tokens"], entry["priority"] = requests.max_tokens[number], requests.priority[number]
        for name, values in self._words.items():
            entry[name] = values[number]
        if self._prompts is not None:
            self._write_prompt(self._prompts[number])
        self._views.sq[0, self._sq_tail % self._views.sq.shape[1]] = entry.view(np.int32)
        self._sq_tail += 1
        self._views.front[0, FRONT_DOORBELL] = 1 << EPOCH_SHIFT | self._sq_tail

    @property
    def yielded_turns(self) -> int:
        """Consecutive turns, up to the last one, in which best-effort prompts yielded."""
        return int(self._state.counts[S.YIELDED_TURNS])

    def _write_prompt(self, prompt: Int32) -> None:
        """Write tokens and page hashes to the arenas, and their offsets to the entry. The arenas have space for all slots."""
        page, arena, hashes = self.machine.page_size, self._views.prompt, self._views.hashes
        taken = -(-len(prompt) // page) * page
        if self._offset + taken > arena.shape[1]:
            self._offset = 0
        found = self._hasher.hashes(prompt)
        arena[0, self._offset : self._offset + len(prompt)] = prompt
        hashes[0, self._offset // page : self._offset // page + len(found)] = found
        self._entry["prompt_offset"], self._entry["hash_offset"] = self._offset, self._offset // page
        self._entry["hash_count"] = len(found)
        self._offset += taken

    def counter(self, name: str) -> int:
        """A published counter of the engine."""
        return int(self._views.engine[COUNTER[name]])

    def gauge(self, name: str) -> int:
        """A published gauge of the engine, as of its last turn."""
        return int(self._views.engine[GAUGE[name]])

    def turn(self) -> bool:
        """Run one turn of the scheduler and the step that it plans. Returns False if there was no step."""
        batch, machine, out = self._state.batch, self.machine, self.outcome
        self._views.front[0, FRONT_HEARTBEAT] += 1
        bucket = self._scheduler.turn(self.now)
        self._read()
        if bucket < 0:
            return False
        rows, tokens, decoding = (int(batch.counts[i]) for i in (S.ROWS, S.TOKENS, S.DECODE_ROWS))
        numbers = self._number[batch.row_slots[:rows]]
        fresh = numbers[out.started[numbers] == NEVER]
        out.started[fresh] = self.now
        duration = machine.step_ns(self._work(bucket, rows, tokens, decoding))
        group, groups = int(batch.counts[S.GROUP]), int(batch.counts[S.GROUPS])
        duration = duration * (group + 1) // groups - duration * group // groups
        if group + 1 < groups:
            duration += int(1000 * machine.border_us)
        self.now += duration
        self.durations.append(duration)
        self.decoding.append(decoding if group + 1 == groups else 0)
        if group + 1 == groups:
            self.generated[numbers] += batch.emits[:rows]
            batch.sampled[:rows] = np.where(self.generated[numbers] >= self.requests.output[numbers], STOP, OTHER)
            out.steps += 1
        return True

    def _work(self, bucket: int, rows: int, tokens: int, decoding: int) -> Work:
        batch = self._state.batch
        contexts = batch.context_lengths[:rows]
        lengths = np.diff(batch.query_starts[: rows + 1])[decoding:].astype(np.int64)
        last = contexts[decoding:].astype(np.int64)  # context of each chunk's last token; it shrinks by one per earlier token
        return Work(
            tokens=int(self._state.buckets.tokens[bucket]),
            decoding=decoding,
            prefill=tokens - decoding,
            decode_context=int(contexts[:decoding].sum()),
            prefill_context=int((lengths * last - lengths * (lengths - 1) // 2).sum()),
        )

    def _read(self) -> None:
        """Read the completions of the step that just ended."""
        out, ring = self.outcome, self._views.cq.shape[1]
        tail = int(self._views.pair[0, PAIR_CQ_TAIL])
        words = self._views.cq[0, np.arange(self._cq_head, tail) % ring]
        slots, flags = words & SLOT_MASK, words >> FLAG_SHIFT & FLAG_MASK
        numbers = self._number[slots]
        first = numbers[out.first_token[numbers] == NEVER]
        out.first_token[first] = self.now
        over = flags & FINISH_MASK != 0
        self.over, self.read_ns = numbers[over].tolist(), self.now
        out.ended[self.over] = self.now
        out.preemptions[numbers[over]] = self._state.requests.preemptions[slots[over]]
        self.free += slots[over].tolist()
        self.ended += int(over.sum())
        self._cq_head = tail
        self._views.front[0, FRONT_CQ_HEAD] = 1 << EPOCH_SHIFT | tail


def simulate(policy: Policy, machine: ServerModel, requests: Workload) -> ServerOutcome:
    """Serve all requests, each submitted at its arrival (open loop). Raises StuckError if some never end."""
    return serve(TimedSimulation(policy, machine, requests))


def serve(server: TimedSimulation, streams: int = 0) -> ServerOutcome:
    """Run a server until all its requests have ended. Raises StuckError if some never end.

    streams: 0 submits each request at its arrival. Otherwise the loop is closed: the first `streams` requests
        are submitted at their arrival. Request i is submitted after the end of request i - streams, delayed
        by its arrival time.
    """
    n, due, idle = len(server.requests), server.due, 0
    streams = streams or n
    coming = sorted((int(due[number]), number) for number in range(min(streams, n)))
    while server.ended < n:
        while coming and server.free and coming[0][0] <= server.now:
            server.submit(heappop(coming)[1])
        if server.turn():
            idle = 0
        elif coming and server.free:
            server.now = max(server.now, coming[0][0])
        elif not server.over:
            server.now += IDLE_NS
            idle += 1
            if idle > 1000:
                raise StuckError(f"{n - server.ended} requests wait forever: no request runs or arrives")
        for number in server.over:
            if (follower := number + streams) < n:
                due[follower] += server.read_ns
                heappush(coming, (int(due[follower]), follower))
    return server.outcome
