"""Requests that wait for a slot, in an order that is fair between tenants: pure, and without a clock.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant has a
counter of its served tokens, divided by its weight. The tenant with the least counter is next, with its first request.
A tenant that begins to wait starts at the lowest counter of the waiting tenants, so that no tenant saves up service.

The counters of two tenants that always wait differ by at most (P + O) / w: P tokens of one prompt, O tokens of
the concurrent outputs, w the smaller weight. This holds within a class: latency-sensitive requests precede best
effort, except that one best-effort request follows MOST_AHEAD consecutive ones.
"""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from blinkpy.dpu.admission.tenant import Tenant
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import Generation

MOST_AHEAD = 7
MOST_PASSED = 256  # requests at the head of a tenant's queue that are considered


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request in the queue, and later in slots; each choice takes one slot.

    prompt_tokens: tokens of all its prompts. tokens: maximum number, including the outputs of all choices.
    """

    tenant: Tenant
    prompt_tokens: int
    tokens: int
    slots: int
    priority: int = 0
    number: int = 0  # in the order of arrival
    since: float = 0.0  # arrival time, s
    waited: float = 0.0  # waiting time for the first slot, s
    turn: asyncio.Future[None] | None = None  # if it has to wait: set when it is admitted or refused
    refusal: ApiError | None = None
    inside: bool = False
    reserved: int = 0  # slots granted but not yet taken from the queue pair
    charged: float = 0  # tokens charged to its tenant for it
    granted: int = 0  # slots granted, of `slots`
    names: frozenset[int] = frozenset()  # names of its grammar and token rules, which take places of the engine
    more: Callable[[], None] | None = None  # called when it gets further slots, after the first
    refuse: Callable[[ApiError], None] | None = None  # called when it gets no further slots
    generations: list[Generation] = field(default_factory=list)
    best_effort: int = 0  # its class, as in RequestParameters

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key among the requests of its tenant."""
        return self.best_effort, self.priority if self.tenant.by_priority else 0, self.number


class FairQueue:
    def __init__(self) -> None:
        self._waiting: dict[str, list[Ticket]] = {}
        self._tokens: dict[str, int] = {}  # waiting tokens of each tenant
        self._served: dict[str, float] = {}  # the counters
        self._last = 0.0  # the counter of the last served tenant, when the queue became empty
        self._ahead = 0  # consecutive latency-sensitive requests admitted while a best-effort request waited
        self.tokens = self.requests = self.best_effort = 0  # of all waiting requests; number of best-effort requests
        self.best_effort_tokens = 0

    @property
    def tenants(self) -> int:
        """The number of tenants with waiting requests."""
        return len(self._waiting)

    def push(self, ticket: Ticket) -> None:
        """Append a request. Its number is greater than all earlier numbers."""
        name = ticket.tenant.name
        if name not in self._waiting:
            least = min((self._served[other] for other in self._waiting), default=self._last)
            self._served[name] = max(self._served.get(name, 0.0), least)
            self._waiting[name], self._tokens[name] = [], 0
        insort(self._waiting[name], ticket, key=lambda one: one.order)
        self._hold(ticket, 1)
        self.requests += 1
        self.best_effort += ticket.best_effort

    def remove(self, ticket: Ticket) -> None:
        """Remove a request that was served, or gave up."""
        name = ticket.tenant.name
        own = self._waiting[name]
        del own[bisect_left(own, ticket.order, key=lambda one: one.order)]
        if not ticket.granted:
            self._hold(ticket, -1)
        if not own:
            del self._waiting[name], self._tokens[name]
            if not self._waiting:
                self._last = self._served[name]
        self.requests -= 1
        self.best_effort -= ticket.best_effort

    def _hold(self, ticket: Ticket, sign: int) -> None:
        """Add the tokens of a request without a slot, or subtract them."""
        self.tokens += sign * ticket.tokens
        self._tokens[ticket.tenant.name] += sign * ticket.tokens
        self.best_effort_tokens += sign * ticket.best_effort * ticket.tokens

    def admit(self, ticket: Ticket) -> None:
        """Serve a request: it has all of its slots."""
        self.grant(ticket, ticket.slots - ticket.granted, ticket.number)

    def grant(self, ticket: Ticket, slots: int, number: int) -> None:
        """Serve a request that has got some more of its slots. It waits for the rest after the waiting requests of its tenant.

        number: its new place in the order of arrival.
        """
        if not ticket.granted:
            self._hold(ticket, -1)
        ticket.granted += slots
        if ticket.granted == ticket.slots:
            self.remove(ticket)
        else:
            own = self._waiting[ticket.tenant.name]
            del own[bisect_left(own, ticket.order, key=lambda one: one.order)]
            ticket.number = number
            insort(own, ticket, key=lambda one: one.order)
        self._ahead = 0 if ticket.best_effort or not self.best_effort else self._ahead + 1
        self.charge(ticket.tenant, ticket.prompt_tokens * slots / ticket.slots)

    def pass_through(self, ticket: Ticket) -> None:
        """`push` and `admit` for an empty queue."""
        name = ticket.tenant.name
        self._last = self._served[name] = max(self._served.get(name, 0.0), self._last)
        self._ahead = 0
        self.charge(ticket.tenant, ticket.prompt_tokens)

    def overflow(self, ticket: Ticket, most: int) -> list[Ticket]:
        """The requests to drop, so that at most `most` tokens wait. `ticket` is already in the queue.

        The last requests of the tenant with the most waiting tokens relative to its weight are dropped, or `ticket`
        itself if it is of that tenant. A single request may exceed `most`, and requests with some of their slots stay.
        """
        own, tokens, dropped = ticket.tenant.name, self.tokens, list[Ticket]()
        totals, last = dict(self._tokens), dict[str, Iterator[Ticket]]()  # of each tenant, its last requests first
        while tokens > most and tokens > ticket.tokens:
            largest = max(totals, key=lambda name: (totals[name] / self._waiting[name][0].tenant.weight, name == own))
            if largest == own:
                return [ticket]
            if largest not in last:
                last[largest] = (one for one in reversed(self._waiting[largest]) if not one.granted)
            dropped.append(next(last[largest]))
            totals[largest] -= dropped[-1].tokens
            tokens -= dropped[-1].tokens
        return dropped

    def first(self, may_run: Callable[[Ticket], bool], may_begin: Callable[[Tenant, int], bool]) -> Ticket | None:
        """The next request that may run: of each tenant, the first one of a class among its MOST_PASSED first
        requests.

        A request without a place for its grammar does not block requests without a grammar.

        may_run: whether a request may get a slot.
        may_begin: whether the limits of a tenant and a class leave a slot to a request without slots. If not, such
        requests are skipped without a call of may_run, so a tenant at its limits costs little.
        """
        for best_effort in (0, 1) if self._ahead < MOST_AHEAD else (1, 0):
            begins = {name: bisect_left(own, best_effort, key=lambda one: one.best_effort) for name, own in self._waiting.items()}
            lines = [self._waiting[name][begin : begin + MOST_PASSED] for name, begin in begins.items()]
            present = [line for line in lines if line and line[0].best_effort == best_effort]
            for line in sorted(present, key=lambda line: (self._served[line[0].tenant.name], line[0].number)):
                begins_any = may_begin(line[0].tenant, best_effort)
                for ticket in line:
                    if ticket.best_effort != best_effort:
                        break
                    if (begins_any or ticket.granted) and may_run(ticket):
                        return ticket
        return None

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Charge a tenant for service."""
        self._served[tenant.name] = self._served.get(tenant.name, 0.0) + tokens / tenant.weight

    def forget(self, known: Collection[str]) -> None:
        """Drop the counters of tenants that are neither known nor waiting."""
        for name in [name for name in self._served if name not in known and name not in self._waiting]:
            del self._served[name]
