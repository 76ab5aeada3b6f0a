"""send() and recv() that never block, and therefore keep the GIL.

`socket` releases the GIL for each call. While a thread computes, the call gets it back only after the switch interval, 0.5 ms: a
step of 64 streams would take 32 ms.
"""

import contextlib
import ctypes
import socket

MOST_BYTES = 1 << 16  # of receive()
FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
_libc = ctypes.PyDLL(None)
_buffer = (ctypes.c_char * MOST_BYTES)()
_recv = _libc.recv

raw_send = _libc.send
"""The C function: raw_send(descriptor, bytes, len(bytes), FLAGS) returns the number of bytes sent, or -1."""


def send(sock: socket.socket, data: bytes) -> int:
    """Send after a failure of raw_send. Returns the bytes that the kernel took, 0 if its buffer is full. Raises OSError."""
    with contextlib.suppress(BlockingIOError):
        return sock.send(data, FLAGS)
    return 0


def receive(sock: socket.socket, size: int) -> bytes | None:
    """Read at most `size` bytes, up to MOST_BYTES. Returns b"" at the end, None if nothing has arrived. Raises OSError."""
    got: int = _recv(sock.fileno(), _buffer, min(size, MOST_BYTES), FLAGS)
    if got >= 0:
        return ctypes.string_at(_buffer, got)
    with contextlib.suppress(BlockingIOError):
        return sock.recv(min(size, MOST_BYTES), FLAGS)
    return None
