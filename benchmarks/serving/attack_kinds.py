"""The kinds of work that a client can cause in a worker, as attacks draw them, and the bodies that cost most per byte."""

from typing import Any, NamedTuple

from blinkpy.dpu.http.endpoints import ENDPOINTS


class WorkKind(NamedTuple):
    """One kind of work, and a request that causes it."""

    name: str
    resource: str  # loop, thread, process, engine, memory or sockets
    how: str
    needs_key: bool = True  # if the server has keys
    method: str = "POST"
    path: str = ""  # "": a connection without a whole request
    body: dict[str, Any] | None = None
    grows: str = ""  # the field that makes the body large: a text, a list, an object or a number


LARGEST = 8_000_000  # bytes of a body, just below --max-body-bytes
TEXT = {"prompt": "a", "max_tokens": 1}
STREAM = {"prompt": "a", "max_tokens": 1000, "stream": True, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def _completion(name: str, resource: str, how: str, more: dict[str, Any], grows: str = "") -> WorkKind:
    return WorkKind(name, resource, how, True, "POST", "/v1/completions", {**TEXT, **more}, grows)


CONNECTIONS = (
    WorkKind("accept", "sockets", "open a connection and send nothing", False),
    WorkKind("handshake", "loop", "begin a TLS handshake, and end it or not", False),
    WorkKind("head", "loop", "send headers, whole or in pieces", False, "GET", "/livez"),
    WorkKind("invalid", "loop", "send bytes that are not HTTP", False),
    WorkKind("unknown path", "loop", "request a path that does not exist", False, "GET", "/nothing"),
    WorkKind("wrong key", "loop", "send a request with a wrong key", False, "POST", "/v1/completions", TEXT),
    WorkKind("preflight", "loop", "ask as a browser does before a cross-origin request", False, "OPTIONS", "/v1/completions"),
)
GETS = tuple(
    WorkKind(f"GET {endpoint.path}", "loop", endpoint.answer, not endpoint.open, "GET", endpoint.path)
    for endpoint in ENDPOINTS
    if endpoint.method == "GET"
)
BODIES = (
    _completion("short request", "loop", "send a short prompt", {}, "prompt"),
    _completion("middling request", "thread", "send 2 to 64 KiB", {"prompt": "word " * 1000}, "prompt"),
    _completion("large request", "process", "send more than 64 KiB", {"prompt": "word " * 40_000}, "prompt"),
    _completion("token ids", "loop", "send a prompt as token ids", {"prompt": [7]}, "prompt"),
    _completion("prompts", "engine", "send several prompts", {"prompt": ["a"]}, "prompt"),
    _completion("stop strings", "loop", "send long stop strings", {"stop": ["x" * 60] * 4}),
    _completion("stop ids", "loop", "send stop ids", {"stop_token_ids": [7] * 16}),
    _completion("biases", "thread", "send token rules", {"logit_bias": {"7": 1}}, "logit_bias"),
    _completion("banned words", "thread", "send words to ban", {"bad_words": ["the sea"] * 16}, "bad_words"),
    _completion("unknown fields", "loop", "send fields that do not exist", {"metadata": {"7": "x"}}, "metadata"),
    _completion("empty lists", "process", "send many empty lists", {"prompt": [[]]}, "prompt"),
    _completion("nesting", "loop", "send nested values", {"prompt": [[[[[[[[]]]]]]]]}, "prompt"),
    _completion("escapes", "loop", "send escaped characters", {"prompt": "\u0001\u00e9\ud83d\ude00"}, "prompt"),
    _completion("regular expression", "process", "compile a slow one", {"structured_outputs": {"regex": "(a|b)*a(a|b){14}"}}),
    _completion("schema", "process", "compile a schema", {"structured_outputs": {"json": SCHEMA}}),
    _completion("choices", "process", "compile a list", {"structured_outputs": {"choice": ["yes"]}}, "structured_outputs"),
    WorkKind("messages", "thread", "send a long chat", True, "POST", "/v1/chat/completions", CHAT, "messages"),
    WorkKind("tools", "thread", "send many tools", True, "POST", "/v1/chat/completions", {**CHAT, "tools": [TOOL]}, "tools"),
    WorkKind(
        "content parts", "thread", "send a message of many parts", True, "POST", "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 1}, "messages",
    ),
    WorkKind("response", "loop", "ask for a response", True, "POST", "/v1/responses", {"input": "a", "max_output_tokens": 1}),
    WorkKind("count", "thread", "count input tokens", True, "POST", "/v1/responses/input_tokens", {"input": "word "}, "input"),
    WorkKind("tokenize", "thread", "convert text to tokens", True, "POST", "/tokenize", {"prompt": "word "}, "prompt"),
    WorkKind("detokenize", "thread", "convert tokens to text", True, "POST", "/detokenize", {"tokens": [7]}, "tokens"),
)  # fmt: skip
ANSWERS = (
    _completion("stream", "engine", "open a stream", STREAM),
    _completion("streams with biases", "engine", "stream with its own token rules", {**STREAM, "logit_bias": {"7": 1}}),
    _completion("streams with grammars", "engine", "stream with its own grammar",
                {**STREAM, "structured_outputs": {"regex": "[a-z]{1500}"}}),
    _completion("all slots", "engine", "ask for many choices", {"prompt": ["a", "b"], "n": 1, "max_tokens": 200}, "n"),
    _completion("log probabilities", "memory", "keep them until the answer ends",
                {"max_tokens": 1000, "ignore_eos": True, "logprobs": 20, "n": 1}, "n"),
    _completion("prompt scores", "memory", "have prompts scored", {"prompt": ["word " * 100], "prompt_logprobs": 20}, "prompt"),
    _completion("echo", "memory", "have the prompt repeated", {"prompt": "word " * 100, "echo": True, "n": 1}, "n"),
)  # fmt: skip
KINDS = {kind.name: kind for kind in (*CONNECTIONS, *GETS, *BODIES, *ANSWERS)}
