"""Options of `blinkpy top`. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields
from urllib.parse import urlsplit

from blinkpy.config import ConfigError, check_value, option

MOST_SERVERS = 64


@dataclass(frozen=True)
class TopOptions:
    """Watch running servers in a terminal; press q to quit. No API key is needed."""

    servers: str = option("http://127.0.0.1:8000", "URLs or HOST:PORT of the servers, separated by spaces")
    interval: float = option(2.0, "time between two updates, in seconds", low=0.2, high=3600)
    once: bool = option(False, "print one table and exit; this is the default if the output is not a terminal")
    insecure: bool = option(False, "accept any certificate from HTTPS servers")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
        if not 1 <= len(self.urls) <= MOST_SERVERS:
            raise ConfigError(f"give 1 to {MOST_SERVERS} servers, not {len(self.urls)}")
        for url in self.urls:
            try:
                valid = urlsplit(url).scheme in ("http", "https") and urlsplit(url).hostname and urlsplit(url).port != 0
            except ValueError:
                valid = False
            if not valid:
                raise ConfigError(f"a server must be a URL or HOST:PORT, not {url.removeprefix('http://')!r}")

    @property
    def urls(self) -> list[str]:
        """The servers, each once, as URLs."""
        given = (server if "://" in server else f"http://{server}" for server in self.servers.split())
        return list(dict.fromkeys(url.rstrip("/") for url in given))
