"""Shared limits for the bytes that connections hold."""

from collections.abc import Callable
from typing import NamedTuple

from blinkpy.dpu.api_errors import ApiError

GiveUp = Callable[[ApiError], None]


class _Holding(NamedTuple):
    size: int
    give_up: GiveUp
    owner: str


class ByteBudget:
    """A limit on the bytes of all holders. Above it, a holder of the owner with the most bytes must release its bytes."""

    def __init__(
        self,
        limit: int,
        error: Callable[[], ApiError],  # a new error each time: raising one object repeatedly would keep all frames alive
        largest: bool = False,  # the owner's largest holder releases its bytes; otherwise the oldest
    ):
        self.limit, self.error, self._largest = limit, error, largest
        self.used = 0  # bytes
        self.given_up = 0  # number of holders that had to release their bytes, because of the limit
        self._holdings: dict[object, _Holding] = {}  # the oldest first
        self._owners: dict[str, list[int]] = {}  # bytes and holders of each

    def hold(self, holder: object, size: int, give_up: GiveUp, owner: str = "") -> None:
        """Set the holder's number of bytes. give_up: called when the holder must release them, possibly within this call."""
        before = self._holdings.get(holder)
        if before is not None:
            self._count(before.owner, -before.size, -1)
        self._count(owner, size, 1)
        self._holdings[holder] = _Holding(size, give_up, owner)
        while self.used > self.limit:
            self.given_up += 1
            self._evict(self._victim(), self.error())

    def release(self, holder: object) -> None:
        """Release the holder's bytes."""
        holding = self._holdings.pop(holder, None)
        if holding is not None:
            self._count(holding.owner, -holding.size, -1)

    def clear(self, error: Callable[[], ApiError]) -> None:
        """Make all holders release their bytes, with this error instead of the usual one."""
        for holder in list(self._holdings):
            self._evict(holder, error())

    def _victim(self) -> object:
        owner = max(self._owners, key=lambda owner: self._owners[owner][0])
        own = (holder for holder, holding in self._holdings.items() if holding.owner == owner)
        return max(own, key=lambda holder: self._holdings[holder].size) if self._largest else next(own)

    def _count(self, owner: str, size: int, holders: int) -> None:
        self.used += size
        total = self._owners.setdefault(owner, [0, 0])
        total[0] += size
        total[1] += holders
        if not total[1]:
            del self._owners[owner]

    def _evict(self, holder: object, error: ApiError) -> None:
        holding = self._holdings.pop(holder)
        self._count(holding.owner, -holding.size, -1)
        holding.give_up(error)
