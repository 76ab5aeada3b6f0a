"""All connections of a worker: their number, the bytes that they hold, and what they share."""

import asyncio
from email.utils import formatdate
from typing import Any, Protocol

from blinkpy.config import AccessOptions, FrontendOptions
from blinkpy.dpu.admission.gate import Gate
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.descriptors import SPARE_CONNECTIONS
from blinkpy.dpu.http.wire.byte_room import BytePace, ByteRoom
from blinkpy.dpu.http.wire.cross_origin import CrossOrigin
from blinkpy.dpu.metrics import Metrics

Connection = Any  # of blinkpy.dpu.http.wire.connection, which imports this file
Exchange = Any

BODY_BURST = 1 << 23  # bytes of all bodies that arrive, beyond their pace: one body at once
UNPARSED_BYTES = 64 << 20  # that have arrived on all connections, and wait for their turn to be parsed


class Application(Protocol):
    """What answers requests."""

    def begin(self, exchange: Exchange) -> None:
        """Answer a request whose head has arrived, immediately or by a task. Must not raise."""


def too_many_bodies() -> ApiError:
    return ApiError(
        503,
        "The server is receiving too many request bodies, and this request has taken longest; try again.",
        code="too_many_bodies",
    )


def too_much_unparsed() -> ApiError:
    return ApiError(503, "More has arrived than the server can parse.", code="too_much_unparsed")


def too_much_unread() -> ApiError:
    return ApiError(
        503,
        "Clients are not reading their responses fast enough, and this connection has waited longest.",
        code="too_much_unread",
    )


def too_many_answers() -> ApiError:
    message = "Non-streamed responses need too much memory, and this request's is the largest: use 'stream': true."
    return ApiError(503, message, code="too_many_answers")


class Connections:
    """The connections of a server, counted from accept on: a TLS handshake counts, too."""

    def __init__(
        self,
        options: FrontendOptions,
        body_bytes: int,  # of all bodies that arrive
        metrics: Metrics,
        app: Application,
        gate: Gate | None = None,
        cross_origin: CrossOrigin | None = None,
        root: str = "",  # --root-path
    ):
        self.root, self.app = root, app
        self.gate = gate or Gate(options.max_lag_ms / 1000, metrics)
        self.cross_origin = cross_origin or CrossOrigin(AccessOptions())
        self.options, self.metrics = options, metrics
        self.open: set[Connection] = set()
        self.tasks: set[asyncio.Task[None]] = set()  # of requests
        self.waiting: dict[Connection, None] = {}  # for headers, the longest first
        self.bodies = ByteRoom(body_bytes, too_many_bodies)
        self.unread = ByteRoom(options.unread_room_mib << 20, too_much_unread)
        self.unparsed = ByteRoom(UNPARSED_BYTES, too_much_unparsed)
        self.answers = ByteRoom(options.answer_room_mib << 20, too_many_answers, largest=True)
        self.pace = BytePace(options.body_mib_per_s << 20, BODY_BURST)
        self.leaving = False  # each connection ends with its next answer
        self.answered = 0  # requests
        self.set_date()

    def set_date(self) -> None:
        """Note the time for the header Date; to be called each second."""
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()

    def enter(self, connection: Connection) -> bool:
        """Count a new connection, and return whether it may stay. When there are too many, the one that has waited longest for a
        request is closed in its favour."""
        others = len(self.open)
        if others >= self.options.max_connections and self.waiting:
            self.metrics.refused("max_connections")
            oldest = next(iter(self.waiting))
            self.leave(oldest)
            oldest.abort()
            others -= 1
        self.open.add(connection)
        self.waiting[connection] = None
        if others < self.options.max_connections + SPARE_CONNECTIONS:
            return True
        self.metrics.refused("max_connections")
        return False

    def leave(self, connection: Connection) -> None:
        """A connection has ended, or is about to."""
        self.open.discard(connection)
        self.waiting.pop(connection, None)
        self.unread.release(connection)
        self.unparsed.release(connection)

    def start(self, task: "asyncio.Task[None]") -> None:
        """Keep a request's task until it ends."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
