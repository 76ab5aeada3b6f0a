"""Connections against the process's limit of file descriptors: raised as far as it goes, and kept."""

import logging
import resource

from blinkpy.config import ConfigError
from blinkpy.dpu.http.wire.connections import SPARE_CONNECTIONS

OWN_DESCRIPTORS = 128  # of the process: queue pair, event loop, threads, sockets that are not accepted yet

logger = logging.getLogger("blinkpy.frontend")


def allowed_connections(wanted: int) -> int:
    """How many of the wanted connections this process can serve. Raises its soft limit of descriptors if need be, logs it when
    the hard limit leaves fewer, and raises ConfigError when it leaves none."""
    needed = wanted + SPARE_CONNECTIONS + OWN_DESCRIPTORS
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    allowed = limit - SPARE_CONNECTIONS - OWN_DESCRIPTORS
    if allowed < 1:
        raise ConfigError(f"a worker needs more than the {limit} file descriptors of this process (ulimit -n)")
    if allowed < wanted:
        logger.warning("%d connections at a time, not %d: the limit of descriptors is %d (ulimit -Hn)", allowed, wanted, limit)
    return allowed
