"""Answers in the shapes of OpenAI's API: whole, and as server-sent events made of prebuilt bytes around the text."""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import orjson

from blinkpy.dpu.token_logprobs import TokenLogprobs, TokenSpeller, chat_logprobs, completion_logprobs

DONE = b"data: [DONE]\n\n"


class Usage(NamedTuple):
    """Tokens of a request, over all of its choices."""

    prompt_tokens: int
    completion_tokens: int

    def table(self) -> dict[str, int]:
        return self._asdict() | {"total_tokens": sum(self)}


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished choice. finish_reason: stop or length. logprobs: of all its tokens, if asked for."""

    index: int
    text: str
    finish_reason: str
    logprobs: Sequence[TokenLogprobs] = ()


def likeliest(choices: Sequence[Choice], generated: int, n: int) -> list[Choice]:
    """Of each prompt's `generated` choices, which follow each other, the n with the highest mean log probability, best first."""

    def mean(choice: Choice) -> float:
        return sum(entry.logprob for entry in choice.logprobs) / max(1, len(choice.logprobs))

    kept: list[Choice] = []
    for first in range(0, len(choices), generated):
        best = sorted(choices[first : first + generated], key=mean, reverse=True)[:n]
        kept += [replace(choice, index=len(kept) + i) for i, choice in enumerate(best)]
    return kept


class Answer:
    """The envelope of one request's answer. chat: of /v1/chat/completions, otherwise of /v1/completions. spell: needed for
    answers with log probabilities."""

    def __init__(self, chat: bool, model: str, spell: TokenSpeller):
        self.chat, self._spell = chat, spell
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._model, self._created = model, int(time.time())
        self._envelope = self._head("chat.completion.chunk" if chat else "text_completion")
        self._heads: dict[int, bytes] = {}
        self._end = b'},"logprobs":%b,"finish_reason":null}]}\n\n' if chat else b',"logprobs":%b,"finish_reason":null}]}\n\n'
        self._plain_end = self._end % b"null"

    def _head(self, kind: str) -> bytes:
        head = orjson.dumps({"id": self.id, "object": kind, "created": self._created, "model": self._model})
        return head[:-1] + b","

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        """The object of a choice, or None when there are none."""
        if not entries:
            return None
        return chat_logprobs(entries, self._spell) if self.chat else completion_logprobs(entries, self._spell)

    def event(self, index: int, text: str, logprobs: Sequence[TokenLogprobs] = ()) -> bytes:
        """An event with more text of a choice. The first one of a chat's choice names the role as well."""
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
        return b'data: %b"choices":[],"usage":%b}\n\n' % (self._envelope, orjson.dumps(usage.table()))

    def whole(self, choices: list[Choice], usage: Usage) -> bytes:
        """The body of an answer that is not streamed."""
        entries = []
        for choice in choices:
            content = {"message": {"role": "assistant", "content": choice.text}} if self.chat else {"text": choice.text}
            logprobs = self._logprobs(choice.logprobs)
            entries.append({"index": choice.index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason})
        head = self._head("chat.completion" if self.chat else "text_completion")
        return head + orjson.dumps({"choices": entries, "usage": usage.table()})[1:]
