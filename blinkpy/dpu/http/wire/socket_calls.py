"""send() and recv() that never block, and therefore keep the GIL.

`socket` releases the GIL for each call. While a thread computes, the call gets it back only after the switch interval, 0.5 ms: a
step of 64 streams would take 32 ms.
"""

import ctypes
import errno
import os
import socket

_FLAGS = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
MOST_BYTES = 1 << 16  # of receive()
_libc = ctypes.PyDLL(None, use_errno=True)
_send, _recv = _libc.send, _libc.recv
_send.argtypes = ctypes.c_int, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int
_recv.argtypes = ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_send.restype = _recv.restype = ctypes.c_ssize_t
_buffer = (ctypes.c_char * MOST_BYTES)()
_address = ctypes.addressof(_buffer)


def send(number: int, data: bytes) -> int:
    """Send to a descriptor. Returns the number of bytes that the kernel took, 0 if it has no room. Raises OSError."""
    sent: int = _send(number, data, len(data), _FLAGS)
    if sent < 0:
        _check()
        return 0
    return sent


def receive(number: int, size: int) -> bytes | None:
    """Read at most `size` bytes, up to MOST_BYTES. Returns b"" at the end, None if nothing has arrived. Raises OSError."""
    got = _recv(number, _address, min(size, MOST_BYTES), _FLAGS)
    if got < 0:
        _check()
        return None
    return ctypes.string_at(_address, got)


def _check() -> None:
    """Raise OSError, unless the call would have blocked."""
    code = ctypes.get_errno()
    if code not in (errno.EAGAIN, errno.EINTR):
        raise OSError(code, os.strerror(code))
