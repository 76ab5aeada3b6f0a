"""The streamed text of a model, for parsers that are generators: `yield` waits for more text.

A parser sets a mark at the possible start of a call. Until it commits, the text after the mark is kept, and NotACall
turns it into content. Thus no text of a model is lost.
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
    """A tool call begins; its arguments follow. custom: the call is of a custom tool; the text of its input follows
    instead."""

    name: str
    custom: bool = False


class CallArguments(NamedTuple):
    """More text of the arguments of the last call: together valid JSON, if the model wrote valid JSON. For a custom
    tool, more text of its input."""

    text: str


class NextMessage(NamedTuple):
    """The text that follows belongs to another message of the same answer."""


OutputEvent = Content | Reasoning | CallBegin | CallArguments | NextMessage


Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A parser, or a part of a parser: it yields if it needs more text."""

HEAD_CHARACTERS = 8192  # maximum characters held back before the arguments of a call
MOST_SPACE = 256  # characters of white space before a literal
JSON_QUOTES, PYTHON_QUOTES = '"', "\"'"
_SPACE = re.compile(r"\s*")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)
_STOPS = {quotes: re.compile(rf"[{quotes}<()\[\]{{}}]") for quotes in (JSON_QUOTES, PYTHON_QUOTES)}
_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in PYTHON_QUOTES}


class NotACall(Exception):
    """The text at the mark is not a call."""


@lru_cache(maxsize=64)
def _starts(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Finds a marker, or a possible start of one at the end of the text."""
    whole = [re.escape(marker) for marker in markers]
    parts = {re.escape(marker[:size]) + r"\Z" for marker in markers for size in range(len(marker) - 1, 0, -1)}
    return re.compile("|".join([*whole, *sorted(parts, key=len, reverse=True)]))


class OutputSource:
    """Text between its producer (push, finish, take) and parsers (the rest)."""

    def __init__(self) -> None:
        self.kind: type[Content] | type[Reasoning] = Content  # of the text that is not a call
        self.reasoning: type[Content] | type[Reasoning] = Reasoning  # the type of reasoning events
        self.allowed: frozenset[str] | None = None  # the functions that may be called; None: any
        self.schemas: Mapping[str, Mapping[str, Any]] = {}  # of the tools' arguments, by the tool's name
        self._text, self._at = "", 0
        self._mark: int | None = None
        self._limit: int | None = None
        self.ended = False  # whether the text has ended
        self.cut = False  # whether the text ended within the arguments of the last call
        self._events: list[OutputEvent] = []

    def push(self, text: str) -> None:
        """Add text."""
        self._text += text

    def finish(self) -> None:
        """Record that no more text follows."""
        self.ended = True

    def take(self) -> list[OutputEvent]:
        """The events since the previous call."""
        events, self._events = self._events, []
        return events

    # ---- for parsers

    def content(self, text: str) -> None:
        if text:
            self._events.append(self.kind(text))

    def begin_reasoning(self) -> None:
        """Treat the following text, perhaps empty, as reasoning: white space between it and the content is removed."""
        self.kind = Reasoning
        self._events.append(Reasoning(""))

    def check_name(self, name: str) -> None:
        """Raise NotACall for a function that is not allowed."""
        if self.allowed is not None and name not in self.allowed:
            raise NotACall

    def begin(self, name: str) -> None:
        """Begin a call; the text before this position is no longer needed."""
        self.commit()
        self._events.append(CallBegin(name))

    def next_message(self) -> None:
        """Start another message of the same answer."""
        self._events.append(NextMessage())

    def arguments(self, text: str) -> None:
        if text:
            self._events.append(CallArguments(text))

    def mark(self, limit: int | None = HEAD_CHARACTERS) -> None:
        """Set the mark here. limit: characters after which the text is not a call, unless committed."""
        self._mark, self._limit = self._at, limit

    def allow(self, limit: int) -> None:
        """Change the limit of characters after the mark."""
        self._limit = limit

    def commit(self) -> None:
        """Remove the mark: the text after it will not be parsed again."""
        self._mark = None

    def back(self) -> None:
        """Return to the mark."""
        if self._mark is not None:
            self._at, self._mark = self._mark, None

    def refuse(self) -> None:
        """Turn the text from the mark on into content. The part already read is not searched again for calls."""
        start, self._mark = self._at if self._mark is None else self._mark, None
        self._at = min(max(self._at, start + 1), len(self._text))
        self.content(self._text[start : self._at])

    def more(self) -> Steps[bool]:
        """Wait for text. Returns False at the end. Raises NotACall if too much is held back."""
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
        """Take all available text."""
        text, self._at = self._text[self._at :], len(self._text)
        return text

    def peek(self) -> Steps[str]:
        """Skip white space, and return the next character without taking it; "" at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if self._at < len(self._text):
                return self._text[self._at]
            if not (yield from self.more()):
                return ""

    def expect(self, characters: str) -> Steps[str]:
        """Take the next visible character, which must be in `characters`. Raises NotACall."""
        found = yield from self.peek()
        if not found or found not in characters:
            raise NotACall
        self._at += 1
        return found

    def follows(self, literal: str) -> Steps[int]:
        """The end of a literal if it is the next visible text; otherwise 0. Consumes nothing."""
        while True:
            start = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if start - self._at > MOST_SPACE:
                return 0
            if self._text.startswith(literal, start):
                return start + len(literal)
            if not literal.startswith(self._text[start:]) or not (yield from self.more()):
                return 0

    def skip(self, literal: str) -> Steps[bool]:
        """Take a literal and the white space before it, if it is the next visible text. Returns whether it was."""
        end = yield from self.follows(literal)
        self._at = end or self._at
        return bool(end)

    def ends_within(self, literal: str) -> bool:
        """Whether the text ends before a literal is complete. White space before the literal does not count."""
        return self.ended and literal.startswith(self._text[self._at :].strip())

    def match(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take the text here that matches a pattern; it is complete once other text follows. Raises NotACall."""
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
        """Emit text up to a marker as content, mark the marker's start, and continue after it. Returns the marker; "" at the end
        of the text.
        """
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
        """Take more text before a marker; None once the marker was taken; "" at the end of the text."""
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
        """Like peek, but without skipping white space."""
        while True:
            start = _SPACE.match(self._text, self._at).end()  # type: ignore[union-attr]
            if start < len(self._text):
                return self._text[start]
            if not (yield from self.more()):
                return ""

    def rest(self) -> Steps[None]:
        """Emit the rest as content."""
        while True:
            self.content(self._text[self._at :])
            self._at = len(self._text)
            if not (yield from self.more()):
                return

    def balanced(self, give: Callable[[str], None], quotes: str = JSON_QUOTES) -> Steps[bool]:
        """Take text from an opening bracket to its closing bracket, emitted in pieces. Brackets in strings don't
        count. Returns False if it is incomplete: at the end of the text, or before a `<` outside strings, which no
        value contains."""
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
                        at += 1  # the escaped character
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
    call: parses one call; raises NotACall before it has emitted anything.
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
    """The decoded text of a JSON string; raw line breaks are accepted. Raises NotACall if it is invalid or has a lone
    surrogate."""
    try:
        text = json.loads(literal, strict=False)
        text.encode()
    except ValueError as error:
        raise NotACall from error
    return str(text)
