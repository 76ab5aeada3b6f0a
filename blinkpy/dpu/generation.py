"""One choice of a request: it takes completions and emits text until it ends."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Protocol

from blinkpy.dpu.api_errors import ApiError, bad_request, unavailable
from blinkpy.dpu.link.queue_pair import InFlightRequest
from blinkpy.dpu.text.detokenizer import Detokenizer
from blinkpy.dpu.text.stop_strings import StopStrings
from blinkpy.dpu.token_logprobs import PromptScores, TokenLogprobs, token_logprobs
from blinkpy.dpu.tools.message_parser import ReasoningCounter
from blinkpy.queues import words as completion
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import FINISH_MASK, FINISH_STOP, HAS_LOGPROBS, HAS_TOKEN, Int32

STOP, LENGTH = "stop", "length"
MAX_CHOICES = 128  # of one prompt
# Message, parameter and code. Other reasons are server errors, because the front end should have checked
# them.
REJECTIONS = {
    completion.REJECT_LENGTH: ("The request goes beyond the model's context length.", "max_tokens", "context_length_exceeded"),
    completion.REJECT_PAGES: ("The request can never fit into the KV cache.", "max_tokens", "context_length_exceeded"),
    completion.REJECT_TOKEN: ("The prompt has a token id outside the vocabulary.", "prompt", "invalid_value"),
    completion.REJECT_PROMPT: ("The engine does not accept this prompt.", "prompt", "invalid_value"),
    completion.REJECT_PARAMETER: ("The engine does not accept a parameter of this request.", None, "invalid_value"),
}
NO_TOKEN_LEFT = "allowed_token_ids, bad_words, stop_token_ids, min_tokens and the grammar together leave no token."


def excluding(rules: TokenRules | None, grammar: ByteAutomaton | None, stop_ids: Sequence[int]) -> str:
    """The request's parameter that may exclude every token, or "".

    stop_ids: from the request; a grammar allows them only at its end.
    """
    if rules is not None and (rules.allowed is not None or rules.banned):
        return "bad_words" if rules.allowed is None else "allowed_token_ids"
    return "stop_token_ids" if grammar is not None and stop_ids else ""


def failure(finish: int, reason: int, excluding: str = "") -> ApiError:
    """The error for a request that the engine ended.

    finish: FINISH_*.
    reason: REJECT_* of a refused request.
    excluding: the parameter that may exclude every token; if it does, only the engine notices, and the
        request is faulty.
    """
    if finish == completion.FINISH_ERROR and excluding:
        return bad_request(NO_TOKEN_LEFT, excluding, "no_token_left")
    if finish == completion.FINISH_REJECTED and reason in REJECTIONS:
        return bad_request(*REJECTIONS[reason])
    if finish == completion.FINISH_REJECTED:
        return ApiError(500, f"The engine refused the request (reason {reason}).", code="engine_rejected")
    if finish == completion.FINISH_CANCELLED:
        return unavailable("The engine cancelled the request.")
    known = finish == completion.FINISH_ERROR
    message = "The engine failed to continue this request." if known else f"The engine reported an unknown finish code {finish}."
    return ApiError(500, message, code="engine_error")


class Sink(Protocol):
    """Receives a choice's text. The event loop's thread calls the methods, which must not block or raise."""

    def on_text(self, generation: "Generation", text: str, logprobs: list[TokenLogprobs]) -> None:
        """Take more text, which may be empty for the first token. logprobs: of the tokens since the last
        call, if requested.
        """

    def ended(self, generation: "Generation") -> None:
        """Take the end of the text. generation.finish_reason or generation.error states the reason."""

    def send(self) -> None:
        """Send the pending output. Called after on_text and ended, when all choices have received their
        tokens of a step.
        """


class PlainPath(Protocol):
    """A shortcut for the tokens of a choice that is_plain, without `push` and `flush`."""

    def push(self, token: int) -> None:
        """Take a token, whose text the sink's next send() sends."""


@dataclass(slots=True, eq=False)
class Flight:
    """The data that another engine needs to continue a generation, if there are several engines."""

    prompt: Int32  # [n], from the client
    sampling: RequestParameters  # with a seed
    grammar: ByteAutomaton | None = None
    output: list[int] = field(default_factory=list)  # all generated tokens
    engine: int = -1  # index of its engine; -1: no engine
    cost: int = 0  # its outstanding tokens in the engine
    scores_due: int = 0  # completions that precede its output
    moves: int = 0  # number of moves to other engines
    paused_s: float = 0.0  # total time between engines
    paused_at: float = 0.0  # start of the current pause, s of the monotonic clock


@dataclass(slots=True, eq=False)
class Generation:
    """State of one choice. It is the `owner` of its request in the queue pair."""

    index: int
    prompt_length: int  # tokens
    detokenizer: Detokenizer
    stops: InitVar[tuple[str, ...]]
    arrival: float  # of the HTTP request, s of the monotonic clock
    sink: Sink
    top_logprobs: int = -1  # requested number of most likely tokens with log probabilities; -1: no log probabilities
    leader: "Generation | None" = None  # of the same prompt: after its first token, the prompt's pages are cached
    grammar: ByteAutomaton | None = None  # restricts its text
    rules: TokenRules | None = None
    reasoning: ReasoningCounter | None = None  # for usage, if its text may contain reasoning
    scores: PromptScores | None = None  # of its prompt, shared by the prompt's choices
    scoring: bool = False  # completions before its first token are the prompt's scores
    echo: str | None = None  # the prompt's text, sent before the output
    echo_only: bool = False  # end before the first token, although the engine generates one
    request: InFlightRequest | None = None
    flight: Flight | None = None  # set if there are several engines
    tokens: int = 0  # generated
    waited: float = 0.0  # for a slot, s
    submitted: float = 0.0  # time of submission to the engine, s; 0 before
    first_event: float = 0.0  # time of the first text, s; 0 before
    finish_reason: str | None = None
    error: ApiError | None = None
    open: bool = True  # until sink.ended was called
    touched: bool = False  # listed for a flush
    last_event: float = 0.0  # time of the last text, s
    include_stop: bool = False  # the text includes the stop string or stop token
    excluding: str = ""  # the parameter that may exclude every token
    min_tokens: int = 0  # minimum before a stop string counts; the engine checks stop ids
    plain: PlainPath | None = None  # takes tokens that neither end the choice nor bring more than text
    _stops: StopStrings | None = None
    _text: str = ""
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _characters: int = 0  # of the output, for requests with log probabilities

    def __post_init__(self, stops: tuple[str, ...]) -> None:
        self._stops = StopStrings(stops, self.include_stop) if stops else None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache; 0 before the first completion."""
        if self.request is None:
            return 0
        cached = self.request.cached_tokens
        return (
            cached if self.flight is None else min(cached, self.prompt_length)
        )  # after a move, the engine's prompt includes output

    @property
    def is_plain(self) -> bool:
        """Whether its further text is only that of its tokens."""
        has_more = self.scoring or self.echo_only or self.top_logprobs >= 0
        return not has_more and self.echo is None and self._stops is None and self.reasoning is None

    def push_score(self) -> None:
        """Take a completion of the prompt."""
        if self.scores is not None and self.request is not None:
            self.scores.push(self.request.records.popleft())
            self.scoring = not self.scores.complete

    def push(self, token: int, flags: int) -> bool:
        """Take a completion. Returns True if the engine should cancel the request, because of a stop
        string.
        """
        finish = flags & FINISH_MASK
        if self.echo is not None and flags & HAS_TOKEN:
            self._text, self._characters, self.echo = self.echo, len(self.echo), None
            if self.scores is not None and self.top_logprobs >= 0:
                self._logprobs += self.scores.first(self.top_logprobs)
        if self.echo_only and flags & HAS_TOKEN:
            self.finish_reason = LENGTH
            return not finish
        if flags & HAS_TOKEN:
            self.tokens += 1
            if flags & HAS_LOGPROBS and self.request is not None:
                record = self.request.records.popleft()
                if self.top_logprobs >= 0:
                    self._logprobs.append(token_logprobs(record, self.top_logprobs, self._characters))
            if finish != FINISH_STOP or self.include_stop:
                text = self.detokenizer.push(token)
                self._characters += len(text)
                if self.reasoning is not None:
                    self.reasoning.push(text)
                stops = self._stops
                if stops is not None and text:
                    text = stops.push(text, self.tokens > self.min_tokens)
                    if stops.stopped:
                        self._text += text
                        self.finish_reason = STOP
                        return not finish
                self._text += text
        if not finish:
            return False
        if finish in (FINISH_STOP, completion.FINISH_LENGTH, completion.FINISH_COMPLETE):
            self.finish_reason = LENGTH if finish == completion.FINISH_LENGTH else STOP
            if self._stops is not None:
                self._text += self._stops.finish()
        else:
            self.error = failure(finish, token, self.excluding)
        return False

    @property
    def stop_text(self) -> str:
        """The stop string that ended it, "" if none did."""
        return "" if self._stops is None else self._stops.found

    def flush(self) -> None:
        """Pass pending output to the sink."""
        if not self.open:
            return
        text, logprobs = self._text, self._logprobs
        if text or logprobs or not self.last_event:
            self._text = ""
            if logprobs:
                self._logprobs = []
            self.sink.on_text(self, text, logprobs)
        if self.finish_reason is not None or self.error is not None:
            self.open = False
            self.sink.ended(self)

    def fail(self, error: ApiError) -> None:
        """End with an error, unless already ended."""
        if self.open:
            self.error, self.finish_reason = error, None
            self.open = False
            self.sink.ended(self)
