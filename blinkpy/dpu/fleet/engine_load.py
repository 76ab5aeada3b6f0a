"""How busy an engine is, as a front-end worker sees it."""

from collections.abc import Sequence
from dataclasses import dataclass

from blinkpy.queues.layout import BLOCK_WORDS
from blinkpy.queues.words import COUNTER, GAUGE

LOAD_S = 0.01  # for which the words of an engine count as new
ACCEPTED = COUNTER["requests_accepted"]


@dataclass(slots=True, eq=False)  # frozen takes three times as long to make
class EngineLoad:
    """One engine, at one moment."""

    index: int  # of the engine, from 0
    free_slots: int  # requests that this worker could submit there now
    waiting_tokens: int  # tokens of prompts that wait there, of all front ends: an estimate from published words
    running: int  # requests of all front ends that have pages, as published
    free_pages: int  # pages that are free, or cached and held by no request
    tokens_in_flight: int  # prompts and max_tokens of the requests that this worker has there now
    unseen_tokens: int  # of prompts that this worker sent since the engine last accepted a request: not yet published
    accepts: bool  # whether a request may be sent there at all


class LoadMeter:
    """The load of one engine: what it publishes, and what this worker has there."""

    def __init__(self) -> None:
        self.words: Sequence[int] = [0] * BLOCK_WORDS  # the engine's block
        self.read_at = 0.0  # when it was read, s of the monotonic clock
        self.outstanding = 0  # tokens of prompts and outputs that the engine still has to compute for this worker
        self.unseen = 0  # tokens of prompts that it got since it accepted a request

    def sent(self, prompt_tokens: int, cost: int) -> None:
        """The engine got a request. cost: tokens of its prompt and its longest output."""
        self.outstanding += cost
        self.unseen += prompt_tokens

    def ended(self, cost: int) -> None:
        """Requests with this cost, all together, have ended."""
        self.outstanding -= cost

    def lost(self) -> None:
        """The engine is gone."""
        self.outstanding = self.unseen = 0
        self.read_at = 0.0

    def is_old(self, now: float) -> bool:
        """Whether the engine's words should be read again. now: s of the monotonic clock."""
        return now - self.read_at > LOAD_S

    def read(self, words: Sequence[int] | None, now: float) -> None:
        """The engine's words now; None without an engine."""
        words = words or [0] * BLOCK_WORDS
        if words[ACCEPTED] != self.words[ACCEPTED]:
            self.unseen = 0
        self.words, self.read_at = words, now

    def load(self, index: int, free_slots: int) -> EngineLoad:
        """The load of the engine with this index."""
        words = self.words
        free, running = words[GAUGE["pages_free"]] + words[GAUGE["pages_cached"]], words[GAUGE["requests_running"]]
        prompts, accepted = words[COUNTER["prompt_tokens"]], words[ACCEPTED]
        waiting = words[GAUGE["requests_waiting"]] * prompts // max(1, accepted)  # as long as the others, on average
        return EngineLoad(index, free_slots, waiting, running, free, self.outstanding, self.unseen, free_slots > 0)
