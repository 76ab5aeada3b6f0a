"""What the rules decide upon: the engine as plain Python objects."""

from typing import Any

from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.queues import completion as C
from blinkpy.queues import words as W
from blinkpy.queues.views import EngineViews
from blinkpy.scheduler.policies import Policy
from blinkpy.verify.oracle.objects import Account, Pair, Request, Row
from blinkpy.verify.oracle.page_pool import PagePool


class OracleState:
    """Who waits, runs and ends, what they hold, the step, and what is published.

    queues: the segment. sampled: State.batch.sampled. pieces: the bytes of each token, if there are grammars.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        queues: EngineViews,
        sampled: Any,
        buckets: list[tuple[int, int]],
        pieces: list[bytes],
    ) -> None:
        self.limits, self.policy, self.queues, self.sampled, self.buckets = limits, policy, queues, sampled, buckets
        self.pieces = pieces
        self.pairs = [Pair() for _ in range(limits.pairs)]
        self.pool = PagePool(limits.pages)
        self.live: dict[int, Request] = {}  # by slot
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # by (rank, arrival)
        self.unranked: list[Request] = []
        self.finishing: list[Request] = []
        self.rows: list[Row] = []
        self.suspended: list[Row] = []
        self.group, self.groups = 0, 1  # of the rows, the next one; and of the suspended ones
        self.suspended_group, self.interruptions = 0, 0
        self.bucket = S.NO_BATCH
        self.completions: list[tuple[int, int]] = []  # of the last turn: queue pair, word
        self.hit_words = [0] * limits.slots  # by slot
        self.counters = dict.fromkeys(W.COUNTER_NAMES, 0)
        self.policy_fault: tuple[Any, str] | None = None  # the latest: where and what
        self.arrivals = self.rotation = self.turns = self.steps = self.now_ns = self.yielded = self.passed = 0
        self.step_ns = self.tokens_ns = self.held_since = 0
        self.accounts: list[Account | None] = [None] * limits.slots
        self.clock = 0

    def free_entries(self, pair: Pair) -> int:
        """Of its completion ring; those who are in flight keep theirs (R23)."""
        kept = sum(row.emits and self.pairs[row.request.pair] is pair for row in self.suspended)
        return self.limits.cq_entries - (pair.cq_tail - pair.cq_head) - kept

    def movable(self) -> list[Request]:
        """R23: those who run and are not in flight."""
        return [r for r in self.running if not r.in_flight]

    def active(self) -> list[Request]:
        """Those of them who have a part in the next step."""
        return [r for r in self.movable() if not r.stalled]

    def prompts(self) -> list[Request]:
        return [r for r in self.active() if r.missing > 1]

    def drop(self, request: Request) -> None:
        """Nothing of a request is left in the engine."""
        del self.live[request.slot]
        self.leave(request)

    def leave(self, request: Request) -> None:
        """It neither runs nor waits any more."""
        self.pool.release(request.pages)
        request.pages, request.stalled = [], False
        for requests in self.running, self.waiting, self.finishing:
            if request in requests:
                requests.remove(request)

    def publish(self, request: Request, value: int, flags: int) -> None:
        pair = self.pairs[request.pair]
        lap = C.lap_of(pair.cq_tail, self.limits.cq_entries)
        self.completions.append((request.pair, C.pack_completion(request.slot % self.limits.slots_per_pair, value, flags, lap)))
        pair.cq_tail += 1

    def accounts_by_place(self) -> list[tuple[int, int, int, int]]:
        """(tenant, class, service, expected output) of each; (-1, 1, -1, 0) if there is none."""
        return [(-1, 1, -1, 0) if a is None else (a.tenant, a.best_effort, a.service, a.expected) for a in self.accounts]

    def ends_next(self, request: Request) -> bool:
        """Whether the next token is the last one, whatever it is."""
        length = len(request.tokens) + 1
        return length - request.prompt_length >= request.max_tokens or length >= self.limits.max_model_len

    def give_page_to_each(self, requests: list[Request]) -> None:
        self.pool.evict(len(requests))
        for request in requests:
            request.pages.append(self.pool.take())
