"""Log probabilities of generated tokens: from the engine's records to the objects of OpenAI's API.

Each token that a request's usage counts has one entry, the token that ends the text too.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

LOWEST = -9999.0  # in place of minus infinity, which JSON does not have

TokenSpeller = Callable[[int], tuple[str, bytes]]
"""Text and bytes of one token by itself: Tokenizer.spell."""


Record = Sequence[tuple[int, float]]
"""logprob_record.LOGPROB_ENTRY of one completion."""


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities at one place of an output, or of a prompt."""

    token: int  # the generated one
    logprob: float | None  # None: of the first token of a prompt
    top: list[tuple[int, float]]  # of the most likely ones, as many as the request asked for, in descending order
    offset: int  # characters of the output before the token


def token_logprobs(record: Record, count: int, offset: int) -> TokenLogprobs:
    """From a record (logprob_record.LOGPROB_ENTRY) of a request that asked for the `count` most likely tokens."""
    (token, logprob), *top = record[: 1 + count]
    return TokenLogprobs(token, _finite(logprob), [(other, _finite(value)) for other, value in top if other >= 0], offset)


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # NaN is above nothing


def chat_logprobs(entries: Sequence[TokenLogprobs], spell: TokenSpeller) -> dict[str, Any]:
    """The object `logprobs` of a choice of /v1/chat/completions."""

    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        text, piece = spell(token)
        return {"token": text, "logprob": logprob, "bytes": list(piece)}

    content = [{**entry(e.token, e.logprob), "top_logprobs": [entry(*pair) for pair in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def completion_logprobs(entries: Sequence[TokenLogprobs], spell: TokenSpeller) -> dict[str, Any]:
    """The object `logprobs` of a choice of /v1/completions. The generated token is always among the top ones."""

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
            table.setdefault(name(token), logprob)  # two tokens may have one spelling: the likelier one stays
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
    """vLLM's list `prompt_logprobs`: of each token of a prompt the most likely ones and itself, by id; null for the first. ranks:
    of the tokens themselves, null where unknown."""

    def table(entry: TokenLogprobs, rank: int | None) -> dict[str, dict[str, Any]] | None:
        if entry.logprob is None:
            return None
        likeliest = [(token, logprob, i) for i, (token, logprob) in enumerate(entry.top, 1)]
        return {
            str(token): {"logprob": logprob, "rank": place, "decoded_token": spell(token)[0]}
            for token, logprob, place in (*likeliest, (entry.token, entry.logprob, rank))
        }

    return [table(*pair) for pair in zip(entries, ranks, strict=True)]
