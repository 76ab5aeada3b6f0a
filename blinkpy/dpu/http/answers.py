"""Answers in the formats of OpenAI's API: whole, and as server-sent events, built from constant bytes around the text."""

import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import orjson

from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.generation import (
    PromptScores,
    TokenLogprobs,
    TokenSpeller,
    chat_logprobs,
    completion_logprobs,
    prompt_logprobs,
)

DONE = b"data: [DONE]\n\n"
PIECE = 24  # tokens whose log probabilities, with 20 alternatives each, are written at a time: under 1 ms

Value = TypeVar("Value")
Turns = Generator[None, None, Value]
"""Work in turns of about a millisecond, with its result at the end."""


def at_once(turns: Turns[Value]) -> Value:
    """The result of work in turns, without pauses."""
    while True:
        try:
            next(turns)
        except StopIteration as end:
            result: Value = end.value
            return result


class Usage(NamedTuple):
    """Tokens of a request, over all of its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0  # of the prompt: found in the prefix cache
    reasoning_tokens: int = 0  # of the completion, including the tags of the reasoning
    drafted_tokens: int = 0  # of the completion: accepted drafts; with a prediction, accepted drafts from it
    rejected_tokens: int | None = None  # predicted tokens that did not become accepted drafts; None without a prediction

    def table(self) -> dict[str, Any]:
        """For /v1/chat/completions and /v1/completions."""
        drafted = {"accepted_prediction_tokens": self.drafted_tokens}
        if self.rejected_tokens is not None:
            drafted["rejected_prediction_tokens"] = self.rejected_tokens
        elif not self.drafted_tokens:
            drafted = {}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens, **drafted},
        }

    def response_table(self) -> dict[str, Any]:
        """For /v1/responses. Cache writes are free, so they are not counted."""
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }


@dataclass(frozen=True, slots=True)
class Choice:
    """A finished choice. finish_reason: stop or length. logprobs: log probabilities of an echoed prompt and of the output, if
    requested.
    """

    index: int
    text: str
    finish_reason: str
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_scores: PromptScores | None = None  # if the answer has them


def likeliest(choices: Sequence[Choice], generated: int, n: int) -> list[Choice]:
    """For each prompt, the n of its `generated` consecutive choices with the highest mean log probability, best first."""

    def mean(choice: Choice) -> float:
        return sum(entry.logprob or 0.0 for entry in choice.logprobs) / max(1, len(choice.logprobs))

    kept: list[Choice] = []
    for first in range(0, len(choices), generated):
        best = sorted(choices[first : first + generated], key=mean, reverse=True)[:n]
        kept += [replace(choice, index=len(kept) + i) for i, choice in enumerate(best)]
    return kept


class Answer:
    """The format of one request's answer.

    chat: /v1/chat/completions, otherwise /v1/completions.
    spell: needed for answers with log probabilities.
    request_id: the client's.
    service_tier: its name in the answer; None: omitted.
    null_usage: every event has a null `usage`, except the last event, which has the token counts.
    """

    stop_sequence = ""  # the stop string of the choice that ended last, if any

    def __init__(
        self,
        chat: bool,
        model: str,
        spell: TokenSpeller,
        request_id: str | None = None,
        service_tier: str | None = None,
        null_usage: bool = False,
    ):
        self.chat, self._spell = chat, spell
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{request_id or secrets.token_hex(12)}"
        self._model, self._created = model, int(time.time())
        self._tier = {} if service_tier is None else {"service_tier": service_tier}
        self._last_envelope = self._head("chat.completion.chunk" if chat else "text_completion")
        self._envelope = self._last_envelope + (b'"usage":null,' if null_usage else b"")
        self._heads: dict[int, bytes] = {}
        self._end = b'},"logprobs":%b,"finish_reason":null}]}\n\n' if chat else b',"logprobs":%b,"finish_reason":null}]}\n\n'
        self._plain_end = self._end % b"null"

    def _head(self, kind: str) -> bytes:
        head = orjson.dumps({"id": self.id, "object": kind, "created": self._created, "model": self._model, **self._tier})
        return head[:-1] + b","

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The log probabilities of a choice, or None without log probabilities."""
        if not entries:
            return None
        return chat_logprobs(entries, self._spell) if self.chat else completion_logprobs(entries, self._spell)

    def _all_logprobs(self, entries: Sequence[TokenLogprobs]) -> Turns[dict[str, Any] | orjson.Fragment | None]:
        """`_logprobs` as JSON, built piece by piece."""
        if len(entries) <= PIECE:
            return self._logprobs(entries)
        written: list[dict[str, bytes]] = []
        part: dict[str, Any] = {}
        for first in range(0, len(entries), PIECE):
            part = self._logprobs(entries[first : first + PIECE]) or {}
            written.append({name: orjson.dumps(value) for name, value in part.items()})
            yield
        fields = []
        for name, value in part.items():
            whole = b"[%b]" % b",".join(part[name][1:-1] for part in written) if type(value) is list else written[0][name]
            fields.append(b'"%b":%b' % (name.encode(), whole))
        return orjson.Fragment(b"{%b}" % b",".join(fields))

    def frame(self, index: int) -> tuple[bytes, bytes] | None:
        """The bytes before and after the JSON text in each later event of a choice without log probabilities.

        None before the first event, or if events have other fields that change.
        """
        head = self._heads.get(index)
        return None if head is None else (head, self._plain_end)

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        """An event with more text of a choice. The first event of a chat's choice also has the role."""
        head = self._heads.get(index)
        if head is None:
            head = b'data: %b"choices":[{"index":%d,' % (self._envelope, index)
            first = head + (b'"delta":{"role":"assistant","content":' if self.chat else b'"text":')
            self._heads[index] = head + (b'"delta":{"content":' if self.chat else b'"text":')
            head = first
        end = self._end % orjson.dumps(self._logprobs(logprobs)) if logprobs else self._plain_end
        return head + orjson.dumps(text) + end

    def last_event(self, index: int, finish_reason: str) -> bytes:
        """The event that ends a choice."""
        delta = b'"delta":{}' if self.chat else b'"text":""'
        choice = b'{"index":%d,%b,"logprobs":null,"finish_reason":"%b"}' % (index, delta, finish_reason.encode())
        return b'data: %b"choices":[%b]}\n\n' % (self._envelope, choice)

    def usage_event(self, usage: Usage) -> bytes:
        """The event with the token counts; it has no choices."""
        return b'data: %b"choices":[],"usage":%b}\n\n' % (self._last_envelope, orjson.dumps(usage.table()))

    def with_usage(self, events: bytes, usage: Usage) -> bytes:
        """Events, each with the token counts so far."""
        return events.replace(b"}\n\n", b',"usage":%b}\n\n' % orjson.dumps(usage.table()))

    def end(self, usage: Usage, with_usage: bool) -> bytes:
        """The end of a stream."""
        return (self.usage_event(usage) if with_usage else b"") + DONE

    def error_event(self, error: ApiError) -> bytes:
        """The error event, which ends a stream."""
        return b"data: %b\n\n" % error.body()

    def _entry(self, choice: Choice) -> Turns[dict[str, Any]]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        content = {"message": message} if self.chat else {"text": choice.text}
        logprobs = yield from self._all_logprobs(choice.logprobs)
        scores = {} if self.chat else (yield from self._prompt_logprobs(choice))
        return {"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason, **scores}

    def _prompt_logprobs(self, choice: Choice) -> Turns[dict[str, Any]]:
        """The field with the log probabilities of prompts, if requested, for a choice or for a whole chat."""
        scores = choice.prompt_scores
        if scores is None:
            return {}
        entries, written = scores.first(scores.shown), list[bytes]()
        for first in range(0, len(entries), PIECE):
            piece = slice(first, first + PIECE)
            written.append(orjson.dumps(prompt_logprobs(entries[piece], scores.ranks[piece], self._spell))[1:-1])
            yield
        return {"prompt_logprobs": orjson.Fragment(b"[%b]" % b",".join(written))}

    def whole(self, choices: list[Choice], usage: Usage) -> Turns[bytes]:
        """The body of an answer that is not streamed."""
        entries = []
        for choice in choices:
            entry = yield from self._entry(choice)
            entries.append(orjson.Fragment(orjson.dumps(entry)))
            yield
        head = self._head("chat.completion" if self.chat else "text_completion")
        scores = (yield from self._prompt_logprobs(choices[0])) if self.chat else {}
        return head + orjson.dumps({"choices": entries, "usage": usage.table(), **scores})[1:]
