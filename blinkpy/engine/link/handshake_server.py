"""The TCP server at which front ends on other machines request a queue pair. Handshakes run concurrently, each with a deadline.

If a key is required, a handshake costs only a connection until the front end has proved possession of the key. Beyond the limits
of connections, per address and in total, the oldest connection is closed. So silent clients can't lock out other clients, whose
handshakes take only milliseconds.
"""

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Callable

from blinkpy.transport.handshake import (
    MESSAGE_LIMIT,
    Challenge,
    HandshakeError,
    Hello,
    Welcome,
    new_nonce,
    refusal,
    sealed,
    unsealed,
)
from blinkpy.transport.link_key import ENGINE, FRONT_END, LinkKey

BACKLOG = 128
HANDSHAKE_S = 2.0  # deadline of a handshake
MOST_HANDSHAKES, MOST_OF_ADDRESS = 128, 32  # concurrent, in total and from one address
WATCH_S = 0.5

logger = logging.getLogger("blinkpy.engine")


class HandshakeServer:
    """Runs handshakes in a separate thread from start() to close().

    listening: a bound socket; close() closes it.
    give: grants a queue pair to one front end at a time. Its exceptions become refusals.
    watch: called every WATCH_S seconds, between handshakes.
    """

    def __init__(
        self, listening: socket.socket, give: Callable[[Hello], Welcome], watch: Callable[[], None], key: LinkKey | None = None
    ):
        self._socket = listening
        self._give = give
        self._watch = watch
        self._key = key
        self._running: dict[asyncio.Task[None], str] = {}  # handshakes and their addresses, oldest first
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Accept front ends."""
        self._socket.listen(BACKLOG)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="handshakes", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End all handshakes and stop listening. A second call has no effect."""
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join()
            self._thread = None
        self._socket.close()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._receive, sock=self._socket, limit=MESSAGE_LIMIT, backlog=BACKLOG)
        while not self._ended.is_set():
            try:
                await asyncio.wait_for(self._ended.wait(), WATCH_S)
            except TimeoutError:
                self._look()
        server.close()
        running = list(self._running)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await asyncio.sleep(0)  # until their connections are closed

    def _look(self) -> None:
        try:
            self._watch()
        # The network card is full or the GPU has a fault: refuse later handshakes with this reason.
        except Exception as error:
            logger.warning("could not check for lost front ends, whose queue pairs stay in use until then: %s", error)

    async def _receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Run one handshake."""
        peer, own = str((writer.get_extra_info("peername") or ("an unknown address",))[0]), asyncio.current_task()
        assert own is not None
        self._limit(peer)
        self._running[own] = peer
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                answer = await self._handshake(reader, writer)
        except asyncio.CancelledError:
            answer = refusal("too many concurrent handshakes, or the engine is shutting down; try again")
        except TimeoutError:
            answer = refusal(f"the handshake took longer than {HANDSHAKE_S:g} s")
            logger.warning("refused the front end at %s: no handshake within the time limit", peer)
        except Exception as error:
            # An invalid message or a full network card: refuse this front end and continue.
            logger.warning("refused the front end at %s: %s", peer, error)
            answer = refusal(str(error))
        self._running.pop(own, None)
        writer.write(answer)  # fits into a socket's buffer, so it does not wait for the peer
        writer.close()

    def _limit(self, peer: str) -> None:
        """End the oldest handshake of an address at its limit, or of all addresses at the total limit."""
        same = [task for task, address in self._running.items() if address == peer]
        crowd = same if len(same) >= MOST_OF_ADDRESS else list(self._running) if len(self._running) >= MOST_HANDSHAKES else []
        for oldest in crowd[:1]:
            del self._running[oldest]
            oldest.cancel()

    async def _handshake(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
        """The engine's answer. Raises HandshakeError, and exceptions of `give`."""
        challenge = Challenge(new_nonce(), self._key is not None)
        writer.write(challenge.encode())
        try:
            said = await reader.readline()
        except ValueError as error:
            raise HandshakeError(f"the message is larger than {MESSAGE_LIMIT} bytes") from error
        if not said.endswith(b"\n"):
            raise HandshakeError("the connection was closed in the middle of a message")
        hello = Hello.decode(unsealed(said, self._key, FRONT_END, challenge.nonce))
        return sealed(self._give(hello).encode(), self._key, ENGINE, challenge.nonce, said)
