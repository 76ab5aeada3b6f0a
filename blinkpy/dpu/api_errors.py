"""Errors as OpenAI's API reports them: {"error": {"message", "type", "param", "code"}} with an HTTP status."""

import orjson

TYPES = {  # of other statuses: invalid_request_error
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    502: "server_error",
    503: "service_unavailable",
}
ANTHROPIC_TYPES = {  # of other statuses: invalid_request_error, or api_error from 500
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
MAX_MESSAGE = 1000  # characters


class ApiError(Exception):
    """An HTTP response that reports an error.

    status: HTTP status.
    param: the faulty parameter of the request.
    code: a name of the error for programs.
    retry_s: seconds after which the same request may succeed, if that depends on time.
    limit: the option whose limit was exceeded.
    allow: the permitted methods, for status 405.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_s: int = 1,
        limit: str | None = None,
        allow: str = "",
    ):
        super().__init__(message)
        self.limit, self.allow = limit, allow
        self.status = status
        self.message = message[:MAX_MESSAGE]
        self.param = param
        self.code = code
        self.retry_s = retry_s

    def again(self) -> "ApiError":
        """A copy to raise. A raised exception refers to the frames that it passed through, so raising a
        shared error would keep its request in memory.
        """
        where = {"param": self.param, "code": self.code, "limit": self.limit}
        return ApiError(self.status, self.message, **where, retry_s=self.retry_s, allow=self.allow)

    def body(self) -> bytes:
        """The JSON object. Lone surrogates, which the message may quote from the client, are replaced."""
        message = self.message.encode("utf-8", "replace").decode()
        param = None if self.param is None else self.param.encode("utf-8", "replace").decode()
        kind = TYPES.get(self.status, "invalid_request_error")
        return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": self.code}})


def anthropic_error(error: ApiError, request_id: str = "") -> bytes:
    """The JSON object of an error in the form of Anthropic's API."""
    kind = ANTHROPIC_TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    message = error.message.encode("utf-8", "replace").decode()
    body = {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id or None}
    return orjson.dumps(body)


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request is faulty."""
    return ApiError(400, message, param=param, code=code)


def busy(message: str) -> ApiError:
    """A 429: no capacity at present."""
    return ApiError(429, f"The server is busy: {message}.", code="no_free_slot")


def unavailable(message: str, retry_s: int = 1) -> ApiError:
    """A 503: no engine, or it accepts no requests. retry_s: see ApiError."""
    return ApiError(503, message, code="engine_unavailable", retry_s=retry_s)


def shutting_down() -> ApiError:
    """A 503: this server shuts down; another server may answer."""
    return ApiError(503, "The server is shutting down; try again.", code="shutting_down")


def overloaded() -> ApiError:
    """A 503: this worker's event loop is late."""
    message = "The server is overloaded: it can't start requests within max_lag_ms; try again."
    return ApiError(503, message, code="max_lag_ms", limit="max_lag_ms")


def internal_error() -> ApiError:
    """A 500: an error of the server; the log has details."""
    return ApiError(500, "Internal server error: the server's log has the reason.", code="internal_error")


def sentence(error: Exception) -> str:
    """An error's text as a sentence."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
