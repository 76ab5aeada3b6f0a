"""Refusals: conflicting limits, entries that can't be served, and parameters, compared bit by bit with a separate list.

Claim front-ends/intake: An entry that can't be served is refused and harms no other request. The bounds of a
turn are exact.
"""

import math
from typing import Any

import numpy as np
import pytest
from numba import njit
from support.scheduler_cases import VOCAB, case_sizes, make_case, tokens

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits, make_limits_by_name
from blinkpy.queues import words as C
from blinkpy.queues.request_parameters import PARAMETERS
from blinkpy.queues.submission import SQ_ENTRY, SUBMIT_NO_PREFIX_CACHE, neutral_entries
from blinkpy.queues.words import PAIR_CQ_TAIL
from blinkpy.scheduler.phases.intake import parameters_in_range

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
    (C.REJECT_PARAMETER, {"flags": 4}),
    (C.REJECT_PARAMETER, {"output_tokens": 5}),
    (C.REJECT_PARAMETER, {"request_id": 7}),
]


@pytest.mark.parametrize(("reason", "entry"), BAD_ENTRIES)
def test_invalid_entries_are_rejected_without_side_effects(reason: int, entry: dict[str, Any]) -> None:
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


def test_only_requests_that_share_pages_need_hashes() -> None:
    case = make_case()
    request = case.submit(tokens(9), 2, flags=SUBMIT_NO_PREFIX_CACHE, entry={"hash_count": 0})
    case.finish()
    assert request.ended == C.FINISH_LENGTH


def test_hashes_are_optional_without_a_prefix_cache() -> None:
    case = make_case(prefix_caching=False)
    request = case.submit(tokens(9), 2, entry={"hash_count": 0})
    case.finish()
    assert request.ended == C.FINISH_LENGTH


def test_an_entry_of_another_epoch_is_counted_and_skipped() -> None:
    """Its record has only the entry, its request has no slot, and its front end gets no completion."""
    case = make_case(record_turns=4)
    case.submit(tokens(7, 2), 2, entry={"epoch": 3})
    before = int(case.state.recorder.cursor[S.POSITION])
    case.turn()
    assert (case.counter("stale_entries"), case.counter("requests_rejected"), case.word(PAIR_CQ_TAIL)) == (1, 0, 0)
    assert not case.state.requests.status.any()
    assert case.state.recorder.words[before + 5] == 3 + SQ_ENTRY.itemsize // 8
    good = case.submit(tokens(3), 2)
    case.finish()
    assert good.ended == C.FINISH_LENGTH


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


# The accepted values, listed separately from the table. Signs and bits count: -0.0 is a valid temperature, but no valid min_p.
ACCEPTED = {
    "max_tokens": lambda v: v >= 1,
    "min_tokens": lambda v: v >= 0,
    "temperature": lambda v: math.isfinite(v) and v >= 0,
    "top_p": lambda v: 0 < v <= 1,
    "top_k": lambda v: v >= 0,
    "min_p": lambda v: 0 <= v <= 1 and math.copysign(1, v) > 0,
    "repetition_penalty": lambda v: 0 < v < math.inf,
    "presence_penalty": math.isfinite,
    "frequency_penalty": math.isfinite,
    "seed": lambda v: True,
    "priority": lambda v: True,
    "logprobs": lambda v: -1 <= v <= 20,
    "cache_salt": lambda v: v >= 0,
    "flags": lambda v: v in (0, 1, 2, 3),
    "tenant": lambda v: v >= 0,
    "best_effort": lambda v: 0 <= v <= 1,
    "tenant_weight": lambda v: 1 <= v <= 100_000,
    "output_tokens": lambda v: v >= 0,
}
compiled = njit(parameters_in_range)
# Around 0, 1, 20, the largest finite number, infinity, and both signs of each.
EDGES = [base + step for base in (0, 1, 20, 0x3F800000, 0x7F800000, 0x7FFFFFFF) for step in (-1, 0, 1)]


def accepted(entry: np.ndarray) -> bool:
    return all(fine(entry[name].item()) for name, fine in ACCEPTED.items())


def both(entry: np.ndarray) -> set[bool]:
    words = np.frombuffer(entry.tobytes(), np.int32)
    return {bool(parameters_in_range(words.tolist())), bool(compiled(words))}


def test_the_list_has_all_parameters() -> None:
    assert list(ACCEPTED) == [p.name for p in PARAMETERS]


@pytest.mark.parametrize("name", ACCEPTED)
def test_the_engine_accepts_exactly_these_bits_of_a_parameter(name: str, rng: np.random.Generator) -> None:
    """One parameter with random bits in an otherwise neutral entry; compiled, and in plain Python."""
    entry = neutral_entries(1)[0]
    entry["max_tokens"] = 1
    edges = np.array([edge & 0xFFFFFFFF for edge in EDGES], np.uint32)
    bits = np.concatenate([edges, edges ^ 0x80000000, rng.integers(0, 2**32, 300, dtype=np.uint32)])
    if SQ_ENTRY[name].itemsize == 8:
        bits = np.stack([rng.permutation(bits), bits], axis=1)
    seen = set()
    for value in np.ascontiguousarray(bits).view(SQ_ENTRY[name]).reshape(-1):
        entry[name] = value
        fine = accepted(entry)
        seen.add(fine)
        assert both(entry) == {fine}, (name, value)
    assert seen == ({True} if name in ("seed", "priority") else {True, False})


MIXED = r"mixed_step_tokens \({}\) must be at least twice max_num_seqs \(4\)"
BURST = r"burst_step_tokens \({}\) needs mixed_step_tokens \({}\)"


def limits_of(**sizes: Any) -> Limits:
    queue, facts, options = case_sizes(**sizes)
    return make_limits_by_name(queue, facts, **options)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"rows": 8, "tokens": 7}, r"max_num_batched_tokens \(7\) must be at least max_num_seqs \(8\)"),
        *(({"mixed_step_tokens": mixed}, MIXED.format(mixed)) for mixed in (7, 17)),
        *(
            ({"mixed_step_tokens": mixed, "burst_step_tokens": burst}, BURST.format(burst, mixed))
            for mixed, burst in ((0, 12), (12, 11), (12, 17))
        ),
    ],
)
def test_limits_that_clash_are_named(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limits_of(**sizes)
