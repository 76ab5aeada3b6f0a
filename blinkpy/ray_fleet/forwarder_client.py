"""The HTTP client of a forwarder, on aiohttp, which Ray Serve brings."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from blinkpy.ray_fleet.forwarder import Answer, BrokenError, NotReachedError
from blinkpy.ray_fleet.forwarding_rules import CONNECT_S, KEEP_S, SILENT_S, Headers

AUTOMATIC = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # headers that aiohttp would add


class ForwarderClient:
    """A Client. keep_s: that front ends keep an idle connection; ours go before, so that none ends as a request is written."""

    def __init__(self, keep_s: float):
        import aiohttp

        self._aiohttp = aiohttp
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=min(KEEP_S, keep_s / 2)),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=SILENT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=AUTOMATIC,
            auto_decompress=False,
        )

    @asynccontextmanager
    async def exchange(self, method: str, url: str, headers: Headers, body: AsyncIterator[bytes] | None) -> AsyncIterator[Answer]:
        from yarl import URL

        pairs = [(name.decode(), _text(value)) for name, value in headers]
        try:
            response = await self._session.request(
                method, URL(url, encoded=True), headers=pairs, data=body, allow_redirects=False
            )
        except (self._aiohttp.ClientConnectorError, self._aiohttp.ConnectionTimeoutError) as error:
            raise NotReachedError from error
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BrokenError from error
        try:
            yield Answer(response.status, list(response.raw_headers), self._chunks(response.content))
        finally:
            response.close()  # after a whole answer the connection has been given back already

    async def _chunks(self, content: "AsyncIterator[bytes]") -> AsyncIterator[bytes]:
        try:
            async for chunk in content.iter_any():  # type: ignore[attr-defined]
                yield chunk
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            raise BrokenError from error

    async def close(self) -> None:
        await self._session.close()


def _text(value: bytes) -> str:
    """As aiohttp writes it, in UTF-8."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")
