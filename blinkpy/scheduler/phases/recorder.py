"""The flight recorder: each turn writes its inputs and decisions into a ring of memory.

A record has all inputs of one turn, as integers. So blinkpy/verify/replay can replay the turns after a known state anywhere, and
must get the same decisions. A turn on the fast path writes a few consecutive words per row, and reads no word back.

Layout, int64 words:

    head      RECORD_HEADER words: length in words | RECORD_MARK << 32; number of the turn; now, ns; the host's command;
              rows of the step that the turn commits | rows that it plans << 32; words of the notes | groups << 32 (see
              step_words); free pages | cached << 32 after the turn; bucket, or -1 if it plans no rows
    inbox     for each pair: heartbeat, claim, completion head, doorbell, as the turn read them
    sampled   a token for each row of the step before
    drafted   with Limits.step_drafts: that number of words for each of these rows
    notes     rare events, each after a word: kind | words << 8
                  RECORDED_ENTRY: pair | tokens of prompt and prediction << 32; words of the automaton that were read | of the
                      token rules << 32; the entry, 32 words; these tokens, two a word; its page hashes; the automaton and the
                      rules, two words a word
                  RECORDED_CANCELS: slots whose cancel word named them, or -1, a word each
    planned   for each row: slot | tokens << 32

A turn that changed only its own number leaves no record, since an idle loop turns every few microseconds.
The next record's number shows how many were skipped.

The ring's oldest records are overwritten, so a reader starts at a known position, such as that of a copy of the state
(blinkpy/recording/recording_memory.py). In another process it reads `progress`, which is written last, before the ring.
"""

from blinkpy.device.expect import expect
from blinkpy.device.portable import barrier, block_sum, device, strided
from blinkpy.kv import state as S
from blinkpy.kv.invariants import check_state as F
from blinkpy.queues.submission import SQ_ENTRY_WORDS, WORD_HASH_COUNT, WORD_PREDICTED_TOKENS
from blinkpy.scheduler.suspension import is_suspended, step_ended

HALF = 32
GROUP_BITS, SUSPENDED_BIT = 8, 1 << 16
LOW = 0xFFFFFFFF
COUNTERS = len(S.COUNTER_INDEX)


@device
def record_turn(limits, state, lane, lanes):
    """Close this turn's record. Call it after all decisions, before Batch.sampled and the inbox change."""
    if limits.record_turns == 0:
        return
    recorder, batch, inbox = state.recorder, state.batch, state.inbox
    cursor, words, mask = recorder.cursor, recorder.words, limits.record_words - 1
    position, number, notes, committed = cursor[S.POSITION], cursor[S.RECORDS], cursor[S.NOTES], cursor[S.COMMITS]
    group, ended = batch.counts[S.GROUP], step_ended(batch)
    planned = batch.counts[S.ROWS] if group == 0 else 0  # otherwise an earlier turn planned the batch
    if committed + planned + notes + group == 0 and changed_words(limits, state, lane, lanes) == 0:
        return
    at = position + S.RECORD_HEADER
    for pair in strided(lane, limits.pairs, lanes):
        words[(at + 4 * pair) & mask] = inbox.heartbeat[pair]
        words[(at + 4 * pair + 1) & mask] = inbox.claim[pair]
        words[(at + 4 * pair + 2) & mask] = inbox.cq_head[pair]
        words[(at + 4 * pair + 3) & mask] = inbox.doorbell[pair]
    at += 4 * limits.pairs
    for row in strided(lane, committed, lanes):
        words[(at + row) & mask] = batch.sampled[row]
        for k in range(limits.step_drafts):
            words[(at + committed + row * limits.step_drafts + k) & mask] = batch.drafted[row, k]
    at += committed * (1 + limits.step_drafts) + notes
    for row in strided(lane, planned, lanes):
        tokens = batch.query_starts[row + 1] - batch.query_starts[row]
        words[(at + row) & mask] = batch.row_slots[row] | tokens << HALF
    length = at + planned - position
    expect(state, length <= limits.record_words, F.RECORD_BEYOND)
    barrier(lanes)
    if lane == 0:
        counts = state.counts
        words[position & mask] = length | S.RECORD_MARK << HALF
        words[(position + 1) & mask] = counts[S.TURNS]
        words[(position + 2) & mask] = inbox.now_ns[0]
        words[(position + 3) & mask] = inbox.command[0]
        words[(position + 4) & mask] = committed | planned << HALF
        words[(position + 5) & mask] = notes | step_words(state) << HALF
        words[(position + 6) & mask] = counts[S.FREE_COUNT] | counts[S.CACHED_COUNT] << HALF
        words[(position + 7) & mask] = batch.counts[S.BUCKET] if planned > 0 else -1
        cursor[S.POSITION], cursor[S.RECORDS] = position + length, number + 1
        cursor[S.NOTES], cursor[S.COMMITS] = 0, batch.counts[S.ROWS] if ended else 0
        recorder.progress[S.POSITION], recorder.progress[S.RECORDS] = position + length, number + 1


@device
def step_words(state):
    """Word of a turn: next layer group | groups of the step << 8 | 1 << 16 while another step is suspended;
    0 if steps are not cut.
    """
    groups = state.batch.counts[S.GROUPS]
    cut = state.batch.counts[S.GROUP] | groups << GROUP_BITS if groups > 1 else 0
    return cut | (SUSPENDED_BIT if is_suspended(state) else 0)


@device
def changed_words(limits, state, lane, lanes):
    """Number of words that changed since the last turn without a batch; 0: this turn had no effect."""
    seen, inbox, pairs = state.recorder.seen, state.inbox, limits.pairs
    changed = 0
    for pair in strided(lane, pairs, lanes):
        changed += note_word(seen, 5 * pair, inbox.heartbeat[pair])
        changed += note_word(seen, 5 * pair + 1, inbox.claim[pair])
        changed += note_word(seen, 5 * pair + 2, inbox.cq_head[pair])
        changed += note_word(seen, 5 * pair + 3, inbox.doorbell[pair])
        changed += note_word(seen, 5 * pair + 4, state.pairs.attached[pair])
    for i in strided(lane, S.COUNTS, lanes):
        changed += note_word(seen, 5 * pairs + i, state.counts[i]) if i != S.TURNS else 0
    for i in strided(lane, COUNTERS, lanes):
        changed += note_word(seen, 5 * pairs + S.COUNTS + i, state.counters[i])
    if lane == 0:
        changed += note_word(seen, 5 * pairs + S.COUNTS + COUNTERS, inbox.command[0])
    return block_sum(changed, lane, lanes)


@device
def note_word(seen, i, value):
    """Store a value. Returns 1 if it differs from the previous value."""
    before = seen[i]
    seen[i] = value
    return 1 if before != value else 0


@device
def open_note(limits, state):
    """Position of the next note of the open record."""
    cursor = state.recorder.cursor
    committed = cursor[S.COMMITS] * (1 + limits.step_drafts)
    return cursor[S.POSITION] + S.RECORD_HEADER + 4 * limits.pairs + committed + cursor[S.NOTES]


@device
def record_entry(limits, state, pair, slot, copied, grammar, taken, rules, taken_rules, lane, lanes):
    """Record a consumed entry: scratch.entry, then the prompt and its page hashes, the automaton and the
    token rules.

    copied: tokens of prompt and prediction in the request's slot; 0: without page hashes.
    grammar, taken: slot of the automaton, and its words.
    rules, taken_rules: the same for token rules.
    Called by all lanes; ends with a barrier.
    """
    if limits.record_turns == 0:
        return
    requests, entry, recorder = state.requests, state.scratch.entry, state.recorder
    words, mask, at = recorder.words, limits.record_words - 1, open_note(limits, state)
    hashes = entry[WORD_HASH_COUNT] if copied > 0 else 0
    expect(state, 0 <= copied <= limits.max_model_len, F.COPIED_BEYOND)
    pairs_of_tokens, predicted = (copied + 1) >> 1, entry[WORD_PREDICTED_TOKENS] if copied > 0 else 0
    barrier(lanes)  # lane 0 moves the cursor below
    for i in strided(lane, SQ_ENTRY_WORDS >> 1, lanes):
        words[(at + 3 + i) & mask] = (entry[2 * i] & LOW) | entry[2 * i + 1] << HALF
    first = at + 3 + (SQ_ENTRY_WORDS >> 1)
    for i in strided(lane, pairs_of_tokens, lanes):
        place = submitted_place(limits, copied - predicted, predicted, 2 * i)
        after = submitted_place(limits, copied - predicted, predicted, 2 * i + 1)
        second = requests.tokens[slot, after] if 2 * i + 1 < copied else 0
        words[(first + i) & mask] = (requests.tokens[slot, place] & LOW) | second << HALF
    first += pairs_of_tokens
    for i in strided(lane, hashes, lanes):
        words[(first + i) & mask] = requests.page_hash[slot, i]
    first += hashes
    record_words(recorder, mask, first, state.grammars.words, grammar, taken, lane, lanes)
    first += (taken + 1) >> 1
    record_words(recorder, mask, first, state.grammars.words, rules, taken_rules, lane, lanes)
    if lane == 0:
        length = first + ((taken_rules + 1) >> 1) - at
        words[at & mask] = S.RECORDED_ENTRY | length << S.NOTE_SHIFT
        words[(at + 1) & mask] = pair | copied << HALF
        words[(at + 2) & mask] = taken | taken_rules << HALF
        recorder.cursor[S.NOTES] += length
    barrier(lanes)


@device
def submitted_place(limits, length, predicted, i):
    """The position in Requests.tokens of token i of a submission: a prompt of `length` tokens, then its prediction, which ends at
    the row's end."""
    return i if i < length else limits.max_model_len - predicted + i - length


@device
def record_words(recorder, mask, first, grammar_words, slot, count, lane, lanes):
    """Record the first words of a grammar slot at a position of the ring, two words per int64."""
    for i in strided(lane, (count + 1) >> 1, lanes):
        second = grammar_words[slot, 2 * i + 1] if 2 * i + 1 < count else 0
        recorder.words[(first + i) & mask] = (grammar_words[slot, 2 * i] & LOW) | second << HALF


@device
def record_cancels(limits, state, ended, cancelled, lane, lanes):
    """Record which requests of scratch.slot[0:ended] were cancelled by their front end.

    cancelled: value of Requests.finish of a cancelled request.
    Called by all lanes; ends with a barrier.
    """
    if limits.record_turns == 0:
        return
    finish, slots, recorder = state.requests.finish, state.scratch.slot, state.recorder
    words, mask, at = recorder.words, limits.record_words - 1, open_note(limits, state)
    barrier(lanes)
    for i in strided(lane, ended, lanes):
        words[(at + 1 + i) & mask] = slots[i] if finish[slots[i]] == cancelled else -1
    if lane == 0:
        words[at & mask] = S.RECORDED_CANCELS | (ended + 1) << S.NOTE_SHIFT
        recorder.cursor[S.NOTES] += ended + 1
    barrier(lanes)
