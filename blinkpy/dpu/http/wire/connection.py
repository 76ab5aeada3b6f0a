"""One HTTP/1.1 connection.

The gate schedules the transport's reads. The connection parses, within limits, and answers requests in order. A stream's events
go from the poll of the engine's link to the socket without a task in between, which halves the cost of a token.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from blinkpy.dpu.admission.gate import STRANGERS, Asker
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.wire.connections import Connections
from blinkpy.dpu.http.wire.exchange import PIPELINED, SLOW, UNREAD_BODY, Exchange
from blinkpy.dpu.http.wire.request_reader import RequestReader


class Connection(RequestReader):
    """One client's connection."""

    def __init__(self, connections: Connections):
        super().__init__(connections)
        self.loop = asyncio.get_running_loop()
        self.address = self.client = ""  # without and with the port
        self.on_lost: Callable[[], object] | None = None  # called once when the client is gone
        self.disconnected = False
        self.since = time.monotonic()  # time of its acceptance, or of the last step of its handshake, s
        self.write_paused = False
        self._served: Exchange | None = None
        self._writable: asyncio.Future[None] | None = None
        self._asked = False  # whether it has asked the gate for a turn, to answer the next request
        self._read_pauses = 0
        self._unread = 0  # bytes that the client has not read, at the last check
        self._unread_since = 0.0  # the loop's time since which the client has read none of them, s
        self._timer: asyncio.TimerHandle | None = None  # the deadline for headers, or for the next request
        self._idle = False  # whether the timer is for the next request

    # ---- the transport ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        name = transport.peer
        self.address, self.client = (name[0], f"{name[0]}:{name[1]}") if isinstance(name, tuple) and name else ("unix", "unix")
        self.asker = Asker(self.address, 1.0, STRANGERS)  # the owner of the next request's work
        self._unread_since = self.loop.time()
        self.all.enter(self)
        self._set_timer(self.options.header_timeout_s, self._give_up_headers)

    def client_ended(self) -> None:
        """Handle the end of the client's data. If a request waits for its answer, the client has disconnected. Otherwise the
        unread bytes may be a last request, whose answer the client still reads. They are read after all other connections' bytes.
        """
        if self.pending:
            self.transport.abort()
        else:
            self.all.ended(self)

    def connection_lost(self) -> None:
        self.disconnected = True
        self.all.remove(self)
        self._stop_timer()
        self._disconnect()
        self.resume_writing()
        self.pending.clear()  # breaks a cycle of references, so that no garbage collection is needed
        self.parser = self.exchange = self._served = None
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def data_received(self, data: bytes) -> None:
        """Parse and answer, in a turn of the gate."""
        self._serve()
        if not self.transport.is_closing():
            self.feed(data)
            self._serve()

    def pause_writing(self) -> None:
        """Called by the transport: the client reads too slowly."""
        self.write_paused = True
        self.pause_reading(SLOW)

    def resume_writing(self) -> None:
        self.write_paused = False
        writable, self._writable = self._writable, None
        if writable is not None and not writable.done():
            writable.set_result(None)
        if not self.disconnected:
            self.resume_reading(SLOW)
            self._ask_turn()

    async def writable(self) -> None:
        """Wait until the client has read most of the written data, or has disconnected."""
        while self.write_paused and not self.disconnected:
            if self._writable is None:
                self._writable = self.loop.create_future()
            await self._writable

    def pause_reading(self, reason: int) -> None:
        """Read nothing more from the client until `resume_reading` for the same reason."""
        self.transport.pause_reading()
        self._read_pauses |= reason

    def resume_reading(self, reason: int) -> None:
        paused = self._read_pauses
        self._read_pauses &= ~reason
        if paused == reason:
            self.transport.resume_reading()

    # ---- headers -------------------------------------------------------------------------------------------------

    def await_headers(self) -> None:
        if self in self.all.fresh:
            self.all.advance(self)
        if self._timer is None or self._idle:
            self._idle = False
            self._set_timer(self.options.header_timeout_s, self._give_up_headers)

    def headers_arrived(self) -> None:
        self.all.busy(self)
        self._stop_timer()

    # ---- turns ------------------------------------------------------------------------------------------------------

    def _ask_turn(self) -> None:
        """Ask the gate for a turn to answer the next request, if its head is complete."""
        if not self._asked and not self.disconnected and self.pending and self._served is None:
            self._asked = True
            self.all.gate.ask(self.asker, self._turn, later=True)

    def _turn(self) -> None:
        self._asked = False
        self._serve()

    def _serve(self) -> None:
        """Answer the requests whose heads have arrived, in order, until an answer needs a task."""
        while self.pending and self._served is None and not self.write_paused and not self.transport.is_closing():
            self._served = self.pending[0]
            self.all.app.begin(self._served)

    def answered(self, exchange: Exchange) -> None:
        """Continue after the answer to the current request, which has been written."""
        self.all.answered += 1
        if self.disconnected or self._served is not exchange:
            return
        self.pending.popleft()
        self._served = None
        self.hold_unread()
        if not exchange.keep_alive:
            self.transport.close()
            self.all.linger(self)
            return
        self.resume_reading(UNREAD_BODY)
        if len(self.pending) <= 1:
            self.resume_reading(PIPELINED)
        if not self.pending:
            self.all.understood(self)
            # Answered before the end of the request: the rest and the next request have a deadline.
            self._idle = self.in_headers
            if self._idle:
                self._set_timer(self.options.keep_alive_s, self.transport.close)
            else:
                self._set_timer(self.options.header_timeout_s, self._give_up_headers)
        self._ask_turn()

    # ---- ends -------------------------------------------------------------------------------------------------------

    def refuse(self, error: ApiError) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        if error.limit is not None:
            self.all.metrics.refused(error.limit)
        if not self.is_answering:
            self._disconnect()
            refused = Exchange(self, b"GET", "/", "1.1", [] if self.between else self.headers)
            refused.keep_alive = False
            refused.write_error(error)
        self.transport.close()

    def hold_unread(self) -> None:
        """Count the written data that the client has not read yet, and that this process therefore holds."""
        unread = self.transport.get_write_buffer_size()
        if unread:
            self.all.unread.hold(self, unread, lambda error: self.abort(), self.asker.name)

    @property
    def is_answering(self) -> bool:
        """Whether an answer has begun."""
        return any(exchange.started for exchange in self.pending)

    def retire(self) -> None:
        """Close after the last pending answer. If it has begun, do not: its headers have permitted another request."""
        if self.pending and not self.pending[-1].started:
            self.pending[-1].keep_alive = False

    def shut_down(self) -> None:
        """Close now, or after the current answer."""
        if not self.pending:
            self.transport.close()
        else:
            self.pending[-1].keep_alive = False

    def end_if_stuck(self, now: float) -> None:
        """Abort a connection whose client does not read the rest of an answer. To be called often. now: the loop's time."""
        unread, closing = self.transport.get_write_buffer_size(), self.transport.is_closing()
        streaming = self._served is not None and not closing  # streams have a separate limit
        if not unread:
            self.all.unread.release(self)
        if streaming or unread < self._unread or not (unread or closing):
            self._unread_since = now
        self._unread = unread
        limit = "close_timeout_s" if closing else "send_timeout_s"
        if now - self._unread_since > getattr(self.options, limit):
            self.all.metrics.refused(limit)
            self.abort()

    def abort(self) -> None:
        """Close the connection immediately, dropping unsent data."""
        self.all.busy(self)
        self._disconnect()
        self.transport.abort()

    def _disconnect(self) -> None:
        """Notify the requests that the client has disconnected."""
        for exchange in self.pending:
            exchange.disconnect()

    def _set_timer(self, seconds: float, call: Callable[[], object]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, call)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up_headers(self) -> None:
        """Close, because headers did not arrive in time. A client that has sent a part of them gets an answer."""
        self.all.metrics.refused("header_timeout_s")
        if self.in_headers and self.header_bytes:
            seconds = self.options.header_timeout_s
            self.refuse(ApiError(408, f"The headers did not arrive within {seconds:g} s.", code="timeout"))
        else:
            self.transport.close()
