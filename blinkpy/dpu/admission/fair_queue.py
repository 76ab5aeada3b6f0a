"""The fair queue of requests that wait for a slot: pure, and without a clock.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024): each tenant has a counter of its
served tokens, divided by its weight. The first request of the tenant with the least counter is next. A tenant that was idle
restarts at the lowest counter of the waiting tenants, so idle tenants collect no credit.

The counters of two tenants that always wait differ by at most (P + O) / w: P tokens of one prompt, O tokens of
the concurrent outputs, w the smaller weight. This holds within a class: latency-sensitive requests precede best effort, but one
best-effort request follows each MOST_AHEAD consecutive latency-sensitive requests.

Each operation costs the logarithm of the number of waiting tenants: heaps hold them by counter and by waiting tokens. A tenant
whose requests may not run is skipped until `recall`.
"""

import asyncio
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from blinkpy.dpu.admission.tenant import Tenant
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import Generation

MOST_AHEAD = 7
MOST_PASSED = 256  # requests at the head of a tenant's queue that are considered
MOST_INVALID = 64  # maximum stale entries of a heap, beyond its number of valid entries
CLASSES = (0, 1)  # latency-sensitive, best effort


@dataclass(slots=True, eq=False)
class Ticket:
    """One HTTP request in the queue, and later in slots; each choice takes one slot.

    prompt_tokens: tokens of all its prompts. tokens: prompt_tokens plus the maximum output tokens of all choices.
    """

    tenant: Tenant
    prompt_tokens: int
    tokens: int
    slots: int
    priority: int = 0
    number: int = 0  # arrival order
    since: float = 0.0  # arrival time, s
    waited: float = 0.0  # waiting time for the first slot, s
    turn: asyncio.Future[None] | None = None  # only if it must wait: resolved at admission or refusal
    refusal: ApiError | None = None
    inside: bool = False
    reserved: int = 0  # slots granted but not yet taken from the queue pair
    charged: float = 0  # tokens charged to its tenant so far
    granted: int = 0  # slots granted, of `slots`
    names: frozenset[int] = frozenset()  # of its grammar and token rules, which occupy storage in the engine
    more: Callable[[], None] | None = None  # called for each later grant of slots
    refuse: Callable[[ApiError], None] | None = None  # called if its missing slots are refused
    generations: list[Generation] = field(default_factory=list)
    best_effort: int = 0  # its class, as in RequestParameters

    @property
    def order(self) -> tuple[int, int, int]:
        """The sort key among the requests of its tenant."""
        return self.best_effort, self.priority if self.tenant.by_priority else 0, self.number


class _LeastFirst:
    """A priority queue of names, least key first.

    Keys are lazy: a grown key is corrected only when its name reaches the top. key: returns the key of a name.
    """

    def __init__(self, key: Callable[[str], Any]):
        self._key = key
        self._entries: list[tuple[Any, str]] = []  # a heap with an entry for each name; an entry is at most the name's key
        self._keys: dict[str, Any] = {}  # key in the valid entry of each name

    def note(self, name: str) -> None:
        """Add a name, or update it after its key may have decreased."""
        key = self._key(name)
        if name not in self._keys or key < self._keys[name]:
            self._keys[name] = key
            heappush(self._entries, (key, name))
            if len(self._entries) > 2 * len(self._keys) + MOST_INVALID:
                self._entries = [(key, name) for name, key in self._keys.items()]
                heapify(self._entries)

    def drop(self, name: str) -> None:
        """Remove a name, if present."""
        self._keys.pop(name, None)

    def first(self) -> str | None:
        """The name with the least key."""
        while self._entries:
            key, name = self._entries[0]
            if name not in self._keys or self._keys[name] != key:
                heappop(self._entries)
            elif (now := self._key(name)) == key:
                return name
            else:
                self._keys[name] = now
                heapreplace(self._entries, (now, name))
        return None


class FairQueue:
    def __init__(self) -> None:
        self._waiting: dict[str, list[Ticket]] = {}
        self._tokens: dict[str, int] = {}  # waiting tokens of each tenant
        self._served: dict[str, float] = {}  # the counters
        self._last = 0.0  # counter of the last served tenant when the queue became empty
        self._ahead = 0  # consecutive latency-sensitive requests admitted while a best-effort request waited
        self.tokens = self.requests = self.best_effort = 0  # totals over waiting requests; the last counts best-effort requests
        self.best_effort_tokens = 0
        # Heaps of waiting tenants: per class by counter, without skipped tenants; by counter; by waiting tokens, largest first.
        self._lines = tuple(_LeastFirst(partial(self._place_in, best_effort)) for best_effort in CLASSES)
        self._aside: tuple[set[str], ...] = tuple(set() for _ in CLASSES)
        self._least, self._largest = _LeastFirst(self._served.__getitem__), _LeastFirst(lambda name: -self._share(name))

    @property
    def tenants(self) -> int:
        """The number of tenants with waiting requests."""
        return len(self._waiting)

    def push(self, ticket: Ticket) -> None:
        """Append a request. Its number is greater than all earlier numbers."""
        name = ticket.tenant.name
        if name not in self._waiting:
            other = self._least.first()
            least = self._last if other is None else self._served[other]
            self._served[name] = max(self._served.get(name, 0.0), least)
            self._waiting[name], self._tokens[name] = [], 0
            self._least.note(name)
        insort(self._waiting[name], ticket, key=lambda one: one.order)
        self._hold(ticket, 1)
        self.requests += 1
        self.best_effort += ticket.best_effort
        self._place(ticket)

    def remove(self, ticket: Ticket) -> None:
        """Remove a request that was served or cancelled."""
        name = ticket.tenant.name
        own = self._waiting[name]
        del own[bisect_left(own, ticket.order, key=lambda one: one.order)]
        if not ticket.granted:
            self._hold(ticket, -1)
        if not own:
            del self._waiting[name], self._tokens[name]
            self._least.drop(name)
            self._largest.drop(name)
            if not self._waiting:
                self._last = self._served[name]
        self.requests -= 1
        self.best_effort -= ticket.best_effort
        self._place(ticket)

    def _place(self, ticket: Ticket) -> None:
        """Update the heaps after a change in a request's queue. A skipped tenant is considered again."""
        name, best_effort = ticket.tenant.name, ticket.best_effort
        self._aside[best_effort].discard(name)
        if name in self._waiting:
            self._largest.note(name)
        if self._head(name, best_effort) is None:
            self._lines[best_effort].drop(name)
        else:
            self._lines[best_effort].note(name)

    def _head(self, name: str, best_effort: int) -> Ticket | None:
        """The first request of a tenant in a class."""
        own = self._waiting.get(name, [])
        begin = bisect_left(own, best_effort, key=lambda one: one.best_effort)
        return own[begin] if begin < len(own) and own[begin].best_effort == best_effort else None

    def _place_in(self, best_effort: int, name: str) -> tuple[float, int]:
        """The sort key of a tenant with requests in a class."""
        head = self._head(name, best_effort)
        assert head is not None
        return self._served[name], head.number

    def _share(self, name: str) -> float:
        """The waiting tokens of a tenant relative to its weight."""
        return self._tokens[name] / self._waiting[name][0].tenant.weight

    def _hold(self, ticket: Ticket, sign: int) -> None:
        """Add (sign 1) or subtract (sign -1) the waiting tokens of a request."""
        self.tokens += sign * ticket.tokens
        self._tokens[ticket.tenant.name] += sign * ticket.tokens
        self.best_effort_tokens += sign * ticket.best_effort * ticket.tokens

    def admit(self, ticket: Ticket) -> None:
        """Serve a request that now has all its slots."""
        self.grant(ticket, ticket.slots - ticket.granted, ticket.number)

    def grant(self, ticket: Ticket, slots: int, number: int) -> None:
        """Serve a request that received some of its slots. It waits for its other slots behind the tenant's waiting requests.

        number: its new arrival number.
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
            self._place(ticket)
        self._ahead = 0 if ticket.best_effort or not self.best_effort else self._ahead + 1
        self.charge(ticket.tenant, ticket.prompt_tokens * slots / ticket.slots)

    def pass_through(self, ticket: Ticket) -> None:
        """`push` and `admit` for an empty queue."""
        name = ticket.tenant.name
        self._last = self._served[name] = max(self._served.get(name, 0.0), self._last)
        self._ahead = 0
        self.charge(ticket.tenant, ticket.prompt_tokens)

    def overflow(self, ticket: Ticket, most: int) -> list[Ticket]:
        """The requests to drop so that at most `most` tokens wait. `ticket` is already in the queue.

        They are the newest requests of the tenant with the most waiting tokens per weight; `ticket` itself if it belongs to that
        tenant. A single request may exceed `most`, and requests that already have slots stay.
        """
        own, tokens, dropped = ticket.tenant.name, self.tokens, list[Ticket]()
        lost = list[tuple[float, str]]()  # heap of tenants that lose requests, largest remaining share first
        totals = dict[str, int]()  # remaining tokens of these tenants
        last = dict[str, Iterator[Ticket]]()  # requests of these tenants, newest first
        try:
            while tokens > most and tokens > ticket.tokens:
                name = self._largest.first()
                if lost and (name is None or -lost[0][0] > self._share(name)):
                    share, name = heappop(lost)
                    share = -share
                else:
                    assert name is not None
                    share = self._share(name)
                if self._share(own) >= share:
                    return [ticket]
                if name not in last:
                    self._largest.drop(name)
                    totals[name] = self._tokens[name]
                    last[name] = (one for one in reversed(self._waiting[name]) if not one.granted)
                dropped.append(next(last[name]))
                totals[name] -= dropped[-1].tokens
                tokens -= dropped[-1].tokens
                heappush(lost, (-totals[name] / self._waiting[name][0].tenant.weight, name))
        finally:
            for name in last:
                self._largest.note(name)
        return dropped

    def first(
        self,
        may_run: Callable[[Ticket], bool],
        may_begin: Callable[[Tenant, int], bool],
        closed: Collection[int] = (),
    ) -> Ticket | None:
        """The next request that may run. It searches the first MOST_PASSED requests of each tenant and class.

        A request that waits for grammar storage does not block requests without a grammar. If no request of a tenant may run, the
        tenant is skipped until `recall`, unless one of the requests already has slots.

        may_run: whether a request may get a slot.
        may_begin: whether the limits of a tenant and a class permit a first slot. If not, requests without slots are skipped
        without a call of may_run, so a tenant at its limits costs little.
        closed: classes whose requests may not run now.
        """
        for best_effort in CLASSES if self._ahead < MOST_AHEAD else CLASSES[::-1]:
            line, passed, found = self._lines[best_effort], list[str](), None
            while best_effort not in closed and found is None and (name := line.first()) is not None:
                found, begun = self._first_of(name, best_effort, may_run, may_begin)
                if found is None:
                    line.drop(name)
                    passed.append(name) if begun else self._aside[best_effort].add(name)
            for name in passed:
                line.note(name)
            if found is not None:
                return found
        return None

    def _first_of(
        self, name: str, best_effort: int, may_run: Callable[[Ticket], bool], may_begin: Callable[[Tenant, int], bool]
    ) -> tuple[Ticket | None, bool]:
        """The first request of a tenant that may run, and whether a skipped request has slots."""
        own, begun, begins_any = self._waiting[name], False, None
        begin = bisect_left(own, best_effort, key=lambda one: one.best_effort)
        for ticket in own[begin : begin + MOST_PASSED]:
            if ticket.best_effort != best_effort:
                break
            if begins_any is None:
                begins_any = may_begin(ticket.tenant, best_effort)
            if (begins_any or ticket.granted) and may_run(ticket):
                return ticket, begun
            begun = begun or ticket.granted > 0
        return None, begun

    def recall(self, name: str | None = None) -> None:
        """Consider a skipped tenant again, or all of them, because a limit that blocked them may have changed."""
        for line, aside in zip(self._lines, self._aside, strict=True):
            for one in tuple(aside) if name is None else aside & {name}:
                aside.discard(one)
                line.note(one)

    def charge(self, tenant: Tenant, tokens: float) -> None:
        """Charge a tenant for service."""
        self._served[tenant.name] = self._served.get(tenant.name, 0.0) + tokens / tenant.weight

    def forget(self, known: Collection[str]) -> None:
        """Drop the counters of tenants that are neither known nor waiting."""
        for name in [name for name in self._served if name not in known and name not in self._waiting]:
            del self._served[name]
