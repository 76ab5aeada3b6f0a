"""All connections of a worker, and their shared limits."""

import asyncio
import time
from collections import Counter
from email.utils import formatdate
from itertools import islice
from typing import Any, Protocol

from blinkpy.config import AccessOptions, FrontendOptions
from blinkpy.dpu.admission.gate import Asker, Gate
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.descriptors import SPARE_CONNECTIONS
from blinkpy.dpu.http.wire.byte_budget import ByteBudget
from blinkpy.dpu.http.wire.cross_origin import CrossOrigin
from blinkpy.dpu.metrics import Metrics

Connection = Any  # of blinkpy.dpu.http.wire.connection, which imports this file
Exchange = Any

MOST_LOOKED_AT = 64  # connections, in the search for one to close
GRACE_S = 0.4  # for the first bytes of a new connection, before it may be closed for another


class Application(Protocol):
    """The handler of requests."""

    def begin(self, exchange: Exchange) -> None:
        """Answer a request whose head has arrived, immediately or by a task. Must not raise."""


def too_many_bodies() -> ApiError:
    return ApiError(
        503,
        "The server is receiving too many request bodies, and this request has taken longest; try again.",
        code="too_many_bodies",
    )


def too_many_connections() -> ApiError:
    return ApiError(503, "Too many connections.", code="too_many_connections", limit="max_connections")


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
    """The connections of a server, counted from their acceptance, so a TLS handshake counts."""

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
        self.open: dict[Connection, None] = {}  # the oldest first
        self.tasks: set[asyncio.Task[None]] = set()  # of requests
        # Connections without a request, oldest first: whose clients have ended them; before the first complete handshake or
        # headers; before the next headers; with an unread last answer.
        self.left: dict[Connection, None] = {}
        self.fresh: dict[Connection, None] = {}
        self.waiting: dict[Connection, None] = {}
        self.lingering: dict[Connection, None] = {}
        self._owned = Counter[str]()  # connections of each owner
        self._keyed = dict[Connection, str]()  # addresses of connections whose client has shown a key
        self._known = Counter[str]()  # these connections of each address
        self.bodies = ByteBudget(body_bytes, too_many_bodies)
        self.unread = ByteBudget(options.unread_budget_mib << 20, too_much_unread)
        self.answers = ByteBudget(options.answer_budget_mib << 20, too_many_answers, largest=True)
        self.retiring = False  # each connection closes after its next answer
        self.answered = 0  # requests
        self.set_date()

    def set_date(self) -> None:
        """Store the time for the header Date; to be called every second."""
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()

    def may_enter(self) -> bool:
        """Whether another connection may be accepted. If there are too many, close a connection without a request."""
        most = self.options.max_connections
        return len(self.open) < most or self._close_one() or len(self.open) < most + SPARE_CONNECTIONS

    def enter(self, connection: Connection) -> None:
        """Count a new connection."""
        self.open[connection] = self.fresh[connection] = None
        self._owned[connection.asker.name] += 1

    def trim(self) -> None:
        """Close connections without a request while there are too many; to be called every second."""
        while len(self.open) > self.options.max_connections and self._close_one():
            pass

    def too_many_requests(self) -> bool:
        """Whether more connections than allowed have a request. A connection without a request occupies one of the
        SPARE_CONNECTIONS until its headers arrive or it is evicted.
        """
        without = len(self.left) + len(self.fresh) + len(self.waiting) + len(self.lingering)
        return len(self.open) - without > self.options.max_connections

    def _close_one(self) -> bool:
        """Close a connection without a request: the oldest whose client has ended it. Otherwise it must have no unread bytes: of
        new and idle connections, the oldest of the larger group, then the oldest with an unread last answer. Returns False if
        there is no such connection."""
        for connection in self.left:
            self._drop(connection)
            return True
        latest = time.monotonic() - GRACE_S
        for group in (*sorted((self.fresh, self.waiting), key=len, reverse=True), self.lingering):
            for connection in islice(group, MOST_LOOKED_AT):
                if not connection.transport.asked and (group is not self.fresh or connection.opened <= latest):
                    self._drop(connection)
                    return True
        return False

    def _drop(self, connection: Connection) -> None:
        self.metrics.refused("max_connections")
        self.remove(connection)
        connection.abort()

    def close_another(self, connection: Connection) -> bool:
        """Close another connection with a 503, so that this one, which has a request, may stay: the newest of the owner with most
        connections. Returns False if that is this connection's owner, or if all its answers have begun."""
        largest, count = self._owned.most_common(1)[0]
        if largest == connection.asker.name or count <= self._owned[connection.asker.name] + 1:
            return False
        for other in reversed(self.open):
            if other.asker.name == largest and not other.is_answering:
                self.remove(other)
                other.refuse(too_many_connections())
                return True
        return False

    def understood(self, connection: Connection) -> None:
        """The handshake or an answer is complete: the connection waits for its next request."""
        if connection in self.open:
            self.busy(connection)
            self.waiting[connection] = None

    def ended(self, connection: Connection) -> None:
        """The client has ended its side before its next request was read."""
        if connection in self.fresh or connection in self.waiting:
            self.busy(connection)
            self.left[connection] = None

    def busy(self, connection: Connection) -> None:
        """A request has arrived, or the connection is about to end."""
        self.left.pop(connection, None)
        self.fresh.pop(connection, None)
        self.waiting.pop(connection, None)

    def linger(self, connection: Connection) -> None:
        """Handle the end of the last answer, which the client may not have read yet."""
        if connection in self.open:
            self.lingering[connection] = None

    def own(self, connection: Connection, asker: Asker) -> None:
        """Set the owner of a connection."""
        if connection in self.open:
            self._disown(connection)
            self._owned[asker.name] += 1
            if connection not in self._keyed:
                self._keyed[connection] = connection.address
                self._known[connection.address] += 1
        connection.asker = asker

    def knows(self, address: str) -> bool:
        """Whether a client of an address has a connection now on which it has shown a key."""
        return self._known[address] > 0

    def _disown(self, connection: Connection) -> None:
        name = connection.asker.name
        self._owned[name] -= 1
        if not self._owned[name]:
            del self._owned[name]

    def remove(self, connection: Connection) -> None:
        """Remove a connection that has ended, or is about to end."""
        if connection in self.open:
            del self.open[connection]
            self._disown(connection)
            address = self._keyed.pop(connection, None)
            if address is not None:
                self._known[address] -= 1
                if not self._known[address]:
                    del self._known[address]
        self.busy(connection)
        self.lingering.pop(connection, None)
        self.unread.release(connection)

    def start(self, task: "asyncio.Task[None]") -> None:
        """Keep a request's task until it ends."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
