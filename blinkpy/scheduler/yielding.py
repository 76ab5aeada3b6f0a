"""Best-effort prompts yield to latency-sensitive ones: these take the next step, and begun best-effort prompts keep their pages.

Of limits.yield_steps + 1 turns in a row, one at least is as if there were no classes. Who decodes is left alone. A best-effort
request that waits is passed, whatever its rank, by limits.yield_steps latency-sensitive ones at most, before one of its class
enters, or waits for its class alone.
"""

from blinkpy.device.portable import barrier, block_max, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.queues.submission import WORD_BEST_EFFORT


@device
def best_effort_prompt(requests, slot):
    """Whether a running request is of best effort and lacks more than one token."""
    return requests.entry[slot, WORD_BEST_EFFORT] != 0 and requests.length[slot] - requests.computed[slot] > 1


@device
def goes_first(requests, slot, other):
    """Whether a request goes before another one by rank and arrival."""
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
def best_effort_is_there(state, lane, lanes):
    """Whether a request of best effort runs or waits."""
    requests, counts, found = state.requests, state.counts, 0
    for i in strided(lane, counts[S.RUNNING_COUNT], lanes):
        slot = state.running[i]
        found += 1 if requests.entry[slot, WORD_BEST_EFFORT] != 0 else 0
    for i in strided(lane, counts[S.WAITING_COUNT] + counts[S.UNRANKED_COUNT], lanes):
        found += 1 if requests.entry[state.waiting[i], WORD_BEST_EFFORT] != 0 else 0
    return block_sum(found, lane, lanes) > 0


@device
def next_to_pass(limits, state, passed, lane, lanes):
    """The latency-sensitive request that enters next, by rank, where best-effort ones yield, or -1; and whether it passes one of
    best effort. None does where `passed` have, see S.PASSED. Who has no free entry in its completion queue is not in the line."""
    requests, waiting = state.requests, state.counts[S.WAITING_COUNT]
    first, best_effort = 0, 0  # their places, from the end of the line
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
    """Whether best-effort prompts yield in this turn: none is admitted, and none that runs has a part in the step if a
    latency-sensitive one has. It is so when one of these runs, or can be admitted while there is a row, unless it was so in
    limits.yield_steps turns in a row."""
    counts = state.counts
    yielded = counts[S.YIELDED_TURNS]
    yields = best_effort_is_there(state, lane, lanes) and yielded < limits.yield_steps
    if yields:
        first, _ = next_to_pass(limits, state, counts[S.PASSED], lane, lanes)
        yields = sensitive_prompt_runs(state, lane, lanes) or (first >= 0 and counts[S.RUNNING_COUNT] < limits.rows)
    if lane == 0:
        counts[S.YIELDED_TURNS] = yielded + 1 if yields else 0
    barrier(lanes)
    return yields
