"""A front end that writes random words into its own queue pair: its work for the engine, and its effect on other front ends.

Claim front-ends/isolation (simulator): A cancel, a dead front end or a broken protocol takes effect, and
affects no other front end. A front end that writes arbitrary data delays no token of another front end by a turn.
"""

from collections.abc import Callable

import numpy as np
import pytest
from support.scheduler_cases import Case, case_sizes, make_case, tokens

from blinkpy.kv import state as S
from blinkpy.kv.limits import CLAIM_NS, make_limits_by_name
from blinkpy.queues import words as W
from blinkpy.queues.submission import neutral_entries
from blinkpy.scheduler.cycle import make_turn
from blinkpy.scheduler.policies import SHIPPED, fcfs
from blinkpy.verify.sim.runs import run
from blinkpy.verify.sim.world import TICK_NS, make_world

HOSTILE, VICTIM = 0, 1  # queue pairs; intake begins with the hostile front end's


def words(case: Case) -> tuple[int, int, int]:
    """The published epoch, submission head and completion tail of the hostile pair."""
    return case.word(W.PAIR_EPOCH, HOSTILE), case.word(W.PAIR_SQ_HEAD, HOSTILE), case.word(W.PAIR_CQ_TAIL, HOSTILE)


def claims(case: Case) -> None:
    """A claim before each turn (H6)."""
    front = case.views.front[HOSTILE]
    front[W.FRONT_HEARTBEAT] += 1
    front[W.FRONT_CLAIM] = words(case)[0] + 1


def claims_and_announces(case: Case) -> None:
    """Also a ring full of entries, to delay other front ends, and a completion head past the tail."""
    claims(case)
    epoch, head, tail = words(case)
    case.views.front[HOSTILE, W.FRONT_DOORBELL] = epoch << W.EPOCH_SHIFT | head + case.limits.sq_entries
    case.views.front[HOSTILE, W.FRONT_CQ_HEAD] = epoch << W.EPOCH_SHIFT | tail + (1 if case.now % 3 == 0 else 0)


def submits_refused(case: Case) -> None:
    """Submit the maximum number of entries that one turn reads, all refused."""
    epoch, head, tail = words(case)
    entries = neutral_entries(case.limits.sq_entries)
    entries["request_id"], entries["epoch"], entries["slot"] = epoch << W.EPOCH_SHIFT | 1, epoch, np.arange(len(entries))
    case.views.sq[HOSTILE] = entries.view(np.int32).reshape(case.views.sq[HOSTILE].shape)
    front = case.views.front[HOSTILE]
    front[W.FRONT_HEARTBEAT] += 1
    front[W.FRONT_DOORBELL] = epoch << W.EPOCH_SHIFT | head + case.limits.sq_entries
    front[W.FRONT_CQ_HEAD] = epoch << W.EPOCH_SHIFT | tail


def served(attack: Callable[[Case], None] | None) -> list[int]:
    """A victim submits one request after another. Returns the turns from each submission to each of its tokens."""
    case = make_case(attached=False, pairs=2, slots=8, cq_entries=64, pages=32)
    case.claim(VICTIM)
    case.views.front[HOSTILE, W.FRONT_CLAIM] = 1
    case.turn()
    case.judged = attack is None  # ids are reused
    case.opinion = None
    took = list[int]()
    for i in range(30):
        request = case.submit(tokens(3 + i % 5, i), 4, pair=VICTIM)
        for turn in range(1, 40):
            if attack:
                attack(case)
            before = len(request.got)
            case.turn()
            case.read(VICTIM)
            took += [turn] * (len(request.got) - before)
            if request.ended:
                break
        assert request.got == request.expected
    return took


@pytest.mark.parametrize("attack", [claims, claims_and_announces])
def test_claims_delay_no_token(attack: Callable[[Case], None]) -> None:
    """With claims before each turn, each token arrives in the same turn as without them."""
    assert served(attack) == served(None)


def test_refused_entries_delay_entries_by_at_most_the_rotation() -> None:
    """With 4 entries a turn from two queue pairs in rotation, each entry's turn comes soon."""
    assert served(submits_refused) == served(None)


def test_a_queue_pair_is_granted_no_more_often_than_an_interval_allows() -> None:
    """Without the interval, 5,000 claims in 5,000 turns would be 5,000 grants."""
    case, turns = make_case(attached=False), 500
    case.judged = False
    for _ in range(turns):
        claims(case)
        case.turn()
    interval = -(-case.limits.claim_ns // TICK_NS)
    assert words(case)[0] == 1 + (turns - 1) // interval
    assert 1 < interval < turns


def test_a_claim_that_waits_is_granted_and_the_owner_serves_until_then() -> None:
    """The previous owner keeps the pair for the rest of the interval; a silent owner's successor waits no longer."""
    case = make_case(pairs=1, lease_ms=8)
    case.turn(40)
    first = case.submit(tokens(3), 20)
    case.claim(0)  # long after the last grant: immediately
    granted, epoch = case.now, case.word(W.PAIR_EPOCH)
    case.views.front[0, W.FRONT_CLAIM] = epoch + 1
    while case.word(W.PAIR_EPOCH) == epoch:
        assert case.word(W.PAIR_ATTACHED) == 1
        case.turn()
    assert case.limits.claim_ns <= case.now - granted < case.limits.claim_ns + 2 * TICK_NS
    assert not first.ended


@pytest.mark.parametrize(("lease_ms", "claim_ns"), [(50, 6_250_000), (5000, CLAIM_NS), (3_600_000, CLAIM_NS)])
def test_a_successor_waits_a_tenth_of_a_second_at_most(lease_ms: int, claim_ns: int) -> None:
    sizes, facts, options = case_sizes(lease_ms=lease_ms)
    assert make_limits_by_name(sizes, facts, **options).claim_ns == claim_ns


def test_a_cancel_does_not_affect_a_later_request_with_the_same_id() -> None:
    """Ids are reused only by a front end that violates the protocol; the rules hold for it, too."""
    case = make_case(pairs=1)
    first = case.submit(tokens(3), 8)
    case.turn(2)
    case.cancel(first)
    case.finish()
    request_id = int(case.views.cancel[0, 0])
    case.submit(tokens(3), 2, entry={"request_id": request_id, "slot": 0})
    case.judged = False  # the checks confuse old ids with new ids
    case.turn()
    assert int(case.state.requests.request_id[0]) == request_id
    assert case.state.requests.status[0] in (S.WAITING, S.RUNNING)


def test_a_replay_forgets_the_cancel_of_a_request_with_the_same_id() -> None:
    """The front end had withdrawn the word; a replay must not cancel the second request with it."""
    world = make_world(1, 1, chosen=case_sizes(pairs=1, record_turns=64))
    case = Case(world, make_turn(fcfs), fcfs, records=True)
    case.claim(0)
    first = case.submit(tokens(3), 8)
    case.turn(2)
    case.cancel(first)
    case.finish()
    request_id = int(case.views.cancel[0, 0])
    case.views.cancel[0, 0] = 0
    case.judged = False  # the checks confuse old ids with new ids
    case.submit(tokens(3), 4, entry={"request_id": request_id, "slot": 0})
    case.turn(3)  # each turn is replayed
    assert case.state.requests.status[0] == S.RUNNING


@pytest.mark.parametrize(
    ("steps", "options"),
    [(150_000, {}), (6_000, {"turns": 500, "oracle": True}), (600, {"turns": 100, "oracle": True, "records": True, "lanes": 5})],
    ids=["compiled", "rules", "lanes and records"],
)
def test_storms_with_a_hostile_neighbour(seed: int, steps: int, options: dict[str, int]) -> None:
    """Random words in every turn: after each, the state is valid, every decision follows the rules, and every token of other
    front ends is correct. As in all storms, intake skips no front end, and the request with the lowest rank continues."""
    report = run(list(SHIPPED.values()), seed, steps, hostile=True, **options)
    assert not report.failures, report.failures
    assert report.claims > steps // 2 and report.entries > steps // 20
