"""All endpoints, in one table: for the application's routes, /openapi.json, the page /docs, and docs/api.md."""

import html
from functools import cache
from typing import Any, NamedTuple

import orjson

from blinkpy.dpu.http.fields.anthropic_fields import AnthropicBody, CountTokensBody
from blinkpy.dpu.http.fields.body_model import Body, rows, schemas
from blinkpy.dpu.http.fields.chat_fields import ChatBody
from blinkpy.dpu.http.fields.completion_fields import CompletionBody, DetokenizeBody, TokenizeBody
from blinkpy.dpu.http.fields.response_fields import ResponseBody
from blinkpy.version import __version__


class Endpoint(NamedTuple):
    """One path. body: of a POST. posted: of a GET, whether a POST is answered so,
    too, whatever its body."""

    method: str
    path: str
    answer: str
    open: bool = False  # to clients without the key
    body: type[Body] | None = None
    posted: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        """All that are described. A HEAD goes with each GET."""
        return (self.method, "POST") if self.posted else (self.method,)


ENDPOINTS = (
    Endpoint("POST", "/v1/chat/completions", "whole, or streamed as server-sent events", False, ChatBody),
    Endpoint("POST", "/v1/completions", "whole, or streamed", False, CompletionBody),
    Endpoint("POST", "/v1/responses", "whole, or streamed as named events", False, ResponseBody),
    Endpoint(
        "POST",
        "/v1/responses/input_tokens",
        '`{"object": "response.input_tokens", "input_tokens": N}`, even if N exceeds the context',
        False,
        ResponseBody,
    ),
    Endpoint("POST", "/v1/messages", "in Anthropic's form: whole, or streamed as named events", False, AnthropicBody),
    Endpoint("POST", "/v1/messages/count_tokens", '`{"input_tokens": N}`, even if N exceeds the context', False, CountTokensBody),
    Endpoint("POST", "/tokenize", "`count`, `max_model_len`, `tokens` and `token_strs` of a prompt", False, TokenizeBody),
    Endpoint("POST", "/detokenize", "`prompt`: the text of `tokens`", False, DetokenizeBody),
    Endpoint("GET", "/v1/models", "the model, with `max_model_len`"),
    Endpoint("GET", "/v1/models/NAME", "the same"),
    Endpoint("GET", "/version", '`{"version": ...}`'),
    Endpoint(
        "GET",
        "/health",
        "200 while requests are served; 503 while the engine or the queue pair is missing, not ready, silent or draining",
        True,
    ),
    Endpoint("GET", "/livez", "200 as long as the worker answers, also without an engine and while draining", True),
    Endpoint("GET", "/ping", "as `/health`", True, posted=True),
    Endpoint("GET", "/load", '`{"server_load": N}`: requests in flight or waiting for a slot, of all workers', True),
    Endpoint("GET", "/metrics", "Prometheus text, of all workers", True),
    Endpoint("GET", "/", "the live page, with a chat to try; not with `--no-page`", True),
    Endpoint("GET", "/openapi.json", "the tables of this page, as OpenAPI 3.1", True),
    Endpoint("GET", "/docs", "the same as a web page", True),
)
OPEN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.open)
POSTED_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.posted)

_ERROR = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {name: {"type": ["string", "null"]} for name in ("message", "type", "param", "code")},
        }
    },
}
_ERROR_ANSWER = {"description": "an error", "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}}


def _operation(endpoint: Endpoint) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": endpoint.answer,
        "responses": {"200": {"description": endpoint.answer}, "default": _ERROR_ANSWER},
        "security": [] if endpoint.open else [{"key": []}],
    }
    if "NAME" in endpoint.path:
        described["parameters"] = [{"name": "NAME", "in": "path", "required": True, "schema": {"type": "string"}}]
    if endpoint.body is not None:
        schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described


@cache
def openapi(root: str = "") -> bytes:
    """The OpenAPI document. root: the path below which a proxy shows the server."""
    document: dict[str, Any] = {"servers": [{"url": root}]} if root else {}
    bodies = dict.fromkeys(one.body for one in ENDPOINTS if one.body is not None)
    document |= {
        "openapi": "3.1.0",
        "info": {"title": "blinkpy", "version": __version__, "description": "OpenAI's protocol. A field that is null is absent."},
        "paths": {
            one.path.replace("NAME", "{NAME}"): {name.lower(): _operation(one) for name in one.methods} for one in ENDPOINTS
        },
        "components": {
            "schemas": {"Error": _ERROR, **schemas(bodies)},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return orjson.dumps(document)


_STYLE = "body{font:15px sans-serif;max-width:70em;margin:2em auto}table{border-collapse:collapse}td,th{border:1px solid #ccc;"
_STYLE += "padding:.3em .6em;text-align:left;vertical-align:top}summary{cursor:pointer;margin:.6em 0}"


def _rows(*rows: tuple[str, ...]) -> str:
    cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    return "<table>" + "".join(f"<tr>{row}</tr>" for row in cells) + "</table>"


@cache
def page() -> bytes:
    """The same for people: one page of HTML, without scripts and without anything from elsewhere."""
    parts = [f"<h1>blinkpy {__version__}</h1><p>Machines read <a href='openapi.json'>openapi.json</a>.</p>"]
    parts.append(_rows(*((", ".join(one.methods), one.path, "no key" if one.open else "", one.answer) for one in ENDPOINTS)))
    for one in ENDPOINTS:
        if one.body is not None:
            for supported, title in ((True, "fields"), (False, "fields without support, and values that ask for nothing")):
                lines = [(name, row.values, row.default) for name, row in rows(one.body).items() if row.supported == supported]
                parts.append(f"<details><summary>{one.path}: {title}</summary>{_rows(*lines)}</details>" if lines else "")
    head = f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>blinkpy</title><style>{_STYLE}</style></head>"
    return f"{head}<body>{''.join(parts)}</body></html>".encode()
