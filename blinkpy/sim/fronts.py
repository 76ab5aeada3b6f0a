"""Front ends of a simulation, as device code: they follow queues.py, from a few draws in each turn, and sometimes don't.

What a front end writes goes through its wire, a queue of writes that arrive in order, now or later; when it crashes, a part of
them still arrives. Each completion is checked when it is read: the right token of the right request, in order, once.
"""

from __future__ import annotations

from blinkpy.kernels.portable import device
from blinkpy.kv.prefix import extend_hash
from blinkpy.queues import (
    COMMAND_RUN,
    EPOCH_SHIFT,
    FINISH_CANCELLED,
    FINISH_ERROR,
    FINISH_LENGTH,
    FINISH_MASK,
    FINISH_NONE,
    FINISH_REJECTED,
    FINISH_STOP,
    FLAG_MASK,
    FLAG_SHIFT,
    FRONT_CLAIM,
    FRONT_CQ_HEAD,
    FRONT_DOORBELL,
    FRONT_HEARTBEAT,
    HAS_LOGPROBS,
    HAS_TOKEN,
    LAP_SHIFT,
    LAPS,
    PAIR_ATTACHED,
    PAIR_CQ_TAIL,
    PAIR_EPOCH,
    PAIR_SQ_HEAD,
    POSITION_MASK,
    RECORD_PAIRS,
    REJECT_HASHES,
    REJECT_LENGTH,
    REJECT_PAGES,
    REJECT_PARAMETER,
    REJECT_PROMPT,
    REJECT_TOKEN,
    SLOT_MASK,
    SQ_ENTRY_WORDS,
    STOP_IDS,
    SUBMIT_NO_PREFIX_CACHE,
    TOKEN_MASK,
    TOKEN_SHIFT,
    TOP_LOGPROBS,
    WORD_EPOCH,
    WORD_FLAGS,
    WORD_HASH_COUNT,
    WORD_HASH_OFFSET,
    WORD_LOGPROBS,
    WORD_MAX_TOKENS,
    WORD_MIN_TOKENS,
    WORD_PRIORITY,
    WORD_PROMPT_LENGTH,
    WORD_PROMPT_OFFSET,
    WORD_REPETITION_PENALTY,
    WORD_SEED,
    WORD_SLOT,
    WORD_STOP_IDS,
    WORD_TEMPERATURE,
    WORD_TOP_P,
)
from blinkpy.sim.draws import chance, draw, start_draws
from blinkpy.sim.model import record_word, token_after, value_of
from blinkpy.sim.problems import problem
from blinkpy.sim.world import (
    EVENT_BREAK,
    EVENT_CANCEL,
    EVENT_CLAIM,
    EVENT_CRASH,
    EVENT_LATE,
    EVENT_PACE,
    EVENT_RETURN,
    EVENT_SILENT,
    EVENT_SUBMIT,
    EVENT_SUBMIT_BAD,
    LOG,
    STEMS,
    WIRE,
)

STRAY = problem("a completion for a slot without a request")
NO_TOKEN_DUE = problem("a request gets more tokens than it must")
TOKEN_DIFFERS = problem("a request gets a wrong token")
RECORD_WRONG = problem("a completion has the log probabilities of another one, or has some unasked, or none")
ENDS_EARLY = problem("a request ends before it has all its tokens")
ENDS_LATE = problem("a request has all its tokens and does not end")
ENDS_OTHERWISE = problem("a request ends for another reason than it must")

WIRE_PROMPT, WIRE_ENTRY, WIRE_WORD, WIRE_CANCEL = range(4)

# Kinds of bad entries. The engine answers those before BAD_SILENT with FINISH_REJECTED, and the others not at all.
BAD_PROMPT, BAD_PARAMETER, BAD_LENGTH, BAD_PAGES, BAD_HASHES, BAD_TOKEN, BAD_EPOCH, BAD_SLOT, BAD_KINDS = range(9)
BAD_SILENT = BAD_EPOCH

FAST, SLOW, STUCK, PACES = range(4)  # Fronts.pace: how a reader reads
FLOAT_ONE = 0x3F800000
SALT = 9
REASON_SHIFT = 8
LONGEST_SILENCE = 60  # turns; a lease is 20
FAR_OFF = 5000
LATE_WORDS = 5  # the four FRONT_* words, and a cancel


@device
def note(sim, turn, actor, event, first, second):
    """Remember an event."""
    i = sim.logged[0] % LOG
    sim.log[i, 0], sim.log[i, 1], sim.log[i, 2] = turn, actor, event
    sim.log[i, 3], sim.log[i, 4] = first, second
    sim.logged[0] += 1


@device
def send(fronts, pair, kind, index, value):
    """Put a write on the wire. The caller sees to it that there is room."""
    place = fronts.wire_tail[pair] & (WIRE - 1)
    fronts.wire_kind[pair, place] = kind
    fronts.wire_index[pair, place] = index
    fronts.wire_value[pair, place] = value
    fronts.wire_tail[pair] += 1


@device
def wire_room(fronts, pair):
    return WIRE - (fronts.wire_tail[pair] - fronts.wire_head[pair])


@device
def deliver(limits, queues, fronts, pair, writes):
    """The next `writes` writes arrive."""
    for _ in range(writes):
        place = fronts.wire_head[pair] & (WIRE - 1)
        kind, index, value = fronts.wire_kind[pair, place], fronts.wire_index[pair, place], fronts.wire_value[pair, place]
        fronts.wire_head[pair] += 1
        if kind == WIRE_WORD:
            queues.front[pair, index] = value
        elif kind == WIRE_CANCEL:
            queues.cancel[pair, index] = value
        elif kind == WIRE_ENTRY:
            for word in range(SQ_ENTRY_WORDS):
                queues.sq[pair, index, word] = fronts.entry[pair, index, word]
        else:
            deliver_prompt(limits, queues, fronts, pair, index, value)


@device
def deliver_prompt(limits, queues, fronts, pair, place, slot):
    """Prompt and page hashes of a slot's request, to the part of the arenas that belongs to a place in the ring."""
    offset, length = place * limits.max_model_len, fronts.prompt_length[slot]
    for i in range(length):
        queues.prompt[pair, offset + i] = fronts.tokens[slot, i]
    offset = place * hashes_per_entry(limits)
    for k in range(length >> limits.page_shift):
        queues.hashes[pair, offset + k] = fronts.page_hash[slot, k]


@device
def hashes_per_entry(limits):
    return (limits.max_model_len >> limits.page_shift) + 1


# ---- ownership ----------------------------------------------------------------------------------------------------------


@device
def owns(queues, pair, epoch):
    """Whether the engine says that the pair belongs to an epoch."""
    return epoch > 0 and queues.pair[pair, PAIR_EPOCH] == epoch and queues.pair[pair, PAIR_ATTACHED] == 1


@device
def forget(limits, fronts, pair):
    """Give up all requests and the pair."""
    first = pair * limits.slots_per_pair
    for slot in range(first, first + limits.slots_per_pair):
        fronts.request_id[slot] = 0
    fronts.epoch[pair], fronts.claim[pair] = 0, 0


@device
def claim_pair(limits, queues, sim, turn, pair):
    """Ask for the next epoch."""
    fronts = sim.fronts
    forget(limits, fronts, pair)
    fronts.claim[pair] = queues.pair[pair, PAIR_EPOCH] + 1
    note(sim, turn, pair, EVENT_CLAIM, fronts.claim[pair], 0)
    send(fronts, pair, WIRE_WORD, FRONT_CLAIM, fronts.claim[pair])


@device
def settle(limits, queues, sim, turn, pair):
    """Take over a pair that was granted; claim again when the claim came too late."""
    fronts = sim.fronts
    claim = fronts.claim[pair]
    if owns(queues, pair, claim):
        fronts.epoch[pair], fronts.counter[pair], fronts.broke[pair] = claim, 0, 0
        fronts.sq_tail[pair], fronts.cq_head[pair] = queues.pair[pair, PAIR_SQ_HEAD], queues.pair[pair, PAIR_CQ_TAIL]
    elif claim == 0 or queues.pair[pair, PAIR_EPOCH] >= claim:
        claim_pair(limits, queues, sim, turn, pair)


@device
def beat(fronts, pair):
    """Say that this front end lives, and repeat doorbell and head: a late write may have covered them."""
    fronts.beat[pair] += 1
    send(fronts, pair, WIRE_WORD, FRONT_HEARTBEAT, fronts.beat[pair])
    if fronts.epoch[pair] > 0:
        ring(fronts, pair)
        send(fronts, pair, WIRE_WORD, FRONT_CQ_HEAD, stamp(fronts, pair, fronts.cq_head[pair]))
    else:
        send(fronts, pair, WIRE_WORD, FRONT_CLAIM, fronts.claim[pair])


@device
def stamp(fronts, pair, position):
    return fronts.epoch[pair] << EPOCH_SHIFT | (position & POSITION_MASK)


@device
def ring(fronts, pair):
    send(fronts, pair, WIRE_WORD, FRONT_DOORBELL, stamp(fronts, pair, fronts.sq_tail[pair]))


@device
def crash(limits, queues, sim, turn, pair):
    """The front end dies somewhere between two of its writes: those before arrive."""
    fronts = sim.fronts
    note(sim, turn, pair, EVENT_CRASH, 0, 0)
    deliver(limits, queues, fronts, pair, draw(sim.draws, fronts.wire_tail[pair] - fronts.wire_head[pair] + 1))
    fronts.wire_head[pair] = fronts.wire_tail[pair]
    forget(limits, fronts, pair)
    fronts.alive[pair] = 0


@device
def late_write(limits, queues, sim, turn, pair):
    """A word that was written under an earlier epoch lands now."""
    draws = sim.draws
    epoch = queues.pair[pair, PAIR_EPOCH]
    if epoch == 0:
        return
    value = draw(draws, epoch) << EPOCH_SHIFT | draw(draws, 1 << 20)
    word = draw(draws, LATE_WORDS)
    note(sim, turn, pair, EVENT_LATE, word, value)
    if word == FRONT_HEARTBEAT:
        queues.front[pair, word] = value & POSITION_MASK
    elif word == FRONT_CLAIM:
        queues.front[pair, word] = 1 + (value >> EPOCH_SHIFT)
    elif word < FRONT_CLAIM:
        queues.front[pair, word] = value
    else:
        queues.cancel[pair, draw(draws, limits.slots_per_pair)] = value & ~(POSITION_MASK ^ 7)


@device
def break_protocol(limits, sim, turn, pair):
    """A doorbell or a head that can't be: the pair is fenced for it, and nobody else notices."""
    fronts = sim.fronts
    note(sim, turn, pair, EVENT_BREAK, 0, 0)
    fronts.broke[pair] = 1
    if draw(sim.draws, 2) == 0:
        position = fronts.sq_tail[pair] + limits.sq_entries + 1 + draw(sim.draws, FAR_OFF)
        send(fronts, pair, WIRE_WORD, FRONT_DOORBELL, stamp(fronts, pair, position))
    else:
        position = fronts.cq_head[pair] + limits.cq_entries + 1 + draw(sim.draws, FAR_OFF)
        send(fronts, pair, WIRE_WORD, FRONT_CQ_HEAD, stamp(fronts, pair, position))


# ---- requests -----------------------------------------------------------------------------------------------------------


@device
def free_slot(limits, fronts, pair):
    """A slot without a request, or -1."""
    first = pair * limits.slots_per_pair
    for slot in range(first, first + limits.slots_per_pair):
        if fronts.request_id[slot] == 0:
            return slot
    return -1


@device
def make_up_prompt(limits, sim, slot):
    """A prompt that shares its start with others, of any length up to the longest. Returns the length."""
    fronts, draws = sim.fronts, sim.draws
    longest = min(limits.max_model_len - 1, limits.pages * limits.page_size)
    length = 1 + draw(draws, longest if draw(draws, 2) == 0 else max(1, longest // 3))
    if draw(draws, 10) == 0:
        length = longest
    repeats = chance(draws, sim.odds.repeat)
    own = 0 if repeats else draw(draws, min(4, length))
    stem, after = draw(draws, STEMS), draw(draws, STEMS)
    cut = (
        draw(draws, length) if not repeats and draw(draws, 3) == 0 else length
    )  # from here on as another one: pages that look alike
    for i in range(length):
        token = sim.stems[stem if i < cut else after, i]
        fronts.tokens[slot, i] = token if i < length - own else draw(draws, limits.vocab_size)
    return length


@device
def foresee(limits, fronts, slot, entry):
    """What the request must get: its tokens (behind the prompt in Fronts.tokens), their number, and its end."""
    length, salt = fronts.prompt_length[slot], fronts.cache_salt[slot]
    most = min(entry[WORD_MAX_TOKENS], limits.max_model_len - length)
    total, value, generated, finish = 0, 0, 0, FINISH_NONE
    for i in range(length):
        value = value_of(value, fronts.tokens[slot, i], i, salt)
        total += value * (i + 1)
    while finish == FINISH_NONE:
        token = token_after(total, fronts.seed[slot], limits.vocab_size)
        position = length + generated
        fronts.tokens[slot, position] = token
        generated += 1
        value = value_of(value, token, position, salt)
        total += value * (position + 1)
        if generated == most:
            finish = FINISH_LENGTH
        if generated > entry[WORD_MIN_TOKENS]:
            for i in range(STOP_IDS):
                if entry[WORD_STOP_IDS + i] == token:
                    finish = FINISH_STOP
    fronts.expected[slot], fronts.finish[slot] = generated, finish


@device
def fill_entry(limits, sim, pair, place, slot):
    """Sim.entry: a good entry for the request in `slot`, for a place of the ring."""
    fronts, draws, entry = sim.fronts, sim.draws, sim.entry
    for word in range(SQ_ENTRY_WORDS):
        entry[word] = 0
    length = fronts.prompt_length[slot]
    room = min(limits.max_model_len, limits.pages * limits.page_size + 1) - length
    most = room if draw(draws, 10) == 0 else min(room, sim.odds.answer)
    entry[0] = fronts.counter[pair]
    entry[1] = fronts.epoch[pair]
    entry[WORD_SEED] = fronts.seed[slot]
    entry[4] = fronts.cache_salt[slot]
    entry[WORD_EPOCH] = fronts.epoch[pair]
    entry[WORD_SLOT] = slot - pair * limits.slots_per_pair
    entry[WORD_PROMPT_OFFSET] = place * limits.max_model_len
    entry[WORD_PROMPT_LENGTH] = length
    entry[WORD_HASH_OFFSET] = place * hashes_per_entry(limits)
    entry[WORD_HASH_COUNT] = length >> limits.page_shift
    entry[WORD_MAX_TOKENS] = 1 + draw(draws, max(1, most))
    entry[WORD_MIN_TOKENS] = 2 if draw(draws, 3) == 0 else 0
    entry[WORD_PRIORITY] = draw(draws, 5) - 2
    entry[WORD_FLAGS] = SUBMIT_NO_PREFIX_CACHE if draw(draws, 4) == 0 else 0
    entry[WORD_TOP_P], entry[WORD_REPETITION_PENALTY] = FLOAT_ONE, FLOAT_ONE
    fronts.logprobs[slot] = draw(draws, TOP_LOGPROBS + 1) if draw(draws, 3) == 0 else -1
    entry[WORD_LOGPROBS] = fronts.logprobs[slot]
    for i in range(STOP_IDS):
        entry[WORD_STOP_IDS + i] = -1
    if draw(draws, 3) == 0:
        for i in range(3):
            entry[WORD_STOP_IDS + i] = draw(draws, limits.vocab_size)


@device
def spoil(limits, sim, slot):
    """Break the good entry in Sim.entry. Returns the kind of what is wrong now."""
    fronts, draws, entry = sim.fronts, sim.draws, sim.entry
    kind = draw(draws, BAD_KINDS)
    fronts.expected[slot], reason = 0, REJECT_PROMPT
    if kind == BAD_PROMPT:
        entry[WORD_PROMPT_LENGTH] = -draw(draws, 2)
    elif kind == BAD_PARAMETER:
        entry[WORD_TEMPERATURE] = -1
        reason = REJECT_PARAMETER
    elif kind == BAD_LENGTH:
        entry[WORD_MAX_TOKENS] = limits.max_model_len - fronts.prompt_length[slot] + 1
        reason = REJECT_LENGTH
    elif kind == BAD_PAGES:
        entry[WORD_MAX_TOKENS] = limits.pages * limits.page_size + 2 - fronts.prompt_length[slot]
        reason = REJECT_PAGES if limits.pages * limits.page_size + 2 <= limits.max_model_len else REJECT_LENGTH
    elif kind == BAD_HASHES:
        entry[WORD_HASH_COUNT] += 1
        reason = REJECT_HASHES
    elif kind == BAD_TOKEN:
        fronts.tokens[slot, draw(draws, fronts.prompt_length[slot])] = limits.vocab_size
        reason = REJECT_TOKEN
    elif kind == BAD_EPOCH:
        entry[WORD_EPOCH] -= 1
    elif kind == BAD_SLOT:
        entry[WORD_SLOT] = limits.slots_per_pair if draw(draws, 2) == 0 else -1
    fronts.finish[slot] = FINISH_REJECTED | reason << REASON_SHIFT
    return kind


@device
def submit(limits, queues, sim, turn, pair):
    """One request. Returns whether there was room for it."""
    fronts, draws = sim.fronts, sim.draws
    slot = free_slot(limits, fronts, pair)
    if slot < 0 or wire_room(fronts, pair) < 16 or fronts.sq_tail[pair] - queues.pair[pair, PAIR_SQ_HEAD] >= limits.sq_entries:
        return False
    place = fronts.sq_tail[pair] & (limits.sq_entries - 1)
    fronts.counter[pair] += 1
    fronts.cache_salt[slot] = SALT if draw(draws, 4) == 0 else 0
    fronts.seed[slot] = draw(draws, 1 << 20)
    fronts.prompt_length[slot] = make_up_prompt(limits, sim, slot)
    fronts.got[slot], fronts.cancelled[slot], fronts.poisoned[slot] = 0, 0, 0
    fill_entry(limits, sim, pair, place, slot)
    for k in range(fronts.prompt_length[slot] >> limits.page_shift):
        fronts.page_hash[slot, k] = extend_hash(limits, fronts, slot, k)
    kind = -1
    if chance(draws, sim.odds.bad):
        kind = spoil(limits, sim, slot)
    if kind < 0:
        foresee(limits, fronts, slot, sim.entry)
        note(sim, turn, pair, EVENT_SUBMIT, slot - pair * limits.slots_per_pair, fronts.expected[slot])
    else:
        note(sim, turn, pair, EVENT_SUBMIT_BAD, slot - pair * limits.slots_per_pair, kind)
    for word in range(SQ_ENTRY_WORDS):
        fronts.entry[pair, place, word] = sim.entry[word]
    if kind < BAD_SILENT:
        fronts.request_id[slot] = fronts.epoch[pair] << EPOCH_SHIFT | fronts.counter[pair]
    send(fronts, pair, WIRE_PROMPT, place, slot)
    send(fronts, pair, WIRE_ENTRY, place, 0)
    fronts.sq_tail[pair] += 1
    ring(fronts, pair)
    return True


@device
def cancel(limits, sim, turn, pair):
    """Cancel what is in one slot, if anything is."""
    fronts = sim.fronts
    local = draw(sim.draws, limits.slots_per_pair)
    slot = pair * limits.slots_per_pair + local
    if fronts.request_id[slot] != 0:
        fronts.cancelled[slot] = 1
        note(sim, turn, pair, EVENT_CANCEL, local, 0)
        send(fronts, pair, WIRE_CANCEL, local, fronts.request_id[slot])


# ---- completions --------------------------------------------------------------------------------------------------------


@device
def poll(limits, queues, fronts, pair, most):
    """Read at most so many completions, and check them. Returns a problem, or 0."""
    head = fronts.cq_head[pair]
    for _ in range(most):
        word = queues.cq[pair, head & (limits.cq_entries - 1)]
        if word >> LAP_SHIFT != (head >> limits.cq_shift) % LAPS + 1:
            break
        head += 1
        fault = take(limits, fronts, pair, word)
        if fault == 0:
            fault = check_record(limits, queues, fronts, pair, (head - 1) & (limits.cq_entries - 1))
        if fault != 0:
            return fault
    if head != fronts.cq_head[pair]:
        fronts.cq_head[pair] = head
        send(fronts, pair, WIRE_WORD, FRONT_CQ_HEAD, stamp(fronts, pair, head))
    return 0


@device
def check_record(limits, queues, fronts, pair, place):
    """The log probabilities of the completion at a place of the ring. Returns a problem, or 0."""
    word = queues.cq[pair, place]
    slot = pair * limits.slots_per_pair + (word & SLOT_MASK)
    flags, token = word >> FLAG_SHIFT & FLAG_MASK, word >> TOKEN_SHIFT & TOKEN_MASK
    wanted = flags & HAS_TOKEN != 0 and fronts.logprobs[slot] >= 0
    if (flags & HAS_LOGPROBS != 0) != wanted:
        return RECORD_WRONG
    if wanted:
        context = fronts.prompt_length[slot] + fronts.got[slot] - 1
        for k in range(RECORD_PAIRS):
            if queues.records[pair, place, k] != record_word(token, context, k):
                return RECORD_WRONG
    return 0


@device
def take(limits, fronts, pair, word):
    """Check one completion. Returns a problem, or 0."""
    local, flags, value = word & SLOT_MASK, word >> FLAG_SHIFT & FLAG_MASK, word >> TOKEN_SHIFT & TOKEN_MASK
    slot = pair * limits.slots_per_pair + local
    if local >= limits.slots_per_pair or fronts.request_id[slot] == 0:
        return STRAY
    finish, expected = flags & FINISH_MASK, fronts.expected[slot]
    if flags & HAS_TOKEN:
        if fronts.got[slot] >= expected:
            return NO_TOKEN_DUE
        if fronts.tokens[slot, fronts.prompt_length[slot] + fronts.got[slot]] != value:
            return TOKEN_DIFFERS
        fronts.got[slot] += 1
    complete = fronts.got[slot] == expected
    if finish == FINISH_NONE:
        return ENDS_LATE if complete else 0
    fronts.request_id[slot] = 0
    if finish == FINISH_CANCELLED:
        return 0 if fronts.cancelled[slot] != 0 else ENDS_OTHERWISE
    if finish == FINISH_ERROR:
        return 0 if fronts.poisoned[slot] != 0 else ENDS_OTHERWISE
    if not complete:
        return ENDS_EARLY
    if finish == FINISH_REJECTED:
        finish |= value << REASON_SHIFT
    return 0 if finish == fronts.finish[slot] else ENDS_OTHERWISE


# ---- a turn -------------------------------------------------------------------------------------------------------------


@device
def front_turn(limits, queues, sim, turn, pair, command):
    """What one front end does in one turn. command: COMMAND_*, of the host. Returns a problem, or 0."""
    fronts, draws, odds = sim.fronts, sim.draws, sim.odds
    start_draws(draws, sim.seed, turn, pair)
    calm = turn >= sim.turns
    muted = calm or sim.muted[turn, pair] != 0
    if not muted and chance(draws, odds.late):
        late_write(limits, queues, sim, turn, pair)
    if fronts.alive[pair] == 0:
        if not calm and (muted or not chance(draws, odds.comeback)):
            return 0
        fronts.alive[pair] = 1
        note(sim, turn, pair, EVENT_RETURN, 0, 0)
        claim_pair(limits, queues, sim, turn, pair)
    if fronts.silent[pair] > 0 and not calm:
        fronts.silent[pair] -= 1
        return 0
    fault = 0
    if wire_room(fronts, pair) > 8:
        beat(fronts, pair)
    if fronts.epoch[pair] == 0:
        settle(limits, queues, sim, turn, pair)
    elif not owns(queues, pair, fronts.epoch[pair]) and (muted or chance(draws, odds.notice)):
        claim_pair(limits, queues, sim, turn, pair)
    if fronts.epoch[pair] > 0 and wire_room(fronts, pair) > 16:
        if not muted:
            act(limits, queues, sim, turn, pair)
        elif calm and command != COMMAND_RUN:  # it has not heard of it yet
            submit(limits, queues, sim, turn, pair)
        if fronts.alive[pair] == 0:
            return 0
        most = limits.cq_entries
        if fronts.pace[pair] != FAST and not calm:
            most = draw(draws, 4) if fronts.pace[pair] == SLOW and chance(draws, 200) else 0
        fault = poll(limits, queues, fronts, pair, most)
    under_way = fronts.wire_tail[pair] - fronts.wire_head[pair]
    if not muted and chance(draws, odds.delay):
        under_way = draw(draws, under_way + 1)
    deliver(limits, queues, fronts, pair, under_way)
    return fault


@device
def act(limits, queues, sim, turn, pair):
    """What a front end that owns its pair does of its own accord."""
    fronts, draws, odds = sim.fronts, sim.draws, sim.odds
    if chance(draws, odds.submit):
        for _ in range(1 + draw(draws, odds.burst)):
            if not submit(limits, queues, sim, turn, pair):
                break
    if chance(draws, odds.cancel):
        cancel(limits, sim, turn, pair)
    if chance(draws, odds.pace):
        fronts.pace[pair] = draw(draws, PACES)
        note(sim, turn, pair, EVENT_PACE, fronts.pace[pair], 0)
    if chance(draws, odds.broken):
        break_protocol(limits, sim, turn, pair)
    if chance(draws, odds.silent):
        fronts.silent[pair] = 1 + draw(draws, LONGEST_SILENCE)
        note(sim, turn, pair, EVENT_SILENT, fronts.silent[pair], 0)
    if chance(draws, odds.crash):
        crash(limits, queues, sim, turn, pair)
