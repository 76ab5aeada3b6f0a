"""Requests that wait for a slot, in an order that is fair between tenants: pure, and without a clock.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant
has a counter of the tokens that it was served, divided by its weight, and the first request of the one with
the least counter is next. Who begins to wait starts at the least of those who wait, so that nobody saves
service up. Of two tenants who wait all the time, the counters differ by at most (P + O) / w: P tokens of
one prompt, O of the outputs that run at a time, w the lesser weight. So it is within a class:
latency-sensitive requests go first, except one best-effort request behind MOST_AHEAD of them consecutively.
"""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from blinkpy.dpu.admission.tenant import Tenant
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import Generation

MOST_AHEAD = 7
MOST_PASSED = 256  # requests of a tenant that are looked at for one that may run


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request's place in the queue, and then in slots; each choice takes one. prompt_tokens: of all its prompts; tokens:
    the most that it takes, with the outputs of all choices."""

    tenant: Tenant
    prompt_tokens: int
    tokens: int
    slots: int
    priority: int = 0
    number: int = 0  # in the order of arrival
    since: float = 0.0  # when it came, s
    waited: float = 0.0  # for its slots, s
    turn: asyncio.Future[None] | None = None  # tells it, where it has to wait, that it is inside, or refused
    refusal: ApiError | None = None
    inside: bool = False
    reserved: int = 0  # slots that it may take from the queue pair, and has not yet
    charged: float = 0  # tokens that its tenant was charged with for it
    granted: int = 0  # slots, of `slots`
    names: frozenset[int] = frozenset()  # of its grammar and token rules, which take places of the engine
    more: Callable[[], None] | None = None  # called when it has further slots, after the first
    refuse: Callable[[ApiError], None] | None = None  # called when it gets no further ones
    generations: list[Generation] = field(default_factory=list)
    best_effort: int = 0  # its class, as in RequestParameters

    @property
    def order(self) -> tuple[int, int, int]:
        """Among those of its tenant."""
        return self.best_effort, self.priority if self.tenant.by_priority else 0, self.number


class FairQueue:
    def __init__(self) -> None:
        self._waiting: dict[str, list[Ticket]] = {}
        self._held: dict[str, int] = {}  # tokens of those that wait, of each tenant
        self._served: dict[str, float] = {}  # the counters
        self._last = 0.0  # of the tenant who left last, when nobody waited any more
        self._ahead = 0  # latency-sensitive requests that were let in, consecutively, while a best-effort one waited
        self.tokens = self.requests = self.best_effort = 0  # of all that wait; requests of best effort
        self.best_effort_tokens = 0

    @property
    def tenants(self) -> int:
        """How many have requests that wait."""
        return len(self._waiting)

    def push(self, ticket: Ticket) -> None:
        """It waits from now on. Its number is greater than all earlier ones."""
        name = ticket.tenant.name
        if name not in self._waiting:
            least = min((self._served[other] for other in self._waiting), default=self._last)
            self._served[name] = max(self._served.get(name, 0.0), least)
            self._waiting[name], self._held[name] = [], 0
        insort(self._waiting[name], ticket, key=lambda one: one.order)
        self._hold(ticket, 1)
        self.requests += 1
        self.best_effort += ticket.best_effort

    def remove(self, ticket: Ticket) -> None:
        """It waits no more: it was served, or gave up."""
        name = ticket.tenant.name
        own = self._waiting[name]
        own.remove(ticket)
        if not ticket.granted:
            self._hold(ticket, -1)
        if not own:
            del self._waiting[name], self._held[name]
            if not self._waiting:
                self._last = self._served[name]
        self.requests -= 1
        self.best_effort -= ticket.best_effort

    def _hold(self, ticket: Ticket, sign: int) -> None:
        """Count the tokens of a request that has no slot yet."""
        self.tokens += sign * ticket.tokens
        self._held[ticket.tenant.name] += sign * ticket.tokens
        self.best_effort_tokens += sign * ticket.best_effort * ticket.tokens

    def let_in(self, ticket: Ticket) -> None:
        """It was its turn, and it has all of its slots."""
        self.grant(ticket, ticket.slots - ticket.granted, ticket.number)

    def grant(self, ticket: Ticket, slots: int, number: int) -> None:
        """It was its turn, and it has more of its slots. It waits for the others behind those of its tenant that wait now.
        number: its next one in the order of arrival."""
        if not ticket.granted:
            self._hold(ticket, -1)
        ticket.granted += slots
        if ticket.granted == ticket.slots:
            self.remove(ticket)
        else:
            own = self._waiting[ticket.tenant.name]
            own.remove(ticket)
            ticket.number = number
            insort(own, ticket, key=lambda one: one.order)
        self._ahead = 0 if ticket.best_effort or not self.best_effort else self._ahead + 1
        self.charge(ticket.tenant, ticket.prompt_tokens * slots / ticket.slots)

    def pass_through(self, ticket: Ticket) -> None:
        """`push` and `let_in`, where nobody waits."""
        name = ticket.tenant.name
        self._last = self._served[name] = max(self._served.get(name, 0.0), self._last)
        self._ahead = 0
        self.charge(ticket.tenant, ticket.prompt_tokens)

    def overflow(self, ticket: Ticket, most: int) -> list[Ticket]:
        """Requests that give up their places, so that no more than `most` tokens wait. `ticket` waits already. The last ones of
        the tenant with the most waiting tokens, by its weight, are dropped, or `ticket` itself if that is its tenant. A single
        one may be larger, and requests that have some of their slots stay."""
        own, tokens, dropped = ticket.tenant.name, self.tokens, list[Ticket]()
        held, left = dict(self._held), dict[str, list[Ticket]]()
        while tokens > most and tokens > ticket.tokens:
            largest = max(held, key=lambda name: (held[name] / self._waiting[name][0].tenant.weight, name == own))
            if largest == own:
                return [ticket]
            if largest not in left:
                left[largest] = [one for one in self._waiting[largest] if not one.granted]
            last = left[largest].pop()
            held[largest] -= last.tokens
            tokens -= last.tokens
            dropped.append(last)
        return dropped

    def first(self, may_run: Callable[[Ticket], bool]) -> Ticket | None:
        """Whose turn it is: of each tenant the first request of a class that may run, of the MOST_PASSED first ones. What one
        lacks, such as a place for its grammar, holds back no other that does not need it."""
        for best_effort in (0, 1) if self._ahead < MOST_AHEAD else (1, 0):
            begins = {name: bisect_left(own, best_effort, key=lambda one: one.best_effort) for name, own in self._waiting.items()}
            lines = [self._waiting[name][begin : begin + MOST_PASSED] for name, begin in begins.items()]
            present = [line for line in lines if line and line[0].best_effort == best_effort]
            for line in sorted(present, key=lambda line: (self._served[line[0].tenant.name], line[0].number)):
                for ticket in line:
                    if ticket.best_effort != best_effort:
                        break
                    if may_run(ticket):
                        return ticket
        return None

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """A tenant was served."""
        self._served[tenant.name] = self._served.get(tenant.name, 0.0) + tokens / tenant.weight

    def forget(self, known: Collection[str]) -> None:
        """Drop the counters of tenants who are not known any more, and don't wait."""
        for name in [name for name in self._served if name not in known and name not in self._waiting]:
            del self._served[name]
