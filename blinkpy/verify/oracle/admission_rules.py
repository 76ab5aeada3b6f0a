"""Rules of admission, growth and preemption (R9, R10, R12, R13, R16, R19, R20), and of queue pairs' owners
(R1).
"""

from blinkpy.queues import words as W
from blinkpy.queues.words import pack_hits
from blinkpy.verify.oracle.oracle_state import OracleState, Page, Pair, Request, Verdict
from blinkpy.verify.oracle.snapshot_rules import start_from, usable_hits


def stall(state: OracleState) -> None:
    """R9: mark each running request without a free entry in its completion ring as stalled. Earlier requests go first."""
    for pair in state.pairs:
        pair.unclaimed = state.free_entries(pair)
    for request in state.movable():
        stalled = state.pairs[request.pair].unclaimed == 0
        state.counters["reader_stalls"] += stalled and not request.stalled
        request.stalled = stalled
        state.pairs[request.pair].unclaimed -= not stalled


def grow(state: OracleState) -> None:
    """R10: give a page to each decoding request that lacks a page; preempt requests while pages are short."""
    while best_effort_exceeds(state, lacking_a_page(state)):
        preempt(state, max((r for r in state.movable() if r.best_effort), key=urgency))
    while len(lacking_a_page(state)) > state.pool.available:
        preempt(state, max(state.movable(), key=urgency))
    state.give_page_to_each(lacking_a_page(state))


def lacking_a_page(state: OracleState) -> list[Request]:
    return [r for r in state.active() if r.needs(state.limits.page_size) > 0]


def preempt(state: OracleState, request: Request) -> None:
    """Preempt a running request: release its pages, and let it wait. Its tokens are recomputed later."""
    state.remove(request)
    request.computed = request.indexed = 0
    request.canonical, request.orphaned = None, False
    request.preemptions += 1
    state.unranked.append(request)
    state.counters["preemptions"] += 1


def urgency(request: Request) -> tuple[bool, int, int]:
    """R10: the sort key for preemption; the running request with the greatest key is preempted."""
    return request.stalled, 0 if request.stalled else request.rank, request.arrival


def best_effort_exceeds(state: OracleState, growing: list[Request]) -> bool:
    """R20: whether running best-effort requests would exceed their limit if each request of `growing` got a
    page.
    """
    runs = [r for r in state.running if r.best_effort]
    held = sum(len(r.pages) for r in runs) + sum(r.best_effort for r in growing)
    return state.limits.best_effort_pages < state.limits.pages and len(runs) > 1 and held > state.limits.best_effort_pages


def best_effort_tokens(state: OracleState) -> int:
    """R19: the maximum tokens of best-effort prompts in the next step."""
    decoding = sum(r.missing == 1 for r in state.active())
    return state.limits.best_effort_step_tokens - decoding


def begin_yield(state: OracleState) -> bool:
    """R16: whether best-effort prompts yield to latency-sensitive prompts in this turn."""
    space = len(state.running) < state.limits.rows
    urgent = any(not r.best_effort for r in state.prompts()) or (space and enters_next(state) is not None)
    flexible = any(r.best_effort for r in state.running + state.waiting + state.unranked)
    yields = urgent and flexible and state.yielded < state.limits.yield_steps
    state.yielded = state.yielded + 1 if yields else 0
    return yields


def enters_next(state: OracleState) -> Request | None:
    """R16: the latency-sensitive request to admit next while best-effort prompts yield, or None."""
    line = able_to_enter(state)
    if state.passed >= state.limits.yield_steps:
        line = line[:1]
    return next((r for r in line if not r.best_effort), None)


def able_to_enter(state: OracleState) -> list[Request]:
    """The waiting requests with a free entry in their completion ring, in order."""
    return [r for r in state.waiting if state.pairs[r.pair].unclaimed > 0]


def admit(state: OracleState, budget: int, yields: bool) -> None:
    """R12: admit waiting requests in order, until one does not fit."""
    if state.unranked:
        return
    if yields:
        admit_sensitive(state, budget)
        return
    apart = [r for r in state.prompts() if r.best_effort]
    left = budget - sum(r.missing for r in state.active() if r not in apart)
    space = best_effort_tokens(state)
    for missing in [r.missing for r in apart]:
        left, space = left - min(missing, max(space, 0)), space - missing
    for request in list(state.waiting):
        if left <= 0:
            return
        if state.pairs[request.pair].unclaimed > 0:
            if request.best_effort and (space <= 0 or not best_effort_fits(state, request)):
                space = state.passed = 0  # all waiting best-effort requests after it are skipped, too
                continue
            if not starts_if_it_fits(state, request):
                return
            state.passed = 0 if request.best_effort else state.passed
            left -= min(request.missing, space) if request.best_effort else request.missing
            space -= request.missing * request.best_effort


def admit_sensitive(state: OracleState, budget: int) -> None:
    """R12, R16: admit latency-sensitive requests only; they overtake waiting best-effort requests."""
    while (request := enters_next(state)) and sum(r.missing for r in ahead(state, request)) < budget:
        passes = able_to_enter(state)[0].best_effort
        if not starts_if_it_fits(state, request):
            return
        state.passed += passes


def starts_if_it_fits(state: OracleState, request: Request) -> bool:
    """R12: run a waiting request if it fits, preempting stalled requests if necessary. Returns whether it runs."""
    while (hits := fits(state, request)) is None:
        stalled = [r for r in state.running if r.stalled]
        if not stalled:
            return False
        preempt(state, max(stalled, key=lambda r: r.arrival))
    start(state, request, hits)
    return True


def fits(state: OracleState, request: Request) -> list[Page] | None:
    """R12: the hit pages of a waiting request, or None if the request does not fit."""
    available = state.pool.available - min(len(state.running), state.limits.pages // 8)
    if len(state.running) == state.limits.rows or available <= 0:
        return None
    hits = usable_hits(state, request, hit_pages(state, request))
    request.hit_tokens = len(hits) * state.limits.page_size
    fresh = request.needs(state.limits.page_size) - len(hits)
    return hits if fresh + sum(page.holders == 0 for page in hits) <= available else None


def hit_pages(state: OracleState, request: Request) -> list[Page]:
    """R13: the indexed pages that hold the request's first tokens, in order."""
    size, hits = state.limits.page_size, list[Page]()
    most = min((len(request.tokens) - 1) // size, request.hashed) if request.cacheable else 0
    for k in range(most):
        place = hits[-1] if hits else None, request.salt, tuple(request.tokens[k * size : (k + 1) * size])
        page = state.pool.index.get(place)
        if page is None:
            break
        hits.append(page)
    return hits


def start(state: OracleState, request: Request, hits: list[Page]) -> None:
    fresh = request.needs(state.limits.page_size) - len(hits)
    for page in hits:
        state.pool.share(page)
    state.pool.evict(fresh)
    request.pages = hits + [state.pool.take() for _ in range(fresh)]
    request.computed, request.indexed = request.hit_tokens, len(hits)
    start_from(state, request, hits)
    request.canonical = hits[-1] if hits else None
    state.waiting.remove(request)
    state.running.append(request)
    state.pairs[request.pair].unclaimed -= 1
    state.clock = max(state.clock, request.service)
    if not request.preemptions:
        state.hit_words[request.slot] = pack_hits(request.request_id, len(hits), state.now_ns - request.arrival_us * 1000)
    if request.cacheable:
        state.counters["prefix_lookup_tokens"] += len(request.tokens)
        state.counters["prefix_hit_tokens"] += request.hit_tokens


def ahead(state: OracleState, request: Request) -> list[Request]:
    """R12: the requests whose missing tokens take precedence over `request` in the budget, while best-effort prompts yield."""
    active = state.active()
    return [r for r in active if r.missing == 1 or (not r.best_effort and r.order() < request.order())]


def best_effort_fits(state: OracleState, request: Request) -> bool:
    """R20: whether the pages of a waiting best-effort request fit into best effort's limit, after preempting stalled best-effort
    requests if necessary.
    """
    most = state.limits.best_effort_pages
    while most < state.limits.pages and (runs := [r for r in state.running if r.best_effort]):
        held = sum(len(r.pages) for r in runs) + min(len(runs), most // 8)
        if held + request.needs(state.limits.page_size) <= most:
            return True
        if not any(r.stalled for r in runs):
            return False
        preempt(state, max((r for r in runs if r.stalled), key=lambda r: r.arrival))
    return True


def judge(state: OracleState, pair: Pair, words: list[int], now_ns: int, ends: bool) -> Verdict:
    """R1: decide whether a queue pair is revoked or granted in this turn.

    words: the front end's words, by W.FRONT_*.
    ends: whether no step is cut, or the last group of the cut step has run (R23).
    """
    heartbeat, claim = words[W.FRONT_HEARTBEAT], words[W.FRONT_CLAIM]
    expired = broken = False
    if pair.attached:
        if heartbeat != pair.heartbeat:
            pair.heartbeat, pair.heartbeat_ns = heartbeat, now_ns
        expired = now_ns - pair.heartbeat_ns > state.limits.lease_ns
        epoch, tail = divmod(words[W.FRONT_DOORBELL], 1 << W.EPOCH_SHIFT)
        if epoch == pair.epoch:
            announced = (tail - pair.sq_head) % (1 << W.EPOCH_SHIFT)
            if announced <= state.limits.sq_entries:
                pair.sq_tail = pair.sq_head + announced
            broken = announced > state.limits.sq_entries
        epoch, head = divmod(words[W.FRONT_CQ_HEAD], 1 << W.EPOCH_SHIFT)
        if epoch == pair.epoch:
            unread = (pair.cq_tail - head) % (1 << W.EPOCH_SHIFT)
            behind = unread > pair.cq_tail - pair.cq_head
            if not behind:
                pair.cq_head = pair.cq_tail - unread
            broken = broken or behind
    if not ends:
        return Verdict()
    due = pair.epoch == 0 or now_ns >= pair.granted_ns + state.limits.claim_ns
    grant = claim == pair.epoch + 1 and pair.epoch < W.EPOCH_LIMIT and due
    state.counters["leases_expired"] += expired
    state.counters["stale_entries"] += broken
    return Verdict(expired or broken or (grant and pair.attached), grant)


def change_owners(state: OracleState, verdicts: list[Verdict], now_ns: int) -> None:
    for i, (pair, verdict) in enumerate(zip(state.pairs, verdicts, strict=True)):
        if verdict.revoke:
            pair.attached, pair.cq_head = False, pair.cq_tail
        if verdict.grant:
            pair.attached, pair.epoch = True, pair.epoch + 1
            pair.heartbeat = int(state.queues.front[i, W.FRONT_HEARTBEAT])
            pair.heartbeat_ns = pair.granted_ns = now_ns
