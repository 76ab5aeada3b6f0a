"""A front end's writes under way: a queue from which they arrive in order, now or later."""

from blinkpy.device.portable import device
from blinkpy.queues.submission import SQ_ENTRY_WORDS
from blinkpy.verify.sim.world import WIRE

WIRE_PROMPT, WIRE_ENTRY, WIRE_WORD, WIRE_CANCEL = range(4)


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
def deliver(limits, queues, sim, pair, writes):
    """The next `writes` writes arrive."""
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
    """Prompt, automaton, token rules and page hashes of a slot's request, to the part of the arenas that belongs to a place in
    the ring."""
    fronts, own, rules = sim.fronts, sim.fronts.grammar[slot], sim.fronts.rules[slot]
    offset, length = prompt_place(limits, place), fronts.prompt_length[slot]
    for i in range(length):
        queues.prompt[pair, offset + i] = fronts.tokens[slot, i]
    for i in range(sim.grammars.length[own] if own >= 0 else 0):
        queues.prompt[pair, offset + limits.max_model_len + i] = sim.grammars.words[own, i]
    for i in range(sim.rules.length[rules] if rules >= 0 else 0):
        queues.prompt[pair, offset + limits.max_model_len + limits.grammar_words + i] = sim.rules.words[rules, i]
    offset = place * hashes_per_entry(limits)
    for k in range(length >> limits.page_shift):
        queues.hashes[pair, offset + k] = fronts.page_hash[slot, k]


@device
def prompt_place(limits, place):
    """Where in the prompt arena the part of a place in the ring begins: first the prompt, behind max_model_len the automaton, and
    behind that the token rules."""
    return place * (limits.max_model_len + 2 * limits.grammar_words)


@device
def hashes_per_entry(limits):
    return (limits.max_model_len >> limits.page_shift) + 1
