"""Drafts: their index, their number, and the same tokens with and without them.

Claim decisions/drafts (simulator): Drafts change no token. A wrong draft is not published, counted as computed, or
indexed, and no request waits for drafts or is preempted for them.
"""

from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import VOCAB, Case, make_case

from blinkpy.device.tables import as_memoryviews
from blinkpy.kv import state as S
from blinkpy.kv.state_memory import differences, make_state, snapshot
from blinkpy.kv.token_bytes import TokenBytes
from blinkpy.queues import words as W
from blinkpy.queues.byte_automaton import BYTES, DEAD, ByteAutomaton, position_of
from blinkpy.queues.submission import SUBMIT_SCORE_PROMPT, WORD_MAX_TOKENS, WORD_OUTPUT_TOKENS, WORD_PREDICTED_TOKENS
from blinkpy.scheduler.phases.drafts import (
    CANDIDATES,
    INDEXED_AT_ONCE,
    LONGEST_MATCH,
    OWN,
    PREDICTED,
    begin_drafts,
    bucket_of,
    index_tokens,
    longest_match,
    next_place,
)

SPACE: dict[str, Any] = {"pairs": 1, "slots": 8, "rows": 8, "tokens": 24, "pages": 120, "max_model_len": 64, "cq_entries": 64}
OFF: dict[str, Any] = {"speculative": "off", "speculative_tokens": 0, "speculative_match": 8}
DRAFTS: dict[str, Any] = SPACE | {"vocab_size": 2, "speculative": "ngram", "speculative_tokens": 4, "speculative_match": 2}
STEP_DRAFTS: dict[str, Any] = SPACE | {"vocab_size": 2, "speculative": "mtp", "speculative_tokens": 4}
BOTH = pytest.mark.parametrize("drafts", [DRAFTS, STEP_DRAFTS], ids=["ngram", "mtp"])


def run(case: Case, requests: list[tuple[list[int], int, dict[str, Any]]]) -> tuple[int, int]:
    """Submit all requests and run until they end. Returns (turns with a batch, turns with drafts)."""
    for prompt, most, options in requests:
        case.submit(prompt, most, **options)
    steps = drafted = 0
    while not all(request.ended for request in case.awaited):
        steps += case.turn() >= 0
        rows = int(case.state.batch.counts[S.ROWS])
        drafted += bool((case.state.batch.emits[:rows] == S.DRAFT).any())
        case.read(0)
        assert steps < 2000
    case.finish()
    return steps, drafted


def random_requests(rng: np.random.Generator, vocabulary: int = 2, count: int = 8) -> list[tuple[list[int], int, dict[str, Any]]]:
    """Most requests are long: a request rests after a wrong draft, and every run needs some correct drafts."""
    lengths = rng.integers(1, 20, count)
    most = [43 if i % 4 else int(rng.integers(1, 44)) for i in range(count)]
    return [(rng.integers(0, vocabulary, n).tolist(), most[i], {"seed": i}) for i, n in enumerate(lengths)]


# ---- the index ------------------------------------------------------------------------------------------------------------


def matches(tokens: list[int], least: int) -> dict[int, int]:
    """The length of the match before each earlier position, if at least `least` tokens repeat; at most LONGEST_MATCH."""
    found, length = dict[int, int](), len(tokens)
    for position in range(least, length):
        equal = 0
        while equal < min(position, LONGEST_MATCH) and tokens[position - 1 - equal] == tokens[length - 1 - equal]:
            equal += 1
        if equal >= least:
            found[position] = equal
    return found


@pytest.mark.parametrize("garbage", [False, True])
def test_the_longest_and_latest_match_wins(garbage: bool, rng: np.random.Generator) -> None:
    """Compared with a search through all tokens. Entries of earlier requests may hide a match in the index, but add no match."""
    limits = make_case(lanes=1, **DRAFTS).limits
    hits = 0
    for _ in range(150):
        least = int(rng.integers(1, 6))
        limits = limits._replace(draft_match=least + 1, draft_buckets=int(2 ** rng.integers(1, 7)))
        state = make_state(limits)
        if garbage:
            for array in (state.drafts.heads, state.drafts.links):
                array[:] = rng.integers(0, limits.max_model_len, array.shape)
        length, vocabulary = int(rng.integers(1, limits.max_model_len)), int(rng.choice((2, 5, 30)))
        tokens = rng.integers(0, vocabulary, length)
        state.requests.tokens[3, :length] = tokens
        views = as_memoryviews(state)
        begin_drafts(limits, views.drafts, 3, 0)
        for known in sorted(rng.integers(1, length + 1, 3).tolist()) + [length]:  # as the output grows
            state.requests.length[3] = known
            index_tokens(limits, views.requests, views.drafts, 3)
        source, all_matches = int(longest_match(limits, views.requests, views.drafts, 3)), matches(tokens.tolist(), least)
        assert source == -1 or source in all_matches
        if not garbage:
            bucket = bucket_of(limits, views.requests, 3, length, OWN) if length >= least else -1
            places = [place for place in range(least, length) if bucket_of(limits, views.requests, 3, place, OWN) == bucket]
            compared = {place: all_matches[place] for place in places[-CANDIDATES:] if place in all_matches}
            best = max(compared.values(), default=0)
            assert source == max((place for place, equal in compared.items() if equal == best), default=-1)
        hits += source >= 0
    assert hits > 20


def test_a_predicted_match_counts_like_an_earlier_one_and_precedes_it(rng: np.random.Generator) -> None:
    """Compared with a search through both. Only tokens of a prediction that no output or draft may overwrite count."""
    limits, seen = (
        make_case(lanes=1, **DRAFTS).limits,
        {"own": 0, "predicted": 0, "equal": 0, "first": 0, "overwritten": 0, "moved": 0},
    )
    for _ in range(400):
        least, context = int(rng.integers(1, 5)), limits.max_model_len
        limits = limits._replace(draft_match=least + 1, draft_buckets=128)
        state = make_state(limits)
        prompt, predicted = int(rng.integers(1, context // 2)), int(rng.integers(1, context // 2))
        length = int(rng.choice((prompt, rng.integers(prompt, context - 8))))
        first = context - predicted
        row = rng.integers(0, int(rng.choice((3, 8))), context)
        state.requests.tokens[3], state.requests.entry[3, WORD_PREDICTED_TOKENS] = row, predicted
        state.requests.prompt_length[3], state.requests.length[3] = prompt, length
        moved = state.requests.entry[3, WORD_OUTPUT_TOKENS] = int(rng.integers(0, 2))  # its prompt ends with output
        views = as_memoryviews(state)
        begin_drafts(limits, views.drafts, 3, predicted)
        index_tokens(limits, views.requests, views.drafts, 3)
        source, intact = int(next_place(limits, views.requests, views.drafts, 3)), max(first, length + limits.draft_tokens)
        if length == prompt and first == intact and not moved:
            assert source == first
            seen["first"] += 1
            continue
        own, tail = matches(row[:length].tolist(), least), row[:length].tolist()
        found = {place: equal for place in range(intact + least, context)
                 if (equal := common_end(row[intact:place].tolist(), tail)) >= least}  # fmt: skip
        if source == -1:  # a chain is cut after CANDIDATES places
            continue
        assert source in found if source >= intact else source in own
        chains = dict.fromkeys((OWN, PREDICTED), 0)
        for kind in chains:
            wanted = bucket_of(limits, views.requests, 3, length, kind)
            for place in (*range(least, length), *range(first + least, context)):
                bucket = bucket_of(limits, views.requests, 3, place, OWN if place < length else PREDICTED)
                chains[kind] += bucket == wanted
        if max(chains.values()) <= CANDIDATES:
            best = max([*own.values(), *found.values()], default=0)
            assert (found if source >= intact else own)[source] == best
            assert source >= intact or best not in found.values()
            seen["equal"] += best in own.values() and best in found.values()
        seen["predicted" if source >= intact else "own"] += 1
        seen["overwritten"] += intact > first
        seen["moved"] += length == prompt and moved
    assert all(seen.values()), seen


def common_end(left: list[int], right: list[int]) -> int:
    """The number of equal last tokens, at most LONGEST_MATCH."""
    equal = 0
    while equal < min(len(left), len(right), LONGEST_MATCH) and left[-1 - equal] == right[-1 - equal]:
        equal += 1
    return equal


def test_a_long_prompt_enters_the_index_over_several_turns() -> None:
    limits = make_case(lanes=1, **DRAFTS | {"max_model_len": 2048, "pages": 600}).limits
    state = make_state(limits)
    views = as_memoryviews(state)
    begin_drafts(limits, views.drafts, 0, 0)
    state.requests.length[0] = 2 * INDEXED_AT_ONCE
    for turn in (1, 2, 3):
        index_tokens(limits, views.requests, views.drafts, 0)
        assert state.drafts.known[0] == min(turn * INDEXED_AT_ONCE + 1, 2 * INDEXED_AT_ONCE)


def test_without_drafts_the_state_has_no_memory_for_them() -> None:
    state = make_case(lanes=1, **SPACE).state
    assert [array.size for array in state.drafts] == [1] * len(state.drafts)


# ---- the number of drafts -------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("lanes", [1, 3, 11])
def test_requests_get_the_same_tokens_in_fewer_steps(lanes: int, drafts: dict[str, Any], rng: np.random.Generator) -> None:
    """The front end checks each token, and the oracle each decision."""
    requests = random_requests(rng)
    case = make_case(lanes=lanes, **drafts, record_turns=8)
    steps, drafted = run(case, requests)
    without, none = run(make_case(lanes=1, **DRAFTS | OFF), requests)
    right = case.counter("draft_tokens_accepted")
    assert none == 0 < drafted and 0 < right < case.counter("draft_tokens")
    assert steps <= without
    assert case.counter("generated_tokens") == sum(len(request.expected) for request in case.done)


@pytest.mark.parametrize("lanes", [3, 11])
def test_drafts_get_the_same_pages_in_any_number_of_lanes(lanes: int, rng: np.random.Generator) -> None:
    """Several pages for each of several requests in one turn.

    Supports claim state/lanes.
    """
    sizes = DRAFTS | {"page_size": 2, "speculative_tokens": 7, "rows": 32, "tokens": 64}
    one, more = (make_case(lanes=number, **sizes) for number in (1, lanes))
    for prompt, most, options in random_requests(rng):
        one.submit(prompt, most, **options)
        more.submit(prompt, most, **options)
    several = False
    for _ in range(40):
        before = one.state.requests.num_pages.copy()
        assert one.turn() == more.turn()
        assert not differences(snapshot(one.state), snapshot(more.state))
        several |= int((one.state.requests.num_pages - before >= 2).sum()) >= 2
        one.read(0)
        more.read(0)
    assert several


@BOTH
def test_completions_say_which_tokens_were_drafted(drafts: dict[str, Any], rng: np.random.Generator) -> None:
    case = make_case(lanes=1, **drafts)
    flagged, poll = 0, case.clients[0].poll

    def counting() -> Any:
        nonlocal flagged
        events = poll()
        flagged += sum(flags & W.WAS_DRAFTED != 0 for _, _, flags in events)
        assert all(flags & W.HAS_TOKEN for _, _, flags in events if flags & W.WAS_DRAFTED)
        return events

    case.clients[0].poll = counting
    run(case, random_requests(rng))
    assert flagged == case.counter("draft_tokens_accepted") > 0


PREDICTING = DRAFTS | {"vocab_size": VOCAB, "speculative_match": 3, "pages": 200}


def flags_of(case: Case) -> list[int]:
    """The flags of all completions of pair 0 that are read from now on."""
    flags, poll = list[int](), case.clients[0].poll

    def noting() -> Any:
        events = poll()
        flags.extend(event[2] for event in events)
        return events

    case.clients[0].poll = noting
    return flags


@pytest.mark.parametrize("lanes", [1, 5])
def test_a_right_prediction_makes_all_drafts(lanes: int) -> None:
    """For two requests whose own tokens rarely repeat. They share 8 rows."""
    case = make_case(lanes=lanes, **PREDICTING, record_turns=8)
    flags = flags_of(case)
    requests = [case.submit([3, 1, start], 40, predicting=lambda expected: expected) for start in (4, 5)]
    steps, _ = run(case, [])
    assert all(request.got == request.expected for request in requests) and steps <= 16
    predicted = [flag & W.WAS_PREDICTED != 0 for flag in flags]
    assert sum(predicted) == case.counter("draft_tokens_accepted") >= 2 * 28
    assert predicted == [flag & W.WAS_DRAFTED != 0 for flag in flags]
    assert case.counter("prompt_tokens") == 6


@pytest.mark.parametrize("lanes", [1, 5])
def test_drafts_end_with_their_prediction(lanes: int, rng: np.random.Generator) -> None:
    """Outputs that continue after predictions of all lengths, in all slots; the oracle judges each draft."""
    case, drafted = make_case(lanes=lanes, **PREDICTING | {"rows": 24}), 0
    for first in (0, 8, 16):
        flags = flags_of(case)
        lengths = rng.permutation(np.arange(first + 1, first + 9)).tolist()
        for number, length in enumerate(lengths):
            case.submit([3, 1, number], 40, seed=number + first, predicting=lambda expected, length=length: expected[:length])
        run(case, [])
        said = sum(flag & W.WAS_PREDICTED != 0 for flag in flags)
        assert said <= sum(lengths)
        drafted += said
    assert all(request.got == request.expected for request in case.done) and drafted > 100


def test_drafts_find_their_place_again_after_an_edit() -> None:
    """The prediction has another token, a token more, and a token less than the output."""
    case = make_case(lanes=1, **PREDICTING | {"max_model_len": 320})
    flags, other = flags_of(case), lambda token: (token + 1) % VOCAB
    edited = lambda e: [*e[:20], other(e[20]), *e[21:60], other(e[60]), *e[60:100], *e[101:]]  # noqa: E731
    request = case.submit([3, 1, 4], 140, predicting=edited)
    run(case, [])
    assert request.got == request.expected
    predicted = {i for i, flag in enumerate(flags) if flag & W.WAS_PREDICTED}
    assert predicted.isdisjoint((20, 60, 100))
    for first, last in ((1, 20), (40, 60), (80, 100), (120, 138)):  # at the latest 20 tokens after an edit: it may rest for 16
        assert len(predicted.intersection(range(first, last))) > (last - first) // 2, (first, sorted(predicted))


def test_a_prediction_is_no_part_of_the_prompt() -> None:
    """The next request's prompt is the first request's prompt and prediction: it hits only pages of prompt and output."""
    case = make_case(lanes=1, **PREDICTING)
    first = case.submit([7] * 9, 3, predicting=lambda expected: [5, 6, 7, 8] * 10)
    run(case, [])
    second = case.submit([7] * 9 + [5, 6, 7, 8] * 10, 3)
    case.turn(2)
    assert int(case.state.requests.hit_tokens[:].max()) <= 8
    run(case, [])
    assert [one.got for one in (first, second)] == [one.expected for one in (first, second)]


@pytest.mark.parametrize("tokens", [0, 1, 20])
def test_a_reused_slot_drops_the_previous_prediction(tokens: int) -> None:
    """Its own prediction, if any, is wrong everywhere."""
    case = make_case(lanes=1, **PREDICTING | {"slots": 1})
    case.submit([3, 1, 4], 40, predicting=lambda expected: expected)
    run(case, [])
    flags = flags_of(case)
    case.submit([3, 1, 4], 40, predicting=lambda expected: [(expected[0] + 1) % VOCAB] * tokens)
    run(case, [])
    assert not any(flag & W.WAS_PREDICTED for flag in flags)


@BOTH
@pytest.mark.parametrize(
    ("predicted", "prompt", "reason"),
    [(-1, 3, W.REJECT_PARAMETER), (62, 3, W.REJECT_LENGTH), (1 << 30, 3, W.REJECT_PROMPT), (61, 3, 0), (0, 3, 0)],
)
def test_predictions_are_checked(predicted: int, prompt: int, reason: int, drafts: dict[str, Any]) -> None:
    """Predictions must fit after the prompt; a draft layer excludes them."""
    case = make_case(lanes=1, **drafts | {"slots": 8})
    reason = W.REJECT_PARAMETER if drafts is STEP_DRAFTS and predicted and reason != W.REJECT_PROMPT else reason
    request = case.submit([0] * prompt, 2, rejected=reason > 0, entry={"predicted_tokens": predicted})
    run(case, [])
    assert request.reason == reason


def test_a_predicted_token_outside_the_vocabulary_is_refused() -> None:
    case = make_case(lanes=1, **PREDICTING)
    for tokens in ([VOCAB], [0] * 30 + [-1]):
        request = case.submit([1, 2], 4, rejected=True, predicting=lambda expected, tokens=tokens: tokens)
        run(case, [])
        assert request.reason == W.REJECT_TOKEN


def drafts_of(case: Case, turns: int = 60) -> int:
    """The maximum drafts of a step in some turns."""
    most = 0
    for _ in range(turns):
        case.turn()
        rows = int(case.state.batch.counts[S.ROWS])
        most = max(most, int((case.state.batch.emits[:rows] == S.DRAFT).sum()))
        case.read(0)
    return most


@BOTH
def test_scored_prompts_get_no_drafts(drafts: dict[str, Any]) -> None:
    """Their requests get drafts after the scored prompt."""
    case = make_case(lanes=1, **drafts)
    for seed in range(4):
        case.submit([0, 1] * 16, 20, seed=seed, flags=SUBMIT_SCORE_PROMPT)
    while (case.state.requests.length[:4] <= 32).any():
        case.turn()
        batch = case.state.batch
        of_drafts = batch.row_slots[: batch.counts[S.ROWS]][batch.emits[: batch.counts[S.ROWS]] == S.DRAFT]
        assert (case.state.requests.length[of_drafts] > 32).all()
        case.read(0)
    assert drafts_of(case) > 0
    case.finish()


@BOTH
@pytest.mark.parametrize("lanes", [1, 7])
def test_drafts_that_a_grammar_refuses_are_cut(drafts: dict[str, Any], lanes: int, rng: np.random.Generator) -> None:
    """The front end checks each token, and the oracle each decision. The language: strings of up to 5 characters `a`
    after each `b`, in tokens of up to three bytes. Token 3 is always refused: in the prompts it follows each pair of other
    tokens, so that any two tokens of a request get a refused draft."""
    case = make_case(lanes=lanes, **drafts | {"share": 2, "vocab_size": 5, "record_turns": 8, "max_model_len": 112})
    tokens = TokenBytes.of(pieces := [b"a", b"b", b"aab", b"", b"ba"], 5)
    case.state.grammars.token_place[:], case.state.grammars.token_bytes[: len(tokens.words)] = tokens
    case.pieces[:] = case.opinion.oracle.pieces[:] = pieces
    class_of = np.full(BYTES, 2, np.uint8)
    class_of[list(b"ab")] = 0, 1
    table, loops = np.array([[0, 1, DEAD], [1, 0, DEAD]], np.int16), np.array([[1, 0, 5]], np.int32)
    grammar = ByteAutomaton(class_of, table, np.array([True, False]), loops=loops, start=position_of(1, 0))
    spelled = [0, 1, 2, 4]
    pairs = [[first, second, 3] for first in spelled for second in spelled]
    counters = ["draft_tokens_accepted", "draft_tokens_refused"]
    for i in range(400):
        more = {"stop_ids": (3, *[-1] * 7)} if i % 2 else {}
        prompt = [token for pair in rng.permutation(pairs).tolist() for token in pair]
        case.submit(prompt, 45, grammar=grammar, seed=i, min_tokens=20 * (i % 3), **more)
        if i % 8 == 7:
            run(case, [])
            if i > 8 and all(map(case.counter, counters)):
                return
    raise AssertionError(f"{counters} are {[*map(case.counter, counters)]}")


@BOTH
@pytest.mark.parametrize(("change", "most"), [({"cq_entries": 8}, 0), ({"rows": 3}, 2), ({"speculative_tokens": 1}, 1), ({}, 4)])
def test_rows_and_entries_that_are_left_over_bound_them(change: dict[str, Any], most: int, drafts: dict[str, Any]) -> None:
    """One request with equal tokens, which replace the model's."""
    case = make_case(lanes=1, **drafts | change)
    case.judged = False
    case.submit([0] * 12, 40, seed=3)
    seen = 0
    for _ in range(12):
        case.turn()
        rows = int(case.state.batch.counts[S.ROWS])
        seen = max(seen, rows - 1)
        case.state.batch.sampled[:rows] = 0
        case.state.batch.drafted[:rows] = 0
    assert seen == most
    length = int(case.state.requests.length[0])
    assert length > 12 + 12 if most > 1 else length <= 12 + 24


@BOTH
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_more_requests_than_the_limit_have_no_drafts(limit: int, drafts: dict[str, Any]) -> None:
    """Requests with equal tokens; one of them ends every few steps."""
    case = make_case(lanes=1, **drafts | {"rows": 16, "tokens": 48, "cq_entries": 1024, "speculative_requests": limit})
    case.judged = False
    for i in range(5):
        case.submit([0] * 12, 12 + 9 * i, seed=i)
    seen = dict[int, bool]()
    for _ in range(60):
        case.turn()
        batch = case.state.batch
        rows = int(batch.counts[S.ROWS])
        drafted = batch.emits[:rows] == S.DRAFT
        own = rows - int(drafted.sum())
        seen[own] = seen.get(own, False) or bool(drafted.any())
        batch.sampled[:rows] = 0
        batch.drafted[:rows] = 0
    assert {own: found for own, found in seen.items() if own} == {own: own <= limit for own in range(1, 6)}


@BOTH
def test_no_draft_is_beyond_the_last_token(drafts: dict[str, Any]) -> None:
    """Requests with few tokens left."""
    case = make_case(lanes=1, **drafts)
    for most in range(1, 8):
        case.submit([0, 1] * 6, most, seed=most)
    for _ in range(40):
        case.turn()
        batch, requests = case.state.batch, case.state.requests
        for row in range(int(batch.counts[S.ROWS])):
            slot = batch.row_slots[row]
            end = requests.prompt_length[slot] + requests.entry[slot, WORD_MAX_TOKENS]
            assert batch.context_lengths[row] < end
        case.read(0)
    case.finish()


def test_a_request_gets_the_drafts_that_its_step_returned() -> None:
    """Drafts up to the first number that is not a token. All are wrong, so their number is halved, and no request rests."""
    case = make_case(lanes=1, **STEP_DRAFTS | {"vocab_size": VOCAB})
    case.judged = False
    case.submit([1, 2, 3], 40, seed=3)
    case.turn()
    batch, requests = case.state.batch, case.state.requests
    for returned, drafts in (([5, 6, 7, 8], 4), ([5, 6, VOCAB, 8], 2), ([-1, 6, 7, 8], 0), ([5, 6, 7, 8], 1), ([4, -1, 7, 8], 1)):
        rows = int(batch.counts[S.ROWS])
        batch.sampled[:rows], batch.drafted[:rows] = 9, -1
        batch.drafted[0] = returned  # tokens in a draft's row do not belong to the request
        case.turn()
        length = int(requests.length[0])
        assert int(batch.counts[S.ROWS]) == 1 + drafts
        assert batch.token_ids[: 1 + drafts].tolist() == [9, *returned[:drafts]]
        assert requests.tokens[0, length : length + drafts].tolist() == returned[:drafts]
