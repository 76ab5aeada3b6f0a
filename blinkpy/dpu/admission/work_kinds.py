"""The kinds of work that clients can cause in a worker. `make attack` draws from this table, so it attacks every kind."""

from typing import Any, NamedTuple

LOOP, THREAD, PROCESS, ENGINE, MEMORY, SOCKETS = "loop", "thread", "process", "engine", "memory", "sockets"


class WorkKind(NamedTuple):
    """One kind of work, and a request that causes it."""

    name: str
    resource: str  # the resource that it uses most
    how: str  # how to cause it
    needs_key: bool = True  # if the server has keys
    method: str = "POST"
    path: str = ""  # "": no whole request is needed
    body: dict[str, Any] | None = None
    grows: str = ""  # the field of the body that makes it large: a text, a list, an object or a number


_TEXT = {"prompt": "a", "max_tokens": 1}
_INPUT = {"input": "a", "max_output_tokens": 1}
_MIDDLING, _LARGE = {**_TEXT, "prompt": "word " * 1000}, {**_TEXT, "prompt": "word " * 40_000}

WORK_KINDS = (
    WorkKind("accept", SOCKETS, "open a connection and send nothing", False),
    WorkKind("handshake", LOOP, "begin a TLS handshake, and end it or not", False),
    WorkKind("head", LOOP, "send headers, whole or in pieces", False, "GET", "/livez"),
    WorkKind("invalid", LOOP, "send bytes that are not HTTP", False),
    WorkKind("probe", LOOP, "ask for a small prepared answer", False, "GET", "/health"),
    WorkKind("page", MEMORY, "ask for a large prepared answer, and leave it unread", False, "GET", "/openapi.json"),
    WorkKind("metrics", THREAD, "ask for the metrics of all workers", False, "GET", "/metrics"),
    WorkKind("unknown path", LOOP, "ask for a path that does not exist", False, "GET", "/nothing"),
    WorkKind("wrong key", LOOP, "send a request with a wrong key", False, "POST", "/v1/completions", _TEXT),
    WorkKind("preflight", LOOP, "ask as a browser does before a cross-origin request", False, "OPTIONS", "/v1/completions"),
    WorkKind("models", LOOP, "list the models", True, "GET", "/v1/models"),
    WorkKind("body", MEMORY, "send a body, whole, in chunks or in part", True, "POST", "/v1/completions", _TEXT, "prompt"),
    WorkKind("short request", LOOP, "send a body up to 2 KiB", True, "POST", "/v1/completions", _TEXT),
    WorkKind("middling request", THREAD, "send 2 to 64 KiB", True, "POST", "/v1/completions", _MIDDLING),
    WorkKind("large request", PROCESS, "send more", True, "POST", "/v1/completions", _LARGE),
    WorkKind("tokenize", THREAD, "convert text to tokens", True, "POST", "/tokenize", {"prompt": "word " * 200}, "prompt"),
    WorkKind("detokenize", THREAD, "convert tokens to text", True, "POST", "/detokenize", {"tokens": [7] * 200}, "tokens"),
    WorkKind(
        "grammar", PROCESS, "have a new grammar compiled", True, "POST", "/v1/completions",
        {**_TEXT, "structured_outputs": {"regex": "(a|b)*a(a|b){12}"}},
    ),
    WorkKind(
        "grammar place", ENGINE, "stream with a new grammar", True, "POST", "/v1/completions",
        {"prompt": "a", "max_tokens": 1000, "stream": True, "structured_outputs": {"regex": "a{2000}"}},
    ),
    WorkKind(
        "token rules", ENGINE, "stream with new token rules", True, "POST", "/v1/completions",
        {"prompt": "a", "max_tokens": 1000, "stream": True, "logit_bias": {"7": 1}}, "logit_bias",
    ),
    WorkKind("slots", ENGINE, "ask for many choices", True, "POST", "/v1/completions", {**_TEXT, "n": 64}, "n"),
    WorkKind(
        "stream", ENGINE, "stream, and read slowly or not", True, "POST", "/v1/completions",
        {"prompt": "a", "max_tokens": 1000, "stream": True}, "max_tokens",
    ),
    WorkKind(
        "log probabilities", MEMORY, "keep log probabilities until the answer ends", True, "POST", "/v1/completions",
        {"prompt": "a", "max_tokens": 1000, "logprobs": 20, "n": 8}, "n",
    ),
    WorkKind(
        "prompt scores", MEMORY, "have many prompts scored", True, "POST", "/v1/completions",
        {"prompt": ["word " * 100] * 8, "max_tokens": 1, "prompt_logprobs": 20}, "prompt",
    ),
    WorkKind(
        "chat with tools", THREAD, "send long lists of tools", True, "POST", "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "a"}],
            "max_tokens": 1,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
        },
        "tools",
    ),
    WorkKind("response", LOOP, "ask through /v1/responses", True, "POST", "/v1/responses", _INPUT),
    WorkKind(
        "message", LOOP, "ask through /v1/messages", True, "POST", "/v1/messages",
        {"max_tokens": 1, "messages": [{"role": "user", "content": "a"}]}, "messages",
    ),
)  # fmt: skip
