"""Log probabilities of a prompt's own tokens, as its first request brings them."""

from collections.abc import Iterable

from blinkpy.dpu.token_logprobs import Record, TokenLogprobs, token_logprobs
from blinkpy.queues.request_parameters import SUBMIT_SCORE_PROMPT, RequestParameters
from blinkpy.queues.words import TOP_LOGPROBS

SCORE_BYTES = 128  # of memory for each log probability
MOST_SCORES = 1 << 18
"""Log probabilities of one prompt: bounds the memory of an answer that is on its way."""


def scoring_parameters(parameters: RequestParameters) -> RequestParameters:
    """Those of a request that brings the log probabilities of its prompt."""
    return parameters.changed(flags=parameters.flags | SUBMIT_SCORE_PROMPT, logprobs=max(0, parameters.logprobs))


class PromptScores:
    """Of each token of a prompt, behind the ones before it. tokens: the prompt. count: most likely tokens at
    each place. offsets: characters of the prompt's text before each token. Raises ValueError if that would be
    more than MOST_SCORES.
    """

    def __init__(self, tokens: list[int], count: int, offsets: Iterable[int] | None = None):
        if len(tokens) * (1 + count) > MOST_SCORES:
            raise ValueError(
                f"{1 + count} log probabilities for each of {len(tokens)} tokens exceed the limit of {MOST_SCORES:,}"
            )
        self._offsets = [0] * len(tokens) if offsets is None else list(offsets)
        self._count, self._length = count, len(tokens)
        self.bytes = len(tokens) * (2 + count) * SCORE_BYTES  # of memory, once it is complete
        self.entries = [TokenLogprobs(tokens[0], None, [], self._offsets[0])]
        self.ranks: list[int | None] = [None]
        """Places of the tokens among the most likely ones, from 1 on; None for the first token, and beyond TOP_LOGPROBS."""

    @property
    def complete(self) -> bool:
        return len(self.entries) == self._length

    def restart(self) -> None:
        """Forget the records that came: another request brings all of them."""
        del self.entries[1:], self.ranks[1:]

    def push(self, record: Record) -> None:
        """The record of the next token."""
        self.entries.append(token_logprobs(record, self._count, self._offsets[len(self.entries)]))
        token, *likeliest = (token for token, _ in record[: 1 + TOP_LOGPROBS])
        self.ranks.append(likeliest.index(token) + 1 if token in likeliest else None)

    def first(self, count: int) -> list[TokenLogprobs]:
        """The entries with at most `count` most likely tokens."""
        if count == self._count:
            return self.entries
        return [entry._replace(top=entry.top[:count]) for entry in self.entries]
