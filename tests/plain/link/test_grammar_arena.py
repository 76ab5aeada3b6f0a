"""Automata and token rules in the prompt arena: written once, found again, and never taken while an entry may need them.

Supports claim front-ends/client.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.automata import random_automaton
from support.front_end.fake_engine import FACTS, SIZES, FakeEngine, drain
from support.waiting import wait_for

from blinkpy.dpu.link import grammar_arena
from blinkpy.dpu.link.connect_shm import attach_segment
from blinkpy.dpu.link.grammar_arena import GrammarArena
from blinkpy.dpu.link.queue_pair import InFlightRequest, NoSpaceError, QueuePair
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.layout import HEADER, LayoutError, QueueLayout, read_header, write_header
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.token_rules import TokenRules

ARENA = 400  # words
PROMPTS = SIZES.prompt_tokens
GRAMMAR_FACTS = FACTS._replace(grammar_share=6, grammar_words=ARENA, grammar_arena=ARENA)
FIRST = 100


class WordMap:
    """The reference: the owner and the last use of each word. Everything is searched for."""

    def __init__(self, size: int, most: int) -> None:
        self.owner: list[int] = [-1] * size
        self.used: dict[int, int] = {}  # by digest: when
        self.needed: dict[int, int] = {}  # by digest: until when
        self.most, self.clock = most, 0

    def place(self, words: int) -> int | None:
        starts = range(len(self.owner) - words + 1)
        return next((start for start in starts if set(self.owner[start : start + words]) <= {-1}), None)

    def drop(self, digest: int) -> None:
        self.owner = [-1 if owner == digest else owner for owner in self.owner]
        del self.used[digest], self.needed[digest]

    def put(self, wanted: dict[int, int], head: int) -> dict[int, int] | None:
        """The location of each, or None; then some may be evicted, so call it on a copy."""
        for digest, words in wanted.items():
            while digest not in self.used and (self.place(words) is None or len(self.used) == self.most):
                free = [other for other in self.used if self.needed[other] <= head and other not in wanted]
                if not free:
                    return None
                self.drop(min(free, key=lambda other: self.used[other]))
            if digest not in self.used:
                start = self.place(words)
                assert start is not None
                self.owner[start : start + words] = [digest] * words
                self.used[digest] = self.needed[digest] = 0
        return {digest: self.owner.index(digest) for digest in wanted}

    def keep(self, wanted: dict[int, int], after: int) -> None:
        for digest in wanted:
            self.clock += 1
            self.used[digest], self.needed[digest] = self.clock, after

    def copy(self) -> "WordMap":
        other = WordMap(len(self.owner), self.most)
        other.owner, other.used, other.needed, other.clock = list(self.owner), dict(self.used), dict(self.needed), self.clock
        return other


def test_pieces_lie_where_the_rules_put_them(rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Random requests, of one piece or two, consumed late. The reference says which are found, placed, removed
    and refused. No piece changes while an unconsumed entry names it. A plan that is not kept changes
    nothing."""
    seen = dict.fromkeys(("hit", "written", "removed", "refused"), 0)
    for size in rng.integers(20, 60, 40).tolist():
        most = int(rng.integers(3, 7))
        monkeypatch.setattr(grammar_arena, "MOST_PIECES", most)
        arena, model, head, tail = GrammarArena(FIRST, size), WordMap(size, most), 0, 0
        lengths = {digest: int(rng.integers(1, size // 2 + 1)) for digest in range(8)}
        named: list[dict[int, int]] = []  # by entry: the place of each of its pieces
        for _ in range(80):
            wanted = {digest: lengths[digest] for digest in rng.choice(8, rng.integers(1, 3), replace=False).tolist()}
            plan, expected = arena.plan(wanted, head), model.copy()
            places = expected.put(wanted, head)
            if places is None and max(model.needed.values()) <= head:
                expected = WordMap(size, most)
                places = expected.put(wanted, head)
            if plan is None or places is None:
                assert plan is None and places is None and head < tail
                seen["refused"] += 1
                head += int(rng.integers(0, tail - head + 1))
                continue
            assert {digest: plan.offset(digest) - FIRST for digest in wanted} == places
            new = [digest for digest in wanted if digest not in model.used or model.owner.index(digest) != places[digest]]
            assert set(new) <= set(plan.missing) <= set(wanted)
            assert set(plan.missing) == set(wanted) - set(model.used) or max(model.needed.values()) <= head
            if rng.random() < 0.2:
                continue
            for entry in named[head:]:  # the pieces that they name are still theirs
                for digest, start in entry.items():
                    assert expected.owner[start : start + lengths[digest]] == [digest] * lengths[digest]
            seen["removed"] += len(set(model.used) - set(expected.used))
            seen["written"] += len(plan.missing)
            seen["hit"] += len(wanted) - len(plan.missing)
            tail += 1
            arena.keep(plan, tail)
            expected.keep(wanted, tail)
            model = expected
            named.append(places)
            head += int(rng.integers(0, tail - head + 1)) if rng.random() < 0.6 else 0
    assert all(seen.values()), seen


def test_oversized_pieces_are_refused() -> None:
    arena = GrammarArena(0, 10)
    with pytest.raises(ValueError, match="11 words exceed the arena of 10"):
        arena.plan({1: 6, 2: 5}, 0)
    plan = arena.plan({1: 6, 2: 4}, 0)
    assert plan is not None and plan.missing == (1, 2)


# ---- the client --------------------------------------------------------------------------------------------------------------


class Writes:
    """A transport that notes what is written where in the prompt arena."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.prompt = inner, list[tuple[int, int]]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def write_prompt(self, offset: int, tokens: Any) -> None:
        self.prompt.append((offset, len(tokens)))
        self._inner.write_prompt(offset, tokens)

    def grammars(self) -> int:
        """Words of automata and token rules since the last call."""
        prompt, self.prompt = self.prompt, []
        assert all(offset + length <= PROMPTS or offset >= PROMPTS for offset, length in prompt)
        return sum(length for offset, length in prompt if offset >= PROMPTS)


@pytest.fixture
def engine():
    with FakeEngine(sizes=replace(SIZES, prompt_tokens=PROMPTS + ARENA), facts=GRAMMAR_FACTS) as engine:
        yield engine


def attached(engine: FakeEngine) -> tuple[QueuePair, Writes]:
    transport: Any = Writes(attach_segment(engine.segment_name, 0))
    pair = QueuePair(transport)
    pair.attach(5)
    return pair, transport


@pytest.fixture
def pair_and_writes(engine):
    pair, writes = attached(engine)
    yield pair, writes
    pair.close()


def submit(pair: QueuePair, grammar: ByteAutomaton | None, rules: TokenRules | None = None, **sampling: Any) -> InFlightRequest:
    parameters = RequestParameters(**{"max_tokens": 1} | sampling)
    return pair.submit(np.array([4, 5], np.int32), parameters, grammar=grammar, rules=rules)


def automata(rng: np.random.Generator, *states: int) -> list[ByteAutomaton]:
    made = [random_automaton(rng, states=n, classes=3, dead=0.1) for n in states]
    assert sum(len(one.words()) for one in made) <= ARENA
    return made


RULES = TokenRules(FACTS.vocab_size, {7: 1.5}, banned=((3, 4),))


def test_a_grammar_is_written_once(engine, pair_and_writes, rng: np.random.Generator) -> None:
    """Concurrent and consecutive requests, with token rules too: the engine finds each one's words at the
    location in its entry."""
    pair, writes = pair_and_writes
    first, second = automata(rng, 20, 30)
    sent = [submit(pair, first), submit(pair, first), submit(pair, second, RULES)]
    assert writes.grammars() == sum(len(part.words()) for part in (first, second, RULES))
    drain(pair)
    sent += [submit(pair, one, rules) for one in (first, second, first, None) for rules in (None, RULES)]
    assert writes.grammars() == 0
    assert [len(request.written) for request in sent] == [1, 0, 2] + [0] * 8
    assert sum(sent[2].written) == second.words().nbytes + RULES.words().nbytes
    drain(pair)
    given = [first, first, second, *(one for one in (first, second, first, None) for _ in range(2))]
    for request, grammar in zip(engine.submitted, given, strict=True):
        np.testing.assert_array_equal(request.grammar, [] if grammar is None else grammar.words())
    for request, named in zip(engine.submitted, [0, 0, 1, *[0, 1] * 4], strict=True):
        np.testing.assert_array_equal(request.rules, RULES.words() if named else [])


def test_another_owner_and_another_engine_get_it_again(engine, pair_and_writes, rng: np.random.Generator) -> None:
    pair, writes = pair_and_writes
    (grammar,) = automata(rng, 20)
    words = len(grammar.words())
    for claims in range(3):
        if claims:
            pair.abandon()
            pair.attach(5)
        submit(pair, grammar)
        assert writes.grammars() == words
        drain(pair)
    with FakeEngine(sizes=engine.sizes, facts=GRAMMAR_FACTS) as other:
        again, writes = attached(other)
        submit(again, grammar)
        assert writes.grammars() == words
        drain(again)
        np.testing.assert_array_equal(other.submitted[0].grammar, grammar.words())
        again.close()


def test_what_was_not_submitted_was_not_written(engine, pair_and_writes, rng: np.random.Generator) -> None:
    """Neither parameters that fit into no entry nor full arenas leave an unwritten grammar behind."""
    pair, writes = pair_and_writes
    (grammar,) = automata(rng, 20)
    with pytest.raises(ValueError, match="fit"):
        submit(pair, grammar, seed=2**70)
    engine.consume_nothing = True
    for _ in range(PROMPTS // 100):
        pair.submit(np.ones(100, np.int32), RequestParameters(max_tokens=1))
    with pytest.raises(NoSpaceError, match="the prompt arena is full"):
        pair.submit(np.ones(100, np.int32), RequestParameters(max_tokens=1), grammar=grammar)
    assert writes.grammars() == 0
    engine.consume_nothing = False
    drain(pair)
    submit(pair, grammar)
    assert writes.grammars() == len(grammar.words())
    drain(pair)
    np.testing.assert_array_equal(engine.submitted[-1].grammar, grammar.words())


def test_a_grammar_that_an_entry_names_is_not_written_over(engine, pair_and_writes, rng: np.random.Generator) -> None:
    """The engine reads nothing for a while: grammars of other requests wait, though the request itself was
    cancelled."""
    pair, _ = pair_and_writes
    first, second = automata(rng, 75, 30)[0], automata(rng, 90)[0]
    assert len(first.words()) + len(second.words()) > ARENA
    engine.consume_nothing = True
    pair.cancel(submit(pair, first))
    with pytest.raises(NoSpaceError, match="the grammar arena is full"):
        submit(pair, second)
    engine.consume_nothing = False
    wait_for(lambda: len(engine.submitted) == 1)
    drain(pair)
    submit(pair, second)
    drain(pair)
    submit(pair, first)
    drain(pair)
    for request, grammar in zip(engine.submitted, (first, second, first), strict=True):
        np.testing.assert_array_equal(request.grammar, grammar.words())


def test_submissions_that_can_never_fit_are_reported(pair_and_writes, rng: np.random.Generator) -> None:
    pair, _ = pair_and_writes
    large = random_automaton(rng, states=180, classes=3, dead=0.1)
    assert len(large.words()) > ARENA
    with pytest.raises(ValueError, match=rf"takes {large.words().nbytes} bytes as an automaton, but the engine's limit is 1600"):
        submit(pair, large)
    (most,) = automata(rng, 160)
    assert ARENA - len(RULES.words()) < len(most.words()) <= ARENA
    with pytest.raises(ValueError, match=r"the grammar and the token rules take .* bytes, but the engine's limit is 1600"):
        submit(pair, most, RULES)
    assert pair.in_flight == 0


def test_a_prompt_does_not_take_what_is_for_grammars(engine, pair_and_writes) -> None:
    pair, writes = pair_and_writes
    assert pair.longest_prompt == min(PROMPTS, (SIZES.hash_entries + 1) * FACTS.page_size - 1)
    for _ in range(40):
        pair.submit(np.ones(100, np.int32), RequestParameters(max_tokens=1))
        drain(pair)
    assert writes.grammars() == 0 and len(engine.submitted) == 40


def test_an_arena_without_room_for_prompts_is_refused() -> None:
    buffer = bytearray(QueueLayout(SIZES).total_bytes)
    write_header(memoryview(buffer), SIZES, FACTS)
    np.ndarray((1,), HEADER, buffer)["grammar_arena"] = SIZES.prompt_tokens
    with pytest.raises(LayoutError, match="grammar_arena leaves no space for prompts"):
        read_header(buffer)
