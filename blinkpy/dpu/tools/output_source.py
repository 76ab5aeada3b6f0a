"""A model's text as it comes, for parsers that are generators: `yield` waits for more text.

A parser sets a mark at the possible begin of a call. Until it commits, the text behind the mark is kept, and NotACall makes it
content. So no text of a model is lost.
"""

import json
import re
from collections.abc import Callable, Generator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar


class Content(NamedTuple):
    """More text for the user."""

    text: str


class Reasoning(NamedTuple):
    """More text of the model's reasoning, before its answer."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins; its arguments follow. custom: of a custom tool, and the text of its input follows instead."""

    name: str
    custom: bool = False


class CallArguments(NamedTuple):
    """More text of the arguments of the call that began last: together JSON, if the model wrote JSON. Of a custom tool's call,
    more text of its input."""

    text: str


class NextMessage(NamedTuple):
    """Text that follows is of another message of the same answer."""


OutputEvent = Content | Reasoning | CallBegin | CallArguments | NextMessage


Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A parser, or a part of a parser: it yields if it needs more text."""

HEAD_CHARACTERS = 8192  # of what may stand before the arguments of a call; it is held back
MOST_SPACE = 256  # characters of white space that may stand before a literal
JSON_QUOTES, PYTHON_QUOTES = '"', "\"'"
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STOPS = {quotes: re.compile(rf"[{quotes}<()\[\]{{}}]") for quotes in (JSON_QUOTES, PYTHON_QUOTES)}
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in PYTHON_QUOTES}


class NotACall(Exception):
    """The text at the mark is no call."""


@lru_cache(maxsize=64)
def _starts(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Finds a marker, or what may be the start of one at the end of the text."""
    whole = [re.escape(marker) for marker in markers]
    parts = {re.escape(marker[:size]) + r"\Z" for marker in markers for size in range(len(marker) - 1, 0, -1)}
    return re.compile("|".join([*whole, *sorted(parts, key=len, reverse=True)]))


class OutputSource:
    """Text between its producer (push, finish, take) and parsers (the rest)."""

    def __init__(self) -> None:
        self.kind: type[Content] | type[Reasoning] = Content  # of the text that is no call
        self.reasoning: type[Content] | type[Reasoning] = Reasoning  # the kind of reasoning
        self.allowed: frozenset[str] | None = None  # the only functions of which there are calls; None: any
        self.schemas: Mapping[str, Mapping[str, Any]] = {}  # of the tools' arguments, by the tool's name
        self._text, self._at = "", 0
        self._mark: int | None = None
        self._limit: int | None = None
        self.ended = False  # no more text follows
        self.cut = False  # the arguments of the last call break off where the text ends
        self._events: list[OutputEvent] = []

    def push(self, text: str) -> None:
        """More text."""
        self._text += text

    def finish(self) -> None:
        """No more text follows."""
        self.ended = True

    def take(self) -> list[OutputEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events

    # ---- for parsers

    def content(self, text: str) -> None:
        if text:
            self._events.append(self.kind(text))

    def begin_reasoning(self) -> None:
        """The text that follows is reasoning, perhaps empty: white space between it and the content is removed."""
        self.kind = Reasoning
        self._events.append(Reasoning(""))

    def check_name(self, name: str) -> None:
        """Raise NotACall for a function that is not allowed."""
        if self.allowed is not None and name not in self.allowed:
            raise NotACall

    def begin(self, name: str) -> None:
        """A call: what is behind the mark won't be needed again."""
        self.commit()
        self._events.append(CallBegin(name))

    def next_message(self) -> None:
        """Text that follows is of another message."""
        self._events.append(NextMessage())

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))

    def mark(self, limit: int | None = HEAD_CHARACTERS) -> None:
        """Something begins here. limit: characters after which it is no call, unless it was committed."""
        self._mark, self._limit = self._at, limit

    def allow(self, limit: int) -> None:
        """Another limit of characters behind the mark."""
        self._limit = limit

    def commit(self) -> None:
        """It is no more to be read again."""
        self._mark = None

    def back(self) -> None:
        """Return to the mark."""
        if self._mark is not None:
            self._at, self._mark = self._mark, None

    def refuse(self) -> None:
        """What began at the mark is no call: up to where that showed it is content, which is not searched for calls again."""
        start, self._mark = self._at if self._mark is None else self._mark, None
        self._at = min(max(self._at, start + 1), len(self._text))
        self.content(self._text[start : self._at])

    def more(self) -> Steps[bool]:
        """Wait for text. False at the end. Raises NotACall if too much is held back."""
        kept = self._at if self._mark is None else self._mark
        if kept:
            self._text, self._at = self._text[kept:], self._at - kept
        if self._mark is not None:
            self._mark = 0
            if self._limit is not None and len(self._text) > self._limit:
                raise NotACall
        size = len(self._text)
        while len(self._text) == size:
            if self.ended:
                return False
            yield
        return True

    def text_here(self) -> str:
        """All text from here on that has come; it is passed by."""
        text, self._at = self._text[self._at :], len(self._text)
        return text

    def peek(self) -> Steps[str]:
        """The next character that is no white space, which stays; "" at the end. White space is passed by."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not (yield from self.more()):
                return ""

    def expect(self, characters: str) -> Steps[str]:
        """The next visible character, which must be one of these. Raises NotACall."""
        found = yield from self.peek()
        if not found or found not in characters:
            raise NotACall
        self._at += 1
        return found

    def follows(self, literal: str) -> Steps[int]:
        """Where a literal ends, if it is the next visible text here; 0 otherwise. Nothing is passed by."""
        while True:
            start = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if start - self._at > MOST_SPACE:
                return 0
            if self._text.startswith(literal, start):
                return start + len(literal)
            if not literal.startswith(self._text[start:]) or not (yield from self.more()):
                return 0

    def skip(self, literal: str) -> Steps[bool]:
        """Pass by a literal and the white space before it, if it is the next visible text. Returns whether it was."""
        end = yield from self.follows(literal)
        self._at = end or self._at
        return bool(end)

    def ends_within(self, literal: str) -> bool:
        """Whether the text has ended within a literal, or before it. White space before it does not count."""
        return self.ended and literal.startswith(self._text[self._at :].strip())

    def match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """The text here that matches a pattern, known once something follows it. Raises NotACall."""
        while True:
            found = pattern.match(self._text, self._at)
            if found is not None and (found.end() < len(self._text) or self.ended):
                self._at = found.end()
                return found[0]
            if found is None and self._at < len(self._text):
                raise NotACall
            if not (yield from self.more()) and found is None:
                raise NotACall

    def content_until(self, markers: tuple[str, ...]) -> Steps[str]:
        """Text up to a marker is content. Returns the marker, behind which the source then is, and marks its start; "" at the
        end of the text."""
        pattern = _starts(markers)
        while True:
            found = pattern.search(self._text, self._at)
            start = len(self._text) if found is None else found.start()
            self.content(self._text[self._at : start])
            self._at = start
            if found is not None and found[0] in markers:
                self.mark()
                self._at = found.end()
                return found[0]
            if not (yield from self.more()):
                self.content(self._text[self._at :])
                self._at = len(self._text)
                return ""

    def until(self, marker: str) -> Steps[str | None]:
        """More text that stands before a marker, or None once the source is behind the marker; "" at the end of the text."""
        pattern = _starts((marker,))
        while True:
            found = pattern.search(self._text, self._at)
            start = len(self._text) if found is None else found.start()
            if start > self._at:
                text, self._at = self._text[self._at : start], start
                return text
            if found is not None and found[0] == marker:
                self._at = found.end()
                return None
            if not (yield from self.more()):
                return self.text_here()

    def peek_only(self) -> Steps[str]:
        """As peek, but white space is not passed by."""
        while True:
            start = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if start < len(self._text):
                return self._text[start]
            if not (yield from self.more()):
                return ""

    def rest(self) -> Steps[None]:
        """All that follows is content."""
        while True:
            self.content(self._text[self._at :])
            self._at = len(self._text)
            if not (yield from self.more()):
                return

    def balanced(self, give: Callable[[str], None], quotes: str = JSON_QUOTES) -> Steps[bool]:
        """Text from an opening bracket to its closing bracket, passed on in pieces. Brackets in strings don't
        count. False where it breaks off: at the end of the text, or before a `<` outside of strings, which no value has."""
        depth, quote, escaped = 0, "", False
        while True:
            text, start = self._text, self._at
            at = min(start + escaped, len(text))
            escaped = escaped and at == start
            while found := (_IN_STRING[quote] if quote else _STOPS[quotes]).search(text, at):
                at, character = found.end(), found[0]
                if quote:
                    if character == quote:
                        quote = ""
                    elif at < len(text):
                        at += 1  # what a backslash escapes
                    else:
                        escaped = True
                elif character in quotes:
                    quote = character
                elif character == "<":
                    self._at = at - 1
                    give(text[start : at - 1])
                    return False
                else:
                    depth += 1 if character in "([{" else -1
                    if depth == 0:
                        self._at = at
                        give(text[start:at])
                        return True
            self._at = len(text)
            give(text[start:])
            if not (yield from self.more()):
                return False

    def string(self) -> Steps[str]:
        """A JSON string, decoded. Raises NotACall."""
        yield from self.expect('"')
        self._at -= 1
        while True:
            found = _STRING.match(self._text, self._at)
            if found is not None:
                self._at = found.end()
                return decoded(found[0])
            if not (yield from self.more()):
                raise NotACall


def calls_within(
    source: OutputSource, begin: str, end: str, opening: str, call: Callable[[OutputSource], Steps[None]]
) -> Steps[None]:
    """Parse a whole text in which each `begin` is followed by one or several calls.

    end: literal after the last call; "" if a call ends with it.
    opening: literal before each further call; "" if there is one call for each `begin`.
    call: parses one call; raises NotACall before it has passed anything on.
    """
    while (yield from source.content_until((begin,))):
        try:
            yield from call(source)
            while opening and (yield from source.follows(opening)):
                source.mark()
                yield from call(source)
            if end:
                yield from source.skip(end)
        except NotACall:
            source.refuse()


def decoded(literal: str) -> str:
    """The text of a JSON string; line breaks in it are taken. Raises NotACall if it is invalid, or UTF-8 can't
    hold it.
    """
    try:
        text = json.loads(literal, strict=False)
        text.encode()
    except ValueError as error:
        raise NotACall from error
    return str(text)
