"""The live page: one file, which reads /metrics and needs nothing from elsewhere."""

import base64
import hashlib
import re
from functools import cache
from pathlib import Path


@cache
def live_page() -> bytes:
    """The page."""
    return Path(__file__).with_suffix(".html").read_bytes()


def _allowed(tag: str) -> str:
    """What a content security policy allows: the page's own element of this name, by its hash."""
    (content,) = re.findall(rb"<%b>(.*?)</%b>" % (tag.encode(), tag.encode()), live_page(), re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content).digest()).decode()}'"


# Nothing is loaded from anywhere, and nobody else's page shows this one.
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
