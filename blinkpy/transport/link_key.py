"""The secret key of a link, by which a front end and an engine authenticate each other in the handshake.

A proof is an HMAC-SHA256 (RFC 2104) over the side, the engine's nonce and all lines so far, so it is valid
only for this handshake, side and message.
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
    """A secret key. secret: LEAST to MOST bytes."""

    def __init__(self, secret: bytes):
        self._secret = secret

    def proof(self, side: bytes, nonce: bytes, *said: bytes) -> bytes:
        """The proof that a side, FRONT_END or ENGINE, sends in front of its line.

        nonce: the engine's nonce.
        said: all lines so far, including this side's line. Each line has a single newline, at its end, so different sequences
        have different bytes.
        """
        return hmac.new(self._secret, b"\0".join((side, nonce, b"".join(said))), hashlib.sha256).hexdigest().encode()

    def accepts(self, proof: bytes, side: bytes, nonce: bytes, *said: bytes) -> bool:
        """Whether the proof is correct for this side, nonce and lines. Takes constant time."""
        return hmac.compare_digest(proof, self.proof(side, nonce, *said))


def read_link_key(path: str) -> LinkKey:
    """The key in a file, without trailing line breaks. Raises ConfigError, also if other users may access the
    file.
    """
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
