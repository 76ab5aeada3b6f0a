"""Random requests with known answers."""

import json
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jsonschema import Draft202012Validator

from soak.expected_text import CUT, ExpectedText

WORDS = ("fog", "the ship", "a king", "snow", "It was a dark night", "rain on the roof", "tea", "two")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["name", "count"],
    "additionalProperties": False,
}
KINDS = {"completion": 0.3, "chat": 0.25, "choices": 0.15, "choice": 0.1, "schema": 0.1, "scores": 0.1}


@dataclass
class Answer:
    """The parts of an answer, by choice. whole: it has arrived completely."""

    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    prompt_tokens: int = 0
    scores: int = 0  # of prompt and answer, if requested
    whole: bool = False

    def take(self, event: dict[str, Any]) -> None:
        """Add an event of a stream, or a whole answer."""
        for choice in event.get("choices", ()):
            message = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            index = choice["index"]
            self.texts[index] = self.texts.get(index, "") + (message.get("content") or "")
            if choice.get("finish_reason"):
                self.ends[index] = choice["finish_reason"]
            if choice.get("logprobs"):
                self.scores += len(choice["logprobs"]["token_logprobs"])
        self.prompt_tokens = (event.get("usage") or {}).get("prompt_tokens", self.prompt_tokens)


@dataclass(frozen=True)
class SoakRequest:
    """A request of the pool.

    prompt: its tokens, empty if the server tokenizes a text. stream: whether it may be cancelled after some events.
    """

    kind: str
    path: str
    body: dict[str, Any]
    prompt: tuple[int, ...]
    options: tuple[str, ...] = ()

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


def draw(rng: np.random.Generator, vocabulary: int) -> SoakRequest:
    """A random request."""
    kind = str(rng.choice(list(KINDS), p=list(KINDS.values())))
    prompt = tuple(int(token) for token in rng.integers(vocabulary // 16, vocabulary, int(rng.integers(1, 200))))
    body: dict[str, Any] = {"model": "demo", "seed": int(rng.integers(0, 2**31)), "max_tokens": int(rng.integers(1, 100))}
    options: tuple[str, ...] = ()
    chat = kind == "chat" or (kind in ("choice", "schema") and rng.random() < 0.5)
    if kind == "choices":
        body["n"] = int(rng.integers(2, 5))
    elif kind == "choice":
        options = tuple(str(word) for word in rng.choice(WORDS, 4, replace=False))
        body |= {"max_tokens": 60, "structured_outputs": {"choice": list(options)}}
    elif kind == "schema":
        named = {"name": "answer", "schema": SCHEMA, "strict": True}
        body |= {"max_tokens": 100, "response_format": {"type": "json_schema", "json_schema": named}}
    elif kind == "scores":
        body |= {"max_tokens": int(rng.integers(1, 9)), "echo": True, "logprobs": 1}
    if rng.random() < 0.6 and kind != "scores":
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if kind not in ("choice", "schema"):
        body["ignore_eos"] = True
    if chat:
        said = " ".join(rng.choice(WORDS, int(rng.integers(1, 60))))
        return SoakRequest(kind, "/v1/chat/completions", body | {"messages": [{"role": "user", "content": said}]}, (), options)
    return SoakRequest(kind, "/v1/completions", body | {"prompt": list(prompt)}, prompt, options)


class Judge:
    """Compares answers with the expected ones.

    A text that depends on a schema is compared with the first whole answer, and checked by an independent validator.
    pool: all requests.
    """

    def __init__(self, pool: list[SoakRequest]):
        self._pool, self._text = pool, ExpectedText()
        self._known: dict[int, list[str]] = {}
        self._lengths: dict[int, int] = {}
        self._validator = Draft202012Validator(SCHEMA)

    def fault(self, number: int, answer: Answer) -> str:
        """The fault of an answer, or of the beginning of one; "" if it is correct."""
        request = self._pool[number]
        length = len(request.prompt) or answer.prompt_tokens or self._lengths.get(number, 0)
        if not length:  # the answer is incomplete, and the tokens of its text are not yet known
            return ""
        if answer.prompt_tokens and self._lengths.setdefault(number, length) != answer.prompt_tokens:
            return f"{answer.prompt_tokens} prompt tokens, not {self._lengths[number]}"
        expected = self._known.get(number) or self._expected(request, length)
        if answer.whole and not expected:
            expected = [answer.texts[0]]
            if answer.ends[0] == "stop" and not self._validator.is_valid(json.loads(answer.texts[0])):
                return f"not valid: {answer.texts[0]!r}"
        if not answer.whole:
            wrong = [i for i, text in answer.texts.items() if expected and not expected[i].startswith(text.rstrip(CUT))]
            return f"choice {wrong[0]} does not begin as it must: {answer.texts[wrong[0]]!r}" if wrong else ""
        self._known[number] = expected
        texts = [answer.texts.get(i, "").rstrip(CUT) for i in range(len(expected))]
        if texts != expected or len(answer.texts) != len(expected) or set(answer.ends) != set(range(len(expected))):
            return f"{texts!r} ({answer.ends}) in place of {expected!r}"
        scores = len(request.prompt) + request.body["max_tokens"] if request.kind == "scores" else 0
        return "" if answer.scores == scores else f"{answer.scores} scores in place of {scores}"

    def _expected(self, request: SoakRequest, length: int) -> list[str]:
        seed, count = request.body["seed"], request.body["max_tokens"]
        if request.kind == "schema":
            return []
        if request.kind == "choice":
            return [self._text.chosen(seed, length, request.options)]
        before = self._text.decode(list(request.prompt)) if request.kind == "scores" else ""
        return [before + self._text.free(seed + i, length, count) for i in range(request.body.get("n", 1))]
