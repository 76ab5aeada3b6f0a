"""Ring entries and pages of running requests, and preemption.

R9. A running request stalls if the earlier requests of its pair in `running` take all free entries of the
completion ring. A request that does not stall has reserved its entry for this turn, even if it is preempted.
R12 and R16 count the remaining entries.

R10. A decoding request gets the page that it lacks. While there are too few pages, a running request is
preempted: the latest of the stalled requests or, if no request stalls, the request with the greatest (rank,
arrival).

R19. The chunks of best-effort requests that lack more than one token have at most `best_effort_step_tokens`
tokens in a step, minus one for each row of one token. Within this limit and the budget, R15 applies.

R20. Running best-effort requests together hold at most `best_effort_pages` pages, unless this is the whole
pool or there is only one such request. A page with several holders counts for each. In R5, no request gets a
page if best effort would exceed the limit. In R10, while best effort would exceed it, a best-effort request
is preempted, before any preemption for lack of pages, and chosen as in R10. In R12, a waiting best-effort
request also needs, in addition to the pages of its tokens, one for each running best-effort request, at most
an eighth of the limit. While that is too much, stalled best-effort requests are preempted, the latest first.
"""

from blinkpy.verify.oracle.objects import Request
from blinkpy.verify.oracle.oracle_state import OracleState


def stall(state: OracleState) -> None:
    """R9: the first in `running` get the free entries of their completion ring; others stall."""
    for pair in state.pairs:
        pair.unclaimed = state.free_entries(pair)
    for request in state.movable():
        stalled = state.pairs[request.pair].unclaimed == 0
        state.counters["reader_stalls"] += stalled and not request.stalled
        request.stalled = stalled
        state.pairs[request.pair].unclaimed -= not stalled


def grow(state: OracleState) -> None:
    """R10: pages for those that decode, by preemption if need be."""
    while best_effort_exceeds(state, who_grows(state)):
        preempt(state, max((r for r in state.movable() if r.best_effort), key=urgency))
    while len(who_grows(state)) > state.pool.available:
        preempt(state, max(state.movable(), key=urgency))
    state.give_page_to_each(who_grows(state))


def who_grows(state: OracleState) -> list[Request]:
    return [r for r in state.active() if r.needs(state.limits.page_size) > 0]


def preempt(state: OracleState, request: Request) -> None:
    """Its pages are released, and it waits to be computed again."""
    state.leave(request)
    request.computed = request.indexed = 0
    request.canonical, request.orphaned = None, False
    request.preemptions += 1
    state.unranked.append(request)
    state.counters["preemptions"] += 1


def urgency(request: Request) -> tuple[bool, int, int]:
    """R10: of those who run the greatest is preempted."""
    return request.stalled, 0 if request.stalled else request.rank, request.arrival


def best_effort_exceeds(state: OracleState, growing: list[Request]) -> bool:
    """R20: whether several requests of best effort would hold too much if each of these got a page."""
    runs = [r for r in state.running if r.best_effort]
    held = sum(len(r.pages) for r in runs) + sum(r.best_effort for r in growing)
    return state.limits.best_effort_pages < state.limits.pages and len(runs) > 1 and held > state.limits.best_effort_pages


def best_effort_room(state: OracleState) -> int:
    """R19: the tokens that best-effort prompts may have in the next step."""
    decoding = sum(r.missing == 1 for r in state.active())
    return state.limits.best_effort_step_tokens - decoding
