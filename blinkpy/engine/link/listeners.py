"""The engine's ends of all transports."""

from typing import Protocol

from blinkpy.config import Config
from blinkpy.engine.link.pair_memory import QueueMemory
from blinkpy.transport.contract import chosen_end, ends_in
from blinkpy.transport.segment import Segment

ENDS = ends_in("blinkpy.engine.link", "listen_*")


class Listener(Protocol):
    """Gives front ends the queue pairs of an engine. It is opened before the model is loaded, and started
    afterwards.
    """

    flags: str
    """The options with which a front end reaches this engine."""

    def start(self, segment: Segment, pairs: QueueMemory | None) -> None:
        """Accept front ends.

        pairs: memory of the pairs for a network card, if it is not the segment's.
        Raises TransportError.
        """

    def close(self) -> None:
        """Stop accepting front ends. Call it before the segment is closed, even without start()."""


def open_listener(config: Config) -> Listener:
    """The listener of the configured transport. Raises ConfigError if the machine does not support it."""
    listener: Listener = chosen_end(ENDS, config).open(config)
    return listener
