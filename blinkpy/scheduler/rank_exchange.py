"""Makes all ranks of a model decide the same: rank 0 reads the words of front ends and host, and all ranks use its copy.

Each rank has the whole scheduler, in lockstep. A rank's decisions depend only on its state, its tokens and the words that it
reads. Once per turn, rank 0 reads the words of other parties, and new entries with their prompts. It copies them into a *mirror*:
queue pairs in its own memory, which the overlap of every rank reads instead of the queues. So a front end that changes an entry
during the copy harms only itself. All ranks use rank 0's clock.

    rank 0         waits until all ranks have ended overlap e - 1; writes the mirror; ready = e; overlap; done[0] = e
    other ranks    wait for ready = e; overlap; done[rank] = e

A rank that waits beyond the deadline has a fault, and decides no more. After each turn, a rank adds a window of its state to a
digest, so that a few turns cover all words. It posts the digest with done. Rank 0 compares the digests. A difference is a fault
of all ranks, and their states are then from the same turn. Ready and done are stored with release and read with acquire. The
mirror needs no double buffer: rank 0 writes it only after all ranks have read it.
"""

from typing import NamedTuple

from blinkpy.device.portable import (
    barrier,
    block_sum,
    device,
    load_acquire,
    load_relaxed,
    nanosleep,
    now_ns,
    store_release,
    strided,
)
from blinkpy.kv import state as S
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import Int32, Int64
from blinkpy.queues import submission as E
from blinkpy.queues.layout import EngineViews
from blinkpy.queues.words import (
    CONTROL_COMMAND,
    EPOCH_SHIFT,
    FRONT_CLAIM,
    FRONT_CQ_HEAD,
    FRONT_DOORBELL,
    FRONT_HEARTBEAT,
    POSITION_MASK,
)
from blinkpy.scheduler.cycle import EnginePhases, Phases

# Exchange.own, int64, in each rank's own memory
(
    EPOCH,  # number of the last turn that the rank has begun
    CLOCK,  # clock of this turn; FAULTY after a fault
    FAULT,  # RANK_LATE or STATES_DIFFER; 0: none
    FAULT_RANK,  # the rank that is late or differs
    DIGEST,
    WINDOW_AT,  # first word of the digest's next window
) = range(6)
OWN_WORDS = 8
RANK_LATE, STATES_DIFFER = 1, 2
FAULTY = -1
RANK_FAULT = -102
"""Result of a ranked schedule after a fault, instead of those of `schedule`."""

DEADLINE_NS = 1_000_000_000
FIRST_DEADLINE_NS = 20_000_000_000  # deadline of the first turns, because the host starts the ranks one after another
FIRST_EPOCHS = 3
POLL_NS = 100
WINDOW = 1024  # words of the state that a turn adds to the digest
APART = 16  # words between the ranks' words, so that they are on different cache lines

PLACE_FACTOR, HALF_FACTOR, DIGEST_FACTOR = 2_654_435_761, 1_540_483_478, 31
HALF_BITS, FACTOR_BITS, WORD_BITS, DIGEST_BITS = 0xFFFFFFFF, 0x7FFFFFFF, (1 << 48) - 1, (1 << 56) - 1


class Exchange(NamedTuple):
    """One rank's view of the exchange. `own`, `late_sum` and `watched` are in this rank's memory, all other arrays in rank 0's
    memory."""

    rank: int
    ranks: int
    clock: Int64  # [1] clock of the turn
    verdict: Int64  # [2] fault that ends all ranks, or 0, and its rank
    ready: Int64  # [1] turns whose words are in the mirror
    done: Int64  # [ranks * APART] number of turns whose words a rank has read completely
    digests: Int64  # [ranks * APART] posted with done
    own: Int64  # [OWN_WORDS]
    late_sum: Int32  # [2] fault of this rank's sums, and the rank at fault: see kernels/all_reduce.py
    words: int  # of `watched`
    watched: Int64  # [words] the state, without scratch memory


class RankArguments(NamedTuple):
    """The arguments of a rank's turn.

    source: queues of the front ends; only rank 0 reads them.
    queues: the words of other parties are in the mirror, in rank 0's memory. The engine's words are written to the real queues on
    rank 0, and to unread memory on other ranks.
    """

    limits: Limits
    source: EngineViews
    queues: EngineViews
    exchange: Exchange
    state: S.State


def rank_phases(phases: Phases) -> EnginePhases:
    """One rank's parts of a turn, for RankArguments. After a fault, schedule returns RANK_FAULT; publish must not follow."""
    run_overlap, run_schedule, run_publish = phases.overlap, phases.schedule, phases.publish

    @device
    def overlap(engine, now_ns, lane, lanes):
        clock = begin_turn(engine.limits, engine.source, engine.queues, engine.exchange, engine.state, now_ns, lane, lanes)
        if clock != FAULTY:
            run_overlap(engine.limits, engine.queues, engine.state, clock, lane, lanes)
            end_turn(engine.exchange, lane, lanes)

    @device
    def schedule(engine, lane, lanes):
        broken = is_broken(engine.exchange)
        barrier(lanes)
        if broken:
            return RANK_FAULT
        return run_schedule(engine.limits, engine.queues, engine.state, lane, lanes)

    @device
    def publish(engine, lane, lanes):
        run_publish(engine.limits, engine.queues, engine.state, lane, lanes)
        add_to_digest(engine.exchange, lane, lanes)

    return EnginePhases(overlap, schedule, publish)


@device
def begin_turn(limits, source, mirror, exchange, state, clock_ns, lane, lanes):
    """Wait for this turn's words. Returns the clock of the turn, or FAULTY.

    source: queues of the front ends; only rank 0 reads them.
    mirror: queues with the same sizes, in rank 0's memory.
    clock_ns: rank 0's clock, the same for all lanes.
    """
    own = exchange.own
    epoch = own[EPOCH] + 1
    barrier(lanes)
    if exchange.rank == 0:
        if lane == 0:
            await_all(exchange, epoch - 1)
        barrier(lanes)
        if own[FAULT] == 0:
            copy_words(limits, source, mirror, state, lane, lanes)
        barrier(lanes)
        if lane == 0:
            exchange.clock[0] = clock_ns
            exchange.verdict[1] = own[FAULT_RANK]
            exchange.verdict[0] = own[FAULT]
            store_release(exchange.ready, 0, epoch)
    elif lane == 0:
        if not await_word(exchange.ready, 0, epoch):
            own[FAULT], own[FAULT_RANK] = RANK_LATE, 0
        elif exchange.verdict[0] != 0:
            own[FAULT], own[FAULT_RANK] = exchange.verdict[0], exchange.verdict[1]
    if lane == 0:
        own[EPOCH] = epoch
        own[CLOCK] = exchange.clock[0] if own[FAULT] == 0 else FAULTY
    barrier(lanes)
    return own[CLOCK]


@device
def end_turn(exchange, lane, lanes):
    """Notify rank 0 that this rank has read all words of the turn, and post its digest."""
    barrier(lanes)
    if lane == 0:
        exchange.digests[exchange.rank * APART] = exchange.own[DIGEST]
        store_release(exchange.done, exchange.rank * APART, exchange.own[EPOCH])


@device
def await_all(exchange, epoch):
    """Rank 0: wait until all ranks have ended a turn, and compare their digests. One lane."""
    own = exchange.own
    for rank in range(1, exchange.ranks):
        if own[FAULT] == 0:
            if not await_word(exchange.done, rank * APART, epoch):
                own[FAULT], own[FAULT_RANK] = RANK_LATE, rank
            elif exchange.digests[rank * APART] != exchange.digests[0]:
                own[FAULT], own[FAULT_RANK] = STATES_DIFFER, rank


@device
def await_word(words, index, epoch):
    """Wait until a word has reached an epoch. Returns whether it did before the deadline."""
    reached = load_acquire(words, index) >= epoch
    began = now_ns() if not reached else 0
    deadline = FIRST_DEADLINE_NS if epoch <= FIRST_EPOCHS else DEADLINE_NS
    while not reached and now_ns() - began < deadline:
        nanosleep(POLL_NS)
        reached = load_acquire(words, index) >= epoch
    return reached


@device
def is_broken(exchange):
    """Whether this rank must stop deciding: it has a fault, or its last step lacks a peer's addend."""
    return exchange.own[FAULT] != 0 or exchange.late_sum[0] != 0


@device
def add_to_digest(exchange, lane, lanes):
    """Add the next window of the state to the digest, between two turns."""
    own, words = exchange.own, exchange.watched
    first, count, found = own[WINDOW_AT], exchange.words, 0
    for place in strided(first + lane, min(first + WINDOW, count), lanes):
        word, factor = words[place], (place * PLACE_FACTOR & FACTOR_BITS) | 1
        found += ((word & HALF_BITS) * factor + ((word >> 32) & HALF_BITS) * (factor ^ HALF_FACTOR)) & WORD_BITS
    found = block_sum(found, lane, lanes)
    if lane == 0:
        own[DIGEST] = (own[DIGEST] * DIGEST_FACTOR + found) & DIGEST_BITS
        own[WINDOW_AT] = first + WINDOW if first + WINDOW < count else 0
    barrier(lanes)


# Rank 0's copy of other parties' words.


@device
def copy_words(limits, source, mirror, state, lane, lanes):
    """Copy the words that the turn reads, and as many new entries as the turn can take. The mirror announces only these
    entries."""
    counts, announced = state.counts, state.scratch.total
    if lane == lanes - 1:
        mirror.control[CONTROL_COMMAND] = load_relaxed(source.control, CONTROL_COMMAND)
    copy_cancels(limits, source, mirror, state, state.running, counts[S.RUNNING_COUNT], lane, lanes)
    copy_cancels(limits, source, mirror, state, state.waiting, counts[S.WAITING_COUNT], lane, lanes)
    new = 0
    for pair in strided(lane, limits.pairs, lanes):
        heartbeat = load_relaxed(source.front, (pair, FRONT_HEARTBEAT))
        claim = load_relaxed(source.front, (pair, FRONT_CLAIM))
        head = load_relaxed(source.front, (pair, FRONT_CQ_HEAD))
        # Relies on O1 of docs/verification.md: entries are read after their doorbell, whose load therefore acquires.
        doorbell = load_acquire(source.front, (pair, FRONT_DOORBELL))
        mirror.front[pair, FRONT_HEARTBEAT] = heartbeat
        mirror.front[pair, FRONT_CLAIM] = claim
        mirror.front[pair, FRONT_CQ_HEAD] = head
        announced[pair] = new_entries(limits, state.pairs, pair, doorbell)
        if announced[pair] > 0:
            doorbell = (doorbell >> EPOCH_SHIFT << EPOCH_SHIFT) | ((doorbell - announced[pair]) & POSITION_MASK)
        mirror.front[pair, FRONT_DOORBELL] = doorbell
        new += announced[pair]
    new = block_sum(new, lane, lanes)
    if new > 0:
        copy_entries(limits, source, mirror, announced, min(new, limits.intake_entries), counts[S.ROTATION], lane, lanes)


@device
def copy_cancels(limits, source, mirror, state, slots, n, lane, lanes):
    """Copy the cancel words of a list's requests."""
    for i in strided(lane, n, lanes):
        pair = state.requests.pair[slots[i]]
        local = slots[i] - pair * limits.slots_per_pair
        mirror.cancel[pair, local] = load_relaxed(source.cancel, (pair, local))


@device
def new_entries(limits, pairs, pair, doorbell):
    """Entries that a doorbell announces beyond those in the mirror. 0 for an invalid doorbell, which the scheduler handles."""
    if pairs.attached[pair] == 0 or doorbell >> EPOCH_SHIFT != pairs.epoch[pair]:
        return 0
    announced, known = (doorbell - pairs.sq_head[pair]) & POSITION_MASK, pairs.sq_tail[pair] - pairs.sq_head[pair]
    return announced - known if known < announced <= limits.sq_entries else 0


@device
def copy_entries(limits, source, mirror, announced, most, pair, lane, lanes):
    """Copy entries and announce them, one queue pair after another, within the bounds of intake."""
    entries, words = 0, 0
    while entries < most and words < limits.intake_tokens:
        while announced[pair] == 0:  # terminates, because some pair has an entry
            pair = pair + 1 if pair + 1 < limits.pairs else 0
        doorbell = mirror.front[pair, FRONT_DOORBELL]
        words += copy_entry(limits, source, mirror, pair, doorbell & (limits.sq_entries - 1), lane, lanes)
        if lane == 0:
            announced[pair] -= 1
            mirror.front[pair, FRONT_DOORBELL] = (doorbell >> EPOCH_SHIFT << EPOCH_SHIFT) | ((doorbell + 1) & POSITION_MASK)
        barrier(lanes)
        pair = pair + 1 if pair + 1 < limits.pairs else 0
        entries += 1


@device
def copy_entry(limits, source, mirror, pair, where, lane, lanes):
    """Copy an entry, and the parts of the arenas to which it refers, within intake's bounds. Returns the copied words."""
    for word in strided(lane, E.SQ_ENTRY_WORDS, lanes):
        mirror.sq[pair, where, word] = source.sq[pair, where, word]
    barrier(lanes)
    entry = mirror.sq
    length, count = entry[pair, where, E.WORD_PROMPT_LENGTH], entry[pair, where, E.WORD_HASH_COUNT]
    length += max(0, entry[pair, where, E.WORD_PREDICTED_TOKENS])
    if length > limits.max_model_len:
        length = 0  # the entry is rejected regardless of its tokens
    offset = entry[pair, where, E.WORD_PROMPT_OFFSET]
    copied = copy_arena(source.prompt, mirror.prompt, pair, offset, length, limits.prompt_tokens, lane, lanes)
    if count <= length:
        offset = entry[pair, where, E.WORD_HASH_OFFSET]
        copy_arena(source.hashes, mirror.hashes, pair, offset, count, limits.hash_entries, lane, lanes)
    for automaton in range(2):
        offset, words = entry[pair, where, E.WORD_GRAMMAR_OFFSET], entry[pair, where, E.WORD_GRAMMAR_WORDS]
        if automaton == 1:
            offset, words = entry[pair, where, E.WORD_RULES_OFFSET], entry[pair, where, E.WORD_RULES_WORDS]
        if words <= limits.grammar_words:
            copied += copy_arena(source.prompt, mirror.prompt, pair, offset, words, limits.prompt_tokens, lane, lanes)
    barrier(lanes)
    return copied


@device
def copy_arena(source, mirror, pair, offset, count, size, lane, lanes):
    """Copy a part of a pair's arena of `size` elements; no copy if it is out of range. Returns the number of copied elements."""
    if offset < 0 or count <= 0 or offset + count > size:
        return 0
    for i in strided(offset + lane, offset + count, lanes):
        mirror[pair, i] = source[pair, i]
    return count
