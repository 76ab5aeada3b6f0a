"""Splits the streamed text of one answer into reasoning, content and tool calls."""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from blinkpy.dpu.tools.call_format import CallFormat
from blinkpy.dpu.tools.custom_input import CustomInput
from blinkpy.dpu.tools.harmony_calls import BEGINS, ENDS, MESSAGE, START, header_of, is_header
from blinkpy.dpu.tools.output_source import (
    MOST_SPACE,
    CallArguments,
    CallBegin,
    Content,
    NextMessage,
    OutputEvent,
    OutputSource,
    Reasoning,
    Steps,
)
from blinkpy.dpu.tools.reasoning import ReasoningTags, parse_reasoning


class ReasoningCounter(Protocol):
    """Counts the reasoning tokens of one answer. tokens: their number so far."""

    tokens: int

    def push(self, text: str) -> None:
        """Add the text of one more token, which may be empty."""


class TagCounter:
    """Counts reasoning between tags at the start of the answer. inside: whether the prompt has opened it."""

    __slots__ = ("_begun", "_open", "_seen", "_tags", "tokens")

    def __init__(self, tags: ReasoningTags, inside: bool):
        self._tags, self._begun, self._open = tags, 0, inside
        self._seen: str | None = ""  # text that may contain a tag; None after the reasoning
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
    """Counts reasoning in harmony's messages. known, only_known: as for header_of; begun: start of the answer, in the
    prompt."""

    __slots__ = ("_header", "_known", "_only_known", "_reasons", "_waiting", "tokens")

    def __init__(self, known: frozenset[str], begun: str, only_known: bool = False):
        self._known, self._only_known, self._reasons = known, only_known, False
        self._header: str | None = ""  # the text so far; None outside headers
        self.tokens = self._waiting = 0  # waiting: tokens of a header whose kind is not yet known
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


@dataclass(frozen=True)
class Expected:
    """The possible parts of an answer, in addition to content. tools: names of the request's tools; prefix: start of
    the answer, at the end of the prompt."""

    tags: ReasoningTags | None = None
    inside: bool = False  # whether the prompt has opened the reasoning
    calls: CallFormat | None = None
    tools: frozenset[str] = frozenset()
    parallel: bool = True  # whether an answer may have several calls
    prefix: str = ""
    as_content: bool = False  # reasoning is content
    only_tools: bool = False  # whether a call of another function is text
    schemas: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of the tools' arguments
    custom: frozenset[str] = frozenset()  # names of custom tools

    @property
    def whole(self) -> bool:
        """Whether the format of calls covers the whole answer."""
        return self.calls is not None and self.calls.whole

    def reasoning_counter(self) -> ReasoningCounter | None:
        """A counter for an answer that may have reasoning."""
        if self.whole and not self.as_content:
            return ChannelCounter(self.tools, self.prefix, self.only_tools)
        return None if self.tags is None else TagCounter(self.tags, self.inside)

    def new_id(self) -> str:
        """A new id of a call."""
        length = self.calls.id_length if self.calls is not None else 0
        return secrets.token_hex(12)[:length] if length else f"call_{secrets.token_hex(12)}"


class MessageParser:
    """Parts of one answer. Every text belongs to a part, except marks, white space between parts, and calls after the first if
    only one call is allowed.
    """

    def __init__(self, expected: Expected):
        self.calls = 0  # begun so far
        self._expected = expected
        self._source = OutputSource()
        self._source.schemas = expected.schemas
        if expected.as_content:
            self._source.reasoning = Content
        if expected.only_tools:
            self._source.allowed = expected.tools
        self._steps = self._parse()
        next(self._steps)
        self._last: type[OutputEvent] | None = None
        self._reasoned = False  # whether reasoning has begun, but neither reasoning nor content has text yet
        self._input: CustomInput | None = None  # input of the last call, if it calls a custom tool
        self._space: list[str] = []  # white space at the end of the text so far; it counts as content if more content follows
        self._source.push(expected.prefix)

    def feed(self, text: str) -> list[OutputEvent]:
        """The parts that are certain now."""
        self._source.push(text)
        next(self._steps)
        return list(self._with_inputs(self._tidy(self._source.take())))

    def finish(self) -> list[OutputEvent]:
        """The rest, at the end of the answer."""
        self._source.finish()
        next(self._steps, None)
        events = [*self._with_inputs(self._tidy(self._source.take())), *self._end_input()]
        if self._space and not self.calls and self._last is Content:
            events.append(Content("".join(self._space)))
        return events

    @property
    def cut(self) -> bool:
        """Whether the answer has ended, perhaps at a stop string, within the arguments of its last call."""
        return self._source.cut and (self.calls == 1 or self._expected.parallel)

    def _parse(self) -> Steps[None]:
        yield
        source, expected = self._source, self._expected
        if expected.tags is not None:
            yield from parse_reasoning(source, expected.tags, expected.inside)
        if expected.calls is not None:
            yield from expected.calls.parse(source, expected.tools)
        yield from source.rest()

    def _tidy(self, events: list[OutputEvent]) -> Iterator[OutputEvent]:
        """The events without white space around reasoning and calls, and without surplus calls."""
        for event in events:
            if isinstance(event, NextMessage) or (self._expected.whole and isinstance(event, Content | Reasoning)):
                yield event
            elif isinstance(event, Content | Reasoning):
                yield from self._text(event)
            elif isinstance(event, CallBegin):
                self.calls += 1
                self._last, self._reasoned = CallBegin, False
                self._space.clear()
            if isinstance(event, CallBegin | CallArguments) and (self.calls == 1 or self._expected.parallel):
                yield event

    def _with_inputs(self, events: Iterator[OutputEvent]) -> Iterator[OutputEvent]:
        """The events with a custom tool's input instead of its arguments."""
        for event in events:
            if isinstance(event, CallArguments):
                text = event.text if self._input is None else self._input.feed(event.text)
                if text:
                    yield CallArguments(text)
                continue
            yield from self._end_input()
            if isinstance(event, CallBegin) and event.name in self._expected.custom:
                self._input, event = CustomInput(), CallBegin(event.name, True)
            yield event

    def _end_input(self) -> Iterator[OutputEvent]:
        """The rest of the input of the last call."""
        given, self._input = self._input, None
        rest = "" if given is None else given.finish()
        if rest:
            yield CallArguments(rest)

    def _text(self, event: Content | Reasoning) -> Iterator[OutputEvent]:
        kind, text = type(event), event.text
        if kind is Reasoning and not text:
            self._reasoned = True
            return
        if kind is not self._last:
            if self._last is Reasoning or kind is Reasoning or self._reasoned:
                self._space.clear()
                text = text.lstrip("\n")
                if not text:
                    return
            self._last, self._reasoned = kind, False
        if kind is Reasoning:
            shown = text.rstrip("\n")
        else:
            shown = text if self._expected.calls is None else text.rstrip()
        if shown:
            yield kind("".join((*self._space, shown)))
            self._space.clear()
        if len(shown) < len(text):
            self._space.append(text[len(shown) :])
