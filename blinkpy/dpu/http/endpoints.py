"""All endpoints, in one table: for the application's routes, /openapi.json, the page /docs, and docs/api.md."""

import html
import re
from collections.abc import Iterable
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
    """One path. body: model of a POST's body. posted: whether a POST with any body gets the same answer as the GET."""

    method: str
    path: str
    answer: str
    open: bool = False  # to clients without a key
    body: type[Body] | None = None
    posted: bool = False

    @property
    def methods(self) -> tuple[str, ...]:
        """All documented methods. Each GET also permits a HEAD."""
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
    Endpoint("GET", "/v1/responses/ID", "a response that the server has stored with `--response-store-mib`"),
    Endpoint("DELETE", "/v1/responses/ID", '`{"id": ID, "object": "response", "deleted": true}`'),
    Endpoint("GET", "/v1/responses/ID/input_items", "the input of a stored response, in pages: `limit`, `order`, `after`"),
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
        "200 while requests are served; 503 while the engine or the queue pair is missing, loading, silent or draining",
        True,
    ),
    Endpoint("GET", "/livez", "200 as long as the worker answers, also without an engine and while draining", True),
    Endpoint("GET", "/ping", "as `/health`", True, posted=True),
    Endpoint("GET", "/load", '`{"server_load": N}`: requests in flight or waiting for a slot, of all workers', True),
    Endpoint("GET", "/metrics", "Prometheus text, of all workers", True),
    Endpoint("GET", "/", "the live page: a chat, and figures of the server; not with `--no-page`", True),
    Endpoint("GET", "/openapi.json", "the tables of this page, as OpenAPI 3.1", True),
    Endpoint("GET", "/docs", "the same as a web page", True),
)
OPEN_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.open)
POSTED_PATHS = frozenset(endpoint.path for endpoint in ENDPOINTS if endpoint.posted)

_VARIABLE = re.compile(r"\b[A-Z]+\b")  # of a path
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
    described["parameters"] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _VARIABLE.findall(endpoint.path)
    ]
    if endpoint.body is not None:
        schema = {"$ref": f"#/components/schemas/{endpoint.body.__name__}"}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described


@cache
def openapi(root: str = "") -> bytes:
    """The OpenAPI document. root: the path under which a proxy exposes the server."""
    document: dict[str, Any] = {"servers": [{"url": root}]} if root else {}
    bodies = dict.fromkeys(one.body for one in ENDPOINTS if one.body is not None)
    paths: dict[str, dict[str, Any]] = {}
    for one in ENDPOINTS:
        operations = paths.setdefault(_VARIABLE.sub(r"{\g<0>}", one.path), {})
        operations |= {name.lower(): _operation(one) for name in one.methods}
    document |= {
        "openapi": "3.1.0",
        "info": {"title": "blinkpy", "version": __version__, "description": "OpenAI's protocol. A field that is null is absent."},
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, **schemas(bodies)},
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }
    return orjson.dumps(document)


_STYLE = (
    ":root{color-scheme:light dark}"
    "body{background:Canvas;color:CanvasText;font:15px/1.45 system-ui,sans-serif;max-width:70em;margin:1em auto;padding:0 .75em}"
    "div{overflow-x:auto}table{border-collapse:collapse}td,th{border:1px solid #8886;padding:.3em .6em;text-align:left;"
    "vertical-align:top}td:first-child{font-family:ui-monospace,monospace}summary{cursor:pointer;margin:.6em 0}"
    "h2{overflow-wrap:anywhere}"
    "@media(max-width:48em){table,tbody,tr,td{display:block}tr:first-child{display:none}"
    "tr{border:1px solid #8886;padding:.3em .6em;"
    "margin-bottom:.5em}td{border:0;padding:.1em 0;overflow-wrap:anywhere}td:empty{display:none}"
    "td:first-child{font-weight:600}td[data-head]::before{content:attr(data-head) ': ';opacity:.8}}"
)
_CODE = re.compile(r"`([^`]+)`")
_FIELD_HEADS = ("Field", "Meaning and values", "Default")
_SHORT_HEADS = ("Needs a key", "Default")


def _marked(text: str) -> str:
    """A text as HTML, with its code between backticks marked."""
    return _CODE.sub(r"<code>\1</code>", html.escape(text))


def _table(heads: tuple[str, ...], lines: Iterable[tuple[str, ...]]) -> str:
    """A table. On a narrow screen, each row becomes a block, in which short columns show their heading before the value."""
    head = "".join(f"<th scope='col'>{html.escape(title)}</th>" for title in heads)
    titles = [f" data-head='{html.escape(title)}'" if title in _SHORT_HEADS else "" for title in heads]
    cells = ("".join(f"<td{title}>{_marked(cell)}</td>" for title, cell in zip(titles, line, strict=True)) for line in lines)
    return f"<div><table><tr>{head}</tr>{''.join(f'<tr>{line}</tr>' for line in cells)}</table></div>"


def _fields(endpoint: Endpoint) -> str:
    """The fields of an endpoint, each with its meaning."""
    if endpoint.body is None:
        return ""
    parts = [f"<h2 id='{endpoint.path}'>{endpoint.path}</h2>"]
    for supported, title in ((True, "fields"), (False, "unsupported fields, and their accepted values")):
        lines = [(name, row.values, row.default) for name, row in rows(endpoint.body).items() if row.supported == supported]
        opened = " open" if supported else ""
        parts.append(f"<details{opened}><summary>{title}</summary>{_table(_FIELD_HEADS, lines)}</details>" if lines else "")
    return "".join(parts)


@cache
def page(with_live_page: bool = True) -> bytes:
    """All endpoints as one HTML page, without scripts or external resources. with_live_page: link to the live page."""
    back = "<a href='./'>Back to the chat</a> · " if with_live_page else ""
    parts = [
        f"<p>{back}<a href='openapi.json'>openapi.json</a> has the same for machines.</p><h1>blinkpy {__version__}: API</h1>"
    ]
    lines = ((", ".join(one.methods), one.path, "no" if one.open else "yes", one.answer) for one in ENDPOINTS)
    parts.append(_table(("Method", "Path", "Needs a key", "Answer"), lines))
    parts += map(_fields, ENDPOINTS)
    head = (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'><title>blinkpy: API</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<link rel='icon' href='data:,'><style>{_STYLE}</style></head>"
    )
    return f"{head}<body>{''.join(parts)}</body></html>".encode()
