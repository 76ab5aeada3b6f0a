"""GET /metrics: rendered in a thread, at most once in EVERY_S, regardless of the number of clients."""

import asyncio
import base64
import hashlib
import re
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from blinkpy.dpu.admission.gate import Gate
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.fleet.engines import Engines
from blinkpy.dpu.http.wire.exchange import Exchange
from blinkpy.dpu.watch.exposition import Exposition

EVERY_S = 1.0  # maximum age of a page
TEXT = b"text/plain; version=0.0.4; charset=utf-8"


class MetricsPage:
    """The text of /metrics, and the requests that wait for it. ended: called with each request once it is answered."""

    def __init__(self, exposition: Exposition, engine: Engines, gate: Gate, ended: Callable[[Exchange], None]):
        self.every_s = EVERY_S
        self._exposition, self._engine, self._gate, self._ended = exposition, engine, gate, ended
        self._text, self._rendered = b"", -EVERY_S
        self._waiting: list[Exchange] = []
        self._rendering: asyncio.Task[None] | None = None

    def answer(self, exchange: Exchange) -> None:
        """Answer with the page, immediately if it is recent enough."""
        if time.monotonic() - self._rendered < self.every_s:
            exchange.write(200, TEXT, self._text)
            return
        self._waiting.append(exchange)
        if self._rendering is None:
            self._rendering = asyncio.get_running_loop().create_task(self._render())

    async def _render(self) -> None:
        engine = self._engine
        try:
            began = time.monotonic()
            words, restarts, blocks = engine.engine_words(), engine.restarts(), engine.blocks()
            self._text = await asyncio.to_thread(self._exposition.render, words, restarts, blocks)
            self._rendered, failed = began, None
        except Exception as error:
            failed = error
        finally:
            self._rendering = None
            waiting, self._waiting = self._waiting, []
            for exchange in waiting:
                self._gate.ask(exchange.connection.asker, partial(self._write, exchange, failed is not None))
        if failed is not None:
            raise failed

    def _write(self, exchange: Exchange, failed: bool) -> None:
        if failed:
            exchange.refuse(ApiError(500, "Internal server error.", code="internal_error"))
        else:
            exchange.write(200, TEXT, self._text)
        self._ended(exchange)


# The live page: the files of the folder page/ as one document, which reads /metrics and sends chats to this server.

PAGE_FOLDER = Path(__file__).with_name("page")
SCRIPTS = ("markdown.js", "chat.js", "dashboard.js")  # in this order


@cache
def live_page() -> bytes:
    """The page."""
    page, style = (PAGE_FOLDER.joinpath(name).read_bytes() for name in ("page.html", "style.css"))
    script = b"".join(PAGE_FOLDER.joinpath(name).read_bytes() for name in SCRIPTS)
    return page.replace(b"@style@", style).replace(b"@script@", b'"use strict";\n' + script)


def _allowed(tag: str) -> str:
    """The source for a content security policy: the hash of the page's element of this name."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), live_page(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


# The page loads no external resources, and can't be embedded in other pages.
PAGE_HEADERS = (
    (
        b"content-security-policy",
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src {_allowed('script')}; style-src {_allowed('style')}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'".encode(),
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
)
