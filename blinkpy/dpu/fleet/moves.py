"""Moves a generation that lost its engine to another engine. Its prompt and its output so far become the prompt of a new request.

A random draw depends only on the seed and the token's position in the sequence, so it is the same on both
engines. State that depends on the output must be transferred. max_tokens and min_tokens are reduced, and a
grammar starts in the state after the output. The entry gives the number of output tokens in the prompt, for
penalties and banned sequences. Detokenizer, stop strings and log probabilities stay in the generation.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from blinkpy.dpu.api_errors import ApiError, bad_request
from blinkpy.dpu.descriptors import WatchedTasks
from blinkpy.dpu.engine_link import Submission
from blinkpy.dpu.generation import Generation
from blinkpy.dpu.metrics import Metrics
from blinkpy.queues.byte_automaton import DEAD, ByteAutomaton
from blinkpy.queues.request_parameters import SUBMIT_SCORE_PROMPT, RequestParameters
from blinkpy.queues.words import Int32

MOVE_POLL_S = 0.02  # between two attempts to find an engine
MOVES = "the moves between engines"  # in the log

logger = logging.getLogger("blinkpy.frontend")

Pieces = Callable[[], Sequence[bytes] | None]  # the bytes of each token for grammars; None if unknown


class NoContinuationError(Exception):
    """No other engine can continue the generation. The message gives the reason."""


def continuation(generation: Generation, pieces: Pieces) -> tuple[Int32, RequestParameters, ByteAutomaton | None]:
    """Prompt, parameters and grammar of the request that continues a generation with a flight. Incomplete
    scores of its prompt restart. Raises NoContinuationError.
    """
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
        grammar = started_at(grammar, _position_after(grammar, flight.output, pieces()))
    sampling = sampling.changed(
        max_tokens=sampling.max_tokens - count,
        min_tokens=max(0, sampling.min_tokens - count),
        flags=sampling.flags & ~SUBMIT_SCORE_PROMPT,
        output_tokens=count,
    )
    return np.concatenate([flight.prompt, np.array(flight.output, np.int32)]), sampling, grammar


def _position_after(grammar: ByteAutomaton, output: Sequence[int], pieces: Sequence[bytes] | None) -> int:
    if pieces is None:
        raise NoContinuationError("it has a grammar, but the bytes of its tokens are unknown")
    position = grammar.advance(grammar.start, b"".join(pieces[token] if token < len(pieces) else b"" for token in output))
    if position == DEAD:
        raise NoContinuationError("its grammar does not allow its output")
    return position


def started_at(automaton: ByteAutomaton, position: int) -> ByteAutomaton:
    """The automaton with `position` as its start."""
    return replace(automaton, start=position)


@dataclass(slots=True, eq=False)
class Move:
    """A generation that lost its engine."""

    generation: Generation
    error: ApiError  # ends the generation if no engine can continue it
    work: Submission | None = None  # the request that continues it
    grammar: ByteAutomaton | None = None  # of that request


class Moves:
    """The generations of a worker that wait for another engine, in order.

    place: submits a request to an engine with free slots; returns False if all are full. Raises ApiError and
        ValueError.
    pieces: see continuation().
    metrics: count the moves.
    most_moves: maximum moves of a generation.
    timeout_s: maximum total time of a generation's pauses.
    on_end: called after each round.
    """

    def __init__(
        self,
        place: Callable[[Submission, ByteAutomaton | None], bool],
        pieces: Pieces,
        metrics: Metrics,
        most_moves: int,
        timeout_s: float,
        on_end: Callable[[], None],
    ):
        self._place, self.pieces, self._metrics = place, pieces, metrics
        self._most_moves, self._timeout_s, self._on_end = most_moves, timeout_s, on_end
        self._waiting: list[Move] = []
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def start(self, watched: WatchedTasks) -> None:
        """Use the running event loop. watched: receives unexpected exceptions."""
        self._loop, self._watched = asyncio.get_running_loop(), watched

    def add(self, generations: Sequence[Generation], error: ApiError) -> None:
        """Take generations that lost their engine. They continue in a later turn of the event loop, because the current poll may
        still deliver completions.
        """
        now = time.monotonic()
        for generation in generations:
            flight = generation.flight
            if flight is None:
                generation.fail(error)
                continue
            flight.engine, flight.paused_at = -1, now
            self._waiting.append(Move(generation, error))
        self._plan(0.0)

    def fail_all(self, error: ApiError) -> None:
        """End all generations with an error."""
        waiting, self._waiting = self._waiting, []
        for move in waiting:
            move.generation.fail(error)

    def close(self) -> None:
        """Stop the timer."""
        if self._timer is not None:
            self._timer.cancel()

    def _plan(self, delay_s: float) -> None:
        if self._waiting and self._timer is None:
            self._timer = self._loop.call_later(delay_s, self._move_all)

    def _move_all(self) -> None:
        """Timer callback: submit generations to engines with free slots, in order."""
        self._timer = None
        waiting, self._waiting = self._waiting, []
        try:
            for move in waiting:
                if move.generation.open and not self._settle(move):
                    self._waiting.append(move)
        except Exception as error:
            self._watched.failed(MOVES, error)
            return
        self._plan(MOVE_POLL_S)
        self._on_end()

    def _settle(self, move: Move) -> bool:
        """Try to continue a generation. Returns whether the generation now has an engine or has ended."""
        flight = move.generation.flight
        assert flight is not None
        pause_s = time.monotonic() - flight.paused_at
        if flight.moves >= self._most_moves or flight.paused_s + pause_s > self._timeout_s:
            return self._refuse(move, move.error)
        if move.work is None:
            try:
                prompt, sampling, move.grammar = continuation(move.generation, self.pieces)
            except NoContinuationError as reason:
                logger.warning("a request can't continue in another engine: %s", reason)
                return self._refuse(move, move.error)
            move.work = move.generation, prompt, sampling
        try:
            if not self._place(move.work, move.grammar):
                return False
        except ApiError:  # the engine was lost meanwhile
            return False
        except ValueError as never:
            return self._refuse(move, bad_request(str(never)))
        flight.moves += 1
        flight.paused_s += pause_s
        self._metrics.count("moves")
        return True

    def _refuse(self, move: Move, error: ApiError) -> bool:
        self._metrics.count("moves_refused")
        move.generation.fail(error)
        return True
