"""How a generation goes on in another engine: prompt and output so far are the prompt of the request that continues it.

A draw depends on the seed and the token's position in the sequence alone, so it is the same in both. What depends on the output
so far has to be carried over: max_tokens and min_tokens count what is left, a grammar starts in the state that the output led to,
and the entry says how many tokens of the prompt are output, for penalties and banned sequences. Detokenizer, stop strings and log
probabilities are the generation's own.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from blinkpy.dpu.generation import Generation
from blinkpy.queues.array_types import Int32
from blinkpy.queues.byte_automaton import DEAD, ByteAutomaton
from blinkpy.queues.request_parameters import SUBMIT_SCORE_PROMPT, RequestParameters

Pieces = Callable[[], Sequence[bytes] | None]  # the bytes of each token, as grammars see them; None: not known


class NoContinuationError(Exception):
    """No other engine can go on with it. The message says why."""


def continuation(generation: Generation, pieces: Pieces) -> tuple[Int32, RequestParameters, ByteAutomaton | None]:
    """Prompt, parameters and grammar of the request that continues a generation, which has a flight. Scores of its prompt begin
    anew if they are not complete. Raises NoContinuationError."""
    flight = generation.flight
    assert flight is not None
    sampling, count = flight.sampling, len(flight.output)
    if count == 0:
        if generation.scoring and generation.scores is not None:
            generation.scores.restart()
        elif sampling.flags & SUBMIT_SCORE_PROMPT:
            sampling = sampling.changed(flags=sampling.flags & ~SUBMIT_SCORE_PROMPT)
        return flight.prompt, sampling, flight.grammar
    grammar = flight.grammar
    if grammar is not None:
        grammar = started_at(grammar, _state_after(grammar, flight.output, pieces()))
    sampling = sampling.changed(
        max_tokens=sampling.max_tokens - count,
        min_tokens=max(0, sampling.min_tokens - count),
        flags=sampling.flags & ~SUBMIT_SCORE_PROMPT,
        output_tokens=count,
    )
    return np.concatenate([flight.prompt, np.array(flight.output, np.int32)]), sampling, grammar


def _state_after(grammar: ByteAutomaton, output: Sequence[int], pieces: Sequence[bytes] | None) -> int:
    if pieces is None:
        raise NoContinuationError("the bytes of its tokens are not known, and it has a grammar")
    state = grammar.advance(0, b"".join(pieces[token] if token < len(pieces) else b"" for token in output))
    if state == DEAD:
        raise NoContinuationError("its grammar does not allow what it has")
    return state


def started_at(automaton: ByteAutomaton, state: int) -> ByteAutomaton:
    """The automaton of what may follow in a state: the same, begun there."""
    if state == 0:
        return automaton
    order = np.arange(automaton.states)
    order[[0, state]] = state, 0
    number: NDArray[np.integer] = np.append(order, DEAD)  # its own inverse; of DEAD, too: it is the last one
    return ByteAutomaton.trimmed(automaton.class_of, number[automaton.next_state[order]], automaton.accepting[order])
