"""Cross-origin requests: which other origins' pages may read answers in a browser (CORS, as in the Fetch standard)."""

from blinkpy.config import AccessOptions, listed

Headers = list[tuple[bytes, bytes]]
MAX_AGE_S = 600  # for which browsers may keep the answer to a preflight request
# `*` does not cover this header: browsers require it by name.
ALWAYS_NAMED = "authorization"


class CrossOrigin:
    """Headers for cross-origin requests by the options; by default, other origins can't read answers."""

    def __init__(self, options: AccessOptions):
        self._origins = frozenset(entry.encode() for entry in listed(options.allowed_origins, "allowed_origins"))
        self._credentials = options.allow_credentials
        self._methods = listed(options.allowed_methods, "allowed_methods")
        self._headers = listed(options.allowed_headers, "allowed_headers")

    def _origin(self, headers: Headers) -> bytes | None:
        """The request's origin, if it is an allowed one."""
        if not self._origins:
            return None
        origin = next((value for name, value in headers if name == b"origin"), None)
        return origin if origin is not None and (b"*" in self._origins or origin in self._origins) else None

    def headers(self, headers: Headers) -> Headers:
        """Headers of the answer to a request with these headers."""
        origin = self._origin(headers)
        if origin is None:
            return [(b"vary", b"origin")] if self._origins else []
        found = [(b"access-control-allow-origin", origin), (b"vary", b"origin")]
        if self._credentials:
            found.append((b"access-control-allow-credentials", b"true"))
        return [*found, (b"access-control-expose-headers", b"x-request-id, retry-after")]

    def preflight(self, method: str, headers: Headers) -> Headers | None:
        """Further headers of the answer to a preflight request; None for other requests."""
        table = dict(headers)
        asked = table.get(b"access-control-request-method")
        if method != "OPTIONS" or asked is None or self._origin(headers) is None:
            return None
        methods = asked.decode("latin-1") if "*" in self._methods else ", ".join(self._methods)
        wanted = table.get(b"access-control-request-headers", b"").decode("latin-1")
        allowed = (wanted or ALWAYS_NAMED) if "*" in self._headers else ", ".join(self._headers)
        return [
            (b"access-control-allow-methods", methods.encode("latin-1")),
            (b"access-control-allow-headers", allowed.encode("latin-1")),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
        ]
