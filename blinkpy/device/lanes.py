"""Several lanes in plain Python: what a block of threads is on a GPU, as real threads that take turns.

Exactly one lane runs at a time, from one barrier to the next, in an order that is drawn anew for every such segment. So a result
that depends on it, as there is no barrier between a write and a read, comes out different in some order, and a seed repeats it.
"""

import random
import threading
from collections.abc import Callable
from typing import Any

_seat = threading.local()


class LanesDivergedError(RuntimeError):
    """Some lanes wait at a barrier that others never reach."""


class Team:
    """`lanes` threads that run one function together. seed: of the order in which lanes take turns."""

    def __init__(self, lanes: int, seed: int = 0) -> None:
        if lanes < 1 or lanes & (lanes - 1):
            raise ValueError(f"lanes must be a power of two, not {lanes}")
        self.lanes = lanes
        self._random = random.Random(seed)
        self._order = list(range(lanes))
        self._values: list[Any] = [None] * lanes

    def run(self, function: Callable[[int, int], Any]) -> list[Any]:
        """Call function(lane, lanes) in every lane; the lanes' results in order. Raises what the first lane raised."""
        self._turns = [threading.Semaphore(0) for _ in range(self.lanes)]
        self._position, self._finished = -1, 0
        self._error: BaseException | None = None
        results: list[Any] = [None] * self.lanes

        def work(lane: int) -> None:
            _seat.team, _seat.lane = self, lane
            self._turns[lane].acquire()
            try:
                if self._error is None:
                    results[lane] = function(lane, self.lanes)
            except BaseException as error:  # handed to the caller below
                self._error = self._error or error
            self._finished += 1
            self._pass_on()

        threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in range(self.lanes)]
        for thread in threads:
            thread.start()
        self._random.shuffle(self._order)
        self._pass_on()
        for thread in threads:
            thread.join()
        if self._error is not None:
            raise self._error
        return results

    def barrier(self, lane: int) -> None:
        """End of this lane's segment; returns at its turn in the next one."""
        self._pass_on()
        self._turns[lane].acquire()
        if self._error is not None:
            raise self._error

    def exchange(self, lane: int, value: Any) -> list[Any]:
        """The values of all lanes."""
        self._values[lane] = value
        self.barrier(lane)
        values = list(self._values)
        self.barrier(lane)
        return values

    def _pass_on(self) -> None:
        self._position += 1
        if self._position == self.lanes:
            if self._finished == self.lanes:
                return
            if self._finished and self._error is None:
                self._error = LanesDivergedError(f"{self._finished} of {self.lanes} lanes returned, the others wait")
            self._random.shuffle(self._order)
            self._position = 0
        if self._error is not None:  # the others end at once, each at its barrier
            for turn in self._turns:
                turn.release()
            return
        self._turns[self._order[self._position]].release()


def team_of(lanes: int) -> tuple[Team, int]:
    """The team and lane of the calling thread."""
    team: Team | None = getattr(_seat, "team", None)
    if team is None or team.lanes != lanes:
        raise RuntimeError(f"{lanes} lanes of plain Python need blinkpy.device.lanes.Team.run")
    return team, _seat.lane
