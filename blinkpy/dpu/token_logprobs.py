"""Log probabilities: from the engine's records to the objects of OpenAI's API.

Each token that a request's usage counts has one entry, including the token that ends the text.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from blinkpy.queues.request_parameters import SUBMIT_SCORE_PROMPT, RequestParameters
from blinkpy.queues.words import TOP_LOGPROBS

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

    ranks: of the prompt's tokens; null if unknown.
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
        """Places of the tokens among the most likely ones, from 1 on; None for the first token, and beyond TOP_LOGPROBS."""

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
