"""Requests of a simulated front end: drawn at random, submitted, and cancelled."""

from blinkpy.device.portable import device
from blinkpy.kv.limits import takes_predictions
from blinkpy.kv.prefix_cache import extend_hash
from blinkpy.queues import submission
from blinkpy.queues import words as completion
from blinkpy.queues.words import EPOCH_SHIFT, PAIR_SQ_HEAD, TOP_LOGPROBS
from blinkpy.verify.sim.expected_output import expected_end
from blinkpy.verify.sim.front_end_words import ring
from blinkpy.verify.sim.grammar_supply import DAMAGES, MORE_THAN_SHARE, RULE_DAMAGES, RULES
from blinkpy.verify.sim.hostile import (
    WIRE_CANCEL,
    WIRE_ENTRY,
    WIRE_PROMPT,
    hashes_per_entry,
    prompt_place,
    send,
    wire_space,
)
from blinkpy.verify.sim.synthetic_model import (
    EVENT_CANCEL,
    EVENT_SUBMIT,
    EVENT_SUBMIT_BAD,
    chance,
    draw,
    note,
    scramble,
)
from blinkpy.verify.sim.world import BAD_WORDS, GOOD_ENTRIES, STEMS

# Kinds of bad entries. The engine answers kinds before BAD_SILENT with FINISH_REJECTED, and skips the others.
BAD_PROMPT, BAD_PARAMETER, BAD_LENGTH, BAD_PAGES, BAD_HASHES, BAD_TOKEN, BAD_GRAMMAR, BAD_RULES = range(8)
BAD_EPOCH, BAD_SLOT, BAD_KINDS = range(8, 11)
BAD_SILENT = BAD_EPOCH

SALT = 9
PREDICTION, EDITS = 7919, 8  # seed offset; a prediction has edits at 0 to 8 of every 8 tokens
REASON_SHIFT = 8


@device
def free_slot(limits, fronts, pair):
    """A slot without a request, or -1."""
    first = pair * limits.slots_per_pair
    for slot in range(first, first + limits.slots_per_pair):
        if fronts.request_id[slot] == 0:
            return slot
    return -1


@device
def draw_prompt(limits, sim, slot):
    """Draw a prompt of any permitted length, whose start is shared with other prompts. Returns the length."""
    fronts, draws = sim.fronts, sim.draws
    longest = min(limits.max_model_len - 1, limits.pages * limits.page_size)
    length = 1 + draw(draws, longest if draw(draws, 2) == 0 else max(1, longest // 3))
    if draw(draws, 10) == 0:
        length = longest
    repeats = chance(draws, sim.odds.repeat)
    own = 0 if repeats else draw(draws, min(4, length))
    stem, after = draw(draws, STEMS), draw(draws, STEMS)
    # After `cut` the prompt equals another stem, so that pages look alike.
    cut = draw(draws, length) if not repeats and draw(draws, 3) == 0 else length
    for i in range(length):
        token = sim.stems[stem if i < cut else after, i]
        fronts.tokens[slot, i] = token if i < length - own else draw(draws, limits.vocab_size)
    return length


@device
def in_flight(fronts, ids, first, count, wanted):
    """Whether one of the `count` slots from `first` has a request with this grammar or token rules. ids: index of each slot's
    grammar or rules.
    """
    found = False
    for slot in range(first, first + count):
        found = found or (fronts.request_id[slot] != 0 and ids[slot] == wanted)
    return found


@device
def share_left(limits, fronts, pair):
    """The unused part of a queue pair's share of grammar slots."""
    first, left = pair * limits.slots_per_pair, limits.grammar_share
    for i in range(limits.slots_per_pair):
        grammar, rules = fronts.grammar[first + i], fronts.rules[first + i]
        if fronts.request_id[first + i] != 0:
            left -= 1 if grammar >= 0 and not in_flight(fronts, fronts.grammar, first, i, grammar) else 0
            left -= 1 if rules >= 0 and not in_flight(fronts, fronts.rules, first, i, rules) else 0
    return left


@device
def draw_one(limits, sim, pair, slot, ids, good, damaged, left):
    """Choose a valid or damaged grammar (or token rules), or none, for a slot's request.

    ids: the number chosen for each slot (of a grammar or of token rules), set here.
    good, damaged: number of valid grammars (or token rules), and of damaged ones, which follow them.
    left: unused part of the share.
    Returns (whether the choice is damaged, unused part of the share after it).
    """
    wanted, first = draw(sim.draws, good), pair * limits.slots_per_pair
    spoiled = chance(sim.draws, sim.odds.bad)
    if spoiled:
        wanted = good + draw(sim.draws, damaged)
    needed = 0 if in_flight(sim.fronts, ids, first, limits.slots_per_pair, wanted) else 1
    if needed > left:
        return False, left
    ids[slot] = wanted
    return spoiled, left - needed


@device
def draw_grammar(limits, sim, pair, slot):
    """Give a slot's request a grammar, token rules, both or neither, within the pair's share. Returns
    REJECT_* for a damaged choice, or 0.
    """
    fronts, refused = sim.fronts, 0
    fronts.grammar[slot], fronts.rules[slot] = -1, -1
    if limits.grammar_share == 0:
        return refused
    left = share_left(limits, fronts, pair)
    if draw(sim.draws, 2) == 0:
        good = limits.grammar_share + MORE_THAN_SHARE
        damaged, left = draw_one(limits, sim, pair, slot, fronts.grammar, good, DAMAGES, left)
        refused = completion.REJECT_GRAMMAR if damaged else 0
    if draw(sim.draws, 3) == 0:
        damaged, left = draw_one(limits, sim, pair, slot, fronts.rules, RULES, RULE_DAMAGES, left)
        refused = completion.REJECT_RULES if damaged and refused == 0 else refused
    return refused


@device
def draw_prediction(limits, sim, slot):
    """Give a slot's request a prediction of its expected output, with edits, or none."""
    fronts, chosen = sim.fronts, scramble(sim.fronts.seed[slot] + PREDICTION)
    if sim.predictions == 0 or chosen & 3 == 0:
        return
    length, expected = fronts.prompt_length[slot], fronts.expected[slot] - fronts.scored[slot]
    space = limits.max_model_len - length
    count = space if chosen & 12 == 0 else min(space, 1 + (chosen >> 4) % max(2, 2 * expected))
    place, edits = 0, (chosen >> 16) % (EDITS + 1)
    for i in range(count):
        drawn = scramble(chosen + i)
        edit = (drawn >> 8) % EDITS < edits
        token = (drawn >> 16) % limits.vocab_size
        if place < expected and not edit:
            token = fronts.tokens[slot, length + place]
        fronts.prediction[slot, i] = token
        place += 1 if not edit else (drawn >> 24) % 3  # an inserted token, a changed token, or one token for two
    fronts.predicted[slot] = count
    sim.entry[submission.WORD_PREDICTED_TOKENS] = count


@device
def fill_entry(limits, sim, pair, place, slot):
    """Fill Sim.entry with a valid entry for the request in `slot`. place: index in the ring."""
    fronts, draws, entry = sim.fronts, sim.draws, sim.entry
    good = draw(draws, GOOD_ENTRIES) if draw(draws, 4) == 0 else 0
    for word in range(submission.SQ_ENTRY_WORDS):
        entry[word] = sim.good[good, word]
    length = fronts.prompt_length[slot]
    space = min(limits.max_model_len, limits.pages * limits.page_size + 1) - length
    most = space if draw(draws, 10) == 0 else min(space, sim.odds.answer)
    entry[submission.WORD_REQUEST_ID], entry[submission.WORD_REQUEST_ID + 1] = fronts.counter[pair], fronts.epoch[pair]
    entry[submission.WORD_SEED], entry[submission.WORD_SEED + 1] = fronts.seed[slot], 0
    entry[submission.WORD_CACHE_SALT], entry[submission.WORD_CACHE_SALT + 1] = fronts.cache_salt[slot], 0
    entry[submission.WORD_EPOCH] = fronts.epoch[pair]
    entry[submission.WORD_SLOT] = slot - pair * limits.slots_per_pair
    entry[submission.WORD_PROMPT_OFFSET] = prompt_place(limits, place)
    entry[submission.WORD_PROMPT_LENGTH] = length
    entry[submission.WORD_HASH_OFFSET] = place * hashes_per_entry(limits)
    entry[submission.WORD_HASH_COUNT] = length >> limits.page_shift
    own = fronts.grammar[slot]
    if own >= 0:
        automata = limits.grammar_share + MORE_THAN_SHARE + DAMAGES
        digest = sim.grammars.digest[(own + pair + fronts.epoch[pair]) % automata]
        entry[submission.WORD_GRAMMAR_DIGEST], entry[submission.WORD_GRAMMAR_DIGEST + 1] = digest & 0xFFFFFFFF, digest >> 32
        entry[submission.WORD_GRAMMAR_OFFSET] = prompt_place(limits, place) + limits.max_model_len
        entry[submission.WORD_GRAMMAR_WORDS] = sim.grammars.length[own]
    rules = fronts.rules[slot]
    if rules >= 0:
        digest = sim.rules.digest[(rules + pair + fronts.epoch[pair]) % (RULES + RULE_DAMAGES)]
        entry[submission.WORD_RULES_DIGEST], entry[submission.WORD_RULES_DIGEST + 1] = digest & 0xFFFFFFFF, digest >> 32
        entry[submission.WORD_RULES_OFFSET] = prompt_place(limits, place) + limits.max_model_len + limits.grammar_words
        entry[submission.WORD_RULES_WORDS] = sim.rules.length[rules]
    entry[submission.WORD_MAX_TOKENS] = 1 + draw(draws, max(1, most))
    entry[submission.WORD_MIN_TOKENS] = 2 if draw(draws, 3) == 0 else 0
    entry[submission.WORD_PRIORITY] = draw(draws, 5) - 2
    entry[submission.WORD_OUTPUT_TOKENS] = draw(draws, length)
    entry[submission.WORD_TENANT] = draw(draws, 4)
    if limits.step_groups > 1:  # if steps are cut, half of the requests are best effort
        entry[submission.WORD_BEST_EFFORT] = fronts.seed[slot] & 1
    entry[submission.WORD_FLAGS] = submission.SUBMIT_NO_PREFIX_CACHE if draw(draws, 4) == 0 else 0
    if entry[submission.WORD_FLAGS] != 0 and fronts.seed[slot] & 2 != 0:
        entry[submission.WORD_HASH_COUNT] = 0  # no page to look up or index
    fronts.scored[slot] = length - 1 if draw(draws, 4) == 0 else 0
    entry[submission.WORD_FLAGS] |= submission.SUBMIT_SCORE_PROMPT if fronts.scored[slot] > 0 else 0
    fronts.logprobs[slot] = draw(draws, TOP_LOGPROBS + 1) if draw(draws, 3) == 0 else -1
    entry[submission.WORD_LOGPROBS] = fronts.logprobs[slot]
    if draw(draws, 3) == 0:
        for i in range(3):
            entry[submission.WORD_STOP_IDS + i] = draw(draws, limits.vocab_size)


@device
def spoil(limits, sim, slot):
    """Damage the valid entry in Sim.entry. Returns the kind of the damage."""
    fronts, draws, entry = sim.fronts, sim.draws, sim.entry
    kind = draw(draws, BAD_KINDS)
    fronts.expected[slot], reason = 0, completion.REJECT_PROMPT
    if kind == BAD_PROMPT:
        entry[submission.WORD_PROMPT_LENGTH] = -draw(draws, 2)
    elif kind == BAD_PARAMETER:
        bad = draw(draws, BAD_WORDS + 1)
        if fronts.seed[slot] & 3 == 0:  # a prediction of negative length, or for an engine without predictions
            entry[submission.WORD_PREDICTED_TOKENS] = -1 if takes_predictions(limits) else 1
        elif bad < BAD_WORDS:
            entry[sim.bad[bad, 0]] = sim.bad[bad, 1]
        else:
            entry[submission.WORD_OUTPUT_TOKENS] = fronts.prompt_length[slot]
        reason = completion.REJECT_PARAMETER
    elif kind == BAD_LENGTH:
        beyond = limits.max_model_len - fronts.prompt_length[slot] + 1
        fits = entry[submission.WORD_PROMPT_OFFSET] + limits.max_model_len < limits.prompt_tokens
        if takes_predictions(limits) and fits and fronts.seed[slot] & 1 == 0:
            entry[submission.WORD_PREDICTED_TOKENS] = beyond
        else:
            entry[submission.WORD_MAX_TOKENS] = beyond
        reason = completion.REJECT_LENGTH
    elif kind == BAD_PAGES:
        entry[submission.WORD_MAX_TOKENS] = limits.pages * limits.page_size + 2 - fronts.prompt_length[slot]
        fits = limits.pages * limits.page_size + 2 <= limits.max_model_len
        reason = completion.REJECT_PAGES if fits else completion.REJECT_LENGTH
    elif kind == BAD_HASHES:
        entry[submission.WORD_HASH_COUNT] = (fronts.prompt_length[slot] >> limits.page_shift) + 1
        reason = completion.REJECT_HASHES
    elif kind == BAD_TOKEN and takes_predictions(limits) and fronts.seed[slot] & 1 == 0:
        fronts.prediction[slot, 0], fronts.predicted[slot] = limits.vocab_size, 1
        entry[submission.WORD_PREDICTED_TOKENS] = 1
        reason = completion.REJECT_TOKEN
    elif kind == BAD_TOKEN:
        fronts.tokens[slot, draw(draws, fronts.prompt_length[slot])] = limits.vocab_size
        reason = completion.REJECT_TOKEN
    elif kind == BAD_GRAMMAR:
        reason = completion.REJECT_GRAMMAR
        entry[submission.WORD_GRAMMAR_WORDS] = -1 if draw(draws, 2) == 0 else limits.grammar_words + 1
    elif kind == BAD_RULES:
        reason = completion.REJECT_RULES
        entry[submission.WORD_RULES_WORDS] = -1 if draw(draws, 2) == 0 else limits.grammar_words + 1
    elif kind == BAD_EPOCH:
        entry[submission.WORD_EPOCH] -= 1
    elif kind == BAD_SLOT:
        entry[submission.WORD_SLOT] = limits.slots_per_pair if draw(draws, 2) == 0 else -1
    fronts.finish[slot] = completion.FINISH_REJECTED | reason << REASON_SHIFT
    return kind


@device
def submit(limits, queues, sim, turn, pair):
    """Submit one request. Returns whether there was space for it."""
    fronts, draws = sim.fronts, sim.draws
    slot = free_slot(limits, fronts, pair)
    if slot < 0 or wire_space(fronts, pair) < 16 or fronts.sq_tail[pair] - queues.pair[pair, PAIR_SQ_HEAD] >= limits.sq_entries:
        return False
    place = fronts.sq_tail[pair] & (limits.sq_entries - 1)
    fronts.counter[pair] += 1
    fronts.cache_salt[slot] = SALT if draw(draws, 4) == 0 else 0
    fronts.seed[slot] = draw(draws, 1 << 20)
    fronts.prompt_length[slot] = draw_prompt(limits, sim, slot)
    fronts.got[slot], fronts.cancelled[slot], fronts.poisoned[slot], fronts.predicted[slot] = 0, 0, 0, 0
    refused = draw_grammar(limits, sim, pair, slot)
    fill_entry(limits, sim, pair, place, slot)
    for k in range(fronts.prompt_length[slot] >> limits.page_shift):
        fronts.page_hash[slot, k] = extend_hash(limits, fronts, slot, k)
    kind = -1
    if chance(draws, sim.odds.bad):
        kind = spoil(limits, sim, slot)
    if kind < 0 and refused != 0:
        fronts.expected[slot], fronts.finish[slot] = 0, completion.FINISH_REJECTED | refused << REASON_SHIFT
        note(sim, turn, pair, EVENT_SUBMIT_BAD, slot - pair * limits.slots_per_pair, BAD_GRAMMAR)
    elif kind < 0:
        expected_end(limits, sim, slot, sim.entry)
        draw_prediction(limits, sim, slot)
        note(sim, turn, pair, EVENT_SUBMIT, slot - pair * limits.slots_per_pair, fronts.expected[slot])
    else:
        note(sim, turn, pair, EVENT_SUBMIT_BAD, slot - pair * limits.slots_per_pair, kind)
    for word in range(submission.SQ_ENTRY_WORDS):
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
    """Cancel the request of a random slot, if it has one."""
    fronts = sim.fronts
    local = draw(sim.draws, limits.slots_per_pair)
    slot = pair * limits.slots_per_pair + local
    if fronts.request_id[slot] != 0:
        fronts.cancelled[slot] = 1
        note(sim, turn, pair, EVENT_CANCEL, local, 0)
        send(fronts, pair, WIRE_CANCEL, local, fronts.request_id[slot])
