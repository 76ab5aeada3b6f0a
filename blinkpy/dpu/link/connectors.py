"""The front end's ends of all transports, and what an EngineLink needs of them: an attached queue pair."""

from collections.abc import Callable

from blinkpy.config import Config
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.transport.contract import Transport
from blinkpy.transport.transport_kinds import WorkerIdentity, chosen_end, ends_in

ENDS = ends_in("blinkpy.dpu.link", "connect_*")
GRANT_TIMEOUT_S = 1.0


def connect(config: Config, worker: WorkerIdentity) -> Transport:
    """A queue pair's memory, over the transport that the config names. Raises TransportError, LayoutError and ConfigError."""
    return chosen_end(ENDS, config).open(config, worker)


def open_queue_pair(
    config: Config, worker: WorkerIdentity, check: Callable[[QueuePair], None] = lambda queue_pair: None
) -> QueuePair:
    """An attached queue pair. check: sees it before it is claimed. Raises EngineLostError if the engine does
    not grant it, and as connect() and check() do.
    """
    transport = connect(config, worker)
    try:
        queue_pair = QueuePair(transport, config.queue.engine_timeout_ms / 1000)
        check(queue_pair)
        queue_pair.attach(GRANT_TIMEOUT_S)
    except BaseException:
        transport.close()
        raise
    return queue_pair
