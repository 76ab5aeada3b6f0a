"""Answers of /v1/responses: whole, and as the named events of OpenAI's API."""

import secrets
import time
from collections.abc import Sequence
from typing import Any

import orjson

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.answers import Choice, Usage
from blinkpy.dpu.http.fields.request_fields import Request
from blinkpy.dpu.token_logprobs import TokenLogprobs, TokenSpeller, chat_logprobs

TEXT_PLACE = {"output_index": 0, "content_index": 0}


class ResponseAnswer:
    """The envelope of one answer, with one choice. The interface is that of blinkpy.dpu.http.answers.Answer."""

    def __init__(self, request: Request, model: str, spell: TokenSpeller):
        unique = request.request_id or secrets.token_hex(12)
        self.id, self._message = f"resp_{unique}", f"msg_{unique}"
        self._request, self._model, self._created, self._spell = request, model, int(time.time()), spell
        self._texts: list[str] = []
        self._entries: list[TokenLogprobs] = []
        self._finish_reason: str | None = None
        self._events = 0
        place = orjson.dumps({"item_id": self._message, **TEXT_PLACE})[1:-1]
        kind = b"response.output_text.delta"
        self._delta = b'event: %b\ndata: {"type":"%b",%b,"sequence_number":' % (kind, kind, place)

    # ---- objects -----------------------------------------------------------------------------------------------------

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> list[dict[str, Any]]:
        return list(chat_logprobs(entries, self._spell)["content"])

    def _part(self, text: str, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(entries)}

    def _item(self, status: str, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"type": "message", "id": self._message, "status": status, "role": "assistant", "content": content}

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        request = self._request
        return {
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
            "parallel_tool_calls": False,
            "previous_response_id": None,
            "store": False,
            "temperature": request.parameters.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": "none",
            "tools": [],
            "top_logprobs": request.top_logprobs,
            "top_p": request.parameters.top_p,
            "truncation": "disabled",
            "usage": None if usage is None else usage.response_table(),
        }

    @staticmethod
    def _status(finish_reason: str | None) -> str:
        return "incomplete" if finish_reason == "length" else "completed"

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        (choice,) = choices
        status = self._status(choice.finish_reason)
        return orjson.dumps(self._response(status, [self._item(status, [self._part(choice.text, choice.logprobs)])], usage))

    # ---- events ------------------------------------------------------------------------------------------------------

    def _event(self, kind: str, **content: Any) -> bytes:
        body = orjson.dumps({"type": kind, **content, "sequence_number": self._events})
        self._events += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)

    def _begin(self) -> bytes:
        started = self._response("in_progress", [], None)
        place = {"item_id": self._message, **TEXT_PLACE}
        return b"".join(
            (
                self._event("response.created", response=started),
                self._event("response.in_progress", response=started),
                self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
                self._event("response.content_part.added", **place, part=self._part("", ())),
            )
        )

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        """The event of more text; before the first one those that begin the answer."""
        begin = b"" if self._events else self._begin()
        self._texts.append(text)
        self._entries += logprobs
        entries = orjson.dumps(self._logprobs(logprobs)) if logprobs else b"[]"
        number, self._events = self._events, self._events + 1
        return b'%b%b%d,"delta":%b,"logprobs":%b}\n\n' % (begin, self._delta, number, orjson.dumps(text), entries)

    def last_event(self, index: int, finish_reason: str) -> bytes:
        """The events that end the text."""
        self._finish_reason = finish_reason
        text, status = "".join(self._texts), self._status(finish_reason)
        part, place = self._part(text, self._entries), {"item_id": self._message, **TEXT_PLACE}
        return b"".join(
            (
                self._event("response.output_text.done", **place, text=text, logprobs=part["logprobs"]),
                self._event("response.content_part.done", **place, part=part),
                self._event("response.output_item.done", output_index=0, item=self._item(status, [part])),
            )
        )

    def end(self, usage: Usage, with_usage: bool) -> bytes:
        """The event that ends the stream; it always has the token counts."""
        status = self._status(self._finish_reason)
        item = self._item(status, [self._part("".join(self._texts), self._entries)])
        return self._event(f"response.{status}", response=self._response(status, [item], usage))

    def with_usage(self, event: bytes, usage: Usage) -> bytes:
        """The event as it is: counts come at the end."""
        return event

    def error_event(self, error: ApiError) -> bytes:
        """The event of an error in a stream."""
        described = orjson.loads(error.body())["error"]
        return self._event("error", code=described["code"], message=described["message"], param=described["param"])
