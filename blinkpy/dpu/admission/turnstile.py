"""How many requests begin in a turn of the event loop, and when new ones are refused because a worker can't keep up.

A turn reads whatever has come, so its length would grow with what comes: in overload each one brings more than the one before,
and everybody on the event loop, /health and streams among them, waits for its end. Here MOST_BEGINS requests are prepared and
submitted in a turn, and the others wait in line. Once the first of the line has waited for longer than the worker may lag behind,
the turnstile is closed: new requests are refused by their headers, until the line has caught up. The line is as long as there are
connections at most: each has one request at a time.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable

from blinkpy.dpu.metrics import Metrics

MOST_BEGINS = 4  # in a turn: a millisecond, and fewer than requests that may end in one (blinkpy.dpu.engine_link)


class Turnstile:
    """See the module. lag_s: how long the first of the line may have waited; closed: whether it has waited for longer."""

    def __init__(self, lag_s: float, metrics: Metrics, clock: Callable[[], float] = time.monotonic):
        self._lag_s, self._metrics, self._clock = lag_s, metrics, clock
        self._line = deque[tuple[float, asyncio.Future[None]]]()  # when each came, s, and what tells it that its turn has come
        self._begun = 0  # in this turn
        self.closed = False

    def pass_at_once(self) -> bool:
        """Whether a request may begin now; where not, it has to `wait`."""
        if self._line or self._begun >= MOST_BEGINS:
            return False
        self._begun += 1
        if self._begun == 1:
            asyncio.get_running_loop().call_soon(self._next_turn)
        return True

    async def wait(self) -> None:
        """Until those before have begun."""
        turn = asyncio.get_running_loop().create_future()
        self._line.append((self._clock(), turn))
        await turn

    def _next_turn(self) -> None:
        """Let the next ones begin. It is called again as long as any have, so that a line always moves."""
        line, self._begun = self._line, 0
        while line and self._begun < MOST_BEGINS:
            _, turn = line.popleft()
            if not turn.done():  # else it was cancelled
                turn.set_result(None)
                self._begun += 1
        # As of now, and not when a request comes: after a pause of the process those who came meanwhile are not refused.
        lag = self._clock() - line[0][0] if line else 0.0
        self.closed = lag > self._lag_s
        self._metrics.gauge("lag_seconds", lag)
        if self._begun:
            asyncio.get_running_loop().call_soon(self._next_turn)
