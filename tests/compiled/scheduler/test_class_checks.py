"""The report of `blinkpy check` about classes and tenants: bounds are correct, and violations have evidence.

Claim policies/check: `blinkpy check` measures the effect of classes, finds policies that starve a class, and
measures the shares of tenants.
"""

import pytest

from blinkpy.config import YIELD_STEPS
from blinkpy.scheduler.policies import BEST_EFFORT_US, FAIR_BEST_EFFORT, Policy, fair, fcfs, short_prompts
from blinkpy.scheduler.policy_trial import sample_requests
from blinkpy.tool_options import CheckOptions
from blinkpy.verify.policy_check.check_child import class_findings, tenant_finding
from blinkpy.verify.policy_check.waiting_bounds import SERVICE_PER_S, class_window, compile_ranks


def greedy(request):
    """A policy that prefers latency-sensitive requests, and among these the most-served tenant."""
    return (request.best_effort << 60) - request.tenant_service


def upside_down(request):
    return request.arrival_us - 5_000_000 * request.best_effort


@pytest.mark.parametrize(
    ("policy", "best_effort_s", "sensitive_s"),
    [(fcfs, 0, 0), (short_prompts, BEST_EFFORT_US / 1e6, 0), (fair, FAIR_BEST_EFFORT / SERVICE_PER_S, 0), (upside_down, 0, 5)],
)
def test_what_the_class_alone_is_worth(policy: Policy, best_effort_s: float, sensitive_s: float) -> None:
    rank_many = compile_ranks(policy)
    for waits, seconds in ((1, best_effort_s), (0, sensitive_s)):
        found = class_window(rank_many, 1, waits)
        assert 0.8 * seconds <= found.window_s <= seconds, waits
        assert found.bounded
        assert found.waits.best_effort == waits
        fields = ("arrival", "arrival_us", "tenant_service", "best_effort")
        assert len({one._replace(**dict.fromkeys(fields, 0)) for one in (found.waits, found.overtakes)}) == 1


def test_a_policy_that_starves_a_class_or_inverts_service_is_reported() -> None:
    options, rank_many = CheckOptions(policy="greedy"), compile_ranks(greedy)
    starves, sensitive, yields = class_findings(greedy, rank_many, options)
    assert (starves.level, starves.part) == ("error", "classes")
    assert "a best-effort request may starve" in starves.text
    assert "still waiting after" in starves.text, "shown on the scheduler"
    assert "best_effort=1" in starves.text
    assert sensitive.level == "fine"
    assert "is never overtaken by later best-effort requests" in sensitive.text
    assert yields.level == "fine"
    assert f"at most {YIELD_STEPS} consecutive turns" in yields.text
    unfair = tenant_finding(greedy, rank_many, sample_requests(50, 1))
    assert (unfair.level, unfair.part) == ("error", "tenants")
    assert "service does not follow the weights" in unfair.text


def test_the_overtaking_bound_of_best_effort_is_reported() -> None:
    found = class_findings(fcfs, compile_ranks(fcfs), CheckOptions(policy="fcfs"))
    assert [f"{YIELD_STEPS} of them may pass it" in one.text for one in found] == [True, False, False]
    assert [one.level for one in found] == ["fine"] * 3


def test_a_fair_policy_passes_and_fcfs_gets_a_note() -> None:
    requests = sample_requests(50, 1)
    good, other = (tenant_finding(policy, compile_ranks(policy), requests) for policy in (fair, fcfs))
    assert (good.level, other.level) == ("fine", "note"), (good, other)
    assert "service does not follow the weights" in other.text
