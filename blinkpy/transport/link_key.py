"""The key that front ends and an engine share, with which each proves to the other, in a handshake, that it belongs to it.

A proof is an HMAC-SHA256 (RFC 2104) over who speaks, the engine's nonce and all that was said so far, so a proof of one
handshake, side or message is none of another.
"""

import hashlib
import hmac
import os
import stat

from blinkpy.config import ConfigError

LEAST, MOST = 32, 1024  # bytes of a key
FILE_MOST = MOST + 2  # with a line break
FRONT_END, ENGINE = b"blinkpy front end", b"blinkpy engine"
PROOF_DIGITS = 2 * hashlib.sha256().digest_size
MAKE_ONE = "head -c 32 /dev/urandom | base64 > FILE; chmod 600 FILE"


class LinkKey:
    """A key. secret: LEAST to MOST bytes."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def proof(self, side: bytes, nonce: bytes, *said: bytes) -> bytes:
        """What a side, FRONT_END or ENGINE, puts in front of its line. nonce: the engine's; said: the lines so far, its own the
        last one. Each ends with its only newline, so no two sequences are the same bytes."""
        return hmac.new(self._secret, b"\0".join((side, nonce, b"".join(said))), hashlib.sha256).hexdigest().encode()

    def accepts(self, proof: bytes, side: bytes, nonce: bytes, *said: bytes) -> bool:
        """Whether it is the proof of these; in constant time."""
        return hmac.compare_digest(proof, self.proof(side, nonce, *said))


def read_link_key(path: str) -> LinkKey:
    """The key in a file, but for line breaks at its end. Raises ConfigError, also for a file that others may read or change."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(f"{path} is not a file")
            secret = file.read(FILE_MOST).rstrip(b"\r\n")
    except OSError as error:
        raise ConfigError(f"can't read the key {path}: {error.strerror}") from error
    if status.st_mode & (stat.S_IWGRP | stat.S_IRWXO):
        raise ConfigError(f"the key {path} is accessible to other users; run chmod 600 {path}")
    length = len(secret) if status.st_size <= FILE_MOST else status.st_size
    if not LEAST <= length <= MOST:
        raise ConfigError(f"{path} has {length} bytes, but a key has {LEAST} to {MOST}; to make one: {MAKE_ONE}")
    return LinkKey(secret)
