"""Bounds of the scheduler's phases, each from both sides, in plain Python.

Supports claim front-ends/intake.
"""

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import VOCAB, Case, make_case, tokens

from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.queues import words as C
from blinkpy.queues.byte_automaton import CELLS_WORD
from blinkpy.queues.submission import (
    STOP_IDS,
    SUBMIT_NO_PREFIX_CACHE,
    SUBMIT_SCORE_PROMPT,
    WORD_LOGPROBS,
    WORD_MAX_TOKENS,
    WORD_MIN_TOKENS,
    WORD_STOP_IDS,
    neutral_entries,
)
from blinkpy.queues.token_rules import FIRST_WORD
from blinkpy.scheduler.phases.commit import append_token
from blinkpy.scheduler.phases.fast_path import judge_token
from blinkpy.scheduler.phases.forecast import forecast, forecast_rows
from blinkpy.scheduler.phases.intake import check_entry, copy_prompt
from blinkpy.scheduler.phases.recorder import changed_words

EPOCH = 3
FIELDS = {"request_id": EPOCH << 32 | 7, "prompt_length": 5, "max_tokens": 3, "hash_count": 1}


def words_of(fields: dict[str, int]) -> list[int]:
    """The engine's view of a neutral entry with these fields."""
    entry = neutral_entries(1)[0]
    for name, value in (FIELDS | fields).items():
        entry[name] = value
    return np.frombuffer(entry.tobytes(), np.int32).tolist()


def bounds_of_entries(limits: Limits) -> Iterator[tuple[int, dict[str, int], dict[str, int], dict[str, int]]]:
    """(reason, accepted fields, refused fields, other limits)."""
    arena, hashes = limits.prompt_tokens, limits.hash_entries
    unhashed, scored = {"hash_count": 0, "flags": SUBMIT_NO_PREFIX_CACHE}, {"hash_count": 0, "flags": SUBMIT_SCORE_PROMPT}
    for reason, inside, beyond, other in (
        (C.REJECT_PROMPT, {"prompt_length": 1, "hash_count": 0}, {"prompt_length": 0, "hash_count": 0}, {}),
        (C.REJECT_PROMPT, {"prompt_offset": 0}, {"prompt_offset": -1}, {}),
        (C.REJECT_PROMPT, {"prompt_offset": arena - 5}, {"prompt_offset": arena - 4}, {}),
        (C.REJECT_PARAMETER, {"request_id": EPOCH << 32}, {"request_id": (EPOCH << 32) - 1}, {}),
        (C.REJECT_PARAMETER, {"request_id": ((EPOCH + 1) << 32) - 1}, {"request_id": (EPOCH + 1) << 32}, {}),
        (C.REJECT_PARAMETER, {"max_tokens": 1}, {"max_tokens": 0}, {}),
        (C.REJECT_PARAMETER, {"output_tokens": 4}, {"output_tokens": 5}, {}),
        (C.REJECT_LENGTH, {"max_tokens": 27}, {"max_tokens": 28}, {"max_model_len": 32}),
        (C.REJECT_PAGES, {"max_tokens": 20}, {"max_tokens": 21}, {"pages": 6}),  # of 4 tokens; the last token is in none
        (C.REJECT_HASHES, {"hash_count": 1}, {"hash_count": 0}, {}),
        (C.REJECT_HASHES, {"hash_count": 1}, {"hash_count": 2}, {}),
        (C.REJECT_HASHES, {"prompt_length": 4}, {"prompt_length": 3}, {}),
        (C.REJECT_HASHES, {"prompt_length": 7}, {"prompt_length": 8}, {}),
        (C.REJECT_HASHES, unhashed, scored, {}),
        (C.REJECT_HASHES, unhashed, unhashed | {"hash_count": 2}, {}),
        (C.REJECT_HASHES, {"hash_count": 0}, {"hash_count": 2}, {"prefix_caching": 0}),
        (C.REJECT_HASHES, {"hash_count": 1}, {"hash_count": -1}, {"prefix_caching": 0}),
        (C.REJECT_HASHES, {"hash_offset": 0}, {"hash_offset": -1}, {}),
        (C.REJECT_HASHES, {"hash_offset": hashes - 1}, {"hash_offset": hashes}, {}),
    ):
        yield reason, inside, beyond, other
    for kind, head, reason in (("grammar", CELLS_WORD, C.REJECT_GRAMMAR), ("rules", FIRST_WORD, C.REJECT_RULES)):
        words, offset, least, most = f"{kind}_words", f"{kind}_offset", head + 1, limits.grammar_words
        yield reason, {words: least}, {words: head}, {}
        yield reason, {words: most}, {words: most + 1}, {}
        yield reason, {words: 0, offset: -1}, {words: -1}, {}
        yield reason, {words: least, offset: 0}, {words: least, offset: -1}, {}
        for count in least, most:
            yield reason, {words: count, offset: arena - count}, {words: count, offset: arena - count + 1}, {}


def test_what_an_entry_may_name() -> None:
    limits = make_case(lanes=1, share=2, attached=False).limits
    assert (limits.max_model_len, limits.page_size) == (32, 4)
    for reason, inside, beyond, other in bounds_of_entries(limits):
        own = limits._replace(**other)
        found = check_entry(own, words_of(inside), EPOCH), check_entry(own, words_of(beyond), EPOCH)
        assert found == (0, reason), (inside, beyond, other)


def test_which_tokens_and_page_hashes_are_copied() -> None:
    case = make_case(lanes=1, attached=False)
    limits, queues, requests = case.limits, case.views, case.state.requests
    entry = words_of({"prompt_offset": 2, "prompt_length": 4, "hash_offset": 1, "hash_count": 2})
    for reason, bad_tokens, bad_keys in (
        (0, (0, VOCAB - 1), (0, (1 << 62) - 1)),
        (C.REJECT_TOKEN, (-1, VOCAB, 2**31 - 1, -(2**31)), (0,)),
        (C.REJECT_HASHES, (0,), (-1, 1 << 62, -(1 << 63))),
        (C.REJECT_TOKEN, (-1, VOCAB), (-1, 1 << 62)),
    ):
        for i, k, token, key in itertools.product(range(4), range(2), bad_tokens, bad_keys):
            queues.prompt[1, 2:6], queues.hashes[1, 1:3] = 7, 9
            queues.prompt[1, 2 + i], queues.hashes[1, 1 + k] = token, key
            assert copy_prompt(limits, queues, requests, entry, 1, 5, 0, 1) == reason, (token, key)
            assert (requests.tokens[5, :4] == queues.prompt[1, 2:6]).all()
            assert (requests.page_hash[5, :2] == queues.hashes[1, 1:3]).all()


@pytest.mark.parametrize(("most", "accepted"), [(5, 2), (6, 2), (7, 3)])
def test_how_many_tokens_a_turn_takes(most: int, accepted: int) -> None:
    """As many as permitted, and the rest of the last prompt."""
    case = make_case(lanes=1, intake_tokens=most)
    for i in range(4):
        case.submit(tokens(3, i), 2)
    case.turn()
    assert case.counter("requests_accepted") == accepted
    case.finish()


def test_entries_that_are_skipped_count_as_no_tokens() -> None:
    case = make_case(lanes=1, intake_tokens=1)
    for wrong in ({"epoch": 3}, {"slot": -1}, {"epoch": 2}):
        case.submit(tokens(3), 2, entry=wrong)
    case.submit(tokens(3), 2)
    case.turn()
    names = ("stale_entries", "requests_rejected", "requests_accepted")
    assert [case.counter(name) for name in names] == [2, 1, 1]


# ---- the effect of a token ----------------------------------------------------------------------------------------------


def end_of(token: int, generated: int, length: int, most: int, least: int) -> int:
    """The flags of a token. length: including it. 5 is a stop id, and the next token of a scored prompt."""
    if token not in range(VOCAB) or (generated <= 0 and token != 5):
        return C.FINISH_ERROR
    if token == 5 and generated > least:
        return C.FINISH_STOP | C.HAS_TOKEN
    return (C.FINISH_LENGTH if generated >= most or length >= 32 else C.FINISH_NONE) | C.HAS_TOKEN


def decoding() -> Case:
    """Two requests that decode, in all rows."""
    case = make_case(lanes=1, rows=2, pages=12, tokens=24)
    for n in (4, 5):  # their next tokens need no page
        case.submit(tokens(n, n), 9)
    case.turn(2)
    return case


def test_where_a_token_ends_its_request() -> None:
    """In the commit, and in the forecast for the fast path."""
    case = decoding()
    limits, state, requests, seen = case.limits, case.state, case.state.requests, set[int]()
    slot = int(state.batch.row_slots[0])
    requests.page_table[slot] = 0
    requests.entry[slot, WORD_STOP_IDS : WORD_STOP_IDS + STOP_IDS] = [-1, 5, *[-1] * (STOP_IDS - 2)]
    sampled, generations = (-(2**31), -1, 0, 4, 5, 6, VOCAB - 1, VOCAB, 2**31 - 1), (-1, 0, 1, 2, 3)
    for token, generated, length, most, least in itertools.product(sampled, generations, (20, 31, 32), (2, 3, 9), (0, 2, 3)):
        case_of_it = token, generated, length, most, least
        expected, recorded = end_of(*case_of_it), most == 3
        requests.tokens[slot, length - 2 : length + 1], requests.finish[slot] = (4, 5, 6)[: 34 - length], C.FINISH_NONE
        requests.entry[slot, WORD_LOGPROBS] = 0 if recorded else -1
        requests.entry[slot, WORD_MAX_TOKENS], requests.entry[slot, WORD_MIN_TOKENS] = most, least
        requests.length[slot], requests.prompt_length[slot] = length - 1, length - generated
        forecast_rows(limits, state, 2, 0, 1)
        assert judge_token(limits, state, 0, token) == (expected, 0), case_of_it
        with_record = expected | (C.HAS_LOGPROBS if recorded and expected & C.HAS_TOKEN else 0)
        assert append_token(limits, state, slot, token) == with_record, case_of_it
        assert requests.finish[slot] == expected & C.FINISH_MASK, case_of_it
        assert requests.length[slot] == length - (expected == C.FINISH_ERROR), case_of_it
        seen.add(expected & C.FINISH_MASK)
    assert seen == {C.FINISH_NONE, C.FINISH_LENGTH, C.FINISH_STOP, C.FINISH_ERROR}


def certain(case: Case) -> bool:
    forecast(case.limits, case.state, True, False, 0, 1)
    return bool(case.state.counts[S.FAST_PATH])


@pytest.mark.parametrize("pair", [0, 1])
def test_the_fast_path_needs_more_than_room_for_two_steps_of_all_rows(pair: int) -> None:
    case = decoding()
    heads, tails = case.state.pairs.cq_head, case.state.pairs.cq_tail
    heads[:] = tails
    for free in range(17):
        heads[pair] = tails[pair] - 16 + free
        assert certain(case) == (free > 4), free


def test_only_cancels_of_running_or_waiting_requests_end_the_fast_path() -> None:
    case = decoding()
    state, cancel, names = case.state, case.state.inbox.cancel, case.state.requests.request_id
    names[:], cancel[:] = np.arange(8) + 1, 0
    running = state.running[:2].tolist()
    others = [slot for slot in range(8) if slot not in running]
    state.waiting[:3], state.finishing[:3] = others[:3], others[3:]
    for waiting, slot in itertools.product(range(4), range(8)):
        state.counts[S.WAITING_COUNT], cancel[slot] = waiting, names[slot]
        assert certain(case) == (slot not in running + others[:waiting]), (waiting, slot)
        cancel[slot] = names[slot] + 1  # an earlier request's
        assert certain(case)


# ---- the recorder -------------------------------------------------------------------------------------------------------


def test_each_word_that_changes_makes_a_record() -> None:
    case = make_case(lanes=1, pairs=40, slots=1, record_turns=4, attached=False)  # many: no two words share a place
    limits, state = case.limits, case.state
    inbox, places = state.inbox, list[tuple[Any, int]]()
    for words in (inbox.heartbeat, inbox.claim, inbox.cq_head, inbox.doorbell, state.pairs.attached):
        places += [(words, pair) for pair in range(limits.pairs)]
    places += [(state.counts, i) for i in range(S.COUNTS) if i != S.TURNS] + [(inbox.command, 0)]
    places += [(state.counters, i) for i in range(len(S.COUNTER_INDEX))]
    changed_words(limits, state, 0, 1)
    state.counts[S.TURNS] += 1
    for words, place in places:
        assert changed_words(limits, state, 0, 1) == 0
        words[place] += 1
        assert changed_words(limits, state, 0, 1) == 1, (len(words), place)
    assert not state.recorder.words.any()


def test_a_recorder_that_is_off_writes_nothing() -> None:
    case = make_case(lanes=1)
    cancelled = [case.submit(tokens(3, i), 9) for i in range(2)]
    case.turn(2)
    for request in cancelled:
        case.cancel(request)
    case.finish()
    assert not any(words.any() for words in case.state.recorder)
