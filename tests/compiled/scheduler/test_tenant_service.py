"""Service of tenants: `fair` serves by weight, floods delay no other tenant, and no tenant saves service up. The oracle agrees.

Claim decisions/tenants (simulator): Tenants that always have waiting requests are served by weight within a
bound. A returning tenant has no credit, and service is counted to the token.
"""

import random

import numpy as np
import pytest
from support.scheduler_cases import Case, make_case, tokens

from blinkpy.kv import state as S
from blinkpy.scheduler.policies import FAIR_BEST_EFFORT, RequestFields, fair, fcfs
from blinkpy.scheduler.tenant_service import EXPECTED_OUTPUT, TOKEN_SERVICE
from blinkpy.verify.policy_check.waiting_bounds import TenantLoad, tenant_shares

SPACE = {"pairs": 1, "slots": 16, "rows": 1, "tokens": 16, "pages": 60, "max_model_len": 60, "intake_entries": 16}


def order(case: Case, names: dict[object, str]) -> str:
    case.finish()
    return "".join(names.get(request, "") for request in case.done)


@pytest.mark.parametrize("lanes", [1, 3])
def test_a_flood_of_one_tenant_delays_no_other_one(lanes: int) -> None:
    """Both have requests of one size; one tenant has sent many before."""
    case, names = make_case(fair, lanes, **SPACE), dict[object, str]()
    for n in range(8):
        names[case.submit(tokens(8, n), 2, tenant=1)] = "a"
    case.turn(2)
    for n in range(4):
        names[case.submit(tokens(8, 20 + n), 2, tenant=2)] = "b"
    assert order(case, names) == "a" + "ab" * 4 + "aaa", "from the second request on, in turn"


def test_a_weight_is_a_share() -> None:
    case, names = make_case(fair, 1, **SPACE), dict[object, str]()
    for n in range(12):
        for tenant, weight in ((1, 100), (2, 300)) if n < 4 else ((2, 300),):
            names[case.submit(tokens(8, n + 20 * tenant), 2, tenant=tenant, tenant_weight=weight)] = " ab"[tenant]
    served = order(case, names)
    assert [served[: 4 * n].count("a") for n in range(1, 5)] == [1, 2, 3, 4], served


def test_a_returning_tenant_has_no_credit() -> None:
    """One tenant was served alone for long; then both come, and have equal shares."""
    case, names = make_case(fair, 1, **SPACE), dict[object, str]()
    case.submit(tokens(4), 1, tenant=2)
    for n in range(12):
        case.submit(tokens(30, n), 2, tenant=1)
    case.finish()
    case.submit(tokens(2), 20, tenant=3)  # runs while they come
    case.turn(2)
    for n in range(6):
        for tenant in 1, 2:
            names[case.submit(tokens(8, n + 20 * tenant), 2, tenant=tenant)] = " ab"[tenant]
    served = order(case, names)
    assert abs(served[:6].count("a") - served[:6].count("b")) <= 2, served


def test_wrong_estimates_are_settled_at_the_end() -> None:
    """The counter equals the served tokens exactly, for requests that ended, were cancelled while running, or never ran."""
    case = make_case(fair, 1, **SPACE)
    first = case.submit(tokens(10), 40, tenant=7)
    never = case.submit(tokens(20, 1), 30, tenant=7)
    case.turn(4)
    generated = int(case.state.requests.length[case.state.running[0]]) - 10
    account = case.state.tenants
    assert (account.key[0], account.key[1]) == (7 << 1, -1)
    assert account.service[0] == (10 + 2 * 40 + 20 + 2 * 30) * TOKEN_SERVICE
    assert account.expected[0] == EXPECTED_OUTPUT
    case.cancel(never)
    case.turn()
    assert account.service[0] == (10 + 2 * 40) * TOKEN_SERVICE
    case.cancel(first)
    generated = int(case.state.requests.length[case.state.running[0]]) - 10
    case.turn()
    generated += 1  # of the last step
    assert account.service[0] == (10 + 2 * generated) * TOKEN_SERVICE
    assert account.expected[0] == EXPECTED_OUTPUT + (generated - EXPECTED_OUTPUT) // 4
    case.finish()


def test_an_evicted_tenant_returns_without_debt() -> None:
    """Two slots, so two counts. A tenant's count goes to other tenants while its request runs; then it returns to the same
    place, and the first request's correction exceeds its count."""
    case = make_case(fcfs, 3, **{**SPACE, "slots": 2, "rows": 2})
    first = case.submit(tokens(3), 40, tenant=1, tenant_weight=10)
    case.turn(2)
    for tenant, weight in ((2, 1), (3, 10_000), (1, 10_000)):
        case.submit(tokens(20, tenant), 1, tenant=tenant, tenant_weight=weight)
        case.turn(6)
        case.read(0)
        keys = case.state.tenants.key.tolist()
        assert keys == {2: [1 << 1, 2 << 1], 3: [3 << 1, 2 << 1], 1: [1 << 1, 2 << 1]}[tenant]
    before = int(case.state.tenants.service[0])
    case.cancel(first)
    case.finish()
    assert before > case.state.tenants.service[0] == 0


def test_a_reused_tenant_count_starts_without_debt() -> None:
    """Two slots, so two counts; the first tenant's count goes to another tenant while its request runs."""
    case = make_case(fcfs, 1, **{**SPACE, "slots": 2, "rows": 2})
    first = case.submit(tokens(3), 40, tenant=1, tenant_weight=10_000)
    case.turn(2)
    for tenant in 2, 3:
        case.submit(tokens(20, tenant), 1, tenant=tenant)
        case.turn(6)
        case.read(0)
    account = case.state.tenants
    assert account.key.tolist() == [3 << 1, 2 << 1]
    before = account.service.tolist(), account.expected.tolist()
    case.cancel(first)
    case.finish()
    assert (account.service.tolist(), account.expected.tolist()) == before


def test_classes_are_served_within_the_bound() -> None:
    """A best-effort request waits until latency-sensitive tenants, which have separate counters, were served FAIR_BEST_EFFORT
    more."""

    def rank(service: int, best_effort: int) -> int:
        return fair(RequestFields(0, 0, 1, 1, 0, 0, 0, 0, 0, best_effort, service))

    assert rank(FAIR_BEST_EFFORT - 1, 0) < rank(0, 1) < rank(FAIR_BEST_EFFORT + 1, 0)
    case, names = make_case(fair, 1, **SPACE), dict[object, str]()
    for n in range(4):
        names[case.submit(tokens(40, n), 2, tenant=1, best_effort=1)] = "b"
    for n in range(4):
        names[case.submit(tokens(40, 10 + n), 2, tenant=1)] = "s"
    assert order(case, names) == "ssssbbbb"
    # With a weight of 0.01 a prompt of 40 tokens counts as 4,000, so 25 prompts reach the bound.
    case, names = make_case(fair, 1, **SPACE), dict[object, str]()
    names[case.submit(tokens(50), 2, tenant=9)] = "x"
    case.turn(2)
    names[case.submit(tokens(3), 1, tenant=1, best_effort=1)] = "b"
    sent = 0
    while "b" not in "".join(names[request] for request in case.done):
        if (case.state.requests.status != S.EMPTY).sum() < 6:
            names[case.submit(tokens(40, sent % 40), 2, tenant=2, tenant_weight=1)] = "s"
            sent += 1
        case.turn()
        case.read(0)
        assert sent < 60, "the best-effort request starves"
    assert len(case.done) > 20
    case.finish()


def random_loads(draw: random.Random) -> tuple[TenantLoad, ...]:
    weights = draw.choice(((1, 1, 1), (0.5, 1, 2), (1, 3, 1)))
    return tuple(TenantLoad(w, draw.randint(1, 400), draw.randint(1, 60), draw.randint(6, 20)) for w in weights)


def test_backlogged_tenants_are_served_by_weight(seed: int) -> None:
    """Hostile loads: a tenant may send many more and longer requests, but its share follows its weight."""
    draw = random.Random(seed)
    for _ in range(3):
        loads = random_loads(draw)
        shares = tenant_shares(fair, loads, turns=1500)
        assert shares.fair, (loads, shares)
        assert min(shares.served) > 0
    unfair = tenant_shares(fcfs, turns=1500)
    assert not unfair.fair
    assert np.argmax(unfair.served) == 1, "the tenant with the longest prompts has most"
