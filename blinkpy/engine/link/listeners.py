"""The engine's ends of all transports."""

from typing import Protocol

from blinkpy.config import Config
from blinkpy.engine.link.pair_memory import QueueMemory
from blinkpy.transport.segment import Segment
from blinkpy.transport.transport_kinds import chosen_end, ends_in

ENDS = ends_in("blinkpy.engine.link")


class Listener(Protocol):
    """Gives the queue pairs of an engine to front ends. It is opened before the model is loaded, and started after it."""

    flags: str
    """What a front end is started with to reach this engine."""

    def start(self, segment: Segment, pairs: QueueMemory | None) -> None:
        """Let front ends in. pairs: where they lie for a network card, if not in the segment. Raises TransportError."""

    def close(self) -> None:
        """Let nobody in any more. Before the segment goes; also when start() was not called."""


def open_listener(config: Config) -> Listener:
    """The listener of the transport that the config names. Raises ConfigError where there can be none."""
    listener: Listener = chosen_end(ENDS, config).open(config)
    return listener
