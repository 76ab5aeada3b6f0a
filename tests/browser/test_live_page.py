"""The live page in a real browser: figures as the server's metrics have them, keys, widths and contrasts. test_chat.py has the
chat."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from playwright.sync_api import Page, expect
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import MODEL, RunningServer, serving
from support.front_end.tiny_tokenizer import write_model
from support.waiting import wait_for

from blinkpy.queues import words as W

WIDTHS = (320, 390, 768, 1280)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    with FakeEngine(step_s=0.005) as engine:
        engine.waited_ns = 30_000_000
        yield engine


@pytest.fixture
def server(engine, folder) -> Iterator[RunningServer]:
    with serving(engine, folder) as server:
        yield server


def forget_401(open_page) -> bool:
    """Drop the console's error about a missing key. Returns whether there was one."""
    others = [problem for problem in open_page.problems if "401" not in problem]
    found, open_page.problems[:] = len(others) < len(open_page.problems), others
    return found


def tile(page: Page, title: str):
    return page.locator(".card", has=page.get_by_role("heading", name=title, exact=True))


def test_figures_are_those_of_the_server(server, engine, open_page) -> None:
    page = open_page(server.url + "/")
    expect(page.get_by_role("status").first).to_have_text("ready")
    expect(page.locator("#model")).to_have_text("tiny")
    expect(tile(page, "Power")).to_be_hidden()
    gauges = {
        "requests_running": 7,
        "requests_waiting": 3,
        "pages_held": 30,
        "pages_cached": 50,
        "pages_free": 20,
        "batch_rows": 5,
    }
    for name, value in gauges.items():
        engine.views.engine[W.GAUGE[name]] = value
    server.complete([7, 8, 9], max_tokens=20)
    server.server.app.service.metrics.gauge("gpu_power_watts", 312.0)
    expect(tile(page, "Requests running").locator(".value")).to_have_text("7", timeout=10_000)
    expect(tile(page, "Requests running").locator(".note")).to_have_text("3 waiting")
    expect(tile(page, "KV cache in use").locator(".value")).to_have_text("30 %")
    expect(tile(page, "KV cache in use").locator(".note")).to_have_text("50 % kept for reuse")
    expect(tile(page, "Last step").locator(".value")).to_have_text("5 requests")
    expect(tile(page, "Time to first token").locator(".value")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    expect(tile(page, "Time in the queue").locator(".value")).to_have_text(re.compile(r"^[\d.]+ ms$"))
    expect(tile(page, "Output").locator(".value")).to_have_text(re.compile(r"^[1-9][\d.]* tokens/s$"))
    expect(tile(page, "Power").locator(".value")).to_have_text(re.compile(r"^312\sW$"))


def test_tenants_are_shown_by_name_and_never_by_key(engine, folder, tmp_path, open_page) -> None:
    """A row for each tenant, the largest consumer first; 12 of 14 are shown. Requests that wait in the front end count
    as waiting."""
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(f'["tenant.{i:02}"]\nkey = "the-key-of-{i:02}"\nrequests = 1\n' for i in range(14)))
    engine.step_s = 0.2
    with serving(engine, folder, api_keys=str(keys)) as server, ThreadPoolExecutor(8) as pool:
        page = open_page(server.url + "/")
        row = page.locator("#rows tr")
        expect(row).to_have_count(12)
        expect(page.locator("#others")).to_have_text("and 2 more tenants")

        def ask(tenant: int) -> None:
            body = {"model": MODEL, "prompt": [7, 8], "max_tokens": 40, "ignore_eos": True}
            headers = {"authorization": f"Bearer the-key-of-{tenant:02}"}
            assert httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=120).status_code == 200

        asked = [pool.submit(ask, tenant) for tenant in (13, 13, 13, 5)]
        expect(row.nth(0).locator("td").nth(0)).to_have_text("tenant.13", timeout=30_000)
        expect(row.nth(0).locator("td").nth(1)).to_have_text("1")
        expect(row.nth(0).locator("td").nth(2)).to_have_text("2", timeout=10_000)
        expect(row.nth(1).locator("td").nth(0)).to_have_text("tenant.05")
        expect(tile(page, "Requests running").locator(".note")).to_have_text("2 waiting", timeout=10_000)
        assert "the-key" not in page.content()
        engine.step_s = 0.005
        for one in asked:
            one.result()
        page.close()
    assert forget_401(open_page), "it asks for the model's name, without an answer"


def test_without_tenants_there_is_no_table_of_them(server, open_page) -> None:
    page = open_page(server.url + "/")
    expect(page.get_by_role("status").first).to_have_text("ready")
    expect(page.locator("#tenants")).to_be_hidden()


def test_plots_omit_the_first_interval_and_idle_intervals(server, engine, open_page) -> None:
    """Requests of the time before the page are in no line; without requests, times and rates draw nothing."""
    server.complete([7, 8, 9], max_tokens=20)
    page = open_page(server.url + "/")
    expect(tile(page, "Time to first token").locator(".value")).to_have_text(re.compile(r"^[\d.]+ m?s$"))
    wait_for(lambda: page.evaluate("looks.length") >= 3)
    expect(tile(page, "Time to first token").locator(".value")).to_have_text("\N{EN DASH}")
    expect(tile(page, "Time to first token").locator(".note")).to_have_text("no requests lately")
    for title in ("Time to first token", "Time per token", "Output", "Requests running", "Slots in use"):
        expect(tile(page, title).locator("svg")).to_be_hidden()
    assert page.evaluate("pieces([null, 0, 0, 2, null, 3, 4, 4]).map(piece => piece.length)") == [3, 3]
    engine.views.engine[W.GAUGE["requests_running"]] = 2
    expect(tile(page, "Requests running").locator("svg")).to_be_visible(timeout=10_000)


def test_the_fields_page_links_back(server, open_page) -> None:
    page = open_page(server.url + "/")
    page.get_by_role("link", name="API", exact=True).click()
    for heading in ("Field", "Meaning and values", "Default"):
        expect(page.get_by_role("columnheader", name=heading).first).to_be_visible()
    page.set_viewport_size({"width": 390, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.get_by_role("link", name="Back to the chat").click()
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def test_a_key_is_asked_for(engine, folder, open_page) -> None:
    with serving(engine, folder, api_key="secret") as server:
        page = open_page(server.url + "/")
        expect(page.get_by_label("API key")).to_be_visible()
        expect(page.get_by_role("status").first).to_have_text("ready")
        page.get_by_role("button", name="Tell me a story.").click()
        expect(page.locator("#talk .error")).to_contain_text("The API key is missing or wrong:")
        page.get_by_label("API key").fill("secret")
        page.get_by_role("button", name="Try again").click()
        expect(page.locator("#speed")).to_contain_text("first token", timeout=20_000)
        expect(page.locator("#model")).to_have_text("tiny")
        assert "secret" not in page.evaluate("JSON.stringify([localStorage, sessionStorage, document.cookie, location.href])")
        page.close()
    assert forget_401(open_page)


def test_an_unreachable_server_is_reported(engine, folder, open_page) -> None:
    with serving(engine, folder) as server:
        page = open_page(server.url + "/")
        expect(page.get_by_role("status").first).to_have_text("ready")
    expect(page.get_by_role("status").first).to_have_text("the server does not answer", timeout=10_000)
    open_page.problems.clear()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_and_can_be_read_in_every_width(server, open_page, scheme) -> None:
    """No sideways scrolling; text has the contrast of WCAG AA (4.5); all that is operated has a name and is reached by Tab."""
    page = open_page(server.url + "/", color_scheme=scheme)
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    low = page.evaluate(CONTRASTS)
    assert low == []
    for role, name in (("link", "API"), ("link", "Metrics"), ("textbox", "Message"), ("button", "Send")):
        expect(page.get_by_role(role, name=name, exact=True)).to_be_visible()
    reached = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(8):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.id || document.activeElement.textContent"))
    assert [name for name in reached if name in ("API", "Metrics", "text", "send")][:4] == ["API", "Metrics", "text", "send"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_of_the_api_fits_every_width(server, open_page, scheme) -> None:
    """Neither the page nor a table in it scrolls sideways, and every cell is as readable as on the live page."""
    page = open_page(server.url + "/", color_scheme=scheme)
    page.get_by_role("link", name="API", exact=True).click()
    page.evaluate("for (const one of document.querySelectorAll('details')) one.open = true")
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 800})
        wide = "[document.documentElement, ...document.querySelectorAll('div')].filter(e => e.scrollWidth > e.clientWidth).length"
        assert page.evaluate(wide) == 0, f"{width} pixels"
        assert page.evaluate(CONTRASTS) == []
    page.get_by_role("link", name="Back to the chat").click()
    expect(page.locator("#model")).to_have_text("tiny")


# Elements with text whose contrast with their background is below 4.5, by WCAG 2.2's formula.
CONTRASTS = """() => {
  const numbers = color => color.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => [r, g, b].map(c => c / 255).map(c => c <= .04045 ? c / 12.92 : ((c + .055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [.2126, .7152, .0722][i], 0);
  const behind = element => {
    for (let e = element; e; e = e.parentElement) {
      const color = numbers(getComputedStyle(e).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  return [...document.querySelectorAll("body *")].filter(e => !["SCRIPT", "NOSCRIPT"].includes(e.tagName) && e.checkVisibility()
      && !e.disabled && [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
    const [a, b] = [light(numbers(getComputedStyle(e).color)), light(behind(e))];
    return [e.tagName + "#" + e.id, (Math.max(a, b) + .05) / (Math.min(a, b) + .05)];
  }).filter(([, contrast]) => contrast < 4.5);
}"""
