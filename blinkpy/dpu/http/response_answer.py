"""Answers of /v1/responses: whole, and as the named events of OpenAI's API."""

import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import orjson

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import TokenLogprobs, TokenSpeller, chat_logprobs
from blinkpy.dpu.http.answers import PIECE, Choice, Turns, Usage
from blinkpy.dpu.http.fields.grammar_fields import TEXT
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.tool_fields import Tool
from blinkpy.dpu.tools.message_parser import MessageParser
from blinkpy.dpu.tools.output_source import CallArguments, CallBegin, Content, NextMessage, OutputEvent

# The output items of /v1/responses: messages, reasoning and calls, each with the events that begin, fill and end it.

MESSAGE, REASONING, CALL, CUSTOM = "message", "reasoning", "function_call", "custom_tool_call"
CALLS = {CALL: "arguments", CUSTOM: "input"}  # the field with the text
DELTAS = {
    MESSAGE: "response.output_text.delta",
    REASONING: "response.reasoning_text.delta",
    CALL: "response.function_call_arguments.delta",
    CUSTOM: "response.custom_tool_call_input.delta",
}
Event = tuple[str, dict[str, Any]]  # its type and its content


@dataclass
class Item:
    """One item. index: its place in the output. name, call_id, namespace: of calls only. logprobs: of messages only."""

    kind: str
    id: str
    index: int
    name: str = ""
    call_id: str = ""
    namespace: str = ""
    status: str = "in_progress"
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        """The common fields of its events."""
        where = {"item_id": self.id, "output_index": self.index}
        return where if self.kind in CALLS else {**where, "content_index": 0}

    def _part(self, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self.kind == REASONING:
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}

    def table(self) -> dict[str, Any]:
        """The item as it is now; an item in progress has no text."""
        text = "" if self.status == "in_progress" else "".join(self.texts)
        head = {"type": self.kind, "id": self.id, "status": self.status}
        if self.kind in CALLS:
            inside = {"namespace": self.namespace} if self.namespace else {}
            return {**head, "call_id": self.call_id, **inside, "name": self.name, CALLS[self.kind]: text}
        parts = [] if self.status == "in_progress" else [self._part(text, self.logprobs)]
        return (
            {**head, "summary": [], "content": parts}
            if self.kind == REASONING
            else {**head, "role": "assistant", "content": parts}
        )

    def begin(self) -> list[Event]:
        added: Event = ("response.output_item.added", {"output_index": self.index, "item": self.table()})
        if self.kind in CALLS:
            return [added]
        return [added, ("response.content_part.added", {**self.place, "part": self._part("", ())})]

    def end(self, status: str) -> list[Event]:
        """No more text follows."""
        self.status, text = status, "".join(self.texts)
        done: Event = ("response.output_item.done", {"output_index": self.index, "item": self.table()})
        whole = DELTAS[self.kind].replace(".delta", ".done")
        if self.kind == CALL:
            return [(whole, {**self.place, "name": self.name, "arguments": text}), done]
        if self.kind == CUSTOM:
            return [(whole, {**self.place, "input": text}), done]
        texts = {"text": text} if self.kind == REASONING else {"text": text, "logprobs": self.logprobs}
        return [
            (whole, {**self.place, **texts}),
            ("response.content_part.done", {**self.place, "part": self._part(text, self.logprobs)}),
            done,
        ]


PREFIXES = {MESSAGE: "msg", REASONING: "rs", CALL: "fc", CUSTOM: "ctc"}  # of ids


class ResponseAnswer:
    """The envelope of one answer with one choice; it has the interface of blinkpy.dpu.http.answers.Answer."""

    stop_sequence = ""

    def __init__(self, request: Request, model: str, spell: TokenSpeller):
        self._unique = request.request_id or secrets.token_hex(12)
        self.id = f"resp_{self._unique}"
        self._request, self._model, self._created, self._spell = request, model, int(time.time()), spell
        self._parser = None if request.expected is None else MessageParser(request.expected)
        self._in_namespaces = {tool.name: tool for tool in request.tools if tool.namespace is not None}
        self._items: list[Item] = []
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is held back
        self._delta = b""  # of the open item, up to its sequence number
        self._finish_reason: str | None = None
        self._next_message = False  # the following text does not belong to the previous item
        self._events = 0

    # ---- objects -----------------------------------------------------------------------------------------------------

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        request = self._request
        output = [] if usage is None else [item.table() for item in self._items]
        response = {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_tokens,
            "metadata": request.metadata or {},
            "model": self._model,
            "output": output,
            "parallel_tool_calls": request.parallel_tool_calls,
            "previous_response_id": request.previous_response_id,
            "reasoning": {"effort": request.reasoning_effort, "summary": None},
            "service_tier": request.service_tier,
            "store": request.keep is not None,
            "temperature": request.parameters.temperature,
            "text": {"format": TEXT if request.text_format is None else request.text_format.given},
            "tool_choice": _choice(request),
            "tools": _tools(request.tools),
            "top_logprobs": request.top_logprobs,
            "top_p": request.parameters.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage.response_table(),
        }
        if usage is not None and request.keep is not None:  # before the client knows that the response has ended
            request.keep(response)
        return response

    def _status(self) -> str:
        return "incomplete" if self._finish_reason == "length" else "completed"

    def whole(self, choices: list[Choice], usage: Usage) -> Turns[bytes]:
        """The body of an answer that is not streamed."""
        (choice,) = choices
        entries = choice.logprobs
        for first in range(0, len(entries) - PIECE, PIECE):
            self.event(choice.index, "", entries[first : first + PIECE])
            yield
        self.event(choice.index, choice.text, entries[max(0, len(entries) - 1) // PIECE * PIECE :])
        self.last_event(choice.index, choice.finish_reason)
        return orjson.dumps(self._response(self._status(), usage))

    # ---- events ------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, content: dict[str, Any]) -> bytes:
        body = orjson.dumps({"type": kind, **content, "sequence_number": self._events})
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)

    def _all(self, events: Iterable[Event]) -> bytes:
        return b"".join(self._event(*event) for event in events)

    def _begin(self) -> bytes:
        started = {"response": self._response("in_progress", None)}
        return self._all((("response.created", started), ("response.in_progress", started)))

    def frame(self, index: int) -> None:
        """None: events are numbered."""

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        """The events of more text; the first call also gives the events that begin the answer. Only messages show logprobs."""
        begin = b"" if self._events else self._begin()
        if logprobs:
            self._logprobs += chat_logprobs(logprobs, self._spell)["content"]
        parts = (Content(text),) if self._parser is None else self._parser.feed(text)
        events = begin + b"".join([self._part(part) for part in parts])
        if parts and not isinstance(parts[-1], Content):
            self._logprobs.clear()
        return events

    def _part(self, part: OutputEvent) -> bytes:
        if isinstance(part, CallBegin):
            return self._open(CUSTOM if part.custom else CALL, part.name)
        if isinstance(part, NextMessage):
            self._next_message = True
            return b""
        kind = MESSAGE if isinstance(part, Content) else REASONING
        if isinstance(part, CallArguments):
            kind = self._items[-1].kind
        continues = self._items and self._items[-1].kind == kind and not self._next_message
        begin = b"" if continues else self._open(kind)
        item = self._items[-1]
        item.texts.append(part.text)
        number, self._events = self._events, self._events + 1
        delta = b'%b%b%d,"delta":%b' % (begin, self._delta, number, orjson.dumps(part.text))
        if kind != MESSAGE:
            return delta + b"}\n\n"
        shown = orjson.dumps(self._logprobs) if self._logprobs else b"[]"
        item.logprobs += self._logprobs
        self._logprobs.clear()
        return b'%b,"logprobs":%b}\n\n' % (delta, shown)

    def _open(self, kind: str, name: str = "") -> bytes:
        """Begin an item, and end the previous one."""
        self._next_message = False
        ended = self._all(self._items[-1].end("completed")) if self._items else b""
        expected, index = self._request.expected, len(self._items)
        call_id = expected.new_id() if expected is not None and kind in CALLS else ""
        item = Item(kind, f"{PREFIXES[kind]}_{self._unique}{f'_{index}' * (index > 0)}", index, name, call_id)
        tool = self._in_namespaces.get(name)
        if tool is not None and tool.namespace is not None:
            item.name, item.namespace = tool.own_name, tool.namespace.name
        self._items.append(item)
        event = DELTAS[kind].encode()
        self._delta = b'event: %b\ndata: {"type":"%b",%b,"sequence_number":' % (event, event, orjson.dumps(item.place)[1:-1])
        return ended + self._all(item.begin())

    def last_event(self, index: int, finish_reason: str) -> bytes:
        """The events that end the last item; an answer without items has an empty message."""
        self._finish_reason = finish_reason
        rest = [] if self._parser is None else self._parser.finish()
        events = [self._part(part) for part in rest]
        if not self._items:
            events.append(self._open(MESSAGE))
        if self._logprobs and self._items[-1].kind == MESSAGE:
            events.append(self._part(Content("")))
        cut = self._parser is not None and self._parser.cut
        return b"".join(events) + self._all(self._items[-1].end("incomplete" if cut else self._status()))

    def end(self, usage: Usage, with_usage: bool) -> bytes:
        """The event that ends the stream; it always has the token counts."""
        status = self._status()
        return self._event(f"response.{status}", {"response": self._response(status, usage)})

    def with_usage(self, events: bytes, usage: Usage) -> bytes:
        """The events unchanged: the token counts come at the end."""
        return events

    def error_event(self, error: ApiError) -> bytes:
        """The event of an error in a stream."""
        described = orjson.loads(error.body())["error"]
        return self._event("error", {key: described[key] for key in ("code", "message", "param")})


def _choice(request: Request) -> Any:
    """The choice of tools, as in the request."""
    choice = request.tool_choice
    if choice is None:
        return "auto" if request.tools else "none"
    named = [{"type": "custom" if name in choice.custom else "function", "name": name} for name in choice.names]
    if choice.allowed is not None:
        return {"type": "allowed_tools", "mode": choice.mode, "tools": named}
    return choice.mode if choice.name is None else named[0]


def _tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """The tools, as in the request."""
    shown: list[dict[str, Any]] = []
    for namespace, together in groupby(tools, lambda tool: tool.namespace):
        functions = [_tool(tool) for tool in together]
        shown += functions if namespace is None else [{"type": "namespace", **namespace._asdict(), "tools": functions}]
    return shown


def _tool(tool: Tool) -> dict[str, Any]:
    """A tool, as in the request."""
    given = tool.described["function"]
    if tool.format is not None:
        return {"type": "custom", "name": tool.own_name, "description": given.get("description"), "format": tool.format}
    return {
        "type": "function",
        "name": tool.own_name,
        "description": given.get("description"),
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
