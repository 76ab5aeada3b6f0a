"""The name of words by their content."""

import hashlib

from blinkpy.queues.array_types import Int32

DIGEST_BITS = 62


def digest_of(words: Int32) -> int:
    """DIGEST_BITS of a hash: equal words have equal ones, others different ones."""
    return digest_of_bytes(words.tobytes())


def digest_of_bytes(content: bytes) -> int:
    """The same of bytes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> (64 - DIGEST_BITS)
