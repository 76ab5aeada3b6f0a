"""The engine's end for front ends on the same machine: no operation, because they map the segment by name."""

from blinkpy.config import Config
from blinkpy.engine.link.pair_memory import QueueMemory
from blinkpy.transport.contract import End
from blinkpy.transport.segment import Segment


class ShmListener:
    """See blinkpy.engine.link.listeners.Listener."""

    def __init__(self, config: Config) -> None:
        self.flags = f"--name {config.engine.name}"

    def start(self, segment: Segment, pairs: QueueMemory | None) -> None:
        pass

    def close(self) -> None:
        pass


END = End("shm", "shared memory on one machine", False, None, ShmListener)
