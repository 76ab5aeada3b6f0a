"""A hostile front end, as device code: it ignores the protocol and writes random words into its queue pair in every turn.

The last front end of a world is hostile if Sim.hostile is set. In some periods it claims the queue pair repeatedly. In other
periods it announces nearly valid entries, so that random words reach every check. It knows the page hashes of other front ends,
and guesses their request ids. After the storm it falls silent, and loses its queue pair.
"""

from blinkpy.device.portable import device
from blinkpy.queues import submission as E
from blinkpy.queues import words as W
from blinkpy.queues.submission import SQ_ENTRY_WORDS
from blinkpy.verify.sim.grammar_supply import DAMAGES, MORE_THAN_SHARE
from blinkpy.verify.sim.synthetic_model import draw
from blinkpy.verify.sim.world import GARBAGE_CLAIMS, GOOD_ENTRIES, HOSTILE_WITHOUT_HASHES, STEMS, WIRE

WIRE_PROMPT, WIRE_ENTRY, WIRE_WORD, WIRE_CANCEL = range(4)


@device
def send(fronts, pair, kind, index, value):
    """Put a write on the wire. The caller must check that the wire has space."""
    place = fronts.wire_tail[pair] & (WIRE - 1)
    fronts.wire_kind[pair, place] = kind
    fronts.wire_index[pair, place] = index
    fronts.wire_value[pair, place] = value
    fronts.wire_tail[pair] += 1


@device
def wire_space(fronts, pair):
    return WIRE - (fronts.wire_tail[pair] - fronts.wire_head[pair])


@device
def deliver(limits, queues, sim, pair, writes):
    """Apply the next `writes` writes of the wire to the segment."""
    fronts = sim.fronts
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
            deliver_prompt(limits, queues, sim, pair, index, value)


@device
def deliver_prompt(limits, queues, sim, pair, place, slot):
    """Copy a request's prompt, prediction, automaton, token rules and page hashes to the arenas, at ring entry `place`'s part."""
    fronts, own, rules = sim.fronts, sim.fronts.grammar[slot], sim.fronts.rules[slot]
    offset, length = prompt_place(limits, place), fronts.prompt_length[slot]
    for i in range(length):
        queues.prompt[pair, offset + i] = fronts.tokens[slot, i]
    for i in range(fronts.predicted[slot]):
        queues.prompt[pair, offset + length + i] = fronts.prediction[slot, i]
    for i in range(sim.grammars.length[own] if own >= 0 else 0):
        queues.prompt[pair, offset + limits.max_model_len + i] = sim.grammars.words[own, i]
    for i in range(sim.rules.length[rules] if rules >= 0 else 0):
        queues.prompt[pair, offset + limits.max_model_len + limits.grammar_words + i] = sim.rules.words[rules, i]
    offset = place * hashes_per_entry(limits)
    for k in range(length >> limits.page_shift):
        queues.hashes[pair, offset + k] = fronts.page_hash[slot, k]


@device
def prompt_place(limits, place):
    """Prompt-arena offset of a ring entry's part. The part has the prompt, the automaton (after max_model_len words), then the
    token rules.
    """
    return place * (limits.max_model_len + 2 * limits.grammar_words)


@device
def hashes_per_entry(limits):
    return (limits.max_model_len >> limits.page_shift) + 1


MOOD_SHIFT = 6  # log2 of the turns in a period
CLAIMING, ANNOUNCING, ANYTHING, MOODS = range(4)
IDS = 8  # number of request ids that it reuses in an epoch
LENGTH_LIMIT = 16  # maximum length of most prompts, tokens
PIECE = 24  # words of an arena written per turn


@device
def is_hostile(limits, sim, pair):
    return sim.hostile != 0 and pair == limits.pairs - 1


@device
def any_word(draws):
    """Any 64 bits."""
    word = draw(draws, 1 << 31) << 32 | draw(draws, 1 << 31) << 1 | draw(draws, 2)
    return word if draw(draws, 2) == 0 else -1 - word


@device
def any_int32(draws):
    return draw(draws, (1 << 32) - 1) - (1 << 31)


@device
def hostile_turn(limits, queues, sim, turn, pair):
    """Write random words for one turn; no word in the calm."""
    if turn >= sim.turns or sim.muted[turn, pair] != 0:
        return
    draws, front, mood = sim.draws, queues.front, (turn >> MOOD_SHIFT) % MOODS
    epoch, head, tail = queues.pair[pair, W.PAIR_EPOCH], queues.pair[pair, W.PAIR_SQ_HEAD], queues.pair[pair, W.PAIR_CQ_TAIL]
    if draw(draws, 8) > 0:
        front[pair, W.FRONT_HEARTBEAT] = any_word(draws)
    wanted = epoch + 1 if mood == CLAIMING or draw(draws, 32) == 0 else epoch + draw(draws, 3) * 2 - 2
    front[pair, W.FRONT_CLAIM] = any_word(draws) if draw(draws, 8) == 0 else wanted
    sim.garbage[GARBAGE_CLAIMS] += 1
    write_arenas(limits, queues, sim, pair)
    for _ in range(draw(draws, limits.sq_entries + 1)):
        write_entry(limits, queues, sim, pair, epoch)
    doorbell = epoch << W.EPOCH_SHIFT | ((head + draw(draws, limits.sq_entries + 1)) & W.POSITION_MASK)
    front[pair, W.FRONT_DOORBELL] = any_word(draws) if odd(draws, mood) else doorbell
    read = epoch << W.EPOCH_SHIFT | (tail & W.POSITION_MASK)
    if draw(draws, 2) == 0:
        front[pair, W.FRONT_CQ_HEAD] = any_position(draws, epoch) if odd(draws, mood) else read
    for local in range(limits.slots_per_pair):
        if draw(draws, 16) == 0:
            named = epoch << W.EPOCH_SHIFT | draw(draws, IDS)
            queues.cancel[pair, local] = any_word(draws) if draw(draws, 4) == 0 else named


@device
def odd(draws, mood):
    """Whether to write an impossible word."""
    return mood == ANYTHING and draw(draws, 8) == 0


@device
def any_position(draws, epoch):
    """A random position of the front end's epoch, or any 64 bits."""
    return any_word(draws) if draw(draws, 2) == 0 else epoch << W.EPOCH_SHIFT | draw(draws, 1 << 31)


@device
def write_arenas(limits, queues, sim, pair):
    """Fill a piece of the prompt arena and a piece of the hash arena with other requests' tokens and hashes, and random words."""
    draws, start = sim.draws, draw(sim.draws, limits.prompt_tokens)
    stem, wild = draw(draws, STEMS), draw(draws, 8) == 0
    for i in range(min(PIECE, limits.prompt_tokens - start)):
        token = sim.stems[stem, i % limits.max_model_len]
        queues.prompt[pair, start + i] = any_int32(draws) if wild and draw(draws, 4) == 0 else token
    start = draw(draws, limits.hash_entries)
    for i in range(min(PIECE, limits.hash_entries - start)):
        known = sim.fronts.page_hash[draw(draws, limits.slots), i % limits.pages_per_sequence]
        queues.hashes[pair, start + i] = any_word(draws) if draw(draws, 16) == 0 else known


@device
def write_entry(limits, queues, sim, pair, epoch):
    """Write an entry at a random position of the ring: random words, or a valid entry with some random words."""
    draws, entry, place = sim.draws, sim.entry, draw(sim.draws, limits.sq_entries)
    spoilt = draw(draws, 4)
    if spoilt == 0:
        for word in range(E.SQ_ENTRY_WORDS):
            entry[word] = any_int32(draws)
    else:
        fill_entry(limits, queues, sim, pair, epoch)
    for _ in range(draw(draws, 3) if spoilt == 1 else 0):
        word = draw(draws, E.SQ_ENTRY_WORDS)
        # Keep the flags, so that pages are shared only if allowed, and the salt, which the model
        # limits.
        if word != E.WORD_FLAGS and word != E.WORD_CACHE_SALT + 1:
            entry[word] = any_int32(draws)
    for word in range(E.SQ_ENTRY_WORDS):
        queues.sq[pair, place, word] = entry[word]


@device
def fill_entry(limits, queues, sim, pair, epoch):
    """Fill Sim.entry with a valid entry, whose prompt and hashes are anywhere in the arenas."""
    draws, entry = sim.draws, sim.entry
    good = draw(draws, GOOD_ENTRIES) if draw(draws, 4) == 0 else 0
    for word in range(E.SQ_ENTRY_WORDS):
        entry[word] = sim.good[good, word]
    length = 1 + draw(draws, LENGTH_LIMIT if draw(draws, 4) > 0 else limits.max_model_len)
    hashes = length >> limits.page_shift
    entry[E.WORD_REQUEST_ID], entry[E.WORD_REQUEST_ID + 1] = draw(draws, IDS), epoch & 0x7FFFFFFF
    entry[E.WORD_SEED], entry[E.WORD_SEED + 1] = draw(draws, 1 << 20), 0
    entry[E.WORD_CACHE_SALT], entry[E.WORD_CACHE_SALT + 1] = 0, 0
    entry[E.WORD_EPOCH] = epoch
    entry[E.WORD_SLOT] = draw(draws, limits.slots_per_pair + 1) - (1 if draw(draws, 8) == 0 else 0)
    entry[E.WORD_PROMPT_OFFSET] = draw(draws, max(1, limits.prompt_tokens - length + 1))
    entry[E.WORD_PROMPT_LENGTH] = length
    entry[E.WORD_HASH_OFFSET], entry[E.WORD_HASH_COUNT] = draw(draws, max(1, limits.hash_entries - hashes + 1)), hashes
    entry[E.WORD_MAX_TOKENS] = 1 + draw(draws, 12)
    entry[E.WORD_MIN_TOKENS], entry[E.WORD_OUTPUT_TOKENS] = 0, draw(draws, length + 1)
    entry[E.WORD_PRIORITY] = any_int32(draws)
    entry[E.WORD_TENANT] = draw(draws, 4)
    shares = sim.hostile != HOSTILE_WITHOUT_HASHES and draw(draws, 4) > 0
    entry[E.WORD_FLAGS] = 0 if shares else E.SUBMIT_NO_PREFIX_CACHE
    entry[E.WORD_LOGPROBS] = draw(draws, 22) - 1
    if limits.grammar_share > 0 and draw(draws, 3) == 0:
        write_automaton(limits, queues, sim, pair)


@device
def write_automaton(limits, queues, sim, pair):
    """Write a valid or damaged automaton to the arena, often with a wrong word, and refer to it in Sim.entry."""
    draws, entry = sim.draws, sim.entry
    own = draw(draws, limits.grammar_share + MORE_THAN_SHARE + DAMAGES)
    length = sim.grammars.length[own]
    start = draw(draws, max(1, limits.prompt_tokens - length + 1))
    for i in range(min(length, limits.prompt_tokens - start)):
        queues.prompt[pair, start + i] = sim.grammars.words[own, i]
    if draw(draws, 2) == 0:
        queues.prompt[pair, start + draw(draws, max(1, min(length, limits.prompt_tokens - start)))] = draw(draws, 1 << 31)
    entry[E.WORD_GRAMMAR_DIGEST], entry[E.WORD_GRAMMAR_DIGEST + 1] = draw(draws, IDS), 0
    entry[E.WORD_GRAMMAR_OFFSET], entry[E.WORD_GRAMMAR_WORDS] = start, length
