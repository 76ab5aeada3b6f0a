"""The usage of each tenant, in memory shared by all workers. Each worker writes its own block of float64, and reads all blocks.

So limits apply to the sum of all workers, and each worker can answer /metrics for all. Two workers that check a limit
at the same moment may both admit a request, and together exceed the limit by one request each.
"""

from array import array
from collections.abc import Collection

from blinkpy.config import ConfigError
from blinkpy.dpu.admission.keys_file import MOST_TENANTS

GAUGES = {
    "requests_in_flight": "Choices of a tenant that hold a slot, or are about to",
    "waiting_requests": "Requests of a tenant that wait for a slot",
    "waiting_tokens": "Their prompt tokens and max_tokens",
}
COUNTERS = {
    "tokens": "Prompt tokens and generated tokens of a tenant",
    "requests": "Requests of a tenant that got their slots",
    "requests_refused": "Requests of a tenant that were answered 429, by its limit or the server's",
}
_COLUMNS = {name: column for column, name in enumerate(("", *GAUGES, *COUNTERS))}  # the first: number + 1; 0: a free row
_BUCKET = len(_COLUMNS)  # a token bucket: limit, level, and time of that level in s of the monotonic clock
WIDTH = _BUCKET + 3
ROWS = 2 * MOST_TENANTS  # twice: rows of removed tenants stay while their requests run
TABLE_BYTES = ROWS * WIDTH * 8  # of a worker


class TenantTable:
    """One worker's rows in `memory`, which holds TABLE_BYTES for each of `workers` workers (default: private memory)."""

    def __init__(self, worker: int = 0, workers: int = 1, memory: memoryview | None = None):
        self.workers, self._worker = workers, worker
        self._all = (memory if memory is not None else memoryview(bytearray(workers * TABLE_BYTES))).cast("B").cast("d")
        start = worker * ROWS * WIDTH
        for row in range(start, start + ROWS * WIDTH, WIDTH):  # clear the gauges of an earlier worker, but keep its counters
            for column in range(1, 1 + len(GAUGES)):
                self._all[row + column] = 0.0
        self._places: dict[tuple[int, int], int] = {}  # start of the row last found for (worker, number)

    def keep(self, numbers: Collection[int]) -> None:
        """Make rows for tenants, by number. Rows of removed tenants are reused once none of their requests runs or waits.

        Raises ConfigError if no row is left.
        """
        rows = [(self._worker * ROWS + row) * WIDTH for row in range(ROWS)]
        there = {int(self._all[at]) - 1: at for at in rows if self._all[at]}
        idle = (at for at in rows if int(self._all[at]) - 1 not in numbers and not any(self._all[at + 1 : at + 1 + len(GAUGES)]))
        for number in numbers:
            if number not in there:
                at = next(idle, -1)
                if at < 0:
                    raise ConfigError(
                        "too many removed tenants still have requests: read the keys again after these requests have ended"
                    )
                for column in range(1, WIDTH):
                    self._all[at + column] = 0.0
                self._all[at] = number + 1

    def add(self, number: int, name: str, amount: float) -> None:
        """Add to a gauge or counter of a tenant that `keep` knows. name: one of GAUGES or COUNTERS."""
        words, at = self._all, self._places.get((self._worker, number), -1)
        if at < 0 or words[at] != number + 1:
            at = self._place(self._worker, number)
        if at >= 0:
            words[at + _COLUMNS[name]] += amount

    def set_bucket(self, number: int, per_minute: int, level: float, now: float) -> None:
        """Store the state of a tenant's token bucket, for workers that start later."""
        at = self._place(self._worker, number)
        if at >= 0:
            self._all[at + _BUCKET : at + _BUCKET + 3] = memoryview(array("d", (per_minute, level, now)))

    def bucket(self, number: int, per_minute: int) -> tuple[float, float] | None:
        """(level, time) of the last state stored by any worker, if its limit was the same."""
        places = [self._place(worker, number) for worker in range(self.workers)]
        states = [tuple(self._all[at + _BUCKET : at + _BUCKET + 3]) for at in places if at >= 0]
        same = [(level, seen) for limit, level, seen in states if limit == per_minute]
        return max(same, key=lambda state: state[1], default=None)

    def values(self, number: int, name: str) -> list[float]:
        """One of GAUGES or COUNTERS of a tenant, for each worker."""
        places = [self._place(worker, number) for worker in range(self.workers)]
        return [self._all[at + _COLUMNS[name]] if at >= 0 else 0.0 for at in places]

    def total(self, number: int, name: str) -> float:
        """The sum of `values` over all workers."""
        return sum(self.values(number, name))

    def _place(self, worker: int, number: int) -> int:
        """The start of a tenant's row; -1 if a worker does not know the tenant yet."""
        at = self._places.get((worker, number), -1)
        if at >= 0 and self._all[at] == number + 1:
            return at
        first = worker * ROWS * WIDTH
        for at in range(first, first + ROWS * WIDTH, WIDTH):
            if self._all[at] == number + 1:
                self._places[worker, number] = at
                return at
        return -1
