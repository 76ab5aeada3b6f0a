"""The engine's listener for front ends on other machines: a TCP port that grants a queue pair to each.

Every front-end worker has its own protection domain with three memory regions. They are the engine's
words (read only), the front-end region of its pair (write only), and the engine's region of its pair
(read only). A worker can reach no other memory, and no other front end can use its keys. After the handshake, the network card
serves the worker's reads and writes without any code of this process, even while the process is stopped.

A pair belongs to its owner, a random number that a worker passes to its successors. The owner loses a revoked pair when another
worker requests a pair, or after ABSENT_LEASES more silent leases. A worker that does not claim its pair keeps it for one lease,
however often it requests it. The old RDMA queue pair is destroyed before a pair is granted again, so the network card refuses
late writes of the previous owner.
"""

import contextlib
import logging
import shlex
import socket
import time
from dataclasses import dataclass

import numpy as np

from blinkpy.config import Config, ConfigError
from blinkpy.engine.link.handshake_server import HandshakeServer
from blinkpy.engine.link.pair_memory import HostMemory, QueueMemory
from blinkpy.queues.layout import BLOCK_WORDS, HEADER, QueueLayout
from blinkpy.queues.words import PAIR_ATTACHED, PAIR_EPOCH
from blinkpy.transport.contract import End, TransportError
from blinkpy.transport.handshake import HandshakeError, Hello, Region, Welcome
from blinkpy.transport.link_key import LinkKey
from blinkpy.transport.segment import Segment
from blinkpy.transport.verbs import Port, QueuePairEnd, RdmaOptions, constants

ABSENT_LEASES = 2  # leases without an attached front end

logger = logging.getLogger("blinkpy.engine")


@dataclass
class Grant:
    """A granted queue pair.

    since: time of the grant, s of the monotonic clock.
    epoch: the pair's epoch at the grant.
    attached_at: when the pair was last seen attached, s of the monotonic clock.
    """

    owner: int
    end: QueuePairEnd
    since: float
    epoch: int
    attached_at: float = 0.0


class RdmaListener:
    """Grants queue pairs to front ends on other machines.

    host, port: address on which it listens.
    device, gid_index: see blinkpy.transport.verbs.Port.
    key: the link key that front ends must prove; optional.
    Raises ConfigError if it can't listen on the address, and TransportError without a usable RDMA device.
    """

    def __init__(self, host: str, port: int, device: str = "", gid_index: int = -1, key: LinkKey | None = None):
        self.rdma_port = Port(device, gid_index)
        try:
            family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            self._socket = socket.socket(family, kind, protocol)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
        except OSError as error:
            self.rdma_port.close()
            raise ConfigError(f"can't listen for front ends on {host} port {port}: {error.strerror}") from error
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        host, port = self.address
        self.flags = f"--transport rdma --engine {f'[{host}]' if ':' in host else host}:{port}"
        self._grants: dict[int, Grant] = {}
        self._handshakes = HandshakeServer(self._socket, self._give, self._free_absent, key)
        self._segment: Segment  # keeps the memory mapped
        self._layout: QueueLayout
        self._header: bytes
        self._words: QueueMemory
        self._pairs: QueueMemory
        self._lease_s: float

    def start(self, segment: Segment, pairs: QueueMemory | None = None) -> None:
        """See blinkpy.engine.link.listeners.Listener. Raises TransportError if the card can't access the
        pairs.
        """
        segment.lock_pairs()  # front ends on this machine must not take pairs of remote front ends
        self._segment, self._layout = segment, segment.layout
        self._header = bytes(segment.buffer[: HEADER.itemsize])
        self._lease_s = segment.facts.lease_ms / 1000
        mapped = int(np.frombuffer(segment.buffer, np.uint8).ctypes.data)
        self._words = HostMemory(mapped)
        self._pairs = pairs or HostMemory(mapped + self._layout.first_pair)
        # Register once now, so that an unsupported machine fails at the start.
        with contextlib.closing(QueuePairEnd(self.rdma_port)) as end:
            self._register_pair(end, 0)
        self._handshakes.start()

    def _give(self, hello: Hello) -> Welcome:
        pair = self._choose(hello.owner)
        since, epoch = time.monotonic(), self._word(pair, PAIR_EPOCH)
        before = self._grants.pop(pair, None)
        if before is not None:
            before.end.close()
            if (before.owner, before.epoch) == (hello.owner, epoch):
                since = before.since  # the owner has not claimed the pair yet
        end = QueuePairEnd(self.rdma_port)
        try:
            words = self._layout.engine_words, 2 * BLOCK_WORDS * 8
            engine = self._words.register(end, *words, constants().IBV_ACCESS_REMOTE_READ)
            front, back = self._register_pair(end, pair)
            end.answer(hello.endpoint)
        except BaseException:
            end.close()
            raise
        self._grants[pair] = Grant(hello.owner, end, since, epoch)
        logger.info("queue pair %d: attached by the front end at %s", pair, hello.endpoint.gid)
        return Welcome(self._header, pair, end.endpoint(), engine, front, back)

    def _register_pair(self, end: QueuePairEnd, pair: int) -> tuple[Region, Region]:
        """Register a pair's front-end region and engine region for the peer of `end`."""
        e, layout, register = constants(), self._layout, self._pairs.register
        # The standard requires local write access for remote writes.
        write = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE
        front = register(end, layout.front_region(pair) - layout.first_pair, layout.front_region_bytes, write)
        return front, register(
            end, layout.engine_region(pair) - layout.first_pair, layout.engine_region_bytes, e.IBV_ACCESS_REMOTE_READ
        )

    def _word(self, pair: int, index: int) -> int:
        """A word PAIR_* of a pair."""
        return self._pairs.read_word(self._layout.engine_region(pair) - self._layout.first_pair + 8 * index)

    def _free_absent(self) -> None:
        """Close the connections of lost front ends, to free the network card's resources."""
        now = time.monotonic()
        for pair, grant in list(self._grants.items()):
            if self._word(pair, PAIR_ATTACHED):
                grant.attached_at = now
            elif now - max(grant.since, grant.attached_at) > ABSENT_LEASES * self._lease_s:
                del self._grants[pair]
                grant.end.close()
                logger.info("queue pair %d: released, its front end disconnected", pair)

    def _choose(self, owner: int) -> int:
        """The pair to grant: the owner's current pair, else a free pair, else the earliest granted pair whose lease has ended."""
        grants = self._grants
        for pair, grant in grants.items():
            if grant.owner == owner:
                return pair
        pairs = self._layout.sizes.pairs
        for pair in range(pairs):
            if pair not in grants:
                return pair
        # A pair must be claimed within one lease.
        claimed = time.monotonic() - self._lease_s
        revoked = [p for p in range(pairs) if grants[p].since < claimed and not self._word(p, PAIR_ATTACHED)]
        if not revoked:
            raise HandshakeError(f"all {pairs} queue pairs are in use: start the engine with more --workers")
        return min(revoked, key=lambda pair: grants[pair].since)

    def close(self) -> None:
        """Stop listening and end all connections. Call it before the segment is closed."""
        self._handshakes.close()
        for grant in self._grants.values():
            grant.end.close()
        self._grants.clear()
        self.rdma_port.close()


def listen(config: Config) -> RdmaListener:
    """Listen at --listen. Raises ConfigError."""
    options = config.extension(RdmaOptions)
    host, port = options.address("listen")
    try:
        listener = RdmaListener(host, port, options.rdma_device, options.rdma_gid_index, options.link_key("listen"))
    except TransportError as error:
        raise ConfigError(str(error)) from error
    if options.link_key_file:
        listener.flags += f" --link-key-file {shlex.quote(options.link_key_file)}"
    elif options.insecure_link:
        listener.flags += " --insecure-link"
        logger.warning("--insecure-link: every process that reaches %s port %d can attach a queue pair", host, port)
    return listener


def check(config: Config, given: frozenset[str]) -> None:
    """See blinkpy.transport.contract.End."""
    options = config.extension(RdmaOptions)
    options.address("listen")
    options.link_key("listen")


END = End("rdma", "RDMA between machines", True, RdmaOptions, listen, check)
