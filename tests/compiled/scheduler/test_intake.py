"""What the scheduler takes in, how much of it, and what it refuses at the door."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.scheduler_cases import VOCAB, make_case, tokens

from blinkpy.dpu.link.queue_pair import Busy
from blinkpy.queues.completion import (
    FINISH_LENGTH,
    FINISH_REJECTED,
    REJECT_HASHES,
    REJECT_LENGTH,
    REJECT_PAGES,
    REJECT_PARAMETER,
    REJECT_PROMPT,
    REJECT_TOKEN,
)
from blinkpy.queues.submission import SUBMIT_NO_PREFIX_CACHE
from blinkpy.queues.words import PAIR_SQ_HEAD


def test_intake_is_bounded_and_takes_turns() -> None:
    case = make_case(pairs=3, slots=4, intake_entries=2, rows=12, tokens=32)
    for pair in range(3):
        for _ in range(4):
            case.submit(tokens(2), 1, pair)
    heads = []
    for _ in range(6):
        case.turn()
        heads.append([case.word(PAIR_SQ_HEAD, pair) for pair in range(3)])
    assert heads == [[1, 1, 0], [2, 1, 1], [2, 2, 2], [3, 3, 2], [4, 3, 3], [4, 4, 4]]
    case.finish()


def test_a_full_submission_queue_holds_the_front_end_back() -> None:
    case = make_case(pairs=1, slots=4, intake_entries=1)
    for _ in range(4):
        case.submit(tokens(2), 1)
    with pytest.raises(Busy):
        case.submit(tokens(2), 1)
    case.finish()
    case.submit(tokens(2), 1)


BAD_ENTRIES = [
    (REJECT_PROMPT, {"prompt_length": 0}),
    (REJECT_PROMPT, {"prompt_length": -1}),
    (REJECT_PROMPT, {"prompt_offset": -1}),
    (REJECT_PROMPT, {"prompt_offset": 1 << 30}),
    (REJECT_PROMPT, {"prompt_offset": 2**31 - 1, "prompt_length": 2**31 - 1}),
    (REJECT_LENGTH, {"max_tokens": 28}),
    (REJECT_LENGTH, {"max_tokens": 2**31 - 1}),
    (REJECT_PAGES, {"max_tokens": 22}),
    (REJECT_HASHES, {"hash_count": 0}),
    (REJECT_HASHES, {"hash_count": 2}),
    (REJECT_HASHES, {"hash_offset": -1}),
    (REJECT_HASHES, {"hash_offset": 2**31 - 1}),
    (REJECT_PARAMETER, {"max_tokens": 0}),
    (REJECT_PARAMETER, {"min_tokens": -1}),
    (REJECT_PARAMETER, {"temperature": -0.1}),
    (REJECT_PARAMETER, {"temperature": np.nan}),
    (REJECT_PARAMETER, {"temperature": np.inf}),
    (REJECT_PARAMETER, {"top_p": 0}),
    (REJECT_PARAMETER, {"top_p": 1.01}),
    (REJECT_PARAMETER, {"min_p": -0.5}),
    (REJECT_PARAMETER, {"min_p": 1.5}),
    (REJECT_PARAMETER, {"top_k": -1}),
    (REJECT_PARAMETER, {"repetition_penalty": 0}),
    (REJECT_PARAMETER, {"presence_penalty": -np.nan}),
    (REJECT_PARAMETER, {"frequency_penalty": -np.inf}),
    (REJECT_PARAMETER, {"logprobs": 21}),
    (REJECT_PARAMETER, {"cache_salt": -1}),
    (REJECT_PARAMETER, {"flags": 2}),
    (REJECT_PARAMETER, {"request_id": 7}),
]


@pytest.mark.parametrize(("reason", "entry"), BAD_ENTRIES)
def test_bad_entries_are_rejected_and_harm_nobody(reason: int, entry: dict[str, Any]) -> None:
    case = make_case(pages=6)
    other = case.submit(tokens(3), 4)
    bad = case.submit(tokens(5), 3, rejected=True, entry=entry)
    case.finish()
    assert (bad.ended, bad.reason, bad.got) == (FINISH_REJECTED, reason, [])
    assert other.ended == FINISH_LENGTH
    assert case.counter("requests_rejected") == case.counter("requests_accepted") == 1


@pytest.mark.parametrize(
    ("array", "index", "value", "reason"),
    [
        ("prompt", 4, -1, REJECT_TOKEN),
        ("prompt", 4, VOCAB, REJECT_TOKEN),
        ("hashes", 0, -1, REJECT_HASHES),
        ("hashes", 0, 1 << 62, REJECT_HASHES),
    ],
)
def test_tokens_and_page_hashes_out_of_range_are_rejected(array: str, index: int, value: int, reason: int) -> None:
    case = make_case()
    bad = case.submit(tokens(6), 2, rejected=True)
    getattr(case.views, array)[0, index] = value
    case.finish()
    assert (bad.ended, bad.reason) == (FINISH_REJECTED, reason)


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
    assert request.ended == FINISH_LENGTH


@pytest.mark.parametrize("slot", [-1, 4, 2**31 - 1, 0])
def test_an_entry_for_no_slot_or_a_busy_one_is_counted_and_skipped(slot: int) -> None:
    case = make_case()
    owner = case.submit(tokens(3), 6)
    case.turn()
    case.submit(tokens(7, 2), 2, entry={"slot": slot})
    good = case.submit(tokens(3), 2)
    case.finish()
    assert owner.ended == good.ended == FINISH_LENGTH
    assert case.counter("requests_rejected") == 1
