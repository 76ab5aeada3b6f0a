"""Turn invariants: conditions between one turn and the next, checked after each turn.

Statuses change only in legal ways, cancels and leases take effect, published words equal the state, intake respects its bound,
and the request with the lowest rank makes progress.
"""

from blinkpy.device.expect import fault_code
from blinkpy.device.portable import device
from blinkpy.kv import state as S
from blinkpy.kv.prefix_cache import parent_lives
from blinkpy.queues.submission import WORD_BEST_EFFORT
from blinkpy.queues.words import (
    COMMAND_RUN,
    COMMAND_STOP,
    CONTROL_COMMAND,
    FRONT_CLAIM,
    FRONT_HEARTBEAT,
    PAIR_ATTACHED,
    PAIR_CQ_TAIL,
    PAIR_EPOCH,
    PAIR_SQ_HEAD,
)
from blinkpy.verify.sim.hostile import is_hostile
from blinkpy.verify.sim.world import GARBAGE_ENTRIES, HOSTILE

ILLEGAL_CHANGE = fault_code("a request's status changed illegally")
ID_REUSED = fault_code("a slot got a request whose id is not newer")
CANCEL_LOST = fault_code("a request continues after a visible cancel")
LEASE_IGNORED = fault_code("a front end keeps its pair after its lease expired")
REVOKED_WRONGLY = fault_code("a queue pair was revoked without a reason")
OWNER_CHANGED = fault_code("a queue pair changed its owner during a cut step")
EPOCH_WRONG = fault_code("an epoch was granted that no front end claimed")
GRANTED_SOON = fault_code("a queue pair was granted again too soon")
WORD_DIFFERS = fault_code("a published word differs from the scheduler's state")
POSITION_FELL = fault_code("a queue position decreased")
INTAKE_EXCEEDED = fault_code("more entries were consumed than the bound of a turn")
INTAKE_IDLE = fault_code("entries wait, but intake consumed none")
PASSED_OVER = fault_code("intake skipped a pair in its rotation")
INDEXED_TWICE = fault_code("the index has a page twice: equal tokens after the same page")
DELAYED_WRONGLY = fault_code("a step is delayed although a request needs it")
DELAYED_LONG = fault_code("a step is delayed longer than the pace allows")
STARVES = fault_code("the request with the lowest rank makes no progress")

SEEN_TURNS = 1  # turns after which a visible cancel must have taken effect
ID, PROGRESS, STILL = range(3)  # Observed.best
PLANNED, ENDED_NS, INSIDE = range(3)  # Observed.step


@device
def check_slots(limits, queues, state, sim):
    """Check statuses and cancels. A hostile front end is skipped, because it reuses ids, and harms only itself."""
    r, observed = state.requests, sim.observed
    for slot in range(limits.slots):
        if is_hostile(limits, sim, r.pair[slot]):
            continue
        before, after, request_id = observed.status[slot], r.status[slot], r.request_id[slot]
        pair = r.pair[slot]
        if request_id == observed.request_id[slot]:
            was_live, is_live = before == S.WAITING or before == S.RUNNING, after == S.WAITING or after == S.RUNNING
            if not was_live and after != before and after != S.EMPTY:
                return ILLEGAL_CHANGE
            cancelled = queues.cancel[pair, slot - pair * limits.slots_per_pair] == request_id
            cancelled = cancelled and state.batch.counts[S.GROUP] == 0 and r.stalled[slot] != S.IN_FLIGHT  # else the cancel waits
            observed.cancel_age[slot] = observed.cancel_age[slot] + 1 if cancelled and was_live and is_live else 0
            if observed.cancel_age[slot] > SEEN_TURNS:
                return CANCEL_LOST
        else:
            if before != S.EMPTY:
                return ILLEGAL_CHANGE
            if request_id <= observed.request_id[slot]:
                return ID_REUSED
            observed.cancel_age[slot] = 0
        observed.status[slot], observed.request_id[slot] = after, request_id
    return 0


@device
def check_ownership(limits, queues, state, sim, now, pair):
    """Check the lease, claim, grants and revocations of one pair."""
    observed, word = sim.observed, queues.front[pair, FRONT_HEARTBEAT]
    attached, epoch = queues.pair[pair, PAIR_ATTACHED], queues.pair[pair, PAIR_EPOCH]
    granted = epoch != observed.epoch[pair]
    if granted and (epoch != observed.epoch[pair] + 1 or queues.front[pair, FRONT_CLAIM] != epoch or attached != 1):
        return EPOCH_WRONG
    if word != observed.beat[pair] or observed.attached[pair] == 0:
        observed.beat[pair], observed.beat_ns[pair] = word, now
    silent = now - observed.beat_ns[pair] > limits.lease_ns
    if observed.step[INSIDE] != 0:
        if granted or attached != observed.attached[pair]:
            return OWNER_CHANGED
        silent = False
    if silent and attached == 1 and not granted:
        return LEASE_IGNORED
    if observed.attached[pair] == 1 and attached == 0 and not silent and sim.fronts.broke[pair] == 0:
        return REVOKED_WRONGLY
    if granted:
        observed.beat_ns[pair] = now
        if observed.epoch[pair] > 0 and now - observed.granted_ns[pair] < limits.claim_ns:
            return GRANTED_SOON
        observed.granted_ns[pair] = now
    observed.attached[pair], observed.epoch[pair] = attached, epoch
    return 0


@device
def check_words(limits, queues, state, sim):
    """Check the engine's words of all pairs. Returns a fault, or 0."""
    pairs, observed, consumed, left = state.pairs, sim.observed, 0, 0
    for pair in range(limits.pairs):
        words = queues.pair
        if (
            words[pair, PAIR_SQ_HEAD] != pairs.sq_head[pair]
            or words[pair, PAIR_CQ_TAIL] != pairs.cq_tail[pair]
            or words[pair, PAIR_EPOCH] != pairs.epoch[pair]
            or words[pair, PAIR_ATTACHED] != pairs.attached[pair]
        ):
            return WORD_DIFFERS
        if pairs.sq_head[pair] < observed.sq_head[pair] or pairs.cq_tail[pair] < observed.cq_tail[pair]:
            return POSITION_FELL
        moved = pairs.sq_head[pair] - observed.sq_head[pair]
        if pairs.attached[pair] == observed.attached[pair] and pairs.epoch[pair] == observed.epoch[pair]:
            consumed += moved
            if is_hostile(limits, sim, pair):
                sim.garbage[GARBAGE_ENTRIES] += moved
        left += pairs.sq_tail[pair] - pairs.sq_head[pair]
        if moved != 0 or pairs.sq_head[pair] == pairs.sq_tail[pair]:
            observed.passed[pair] = -1  # no entry waits, or one was consumed
        observed.sq_head[pair], observed.cq_tail[pair] = pairs.sq_head[pair], pairs.cq_tail[pair]
    if consumed > limits.intake_entries:
        return INTAKE_EXCEEDED
    if left > 0 and consumed == 0 and queues.control[CONTROL_COMMAND] == COMMAND_RUN:
        return INTAKE_IDLE
    for pair in range(limits.pairs):
        observed.passed[pair] = 0 if observed.passed[pair] < 0 else observed.passed[pair] + consumed
        if observed.passed[pair] >= limits.pairs:
            return PASSED_OVER
    return 0


@device
def check_duplicates(limits, pages):
    """Check that the prefix index has no duplicate chain of pages.

    Valid only if few hashes collide, because lookups examine a limited part of a bucket.
    """
    for bucket in range(limits.index_buckets):
        page = pages.bucket_head[bucket]
        while page >= 0:
            other = pages.bucket_next[page]
            while other >= 0:
                if pages.key[other] == pages.key[page] and same_page(limits, pages, page, other):
                    return INDEXED_TWICE
                other = pages.bucket_next[other]
            page = pages.bucket_next[page]
    return 0


@device
def same_page(limits, pages, page, other):
    """Whether two indexed pages hold the same tokens after the same, still valid, parent page."""
    parent = pages.parent[page]
    if pages.salt[other] != pages.salt[page] or pages.parent[other] != parent or not parent_lives(pages, page):
        return False
    if not parent_lives(pages, other):
        return False
    for i in range(limits.page_size):
        if pages.tokens[other, i] != pages.tokens[page, i]:
            return False
    return True


@device
def goes_before(r, slot, other):
    """Whether a request is served before another request."""
    return r.rank[slot] < r.rank[other] or (r.rank[slot] == r.rank[other] and r.arrival[slot] < r.arrival[other])


@device
def best_request(limits, state):
    """The live request with the lowest (rank, arrival) whose reader has read all completions, or -1."""
    r, pairs, best = state.requests, state.pairs, -1
    for slot in range(limits.slots):
        reads = pairs.cq_tail[r.pair[slot]] == pairs.cq_head[r.pair[slot]]
        live = r.status[slot] == S.WAITING or r.status[slot] == S.RUNNING
        if reads and live and (best < 0 or goes_before(r, slot, best)):
            best = slot
    return best


@device
def better_runs(limits, state, slot):
    """Whether a running request is served before `slot`, for instance one whose reader is slightly behind."""
    r = state.requests
    for other in range(limits.slots):
        if r.status[other] == S.RUNNING and r.stalled[other] != S.STALLED and goes_before(r, other, slot):
            return True
    return False


@device
def check_progress(limits, state, sim):
    """Check that the best request makes progress."""
    r, best = state.requests, sim.observed.best
    slot = best_request(limits, state)
    if slot < 0 or better_runs(limits, state, slot):
        best[STILL] = 0
        return 0
    progress = r.length[slot] * limits.max_model_len + r.computed[slot]
    if r.request_id[slot] != best[ID] or progress > best[PROGRESS]:
        best[ID], best[PROGRESS], best[STILL] = r.request_id[slot], progress, 0
        return 0
    best[STILL] += 1
    return STARVES if best[STILL] > sim.progress_bound else 0


@device
def check_pace(limits, state, sim, now, command):
    """Check a turn that made no batch although a request could run: steps must be paced, no request may wait, and no request may
    be late. Also records the times of tokens.
    """
    r, observed, batch = state.requests, sim.observed, state.batch
    delayed = batch.counts[S.ROWS] == 0 and command != COMMAND_STOP
    for slot in range(limits.slots):
        generated = r.length[slot] - r.prompt_length[slot]
        if r.status[slot] != S.RUNNING or generated <= 0:
            observed.generated[slot] = 0
        elif generated > observed.generated[slot]:
            if observed.generated[slot] == 0:  # a first token may come with further tokens, which were drafts
                observed.first_ns[slot] = now
            observed.generated[slot] = generated
    if observed.step[PLANNED] != 0:
        observed.step[ENDED_NS] = now
    ends = batch.counts[S.GROUP] + 1 >= batch.counts[S.GROUPS]
    observed.step[PLANNED] = batch.counts[S.ROWS] if ends else 0
    observed.step[INSIDE] = 0 if ends and state.suspended.counts[S.ROWS] == 0 else 1
    for slot in range(limits.slots):
        if delayed and r.status[slot] == S.RUNNING and r.stalled[slot] == 0:
            pace = limits.best_effort_pace_ns if r.entry[slot, WORD_BEST_EFFORT] != 0 else limits.pace_ns
            late = now >= observed.first_ns[slot] + observed.generated[slot] * pace
            if observed.generated[slot] == 0 or state.counts[S.WAITING_COUNT] > 0 or command != COMMAND_RUN or late:
                return DELAYED_WRONGLY
            if now >= observed.step[ENDED_NS] + pace:
                return DELAYED_LONG
    return 0


@device
def check_turn(limits, queues, state, sim, now):
    """Check one turn of the scheduler, at `now` ns. Returns a fault, or 0."""
    fault = check_slots(limits, queues, state, sim)
    if fault == 0:
        fault = check_words(limits, queues, state, sim)
    for pair in range(limits.pairs):
        if fault == 0:
            fault = check_ownership(limits, queues, state, sim, now, pair)
    # Only with good hashes; otherwise chains exceed the limit of a lookup.
    if fault == 0 and limits.hash_multiplier_1 != 0 and sim.hostile != HOSTILE:
        fault = check_duplicates(limits, state.pages)
    if fault == 0:
        fault = check_pace(limits, state, sim, now, queues.control[CONTROL_COMMAND])
    if fault == 0:
        fault = check_progress(limits, state, sim)
    return fault
