"""The id of an HTTP request: the client's X-Request-Id, or a new one. It is in the answer, in logs and in traces."""

import random
import re
import secrets

HEADER = b"x-request-id"
# Nothing that could end a line, a quoted text or a header: ids go into logs as they are.
ACCEPTED = re.compile(rb"[A-Za-z0-9._:/+=@~-]{1,128}")
# Ids are unique, not secret: a system call for each would cost more than the rest of a small answer.
_IDS = random.Random(secrets.token_bytes(32))


def request_id_of(headers: list[tuple[bytes, bytes]]) -> tuple[str, bool]:
    """The id, and whether it is the client's: one that is not ACCEPTED is replaced."""
    for name, value in headers:
        if name == HEADER and ACCEPTED.fullmatch(value):
            return value.decode(), True
    return f"{_IDS.getrandbits(96):024x}", False
