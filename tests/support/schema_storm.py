"""Random schemas, and outputs of random legal tokens, as the CPU engine chooses and follows them; an independent validator judges
each."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from support.compiled_grammars import automaton_of_schema
from support.schema_validator import document, validator
from support.wide_schemas import WideSchemaDraw

from blinkpy import LLM, SamplingParams
from blinkpy.device.compile_cache import cached_njit
from blinkpy.dpu.grammar.compile_grammar import MOST_BYTES
from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.kv import grammars as G
from blinkpy.kv.state import Grammars
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.models.cpu.cpu_sampler import mask_illegal
from blinkpy.queues import byte_automaton as A
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.submission import (
    SQ_ENTRY_WORDS,
    STOP_IDS,
    WORD_MAX_TOKENS,
    WORD_MIN_TOKENS,
    WORD_RULES_WORDS,
    WORD_STOP_IDS,
)
from blinkpy.queues.words import Int32
from blinkpy.verify.sim.grammar_supply import written_out

MOST_TOKENS = 400  # of an output
FREE_TOKENS = 60  # maximum tokens chosen at random, before the walk heads for the end
LOOKS = 48  # tokens from which the nearest to the end is chosen
END = -1  # instead of a token


class Drawn(NamedTuple):
    """A schema, and its automaton or the reason of its refusal."""

    number: int
    schema: Any
    automaton: ByteAutomaton | None
    refusal: str = ""


class InvalidOutputError(AssertionError):
    """An output that ended by itself, but that its schema does not allow."""


def draw(seed: int, index: int) -> Drawn:
    """The schema with this number, the same for the same seed."""
    schema = WideSchemaDraw(np.random.default_rng([seed, index])).whole()
    try:
        return Drawn(index, schema, automaton_of_schema(schema))
    except GrammarError as error:
        refusal = "contradiction" if "contradict" in error.message else error.keyword or "size"
        return Drawn(index, schema, None, refusal)


def judge(drawn: Drawn, output: bytes) -> None:
    """Raise InvalidOutputError unless the schema allows the output, which ended by itself."""
    try:
        fine = validator(drawn.schema).is_valid(document(output))
    except ValueError as error:
        raise InvalidOutputError(f"no JSON ({error}): {output!r}, schema {drawn.number}: {json.dumps(drawn.schema)}") from error
    if not fine:
        raise InvalidOutputError(f"invalid: {output!r}, schema {drawn.number}: {json.dumps(drawn.schema)}")


@cached_njit
def _following(grammars, slot, state, token, stops, most):  # type: ignore[no-untyped-def]
    return G.follow(grammars, slot, state, token, stops, most)


CHOICES: dict[str, Callable[[np.ndarray, np.random.Generator], int]] = {
    "lowest": lambda legal, rng: int(legal[0]),
    "highest": lambda legal, rng: int(legal[-1]),
    "uniform": lambda legal, rng: int(legal[rng.integers(len(legal))]),
}
SPARE_TOKENS = 50  # maximum tokens of an output beyond the bytes of the shortest


@cached_njit
def _distances(next_state, accepting):  # type: ignore[no-untyped-def]
    """The minimum number of bytes from each state to an accepting state: rounds over all edges until nothing changes."""
    found = np.where(accepting, 0, 1 << 30)
    changed = True
    while changed:
        changed = False
        for state in range(len(next_state) - 1, -1, -1):
            for target in next_state[state]:
                if target >= 0 and found[target] + 1 < found[state]:
                    found[state] = found[target] + 1
                    changed = True
    return found


class TokenWalk:
    """The engine's grammars with one slot, and the ends of its outputs. tokens: tokens of a model; eos: its end-of-sequence
    id."""

    def __init__(self, tokens: TokenBytes, eos: int):
        ones = np.ones(1, np.int64)
        words = np.zeros((1, MOST_BYTES // 4), np.int32)
        self._grammars = Grammars(ones, ones, ones, words, tokens.place, tokens.words)
        self._pieces, self._eos = tokens.pieces(), eos
        self._stops: Int32 = np.full(STOP_IDS, -1, np.int32)
        self._stops[0] = eos
        self._bytes = np.array(sorted(token for token, piece in enumerate(self._pieces) if len(piece) == 1))
        self._far: dict[int, int] = {}
        self._automaton: ByteAutomaton | None = None

    def take(self, automaton: ByteAutomaton) -> None:
        """Use this automaton for the next outputs."""
        packed = automaton.words()
        self._grammars.words[0, : len(packed)] = packed
        table, accepting, number = written_out(automaton)
        far = _distances(table, accepting)
        self._automaton, self._far = automaton, {position: int(far[i]) for position, i in number.items()}

    def output(self, rng: np.random.Generator) -> tuple[bytes, bool]:
        """A random output, and whether it ended by itself."""
        state, free, parts = 0, int(rng.integers(0, FREE_TOKENS)), list[bytes]()
        logits = np.zeros(len(self._pieces), np.float32)
        for count in range(MOST_TOKENS):
            logits[:] = 0
            mask_illegal(logits, self._grammars, 0, state, self._stops)
            legal = np.flatnonzero(logits == 0)
            if count < free:
                token = int(legal[rng.integers(len(legal))])
            else:
                token = self._nearest(rng, state, legal)
            following = int(_following(self._grammars, 0, state, token, token == self._eos, G.NO_LIMIT))
            if following < 0:
                raise InvalidOutputError(f"the mask allows token {token} in state {state}, the loop does not")
            if token == self._eos:
                return b"".join(parts), True
            parts.append(self._pieces[token])
            if following & G.ENDING:
                return b"".join(parts), True
            state = following & ~G.ENDING
        return b"".join(parts), False

    def closed(self, rng: np.random.Generator, choice: str) -> bytes:
        """An output by one of CHOICES, within some more tokens than the shortest output has bytes. It must be complete.

        Raises InvalidOutputError if the output is cut."""
        most = max(1, self._distance(0)) + int(rng.integers(SPARE_TOKENS))
        entry: Int32 = np.full((1, SQ_ENTRY_WORDS), -1, np.int32)
        entry[0, [WORD_MAX_TOKENS, WORD_MIN_TOKENS, WORD_RULES_WORDS]] = most, 0, 0
        entry[0, WORD_STOP_IDS] = self._eos
        one = np.zeros(1, np.int32)
        requests = SimpleNamespace(entry=entry, grammar=one, length=one + 1, prompt_length=one + 1)
        logits, state, parts = np.zeros(len(self._pieces), np.float32), 0, list[bytes]()
        for _ in range(most):
            nearest = int(G.most_distance(self._grammars, requests, 0, state, int(requests.length[0])))
            logits[:] = 0
            mask_illegal(logits, self._grammars, 0, state, self._stops, nearest)
            legal = np.flatnonzero(logits == 0)
            if len(legal) == 0:
                raise InvalidOutputError(f"no token is legal behind {b''.join(parts)!r}")
            token = CHOICES[choice](legal, rng)
            following = int(_following(self._grammars, 0, state, token, token == self._eos, nearest))
            if following < 0:
                raise InvalidOutputError(f"the mask allows token {token} in state {state}, the loop does not")
            if token == self._eos:
                return b"".join(parts)
            parts.append(self._pieces[token])
            state = following & ~G.ENDING
            requests.length[0] += 1
            if following & G.ENDING:
                return b"".join(parts)
        if self._distance(state) > 0:
            raise InvalidOutputError(f"{most} tokens did not suffice: {b''.join(parts)!r}")
        return b"".join(parts)

    def _distance(self, position: int) -> int:
        """The minimum number of bytes from a position to an accepting state."""
        assert self._automaton is not None
        state, count = position & A.STATE_MASK, position >> A.COUNT_SHIFT
        if state >= self._automaton.counted:
            _, least, most = self._automaton.loops[state - self._automaton.counted].tolist()
            count = min(count, least) if most == A.NO_MOST else count
        return self._far[A.position_of(state, count)]

    def _nearest(self, rng: np.random.Generator, state: int, legal: np.ndarray) -> int:
        if legal[legal == self._eos].size:
            return self._eos
        some = rng.choice(legal, min(LOOKS, len(legal)), replace=False)
        some = np.concatenate([some, np.intersect1d(legal, self._bytes)])
        after = [int(_following(self._grammars, 0, state, token, False, G.NO_LIMIT)) & ~G.ENDING for token in some.tolist()]
        return int(some[np.argmin([self._distance(one) for one in after])])


def walk_outputs(walk: TokenWalk, seed: int, indices: range, samples: int) -> Iterator[tuple[Drawn, Counter[str]]]:
    """For each schema, counts of its outputs by their ends: some of random tokens, and one by each of CHOICES; and refusals by
    keyword.

    Raises InvalidOutputError."""
    for index in indices:
        drawn, counts = draw(seed, index), Counter[str]()
        if drawn.automaton is None:
            counts[f"refused: {drawn.refusal}"] = 1
        else:
            walk.take(drawn.automaton)
            rng = np.random.default_rng([seed, index, 1])
            for _ in range(samples):
                output, ended = walk.output(rng)
                counts["ended" if ended else "cut"] += 1
                if ended:
                    judge(drawn, output)
                elif drawn.automaton.advance(0, output) < 0:
                    raise InvalidOutputError(f"no beginning of a valid output: {output!r}, schema {index}: {drawn.schema}")
            for choice in CHOICES:
                judge(drawn, walk.closed(rng, choice))
                counts["closed"] += 1
        yield drawn, counts


def engine_outputs(llm: LLM, seed: int, drawn: list[Drawn], max_tokens: int) -> Counter[str]:
    """Counts, by their ends, of the engine's outputs: one for each schema that has an automaton. Raises InvalidOutputError."""
    given = [one for one in drawn if one.automaton is not None]
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=1.0, seed=(seed + one.number) % (1 << 31), grammar=one.automaton)
        for one in given
    ]
    counts = Counter[str]()
    for one, done in zip(given, llm.generate(["x"] * len(given), params) if given else (), strict=True):
        (out,) = done.outputs
        counts["engine ended" if out.finish_reason == "stop" else "engine cut"] += 1
        if out.finish_reason == "stop":
            judge(one, out.text.encode())
        elif one.automaton is not None and "\ufffd" not in out.text and one.automaton.advance(0, out.text.encode()) < 0:
            raise InvalidOutputError(f"no beginning of a valid output: {out.text!r}, schema {one.number}: {one.schema}")
    return counts
