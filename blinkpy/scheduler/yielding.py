"""Lets best-effort prompts yield the next step to latency-sensitive prompts. Best-effort prompts that have begun keep their
pages.

Of limits.yield_steps + 1 consecutive turns, at least one ignores classes. Decoding requests are not
affected. At most limits.yield_steps latency-sensitive requests overtake a waiting best-effort request, regardless of rank. The
count restarts when a best-effort request is admitted, or waits only for the limits of its class.
"""

from blinkpy.device.portable import barrier, block_max, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.queues.submission import WORD_BEST_EFFORT

_COUNT_BITS = 16  # requests in the low bits, pages above, in one sum
_COUNT_MASK = 0xFFFF


@device
def best_effort_load(state, lane, lanes):
    """(running best-effort requests, their pages), without preempted requests that are still listed."""
    requests, both = state.requests, 0
    for i in strided(lane, state.counts[S.RUNNING_COUNT], lanes):
        slot = state.running[i]
        if requests.status[slot] == S.RUNNING and requests.entry[slot, WORD_BEST_EFFORT] != 0:
            both += requests.num_pages[slot] << _COUNT_BITS | 1
    both = block_sum(both, lane, lanes)
    return both & _COUNT_MASK, both >> _COUNT_BITS


@device
def limits_pages(limits):
    """Whether best-effort requests may hold only a part of the pool."""
    return limits.best_effort_pages < limits.pages


@device
def exceeds_pages(limits, state, more, lane, lanes):
    """Whether more pages would put at least two running best-effort requests over their limit. more: this lane's part of the
    pages.
    """
    if not limits_pages(limits):
        return False
    running, held = best_effort_load(state, lane, lanes)
    return running > 1 and held + block_sum(more, lane, lanes) > limits.best_effort_pages


@device
def best_effort_prompt(requests, slot):
    """Whether a running request is best-effort and lacks more than one token."""
    return requests.entry[slot, WORD_BEST_EFFORT] != 0 and requests.length[slot] - requests.computed[slot] > 1


@device
def goes_first(requests, slot, other):
    """Whether a request goes before another request by rank and arrival."""
    rank, others = requests.rank[slot], requests.rank[other]
    return rank < others or (rank == others and requests.arrival[slot] < requests.arrival[other])


@device
def sensitive_prompt_runs(state, lane, lanes):
    """Whether a latency-sensitive request that runs lacks more than one token."""
    requests, found = state.requests, 0
    for i in strided(lane, state.counts[S.RUNNING_COUNT], lanes):
        slot = state.running[i]
        if requests.stalled[slot] == 0 and requests.entry[slot, WORD_BEST_EFFORT] == 0:
            found += 1 if requests.length[slot] - requests.computed[slot] > 1 else 0
    return block_sum(found, lane, lanes) > 0


@device
def has_best_effort(state, lane, lanes):
    """Whether a best-effort request runs or waits."""
    requests, counts, found = state.requests, state.counts, 0
    for i in strided(lane, counts[S.RUNNING_COUNT], lanes):
        slot = state.running[i]
        found += 1 if requests.entry[slot, WORD_BEST_EFFORT] != 0 else 0
    for i in strided(lane, counts[S.WAITING_COUNT] + counts[S.UNRANKED_COUNT], lanes):
        found += 1 if requests.entry[state.waiting[i], WORD_BEST_EFFORT] != 0 else 0
    return block_sum(found, lane, lanes) > 0


@device
def next_to_pass(limits, state, passed, lane, lanes):
    """While best-effort requests yield: (next latency-sensitive request to admit, by rank, or -1; whether it overtakes a
    best-effort request).

    passed: number of requests that already overtook (S.PASSED), which is limited. Requests without a free
        completion entry are skipped.
    """
    requests, waiting = state.requests, state.counts[S.WAITING_COUNT]
    first, best_effort = 0, 0  # positions in the waiting list, counted from its end
    for i in strided(lane, waiting, lanes):
        slot = state.waiting[i]
        if requests.status[slot] == S.WAITING and state.pairs.unclaimed_entries[requests.pair[slot]] > 0:
            if requests.entry[slot, WORD_BEST_EFFORT] != 0:
                best_effort = max(best_effort, waiting - i)
            else:
                first = max(first, waiting - i)
    first, best_effort = block_max(first, lane, lanes), block_max(best_effort, lane, lanes)
    passes = best_effort > first
    enters = first > 0 and (passed < limits.yield_steps or not passes)
    return state.waiting[waiting - first] if enters else -1, passes


@device
def begin_yield(limits, state, lane, lanes):
    """Whether best-effort prompts yield in this turn. If so, no best-effort prompt is admitted, and running best-effort prompts
    get no chunk in a step with latency-sensitive chunks.

    They yield if a latency-sensitive prompt runs or can be admitted to a free row. After limits.yield_steps consecutive turns,
    they stop yielding.
    """
    counts = state.counts
    yielded = counts[S.YIELDED_TURNS]
    yields = has_best_effort(state, lane, lanes) and yielded < limits.yield_steps
    if yields:
        first, _ = next_to_pass(limits, state, counts[S.PASSED], lane, lanes)
        yields = sensitive_prompt_runs(state, lane, lanes) or (first >= 0 and counts[S.RUNNING_COUNT] < limits.rows)
    if lane == 0:
        counts[S.YIELDED_TURNS] = yielded + 1 if yields else 0
    barrier(lanes)
    return yields
