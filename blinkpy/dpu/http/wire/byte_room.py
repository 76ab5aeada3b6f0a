"""Room for bytes that many connections share."""

from collections.abc import Callable

from blinkpy.dpu.api_errors import ApiError

GiveUp = Callable[[ApiError], None]


class ByteRoom:
    """At most `limit` bytes, whoever holds them: beyond that the holder who has held some for longest gives its own up, so that
    what comes and goes quickly always has room; with `largest` it is the one that holds most. error: makes the reason, a new one
    each time: one that is raised again and again keeps the frames of all times alive; given_up: how many did for want of room."""

    def __init__(self, limit: int, error: Callable[[], ApiError], largest: bool = False):
        self.limit, self.error, self._largest = limit, error, largest
        self.used = self.given_up = 0
        self._held: dict[object, tuple[int, GiveUp]] = {}  # the oldest first

    def hold(self, holder: object, size: int, give_up: GiveUp) -> None:
        """The holder has this number of bytes from now on. give_up: called, also from here, when it has to do without."""
        self.used += size - self._held.get(holder, (0,))[0]
        self._held[holder] = size, give_up
        while self.used > self.limit:
            self.given_up += 1
            held = self._held
            self._evict(max(held, key=lambda one: held[one][0]) if self._largest else next(iter(held)), self.error())

    def release(self, holder: object) -> None:
        """The holder has none any more."""
        self.used -= self._held.pop(holder, (0,))[0]

    def clear(self, error: Callable[[], ApiError]) -> None:
        """All of them give theirs up, for this reason, and not for want of room."""
        for holder in list(self._held):
            self._evict(holder, error())

    def _evict(self, holder: object, error: ApiError) -> None:
        size, give_up = self._held.pop(holder)
        self.used -= size
        give_up(error)
