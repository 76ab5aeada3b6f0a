"""Writes of an answer that go out together: each one costs a system call, and wakes the client."""

import asyncio


class HeldWrites:
    """A transport for uvicorn's cycle, which writes head, body and end one by one. From hold() to release() what is written is
    kept, and then goes out in one piece."""

    __slots__ = ("_kept", "_transport")

    def __init__(self, transport: asyncio.Transport):
        self._transport = transport
        self._kept: list[bytes] | None = None

    def hold(self) -> None:
        """Keep what comes, until release() or close()."""
        if self._kept is None:
            self._kept = []

    def write(self, data: bytes) -> None:
        if self._kept is None:
            self._transport.write(data)
        else:
            self._kept.append(data)

    def release(self) -> None:
        """Let out what was kept, and what comes from now on at once. Nothing where the client has left meanwhile: uvloop refuses
        to write then."""
        kept, self._kept = self._kept, None
        if kept and not self._transport.is_closing():
            self._transport.write(b"".join(kept))

    def close(self) -> None:
        self.release()
        self._transport.close()

    def is_closing(self) -> bool:
        return self._transport.is_closing()
