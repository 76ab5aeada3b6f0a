"""The load of an engine, as a front-end worker knows it."""

from collections.abc import Sequence
from dataclasses import dataclass

from blinkpy.queues.layout import BLOCK_WORDS
from blinkpy.queues.words import COUNTER, GAUGE

LOAD_S = 0.01  # maximum age of an engine's words before they are read again
ACCEPTED = COUNTER["requests_accepted"]


@dataclass(slots=True, eq=False)  # a frozen object takes three times as long to create
class EngineLoad:
    """The load of one engine at one moment."""

    index: int  # of the engine, from 0
    free_slots: int  # number of requests that this worker can send to it now
    waiting_tokens: int  # prompt tokens of all front ends that wait in the engine; estimated from published words
    running: int  # requests of all front ends that have pages, as published
    free_pages: int  # free pages, and cached pages without a holder
    tokens_in_flight: int  # prompt tokens and max_tokens of this worker's requests in the engine
    unseen_tokens: int  # prompt tokens that this worker sent since the engine last accepted a request: not yet published
    accepts: bool  # whether it accepts requests: true for each engine of the list


class LoadMeter:
    """The load of one engine, from its published words and from this worker's requests."""

    def __init__(self) -> None:
        self.words: Sequence[int] = [0] * BLOCK_WORDS  # the engine's block
        self.read_at = 0.0  # time of reading, s of the monotonic clock
        self.outstanding = 0  # prompt and output tokens that the engine has yet to compute for this worker
        self.unseen = 0  # prompt tokens sent since it last accepted a request

    def sent(self, prompt_tokens: int, cost: int) -> None:
        """Count a request that was sent to the engine. cost: tokens of its prompt and its longest output."""
        self.outstanding += cost
        self.unseen += prompt_tokens

    def ended(self, cost: int) -> None:
        """Subtract the cost of ended requests."""
        self.outstanding -= cost

    def lost(self) -> None:
        """Reset, after the loss of the engine."""
        self.outstanding = self.unseen = 0
        self.read_at = 0.0

    def is_old(self, now: float) -> bool:
        """Whether the engine's words should be read again. now: time of the monotonic clock, s."""
        return now - self.read_at > LOAD_S

    def read(self, words: Sequence[int] | None, now: float) -> None:
        """Take the engine's current words; None without an engine."""
        words = words or [0] * BLOCK_WORDS
        if words[ACCEPTED] != self.words[ACCEPTED]:
            self.unseen = 0
        self.words, self.read_at = words, now

    def load(self, index: int, free_slots: int) -> EngineLoad:
        """The load of the engine with this index."""
        words = self.words
        free, running = words[GAUGE["pages_free"]] + words[GAUGE["pages_cached"]], words[GAUGE["requests_running"]]
        prompts, accepted = words[COUNTER["prompt_tokens"]], words[ACCEPTED]
        waiting = words[GAUGE["requests_waiting"]] * prompts // max(1, accepted)  # assumes waiting prompts of average length
        return EngineLoad(index, free_slots, waiting, running, free, self.outstanding, self.unseen, free_slots > 0)
