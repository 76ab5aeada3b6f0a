"""Pieces, products and minimal automata, on random automata over all bytes."""

import numpy as np
from support.automata import random_automaton
from support.walks import Walker

from blinkpy.dpu.grammar import byte_nfa
from blinkpy.dpu.grammar.automata.automaton_products import difference, intersection
from blinkpy.dpu.grammar.automata.nfa_nodes import ByteNfa
from blinkpy.dpu.grammar.byte_nfa import Piece, automaton_of, embedded
from blinkpy.queues.byte_automaton import ByteAutomaton

CASES = 30


def samples(rng: np.random.Generator, *automata: ByteAutomaton) -> list[bytes]:
    """Strings, half of them of the automata, some with a byte changed."""
    found = [rng.integers(0, 256, rng.integers(0, 5), np.uint8).tobytes() for _ in range(10)]
    for walker in map(Walker, automata):
        for _ in range(15):
            text = bytearray(walker.draw(rng, int(rng.integers(0, 8))))
            if text and rng.random() < 0.4:
                text[rng.integers(len(text))] = rng.integers(0, 256)
            found.append(bytes(text))
    return found


def accepts(automaton: ByteAutomaton | None, text: bytes) -> bool:
    return automaton is not None and automaton.accepts(text)


def test_products(rng: np.random.Generator) -> None:
    both = only = 0
    for _ in range(CASES):
        a, b = random_automaton(rng, dead=0.2), random_automaton(rng, dead=0.2)
        common, rest = intersection(a, b), difference(a, b)
        for text in samples(rng, a, b):
            in_a, in_b = a.accepts(text), b.accepts(text)
            assert accepts(common, text) == (in_a and in_b)
            assert accepts(rest, text) == (in_a and not in_b)
            both, only = both + (in_a and in_b), only + (in_a and not in_b)
    assert min(both, only) > CASES
    assert intersection(a, None) is None
    assert difference(None, a) is None
    assert difference(a, a) is None


def test_a_minimal_automaton_accepts_the_same(rng: np.random.Generator) -> None:
    for _ in range(CASES):
        automaton = random_automaton(rng)
        minimal = automaton_of(embedded(automaton))
        assert minimal is not None
        assert minimal.states <= automaton.states
        for text in samples(rng, automaton):
            assert minimal.accepts(text) == automaton.accepts(text)
        again = automaton_of(embedded(minimal))
        assert again is not None
        assert again.digest == minimal.digest, "it is canonical"
        twice = automaton_of(byte_nfa.choice(embedded(automaton), embedded(automaton)))
        assert twice is not None and twice.digest == minimal.digest, "states that do the same are one"


def test_pieces(rng: np.random.Generator) -> None:
    """Sequence, choice and repetition, against trying all cuts."""
    for _ in range(CASES):
        a, b = random_automaton(rng, states=3, dead=0.6), random_automaton(rng, states=3, dead=0.6)
        low = int(rng.integers(0, 3))
        high = None if rng.random() < 0.5 else low + int(rng.integers(0, 3))
        one, other = embedded(a), embedded(b)
        row, either, again = (automaton_of(piece) for piece in (
            byte_nfa.sequence(one, other), byte_nfa.choice(one, other), byte_nfa.repeat(one, low, high)
        ))  # fmt: skip
        texts = samples(rng, a, b)
        texts += [first[:4] + second[:4] for first, second in zip(texts, reversed(texts), strict=True)]
        lists = automaton_of(byte_nfa.separated(one, other))
        for text in texts:
            cuts = [(text[:at], text[at:]) for at in range(len(text) + 1)]
            assert accepts(row, text) == any(a.accepts(first) and b.accepts(second) for first, second in cuts)
            assert accepts(either, text) == (a.accepts(text) or b.accepts(text))
            if len(text) < 9:
                assert accepts(again, text) == repeats(a, text, low, high)
                assert accepts(lists, text) == lists_of(a, b, text)


def bytewise(text: bytes) -> Piece:
    """A text, byte by byte."""
    return byte_nfa.sequence(*(byte_nfa.byte_range(byte, byte) for byte in text))


def by_nodes(automaton: ByteAutomaton) -> Piece:
    """The language of an automaton by nodes and edges alone."""

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        first = nfa.nodes(automaton.states)
        nfa.link(source, first)
        for state in range(automaton.states):
            for byte in range(256):
                following = int(automaton.next_state[state, automaton.class_of[byte]])
                if following >= 0:
                    nfa.edges[first + state].append((byte, byte, first + following))
            if automaton.accepting[state]:
                nfa.link(first + state, target)

    return add


def test_texts_and_copies_are_a_shorter_form(rng: np.random.Generator) -> None:
    """Random pieces of texts and of copies of automata have the same minimal automaton as pieces of single bytes."""
    numbers = automaton_of(byte_nfa.repeat(byte_nfa.byte_range(0x61, 0x62), 1, 5))
    name = automaton_of(
        byte_nfa.sequence(bytewise(b"c"), byte_nfa.repeat(byte_nfa.byte_range(0x61, 0x64), 0, None), bytewise(b"d"))
    )
    assert numbers is not None and name is not None

    def text() -> bytes:
        return rng.choice([0x61, 0x62, 0x63], int(rng.integers(0, 7)), p=[0.7, 0.2, 0.1]).astype(np.uint8).tobytes()

    def both(depth: int) -> tuple[Piece, Piece]:
        kind = int(rng.integers(0, 7 if depth else 3))
        if kind == 0:
            one = text()
            return byte_nfa.literal(one), bytewise(one)
        if kind == 1:
            texts = [text() for _ in range(rng.integers(1, 6))]
            return byte_nfa.words(texts), byte_nfa.choice(*map(bytewise, texts))
        if kind == 2:
            automaton = (numbers, name, random_automaton(rng, states=4, dead=0.6))[rng.integers(3)]
            return embedded(automaton), by_nodes(automaton)
        parts = [both(depth - 1) for _ in range(rng.integers(1, 4))]
        if kind == 3:
            low, high = (0, None) if rng.random() < 0.5 else (int(rng.integers(0, 2)), 2)
            return byte_nfa.repeat(parts[0][0], low, high), byte_nfa.repeat(parts[0][1], low, high)
        if kind == 4:
            return byte_nfa.separated(parts[0][0], parts[-1][0]), byte_nfa.separated(parts[0][1], parts[-1][1])
        join = byte_nfa.sequence if kind == 5 else byte_nfa.choice
        return join(*(one for one, _ in parts)), join(*(other for _, other in parts))

    for _ in range(CASES):
        short, long = (automaton_of(piece) for piece in both(int(rng.integers(1, 4))))
        assert short is not None and long is not None
        assert short.states == long.states
        assert short.digest == long.digest
        assert ByteAutomaton.of_words(short.words()).states == short.states, "its distances are right"


def test_texts_of_equal_length_are_distinguished(rng: np.random.Generator) -> None:
    """Two states with edges for the same bytes to the same state, by different texts."""
    for _ in range(CASES):
        one, other = (rng.choice([0x61, 0x62], 4).astype(np.uint8).tobytes() for _ in range(2))
        branch = byte_nfa.byte_range(0x78, 0x79)
        pairs = (b"1", one), (b"2", other)
        forms = [byte_nfa.sequence(byte_nfa.literal(sign), branch, byte_nfa.literal(text)) for sign, text in pairs]
        automaton = automaton_of(byte_nfa.choice(*forms))
        assert automaton is not None
        for sign, text in ((b"1", one), (b"2", other), (b"1", other), (b"2", one)):
            assert automaton.accepts(sign + b"x" + text) == (text == (one if sign == b"1" else other))


def lists_of(a: ByteAutomaton, b: ByteAutomaton, text: bytes) -> bool:
    """Whether the text is strings of a with strings of b between them."""
    begins, ends = {0}, set[int]()
    for _ in range(2 * len(text) + 2):  # more strings would be empty ones
        ends |= {end for start in begins for end in range(start, len(text) + 1) if a.accepts(text[start:end])}
        begins |= {end for start in ends for end in range(start, len(text) + 1) if b.accepts(text[start:end])}
    return len(text) in ends


def repeats(automaton: ByteAutomaton, text: bytes, low: int, high: int | None) -> bool:
    """Whether the text is low to high strings of the automaton, one after another."""
    most = len(text) + low if high is None else high  # more would be empty ones
    reached = {0}  # ends of the strings so far
    ends = [reached]
    for _ in range(most):
        reached = {end for start in reached for end in range(start, len(text) + 1) if automaton.accepts(text[start:end])}
        ends.append(reached)
    return any(len(text) in ends[count] for count in range(low, most + 1))
