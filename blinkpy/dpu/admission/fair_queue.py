"""Requests that wait for a slot, in an order that is fair between tenants: pure, and without a clock.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant has a counter of the
tokens that it was served, divided by its weight, and the first request of the one with the least counter is next. Who begins to
wait starts at the least of those who wait, so that nobody saves service up. Of two tenants who wait all the time, the counters
differ by at most (P + O) / w: P tokens of one prompt, O of the outputs that run at a time, w the lesser weight.
So it is within a class: latency-sensitive requests go first, but for one best-effort request behind MOST_AHEAD of them in a row.
"""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from blinkpy.dpu.admission.tenant import Tenant
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import Generation

MOST_AHEAD = 7


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
    charged: int = 0  # tokens that its tenant was charged with for it
    generations: list[Generation] = field(default_factory=list)
    best_effort: int = 0  # its class, as in RequestParameters

    @property
    def order(self) -> tuple[int, int, int]:
        """Among those of its tenant."""
        return self.best_effort, self.priority if self.tenant.by_priority else 0, self.number


class FairQueue:
    """See the module."""

    def __init__(self) -> None:
        self._waiting: dict[str, list[Ticket]] = {}
        self._held: dict[str, int] = {}  # tokens of those that wait, of each tenant
        self._served: dict[str, float] = {}  # the counters
        self._last = 0.0  # of the tenant who left last, when nobody waited any more
        self._ahead = 0  # latency-sensitive requests that were let in, in a row, while a best-effort one waited
        self.tokens = self.requests = self.best_effort = 0  # of all that wait; requests of best effort
        self.best_effort_tokens = 0

    @property
    def tenants(self) -> int:
        """How many have requests that wait."""
        return len(self._waiting)

    def push(self, ticket: Ticket) -> None:
        """It waits from now on. Its number is greater than that of each before."""
        name = ticket.tenant.name
        if name not in self._waiting:
            least = min((self._served[other] for other in self._waiting), default=self._last)
            self._served[name] = max(self._served.get(name, 0.0), least)
            self._waiting[name], self._held[name] = [], 0
        insort(self._waiting[name], ticket, key=lambda one: one.order)
        self.tokens += ticket.tokens
        self._held[name] += ticket.tokens
        self.requests += 1
        self.best_effort += ticket.best_effort
        self.best_effort_tokens += ticket.best_effort * ticket.tokens

    def remove(self, ticket: Ticket) -> None:
        """It waits no more: it was served, or gave up."""
        name = ticket.tenant.name
        own = self._waiting[name]
        own.remove(ticket)
        self._held[name] -= ticket.tokens
        if not own:
            del self._waiting[name], self._held[name]
            if not self._waiting:
                self._last = self._served[name]
        self.tokens -= ticket.tokens
        self.requests -= 1
        self.best_effort -= ticket.best_effort
        self.best_effort_tokens -= ticket.best_effort * ticket.tokens

    def let_in(self, ticket: Ticket) -> None:
        """It was its turn."""
        self.remove(ticket)
        self._ahead = 0 if ticket.best_effort or not self.best_effort else self._ahead + 1
        self.charge(ticket.tenant, ticket.prompt_tokens)

    def pass_through(self, ticket: Ticket) -> None:
        """`push` and `let_in`, where nobody waits."""
        name = ticket.tenant.name
        self._last = self._served[name] = max(self._served.get(name, 0.0), self._last)
        self._ahead = 0
        self.charge(ticket.tenant, ticket.prompt_tokens)

    def overflow(self, ticket: Ticket, most: int) -> list[Ticket]:
        """Who gives up its place, so that no more than `most` tokens wait, this one, which waits already, among them: the last
        ones of the tenant who waits for the most, by its weight; this one itself where that is its own. One alone may be more."""
        own, tokens, dropped = ticket.tenant.name, self.tokens, list[Ticket]()
        held, left = dict(self._held), dict[str, int]()
        while tokens > most and tokens > ticket.tokens:
            largest = max(held, key=lambda name: (held[name] / self._waiting[name][0].tenant.weight, name == own))
            if largest == own:
                return [ticket]
            left[largest] = left.get(largest, len(self._waiting[largest])) - 1
            last = self._waiting[largest][left[largest]]
            held[largest] -= last.tokens
            tokens -= last.tokens
            dropped.append(last)
        return dropped

    def first(self, may_run: Callable[[Ticket], bool]) -> Ticket | None:
        """Whose turn it is, among the tenants whose first request of a class may run by its limits. Without enough slots for it
        nobody else has a turn, so that requests of many choices are served too."""
        for best_effort in (0, 1) if self._ahead < MOST_AHEAD else (1, 0):
            places = [(own, bisect_left(own, best_effort, key=lambda one: one.best_effort)) for own in self._waiting.values()]
            heads = [own[i] for own, i in places if i < len(own) and own[i].best_effort == best_effort]
            order = sorted(heads, key=lambda ticket: (self._served[ticket.tenant.name], ticket.number))
            found = next((ticket for ticket in order if may_run(ticket)), None)
            if found is not None:
                return found
        return None

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """A tenant was served."""
        self._served[tenant.name] = self._served.get(tenant.name, 0.0) + tokens / tenant.weight

    def forget(self, known: Collection[str]) -> None:
        """Drop the counters of tenants who are not known any more, and don't wait."""
        for name in [name for name in self._served if name not in known and name not in self._waiting]:
            del self._served[name]
