"""Byte automata: their language, packed form, and trimming, compared with Python's re and a search by hand."""

import contextlib
import re

import numpy as np
import pytest
from support.automata import automaton_of_choices, random_automaton

from blinkpy.dpu.grammar.byte_nfa import automaton_of
from blinkpy.dpu.grammar.string_rules import StringRules
from blinkpy.queues import byte_automaton as A
from blinkpy.queues.byte_automaton import DEAD, ByteAutomaton
from blinkpy.queues.words import DIGEST_BITS


def test_an_automaton_of_choices_accepts_exactly_these(rng):
    choices = [bytes(rng.integers(97, 100, rng.integers(1, 6), dtype=np.uint8)) for _ in range(5)]
    automaton = automaton_of_choices(choices)
    expected = re.compile(b"|".join(sorted(map(re.escape, choices), reverse=True)))
    for _ in range(500):
        text = bytes(rng.integers(97, 101, rng.integers(0, 7), dtype=np.uint8))
        assert automaton.accepts(text) == (expected.fullmatch(text) is not None)
    assert all(map(automaton.accepts, choices))


def test_the_packed_form_gives_the_automaton_back(rng):
    for _ in range(50):
        automaton = random_automaton(rng)
        words = automaton.words()
        assert words.dtype == np.int32 and not words.flags.writeable
        assert len(words) == A.packed_words(automaton.states, automaton.classes)
        again = ByteAutomaton.of_words(words.copy())
        for name in ("class_of", "next_state", "accepting"):
            np.testing.assert_array_equal(getattr(again, name), getattr(automaton, name))
        assert again.digest == automaton.digest and 0 <= again.digest < 1 << DIGEST_BITS
        np.testing.assert_array_equal(again.words(), words)  # the flags of states included


def test_its_memory_is_that_of_all_its_arrays(rng):
    """With counted strings, too: a cache of automata is bounded by it."""
    counted = automaton_of(StringRules(3, int(rng.integers(20, 1000))).piece(frozenset()))
    assert counted is not None and len(counted.loops)
    for automaton in (counted, *(random_automaton(rng) for _ in range(5))):
        automaton.words()
        arrays = [value for value in vars(automaton).values() if isinstance(value, np.ndarray)]
        assert automaton.nbytes == sum(array.nbytes for array in arrays)


def test_another_automaton_has_another_digest(rng):
    automaton = random_automaton(rng, states=4)
    other = ByteAutomaton(automaton.class_of, automaton.next_state, ~automaton.accepting)
    assert other.digest != automaton.digest


def test_trimming_keeps_the_language_and_only_useful_states(rng):
    for _ in range(50):
        states, classes = int(rng.integers(1, 9)), int(rng.integers(1, 4))
        class_of = rng.integers(0, classes, A.BYTES).astype(np.uint8)
        table = np.where(rng.random((states, classes)) < 0.5, rng.integers(0, states, (states, classes)), DEAD)
        accepting = rng.random(states) < 0.3
        reaches = {start: _reachable(table, start) for start in range(states)}
        useful = [s for s in sorted(reaches[0]) if any(accepting[end] for end in reaches[s])]
        if not useful:
            with pytest.raises(ValueError, match="accepts no string"):
                ByteAutomaton.trimmed(class_of, table, accepting)
            continue
        automaton = ByteAutomaton.trimmed(class_of, table, accepting)
        assert automaton.states == len(useful)
        for _ in range(30):
            text, state = bytes(rng.integers(0, 256, rng.integers(0, 6), dtype=np.uint8)), 0
            for byte in text:
                state = int(table[state, class_of[byte]]) if state >= 0 else DEAD
            assert automaton.accepts(text) == (state >= 0 and bool(accepting[state]))


def _reachable(table, start):
    found, frontier = {start}, [start]
    while frontier:
        new = {int(s) for s in table[frontier.pop()] if s >= 0} - found
        found |= new
        frontier += new
    return found


def test_states_say_where_the_output_may_and_must_end():
    automaton = automaton_of_choices([b"a", b"ab"])
    flags = automaton.words()[A.CELLS_WORD :].view(np.uint16)[:: 1 + automaton.classes][: automaton.states]
    by_text = [flags[automaton.advance(0, text)] for text in (b"", b"a", b"ab")]
    assert by_text == [1 << A.DISTANCE_SHIFT, A.STATE_ACCEPTING, A.STATE_ACCEPTING | A.STATE_ENDING]
    assert [automaton.must_end(automaton.advance(0, text)) for text in (b"", b"a", b"ab")] == [False, False, True]
    nothing = ByteAutomaton(np.zeros(A.BYTES, np.uint8), np.full((1, 1), DEAD, np.int16), np.zeros(1, bool))
    assert not nothing.must_end(0) and not nothing.words()[A.CELLS_WORD] & A.STATE_ENDING, "nothing has ended"


@pytest.mark.parametrize(
    ("states", "classes", "fine"),
    [
        *((1, 1, True), (A.MOST_STATES, 1, True), (1, A.BYTES, True)),
        *((0, 1, False), (0, 0, False), (A.MOST_STATES + 1, 1, False), (1, 0, False), (1, A.BYTES + 1, False), (-1, -2, False)),
    ],
)
def test_sizes_are_bounded(states, classes, fine):
    """Of arrays, and of words that have the length that follows from their sizes."""
    words = np.zeros(A.packed_words(states, classes), np.int32)
    words[[A.STATES_WORD, A.CLASSES_WORD]] = states, classes
    parts = np.zeros(A.BYTES, np.uint8), np.zeros((max(0, states), max(0, classes)), np.int16), np.ones(max(0, states), bool)
    if fine:
        words = ByteAutomaton(*parts).words()
        assert (ByteAutomaton.of_words(words).states, ByteAutomaton.of_words(words).classes) == (states, classes)
        return
    with pytest.raises(ValueError, match=r"out of range|has 1 to 32767 states"):
        ByteAutomaton(*parts)
    with pytest.raises(ValueError, match="a packed automaton's sizes are out of range"):
        ByteAutomaton.of_words(words)


def test_words_of_another_length_are_refused():
    words = automaton_of_choices([b"xyz"]).words()
    for length in range(len(words) + 2):
        given = np.resize(words, length)
        if length == len(words):
            assert ByteAutomaton.of_words(given).accepts(b"xyz")
        else:
            with pytest.raises(ValueError, match="too short" if length < A.CELLS_WORD else "does not match its sizes"):
                ByteAutomaton.of_words(given)


def test_one_word_that_is_wrong_is_refused_or_another_automaton(rng):
    """Whatever it is: nothing but a ValueError comes of it, and no words are two automata."""
    for _ in range(400):
        words = random_automaton(rng).words().copy()
        words[rng.integers(len(words))] ^= 1 << int(rng.integers(31))
        with contextlib.suppress(ValueError):
            np.testing.assert_array_equal(ByteAutomaton.of_words(words).words(), words)


def test_a_state_or_class_out_of_range_is_refused(rng):
    automaton = random_automaton(rng, states=3)
    for name, place in (("next_state", (1, 0)), ("class_of", (7,))):
        values = getattr(automaton, name).copy()
        values[place] = 3 if name == "next_state" else automaton.classes
        parts = {n: getattr(automaton, n) for n in ("class_of", "next_state", "accepting")} | {name: values}
        with pytest.raises(ValueError, match="out of range"):
            ByteAutomaton(**parts)


def test_next_state_is_a_table_of_int16_or_refused_as_such(rng):
    """Another ndim or another dtype is enough for an error, before anything is read from the table."""
    automaton = random_automaton(rng, states=3)
    table = automaton.next_state
    for next_state in (table.reshape(-1), table[None], table[0, 0], table.astype(np.int32), table.astype(np.uint16)):
        with pytest.raises(ValueError, match=r"^next_state must be int16 \[states, classes\]"):
            ByteAutomaton(automaton.class_of, next_state, automaton.accepting)


def test_nbytes_are_those_of_its_arrays_and_of_the_packed_form(rng):
    automaton = random_automaton(rng)
    cells = automaton.states * automaton.classes
    packed = 4 * A.packed_words(automaton.states, automaton.classes)
    assert automaton.nbytes == A.BYTES + 2 * cells + automaton.states + packed


@pytest.mark.parametrize(
    ("name", "change", "what"),
    [
        ("class_of", lambda values: values[:-1], r"class_of must be uint8 \[256\]"),
        ("class_of", lambda values: values.reshape(1, -1), r"class_of must be uint8 \[256\]"),
        ("class_of", lambda values: values.astype(np.int32), r"class_of must be uint8 \[256\]"),
        ("next_state", lambda values: values.reshape(-1), r"next_state must be int16 \[states, classes\]"),
        ("next_state", lambda values: values[0, 0], r"next_state must be int16 \[states, classes\]"),
        ("next_state", lambda values: values.astype(np.int32), r"next_state must be int16 \[states, classes\]"),
        ("accepting", lambda values: values[:-1], r"accepting must be bool \[states\]"),
        ("accepting", lambda values: values.astype(np.uint8), r"accepting must be bool \[states\]"),
    ],
)
def test_arrays_of_another_shape_or_type_are_refused(rng, name, change, what):
    automaton = random_automaton(rng, states=3)
    parts = {n: getattr(automaton, n) for n in ("class_of", "next_state", "accepting")}
    ByteAutomaton(**parts)
    with pytest.raises(ValueError, match=what):
        ByteAutomaton(**parts | {name: change(parts[name])})


def test_a_next_state_of_another_shape_or_type_is_named(rng):
    """The error for next_state comes before its states and classes are read, whatever else is wrong."""
    states, class_of = int(rng.integers(1, 9)), np.zeros(256, np.uint8)
    accepting = np.ones(states, np.bool_)
    for wrong in (np.zeros(states, np.int16), np.zeros((states, 1, 1), np.int16), np.zeros((states, 1), np.int32)):
        with pytest.raises(ValueError, match="next_state must be int16"):
            ByteAutomaton(class_of, wrong, accepting)
