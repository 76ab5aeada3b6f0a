"""When to poll for completions: most steps cost two or three polls, and a token waits for half a millisecond.

Steps take about equally long, so a wait is slightly shorter than the shortest of the last steps. A longer
step then costs a few empty polls, but a decode step after a mixed step does not wait. An empty poll directly
before the poll that finds a step shows the step's length. Without an empty poll, the step ended at an unknown
earlier time, and counts as shorter. If one poll finds two tokens of a request, steps became much shorter, and
the next polls come as early as possible.
"""

from collections import deque

POLL_S = 0.001  # minimum wait
SPARE_S = 2 * POLL_S  # timers may be late by POLL_S, and steps differ slightly
STEPS = 8  # number of last steps that count
EARLY_SHARE = 0.9  # factor for an uncertain length
QUIET_LIMIT_S = 0.05  # maximum wait


class PollPace:
    def __init__(self) -> None:
        self._lengths = deque([0.0], STEPS)  # lengths of the last steps, s; 0: unknown
        self._last_step = 0.0  # time of the last completions, s
        self._found = False  # the last poll found completions

    def restart(self) -> None:
        """Forget the length of a step: steps resume after a pause."""
        self._lengths.append(0.0)

    def delay(self, now: float, found: bool, clumped: bool) -> float:
        """Seconds until the next poll.

        now: time of this poll, s of the monotonic clock.
        found: it found completions.
        clumped: it found several completions of one request.
        """
        delay = POLL_S
        if found:
            length = now - self._last_step
            self._lengths.append(0.0 if clumped else EARLY_SHARE * length if self._found else length)
            delay = min(max(POLL_S, min(self._lengths) - SPARE_S), QUIET_LIMIT_S)
            self._last_step = now
        self._found = found
        return delay
