"""Service of tenants.

R18. A tenant has a count for each class. An accepted request's service is the greater of this count and a
floor. The floor is the lowest service among waiting requests of its class, including unranked ones; if none
waits, it is the greatest service of any request that ever ran. The count becomes this service plus the
charge. The charge is the prompt plus twice the expected output, at most max_tokens, in thousandths of a
token, divided by the weight in hundredths, rounded down. The expected output is 256 for a new tenant; after
each output it moves by a quarter of the difference (rounded down). When a request ends, its real service
replaces its charge, but the count is never below 0. A request that never ran has no service and does not
change the expectation. There are as many counts as slots. A new tenant takes an unused count or, if all are
used, the first of the lowest counts; a request that ends then no longer finds its tenant's count.
"""

from blinkpy.verify.oracle.objects import Account, Request
from blinkpy.verify.oracle.oracle_state import OracleState


def charge(state: OracleState, request: Request) -> None:
    """R18: a request that is accepted gets its service, and its tenant is charged for it."""
    peers = [r.service for r in state.waiting + state.unranked if r.best_effort == request.best_effort]
    floor = min(peers, default=state.clock)
    names = [None if a is None else (a.tenant, a.best_effort) for a in state.accounts]
    name = request.tenant, request.best_effort
    if name in names:
        request.place = names.index(name)
    else:
        held = [-1 if a is None else a.service for a in state.accounts]
        request.place = held.index(min(held))
        state.accounts[request.place] = Account(*name)
    account = state.accounts[request.place]
    assert account is not None
    request.service = max(account.service, floor)
    request.charged = cost(state, request, min(account.expected, request.max_tokens))
    account.service = request.service + request.charged


def settle(state: OracleState, request: Request, ran: bool) -> None:
    """R18: at the end of a request its tenant pays for what it was served."""
    account = state.accounts[request.place]
    if account is None or (account.tenant, account.best_effort) != (request.tenant, request.best_effort):
        return
    output = max(0, len(request.tokens) - request.prompt_length)
    served = cost(state, request, output) if ran else 0
    account.service = max(0, account.service + served - request.charged)
    account.expected += (output - account.expected) // 4 if ran else 0


def cost(state: OracleState, request: Request, output: int) -> int:
    """R18: tokens in thousandths, over a weight in hundredths."""
    return (request.prompt_length + 2 * output) * 100_000 // request.weight
