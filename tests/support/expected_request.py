"""A request and all that it must get: with the simulator's model, the prompt says which tokens follow."""

from collections import deque
from typing import Any

import numpy as np

from blinkpy.kv.limits import Limits
from blinkpy.queues import completion as C
from blinkpy.queues.logprob_record import LOGPROB_ENTRIES, LOGPROB_ENTRY
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.verify.sim.synthetic_model import record_word, token_after, value_of


class ExpectedRequest:
    """expected, finish: tokens that it must get, and how it must end. got, ended: so far; reason: of a rejection."""

    def __init__(self, limits: Limits, prompt: list[int], sampling: RequestParameters) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.expected, self.finish = _generate(limits, prompt, sampling)
        self.got: list[int] = []
        self.cancelled, self.ended, self.reason = False, C.FINISH_NONE, 0

    def take(self, token: int, flags: int, records: deque[Any]) -> None:
        """Check one completion. records: InFlightRequest.records, from which its record is taken."""
        assert self.ended == C.FINISH_NONE, "a completion after the last one"
        finish = flags & C.FINISH_MASK
        if flags & C.HAS_TOKEN:
            self.got.append(token)
            assert self.got == self.expected[: len(self.got)], (self.got, self.expected)
        assert bool(flags & C.HAS_LOGPROBS) == bool(flags & C.HAS_TOKEN and self.sampling.logprobs >= 0)
        if flags & C.HAS_LOGPROBS:
            context = len(self.prompt) + len(self.got) - 1
            record = np.array([record_word(token, context, k) for k in range(LOGPROB_ENTRIES)])
            assert records.popleft() == record.view(LOGPROB_ENTRY).tolist(), "the log probabilities of another token"
        assert finish or len(self.got) < len(self.expected), "all tokens have come, and no end"
        if finish in (C.FINISH_STOP, C.FINISH_LENGTH):
            assert (self.got, finish) == (self.expected, self.finish)
        elif finish != C.FINISH_NONE:
            assert finish == self.finish or (finish == C.FINISH_CANCELLED and self.cancelled), finish
            self.reason = token
        self.ended = finish


def _generate(limits: Limits, prompt: list[int], sampling: RequestParameters) -> tuple[list[int], int]:
    """All tokens of a request, and its end."""
    total = value = 0
    for i, token in enumerate(prompt):
        value = value_of(value, token, i, sampling.cache_salt)
        total += value * (i + 1)
    tokens: list[int] = []
    most = min(sampling.max_tokens, limits.max_model_len - len(prompt))
    while True:
        token = token_after(total, sampling.seed, limits.vocab_size)
        position = len(prompt) + len(tokens)
        tokens.append(token)
        value = value_of(value, token, position, sampling.cache_salt)
        total += value * (position + 1)
        if len(tokens) > sampling.min_tokens and token in sampling.stop_ids:
            return tokens, C.FINISH_STOP
        if len(tokens) == most:
            return tokens, C.FINISH_LENGTH
