"""What the rules decide upon: the engine as plain Python objects."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.queues import words as C
from blinkpy.queues import words as W
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.layout import EngineViews
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import FINISH_NONE
from blinkpy.scheduler.policies import Policy

Place = tuple["Page | None", int, tuple[int, ...]]  # page before it, salt, its tokens


@dataclass(slots=True, eq=False)
class Page:
    """What a page of the pool holds, from the moment that a request takes it until it is free again.

    number: in the pool; -1 while it was not seen in a page table, since any free page will do. place: where the index has it.
    """

    holders: int = 1
    number: int = -1
    place: Place | None = None
    alive: bool = True


class PagePool:
    """A page is free, held by requests, or cached: indexed, and held by none."""

    def __init__(self, pages: int) -> None:
        self.free = pages
        self.cached: dict[Page, None] = {}  # in the order of eviction
        self.index: dict[Place, Page] = {}
        self.named: dict[int, Page] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        return self.free + len(self.cached)

    def evict(self, wanted: int) -> None:
        """R14: make `wanted` pages free; those leave that were released first."""
        while self.free < wanted:
            page = next(iter(self.cached))
            del self.cached[page]
            self._drop(page)
            self.evictions += 1

    def take(self) -> Page:
        """A free page for one request."""
        self.free -= 1
        return Page()

    def share(self, page: Page) -> None:
        """A hit: one more request holds an indexed page."""
        self.cached.pop(page, None)
        page.holders += 1

    def release(self, pages: Sequence[Page]) -> None:
        """R14: a request's pages, the last one first. Indexed ones that nobody else holds become cached, others free."""
        for page in reversed(pages):
            page.holders -= 1
            if page.holders == 0 and page.place:
                self.cached[page] = None
            elif page.holders == 0:
                self._drop(page)

    def offer(self, page: Page, place: Place) -> None:
        """Put a full page into the index."""
        page.place = place
        self.index[place] = page

    def _drop(self, page: Page) -> None:
        page.alive = False
        if page.place:
            del self.index[page.place]
        self.named.pop(page.number, None)
        self.free += 1


GrammarKey = tuple[int, int, bool]


@dataclass(slots=True, eq=False)
class Pair:
    """A queue pair. Positions count from the making of the segment."""

    epoch: int = 0
    attached: bool = False
    heartbeat: int = 0
    heard_ns: int = 0
    granted_ns: int = 0
    sq_head: int = 0
    sq_tail: int = 0
    cq_head: int = 0
    cq_tail: int = 0
    unclaimed: int = 0  # entries of the completion ring that no running request counts on
    # By epoch, digest and whether they are token rules, in the order of their use.
    grammars: dict[GrammarKey, ByteAutomaton | TokenRules] = field(default_factory=dict)


class Verdict(NamedTuple):
    """What becomes of a queue pair in this turn."""

    revoke: bool = False
    grant: bool = False


@dataclass(slots=True, eq=False)
class Account:
    """What a tenant was served in one class."""

    tenant: int
    best_effort: int
    service: int = 0
    expected: int = 256  # tokens of its next output


@dataclass(slots=True, eq=False)
class Request:
    """One request in the engine. finish: FINISH_* once it ended, reason: REJECT_*."""

    slot: int
    pair: int
    request_id: int
    finish: int = FINISH_NONE
    reason: int = 0
    tokens: list[int] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    prompt_length: int = 0
    max_tokens: int = 0
    min_tokens: int = 0
    stop_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: int = 0
    best_effort: int = 0
    weight: int = 0
    service: int = 0
    charged: int = 0
    place: int = 0  # of its tenant's account
    salt: int = 0
    logprobs: bool = False
    cacheable: bool = False  # it reuses and offers pages
    hashed: int = 0  # pages whose hash is known
    arrival: int = 0
    arrival_us: int = 0
    first_token_ns: int = 0  # where steps are paced
    rank: int = 0
    computed: int = 0
    pages: list[Page] = field(default_factory=list)
    indexed: int = 0  # leading pages that the index has, as its own or as equal ones
    canonical: Page | None = None  # the last of these
    orphaned: bool = False  # that one was evicted: the request offers no more pages
    stalled: bool = False
    in_flight: bool = False  # a step that is cut has it
    preemptions: int = 0
    hit_tokens: int = 0
    grammar: ByteAutomaton | None = None
    grammar_keys: list[GrammarKey] = field(default_factory=list)  # of its grammar and of its token rules
    grammar_state: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def missing(self) -> int:
        """Tokens to compute."""
        return len(self.tokens) - self.computed

    @property
    def has_no_part(self) -> int:
        """Requests.stalled."""
        return 2 if self.in_flight else int(self.stalled)

    def needs(self, page_size: int) -> int:
        """Pages for the tokens that it has, beyond those that it holds."""
        return -(-len(self.tokens) // page_size) - len(self.pages)

    def order(self) -> tuple[int, int]:
        """Lower is served first."""
        return self.rank, self.arrival


class Row(NamedTuple):
    """The next tokens of a request in a step, a number of them. emits: a token follows from the last one."""

    request: Request
    tokens: int
    emits: bool


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
