"""A request and its expected completions: with the simulator's model, the prompt determines the tokens."""

from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from blinkpy.kv.limits import Limits
from blinkpy.queues import words as C
from blinkpy.queues.byte_automaton import DEAD, ByteAutomaton
from blinkpy.queues.request_parameters import SUBMIT_SCORE_PROMPT, RequestParameters
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import LOGPROB_ENTRIES, LOGPROB_ENTRY
from blinkpy.verify.sim.grammar_supply import written_out
from blinkpy.verify.sim.synthetic_model import record_word, token_after, value_of


class ExpectedRequest:
    """grammar: automaton of its output, over tokens whose bytes are `pieces`; rules: its token rules. expected, finish: tokens
    that it must get, including a scored prompt, and its expected end. got, ended: tokens and end so far; reason: why it was
    rejected."""

    def __init__(
        self, limits: Limits, prompt: list[int], sampling: RequestParameters, grammar: ByteAutomaton | None = None,
        rules: TokenRules | None = None, pieces: Sequence[bytes] = (),
    ) -> None:  # fmt: skip
        self.prompt, self.sampling, self.grammar, self.rules = prompt, sampling, grammar, rules
        self.expected, self.finish = _generate(limits, prompt, sampling, grammar, rules, pieces)
        scored = prompt[1:] if sampling.flags & SUBMIT_SCORE_PROMPT else []
        self.expected, self.context = scored + self.expected, len(prompt) - len(scored)  # before the first expected token
        self.got: list[int] = []
        self.cancelled, self.ended, self.reason = False, C.FINISH_NONE, 0

    def take(self, token: int, flags: int, records: deque[Any]) -> None:
        """Check one completion, and take its record from `records`, which is InFlightRequest.records."""
        assert self.ended == C.FINISH_NONE, "a completion after the last one"
        finish = flags & C.FINISH_MASK
        if flags & C.HAS_TOKEN:
            self.got.append(token)
            assert self.got == self.expected[: len(self.got)], (self.got, self.expected)
        assert bool(flags & C.HAS_LOGPROBS) == bool(flags & C.HAS_TOKEN and self.sampling.logprobs >= 0)
        if flags & C.HAS_LOGPROBS:
            context = self.context + len(self.got) - 1
            record = np.array([record_word(token, context, k) for k in range(LOGPROB_ENTRIES)])
            assert records.popleft() == record.view(LOGPROB_ENTRY).tolist(), "the log probabilities of another token"
        late = not finish and len(self.got) == len(self.expected) and self.finish != C.FINISH_ERROR
        assert not late, "all tokens have arrived without an end"
        if finish in (C.FINISH_STOP, C.FINISH_LENGTH, C.FINISH_COMPLETE):
            assert (self.got, finish) == (self.expected, self.finish)
        elif finish != C.FINISH_NONE:
            assert finish == self.finish or (finish == C.FINISH_CANCELLED and self.cancelled), finish
            self.reason = token
        self.ended = finish


def leading_to_an_end(
    grammar: ByteAutomaton, output: bytes, after: list[int], left: int, sampling: RequestParameters, made: int
) -> list[int]:
    """The positions after each token, DEAD if `left` tokens, including this token, can't reach an end."""
    far = bytes_to_an_end(grammar)
    position = grammar.advance(grammar.start, output)
    stops = made >= sampling.min_tokens and any(stop >= 0 for stop in sampling.stop_ids)
    if far[position] > left or left > len(far) or (grammar.may_end(position) and not stops):
        return after
    return [one if one != DEAD and far[one] < left else DEAD for one in after]


@lru_cache(64)
def bytes_to_an_end(grammar: ByteAutomaton) -> dict[int, int]:
    """The minimum number of bytes from each position to an accepting state."""
    table, accepting, number = written_out(grammar)
    sources: list[set[int]] = [set() for _ in table]
    for before, row in enumerate(table.tolist()):
        for target in set(row) - {DEAD}:
            sources[target].add(before)
    far = np.where(accepting, 0, 1 << 30)
    found = np.flatnonzero(accepting).tolist()
    for target in found:  # grows meanwhile
        for before in sources[target]:
            if far[before] == 1 << 30:
                far[before] = far[target] + 1
                found.append(before)
    return {position: int(far[i]) for position, i in number.items()}


def _generate(
    limits: Limits, prompt: list[int], sampling: RequestParameters, grammar: ByteAutomaton | None, rules: TokenRules | None,
    pieces: Sequence[bytes],
) -> tuple[list[int], int]:  # fmt: skip
    """All tokens of a request, and its end."""
    total = value = 0
    for i, token in enumerate(prompt):
        value = value_of(value, token, i, sampling.cache_salt)
        total += value * (i + 1)
    tokens: list[int] = []
    output = b""
    most = min(sampling.max_tokens, limits.max_model_len - len(prompt))
    while True:
        token = token_after(total, sampling.seed, limits.vocab_size)
        if grammar is not None:
            after = [grammar.advance(grammar.start, output + piece) if piece else DEAD for piece in pieces]
            if rules is None and grammar.closes:
                after = leading_to_an_end(grammar, output, after, most - len(tokens), sampling, len(tokens))
            if len(tokens) >= sampling.min_tokens:
                may_end = grammar.accepts(output)
                after = [(0 if may_end else DEAD) if token in sampling.stop_ids else after[token] for token in range(len(pieces))]
            legal = [t % len(pieces) for t in range(token, token + len(pieces)) if after[t % len(pieces)] != DEAD]
            if not legal:
                return tokens, C.FINISH_ERROR
            token = legal[0]
        elif rules is not None and rules.allowed is not None:
            token = min(rules.allowed, key=lambda other: (other - token) % limits.vocab_size)
        position = len(prompt) + len(tokens)
        tokens.append(token)
        value = value_of(value, token, position, sampling.cache_salt)
        total += value * (position + 1)
        if len(tokens) > sampling.min_tokens and token in sampling.stop_ids:
            return tokens, C.FINISH_STOP
        if grammar is not None:
            output += pieces[token]
            if grammar.must_end(grammar.advance(grammar.start, output)):
                return tokens, C.FINISH_COMPLETE
        if len(tokens) == most:
            return tokens, C.FINISH_LENGTH
