"""A Chromium of this machine, driven by Playwright: `make test-browser`."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, sync_playwright


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("google-chrome")
    assert path, "no Chromium here; on Debian or Ubuntu: apt install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Any]:
    """A function that opens a URL, with options of a context. In the end nothing may have gone wrong in any page, and nothing
    may have been asked of another server."""
    pages: list[Page] = []
    problems: list[str] = []

    def opened(url: str, **options: Any) -> Page:
        page = browser.new_context(**options).new_page()
        pages.append(page)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("request", lambda request: None if request.url.startswith((url, "data:")) else problems.append(request.url))
        page.goto(url)
        return page

    opened.problems = problems  # type: ignore[attr-defined]
    yield opened
    for page in pages:
        page.context.close()
    assert problems == []
