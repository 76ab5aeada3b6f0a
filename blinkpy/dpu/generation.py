"""One choice on its way: completions go in, text comes out, until it ends."""

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
# Message, parameter and code. What the front end should have seen itself is a server error.
REJECTIONS = {
    completion.REJECT_LENGTH: ("The request goes beyond the model's context length.", "max_tokens", "context_length_exceeded"),
    completion.REJECT_PAGES: ("The request can never fit into the KV cache.", "max_tokens", "context_length_exceeded"),
    completion.REJECT_TOKEN: ("The prompt has a token id outside the vocabulary.", "prompt", "invalid_value"),
    completion.REJECT_PROMPT: ("The engine does not accept this prompt.", "prompt", "invalid_value"),
    completion.REJECT_PARAMETER: ("The engine does not accept a parameter of this request.", None, "invalid_value"),
}
NO_TOKEN_LEFT = "No token is left that allowed_token_ids, bad_words, stop_token_ids, min_tokens and a grammar allow together."


def excluding(rules: TokenRules | None, grammar: ByteAutomaton | None, stop_ids: Sequence[int]) -> str:
    """The parameter of a request that excludes tokens, so that it may leave none; "" where none does. stop_ids: its own, which
    a grammar allows at its end alone."""
    if rules is not None and (rules.allowed is not None or rules.banned):
        return "bad_words" if rules.allowed is None else "allowed_token_ids"
    return "stop_token_ids" if grammar is not None and stop_ids else ""


def failure(finish: int, reason: int, excluding: str = "") -> ApiError:
    """The error for a request that the engine ended. finish: FINISH_*; reason: REJECT_* of a request that it refused; excluding:
    its parameter that may leave no token, which only the engine sees. The request is at fault then."""
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
    """Where a choice's text goes. The methods are called from the event loop's thread, and must not block or raise."""

    def on_text(self, generation: "Generation", text: str, logprobs: list[TokenLogprobs]) -> None:
        """More text; it may be empty for the first token. logprobs: of the tokens since the last call, if asked for."""

    def ended(self, generation: "Generation") -> None:
        """No more text follows. finish_reason or error says why."""

    def send(self) -> None:
        """Let out what has come: called after both, once all choices have had theirs of a step."""


class PlainPath(Protocol):
    """A shortcut for the tokens of a choice that is_plain, past `push` and `flush`."""

    def push(self, token: int) -> None:
        """Take a token, whose text goes out with the sink's next send()."""


@dataclass(slots=True, eq=False)
class Flight:
    """What another engine needs to continue a generation, if there are several engines."""

    prompt: Int32  # [n], the client's
    sampling: RequestParameters  # of its request, with a seed
    grammar: ByteAutomaton | None = None  # of its request
    output: list[int] = field(default_factory=list)  # all tokens that were pushed to the generation
    engine: int = -1  # index of the engine that has its request; -1: none
    cost: int = 0  # tokens that the engine has outstanding for it
    scores_due: int = 0  # completions that come before its output
    moves: int = 0  # to other engines
    paused_s: float = 0.0  # between engines, all pauses together
    paused_at: float = 0.0  # s of the monotonic clock; in a pause


@dataclass(slots=True, eq=False)
class Generation:
    """State of one choice. It is the `owner` of its request in the queue pair."""

    index: int
    prompt_length: int  # tokens
    detokenizer: Detokenizer
    stops: InitVar[tuple[str, ...]]
    arrival: float  # when the HTTP request came, s of the monotonic clock
    sink: Sink
    top_logprobs: int = -1  # most likely tokens whose log probabilities the request asks for; -1: it asks for none at all
    leader: "Generation | None" = None  # of the same prompt: once its first token came, the prompt's pages are in the cache
    grammar: ByteAutomaton | None = None  # of what its text may be
    rules: TokenRules | None = None
    reasoning: ReasoningCounter | None = None  # for usage, where its text may have reasoning
    scores: PromptScores | None = None  # of its prompt; the choices of a prompt have them in common
    scoring: bool = False  # its request brings them: the completions before its first token are the prompt's
    echo: str | None = None  # the prompt's text, before its own
    echo_only: bool = False  # it ends before its first token, which the engine generates in any case
    request: InFlightRequest | None = None
    flight: Flight | None = None  # if there are several engines: what another one needs to continue
    tokens: int = 0  # generated
    waited: float = 0.0  # for a slot, s
    submitted: float = 0.0  # when the engine got the request, s; 0 before
    first_event: float = 0.0  # when its first text went out, s; 0 before
    finish_reason: str | None = None
    error: ApiError | None = None
    open: bool = True  # until the sink was told the end
    touched: bool = False  # in the list of those to flush
    last_event: float = 0.0  # when text went out last, s
    include_stop: bool = False  # the text has what ends it: the stop string or the stop token
    excluding: str = ""  # the parameter that may leave no token
    min_tokens: int = 0  # before, no stop string ends it; the engine sees to stop ids
    plain: PlainPath | None = None  # takes its tokens, as long as they neither end it nor bring more than text
    _stops: StopStrings | None = None
    _text: str = ""
    _logprobs: list[TokenLogprobs] = field(default_factory=list)
    _characters: int = 0  # of the output, for requests with log probabilities

    def __post_init__(self, stops: tuple[str, ...]) -> None:
        self._stops = StopStrings(stops, self.include_stop) if stops else None

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were found in the prefix cache; 0 before the first completion."""
        if self.request is None:
            return 0
        cached = self.request.cached_tokens
        return cached if self.flight is None else min(cached, self.prompt_length)  # the prompt of a move has output, too

    @property
    def is_plain(self) -> bool:
        """Whether its text, from now on, is that of its tokens and nothing else."""
        has_more = self.scoring or self.echo_only or self.top_logprobs >= 0
        return not has_more and self.echo is None and self._stops is None and self.reasoning is None

    def push_score(self) -> None:
        """Take a completion of the prompt's."""
        if self.scores is not None and self.request is not None:
            self.scores.push(self.request.records.popleft())
            self.scoring = not self.scores.complete

    def push(self, token: int, flags: int) -> bool:
        """Take a completion. Returns True when the engine should be told to stop: a stop string was met."""
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

    def flush(self) -> None:
        """Hand the sink what has come since the last time."""
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
        """End with an error, unless it ended already."""
        if self.open:
            self.error, self.finish_reason = error, None
            self.open = False
            self.sink.ended(self)
