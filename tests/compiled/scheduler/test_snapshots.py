"""Snapshots of recurrent states, on chosen prompts: their positions, the requests that start from them, and their release.

The simulator's worlds have random snapshots and seeded bugs.
"""

import pytest
from support.scheduler_cases import Case, case_sizes, make_case, tokens

from blinkpy.config import ConfigError
from blinkpy.kv import state as S
from blinkpy.kv.limits import MOST_SNAPSHOTS, make_limits_by_name
from blinkpy.queues.submission import SUBMIT_NO_PREFIX_CACHE


def served(case: Case, prompt: list[int], **options: int) -> int:
    """Serve one request alone; returns its hits, in tokens."""
    before = case.counter("prefix_hit_tokens")
    case.submit(prompt, 2, **options)
    case.finish()
    return case.counter("prefix_hit_tokens") - before


def positions(case: Case) -> list[int]:
    """The positions of all valid snapshots, by the depths of their pages."""
    pages, found = case.state.pages, []
    for page, generation in zip(case.state.snapshots.page.tolist(), case.state.snapshots.generation.tolist(), strict=True):
        depth = 0
        while page >= 0 and (depth or pages.generation[page] == generation):
            depth, page = depth + case.limits.page_size, int(pages.parent[page])
        found += [depth] * (depth > 0)
    return sorted(found)


def test_positions_in_a_prompt() -> None:
    """Every 8 tokens, and at the last page border that leaves two tokens."""
    case = make_case(snapshots=8, snapshot_tokens=8, pages=40, tokens=32)
    assert served(case, tokens(29)) == 0
    assert positions(case) == [8, 16, 24]
    assert served(case, tokens(30)) == 24
    assert positions(case) == [8, 16, 24, 28]
    assert served(case, tokens(30)) == 28
    assert served(case, tokens(29)) == 24, "a request from 28 would lack one token"


def test_where_prompts_part() -> None:
    case = make_case(snapshots=8, snapshot_tokens=64, pages=40, tokens=32)
    stem = tokens(19)
    assert [served(case, stem + tokens(8, start)) for start in (30, 31, 32)] == [0, 0, 16]
    assert positions(case) == [16, 24, 24, 24]


def test_short_positions_have_no_snapshot() -> None:
    case = make_case(snapshots=8, snapshot_tokens=128, pages=40, tokens=32)
    assert [served(case, tokens(10)) for _ in range(2)] == [0, 8]
    assert positions(case) == [8], "a sixteenth of the distance"
    case = make_case(snapshots=8, snapshot_tokens=256, pages=40, tokens=32)
    assert [served(case, tokens(10)) for _ in range(2)] == [0, 0]
    assert positions(case) == []


def test_the_least_recently_used_is_replaced() -> None:
    case = make_case(snapshots=2, snapshot_tokens=64, pages=40, tokens=32)
    first, second, third = (tokens(10, start) for start in (0, 1, 2))
    served(case, first)
    served(case, second)
    assert served(case, first) == 8
    served(case, third)
    assert served(case, first) == 8
    assert served(case, second) == 0


def test_a_request_outside_the_prefix_cache_is_not_cut() -> None:
    case = make_case(snapshots=2, snapshot_tokens=8, pages=40, tokens=32)
    case.submit(tokens(20), 1, flags=SUBMIT_NO_PREFIX_CACHE)
    case.turn()
    assert int(case.state.batch.counts[S.TOKENS]) == 20
    case.finish()
    assert positions(case) == []


def test_a_cancel_frees_the_snapshot_that_a_request_needed() -> None:
    case = make_case(snapshots=2, snapshot_tokens=16)
    served(case, tokens(10))
    request = case.submit(tokens(5, 3), 8)
    case.turn(4)
    slot = int(case.state.running[0])
    case.state.requests.snapshot_source[slot] = 0  # as if its first step had not run
    case.state.snapshots.pins[0] += 1
    case.cancel(request)
    case.turn()
    assert case.state.snapshots.pins.tolist() == [0, 0]
    assert int(case.state.requests.snapshot_source[slot]) == S.NO_SNAPSHOT
    case.finish()


def test_limits() -> None:
    queue, facts, options = case_sizes(page_size=4)
    with pytest.raises(ConfigError, match=f"state_snapshots must be 0 to {MOST_SNAPSHOTS}, not 4097"):
        make_limits_by_name(queue, facts, **options, snapshots=4097)
    with pytest.raises(ConfigError, match="state_snapshots needs enable_prefix_caching"):
        make_limits_by_name(queue, facts, **options, snapshots=1, prefix_caching=False)
    assert make_limits_by_name(queue, facts, **options, snapshots=1, snapshot_tokens=9).snapshot_tokens == 16
