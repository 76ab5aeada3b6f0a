"""Edge cases between front end and engine, which random sizes hardly meet."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from blinkpy.dpu.link import connectors
from blinkpy.dpu.link.grammar_arena import Arena
from blinkpy.dpu.link.queue_pair import InFlightRequest
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues.byte_automaton import BYTES, MOST_STATES, ByteAutomaton
from blinkpy.queues.layout import ALIGNMENT, QueueLayout, QueueSizes
from blinkpy.queues.token_rules import MARK, TokenRules


def test_a_region_has_the_pages_that_its_parts_need_and_no_more() -> None:
    """Whichever byte of a page its last part ends at."""
    for slots in range(1, 1025):
        layout = QueueLayout(QueueSizes(2, slots, 1024, 256, 4096, 64))
        for end, length in (
            (layout.prompt + 4096 * 4, layout.front_region_bytes),
            (layout.hits + slots * 8, layout.engine_region_bytes),
        ):
            assert end <= length < end + ALIGNMENT and length % ALIGNMENT == 0
        assert layout.hits == layout.records + 256 * 168


def test_positions_of_an_arena_move_on_by_whole_rings() -> None:
    """However often it was empty: else they would grow without end."""
    arena = Arena(8)
    for turn in range(50):
        assert arena.take(3) == 0
        assert arena.tail == 8 * turn + 3
        arena.give_back(arena.tail)


@pytest.mark.parametrize("refused", [False, True])
def test_a_queue_pair_is_looked_at_before_it_is_claimed(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    done: list[str] = []
    transport = SimpleNamespace(close=lambda: done.append("close"))
    pair: Any = SimpleNamespace(attach=lambda timeout_s: done.append("attach"))
    config: Any = SimpleNamespace(queue=SimpleNamespace(engine_timeout_ms=500))
    monkeypatch.setattr(connectors, "connect", lambda config, worker: transport)
    monkeypatch.setattr(connectors, "QueuePair", lambda transport, timeout_s: pair)

    def check(queue_pair: Any) -> None:
        assert queue_pair is pair
        done.append("check")
        if refused:
            raise ValueError("not this one")

    worker: Any = None
    if refused:
        with pytest.raises(ValueError, match="not this one"):
            connectors.open_queue_pair(config, worker, check)
    else:
        assert connectors.open_queue_pair(config, worker, check) is pair
    assert done == ["check", "close" if refused else "attach"]


def test_request_state_before_the_first_completion() -> None:
    request = InFlightRequest(7, 1, None, 1)
    assert (request.cached_tokens, request.waited_ns, request.silent, request.cancelled) == (0, -1, True, False)
    assert (request.written, list(request.records)) == ((), [])


def star(states: int) -> dict[str, Any]:
    """A table in which each state is reached from the first ones, and all accept."""
    following = np.minimum(np.arange(1, states + BYTES + 1), states - 1)
    next_state = np.full((states, BYTES), -1, np.int64)
    rows = -(-states // BYTES)
    next_state[:rows] = np.resize(following, (rows, BYTES))
    return {
        "class_of": np.arange(BYTES, dtype=np.uint8),
        "next_state": next_state,
        "accepting": np.ones(states, bool),
    }


def test_the_state_limit_applies_after_trimming() -> None:
    kept = ByteAutomaton.trimmed(**star(MOST_STATES))
    assert kept.states == MOST_STATES
    with pytest.raises(ValueError, match=f"^an automaton has at most {MOST_STATES} states, not {MOST_STATES + 1}$"):
        ByteAutomaton.trimmed(**star(MOST_STATES + 1))


def test_trimming_keeps_transitions_to_the_start_state() -> None:
    """The second state accepts nothing, and leads to the first one alone, which does."""
    class_of, next_state = np.zeros(BYTES, np.uint8), np.array([[1], [0]])
    automaton = ByteAutomaton.trimmed(class_of, next_state, np.array([True, False]))
    assert automaton.states == 2 and automaton.accepts(b"ab") and not automaton.accepts(b"a")


def test_a_truncated_packed_automaton_is_detected_by_its_length() -> None:
    words = ByteAutomaton.trimmed(**star(3)).words()
    for other in (words[:-1], np.append(words, np.int32(0))):
        with pytest.raises(ValueError, match="the length of a packed automaton does not match its sizes"):
            ByteAutomaton.of_words(other)


def test_truncated_token_rules_are_detected() -> None:
    words = TokenRules(64, {3: 1.0}, [1, 2], [[4, 5]]).words()
    assert words[0] == MARK
    for count in (0, 1, 3, 4):
        with pytest.raises(ValueError, match=r"the words are not token rules|another length"):
            TokenRules.of_words(words[:count], 64)
    for other in (words[:-1], np.append(words, np.int32(0))):
        with pytest.raises(ValueError, match="the length of token rules does not match their counts"):
            TokenRules.of_words(other, 64)


def test_no_token_has_bytes() -> None:
    """There is a word all the same: empty memory has no address."""
    for pieces in ([], [b""], [b"", b""]):
        made = TokenBytes.of(pieces, 3)
        assert made.pieces() == [b""] * 3 and made.words.tolist() == [0]


@pytest.mark.parametrize(
    ("states", "classes", "what"),
    [
        (0, 1, f"an automaton has 1 to {MOST_STATES} states, not 0"),
        (MOST_STATES + 1, 1, f"an automaton has 1 to {MOST_STATES} states, not {MOST_STATES + 1}"),
        (MOST_STATES, 1, ""),
        (1, 0, "a byte's class is out of range"),
        (1, BYTES + 1, "a byte's class is out of range"),
        (1, BYTES, ""),
    ],
)
def test_states_and_classes_of_an_automaton_have_bounds(states: int, classes: int, what: str) -> None:
    parts = np.zeros(BYTES, np.uint8), np.zeros((states, classes), np.int16), np.ones(states, bool)
    if what:
        with pytest.raises(ValueError, match=f"^{what}$"):
            ByteAutomaton(*parts)
    else:
        assert ByteAutomaton(*parts).states == states
