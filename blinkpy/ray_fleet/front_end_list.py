"""An actor of Ray's that knows which front ends serve. It ends with the process that placed it."""

from collections.abc import Sequence


class FrontEndList:
    """Methods are called in threads."""

    def __init__(self) -> None:
        self._urls: list[str] | None = None

    def set_urls(self, urls: Sequence[str]) -> None:
        """These, from now on."""
        self._urls = list(urls)

    def urls(self) -> list[str] | None:
        """None: it has not been told yet."""
        return self._urls
