"""Stop strings: text that could begin a stop string is held back until more text decides it.

A request ends at the first complete stop string; if several end at the same character, the longest counts. The result depends
only on the text, not on its division into tokens. Each stop string is matched by Knuth, Morris and Pratt's automaton, so the
cost per character does not depend on its length.
"""

import re
from functools import lru_cache

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024  # characters


@lru_cache(maxsize=1024)
def _failure(stop: str) -> tuple[int, ...]:
    """failure[k]: length of the longest proper prefix of stop[:k] that is also its suffix."""
    table = [0] * (len(stop) + 1)
    length = 0
    for k in range(1, len(stop)):
        while length and stop[k] != stop[length]:
            length = table[length]
        if stop[k] == stop[length]:
            length += 1
        table[k + 1] = length
    return tuple(table)


@lru_cache(maxsize=256)
def _starts(stops: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("[" + "".join(re.escape(character) for character in {stop[0] for stop in stops}) + "]")


class StopStrings:
    """Filters one request's text.

    stops: non-empty strings, at least one.
    include: also send the stop string.
    """

    __slots__ = ("_failures", "_include", "_matched", "_pending", "_starts", "_stops", "found", "stopped")

    def __init__(self, stops: tuple[str, ...], include: bool = False):
        self._stops, self._include = stops, include
        self._failures = [_failure(stop) for stop in stops]
        self._starts = _starts(stops)
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends with
        self._pending = ""
        self.stopped, self.found = False, ""

    def push(self, text: str, may_stop: bool = True) -> str:
        """Add text, and return the text that may be sent now. At a stop string, `stopped` and `found` are set,
        and the rest is dropped.

        may_stop: False treats stop strings that end in this text as ordinary text, because the output must continue.
        """
        if self.stopped:
            return ""
        if not self._pending and not self._starts.search(text):
            return text
        matched, stops, failures = self._matched, self._stops, self._failures
        for position, character in enumerate(text, 1):
            ended = 0
            for i, stop in enumerate(stops):
                length = matched[i]
                while length and stop[length] != character:
                    length = failures[i][length]
                if stop[length] == character:
                    length += 1
                if length == len(stop):
                    ended = max(ended, length)
                    length = failures[i][length]
                matched[i] = length
            if ended and may_stop:
                self.stopped = True
                whole = self._pending + text[:position]
                self._pending, self.found = "", whole[len(whole) - ended :]
                return whole if self._include else whole[: len(whole) - ended]
        whole, keep = self._pending + text, max(matched)
        self._pending = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def finish(self) -> str:
        """The text still held back at the end of the output."""
        pending, self._pending = self._pending, ""
        return pending
