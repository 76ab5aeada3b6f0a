"""The page limit of best-effort requests, so that other requests are admitted without preemption.

A shared page counts for each request that holds it, a cached page for none. A lone best-effort request may
exceed the limit; otherwise a longer one could never run. The rule is R20 of docs/verification.md.
"""

from blinkpy.device.portable import block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.queues.submission import WORD_BEST_EFFORT

_COUNT_BITS = 16  # requests in the low bits, pages above, in one sum
_COUNT_MASK = 0xFFFF


@device
def best_effort_load(state, lane, lanes):
    """(running requests of best effort, pages that they hold). Who was preempted and is still listed is not counted."""
    requests, both = state.requests, 0
    for i in strided(lane, state.counts[S.RUNNING_COUNT], lanes):
        slot = state.running[i]
        if requests.status[slot] == S.RUNNING and requests.entry[slot, WORD_BEST_EFFORT] != 0:
            both += requests.num_pages[slot] << _COUNT_BITS | 1
    both = block_sum(both, lane, lanes)
    return both & _COUNT_MASK, both >> _COUNT_BITS


@device
def exceeds_pages(limits, state, more, lane, lanes):
    """Whether running requests of best effort, two at least, would hold too much with more pages. more: this lane's part of
    these."""
    if limits.best_effort_pages == limits.pages:
        return False
    running, held = best_effort_load(state, lane, lanes)
    return running > 1 and held + block_sum(more, lane, lanes) > limits.best_effort_pages
