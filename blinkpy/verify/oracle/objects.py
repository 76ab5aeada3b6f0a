"""What the rules speak of: queue pairs, requests, rows of a step."""

from dataclasses import dataclass, field
from typing import NamedTuple

from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.completion import FINISH_NONE
from blinkpy.queues.token_rules import TokenRules
from blinkpy.verify.oracle.page_pool import Page

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
