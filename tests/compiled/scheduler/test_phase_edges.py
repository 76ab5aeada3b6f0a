"""Edges of the phases that storms hardly reach: several ends in one tile, high epochs, and remains of finished requests."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.automata import WordsOfSlot
from support.scheduler_cases import make_case, tokens

from blinkpy.device.lanes import Team
from blinkpy.device.tables import as_memoryviews
from blinkpy.kv import state as S
from blinkpy.kv.grammar_checks import is_automaton
from blinkpy.kv.grammars import NO_LIMIT
from blinkpy.kv.invariants import request_invariants as R
from blinkpy.kv.state_memory import differences, snapshot, synthetic_choice
from blinkpy.queues import submission as E
from blinkpy.queues import words as W
from blinkpy.queues.byte_automaton import (
    BYTES,
    CLASSES_WORD,
    COUNTED_WORD,
    HUBS_WORD,
    STATES_WORD,
    ByteAutomaton,
    packed_words,
)
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import FINISH_LENGTH, WAIT_LIMIT, WAIT_SHIFT
from blinkpy.scheduler.phases.commit import mark_ending, release_ended
from blinkpy.scheduler.phases.completions import position_in_pair
from blinkpy.scheduler.policies import RequestFields, guarded_policy, read_policy
from blinkpy.scheduler.policy_program import PolicyError


@pytest.mark.parametrize("lanes", [1, 2, 5])
def test_several_that_end_in_one_tile_give_their_own_slots_back(lanes: int) -> None:
    """A further request waits, so that no step takes the fast path; the other requests keep their places.

    No lane reads a slot that another lane releases before all lanes have released theirs.
    """
    for ends in ((3, 1, 1, 1), (1, 1, 1, 1), (1, 3, 1, 3), (2, 2, 5, 2)):
        several_end(lanes, ends)


def several_end(lanes: int, ends: tuple[int, ...]) -> None:
    case = make_case(lanes=lanes, pairs=1, slots=6, rows=4, pages=40, tokens=40)
    requests = [case.submit(tokens(4 + i, i), most) for i, most in enumerate((*ends, 2))]
    for turn in range(1, 8):
        case.turn()
        status = case.state.requests.status
        running = case.state.running[: case.state.counts[S.RUNNING_COUNT]].tolist()
        assert running == sorted(running, key=lambda slot: case.state.requests.arrival[slot])
        assert sorted(running) == np.flatnonzero(status == S.RUNNING).tolist(), turn
        case.read(0)
    case.finish()
    assert [request.ended for request in requests] == [FINISH_LENGTH] * 5


@pytest.mark.parametrize("epoch", [1, (1 << 12) - 2, (1 << 12) + 5, (1 << 20) + 77, W.EPOCH_LIMIT - 3])
def test_hit_words_are_published_in_every_epoch(epoch: int) -> None:
    """The name of a request in its hit word has all bits of its id, whose upper half is the epoch."""
    case = make_case(pairs=1, attached=False, pages=40)
    case.judged = False
    case.state.pairs.epoch[0] = case.views.pair[0, W.PAIR_EPOCH] = epoch - 1
    client = case.claim(0)
    assert client.epoch == epoch
    case.submit(tokens(12), 2)
    case.finish()
    case.submit(tokens(12), 2)
    (sent,) = client.live()
    case.finish()
    assert sent.cached_tokens == 8 and sent.waited_ns >= 0


def test_hit_words_hold_waits_of_any_length() -> None:
    """The longest wait that fits into the word represents longer ones."""
    for units in (0, 3, WAIT_LIMIT - 2, WAIT_LIMIT, 5 * WAIT_LIMIT + 1):
        waits_and_hits(units)


def waits_and_hits(units: int) -> None:
    case = make_case(pairs=1, rows=1, pages=40)
    case.judged = False
    case.submit(tokens(12), 2)
    case.finish()
    first, last = case.submit(tokens(3), 4), case.submit(tokens(12), 2)
    (sent,) = [request for request in case.clients[0].live() if request.owner is last]
    requests, waited_ns = case.state.requests, -1
    while not last.ended:
        waits = requests.status[sent.slot] == S.WAITING
        if waits and waited_ns < 0:
            requests.arrival_us[sent.slot] -= (units << WAIT_SHIFT) // 1000
            waited_ns = 0
        case.turn()
        if waits and requests.status[sent.slot] == S.RUNNING:
            waited_ns = int(case.state.inbox.now_ns[0] - requests.arrival_us[sent.slot] * 1000)
        case.read(0)
    assert first.ended and waited_ns >= units << WAIT_SHIFT >> 1
    assert (sent.cached_tokens, sent.waited_ns) == (8, min(waited_ns >> WAIT_SHIFT, WAIT_LIMIT - 1) << WAIT_SHIFT)


def test_ended_requests_free_their_token_rule_slots() -> None:
    """With one slot: each next request has other rules."""
    case = make_case(share=1, pairs=1)
    for token in range(1, 6):
        request = case.submit(tokens(3), 2, rules=TokenRules(case.limits.vocab_size, {token: 2.0}))
        case.finish()
        assert request.ended == FINISH_LENGTH
    assert case.counter("grammars_installed") == 5


@pytest.mark.parametrize(("following", "fine"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_cell_leads_to_one_of_the_states(following: int, fine: bool) -> None:
    words = ByteAutomaton(np.zeros(BYTES, np.uint8), np.array([[1], [0]], np.int16), np.ones(2, bool)).words().copy()
    cells = words[-2:].view(np.uint16)
    assert cells.tolist() == [1, 1, 1, 0]
    cells[3] = following
    assert is_automaton(WordsOfSlot(words, 1), 1, len(words), 0, 1) == fine


def test_an_automaton_has_as_many_states_and_classes_as_there_can_be() -> None:
    """These words are otherwise correct: they have the stated length, and no cell or class of a byte is out of range."""
    for states, classes, fine in ((1, BYTES, True), (1, BYTES + 1, False), (1, 0, False), (0, 1, False), (2, 3, True)):
        words = np.zeros(packed_words(states, classes), np.int32)
        words[[STATES_WORD, CLASSES_WORD, COUNTED_WORD, HUBS_WORD]] = states, classes, states, states
        assert is_automaton(WordsOfSlot(words, 1), 1, len(words), 0, 1) == fine, (states, classes)


@pytest.mark.parametrize(
    ("generated", "least", "stops"), [(0, 0, True), (0, 1, False), (1, 1, True), (1, 2, False), (2, 1, True)]
)
def test_a_synthetic_model_keeps_to_min_tokens(monkeypatch: pytest.MonkeyPatch, generated: int, least: int, stops: bool) -> None:
    """A stop id ends the output only after the first `least` tokens."""
    asked: list[tuple[int, bool]] = []

    def follow(grammars: Any, slot: int, state: int, candidate: int, stop: bool, most: int) -> int:
        asked.append((candidate, stop))
        return 0

    monkeypatch.setitem(synthetic_choice.__globals__, "follow", follow)
    monkeypatch.setitem(synthetic_choice.__globals__, "most_distance", lambda *_: NO_LIMIT)
    entry = np.full((1, E.SQ_ENTRY_WORDS), -1)
    entry[0, E.WORD_MIN_TOKENS], entry[0, E.WORD_STOP_IDS] = least, 3
    requests = SimpleNamespace(
        length=[4 + generated], prompt_length=[4], tokens=[[0] * 9], grammar=[0], rules=[-1], grammar_state=[0], entry=entry
    )
    assert synthetic_choice(SimpleNamespace(words=None), requests, 0, 4 + generated, 3, 9) == 3
    assert asked == [(3, stops)]


def test_a_list_has_each_slot_once_and_a_status_is_one_of_four() -> None:
    two = [S.RUNNING, S.RUNNING]
    assert R.check_list([0, 1], 2, 2, two, S.RUNNING, [0, 0]) and not R.check_list([1, 1], 2, 2, two, S.RUNNING, [0, 0])
    counts = np.zeros(S.COUNTS, np.int64)
    for status, fine in ((S.EMPTY - 1, False), (S.EMPTY, True), (S.FINISHING + 1, False)):
        none: list[int] = []
        requests = SimpleNamespace(status=[status], rank=none, arrival=none)
        state = SimpleNamespace(counts=counts, requests=requests, running=none, waiting=none, finishing=none)
        assert (R.check_lists(SimpleNamespace(slots=1, rows=1), state, [0]) == 0) == fine, status


@pytest.mark.parametrize("groups", [1, 4])
def test_a_record_has_the_tokens_of_a_step_that_has_ended_and_no_others(groups: int) -> None:
    """Between two groups of a step no token is sampled."""
    cut = {"step_groups": groups, "cut_step_tokens": 8} if groups > 1 else {}
    case = make_case(lanes=1, pairs=1, slots=4, tokens=24, pages=60, max_model_len=64, record_turns=64, **cut)
    case.submit(tokens(40), 3, best_effort=1)
    case.submit(tokens(5, 3), 6)
    recorder, batch, seen = case.state.recorder, case.state.batch, list[tuple[int, int]]()
    for _ in range(14):
        position, ended = int(recorder.cursor[S.POSITION]), batch.counts[S.GROUP] + 1 >= batch.counts[S.GROUPS]
        expected = int(batch.counts[S.ROWS]) if ended else 0
        case.turn()
        case.read(0)
        if recorder.cursor[S.POSITION] > position:
            seen.append((expected, int(recorder.words[position + 4 & case.limits.record_words - 1]) & 0xFFFFFFFF))
    case.finish()
    assert all(expected == recorded for expected, recorded in seen), seen
    assert {0, 2} <= {expected for expected, _ in seen}


REQUEST = RequestFields(*range(5, 5 + len(RequestFields._fields)))
OF_A_LIBRARY = "import statistics\nimport textwrap\n\n\n"


@pytest.mark.parametrize(
    ("expression", "what"),
    [
        ("0 < request.pair in (1, 2)", "rank uses `0 < request.pair in (1, 2)`, which policies do not support"),
        ("0 < request.pair not in (1, 2)", "rank uses `0 < request.pair not in (1, 2)`, which policies do not support"),
        ("statistics.mean(1)", "rank calls `statistics.mean(1)`; a policy can call"),
        ("textwrap.dedent(1)", "rank calls `textwrap.dedent(1)`; a policy can call"),
    ],
)
def test_inexpressible_policies_are_reported(tmp_path: Path, expression: str, what: str) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{OF_A_LIBRARY}def rank(request):\n    return {expression}\n")
    with pytest.raises(PolicyError) as reported:
        guarded_policy(read_policy(f"{file}:rank"))
    assert what in reported.value.text


def test_a_function_of_no_module_is_called_like_any_other(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def two(x):\n    return x * 2\n\n\ntwo.__module__ = None\n\n\ndef rank(request):\n    return two(4)\n")
    assert guarded_policy(read_policy(f"{file}:rank")).function(REQUEST, [0], 0) == 8


@pytest.mark.parametrize("seed", range(3))
def test_positions_are_those_of_a_count_for_each_pair(seed: int) -> None:
    """A 64-bit word has space for four pairs; an item without a pair is not counted."""
    draw = random.Random(seed)
    for pairs, n, lanes in ((1, 9, 1), (4, 9, 3), (5, 20, 5), (9, 23, 2), (17, 60, 4)):
        of_pairs = [draw.randrange(-1, pairs) for _ in range(n)]
        scratch = Items(*(np.array(words, np.int64).data for words in (of_pairs, [-1] * n, [-1] * pairs)))
        Team(lanes, seed, races=True).run(position_in_pair, Sizes(pairs), scratch, n)
        expected = [of_pairs[:i].count(pair) if pair >= 0 else -1 for i, pair in enumerate(of_pairs)]
        assert scratch.position.tolist() == expected
        assert scratch.total.tolist() == [of_pairs.count(pair) for pair in range(pairs)]


class Items(NamedTuple):
    pair: Any
    position: Any
    total: Any


class Sizes(NamedTuple):
    pairs: int


def end_marked(limits: Any, state: Any, lane: int, lanes: int) -> None:
    release_ended(limits, state, mark_ending(state, lane, lanes), lane, lanes)


@pytest.mark.parametrize("record_turns", [0, 16])
def test_several_cancels_of_one_turn_end_the_same_in_several_lanes(record_turns: int) -> None:
    left = []
    for lanes in (1, 2, 5):
        case = make_case(lanes=1, pairs=1, slots=8, rows=4, intake_entries=8, pages=60, record_turns=record_turns)
        for n in range(7):
            case.submit(tokens(5, n), 9)
        case.turn(2)
        state = case.state
        assert state.counts[[S.RUNNING_COUNT, S.WAITING_COUNT]].tolist() == [4, 3]
        slots = [*state.running[[0, 2, 3]].tolist(), *state.waiting[[1, 2]].tolist()]
        state.inbox.cancel[slots] = state.requests.request_id[slots]
        Team(lanes, lanes, races=True).run(end_marked, case.limits, as_memoryviews(state))
        assert state.finishing[:5].tolist() == slots
        left.append(snapshot(state))
    assert not [difference for other in left for difference in differences(left[0], other)]
