"""Readiness of all sockets of a server: one epoll set, which the event loop watches as one descriptor.

An event costs a few microseconds: it only marks its socket as ready. The gate decides when the socket is read.
"""

import asyncio
import select
from collections.abc import Callable

MOST_EVENTS = 256  # in a turn of the event loop
STREAM = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
HANG_UP = select.EPOLLERR | select.EPOLLHUP


class SocketEvents:
    """Notifies the owner of each ready socket. Create it on the running event loop."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._calls: dict[int, Callable[[int], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._take)

    def add(self, number: int, call: Callable[[int], None], mask: int) -> None:
        """Watch a descriptor. call: receives its EPOLL* bits; it must neither open sockets nor raise."""
        self._calls[number] = call
        self._epoll.register(number, mask)

    def change(self, number: int, mask: int) -> None:
        """Watch for other events of a descriptor."""
        if number in self._calls:
            self._epoll.modify(number, mask)

    def remove(self, number: int) -> None:
        """Stop watching a descriptor, before it is closed."""
        if self._calls.pop(number, None) is not None:
            self._epoll.unregister(number)

    def close(self) -> None:
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()
        self._calls.clear()

    def _take(self) -> None:
        for number, mask in self._epoll.poll(0, MOST_EVENTS):
            call = self._calls.get(number)
            if call is not None:
                call(mask)
