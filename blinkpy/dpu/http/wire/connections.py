"""All connections of a worker, and their shared limits."""

import asyncio
import time
from collections import Counter
from email.utils import formatdate
from itertools import chain, islice
from typing import Any, Protocol

from blinkpy.config import AccessOptions, FrontendOptions
from blinkpy.dpu.admission.gate import KNOWN, Asker, Gate
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.descriptors import SPARE_CONNECTIONS
from blinkpy.dpu.http.wire.byte_budget import ByteBudget
from blinkpy.dpu.http.wire.cross_origin import CrossOrigin
from blinkpy.dpu.metrics import Metrics

Connection = Any  # of blinkpy.dpu.http.wire.connection, which imports this file
Exchange = Any

MOST_LOOKED_AT = 16  # connections of a group that a search for one to close examines
GRACE_S = 0.4  # for the next bytes of a new connection, before it may be closed for another
TURN_S = 0.05  # the same for a TLS handshake if no other connection can be closed, even if its bytes wait for a turn


class Application(Protocol):
    """The handler of requests."""

    def begin(self, exchange: Exchange) -> None:
        """Answer a request whose head has arrived, immediately or by a task. Must not raise."""


def too_many_bodies() -> ApiError:
    message = "Too many request bodies are arriving, and this request has taken longest; try again."
    return ApiError(503, message, code="too_many_bodies")


def too_many_connections() -> ApiError:
    return ApiError(
        503,
        "The server has too many connections: close idle ones, or try again.",
        code="too_many_connections",
        limit="max_connections",
    )


def too_much_unread() -> ApiError:
    message = "Clients read their responses too slowly, and this connection has waited longest."
    return ApiError(503, message, code="too_much_unread")


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
        # Connections without a request, oldest first.
        self.left: dict[Connection, None] = {}  # the client has ended its side
        self.fresh: dict[Connection, None] = {}  # nothing has been read yet
        self.begun: dict[Connection, None] = {}  # in the TLS handshake, or in the first headers
        self.waiting: dict[Connection, None] = {}  # between two requests
        self.lingering: dict[Connection, None] = {}  # after the last answer, which the client may not have read
        self._owned = Counter[str]()  # connections of each owner
        self._admitted = dict[str, dict[Connection, Asker]]()  # connections of each address that have been admitted, with owners
        self.bodies = ByteBudget(body_bytes, too_many_bodies)
        self.unread = ByteBudget(options.unread_budget_mib << 20, too_much_unread)
        self.answers = ByteBudget(options.answer_budget_mib << 20, too_many_answers, largest=True)
        self.retiring = False  # each connection closes after its next answer
        self.answered = 0  # number of requests
        self.set_date()

    def set_date(self) -> None:
        """Store the time for the header Date; to be called every second."""
        self.date = b"date: %b\r\n" % formatdate(usegmt=True).encode()

    def may_enter(self) -> bool:
        """Whether another connection may be accepted. If there are too many, close a connection without a request."""
        most = self.options.max_connections
        return len(self.open) < most or self._close_one() or len(self.open) < most + SPARE_CONNECTIONS or self._close_late()

    def enter(self, connection: Connection) -> None:
        """Count a new connection."""
        self.open[connection] = self.fresh[connection] = None
        self._owned[connection.asker.name] += 1

    def trim(self) -> None:
        """Close connections without a request while there are too many; to be called every second."""
        while len(self.open) > self.options.max_connections and self._close_one():
            pass

    def too_many_requests(self) -> bool:
        """Whether more connections than allowed have a request. The others may have SPARE_CONNECTIONS more."""
        without = sum(map(len, (self.left, self.fresh, self.begun, self.waiting, self.lingering)))
        return len(self.open) - without > self.options.max_connections

    def _close_one(self) -> bool:
        """Close a connection without a request, preferably the oldest that its client has ended. The next choices have no bytes
        that wait to be read: the oldest of the largest of the groups fresh, begun and waiting, and at last of lingering. Returns
        False if none can be closed."""
        now = time.monotonic()
        latest = now - GRACE_S
        groups = sorted(((self.fresh, latest), (self.begun, latest), (self.waiting, now)), key=lambda group: -len(group[0]))
        looked_at = ((one, since) for group, since in (*groups, (self.lingering, now)) for one in islice(group, MOST_LOOKED_AT))
        silent = (one for one, since in looked_at if one.since <= since and not one.transport.asked)
        return self._drop(next(chain(self.left, silent), None))

    def _close_late(self) -> bool:
        """Close an unfinished TLS handshake, so that newcomers do not wait for many clients that stall. Of the oldest in the
        larger of the groups fresh and begun, a stranger's comes first, then one of the owner with the most connections. Returns
        False if all are too young."""
        latest, larger = time.monotonic() - TURN_S, max(self.begun, self.fresh, key=len)
        late = [one for one in islice(larger, MOST_LOOKED_AT) if one.since <= latest and one.transport.handshaking]
        owners = {one: self.asker_of(one) for one in late}
        return self._drop(max(late, key=lambda one: (owners[one].group != KNOWN, self._owned[owners[one].name]), default=None))

    def _drop(self, connection: Connection | None) -> bool:
        if connection is not None:
            self.metrics.refused("max_connections")
            self.remove(connection)
            connection.abort()
        return connection is not None

    def close_another(self, connection: Connection) -> bool:
        """Close another connection with a 503, so that this one, which has a request, may stay. It is the newest of the owner
        with the most connections. Returns False if that owner has at most one connection more than this one's, or if all its
        answers have begun."""
        largest, count = self._owned.most_common(1)[0]
        if largest == connection.asker.name or count <= self._owned[connection.asker.name] + 1:
            return False
        for other in reversed(self.open):
            if other.asker.name == largest and not other.is_answering:
                self.remove(other)
                other.refuse(too_many_connections())
                return True
        return False

    def advance(self, connection: Connection) -> None:
        """The first bytes have been read, or the handshake is complete: the first headers are next."""
        if connection in self.fresh or connection in self.begun:
            self.busy(connection)
            self.begun[connection] = None
            connection.since = time.monotonic()

    def understood(self, connection: Connection) -> None:
        """An answer is complete: the connection waits for its next request."""
        if connection in self.open:
            self.busy(connection)
            self.waiting[connection] = None

    def ended(self, connection: Connection) -> None:
        """The client has ended its side before its next request was read."""
        if connection in self.fresh or connection in self.begun or connection in self.waiting:
            self.busy(connection)
            self.left[connection] = None

    def busy(self, connection: Connection) -> None:
        """A request has arrived, or the connection is about to end."""
        for group in (self.left, self.fresh, self.begun, self.waiting):
            group.pop(connection, None)

    def linger(self, connection: Connection) -> None:
        """Handle the end of the last answer, which the client may not have read yet."""
        if connection in self.open:
            self.lingering[connection] = None

    def own(self, connection: Connection, asker: Asker) -> None:
        """Set the owner of a connection, whose request is admitted. TLS handshakes from its address are the owner's, too."""
        if connection in self.open:
            self._disown(connection)
            self._owned[asker.name] += 1
            self._admitted.setdefault(connection.address, {})[connection] = asker._replace(group=KNOWN)
        connection.asker = asker

    def asker_of(self, connection: Connection) -> Asker:
        """The owner of the work that the next bytes of a TLS connection cause."""
        admitted = self._admitted.get(connection.address)
        if admitted and (connection in self.fresh or connection in self.begun):
            return next(reversed(admitted.values()))
        return connection.asker

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
            admitted = self._admitted.get(connection.address, {})
            if admitted.pop(connection, None) and not admitted:
                del self._admitted[connection.address]
        self.busy(connection)
        self.lingering.pop(connection, None)
        self.unread.release(connection)

    def start(self, task: "asyncio.Task[None]") -> None:
        """Keep a request's task until it ends."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
