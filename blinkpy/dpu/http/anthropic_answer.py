"""Answers of /v1/messages: whole, and as the named events of Anthropic's API."""

import secrets
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from blinkpy.dpu.api_errors import ApiError, anthropic_error
from blinkpy.dpu.generation import LENGTH, TokenLogprobs
from blinkpy.dpu.http.answers import Choice, Turns, Usage
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.text.conversation_forms import as_object
from blinkpy.dpu.tools.message_parser import MessageParser
from blinkpy.dpu.tools.output_source import CallArguments, CallBegin, Content, NextMessage, OutputEvent

TEXT, THINKING, TOOL_USE = "text", "thinking", "tool_use"
DELTAS = {TEXT: ("text_delta", "text"), THINKING: ("thinking_delta", "thinking"), TOOL_USE: ("input_json_delta", "partial_json")}


class _Block:
    """A content block. id, name: id and name of a call."""

    def __init__(self, kind: str, name: str = "", call_id: str = ""):
        self.kind, self.name, self.id = kind, name, call_id
        self.texts: list[str] = []

    def begun(self) -> dict[str, Any]:
        """The block before its content."""
        if self.kind == TOOL_USE:
            return {"type": TOOL_USE, "id": self.id, "name": self.name, "input": {}}
        return {"type": TEXT, "text": ""} if self.kind == TEXT else {"type": THINKING, "thinking": "", "signature": ""}

    def table(self) -> dict[str, Any]:
        """The whole block. Arguments that are incomplete, or not an object, become text in an object."""
        text = "".join(self.texts)
        if self.kind != TOOL_USE:
            return {**self.begun(), DELTAS[self.kind][1]: text}
        try:
            given = orjson.loads(text or "{}")
        except orjson.JSONDecodeError:
            given = text
        return {**self.begun(), "input": given if type(given) is dict else as_object(text)}


class AnthropicAnswer:
    """The envelope of one answer with one choice; it has the interface of blinkpy.dpu.http.answers.Answer."""

    stop_sequence = ""  # the stop string that ended the answer, if any

    def __init__(self, request: Request, model: str):
        self.id = f"msg_{request.request_id or secrets.token_hex(12)}"
        self._request, self._model = request, model
        self._parser = None if request.expected is None else MessageParser(request.expected)
        self._blocks: list[_Block] = []
        self._joined = False  # whether the next text belongs to another message of the same answer
        self._begun = False
        self._stop_reason: str | None = None

    # ---- objects -----------------------------------------------------------------------------------------------------

    def _message(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [block.table() for block in self._blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self.stop_sequence or None,
            "usage": usage,
        }

    def _edits(self) -> dict[str, Any]:
        """The edits of the conversation, if the request has some."""
        if self._request.clearing is None:
            return {}
        done = self._request.cleared
        kind = "clear_tool_uses_20250919"
        edits = [{"type": kind, "cleared_tool_uses": done.calls, "cleared_input_tokens": done.tokens}] if done else []
        return {"context_management": {"applied_edits": edits}}

    def whole(self, choices: list[Choice], usage: Usage) -> Turns[bytes]:
        """The body of an answer that is not streamed."""
        yield
        (choice,) = choices
        self.event(choice.index, choice.text)
        self.last_event(choice.index, choice.finish_reason)
        return orjson.dumps({**self._message(_counts(usage)), **self._edits()})

    # ---- events ------------------------------------------------------------------------------------------------------

    def frame(self, index: int) -> None:
        """None: events depend on earlier text."""

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        """The events of more text; the first call also gives the events that begin the answer."""
        parts = (Content(text),) * bool(text) if self._parser is None else self._parser.feed(text)
        return self._begin() + self._events(parts)

    def last_event(self, index: int, finish_reason: str) -> bytes:
        """The events that end the last block."""
        rest = b"" if self._parser is None else self._events(self._parser.finish())
        if not self._blocks:
            rest += self._open(_Block(TEXT))
        cut = self._parser is not None and self._parser.cut
        called = any(block.kind == TOOL_USE for block in self._blocks)
        if finish_reason == LENGTH:
            self._stop_reason = "max_tokens"
        else:
            self._stop_reason = "stop_sequence" if self.stop_sequence else "tool_use" if called and not cut else "end_turn"
        return rest + self._close()

    def end(self, usage: Usage, with_usage: bool) -> bytes:
        """The events that end the stream, with the token counts."""
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self.stop_sequence or None}
        return _event("message_delta", {"delta": delta, "usage": _counts(usage), **self._edits()}) + _event("message_stop", {})

    def with_usage(self, events: bytes, usage: Usage) -> bytes:
        """The events unchanged: the token counts come at the end."""
        return events

    def error_event(self, error: ApiError) -> bytes:
        """The event of an error in a stream."""
        return b"event: error\ndata: %b\n\n" % anthropic_error(error)

    def _begin(self) -> bytes:
        if self._begun:
            return b""
        self._begun = True
        message = self._message(_counts(Usage(self._request.prompt_tokens, 0)))
        return _event("message_start", {"message": message}) + _event("ping", {})

    def _events(self, parts: Iterable[OutputEvent]) -> bytes:
        return b"".join([self._part(part) for part in parts])

    def _part(self, part: OutputEvent) -> bytes:
        if isinstance(part, CallBegin):
            expected = self._request.expected
            assert expected is not None  # a parser has found the call
            return self._open(_Block(TOOL_USE, part.name, expected.new_id()))
        if isinstance(part, NextMessage):
            self._joined = bool(self._blocks)
            return b""
        kind = TEXT if isinstance(part, Content) else TOOL_USE if isinstance(part, CallArguments) else THINKING
        if kind == THINKING and not self._request.include_reasoning:
            return b""
        continues = self._blocks and self._blocks[-1].kind == kind
        text = f"\n{part.text}" if continues and self._joined and kind != TOOL_USE else part.text
        self._joined = False
        begin = b"" if continues else self._open(_Block(kind))
        self._blocks[-1].texts.append(text)
        name, field = DELTAS[kind]
        return begin + self._of_block("content_block_delta", {"delta": {"type": name, field: text}})

    def _open(self, block: _Block) -> bytes:
        """Begin a block, and end the previous one."""
        ended = self._close() if self._blocks else b""
        self._blocks.append(block)
        return ended + self._of_block("content_block_start", {"content_block": block.begun()})

    def _close(self) -> bytes:
        return self._of_block("content_block_stop", {})

    def _of_block(self, kind: str, content: dict[str, Any]) -> bytes:
        return _event(kind, {"index": len(self._blocks) - 1, **content})


def _event(kind: str, content: dict[str, Any]) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), orjson.dumps({"type": kind, **content}))


def _counts(usage: Usage) -> dict[str, Any]:
    """Token counts. Prompt tokens found in the prefix cache are counted separately, as in Anthropic's API."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }
