"""The front end's side of all transports: creates attached queue pairs for EngineLink."""

from collections.abc import Callable

from blinkpy.config import Config
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.transport.contract import Transport, WorkerIdentity, chosen_end, ends_in

ENDS = ends_in("blinkpy.dpu.link", "connect_*")
GRANT_TIMEOUT_S = 1.0


def connect(config: Config, worker: WorkerIdentity) -> Transport:
    """Connect to a queue pair's memory over the configured transport. Raises TransportError, LayoutError and
    ConfigError.
    """
    return chosen_end(ENDS, config).open(config, worker)


def open_queue_pair(
    config: Config, worker: WorkerIdentity, check: Callable[[QueuePair], None] = lambda queue_pair: None
) -> QueuePair:
    """Create an attached queue pair. check: called with it before the claim.

    Raises EngineLostError if the engine does not grant the claim, and as connect() and check() do.
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
