"""One choice of a request: it takes completions and emits text until it ends."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple, Protocol

from blinkpy.dpu.api_errors import ApiError, bad_request, unavailable
from blinkpy.dpu.link.queue_pair import InFlightRequest
from blinkpy.dpu.text.detokenizer import Detokenizer
from blinkpy.dpu.text.stop_strings import StopStrings
from blinkpy.dpu.tools.message_parser import ReasoningCounter
from blinkpy.queues import words as completion
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.request_parameters import SUBMIT_SCORE_PROMPT, RequestParameters
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import (
    FINISH_MASK,
    FINISH_STOP,
    HAS_LOGPROBS,
    HAS_TOKEN,
    TOP_LOGPROBS,
    WAS_DRAFTED,
    WAS_PREDICTED,
    Int32,
)

# Log probabilities: from the engine's records to the objects of OpenAI's API.
#
# Each token that a request's usage counts has one entry, including the token that ends the text.

LOWEST = -9999.0  # replaces minus infinity, which JSON lacks

TokenSpeller = Callable[[int], tuple[str, bytes]]
"""Text and bytes of one token by itself: Tokenizer.spell."""


Record = Sequence[tuple[int, float]]
"""logprob_record.LOGPROB_ENTRY of one completion."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one position of an output or a prompt."""

    token: int  # the generated one
    logprob: float | None  # None for the first token of a prompt
    top: list[tuple[int, float]]  # most likely tokens with log probabilities, descending; as many as requested
    offset: int  # characters of the output before the token


def token_logprobs(record: Record, count: int, offset: int) -> TokenLogprobs:
    """Convert a record (logprob_record.LOGPROB_ENTRY). count: requested number of most likely tokens."""
    (token, logprob), *top = record[: 1 + count]
    return TokenLogprobs(token, _finite(logprob), [(other, _finite(value)) for other, value in top if other >= 0], offset)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # NaN becomes LOWEST


def chat_logprobs(entries: Sequence[TokenLogprobs], spell: TokenSpeller) -> dict[str, Any]:
    """The object `logprobs` of a choice of /v1/chat/completions."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text, piece = spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(piece)}

    content = [{**entry(e.token, e.logprob), "top_logprobs": [entry(*pair) for pair in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprobs], spell: TokenSpeller) -> dict[str, Any]:
    """The object `logprobs` of a choice of /v1/completions. Its top tokens always include the generated
    one.
    """

    def name(token: int) -> str:
        text, piece = spell(token)
        return f"bytes:{text}" if piece and text.encode() != piece else text

    top: list[dict[str, float] | None] = []
    for entry in entries:
        if entry.logprob is None:
            top.append(None)
            continue
        table: dict[str, float] = {}
        for token, logprob in (*entry.top, (entry.token, entry.logprob)):
            table.setdefault(name(token), logprob)  # of two tokens with the same spelling, keep the likelier one
        top.append(table)
    return {
        "tokens": [name(entry.token) for entry in entries],
        "token_logprobs": [entry.logprob for entry in entries],
        "top_logprobs": top,
        "text_offset": [entry.offset for entry in entries],
    }


def prompt_logprobs(
    entries: Sequence[TokenLogprobs], ranks: Sequence[int | None], spell: TokenSpeller
) -> list[dict[str, dict[str, Any]] | None]:
    """vLLM's list `prompt_logprobs`: for each prompt token, the most likely tokens and itself, by id; null
    for the first token.

    ranks: ranks of the prompt's tokens; null if unknown.
    """

    def table(entry: TokenLogprobs, rank: int | None) -> dict[str, dict[str, Any]] | None:
        if entry.logprob is None:
            return None
        likeliest = [(token, logprob, i) for i, (token, logprob) in enumerate(entry.top, 1)]
        return {
            str(token): {"logprob": logprob, "rank": place, "decoded_token": spell(token)[0]}
            for token, logprob, place in (*likeliest, (entry.token, entry.logprob, rank))
        }

    return [table(*pair) for pair in zip(entries, ranks, strict=True)]


SCORE_BYTES = 128  # of memory for each log probability
MOST_SCORES = 1 << 18
"""Log probabilities of one prompt: limits the memory of an unfinished answer."""


def scoring_parameters(parameters: RequestParameters) -> RequestParameters:
    """The parameters with log probabilities of the prompt enabled."""
    return parameters.changed(flags=parameters.flags | SUBMIT_SCORE_PROMPT, logprobs=max(0, parameters.logprobs))


class PromptScores:
    """Log probabilities of each token of a prompt, given the previous ones.

    tokens: the prompt.
    count: most likely tokens at each position.
    offsets: characters of the prompt's text before each token.
    shown: most likely tokens in `prompt_logprobs`, at most `count`.
    Raises ValueError for more than MOST_SCORES log probabilities.
    """

    def __init__(self, tokens: list[int], count: int, offsets: Iterable[int] | None = None, shown: int | None = None):
        if len(tokens) * (1 + count) > MOST_SCORES:
            raise ValueError(
                f"{1 + count} log probabilities for each of {len(tokens)} tokens exceed the limit of {MOST_SCORES:,}"
            )
        self._offsets = [0] * len(tokens) if offsets is None else list(offsets)
        self._count, self._length = count, len(tokens)
        self.shown = count if shown is None else shown
        self.bytes = len(tokens) * (2 + count) * SCORE_BYTES  # of memory, when complete
        self.entries = [TokenLogprobs(tokens[0], None, [], self._offsets[0])]
        self.ranks: list[int | None] = [None]
        """Ranks of the tokens by likelihood, from 1; None for the first token, and beyond TOP_LOGPROBS."""

    @property
    def complete(self) -> bool:
        return len(self.entries) == self._length

    def restart(self) -> None:
        """Discard all records, because another request provides them."""
        del self.entries[1:], self.ranks[1:]

    def push(self, record: Record) -> None:
        """Add the record of the next token."""
        self.entries.append(token_logprobs(record, self._count, self._offsets[len(self.entries)]))
        token, *likeliest = (token for token, _ in record[: 1 + TOP_LOGPROBS])
        self.ranks.append(likeliest.index(token) + 1 if token in likeliest else None)

    def first(self, count: int) -> list[TokenLogprobs]:
        """The entries with at most `count` most likely tokens."""
        if count == self._count:
            return self.entries
        return [entry._replace(top=entry.top[:count]) for entry in self.entries]


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

    stop_ids: the request's stop token ids; a grammar allows them only at its end.
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
        return ApiError(
            500, f"The engine refused the request for an unknown reason ({reason}): report this bug.", code="engine_rejected"
        )
    if finish == completion.FINISH_CANCELLED:
        return unavailable("The engine cancelled the request; try again.")
    if finish == completion.FINISH_ERROR:
        return ApiError(500, "The engine failed to continue this request; try again.", code="engine_error")
    return ApiError(500, f"The engine ended the request with the unknown code {finish}: report this bug.", code="engine_error")


class Sink(Protocol):
    """Receives a choice's text. The event loop's thread calls the methods, which must not block or raise."""

    def on_text(self, generation: "Generation", text: str, logprobs: list[TokenLogprobs]) -> None:
        """Take more text, which may be empty for the first token. logprobs: log probabilities of the tokens since the last
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
        """Take a token; the sink's next send() sends its text."""


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
    """The state of one choice, which is also the `owner` of the choice's request in the queue pair."""

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
    prediction: Int32 | None = None  # tokens that the output may repeat
    reasoning: ReasoningCounter | None = None  # for usage, if its text may contain reasoning
    scores: PromptScores | None = None  # of its prompt, shared by the prompt's choices
    scoring: bool = False  # completions before its first token are the prompt's scores
    echo: str | None = None  # the prompt's text, sent before the output
    echo_only: bool = False  # end before the first token, although the engine generates one
    request: InFlightRequest | None = None
    flight: Flight | None = None  # set if there are several engines
    tokens: int = 0  # generated
    drafted: int = 0  # of them: equal to their drafts
    predicted: int = 0  # of these: to drafts from the prediction
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
        """Whether the rest of its text depends only on its tokens."""
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
            self._text = self.echo
            self._characters = len(self.echo)
            self.echo = None
            if self.scores is not None and self.top_logprobs >= 0:
                self._logprobs += self.scores.first(self.top_logprobs)
        if self.echo_only and flags & HAS_TOKEN:
            self.finish_reason = LENGTH
            return not finish
        if flags & HAS_TOKEN:
            self.tokens += 1
            if flags & WAS_DRAFTED:
                self.drafted += 1
                self.predicted += flags & WAS_PREDICTED != 0
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
