"""Options of front ends: link, HTTP server, access, logs and metrics."""

import re
from dataclasses import dataclass

from blinkpy.config.option_fields import ALL, ConfigError, listed, option

TRANSPORTS: dict[str, str] = {}
"""The purpose of each transport, by name: blinkpy.transport.contract fills it."""


@dataclass(frozen=True)
class TransportOptions:
    """The connection between separately started engines and front ends."""

    transport: str = option("shm", choices=TRANSPORTS)


@dataclass(frozen=True)
class FrontendOptions:
    """The HTTP server and its limits."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on (0: any free port)", low=0, high=65535)
    workers: int = option(1, "number of front-end processes, each with its own queue pair", low=1, high=64, commands=ALL)
    worker_hang_s: int = option(
        120,
        "maximum time that a worker's event loop may block, in seconds; then the worker is replaced (0: no limit)",
        low=0,
        high=86_400,
    )
    api_key: str = option(
        "", "API key (or set BLINKPY_API_KEY); requests must send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
    )
    max_body_bytes: int = option(
        8 << 20, "maximum size of a request body, in bytes; beyond it the request gets a 413", low=1024, high=1 << 30
    )
    max_body_chunks: int = option(
        1024,
        "maximum number of small chunks in a chunked request body, in addition to one per 256 bytes; "
        "beyond it the request gets a 400",
        low=1,
        high=1 << 30,
    )
    max_body_values: int = option(
        1 << 20, "maximum number of JSON values in a request body; beyond it the request gets a 413", low=64, high=1 << 30
    )
    max_body_depth: int = option(
        128, "maximum nesting depth of a request body's JSON; beyond it the request gets a 400", low=8, high=1000
    )
    max_header_bytes: int = option(
        1 << 16,
        "maximum size of a request's headers, and of its chunk extensions and trailers, in bytes; beyond it "
        "the request gets a 431",
        low=1024,
        high=1 << 24,
    )
    max_header_count: int = option(
        128, "maximum number of headers per request; beyond it the request gets a 431", low=16, high=1 << 16
    )
    max_pipelined: int = option(
        1, "maximum number of pipelined requests that wait on a connection; beyond it the request gets a 400", low=0, high=1024
    )
    header_timeout_s: float = option(
        30.0, "time limit for receiving a request's headers, in seconds; then it gets a 408", low=0.1, high=3600
    )
    body_timeout_s: float = option(
        60.0, "time limit for receiving a request's body, in seconds; then it gets a 408", low=0.1, high=3600
    )
    send_timeout_s: float = option(
        60.0,
        "time without progress while a client reads a response, in seconds, after which the connection is closed",
        low=0.1,
        high=3600,
    )
    close_timeout_s: float = option(
        10.0, "like send_timeout_s, after the last response of a connection has been written, in seconds", low=0.1, high=3600
    )
    body_budget_mib: int = option(
        128,
        "memory limit of a worker for request bodies, in MiB; bodies being received, "
        "and each of the two queues for tokenization, may use half of it",
        low=1,
        high=1 << 16,
    )
    unread_budget_mib: int = option(
        64,
        "memory of a worker for responses that clients have not read yet, in MiB; beyond it the "
        "longest-pending connection is closed",
        low=1,
        high=1 << 16,
    )
    answer_budget_mib: int = option(
        128,
        "memory of a worker for non-streamed responses in progress, in MiB; beyond it the largest one is replaced by a 503",
        low=1,
        high=1 << 16,
    )
    max_preparing: int = option(
        64,
        "maximum requests of a worker that wait for tokenization, separately for bodies up to 64 KiB "
        "and for larger bodies; beyond it the request gets a 429",
        low=1,
        high=1 << 16,
    )
    max_lag_ms: int = option(
        400,
        "maximum time that requests up to 2 KiB wait for a busy worker, in ms; beyond it new POSTs get a 503",
        low=1,
        high=60_000,
    )
    prepare_ms: int = option(
        10_000,
        "CPU time limit for parsing and tokenizing a request above 64 KiB, in ms; then it gets a 413",
        low=10,
        high=3_600_000,
    )
    prepare_mib: int = option(
        1024,
        "memory limit for parsing and tokenizing a request above 64 KiB, in MiB; beyond it the request gets a 413",
        low=64,
        high=1 << 20,
    )
    max_output_backlog: int = option(
        4096, "maximum number of unread events of a stream; beyond it the request is cancelled", low=16, high=1 << 24
    )
    max_output_backlog_mib: int = option(
        8, "maximum unread data of a stream, in MiB; beyond it the request is cancelled", low=1, high=1 << 16
    )
    keep_alive_s: int = option(30, "time for which an idle connection is kept open, in seconds", low=1, high=3600)
    max_connections: int = option(
        4096,
        "maximum number of connections per worker; beyond it the longest-idle connection is closed, or the new one gets a 503",
        low=1,
        high=1 << 20,
    )
    grammar_compile_ms: int = option(
        2000, "CPU time limit for compiling a request's grammar, in ms; then the request gets a 400", low=10, high=60_000
    )
    grammar_compile_mib: int = option(
        128, "memory limit for compiling a request's grammar, in MiB; a worker compiles up to 8 at a time", low=16, high=1 << 16
    )
    response_store_mib: int = option(
        0,
        "memory for conversations of /v1/responses that 'previous_response_id' continues, in MiB (0: off); beyond it, "
        "the least recently used conversation of the key with the most memory is evicted; needs workers 1",
        low=0,
        high=1 << 14,
    )
    response_store_count: int = option(
        1000, "maximum number of stored conversations of a key; the least recently used is evicted", low=1, high=1 << 20
    )
    grammar_cache_mib: int = option(64, "memory of a worker for compiled grammars, in MiB", low=1, high=1 << 14)
    grammar_digits: int = option(
        20, "maximum digits before the decimal point, and after it, of numbers in structured output", low=1, high=400
    )
    shutdown_s: int = option(
        10, "time that running requests have to finish at shutdown, in seconds", low=0, high=3600, commands=ALL
    )
    handover: str = option(
        "",
        "Unix socket through which a newly started front end with the same options takes over the listening address",
        commands="frontend",
    )
    handover_s: int = option(
        600,
        "time that running requests of the old front end have to finish after a handover, in seconds",
        low=1,
        high=86_400,
        commands="frontend",
    )
    log_level: str = option("info", "minimum level of log lines", choices=("debug", "info", "warning", "error"), commands=ALL)


# Patterns of list entries in AccessOptions.
ORIGIN_LISTS = {
    "allowed_origins": (r"\*|[a-z][a-z0-9+.-]*://[^\s/,\"]+", "an origin such as https://example.org, without a path"),
    "allowed_methods": (r"\*|[A-Z]+", "a method in upper case, such as GET"),
    "allowed_headers": (r"\*|[A-Za-z0-9-]+", "the name of a header, such as Content-Type"),
}


@dataclass(frozen=True)
class AccessOptions:
    """Addresses, TLS, cross-origin requests (CORS), API keys and admission."""

    uds: str = option("", "Unix socket to listen on, instead of host and port")
    root_path: str = option("", "URL path under which a proxy exposes the server, such as /llm")
    ssl_certfile: str = option("", "file with the server's certificate chain (PEM); enables HTTPS")
    ssl_keyfile: str = option("", "file with the certificate's private key (default: ssl_certfile)")
    ssl_ca_certs: str = option("", "file with the certificate authorities that may sign client certificates (PEM)")
    ssl_cert_reqs: int = option(0, "client certificates (0: not requested, 1: verified if sent, 2: required)", low=0, high=2)
    allowed_origins: str = option(
        "", "origins whose web pages may call the server: a JSON list, or separated by commas; * allows any"
    )
    allowed_methods: str = option(
        "*", "HTTP methods that web pages of other origins may use: a JSON list, or separated by commas"
    )
    allowed_headers: str = option(
        "*", "request headers that web pages of other origins may send: a JSON list, or separated by commas"
    )
    allow_credentials: bool = option(False, "allow web pages of other origins to send cookies and other credentials")

    def __post_init__(self) -> None:
        root = self.root_path
        if root and not re.fullmatch(r"(/[A-Za-z0-9._~-]+)+", root):
            raise ConfigError(f"root_path must be a path such as /llm, without a trailing /, not {root!r}")
        for name, (pattern, valid) in ORIGIN_LISTS.items():
            for entry in listed(getattr(self, name), name):
                if not re.fullmatch(pattern, entry):
                    raise ConfigError(f"{name}: {entry!r} is not {valid}")
        if self.allow_credentials and "*" in listed(self.allowed_origins, "allowed_origins"):
            raise ConfigError("allow_credentials needs allowed_origins by name, not *")
        for name in ("ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs"):
            if getattr(self, name) and not self.ssl_certfile:
                raise ConfigError(f"{name} needs ssl_certfile")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError("ssl_cert_reqs needs ssl_ca_certs")


@dataclass(frozen=True)
class WatchOptions:
    """Live page, logs, metrics and traces."""

    page: bool = option(True, "serve a live status page at /")
    access_log: bool = option(True, "log each finished request; successful GETs only at level debug")
    log_format: str = option("text", "format of log lines", choices=("text", "json"), commands=ALL)
    metrics_names: str = option(
        "blinkpy", "metric names in /metrics; vllm: vLLM's names in addition", choices=("blinkpy", "vllm")
    )
    otlp_traces_endpoint: str = option("", "URL to which a trace of each request is sent (OTLP over HTTP)")

    def __post_init__(self) -> None:
        url = self.otlp_traces_endpoint
        if url and not url.startswith(("http://", "https://")):
            raise ConfigError(f"otlp_traces_endpoint must begin with http:// or https://, not {url!r}")
