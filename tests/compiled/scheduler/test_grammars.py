"""Grammars in the scheduler: owners of slots, refusals, and ends of outputs.

Supports claim outputs/grammars.
"""

from dataclasses import replace

import numpy as np
import pytest
from support.automata import WordsOfSlot, automaton_of_choices, random_automaton, random_counted_automaton, random_position
from support.expected_request import ExpectedRequest, bytes_to_an_end
from support.scheduler_cases import VOCAB, Case, case_sizes, make_case, tokens

from blinkpy.device.lanes import in_lanes
from blinkpy.device.tables import as_memoryviews
from blinkpy.dpu.link.queue_pair import NoSpaceError
from blinkpy.kv import state as S
from blinkpy.kv.grammar_checks import is_automaton
from blinkpy.kv.grammars import ENDING, ILLEGAL, NO_LIMIT, distance_of, follow, state_after, unused_grammar
from blinkpy.kv.limits import make_limits_by_name
from blinkpy.kv.state import Grammars
from blinkpy.kv.state_memory import make_state
from blinkpy.kv.token_bytes import LONGEST, TokenBytes
from blinkpy.queues import byte_automaton as A
from blinkpy.queues import words as C
from blinkpy.queues.byte_automaton import DEAD, ByteAutomaton
from blinkpy.queues.token_rules import TokenRules
from blinkpy.verify.sim.grammar_supply import ALPHABET, GRAMMAR_WORDS

FREE = ByteAutomaton(np.zeros(A.BYTES, np.uint8), np.zeros((1, 1), np.int16), np.ones(1, bool))  # any string


def automata(case: Case, count: int) -> list[ByteAutomaton]:
    """Different automata that accept any string of the case's tokens up to some length."""
    rng, found = np.random.default_rng(7), dict[int, ByteAutomaton]()
    while len(found) < count:
        class_of = rng.integers(0, 2, A.BYTES).astype(np.uint8)
        automaton = ByteAutomaton(class_of, np.array([[1, 1], [0, 0]], np.int16), np.ones(2, bool))
        found[automaton.digest] = automaton
    return list(found.values())


def held(case: Case) -> set[int]:
    """Digests of the engine's grammars."""
    grammars = case.state.grammars
    return set(grammars.digest[grammars.epoch > 0].tolist())


def ends(case: Case, *requests: ExpectedRequest) -> list[int]:
    case.finish()
    return [request.ended for request in requests]


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_grammar_is_copied_once_and_found_again(lanes: int) -> None:
    case = make_case(lanes=lanes, share=2, max_model_len=64)
    (grammar,) = automata(case, 1)
    requests = [case.submit(tokens(3, i), 5, grammar=grammar) for i in range(3)]
    assert ends(case, *requests) == [C.FINISH_LENGTH] * 3
    assert (case.counter("grammars_installed"), case.counter("grammars_reused")) == (1, 2)
    assert held(case) == {grammar.digest}
    assert len({request.got[0] for request in requests} | {0}) > 1  # the model determines its tokens


def test_other_queue_pairs_and_later_owners_have_their_own() -> None:
    """A front end chooses its digests, so a digest names only its own grammars."""
    case = make_case(share=2)
    true, false = automata(case, 2)
    object.__setattr__(false, "_digest", true.digest)  # another automaton under the same name
    requests = [case.submit(tokens(3), 3, pair, grammar=grammar) for pair, grammar in enumerate((true, false))]
    assert ends(case, *requests) == [C.FINISH_LENGTH] * 2
    case.claim(0)
    again = case.submit(tokens(3), 3, grammar=false)
    assert ends(case, again) == [C.FINISH_LENGTH]
    assert case.counter("grammars_installed") == 3
    slot = int(np.argmax(case.state.grammars.used))
    np.testing.assert_array_equal(case.state.grammars.words[slot, : len(false.words())], false.words())


def test_the_least_recently_used_grammar_is_evicted() -> None:
    case = make_case(share=2)
    a, b, c = automata(case, 3)
    for grammar, left in ((a, {a}), (b, {a, b}), (a, {a, b}), (c, {a, c})):
        assert ends(case, case.submit(tokens(3), 2, grammar=grammar)) == [C.FINISH_LENGTH]
        assert held(case) == {one.digest for one in left}


def test_a_slot_with_a_refused_automaton_is_evicted_first() -> None:
    case = make_case(share=2)
    a, b, broken, c = automata(case, 4)
    long, short = case.submit(tokens(3), 20, grammar=a), case.submit(tokens(4), 2, grammar=b)
    while not short.ended:
        case.turn()
        case.read(0)
    refused = case.submit(tokens(3), 2, rejected=True, grammar=broken, entry={"grammar_words": len(broken.words()) - 1})
    assert ends(case, long, refused) == [C.FINISH_LENGTH, C.FINISH_REJECTED] and held(case) == {a.digest}
    assert ends(case, case.submit(tokens(3), 2, grammar=c)) == [C.FINISH_LENGTH]
    assert held(case) == {a.digest, c.digest}


def test_no_live_request_loses_its_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a running nor a waiting request. A front end that exceeds its share is refused, without an effect on other front
    ends."""
    case = make_case(share=2, slots=4, rows=1)
    monkeypatch.setattr(case.clients[0], "_has_place", lambda digest: True)
    a, b, c = automata(case, 3)
    runs, waits = case.submit(tokens(3), 12, grammar=a), case.submit(tokens(4), 12, grammar=b)
    case.turn(2)
    assert case.state.counts[[S.RUNNING_COUNT, S.WAITING_COUNT]].tolist() == [1, 1]
    refused, other = case.submit(tokens(3), 2, rejected=True, grammar=c), case.submit(tokens(3), 2, pair=1, grammar=c)
    free = case.submit(tokens(3), 2)
    assert ends(case, runs, waits, refused, other, free) == [C.FINISH_LENGTH] * 2 + [C.FINISH_REJECTED] + [C.FINISH_LENGTH] * 2
    assert refused.reason == C.REJECT_SHARE
    assert ends(case, case.submit(tokens(3), 2, grammar=c)) == [C.FINISH_LENGTH]


def test_a_client_keeps_to_its_share() -> None:
    case = make_case(share=2, slots=4)
    client, grammars = case.clients[0], automata(case, 3)
    requests = [case.submit(tokens(3), 9, grammar=grammar) for grammar in (*grammars[:2], grammars[0])]
    with pytest.raises(Exception, match="use all grammar slots"):
        case.submit(tokens(3), 9, grammar=grammars[2])
    ends(case, *requests)
    assert ends(case, case.submit(tokens(3), 2, grammar=grammars[2])) == [C.FINISH_LENGTH]
    large = random_automaton(np.random.default_rng(1), states=99, classes=4)
    with pytest.raises(ValueError, match=f"takes {4 * len(large.words())} bytes as an automaton, but the engine's limit is"):
        client.submit(np.ones(1, np.int32), requests[0].sampling, None, large)
    with pytest.raises(ValueError, match="does not support grammars"):
        make_case().submit(tokens(3), 2, grammar=FREE)


def test_storms_in_a_small_arena(rng: np.random.Generator) -> None:
    """Front ends with more automata and token rules than the arena holds, cancels, successors, and an engine that reads one entry
    a turn and preempts. Automata and rules of unread entries stay in the arena, and all tokens are correct.

    Supports claim front-ends/client.
    """
    hits = written = full = preemptions = 0
    for number in range(50):
        if number >= 2 and min(hits, written, full, preemptions) > 0:
            break
        case = make_case(lanes=1, slots=6, rows=3, pages=7, max_model_len=24, share=6, intake_entries=1, grammar_arena=180)
        pool = automata(case, 3) + [random_automaton(rng, states=int(rng.integers(2, 8)), classes=3) for _ in range(3)]
        rules = [TokenRules(VOCAB, {3: -1.5}, rng.choice(VOCAB, 20, replace=False).tolist()) for _ in range(3)]
        for _ in range(120):
            for pair, client in enumerate(case.clients):
                for _ in range(rng.integers(0, 4)):
                    grammar = pool[rng.integers(6)] if rng.random() < 0.8 else None
                    given = {"grammar": grammar, "rules": rules[rng.integers(3)] if rng.random() < 0.4 else None}
                    try:
                        request = case.submit(tokens(int(rng.integers(1, 8)), pair), int(rng.integers(1, 16)), pair, **given)
                    except NoSpaceError as error:
                        full += "grammar arena" in str(error)
                        break
                    sent = next(sent for sent in client.live() if sent.owner is request)
                    named = sum(one is not None for one in given.values())
                    hits, written = hits + named - len(sent.written), written + len(sent.written)
                    case.check_named(pair, client)
                    if rng.random() < 0.1:
                        case.cancel(request)
            case.read(*range(len(case.clients)))
            case.turn()
            if rng.random() < 0.02:
                case.claim(int(rng.integers(len(case.clients))))
        case.finish()
        preemptions += case.counter("preemptions")
    assert min(hits, written, full, preemptions) > 0, (hits, written, full, preemptions)


def test_later_changes_of_an_automaton_affect_only_its_front_end() -> None:
    """The engine continues with its checked copies. Only a request that rereads the words, and finds other words, is refused."""
    case = make_case(share=1, slots=2)
    first, second = automata(case, 2)
    runs, others = case.submit(tokens(3), 20, grammar=first), case.submit(tokens(3), 20, 1, grammar=second)
    case.turn(3)
    case.views.prompt[0] = -7
    assert ends(case, runs, others) == [C.FINISH_LENGTH] * 2
    assert ends(case, case.submit(tokens(3), 3, grammar=first)) == [C.FINISH_LENGTH]  # from the engine's copy
    assert ends(case, case.submit(tokens(3), 3, grammar=second)) == [C.FINISH_LENGTH]  # which it replaces
    refused = case.submit(tokens(3), 3, grammar=first, rejected=True)
    assert ends(case, refused) == [C.FINISH_REJECTED] and refused.reason == C.REJECT_GRAMMAR


def test_shared_grammars_give_the_outputs_of_private_ones() -> None:
    """The same requests, first with a separate name for each automaton."""
    outputs, bytes_written = list[list[tuple[list[int], int]]](), list[int]()
    for shared in (False, True):
        case = make_case(slots=8, pages=12, share=8)
        pool, written = automata(case, 3), 0
        for i in range(8):
            grammar = pool[i % 3]
            if not shared:
                grammar = ByteAutomaton(grammar.class_of, grammar.next_state, grammar.accepting)
                object.__setattr__(grammar, "_digest", 1000 + i)
            case.submit(tokens(4, i), 12, grammar=grammar)
        written = sum(sum(sent.written) for sent in case.clients[0].live())
        case.finish()
        outputs.append([(request.got, request.ended) for request in case.awaited])
        bytes_written.append(written)
    assert outputs[0] == outputs[1]
    size = pool[0].words().nbytes
    assert bytes_written == [8 * size, 3 * size]


def test_a_preempted_request_resumes_in_its_grammar_state() -> None:
    """With few pages: the expected output of each request, under its grammar, is known in advance."""
    case = make_case(pairs=1, slots=6, rows=3, pages=9, max_model_len=32, share=3)
    made = [case.submit(tokens(5, i), 20, grammar=grammar, min_tokens=20) for i, grammar in enumerate(automata(case, 3))]
    case.finish()
    assert case.counter("preemptions") > 0
    assert all(len(request.got) == 20 for request in made)


@pytest.mark.parametrize("min_tokens", [0, 9])
def test_an_output_ends_where_its_grammar_allows_nothing_more(min_tokens: int) -> None:
    """On the full and the fast path, with min_tokens and without stop ids; the last token is part of the output."""
    for choices in ([b"a"], [b"ab{"], [b"aab{ab"]):
        case = make_case(share=1, max_model_len=64)
        request = case.submit(tokens(3), 30, grammar=automaton_of_choices(choices), min_tokens=min_tokens)
        assert ends(case, request) == [C.FINISH_COMPLETE]
        assert b"".join(case.pieces[token] for token in request.got) in choices


@pytest.mark.parametrize("choice", [b"a", b"aab{ab"])
def test_an_output_of_max_tokens_that_its_grammar_ends_is_complete(choice: bytes) -> None:
    """max_tokens would end the output there, too."""
    case = make_case(share=1, max_model_len=64)
    wanted = automaton_of_choices([choice])
    first = case.submit(tokens(3), 30, grammar=wanted)
    case.finish()
    again = case.submit(tokens(3), len(first.got), grammar=wanted)
    assert ends(case, again) == [C.FINISH_COMPLETE] and again.got == first.got


def test_a_token_that_the_grammar_does_not_allow_is_an_error() -> None:
    """If a step ignores grammars, its request ends with an error; other requests continue. In a prefill, and in a turn on the
    fast path."""
    for turns in (1, 3):
        case = make_case(share=1)
        bad, good = case.submit(tokens(3), 9, grammar=automata(case, 1)[0]), case.submit(tokens(4), 5, pair=1)
        case.turn(turns)
        rows = case.state.batch.row_slots[: case.state.batch.counts[S.ROWS]].tolist()
        case.state.batch.sampled[rows.index(0)] = next(token for token, piece in enumerate(case.pieces) if not piece)
        bad.finish, bad.expected = C.FINISH_ERROR, bad.expected[: turns - 1]
        assert ends(case, bad, good) == [C.FINISH_ERROR, C.FINISH_LENGTH]


@pytest.mark.parametrize("stop", ["with bytes", "without"])
def test_a_stop_id_is_allowed_where_the_output_may_end(stop: str) -> None:
    case = make_case(share=1)
    empty = next(token for token, piece in enumerate(case.pieces) if bool(piece) == (stop == "with bytes"))
    wanted = automaton_of_choices([b"ab", b"abab"])
    request = case.submit(tokens(3), 20, grammar=wanted, stop_ids=(empty,))
    (end,) = ends(case, request)
    text = b"".join(case.pieces[token] for token in request.got[: -1 if end == C.FINISH_STOP else None])
    assert end in (C.FINISH_STOP, C.FINISH_COMPLETE) and wanted.accepts(text)


@pytest.mark.parametrize(
    "entry",
    [{"grammar_words": -1}, {"grammar_words": 66}, {"grammar_words": GRAMMAR_WORDS + 1}, {"grammar_words": 2**31 - 1},
     {"grammar_offset": -1}, {"grammar_offset": 2**31 - 1}],
)  # fmt: skip
def test_automata_outside_the_arena_or_of_no_size_are_refused(entry: dict[str, int]) -> None:
    case = make_case(share=1)
    bad, good = case.submit(tokens(5), 3, rejected=True, grammar=FREE, entry=entry), case.submit(tokens(3), 2)
    assert ends(case, bad, good) == [C.FINISH_REJECTED, C.FINISH_LENGTH]
    assert bad.reason == C.REJECT_GRAMMAR and not held(case)


def test_token_rules_and_grammars_share_slots_and_no_names() -> None:
    """Rules and an automaton may have the same name: a request with both has two slots, and neither replaces the other."""
    case = make_case(share=2, max_model_len=64)
    (grammar,) = automata(case, 1)
    rules = [TokenRules(VOCAB, {}, allowed) for allowed in ([3, 9], [5])]
    object.__setattr__(rules[0], "_digest", grammar.digest)
    both = case.submit(tokens(3), 6, grammar=grammar, rules=rules[1])
    assert ends(case, both) == [C.FINISH_LENGTH]
    first = case.submit(tokens(3), 6, rules=rules[0])  # instead of the least recently used grammar
    assert ends(case, first) == [C.FINISH_LENGTH] and set(first.got) <= {3, 9}
    second = case.submit(tokens(4), 6, rules=rules[1])
    assert ends(case, second) == [C.FINISH_LENGTH] and set(second.got) == {5}
    assert (case.counter("grammars_installed"), case.counter("grammars_reused")) == (3, 1)
    assert ends(case, case.submit(tokens(3), 6, grammar=grammar)) == [C.FINISH_LENGTH]  # the name belonged to rules


def test_a_request_with_a_grammar_and_rules_needs_two_slots() -> None:
    case = make_case(share=1)
    (grammar,), rules = automata(case, 1), TokenRules(VOCAB, {}, [3])
    with pytest.raises(ValueError, match="memory for a grammar or token rules, but not for both"):
        case.submit(tokens(3), 6, grammar=grammar, rules=rules)
    with pytest.raises(ValueError, match="for 7 tokens, but the model has 50"):
        case.submit(tokens(3), 6, rules=TokenRules(7, {1: 1.0}))
    refused = case.submit(tokens(3), 6, grammar=grammar, rejected=True, entry={"rules_words": 9})  # a front end without a share
    assert ends(case, refused) == [C.FINISH_REJECTED] and refused.reason == C.REJECT_SHARE


@pytest.mark.parametrize(
    "entry", [{"rules_words": -1}, {"rules_words": 4}, {"rules_words": GRAMMAR_WORDS + 1}, {"rules_offset": -1}]
)
def test_rules_outside_the_arena_or_of_no_size_are_refused(entry: dict[str, int]) -> None:
    case = make_case(share=1)
    bad, good = (
        case.submit(tokens(5), 3, rejected=True, rules=TokenRules(VOCAB, {1: 1.0}), entry=entry),
        case.submit(tokens(3), 2),
    )
    assert ends(case, bad, good) == [C.FINISH_REJECTED, C.FINISH_LENGTH]
    assert bad.reason == C.REJECT_RULES and not held(case)


def test_words_that_are_no_automaton_are_refused(rng: np.random.Generator) -> None:
    """One or two words of an automaton are random: the engine accepts exactly the automata that ByteAutomaton accepts."""
    seen = set()
    for _ in range(1200):
        automaton = random_automaton(rng) if rng.random() < 0.5 else random_counted_automaton(rng)
        words = automaton.words().copy()
        for _ in range(rng.integers(0, 3)):
            loops = len(words) - 1 - int(rng.integers(max(1, 3 * len(automaton.loops))))
            place = int(
                rng.choice([*range(A.CLASS_OF_WORD + 1), A.CELLS_WORD - 1, len(words) - 1, loops, rng.integers(len(words))])
            )
            words[place] ^= 1 << int(rng.integers(0, 31))
        try:
            ByteAutomaton.of_words(words)
            fine = True
        except ValueError:
            fine = False
        assert is_automaton(WordsOfSlot(words, 1), 1, len(words), 0, 1) == fine
        seen.add(fine)
    assert seen == {True, False}


def test_tokens_lead_where_their_bytes_lead(rng: np.random.Generator) -> None:
    lengths = rng.integers(0, 12, 300)
    pieces = [rng.integers(0, 256, n, dtype=np.uint8).tobytes() for n in lengths] + [bytes(LONGEST + 1)]
    table = TokenBytes.of(pieces, 310)
    assert table.pieces() == pieces[:300] + [b""] * 10
    for classes in [0, 250] * 12:  # many: fewer words precede the first state
        counted = rng.random() < 0.5
        automaton = random_counted_automaton(rng) if counted else random_automaton(rng, dead=0.1, classes=classes)
        if not counted and rng.random() < 0.5:  # an output ends in the first state, too
            following, accepting = automaton.next_state.copy(), automaton.accepting.copy()
            following[0], accepting[0] = DEAD, True
            automaton = replace(automaton, next_state=following, accepting=accepting)
        none = np.zeros(1, np.int64)
        grammars = as_memoryviews(Grammars(none, none, none, none, *table))._replace(words=WordsOfSlot(automaton.words(), 1))
        state = random_position(rng, automaton) if counted else int(rng.integers(automaton.states))
        for token in rng.integers(0, 310, 60).tolist():
            piece = pieces[token] if token < 300 else b""
            expected = automaton.advance(state, piece) if piece else DEAD
            assert state_after(grammars, 1, state, token) == (ILLEGAL if expected == DEAD else expected)
            found = follow(grammars, 1, state, token, False, NO_LIMIT)
            assert found == ILLEGAL if expected == DEAD else found & ~ENDING == expected
            assert found < 0 or bool(found & ENDING) == automaton.must_end(expected)
            assert follow(grammars, 1, state, token, True, NO_LIMIT) == (state if automaton.may_end(state) else ILLEGAL)


def test_the_distance_of_a_position_is_that_of_its_shortest_end(rng: np.random.Generator) -> None:
    for _ in range(60):
        automaton = random_counted_automaton(rng)
        words = WordsOfSlot(automaton.words(), 1)
        for position, far in bytes_to_an_end(automaton).items():
            assert distance_of(words, 1, position) == far <= automaton.words()[A.FARTHEST_WORD]


def test_tokens_without_bytes() -> None:
    """A model with no token bytes, or with empty and too long ones: the engine still has an array of them."""
    for pieces in ([], [b""], [b"", bytes(LONGEST + 1)]):
        table = TokenBytes.of(pieces, 3)
        assert (table.pieces(), table.place.tolist(), table.words.tolist()) == ([b""] * 3, [[0, 0]] * 3, [0])
    assert TokenBytes.of([bytes([7]) * LONGEST], 1).pieces() == [bytes([7]) * LONGEST]


def test_the_vocabulary_of_cases_has_what_these_tests_need() -> None:
    pieces = make_case(share=1).pieces
    assert b"" in pieces and all(bytes([byte]) in pieces for byte in ALPHABET)


def test_a_transition_to_a_dead_start_state_ends_the_output() -> None:
    """No automaton should have such a transition, but an engine must accept it."""
    automaton = ByteAutomaton(np.zeros(A.BYTES, np.uint8), np.array([[DEAD], [0]], np.int16), np.ones(2, bool))
    none = np.zeros(1, np.int64)
    grammars = as_memoryviews(Grammars(none, none, none, none, *TokenBytes.of([b"a"], 1)))
    assert follow(grammars._replace(words=WordsOfSlot(automaton.words(), 1)), 1, 1, 0, False, NO_LIMIT) == ENDING


@pytest.mark.parametrize(("states", "fine"), [(A.MOST_STATES, True), (A.MOST_STATES + 1, False)])
def test_the_engine_takes_as_many_states_as_there_may_be(states: int, fine: bool) -> None:
    """Each state accepts and leads to itself."""
    small = ByteAutomaton(np.zeros(A.BYTES, np.uint8), np.zeros((1, 1), np.int16), np.ones(1, bool)).words()
    cells = np.zeros(2 * states, np.int64)
    cells[::2] = A.STATE_ACCEPTING
    packed = cells[::2] | cells[1::2] << A.CELL_BITS
    words = np.concatenate([small[: A.CELLS_WORD], packed]).astype(np.int32)
    words[[A.STATES_WORD, A.COUNTED_WORD, A.HUBS_WORD]] = states
    assert is_automaton(WordsOfSlot(words, 1), 1, len(words), 0, 1) == fine


@pytest.mark.parametrize("lanes", [1, 3])
def test_the_unused_slot_is_none_that_a_live_request_has(lanes: int, rng: np.random.Generator) -> None:
    """The queue pair's least recently used slot. Slot 0 is not special."""
    sizes, facts, options = case_sizes(pairs=2, slots=4, share=3, token_words=1)
    limits, unused = make_limits_by_name(sizes, facts, **options), in_lanes(unused_grammar, lanes, seed=lanes)
    state, nobody = make_state(limits), 0
    requests, grammars, views = state.requests, state.grammars, as_memoryviews(state)
    for _ in range(150):
        pair = int(rng.integers(2))
        first = 3 * pair
        requests.status[:] = rng.integers(0, 4, 8)
        for names in (requests.grammar, requests.rules):
            names[:] = np.where(rng.random(8) < 0.6, 3 * requests.pair + rng.integers(0, 3, 8), -1)
        grammars.used[:] = rng.permutation(6)
        kept = int(rng.choice([-1, first, first + 2]))
        lives = (requests.pair == pair) & np.isin(requests.status, [S.WAITING, S.RUNNING])
        taken = {kept, *requests.grammar[lives].tolist(), *requests.rules[lives].tolist()}
        left = [slot for slot in range(first, first + 3) if slot not in taken]
        wanted = min(left, key=lambda slot: int(grammars.used[slot]), default=-1)
        nobody += wanted < 0
        found = unused(limits, views.requests, views.grammars, views.scratch, pair, kept, 0, 1)
        assert found == wanted
    assert 0 < nobody < 150
