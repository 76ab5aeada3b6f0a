"""The engine's state as plain Python objects, for the oracle."""

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

Place = tuple["Page | None", int, tuple[int, ...]]  # previous page, salt, tokens of the page


@dataclass(slots=True, eq=False)
class Page:
    """A page of the pool, from its allocation until it is free again.

    number: its number in the pool; -1 until the page appears in a page table, because any free page is a correct choice.
    place: its key in the index; None if it is not indexed.
    """

    holders: int = 1
    number: int = -1
    place: Place | None = None
    alive: bool = True


@dataclass(slots=True, eq=False)
class Snapshot:
    """A slot for a snapshot of a recurrent state.

    page: the page at whose end the state was copied.
    used: turn of its last use.
    """

    page: Page | None = None
    used: int = 0
    pins: int = 0  # pending copies


class PagePool:
    """Counts free pages, and stores cached and indexed pages. A page is free, held by requests, or cached
    (indexed, without a holder).
    """

    def __init__(self, pages: int) -> None:
        self.free = pages
        self.cached: dict[Page, None] = {}  # in eviction order
        self.index: dict[Place, Page] = {}
        self.named: dict[int, Page] = {}
        self.evictions = 0

    @property
    def available(self) -> int:
        return self.free + len(self.cached)

    def evict(self, wanted: int) -> None:
        """R14: evict cached pages, least recently released first, until `wanted` pages are free."""
        while self.free < wanted:
            page = next(iter(self.cached))
            del self.cached[page]
            self._drop(page)
            self.evictions += 1

    def take(self) -> Page:
        """Allocate a free page for one request."""
        self.free -= 1
        return Page()

    def share(self, page: Page) -> None:
        """Add a holder to an indexed page (a hit)."""
        self.cached.pop(page, None)
        page.holders += 1

    def release(self, pages: Sequence[Page]) -> None:
        """R14: release a request's pages, the last page first. Pages without another holder become cached if
        they are indexed, otherwise free.
        """
        for page in reversed(pages):
            page.holders -= 1
            if page.holders == 0 and page.place:
                self.cached[page] = None
            elif page.holders == 0:
                self._drop(page)

    def offer(self, page: Page, place: Place) -> None:
        """Add a full page to the index."""
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
    """A queue pair. Its positions count entries since the segment was created."""

    epoch: int = 0
    attached: bool = False
    heartbeat: int = 0
    heartbeat_ns: int = 0
    granted_ns: int = 0
    sq_head: int = 0
    sq_tail: int = 0
    cq_head: int = 0
    cq_tail: int = 0
    unclaimed: int = 0  # free entries of the completion ring that no running request has reserved
    # Key: epoch, digest, whether it is token rules. Least recently used first.
    grammars: dict[GrammarKey, ByteAutomaton | TokenRules] = field(default_factory=dict)


class Verdict(NamedTuple):
    """The change to a queue pair in this turn."""

    revoke: bool = False
    grant: bool = False


@dataclass(slots=True, eq=False)
class Account:
    """The service of a tenant in one class."""

    tenant: int
    best_effort: int
    service: int = 0
    expected: int = 256  # expected tokens of the tenant's next output


@dataclass(slots=True, eq=False)
class Request:
    """A request in the engine. finish: FINISH_* after its end, else FINISH_NONE. reason: REJECT_*, or 0."""

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
    place: int = 0  # index of its tenant's account
    salt: int = 0
    logprobs: bool = False
    cacheable: bool = False  # whether it may hit indexed pages and add pages to the index
    hashed: int = 0  # pages whose hash is known
    arrival: int = 0
    arrival_us: int = 0
    first_token_ns: int = 0  # set only if steps are paced
    rank: int = 0
    computed: int = 0
    pages: list[Page] = field(default_factory=list)
    indexed: int = 0  # number of leading pages in the index (its pages, or equal pages)
    canonical: Page | None = None  # the last indexed page
    orphaned: bool = False  # whether `canonical` was evicted; then the request indexes no more pages
    stalled: bool = False
    in_flight: bool = False  # whether it has a row in a cut step
    preemptions: int = 0
    hit_tokens: int = 0
    grammar: ByteAutomaton | None = None
    grammar_keys: list[GrammarKey] = field(default_factory=list)  # keys of its grammar and of its token rules
    grammar_state: int = 0  # position in it
    ruled: bool = False  # whether it has token rules
    most_drafts: int = 0  # maximum drafts in the next step
    rests_until: int = 0  # it has no drafts while its length is below this
    returned: list[int] = field(default_factory=list)  # drafts from the step that this turn commits
    predicted: list[int] = field(default_factory=list)  # its prediction
    follows: bool = False  # whether its last drafts came from the prediction
    source: Snapshot | None = None  # snapshot from which its first step starts
    target: Snapshot | None = None  # snapshot that the planned step writes
    branch: int = 0  # end of the pages that it found but could not use

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def num_pages(self) -> int:
        return len(self.pages)

    @property
    def missing(self) -> int:
        """The number of tokens to compute."""
        return len(self.tokens) - self.computed

    @property
    def has_no_part(self) -> int:
        """The expected value of Requests.stalled."""
        return 2 if self.in_flight else int(self.stalled)

    def needs(self, page_size: int) -> int:
        """The number of pages to add for the request's tokens."""
        return -(-len(self.tokens) // page_size) - len(self.pages)

    def unpin(self) -> None:
        """R27: unpin the snapshot from which the request started, or would have started."""
        if self.source is not None:
            self.source.pins -= 1
        self.source = None

    def order(self) -> tuple[int, int]:
        """The sort key: lower is served first."""
        return self.rank, self.arrival


class Row(NamedTuple):
    """A row of a step: a request's next `tokens` tokens. emits: whether the last of them yields a sampled token.

    ahead: a draft's number after the request's row, from 1; draft: its token.
    """

    request: Request
    tokens: int
    emits: bool
    ahead: int = 0
    draft: int = -1


class OracleState:
    """Requests, queue pairs, pages and counters of one engine.

    queues: views of the segment.
    sampled: State.batch.sampled.
    drafted: State.batch.drafted.
    sources: State.drafts.source: the earlier place of each slot's last tokens, because any such place is a correct choice.
    buckets: (tokens, rows) of each bucket.
    pieces: the bytes of each token, or [] without grammars.
    """

    def __init__(
        self,
        limits: Limits,
        policy: Policy,
        queues: EngineViews,
        sampled: Any,
        drafted: Any,
        sources: Any,
        buckets: list[tuple[int, int]],
        pieces: list[bytes],
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.queues = queues
        self.sampled = sampled
        self.drafted = drafted
        self.sources = sources
        self.buckets = buckets
        self.pieces = pieces
        self.pairs = [Pair() for _ in range(limits.pairs)]
        self.pool = PagePool(limits.pages)
        self.snapshots = [Snapshot() for _ in range(limits.snapshots)]
        self.live: dict[int, Request] = {}  # by slot
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # by (rank, arrival)
        self.unranked: list[Request] = []
        self.finishing: list[Request] = []
        self.rows: list[Row] = []
        self.suspended: list[Row] = []
        self.group, self.groups = 0, 1  # next group, and number of groups, of the step `rows`
        self.suspended_group, self.interruptions = 0, 0
        self.bucket = S.NO_BATCH
        self.completions: list[tuple[int, int]] = []  # (queue pair, word) of the last turn
        self.hit_words = [0] * limits.slots  # by slot
        self.counters = dict.fromkeys(W.COUNTER_NAMES, 0)
        self.policy_fault: tuple[Any, str] | None = None  # source position and text of the last fault
        self.arrivals = self.rotation = self.turns = self.steps = self.now_ns = self.yielded = self.passed = 0
        self.step_ns = self.tokens_ns = self.delayed_since = 0
        self.accounts: list[Account | None] = [None] * limits.slots
        self.clock = 0

    def free_entries(self, pair: Pair) -> int:
        """The number of free entries in the pair's completion ring, without those reserved by requests in
        flight (R23).
        """
        kept = sum(row.emits and self.pairs[row.request.pair] is pair for row in self.suspended)
        return self.limits.cq_entries - (pair.cq_tail - pair.cq_head) - kept

    def movable(self) -> list[Request]:
        """R23: running requests that are not in flight."""
        return [r for r in self.running if not r.in_flight]

    def active(self) -> list[Request]:
        """Movable requests that may have a row in the next step."""
        return [r for r in self.movable() if not r.stalled]

    def prompts(self) -> list[Request]:
        return [r for r in self.active() if r.missing > 1]

    def drop(self, request: Request) -> None:
        """Remove every trace of a request from the engine."""
        del self.live[request.slot]
        self.remove(request)

    def remove(self, request: Request) -> None:
        """Release a request's pages and remove it from all lists."""
        self.pool.release(request.pages)
        request.pages, request.stalled = [], False
        request.unpin()
        for requests in self.running, self.waiting, self.finishing:
            if request in requests:
                requests.remove(request)

    def publish(self, request: Request, value: int, flags: int) -> None:
        pair = self.pairs[request.pair]
        lap = C.lap_of(pair.cq_tail, self.limits.cq_entries)
        self.completions.append((request.pair, C.pack_completion(request.slot % self.limits.slots_per_pair, value, flags, lap)))
        pair.cq_tail += 1

    def accounts_by_place(self) -> list[tuple[int, int, int, int]]:
        """(tenant, class, service, expected output) of each account; (-1, 1, -1, 0) for an unused account."""
        return [(-1, 1, -1, 0) if a is None else (a.tenant, a.best_effort, a.service, a.expected) for a in self.accounts]

    def ends_next(self, request: Request) -> bool:
        """Whether the next token ends the request, whatever it is."""
        length = len(request.tokens) + 1
        return length - request.prompt_length >= request.max_tokens or length >= self.limits.max_model_len

    def give_page_to_each(self, requests: list[Request]) -> None:
        self.pool.evict(len(requests))
        for request in requests:
            request.pages.append(self.pool.take())
