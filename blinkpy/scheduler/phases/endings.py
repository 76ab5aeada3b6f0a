"""What front ends say about what is in the engine: leases, claims, read completions, cancels.

Every word of a front end is checked before it is believed, and carries the epoch that it was written under. A front end
that is silent for too long, claims its pair again or breaks the protocol loses its requests; nobody else notices.
"""

from __future__ import annotations

from blinkpy.device.portable import barrier, block_scan, block_sum, device, store_release, strided
from blinkpy.kv.page_allocator import release_pages
from blinkpy.kv.state import (
    COUNTER_INDEX,
    EMPTY,
    FINISHING,
    FINISHING_COUNT,
    PAIR_CHANGES,
    PAUSED_COUNT,
    RUNNING,
    RUNNING_COUNT,
    WAITING,
    WAITING_COUNT,
)
from blinkpy.queues.completion import FINISH_CANCELLED, FINISH_NONE
from blinkpy.queues.words import EPOCH_LIMIT, EPOCH_SHIFT, PAIR_ATTACHED, PAIR_EPOCH, PAIR_SQ_HEAD, POSITION_MASK
from blinkpy.scheduler.phases.commit import keep_status
from blinkpy.scheduler.phases.completions import completion_word, publish
from blinkpy.scheduler.phases.recorder import note_cancels

REQUESTS_CANCELLED = COUNTER_INDEX["requests_cancelled"]
LEASES_EXPIRED = COUNTER_INDEX["leases_expired"]
STALE_ENTRIES = COUNTER_INDEX["stale_entries"]

FENCE, GRANT, EXPIRED, BROKEN = 1, 2, 4, 8  # Pairs.verdict
DROP = -1  # Requests.finish: the request's owner is gone, nobody waits for its end

FINISH_REASON_SHIFT = 8  # Requests.finish: FINISH_* | reason << 8
FINISH_CODE_MASK = 0xFF


@device
def judge_pairs(limits, state, lane, lanes):
    """Believe what the front ends say as far as it makes sense. Leaves verdicts, and counts[PAIR_CHANGES]."""
    inbox, pairs = state.inbox, state.pairs
    now_ns = inbox.now_ns[0]
    changes = 0
    for pair in strided(lane, limits.pairs, lanes):
        heartbeat, claim = inbox.heartbeat[pair], inbox.claim[pair]
        head, doorbell = inbox.cq_head[pair], inbox.doorbell[pair]
        epoch = pairs.epoch[pair]
        verdict = 0
        if pairs.attached[pair] != 0:
            if heartbeat != pairs.heartbeat[pair]:
                pairs.heartbeat[pair] = heartbeat
                pairs.heartbeat_ns[pair] = now_ns
            elif now_ns - pairs.heartbeat_ns[pair] > limits.lease_ns:
                verdict |= FENCE | EXPIRED
            # Relies on O6 of docs/verification.md: doorbell and head carry the epoch that they were written under, and each
            # heartbeat repeats them, so one of an earlier owner is passed over and covers nothing for long.
            if doorbell >> EPOCH_SHIFT == epoch:
                announced = (doorbell - pairs.sq_head[pair]) & POSITION_MASK
                if announced > limits.sq_entries:
                    verdict |= FENCE | BROKEN
                else:
                    pairs.sq_tail[pair] = pairs.sq_head[pair] + announced
            if head >> EPOCH_SHIFT == epoch:
                unread = (pairs.cq_tail[pair] - head) & POSITION_MASK
                if unread > pairs.cq_tail[pair] - pairs.cq_head[pair]:  # before what it said earlier, or after the tail
                    verdict |= FENCE | BROKEN
                else:
                    pairs.cq_head[pair] = pairs.cq_tail[pair] - unread
        if claim == epoch + 1 and epoch < EPOCH_LIMIT:
            verdict |= GRANT
            if pairs.attached[pair] != 0:
                verdict |= FENCE
        pairs.verdict[pair] = verdict
        if verdict != 0:
            changes += 1
    changes = block_sum(changes, lane, lanes)
    if lane == 0:
        state.counts[PAIR_CHANGES] = changes
    barrier(lanes)


@device
def reclaim(limits, queues, state, lane, lanes):
    """End what judge_pairs() and cancel words say must end; hand pairs over."""
    requests, pairs, counts = state.requests, state.pairs, state.counts
    changes = counts[PAIR_CHANGES]
    ending = judge(state, state.running, counts[RUNNING_COUNT], lane, lanes)
    ending += judge(state, state.waiting, counts[WAITING_COUNT], lane, lanes)
    if changes > 0:  # those that only wait for room to be told their end
        for i in strided(lane, counts[FINISHING_COUNT], lanes):
            slot = state.finishing[i]
            if pairs.verdict[requests.pair[slot]] & FENCE:
                requests.finish[slot] = DROP
                requests.status[slot] = EMPTY
    ending = block_sum(ending, lane, lanes)
    if ending > 0:
        end_requests(limits, state, lane, lanes)
    if changes > 0:
        settle_pairs(limits, queues, state, lane, lanes)
        kept = keep_status(state.finishing, counts[FINISHING_COUNT], requests.status, FINISHING, lane, lanes)
        if lane == 0:
            counts[FINISHING_COUNT] = kept
        barrier(lanes)


@device
def judge(state, slots, n, lane, lanes):
    """Mark which requests of a list end here, in Requests.finish. Returns this lane's number of them."""
    requests, verdict, cancel = state.requests, state.pairs.verdict, state.inbox.cancel
    ending = 0
    for i in strided(lane, n, lanes):
        slot = slots[i]
        finish = FINISH_NONE
        if verdict[requests.pair[slot]] & FENCE:
            finish = DROP
        elif cancel[slot] == requests.request_id[slot]:
            finish = FINISH_CANCELLED
        requests.finish[slot] = finish
        if finish != FINISH_NONE:
            ending += 1
    return ending


@device
def end_requests(limits, state, lane, lanes):
    """End all requests that judge() marked: pages at once, the slot when its owner was told (or is gone)."""
    requests, counts, scratch = state.requests, state.counts, state.scratch
    running, waiting = counts[RUNNING_COUNT], counts[WAITING_COUNT]
    ended = 0
    for tile in strided(0, running + waiting, lanes):
        i = tile + lane
        slot, ends = 0, 0
        if i < running + waiting:
            slot = state.running[i] if i < running else state.waiting[i - running]
            ends = 1 if requests.finish[slot] != FINISH_NONE else 0
        before, total = block_scan(ends, lane, lanes)
        if ends == 1:
            scratch.slot[ended + before] = slot
        ended += total
    barrier(lanes)
    note_cancels(limits, state, ended, FINISH_CANCELLED, lane, lanes)
    finishing, unpaused = counts[FINISHING_COUNT], 0
    for i in range(ended):
        if requests.status[scratch.slot[i]] == RUNNING:
            release_pages(limits, requests, state.pages, counts, scratch.slot[i], lane, lanes)
    barrier(lanes)
    told = 0
    for tile in strided(0, ended, lanes):
        i = tile + lane
        tells = 0
        if i < ended:
            slot = scratch.slot[i]
            tells = 1 if requests.finish[slot] == FINISH_CANCELLED else 0
            requests.status[slot] = FINISHING if tells == 1 else EMPTY
            unpaused += requests.paused[slot]
            requests.paused[slot] = 0
        before, total = block_scan(tells, lane, lanes)
        if tells == 1:
            state.finishing[finishing + told + before] = scratch.slot[i]
        told += total
    unpaused = block_sum(unpaused, lane, lanes)
    kept_running = keep_status(state.running, running, requests.status, RUNNING, lane, lanes)
    kept_waiting = keep_status(state.waiting, waiting, requests.status, WAITING, lane, lanes)
    if lane == 0:
        counts[RUNNING_COUNT], counts[WAITING_COUNT] = kept_running, kept_waiting
        counts[FINISHING_COUNT] = finishing + told
        counts[PAUSED_COUNT] -= unpaused
        state.counters[REQUESTS_CANCELLED] += ended
    barrier(lanes)


@device
def settle_pairs(limits, queues, state, lane, lanes):
    """Fence and grant, one lane for each pair; the pair's requests are gone by now."""
    pairs = state.pairs
    expired, broken = 0, 0
    for pair in strided(lane, limits.pairs, lanes):
        verdict = pairs.verdict[pair]
        if verdict & FENCE:
            pairs.attached[pair] = 0
            store_release(queues.pair, (pair, PAIR_ATTACHED), 0)
            pairs.sq_head[pair] = pairs.sq_tail[pair]  # what was announced and not consumed is skipped
            store_release(queues.pair, (pair, PAIR_SQ_HEAD), pairs.sq_head[pair])
            pairs.cq_head[pair] = pairs.cq_tail[pair]  # the next owner reads from the tail on
        if verdict & GRANT:
            pairs.epoch[pair] += 1
            # Keeps O5 of docs/verification.md: who sees the grant sees the positions stored before it, so the epoch is released
            # after them.
            pairs.attached[pair] = 1
            pairs.heartbeat[pair] = state.inbox.heartbeat[pair]
            pairs.heartbeat_ns[pair] = state.inbox.now_ns[0]
            store_release(queues.pair, (pair, PAIR_EPOCH), pairs.epoch[pair])
            store_release(queues.pair, (pair, PAIR_ATTACHED), 1)
        if verdict & EXPIRED:
            expired += 1
        if verdict & BROKEN:
            broken += 1
    expired = block_sum(expired, lane, lanes)
    broken = block_sum(broken, lane, lanes)
    if lane == 0:
        state.counters[LEASES_EXPIRED] += expired
        state.counters[STALE_ENTRIES] += broken
    barrier(lanes)


@device
def tell_ends(limits, queues, state, lane, lanes):
    """Publish the last completion of FINISHING requests, as far as there is room, and free their slots."""
    requests, counts, scratch = state.requests, state.counts, state.scratch
    n = counts[FINISHING_COUNT]
    if n == 0:
        return
    for i in strided(lane, n, lanes):
        slot = state.finishing[i]
        finish = requests.finish[slot]
        scratch.pair[i] = requests.pair[slot]
        scratch.word[i] = completion_word(limits, requests, slot, finish >> FINISH_REASON_SHIFT, finish & FINISH_CODE_MASK)
    publish(limits, queues, state.pairs, scratch, state.batch.logprobs, n, lane, lanes)  # these words have no records
    for i in strided(lane, n, lanes):
        if scratch.pair[i] < 0:
            requests.status[state.finishing[i]] = EMPTY
            requests.finish[state.finishing[i]] = FINISH_NONE
    barrier(lanes)
    kept = keep_status(state.finishing, n, requests.status, FINISHING, lane, lanes)
    if lane == 0:
        counts[FINISHING_COUNT] = kept
    barrier(lanes)
