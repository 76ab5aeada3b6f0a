"""The kinds of work that attacks draw: the front end's table (`blinkpy/dpu/admission/work_kinds.py`), each path of
the API, and the shapes of bodies and answers that cost most per byte."""

from typing import Any

from blinkpy.dpu.admission.work_kinds import ENGINE, LOOP, MEMORY, PROCESS, SOCKETS, THREAD, WORK_KINDS, WorkKind
from blinkpy.dpu.http.endpoints import ENDPOINTS

LARGEST = 8_000_000  # bytes of a body, just below --max-body-bytes
TEXT = {"prompt": "a", "max_tokens": 1}
STREAM = {"prompt": "a", "max_tokens": 1000, "stream": True, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}


def _completion(name: str, resource: str, how: str, more: dict[str, Any], grows: str = "") -> WorkKind:
    return WorkKind(name, resource, how, True, "POST", "/v1/completions", {**TEXT, **more}, grows)


BARE = tuple(  # requests without a body
    WorkKind(f"{endpoint.method} {endpoint.path}", LOOP, endpoint.answer, not endpoint.open, endpoint.method, endpoint.path)
    for endpoint in ENDPOINTS
    if endpoint.method != "POST"
)
BODIES = (
    _completion("huge request", PROCESS, "send up to 8 MB", {"prompt": "word " * 40_000}, "prompt"),
    _completion("token ids", LOOP, "send a prompt as token ids", {"prompt": [7]}, "prompt"),
    _completion("prompts", ENGINE, "send several prompts", {"prompt": ["a"]}, "prompt"),
    _completion("stop strings", LOOP, "send long stop strings", {"stop": ["x" * 60] * 4}),
    _completion("stop ids", LOOP, "send stop ids", {"stop_token_ids": [7] * 16}),
    _completion("biases", THREAD, "send token rules", {"logit_bias": {"7": 1}}, "logit_bias"),
    _completion("banned words", THREAD, "send words to ban", {"bad_words": ["the sea"] * 16}, "bad_words"),
    _completion("unknown fields", LOOP, "send fields that do not exist", {"metadata": {"7": "x"}}, "metadata"),
    _completion("empty lists", PROCESS, "send many empty lists", {"prompt": [[]]}, "prompt"),
    _completion("nesting", LOOP, "send nested values", {"prompt": [[[[[[[[]]]]]]]]}, "prompt"),
    _completion("escapes", LOOP, "send escaped characters", {"prompt": "\u0001\u00e9\ud83d\ude00"}, "prompt"),
    _completion("regular expression", PROCESS, "compile a slow one", {"structured_outputs": {"regex": "(a|b)*a(a|b){14}"}}),
    _completion("schema", PROCESS, "compile a schema", {"structured_outputs": {"json": SCHEMA}}),
    _completion("choices", PROCESS, "compile a list", {"structured_outputs": {"choice": ["yes"]}}, "structured_outputs"),
    WorkKind("messages", THREAD, "send a long chat", True, "POST", "/v1/chat/completions", CHAT, "messages"),
    WorkKind("tools", THREAD, "send many tools", True, "POST", "/v1/chat/completions", {**CHAT, "tools": [TOOL]}, "tools"),
    WorkKind(
        "content parts", THREAD, "send a message of many parts", True, "POST", "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "max_tokens": 1}, "messages",
    ),
    WorkKind("count", THREAD, "count input tokens", True, "POST", "/v1/responses/input_tokens", {"input": "word "}, "input"),
)  # fmt: skip
ANSWERS = (
    _completion("streams with biases", ENGINE, "stream with its own token rules", {**STREAM, "logit_bias": {"7": 1}}),
    _completion("streams with grammars", ENGINE, "stream with its own grammar",
                {**STREAM, "structured_outputs": {"regex": "[a-z]{1500}"}}),
    _completion("all slots", ENGINE, "ask for many choices", {"prompt": ["a", "b"], "n": 1, "max_tokens": 200}, "n"),
    _completion("echo", MEMORY, "have the prompt repeated", {"prompt": "word " * 100, "echo": True, "n": 1}, "n"),
)  # fmt: skip
# Bytes that no body makes (attack_requests.py).
RAW = (
    WorkKind("HTTP/2", LOOP, "speak HTTP/2 from the first byte on", False),
    WorkKind("many headers", LOOP, "send more headers than allowed", False),
    WorkKind("upgrade", LOOP, "offer another protocol", False),
    WorkKind("expectation", SOCKETS, "ask to continue, and send no body"),
    WorkKind("trailers", LOOP, "send trailers and chunk extensions behind a body"),
)
# Bodies of a random field in a random shape (attack_shapes.py), of 1,700 bytes times the size.
ANY_FIELD, ANY_FIELD_BYTES = "*", 1700
FIELDS = tuple(
    WorkKind(f"fields of {endpoint.path}", LOOP, "send any field in any shape", True, "POST", endpoint.path, {}, ANY_FIELD)
    for endpoint in ENDPOINTS
    if endpoint.body is not None
)
KINDS = {kind.name: kind for kind in (*WORK_KINDS, *BARE, *BODIES, *ANSWERS, *RAW, *FIELDS)}
