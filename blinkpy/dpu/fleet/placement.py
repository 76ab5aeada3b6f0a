"""Which engine gets a request."""

from collections.abc import Sequence
from dataclasses import dataclass

from blinkpy.queues.array_types import Int32


@dataclass(frozen=True)
class EngineLoad:
    """What a front end knows of an engine's load."""

    index: int
    free_slots: int  # of this front end's queue pair
    waiting_tokens: int
    running: int
    free_pages: int
    tokens_in_flight: int  # what this front end has outstanding there
    accepts: bool


class Placement:
    """The least outstanding work."""

    def __init__(self, engines: int, page_size: int):
        self._engines, self._page_size = engines, page_size

    def choose(self, prompt: Int32, salt: int, loads: Sequence[EngineLoad]) -> int | None:
        """Index of an engine; None: none accepts."""
        able = [load for load in loads if load.accepts and load.free_slots > 0]
        return min(able, key=lambda load: (load.tokens_in_flight, load.running, load.index)).index if able else None

    def sent(self, engine: int, prompt: Int32, salt: int) -> None:
        """Record what was sent: its pages may be cached there."""

    def forget(self, engine: int) -> None:
        """The engine was restarted: its cache is empty."""
