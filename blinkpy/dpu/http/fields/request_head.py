"""Checks of the head of an HTTP request, in addition to those of the parser: it is valid by RFC 9112, and every proxy understands
it in the same way."""

import re
import struct
from urllib.parse import unquote_to_bytes

from blinkpy.dpu.api_errors import ApiError, bad_request

# uri-host [":" port] of RFC 3986, without commas: a comma shows two joined Host headers.
AUTHORITY = rb"(?:\[[0-9A-Za-z:.~_-]+\]|(?:[0-9A-Za-z._~!$&'()*+;=-]|%[0-9A-Fa-f]{2})*)(?::[0-9]{0,5})?"
HOST = re.compile(AUTHORITY)
ORIGIN = rb"(?:https?://" + AUTHORITY + rb")?"
TARGET = re.compile(ORIGIN + rb"/[^#]*", re.IGNORECASE)
TARGET_PATH = re.compile(ORIGIN + rb"([^?]*)", re.IGNORECASE)
# Paths of RFC 3986, section 3.3. Of plain ones, every segment begins with a letter, a digit, "_", "~" or "-".
PATH = re.compile(rb"(?:/(?:[A-Za-z0-9._~!$&'()*+,;=:@-]|%[0-9A-Fa-f]{2})*)+")
PLAIN_PATH = re.compile(rb"(?:/[A-Za-z0-9_~-][A-Za-z0-9._~-]*)+")
# An escaped unreserved character (section 2.3).
NEEDLESS = re.compile(rb"%(?:2[DE]|3[0-9]|[46][1-9A-F]|[57][0-9A]|5F|7E)", re.IGNORECASE)
SLASH = re.compile(rb"%2f", re.IGNORECASE)
KEPT_SLASH = "%2F"  # of an escaped slash, in a decoded path
SHOWN_PATH = 200  # characters of a path in a message
# In addition to Host and framing, which the parser checks: of duplicates, a proxy might choose another value than this server.
SINGLE = (b"authorization", b"x-api-key", b"content-type", b"origin")
# Protocols other than HTTP that the parser accepts at the end of a request line, with further methods.
OTHER_PROTOCOL = re.compile(rb"(?:RTSP|ICE)/[0-9]\.[0-9]\r?\n")
MOST_OTHERS = 64  # maximum in one piece of bytes: bodies are JSON, which has no such lines
OTHER_METHODS = (
    b"OPTIONS", b"DESCRIBE", b"ANNOUNCE", b"SETUP", b"PLAY", b"PAUSE", b"TEARDOWN", b"GET_PARAMETER", b"SET_PARAMETER",
    b"REDIRECT", b"RECORD", b"FLUSH", b"GET", b"POST", b"SOURCE",
)  # fmt: skip


def _invalid(message: str) -> ApiError:
    return bad_request(message, code="invalid_http")


def check_head(version: str, method: bytes, target: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Raise ApiError for a head that the server does not accept. version: such as "1.1"; headers: names in lower case."""
    if version not in ("1.0", "1.1"):
        raise _invalid("The version must be HTTP/1.1 or HTTP/1.0.")
    if method == b"CONNECT":  # the following bytes would not be HTTP
        raise _invalid("The method CONNECT is not supported: this server is not a proxy.")
    if not TARGET.fullmatch(target) and (method, target) != (b"OPTIONS", b"*"):
        raise _invalid("The request target must be a path, or an http URL without user name and fragment.")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _invalid("The request must have exactly one Host header.")
    if hosts and not HOST.fullmatch(hosts[0]):
        raise _invalid("The Host header must be a host name, optionally with a port.")
    for field in SINGLE:
        if sum(name == field for name, _ in headers) > 1:
            raise _invalid(f"The request must have at most one {field.decode().title()} header.")
    for name, value in headers:
        if name == b"transfer-encoding" and (version == "1.0" or value.lower() != b"chunked"):
            raise bad_request(
                "The only supported transfer coding is chunked, with HTTP/1.1.", code="unsupported_transfer_encoding"
            )


# A client of HTTP/2 that asks for no upgrade begins a connection with these bytes (RFC 9113, section 3.4). It only shows errors
# in frames: an empty SETTINGS, and GOAWAY with HTTP_1_1_REQUIRED and a text.
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n"
_HTTP2_TEXT = b"This server speaks HTTP/1.1: connect without HTTP/2, or through a proxy."
_GOAWAY = struct.pack(">II", 0, 0xD) + _HTTP2_TEXT
HTTP2_REFUSAL = struct.pack(">IBBI", 0, 4, 0, 0)[1:] + struct.pack(">IBBI", len(_GOAWAY), 7, 0, 0)[1:] + _GOAWAY


def check_protocol(head: bytes) -> None:
    """Raise ApiError for a request of RTSP or ICE, which the parser also accepts. head: a request, from its first line."""
    if b" HTTP/" not in head.lstrip(b"\r\n").partition(b"\n")[0]:
        raise not_http()


def not_http() -> ApiError:
    """The error for a request of RTSP or ICE."""
    return _invalid("The protocol must be HTTP.")


def others_within(data: bytes) -> set[tuple[bytes, bytes]]:
    """Methods and targets of possible requests of RTSP and ICE, in bytes where the starts of requests are unknown. It reads the
    bytes at most twice. Raises ApiError for more than MOST_OTHERS.
    """
    found = set()
    for number, match in enumerate(OTHER_PROTOCOL.finditer(data)):
        if number == MOST_OTHERS:
            raise not_http()
        end = _before_spaces(data, match.start())
        start = data.rfind(b" ", 0, end) + 1 if end < match.start() else 0
        if start:
            method_end = _before_spaces(data, start)
            found |= {(method, data[start:end]) for method in OTHER_METHODS if data.endswith(method, 0, method_end)}
    return found


def _before_spaces(data: bytes, end: int) -> int:
    while end and data[end - 1] == ord(" "):
        end -= 1
    return end


def path_of(target: bytes) -> str:
    """The decoded path of a request target that check_head has accepted. An escaped slash stays KEPT_SLASH.

    A path must be in its normal form by RFC 3986, section 6.2.2: no escaped unreserved characters, no dot segments, no empty
    segments except at the end. So a proxy applies its rules to the same path, whether it normalises paths or not. Raises ApiError
    with status 400.
    """
    match = TARGET_PATH.match(target)
    assert match is not None  # the pattern also matches the empty string
    raw = match[1]
    if PLAIN_PATH.fullmatch(raw):
        return raw.decode("ascii")
    if raw == b"*":  # of OPTIONS
        return "*"
    if not PATH.fullmatch(raw):
        raise _invalid_path(raw, "has a character that must be escaped, or an incomplete escape")
    if NEEDLESS.search(raw):
        raise _invalid_path(raw, "escapes a letter, a digit, '-', '.', '_' or '~'")
    try:
        path = unquote_to_bytes(raw).decode()
    except UnicodeDecodeError:
        raise _invalid_path(raw, "is not UTF-8") from None
    if not path.isprintable():
        raise _invalid_path(raw, "has an invisible character")
    *segments, last = path[1:].split("/")  # some proxies treat escaped slashes as separators, so they separate here, too
    if "" in segments or not {".", ".."}.isdisjoint((*segments, last)):
        raise _invalid_path(raw, "has an empty segment, '.' or '..'")
    return unquote_to_bytes(SLASH.sub(b"%252F", raw)).decode()


def _invalid_path(raw: bytes, what: str) -> ApiError:
    shown = raw[:SHOWN_PATH].decode("latin-1")
    return bad_request(f"The path {shown} {what}; send it in its normal form.", code="invalid_path")


def path_below(path: str, root: str) -> str:
    """A path without --root-path, which a proxy keeps or removes."""
    return path.removeprefix(root) if root and (path + "/").startswith(root + "/") else path


def without_slash(path: str, exact: frozenset[str]) -> str:
    """A path without a trailing slash. exact: paths for which a trailing slash is not ignored."""
    bare = path[:-1] if len(path) > 1 and path.endswith("/") else path
    return path if bare in exact else bare
