"""Token rates: the limit of a tenant per minute, and the recent throughput of the engine. Times are seconds of one
clock."""

from math import ceil

WINDOW_S = 10
RETRY_S = (1, 60)  # bounds of Retry-After


class TokenBucket:
    """A limit of tokens per minute: a request may enter while tokens are left. An excess is paid back before the next
    request enters.

    So over any t seconds, the tenant takes at most per_minute * (1 + t / 60) tokens, plus the tokens of requests that still run
    at the end.
    """

    def __init__(self, per_minute: int, now: float, taken: float = 0.0, level: float | None = None):
        self.per_minute = per_minute
        self._level, self._seen, self._taken = float(per_minute) if level is None else level, now, taken

    def update(self, now: float, taken: float) -> None:
        """taken: tokens of all workers since the start; it may decrease, for example when a worker restarts."""
        filled = self._level + max(0.0, now - self._seen) * self.per_minute / 60
        self._level = min(float(self.per_minute), min(float(self.per_minute), filled) - (taken - self._taken))
        self._seen, self._taken = now, taken

    @property
    def level(self) -> float:
        """Tokens left as of the last update; 0 or less: no token is left."""
        return self._level

    def retry_s(self) -> int:
        """Time from the last update until a request may enter again, in s, clamped to RETRY_S."""
        low, high = RETRY_S
        return min(high, max(low, ceil((1 - self._level) * 60 / self.per_minute)))


class RecentRate:
    """Tokens per second over the last WINDOW_S seconds."""

    def __init__(self) -> None:
        self._bins = [0.0] * WINDOW_S
        self._second = 0

    def add(self, now: float, tokens: float) -> None:
        self._advance(now)
        self._bins[self._second % WINDOW_S] += tokens

    def _advance(self, now: float) -> None:
        second = int(now)
        for passed in range(max(self._second + 1, second - WINDOW_S + 1), second + 1):
            self._bins[passed % WINDOW_S] = 0.0
        self._second = max(self._second, second)

    def retry_s(self, now: float, ahead: float) -> int:
        """Time to serve `ahead` tokens at this rate, in s, clamped to RETRY_S."""
        self._advance(now)
        low, high = RETRY_S
        tokens = sum(self._bins)
        return min(high, max(low, ceil(ahead * WINDOW_S / tokens))) if tokens else high
