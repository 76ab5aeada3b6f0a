"""A fair queue over owners: pure, and without a clock.

It is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), with the virtual time of weighted fair queueing (Demers,
Keshav and Shenker, SIGCOMM 1989).

Each owner has a virtual time: the sum of its charges divided by its weight. `pop` takes the oldest item of the owner with the
least virtual time. An owner that was idle restarts at the virtual time of the queue, so idle owners collect no credit. Each
charge, divided by the total weight of the waiting owners, advances the queue's time. So any number of new owners delays an
earlier owner by at most one round. The charges of two owners of equal weight that always have items differ by at most two items.
Push and pop cost the logarithm of the number of owners.
"""

from collections import deque
from dataclasses import dataclass, field
from heapq import heappop, heappush, heapreplace
from typing import Generic, TypeVar

MOST_IDLE = 1024  # number of owners at which those without items and debts are first dropped

Item = TypeVar("Item")


@dataclass(slots=True, eq=False)
class _Owner(Generic[Item]):
    weight: float
    finish: float = 0.0  # virtual time
    size: float = 0.0  # total size of its items, in the unit of push()
    queued: bool = False  # whether it has an entry in the heap
    newest_next: bool = True  # with both_ends: whether the next pop takes the newest item
    items: deque[tuple[Item, float]] = field(default_factory=deque)


class FairLine(Generic[Item]):
    """Items of owners, by name.

    both_ends: pop an owner's newest and oldest items alternately, instead of always the oldest. So a new item need not wait for a
    long queue, and any number of newer items at most doubles an item's wait.
    """

    def __init__(self, both_ends: bool = False) -> None:
        self._both_ends = both_ends
        self._owners: dict[str, _Owner[Item]] = {}
        self._heap: list[tuple[float, int, _Owner[Item], str]] = []  # one entry per queued owner; key: at most its finish
        self._most = MOST_IDLE  # number of owners that starts the next search for idle ones; it doubles, so searches are rare
        self._now = self._latest = 0.0  # virtual time of the queue, and the greatest virtual time of an owner
        self._pushed = self.count = 0
        self.size = self._weights = 0.0  # total size of items; total weight of owners in the heap

    def push(self, name: str, weight: float, item: Item, size: float = 0.0) -> None:
        """Append an item of an owner. size: in any unit, for `largest`."""
        if not self.count:
            self._now = max(self._now, self._latest)  # an empty queue leaves no owner behind
        owner = self._owners.get(name)
        if owner is None:
            if len(self._owners) >= self._most:
                self._forget()
                self._most = max(MOST_IDLE, 2 * len(self._owners))
            owner = self._owners[name] = _Owner(weight)
        self._weights += weight - owner.weight if owner.queued else 0.0
        owner.weight = weight
        if not owner.items:
            owner.finish = max(owner.finish, self._now)
        if not owner.queued:
            owner.queued = True
            self._weights += weight
            self._pushed += 1
            heappush(self._heap, (owner.finish, self._pushed, owner, name))
        owner.items.append((item, size))
        owner.size += size
        self.size += size
        self.count += 1

    def pop(self, without: "set[str] | None" = None) -> tuple[str, Item] | None:
        """Take the next item, with its owner's name; None if there is no such item. without: owners to skip."""
        passed: list[tuple[float, int, _Owner[Item], str]] = []
        found = None
        while self._heap:
            start, number, owner, name = self._heap[0]
            if not owner.items:
                self._leave(owner)
            elif without and name in without:
                passed.append(heappop(self._heap))
            elif owner.finish > start:  # charged since
                heapreplace(self._heap, (owner.finish, number, owner, name))
            else:
                newest = self._both_ends and owner.newest_next
                item, size = owner.items.pop() if newest else owner.items.popleft()
                owner.newest_next = not owner.newest_next
                self._took(owner, size)
                self._now = max(self._now, start)
                if not owner.items:
                    self._leave(owner)
                found = name, item
                break
        for entry in passed:
            heappush(self._heap, entry)
        return found

    def remove(self, name: str, item: Item) -> bool:
        """Remove a cancelled item. Returns False if it is not in the queue."""
        owner = self._owners.get(name)
        for place, (there, size) in enumerate(owner.items if owner is not None else ()):
            if there is item and owner is not None:
                del owner.items[place]
                self._took(owner, size)
                return True
        return False

    def charge(self, name: str, cost: float) -> None:
        """Charge an owner for service. cost: in any unit, the same for all owners; negative: refunds an earlier
        charge."""
        owner = self._owners.get(name)
        if owner is None:
            owner = self._owners[name] = _Owner(1.0, self._now)
        owner.finish += cost / owner.weight
        self._now += cost / max(self._weights + (0.0 if owner.queued else owner.weight), owner.weight)
        self._latest = max(self._latest, owner.finish)

    @property
    def owners(self) -> int:
        """The number of owners that have items, or that are not yet dropped."""
        return len(self._heap)

    def head(self, name: str) -> Item | None:
        """The oldest item of an owner."""
        owner = self._owners.get(name)
        return owner.items[0][0] if owner is not None and owner.items else None

    def largest(self) -> str:
        """The owner whose items have the greatest total size relative to its weight. The queue must have items."""
        return max((owner.size / owner.weight, name) for _, _, owner, name in self._heap if owner.items)[1]

    def last(self, name: str) -> Item:
        """The newest item of an owner that has items."""
        return self._owners[name].items[-1][0]

    def _leave(self, owner: _Owner[Item]) -> None:
        """Remove the first owner from the heap."""
        heappop(self._heap)
        owner.queued = False
        self._weights -= owner.weight

    def _took(self, owner: _Owner[Item], size: float) -> None:
        owner.size -= size
        self.size -= size
        self.count -= 1

    def _forget(self) -> None:
        idle = [name for name, owner in self._owners.items() if not owner.queued and owner.finish <= self._now]
        for name in idle:
            del self._owners[name]
