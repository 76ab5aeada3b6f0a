"""One choice on its way: completions go in, text comes out, until it ends for one of many reasons."""

from __future__ import annotations

from typing import Protocol

from blinkpy.dpu.api_errors import ApiError, bad_request, unavailable
from blinkpy.dpu.link.queue_pair import InFlightRequest
from blinkpy.dpu.text.detokenizer import Detokenizer
from blinkpy.dpu.text.stop_strings import StopStrings
from blinkpy.dpu.token_logprobs import TokenLogprobs, token_logprobs
from blinkpy.queues.completion import (
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_MASK,
    FINISH_REJECTED,
    FINISH_STOP,
    HAS_LOGPROBS,
    HAS_TOKEN,
    REJECT_LENGTH,
    REJECT_PAGES,
    REJECT_PARAMETER,
    REJECT_PROMPT,
    REJECT_TOKEN,
)

STOP, LENGTH = "stop", "length"


def rejection(reason: int) -> ApiError:
    """The error for a request that the engine refused; what the front end should have seen itself is a server error."""
    if reason == REJECT_LENGTH:
        return bad_request("The request goes beyond the model's context length.", "max_tokens", "context_length_exceeded")
    if reason == REJECT_PAGES:
        return bad_request("The request can never fit into the KV cache.", "max_tokens", "context_length_exceeded")
    if reason == REJECT_TOKEN:
        return bad_request("The prompt has a token id outside the vocabulary.", "prompt", "invalid_value")
    if reason == REJECT_PROMPT:
        return bad_request("The engine does not accept this prompt.", "prompt", "invalid_value")
    if reason == REJECT_PARAMETER:
        return bad_request("The engine does not accept a sampling parameter of this request.", None, "invalid_value")
    return ApiError(500, f"The engine refused the request (reason {reason}).", code="engine_rejected")


class Sink(Protocol):
    """Where a choice's text goes. Both are called from the event loop's thread, and must not block or raise."""

    def on_text(self, generation: Generation, text: str, logprobs: list[TokenLogprobs]) -> None:
        """More text; it may be empty for the first token. logprobs: of the tokens since the last call, if asked for."""

    def ended(self, generation: Generation) -> None:
        """No more text follows. finish_reason or error says why."""


class Generation:
    """State of one choice. It is the `owner` of its request in the queue pair.

    prompt_length, tokens: prompt and generated tokens. arrival: when the HTTP request came, s of the monotonic clock.
    top_logprobs: of how many of the most likely tokens the request wants log probabilities; -1: of none, nor of its own.
    """

    __slots__ = (
        "_characters",
        "_logprobs",
        "_sink",
        "_text",
        "arrival",
        "detokenizer",
        "error",
        "finish_reason",
        "index",
        "last_event",
        "open",
        "prompt_length",
        "request",
        "stops",
        "tokens",
        "top_logprobs",
        "touched",
    )

    def __init__(
        self,
        index: int,
        prompt_length: int,
        detokenizer: Detokenizer,
        stops: tuple[str, ...],
        arrival: float,
        sink: Sink,
        top_logprobs: int = -1,
    ):
        self.index, self.prompt_length, self.arrival = index, prompt_length, arrival
        self.detokenizer = detokenizer
        self.stops = StopStrings(stops) if stops else None
        self.request: InFlightRequest | None = None
        self.tokens = 0
        self.finish_reason: str | None = None
        self.error: ApiError | None = None
        self.open = True  # until the sink was told the end
        self.touched = False  # in the list of those to flush
        self.last_event = 0.0
        self._sink = sink
        self._text = ""
        self.top_logprobs = top_logprobs
        self._logprobs: list[TokenLogprobs] = []
        self._characters = 0  # of the output, for those who want log probabilities

    def push(self, token: int, flags: int) -> bool:
        """Take a completion. Returns True when the engine should be told to stop: a stop string was met."""
        finish = flags & FINISH_MASK
        if flags & HAS_TOKEN:
            self.tokens += 1
            if flags & HAS_LOGPROBS:
                self._take_logprobs()
            if finish != FINISH_STOP:  # the token that ends a text is no part of it
                text = self.detokenizer.push(token)
                self._characters += len(text)
                stops = self.stops
                if stops is not None and text:
                    text = stops.push(text)
                    if stops.stopped:
                        self._text += text
                        self.finish_reason = STOP
                        return not finish
                self._text += text
        if not finish:
            return False
        if finish in (FINISH_STOP, FINISH_LENGTH):
            self.finish_reason = STOP if finish == FINISH_STOP else LENGTH
            if self.stops is not None:
                self._text += self.stops.finish()
        elif finish == FINISH_REJECTED:
            self.error = rejection(token)
        elif finish == FINISH_CANCELLED:
            self.error = unavailable("The engine cancelled the request.")
        else:
            known = "The engine could not go on with this request." if finish == FINISH_ERROR else f"Unknown end {finish}."
            self.error = ApiError(500, known, code="engine_error")
        return False

    def _take_logprobs(self) -> None:
        if self.request is not None and self.top_logprobs >= 0:
            self._logprobs.append(token_logprobs(self.request.records.popleft(), self.top_logprobs, self._characters))

    def flush(self) -> None:
        """Hand the sink what has come since the last time."""
        if not self.open:
            return
        text, self._text = self._text, ""
        logprobs, self._logprobs = self._logprobs, []
        if text or logprobs or not self.last_event:
            self._sink.on_text(self, text, logprobs)
        if self.finish_reason is not None or self.error is not None:
            self.open = False
            self._sink.ended(self)

    def fail(self, error: ApiError) -> None:
        """End with an error, unless it ended already."""
        if self.open:
            self.error, self.finish_reason = error, None
            self.open = False
            self._sink.ended(self)
