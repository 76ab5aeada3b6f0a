"""When to poll for completions: most steps cost two or three polls, and a token waits for half a millisecond.

Steps take about equally long. So a wait is as long as the shortest of the last steps, less a little: a longer step costs polls in
vain, but a decode step after a mixed one does not wait. A poll in vain just before the one that finds a step shows that its
length is known. Where there was none, the step had ended at an unknown time before, and counts as shorter. Where two tokens of a
request came, steps became much shorter, and for some of them every poll comes as soon as it can.
"""

from collections import deque

POLL_S = 0.001  # the shortest wait
SPARE_S = 2 * POLL_S  # a timer is up to one late, and steps are not quite equal
STEPS = 8  # whose lengths count
EARLY_SHARE = 0.9  # of a length that is not known
QUIET_LIMIT_S = 0.05  # the longest wait


class PollPace:
    def __init__(self) -> None:
        self._lengths = deque([0.0], STEPS)  # of the last steps, s; 0: unknown
        self._last_step = 0.0  # when completions came last, s
        self._found = False  # by the last poll

    def restart(self) -> None:
        """Steps begin after a pause: how long they will take is unknown."""
        self._lengths.append(0.0)

    def delay(self, now: float, found: bool, clumped: bool) -> float:
        """Seconds until the next poll. now: of this one, on the monotonic clock; found: completions; clumped: several of one
        request."""
        delay = POLL_S
        if found:
            length = now - self._last_step
            self._lengths.append(0.0 if clumped else EARLY_SHARE * length if self._found else length)
            delay = min(max(POLL_S, min(self._lengths) - SPARE_S), QUIET_LIMIT_S)
            self._last_step = now
        self._found = found
        return delay
