"""Bodies with any field of the API in any shape, valid or not, of a given number of bytes."""

import json
import random
from collections.abc import Callable
from typing import Any

from blinkpy.dpu.http.endpoints import ENDPOINTS

FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NEEDED: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{"role": "user", "content": "a"}]},
    "prompt": {"prompt": "a"},
    "input": {"input": "a"},
    "tokens": {"tokens": [7]},
}
CAPS: dict[str, dict[str, Any]] = {"max_tokens": {"max_tokens": 1}, "max_output_tokens": {"max_output_tokens": 1}}


def _deep(inner: Any, wrap: Callable[[Any], Any], depth: int) -> Any:
    for _ in range(min(depth, 400)):  # JSON writers recurse
        inner = wrap(inner)
    return inner


# A value of about this many bytes.
SHAPES: dict[str, Callable[[int], Any]] = {
    "text": lambda size: "word " * (size // 5),
    "one word": lambda size: "a" * size,
    "control characters": lambda size: "\1" * (size // 6),
    "wide characters": lambda size: "\U0001f600" * (size // 12),
    "special tokens": lambda size: "<|end|>" * (size // 7),
    "heads of special tokens": lambda size: "<|en" * (size // 4),
    "blanks": lambda size: " \n" * (size // 3),
    "number": lambda size: 10 ** min(size, 300),
    "equal numbers": lambda size: [7] * (size // 2),
    "different numbers": lambda size: list(range(size // 5)),
    "fractions": lambda size: [0.1] * (size // 4),
    "equal texts": lambda size: ["a"] * (size // 4),
    "different texts": lambda size: [f"w {at}" for at in range(size // 9)],
    "lists": lambda size: [[]] * (size // 3),
    "objects": lambda size: [{}] * (size // 3),
    "entries": lambda size: {str(at): 1 for at in range(size // 8)},
    "null entries": lambda size: {f"k{at}": None for at in range(size // 12)},
    "deep lists": lambda size: _deep([], lambda inner: [inner], size // 2),
    "deep objects": lambda size: _deep({}, lambda inner: {"a": inner}, size // 6),
    "messages": lambda size: [{"role": "user", "content": "a"}] * (size // 32),
    "talks": lambda size: [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}] * (size // 68),
    "messages of parts": lambda size: [{"role": "user", "content": [{"type": "text", "text": "a"}] * (size // 27)}],
    "calls": lambda size: [{"role": "assistant", "tool_calls": [CALL] * (size // 75)}],
    "messages with marks": lambda size: [{"role": "user", "content": "<|end|><|" * (size // 9)}],
    "functions": lambda size: [FUNCTION] * (size // 70),
    "different functions": lambda size: [
        {"type": "function", "function": {"name": f"f{at}", "parameters": {"type": "object", "properties": {"a": {}}}}}
        for at in range(size // 95)
    ],
    "items": lambda size: [{"type": "message", "role": "user", "content": "a"}] * (size // 50),
    "call items": lambda size: [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}] * (size // 70),
    "schema": lambda size: {"type": "object", "properties": {f"p{at}": {"type": "string"} for at in range(size // 26)}},
    "schemas in a list": lambda size: {"anyOf": [{"type": "string", "maxLength": at} for at in range(size // 36)]},
    "regular expression": lambda size: {"regex": "(a|b)*" * (size // 6)},
    "choices": lambda size: {"choice": [f"w{at}" for at in range(size // 8)]},
    "response format": lambda size: {
        "type": "json_schema",
        "json_schema": {"name": "a", "schema": {"properties": {f"p{at}": {} for at in range(size // 9)}}},
    },
}
FIELDS = {endpoint.path: endpoint.body.__struct_encode_fields__ for endpoint in ENDPOINTS if endpoint.body is not None}


def body_of_field(path: str, field: str, shape: str, size: int) -> bytes:
    """A body of at most `size` bytes, unless the least value of the shape is larger."""
    known = FIELDS[path]
    body = {name: value for part in (NEEDED, CAPS) for key, more in part.items() if key in known for name, value in more.items()}
    if path == "/tokenize":
        del body["messages"]
    text, space = b"", size
    for _ in range(100):
        text = json.dumps({**body, field: SHAPES[shape](space)}, separators=(",", ":")).encode()
        if len(text) <= size:
            break
        space = max(1, min(space - 1, space * size // len(text)))
    return text


def random_body(path: str, size: int, rng: random.Random) -> bytes:
    """A body of a random field of a path, in a random shape."""
    return body_of_field(path, rng.choice(FIELDS[path]), rng.choice(sorted(SHAPES)), size)
