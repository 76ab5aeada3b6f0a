"""What the scheduler takes in, how much of it, and what it refuses at the door."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import VOCAB, make_case, tokens

from blinkpy.dpu.link.queue_pair import NoRoomError
from blinkpy.queues import completion as C
from blinkpy.queues import words as W
from blinkpy.queues.submission import SUBMIT_NO_PREFIX_CACHE


def test_intake_is_bounded_and_takes_turns() -> None:
    case = make_case(pairs=3, slots=4, intake_entries=2, rows=12, tokens=32)
    for pair in range(3):
        for _ in range(4):
            case.submit(tokens(2), 1, pair)
    heads = []
    for _ in range(6):
        case.turn()
        heads.append([case.word(W.PAIR_SQ_HEAD, pair) for pair in range(3)])
    assert heads == [[1, 1, 0], [2, 1, 1], [2, 2, 2], [3, 3, 2], [4, 3, 3], [4, 4, 4]]
    case.finish()


def test_a_full_submission_queue_holds_the_front_end_back() -> None:
    case = make_case(pairs=1, slots=4, intake_entries=1)
    for _ in range(4):
        case.submit(tokens(2), 1)
    with pytest.raises(NoRoomError):
        case.submit(tokens(2), 1)
    case.finish()
    case.submit(tokens(2), 1)


BAD_ENTRIES = [
    (C.REJECT_PROMPT, {"prompt_length": 0}),
    (C.REJECT_PROMPT, {"prompt_length": -1}),
    (C.REJECT_PROMPT, {"prompt_offset": -1}),
    (C.REJECT_PROMPT, {"prompt_offset": 1 << 30}),
    (C.REJECT_PROMPT, {"prompt_offset": 2**31 - 1, "prompt_length": 2**31 - 1}),
    (C.REJECT_LENGTH, {"max_tokens": 28}),
    (C.REJECT_LENGTH, {"max_tokens": 2**31 - 1}),
    (C.REJECT_PAGES, {"max_tokens": 22}),
    (C.REJECT_HASHES, {"hash_count": 0}),
    (C.REJECT_HASHES, {"hash_count": 2}),
    (C.REJECT_HASHES, {"hash_offset": -1}),
    (C.REJECT_HASHES, {"hash_offset": 2**31 - 1}),
    (C.REJECT_PARAMETER, {"max_tokens": 0}),
    (C.REJECT_PARAMETER, {"min_tokens": -1}),
    (C.REJECT_PARAMETER, {"temperature": -0.1}),
    (C.REJECT_PARAMETER, {"temperature": np.nan}),
    (C.REJECT_PARAMETER, {"temperature": np.inf}),
    (C.REJECT_PARAMETER, {"top_p": 0}),
    (C.REJECT_PARAMETER, {"top_p": 1.01}),
    (C.REJECT_PARAMETER, {"min_p": -0.5}),
    (C.REJECT_PARAMETER, {"min_p": 1.5}),
    (C.REJECT_PARAMETER, {"top_k": -1}),
    (C.REJECT_PARAMETER, {"repetition_penalty": 0}),
    (C.REJECT_PARAMETER, {"presence_penalty": -np.nan}),
    (C.REJECT_PARAMETER, {"frequency_penalty": -np.inf}),
    (C.REJECT_PARAMETER, {"logprobs": 21}),
    (C.REJECT_PARAMETER, {"cache_salt": -1}),
    (C.REJECT_PARAMETER, {"flags": 2}),
    (C.REJECT_PARAMETER, {"request_id": 7}),
]


@pytest.mark.parametrize(("reason", "entry"), BAD_ENTRIES)
def test_bad_entries_are_rejected_and_harm_nobody(reason: int, entry: dict[str, Any]) -> None:
    case = make_case(pages=6)
    other = case.submit(tokens(3), 4)
    bad = case.submit(tokens(5), 3, rejected=True, entry=entry)
    case.finish()
    assert (bad.ended, bad.reason, bad.got) == (C.FINISH_REJECTED, reason, [])
    assert other.ended == C.FINISH_LENGTH
    assert case.counter("requests_rejected") == case.counter("requests_accepted") == 1


@pytest.mark.parametrize(
    ("array", "index", "value", "reason"),
    [
        ("prompt", 4, -1, C.REJECT_TOKEN),
        ("prompt", 4, VOCAB, C.REJECT_TOKEN),
        ("hashes", 0, -1, C.REJECT_HASHES),
        ("hashes", 0, 1 << 62, C.REJECT_HASHES),
    ],
)
def test_tokens_and_page_hashes_out_of_range_are_rejected(array: str, index: int, value: int, reason: int) -> None:
    case = make_case()
    bad = case.submit(tokens(6), 2, rejected=True)
    getattr(case.views, array)[0, index] = value
    case.finish()
    assert (bad.ended, bad.reason) == (C.FINISH_REJECTED, reason)


@pytest.mark.parametrize(
    "fields",
    [
        *({"temperature": -0.0}, {"temperature": 2}, {"min_p": 1}, {"logprobs": 20}, {"top_k": 9}),
        {"flags": SUBMIT_NO_PREFIX_CACHE, "entry": {"hash_count": 0}},  # only those that share need hashes
    ],
)
def test_parameters_at_their_bounds_are_accepted(fields: dict[str, Any]) -> None:
    case = make_case()
    request = case.submit(tokens(9), 2, **fields)
    case.finish()
    assert request.ended == C.FINISH_LENGTH


@pytest.mark.parametrize(("slot", "lanes"), [(-1, 1), (4, 4), (2**31 - 1, 1), (0, 4)])
def test_an_entry_for_no_slot_or_a_busy_one_is_counted_and_skipped(slot: int, lanes: int) -> None:
    case = make_case(lanes=lanes)
    owner = case.submit(tokens(3), 6)
    case.turn()
    case.submit(tokens(7, 2), 2, entry={"slot": slot})
    good = case.submit(tokens(3), 2)
    case.finish()
    assert owner.ended == good.ended == C.FINISH_LENGTH
    assert case.counter("requests_rejected") == 1
