"""The package's long description and addresses, which are not in pyproject.toml. hatchling runs it at a
build.

The description is README.md, for a page without the project's other files. BLINKPY_TREE_URL is the
address of the release's files, such as https://example.org/blinkpy/blob/v1.0. Links of the README and the
project's URLs begin with it. Without it, relative links become plain text, and there are no URLs.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ADDRESS = "BLINKPY_TREE_URL"
URLS = {"Source": "", "Documentation": "docs/index.md", "Changelog": "CHANGELOG.md"}
COMMENT = re.compile(r"<!--.*?-->\n?", re.DOTALL)
IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


def description(readme: str, address: str) -> str:
    """The README without comments. Relative links lead to `address`, or become plain text if it is empty."""

    def link(found: re.Match[str]) -> str:
        text, target = found.groups()
        if "://" in target:
            return found[0]
        return f"[{text}]({address}/{target})" if address else text

    text = COMMENT.sub("", readme)
    # A picture's address is that of a page, too: it becomes a link.
    text = IMAGE.sub(lambda found: found[0][1:] if address else "", text)
    return re.sub(r"\n{3,}", "\n\n", LINK.sub(link, text))


class PackageMetadata(MetadataHookInterface):
    """hatchling's hook."""

    def update(self, metadata: dict[str, Any]) -> None:
        address = os.environ.get(ADDRESS, "").rstrip("/")
        if address and not address.startswith("https://"):
            raise ValueError(f"{ADDRESS} must begin with https://, not {address!r}")
        text = description((Path(self.root) / "README.md").read_text(), address)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
        if address:
            metadata["urls"] = {name: f"{address}/{path}".rstrip("/") for name, path in URLS.items()}
