"""What the scheduler takes in, how much of it, and what it refuses at the door."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.attached_world import prompt, world

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
    made = world(pairs=3, slots=4, intake_entries=2, rows=12, tokens=32)
    for front in made.fronts:
        for _ in range(4):
            front.submit(prompt(2), 1)
    heads = []
    for _ in range(6):
        made.step()
        heads.append([front.word(PAIR_SQ_HEAD) for front in made.fronts])
    assert heads == [[1, 1, 0], [2, 1, 1], [2, 2, 2], [3, 3, 2], [4, 3, 3], [4, 4, 4]]
    made.finish()


def test_a_full_submission_queue_holds_the_front_end_back() -> None:
    made = world(pairs=1, slots=4, intake_entries=1)
    front = made.fronts[0]
    for _ in range(4):
        front.submit(prompt(2), 1)
    assert front.free_slot() is None
    made.finish()
    assert front.free_slot() is not None


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


@pytest.mark.parametrize(("reason", "fields"), BAD_ENTRIES)
def test_bad_entries_are_rejected_and_harm_nobody(reason: int, fields: dict[str, Any]) -> None:
    made = world(pages=6, page_size=4, max_model_len=32)
    other = made.fronts[0].submit(prompt(3), 4)
    bad = made.fronts[0].submit(prompt(5), **{"max_tokens": 3, "ring": False, **fields})
    made.fronts[0].ring()
    made.finish()
    assert (bad.ended, bad.reason, bad.got) == (FINISH_REJECTED, reason, [])
    assert other.ended == FINISH_LENGTH
    assert made.counter("requests_rejected") == 1
    assert made.counter("requests_accepted") == 1


@pytest.mark.parametrize("fields", [{"temperature": -0.0}, {"temperature": 2}, {"min_p": 1}, {"logprobs": 20}, {"top_k": 9}])
def test_parameters_at_their_bounds_are_accepted(fields: dict[str, Any]) -> None:
    made = world()
    sent = made.fronts[0].submit(prompt(3), 2, **fields)
    made.finish()
    assert sent.ended == FINISH_LENGTH


@pytest.mark.parametrize("token", [-1, 50])
def test_a_prompt_token_outside_the_vocabulary_is_rejected(token: int) -> None:
    made = world()
    front = made.fronts[0]
    sent = front.submit(prompt(6), 2, ring=False)
    made.views.prompt[0, 4] = token
    front.ring()
    made.finish()
    assert (sent.ended, sent.reason) == (FINISH_REJECTED, REJECT_TOKEN)


@pytest.mark.parametrize("key", [-1, 1 << 62])
def test_a_page_hash_out_of_range_is_rejected(key: int) -> None:
    made = world()
    sent = made.fronts[0].submit(prompt(6), 2, ring=False)
    made.views.hashes[0, 0] = key
    made.fronts[0].ring()
    made.finish()
    assert (sent.ended, sent.reason) == (FINISH_REJECTED, REJECT_HASHES)


@pytest.mark.parametrize("slot", [-1, 4, 2**31 - 1])
def test_an_entry_for_a_slot_that_is_none_is_counted_and_skipped(slot: int) -> None:
    made = world()
    made.fronts[0].submit(prompt(3), 2, slot=slot)
    good = made.fronts[0].submit(prompt(3), 2)
    made.finish()
    assert good.ended == FINISH_LENGTH
    assert made.counter("requests_rejected") == 1


def test_an_entry_for_a_busy_slot_has_no_effect_on_its_owner() -> None:
    made = world()
    owner = made.fronts[0].submit(prompt(3), 6)
    made.step()
    made.fronts[0].submit(prompt(7, 2), 2, slot=0)
    made.finish()
    assert owner.ended == FINISH_LENGTH
    assert made.counter("requests_rejected") == 1


def test_hashes_may_be_left_out_by_those_that_do_not_share() -> None:
    made = world()
    sent = made.fronts[0].submit(prompt(9), 2, flags=SUBMIT_NO_PREFIX_CACHE, hash_count=0)
    made.finish()
    assert sent.ended == FINISH_LENGTH
