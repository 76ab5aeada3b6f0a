"""Answers of chats with reasoning and tool calls in addition to content, in the formats of OpenAI's API."""

from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from blinkpy.dpu.generation import STOP, TokenLogprobs, TokenSpeller
from blinkpy.dpu.http.answers import Answer, Choice, Turns
from blinkpy.dpu.tools.message_parser import Expected, MessageParser
from blinkpy.dpu.tools.output_source import CallArguments, CallBegin, Content, NextMessage, OutputEvent

TOOL_CALLS = "tool_calls"  # the finish reason of a choice that stopped after a call


class _Message:
    """The message of one choice: its parser, and the formats of its parts."""

    def __init__(self, expected: Expected, include_reasoning: bool):
        self._parser = MessageParser(expected)
        self._include_reasoning = include_reasoning
        self._new_id = expected.new_id
        self._calls = self._parts = 0
        self._kind, self._field = "function", "arguments"  # of the last call
        self._shown: set[str] = set()  # parts that have text
        self._between: set[str] = set()  # parts whose next text belongs to another message than the text before

    def more(self, text: str) -> dict[str, Any]:
        """More text of the message, as the `delta` of an event."""
        return self._delta(self._parser.feed(text))

    def whole(self, text: str) -> dict[str, Any]:
        """The message of a whole text."""
        return self._delta([*self._parser.feed(text), *self._parser.finish()]) or {"content": ""}

    def finish(self) -> dict[str, Any]:
        """The end of the message; an answer without any part has empty content."""
        return self._delta(self._parser.finish()) or ({} if self._parts else {"content": ""})

    def finish_reason(self, reason: str) -> str:
        return TOOL_CALLS if self._calls and reason == STOP and not self._parser.cut else reason

    def _delta(self, events: Iterable[OutputEvent]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        calls: list[dict[str, Any]] = []
        for event in events:
            if isinstance(event, CallBegin):
                self._kind, self._field = ("custom", "input") if event.custom else ("function", "arguments")
                called = {"name": event.name, self._field: ""}
                calls.append({"index": self._calls, "id": self._new_id(), "type": self._kind, self._kind: called})
                self._calls += 1
            elif isinstance(event, CallArguments):
                if not calls:
                    calls.append({"index": self._calls - 1, self._kind: {self._field: ""}})
                calls[-1][self._kind][self._field] += event.text
            elif isinstance(event, NextMessage):
                self._between |= self._shown
            elif self._include_reasoning or isinstance(event, Content):
                part = "content" if isinstance(event, Content) else "reasoning_content"
                before = "\n" if part in self._between else ""
                delta[part] = delta.get(part, "") + before + event.text
                self._between.discard(part)
                self._shown.add(part)
        if calls:
            delta["tool_calls"] = calls
        self._parts += len(delta)
        return delta


def message_of(text: str, expected: Expected | None, include_reasoning: bool = True) -> dict[str, Any]:
    """The message of a complete answer. expected: None for content only."""
    parts: dict[str, Any] = {"content": text} if expected is None else _Message(expected, include_reasoning).whole(text)
    for call in parts.get("tool_calls", ()):
        del call["index"]
    return {"role": "assistant", "content": None, **parts}


class MessageAnswer(Answer):
    """An Answer whose texts are parsed. expected: the possible parts of the answer."""

    def __init__(
        self,
        model: str,
        spell: TokenSpeller,
        expected: Expected,
        include_reasoning: bool,
        request_id: str | None = None,
        service_tier: str | None = None,
        null_usage: bool = False,
    ):
        super().__init__(True, model, spell, request_id, service_tier, null_usage)
        self._expected, self._include_reasoning = expected, include_reasoning
        self._messages: dict[int, _Message] = {}

    def _message(self) -> _Message:
        return _Message(self._expected, self._include_reasoning)

    def _chunk(self, index: int, delta: dict[str, Any], logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        parts = (self._envelope, index, orjson.dumps(delta), orjson.dumps(self._logprobs(logprobs)))
        return b'data: %b"choices":[{"index":%d,"delta":%b,"logprobs":%b,"finish_reason":null}]}\n\n' % parts

    def frame(self, index: int) -> None:
        """None: the content of an event depends on earlier text."""

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        """The event for the parts that became certain with more text of a choice; empty without such a part. The first event has
        the role.
        """
        message = self._messages.get(index)
        first: dict[str, Any] = {}
        if message is None:
            message = self._messages[index] = self._message()
            first = {"role": "assistant", "content": None}
        delta = first | message.more(text)
        return self._chunk(index, delta, logprobs) if delta or logprobs else b""

    def last_event(self, index: int, finish_reason: str) -> bytes:
        """The events of the rest of a choice, and of its end."""
        message = self._messages[index]
        delta = message.finish()
        rest = self._chunk(index, delta) if delta else b""
        return rest + super().last_event(index, message.finish_reason(finish_reason))

    def _entry(self, choice: Choice) -> Turns[dict[str, Any]]:
        message = self._message()
        parts = message.whole(choice.text)
        for call in parts.get("tool_calls", ()):
            del call["index"]
        content = {"role": "assistant", "content": None, "refusal": None, **parts}
        reason = message.finish_reason(choice.finish_reason)
        logprobs = yield from self._all_logprobs(choice.logprobs)
        return {"index": choice.index, "message": content, "logprobs": logprobs, "finish_reason": reason}
