"""Stop strings: text is held back while it could be the start of one, so that no part of a stop string is ever sent unasked.

A request ends at the first stop string that is complete; of several that end at the same character, at the longest.
This depends on the text alone and not on how it was cut into tokens. Each stop string is matched by Knuth, Morris and
Pratt's automaton, so a character costs the same however long the strings are.
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
    """Filter over one request's text. stops: not empty, and none of them empty. include: the stop string is sent, too."""

    __slots__ = ("_failures", "_held", "_include", "_matched", "_starts", "_stops", "stopped")

    def __init__(self, stops: tuple[str, ...], include: bool = False):
        self._stops, self._include = stops, include
        self._failures = [_failure(stop) for stop in stops]
        self._starts = _starts(stops)
        self._matched = [0] * len(stops)  # characters of each stop string that the text ends with
        self._held = ""
        self.stopped = False

    def push(self, text: str, may_stop: bool = True) -> str:
        """Text that may be sent now. Sets `stopped` at a stop string; what follows it is dropped. may_stop: false
        where the output must continue, and a stop string that ends here is text like any other.
        """
        if self.stopped:
            return ""
        if not self._held and not self._starts.search(text):
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
                whole = self._held + text[:position]
                self._held = ""
                return whole if self._include else whole[: len(whole) - ended]
        whole, keep = self._held + text, max(matched)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def finish(self) -> str:
        """The text that was held back and turned out to be no stop string."""
        held, self._held = self._held, ""
        return held
