"""How many tokens of an answer are reasoning, with the tags or marks around it."""

from typing import Protocol

from blinkpy.dpu.tools.harmony_calls import BEGINS, ENDS, MESSAGE, START, header_of, is_header
from blinkpy.dpu.tools.output_source import MOST_SPACE
from blinkpy.dpu.tools.reasoning import ReasoningTags


class ReasoningCounter(Protocol):
    """Of one answer. tokens: so far."""

    tokens: int

    def push(self, text: str) -> None:
        """The text of one more token, which may be empty."""


class TagCounter:
    """Reasoning at the start, between tags. inside: the prompt has opened it."""

    __slots__ = ("_begun", "_open", "_seen", "_tags", "tokens")

    def __init__(self, tags: ReasoningTags, inside: bool):
        self._tags, self._begun, self._open = tags, 0, inside
        self._seen: str | None = ""  # of the text, what a tag may be in; None behind the reasoning
        self.tokens = 0

    def push(self, text: str) -> None:
        if self._seen is None:
            return
        self._begun += 1
        seen = self._seen + text
        if not self._open:
            start = seen.lstrip()
            if not start.startswith(self._tags.open):
                begins = self._tags.open.startswith(start) and len(seen) - len(start) <= MOST_SPACE
                self._seen = seen if begins else None
                return
            self._open, seen = True, start[len(self._tags.open) :]
        self.tokens = self._begun
        self._seen = None if self._tags.close in seen else seen[-len(self._tags.close) :]


class ChannelCounter:
    """Reasoning in messages of harmony. known, only_known: as for header_of; begun: the answer's beginning, in the prompt."""

    __slots__ = ("_header", "_known", "_only_known", "_reasons", "_waiting", "tokens")

    def __init__(self, known: frozenset[str], begun: str, only_known: bool = False):
        self._known, self._only_known, self._reasons = known, only_known, False
        self._header: str | None = ""  # so far; None outside of headers
        self.tokens = self._waiting = 0  # waiting: of a header, until it shows what its message is
        for character in begun:
            self.push(character)
        self.tokens = self._waiting = 0

    def push(self, text: str) -> None:
        mark = text[-1:]
        if self._header is None:
            self.tokens += self._reasons and mark not in BEGINS
            if mark in BEGINS or mark in ENDS:
                self._header, self._reasons, self._waiting = mark if mark in BEGINS else None, False, 1
            return
        self._waiting += 1
        if mark == MESSAGE:
            self._reasons = header_of(self._header, self._known, self._only_known).reasons
            self.tokens += self._waiting if self._reasons else 0
            self._header = None
        elif mark == START:
            self._header, self._waiting = START, 1
        else:
            self._header = self._header + text if is_header(self._header + text) else None
