"""The output that a request of the simulator must get: its tokens and finish reason, from the synthetic model and the grammar."""

from blinkpy.device.portable import device
from blinkpy.queues import submission
from blinkpy.queues import words as completion
from blinkpy.verify.sim.synthetic_model import token_after, value_of


@device
def leads_to_an_end(sim, slot, entry, state, generated):
    """Whether the token after `generated` tokens must lead to a position at which the output may end."""
    own, left, stops = sim.fronts.grammar[slot], entry[submission.WORD_MAX_TOKENS] - generated, False
    for i in range(submission.STOP_IDS):
        stops = stops or (entry[submission.WORD_STOP_IDS + i] >= 0 and generated >= entry[submission.WORD_MIN_TOKENS])
    may_continue = sim.grammars.accepting[own, state] != 0 and not stops
    return sim.fronts.rules[slot] < 0 and sim.grammars.distance[own, state] <= left and not may_continue


@device
def allowed(sim, slot, entry, state, token, generated):
    """Whether the grammar of a slot's request allows a token in `state`; without a grammar, whether its token rules do.
    generated: number of earlier output tokens.
    """
    stops = is_stop(entry, token, generated + 1)
    own, rules = sim.fronts.grammar[slot], sim.fronts.rules[slot]
    if own < 0:
        return rules < 0 or sim.rules.allowed[rules, token] != 0
    if stops:
        return sim.grammars.accepting[own, state] != 0
    after = sim.grammars.following[own, state, token]
    near = after >= 0 and sim.grammars.distance[own, after] < entry[submission.WORD_MAX_TOKENS] - generated
    return after >= 0 and (near or not leads_to_an_end(sim, slot, entry, state, generated))


@device
def is_stop(entry, token, generated):
    """Whether a token is an active stop id. generated: its number in the output, from 1."""
    stops = False
    for i in range(submission.STOP_IDS):
        stops = stops or entry[submission.WORD_STOP_IDS + i] == token
    return stops and generated > entry[submission.WORD_MIN_TOKENS]


@device
def expected_end(limits, sim, slot, entry):
    """Compute the request's expected output: tokens (after the prompt in Fronts.tokens), their number, and the finish reason."""
    fronts, grammars, own, state = sim.fronts, sim.grammars, sim.fronts.grammar[slot], 0
    length, salt = fronts.prompt_length[slot], fronts.cache_salt[slot]
    most = min(entry[submission.WORD_MAX_TOKENS], limits.max_model_len - length)
    total, value, generated, finish = 0, 0, 0, completion.FINISH_NONE
    for i in range(length):
        value = value_of(value, fronts.tokens[slot, i], i, salt)
        total += value * (i + 1)
    while finish == completion.FINISH_NONE:
        token, tried = token_after(total, fronts.seed[slot], limits.vocab_size), 0
        while tried < limits.vocab_size and not allowed(sim, slot, entry, state, token, generated):
            token, tried = (token + 1) % limits.vocab_size, tried + 1
        if tried == limits.vocab_size:
            finish = completion.FINISH_ERROR
            break
        position = length + generated
        fronts.tokens[slot, position] = token
        generated += 1
        value = value_of(value, token, position, salt)
        total += value * (position + 1)
        if generated == most:
            finish = completion.FINISH_LENGTH
        if is_stop(entry, token, generated):
            finish = completion.FINISH_STOP
        elif own >= 0:
            state = grammars.following[own, state, token]
            if grammars.ending[own, state] != 0:
                finish = completion.FINISH_COMPLETE
    fronts.expected[slot], fronts.finish[slot] = fronts.scored[slot] + generated, finish
