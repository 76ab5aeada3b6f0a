"""The chat of the live page in a real browser: settings, Markdown, reasoning, and answers that are stopped, cut off or fail."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from support.front_end import chat_templates
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import serving
from support.front_end.scripted_model import Served, served_with
from support.front_end.tiny_tokenizer import write_model
from support.waiting import wait_for

MARKDOWN = """# Title

Some **bold** and *soft* text, `code`, snake_case_name and a [link](https://example.org/a_(b)).

```python
print("<b>*not*</b>")

x = 1
```

1. one
2. two
   - nested

| name | value |
|---|---:|
| a | `1 | 2` |

> quoted
---
last ~~gone~~ line"""
HOSTILE = (
    "<img src=x onerror=alert(1)><script>alert(2)</script>",
    "[click](javascript:alert(1)) [data](data:text/html,<script>alert(1)</script>) [space](java\tscript:alert(1))",
    "![image](https://example.org/pixel.png) ![x](javascript:alert(1))",
    "```html\n</code></pre><img src=x onerror=alert(1)>\n```",
    '`</code><svg onload=alert(1)>` **<iframe src="https://example.org">**',
    "| <img src=x onerror=alert(1)> | b |\n|---|---|\n| <script>alert(1)</script> | c |",
    "<https://example.org/\"onmouseover=alert(1)> https://example.org/'><img/src=x>",
    '<a href="javascript:alert(1)">x</a> &lt;b&gt; &#60;img src=x onerror=alert(1)&#62;',
    "# <style>body{display:none}</style>\n> <base href=//example.org>\n- <form action=//example.org>",
)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_with(tmp_path_factory.mktemp("thinking"), chat_templates.THINKING_BY_ITSELF) as served:
        yield served


def opened(served: Served, open_page: Any, **options: Any) -> Page:
    page: Page = open_page(served.server.url + "/", **options)
    expect(page.locator("#model")).not_to_be_empty()
    return page


def ask(page: Page, text: str = "Hi") -> None:
    """Send a message, and wait until its answer has ended."""
    page.get_by_label("Message").fill(text)
    page.get_by_label("Message").press("Enter")
    ended(page)


def ended(page: Page) -> None:
    expect(page.get_by_role("button", name="Stop")).to_be_disabled(timeout=20_000)


def answers(page: Page) -> Any:
    return page.locator("article.assistant > .text")


def test_later_messages_use_the_changed_settings(served, open_page) -> None:
    page = opened(served, open_page)
    served.says("First.")
    ask(page, "Hello")
    expect(answers(page)).to_have_text(["First."])
    expect(page.locator("#speed")).to_contain_text("first token after")
    page.locator("#settings summary").click()
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.25")
    page.get_by_label("Max tokens").fill("33")
    served.says("Second.")
    ask(page, "And then?")
    expect(answers(page)).to_have_text(["First.", "Second."])
    prompt = served.prompt()
    reported = ("system\nBe brief.", "user\nHello", "assistant\nFirst.", "user\nAnd then?")
    assert [prompt.index(text) for text in reported] == sorted(prompt.index(text) for text in reported)
    entry = served.engine.submitted[-1].entry
    assert (int(entry["max_tokens"]), float(entry["temperature"])) == (33, 0.25)
    page.get_by_label("Max tokens").fill("0")
    page.get_by_label("Message").fill("Not sent")
    page.get_by_role("button", name="Send").click()
    assert page.locator("#limit").evaluate("e => !e.validity.valid")
    expect(page.locator("article.user")).to_have_count(2)
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("article")).to_have_count(0)
    expect(page.get_by_role("button", name="Tell me a story.")).to_be_visible()


def test_markdown_becomes_elements(served, open_page) -> None:
    page = opened(served, open_page)
    served.says(MARKDOWN)
    ask(page)
    text = answers(page)
    expect(text.locator("h3")).to_have_text("Title")
    expect(text.locator("strong")).to_have_text("bold")
    expect(text.locator("em")).to_have_text("soft")
    expect(text.get_by_text("snake_case_name")).to_be_visible()
    link = text.locator("a")
    assert (link.get_attribute("href"), link.get_attribute("rel")) == (
        "https://example.org/a_(b)",
        "noopener noreferrer nofollow",
    )
    expect(text.locator("pre code")).to_have_text('print("<b>*not*</b>")\n\nx = 1')
    expect(text.locator(".codehead span")).to_have_text("python")
    expect(text.locator("ol > li")).to_have_count(2)
    expect(text.locator("ol li ul li")).to_have_text("nested")
    expect(text.locator("td")).to_have_text(["a", "1 | 2"])
    expect(text.locator("blockquote")).to_have_text("quoted")
    expect(text.locator("hr")).to_have_count(1)
    expect(text.locator("del")).to_have_text("gone")


def test_streamed_markdown_equals_whole_markdown(served, open_page) -> None:
    page = opened(served, open_page)
    script = """text => {
        const [whole, grown] = [0, 1].map(() => document.createElement("div"));
        Markdown.show(whole, text);
        for (let end = 0; end <= text.length; end += 3) Markdown.show(grown, text.slice(0, end));
        Markdown.show(grown, text);
        return [whole.innerHTML, grown.innerHTML];
    }"""
    for text in (MARKDOWN, *HOSTILE, "* a\n* b\n\ntext\n\n***both*** **a *b***", "```\nopen\n\n**x**"):
        whole, grown = page.evaluate(script, text)
        assert whole == grown
    kinds = page.evaluate("Markdown.inline('***both*** 2 * 3 \\\\*x\\\\* `a``b` **open').map(x => x.kind || x)")
    assert kinds == ["strong", " 2 * 3 *x* ", "code", " **open"]


def test_model_output_is_never_markup(served, open_page) -> None:
    """In an answer and its reasoning: all is text, no link leads to a script, and nothing is loaded (open_page checks that)."""
    page = opened(served, open_page)
    page.on("dialog", lambda dialog: pytest.fail(dialog.message))
    for text in HOSTILE:
        served.says(f"<think>\n{text}\n</think>\n\n{text}")
        ask(page, text)
        page.locator(".thoughts summary").last.click()
    known = {
        "article",
        "div",
        "p",
        "span",
        "button",
        "details",
        "summary",
        "h3",
        "h4",
        "pre",
        "code",
        "blockquote",
        "hr",
        "br",
        "a",
    }
    known |= {"ul", "ol", "li", "table", "tr", "td", "th", "strong", "em", "del"}
    found = page.evaluate("[...document.querySelectorAll('#talk *')].map(e => e.localName)")
    assert set(found) <= known
    attributes = page.evaluate("[...document.querySelectorAll('#talk *')].flatMap(e => [...e.attributes].map(a => a.name))")
    assert not [name for name in attributes if name.startswith("on") or name in ("src", "style", "srcdoc")]
    links = page.evaluate("[...document.querySelectorAll('#talk a')].map(e => e.protocol)")
    assert links and set(links) <= {"https:"}
    expect(page.locator("article.user").first).to_contain_text(HOSTILE[0])
    expect(answers(page).first).to_have_text(HOSTILE[0])


def test_reasoning_is_folded(served, open_page) -> None:
    page = opened(served, open_page)
    served.says("<think>\nWell, **hm**.\n</think>\n\nYes.")
    ask(page)
    thoughts = page.locator("details.thoughts")
    expect(answers(page)).to_have_text("Yes.")
    expect(thoughts.locator(".text")).to_be_hidden()
    thoughts.locator("summary").click()
    expect(thoughts.locator(".text")).to_have_text("Well, hm.")
    expect(thoughts.locator("strong")).to_have_text("hm")
    served.says("No.")
    ask(page)
    expect(thoughts.nth(1)).to_be_hidden()


def test_a_truncated_answer_is_marked_and_can_be_continued(served, open_page) -> None:
    page = opened(served, open_page)
    page.locator("#settings summary").click()
    page.get_by_label("Max tokens").fill("6")
    served.says("One two three four five.")
    ask(page)
    expect(page.locator("article .end")).to_have_text("Cut off at the limit of 6 tokens.")
    begun = answers(page).text_content()
    page.get_by_label("Max tokens").fill("600")
    served.says(" And the end.")
    page.get_by_role("button", name="Continue").click()
    ended(page)
    expect(answers(page)).to_have_text(f"{begun} And the end.")
    assert served.prompt().rstrip().endswith(f"assistant\n{begun}".rstrip())
    expect(page.locator("article .end")).to_be_hidden()
    expect(page.get_by_role("button", name="Continue")).to_have_count(0)


def test_regenerate_and_copy(served, open_page) -> None:
    page = opened(served, open_page, permissions=["clipboard-read", "clipboard-write"])
    served.says("Old **one**.")
    ask(page)
    served.says("New.\n\n```sh\nls -l\n```")
    page.get_by_role("button", name="Regenerate").click()
    ended(page)
    expect(page.locator("article.assistant")).to_have_count(1)
    expect(answers(page)).to_contain_text("New.")
    assert "Old" not in served.prompt()
    page.get_by_role("button", name="Copy", exact=True).click()
    expect(page.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == "New.\n\n```sh\nls -l\n```"
    page.get_by_role("button", name="Copy code").click()
    wait_for(lambda: page.evaluate("navigator.clipboard.readText()") == "ls -l")


def test_stop_cancels_a_running_answer(tmp_path, open_page) -> None:
    with FakeEngine(step_s=0.3) as engine, serving(engine, write_model(tmp_path)) as server:
        page = open_page(server.url + "/")
        page.get_by_role("button", name="Tell me a story.").click()
        expect(answers(page)).not_to_be_empty(timeout=10_000)
        page.get_by_role("button", name="Stop").click()
        expect(page.get_by_role("button", name="Send")).to_be_enabled()
        expect(page.locator("article .end")).to_have_text("Stopped.")
        wait_for(lambda: engine.cancels == 1)
        page.close()  # it looks repeatedly, and the server goes


def test_an_error_can_be_tried_again(served, open_page) -> None:
    page = opened(served, open_page)
    page.route(re.compile("chat/completions"), lambda route: route.abort())
    ask(page)
    expect(page.locator("article .error")).to_have_text("The server does not answer.")
    page.unroute_all()
    open_page.problems.clear()  # the console reported the failed request
    served.says("Now.")
    page.get_by_role("button", name="Try again").click()
    ended(page)
    expect(answers(page)).to_have_text("Now.")
    expect(page.locator("article .error")).to_have_count(0)
    expect(page.locator("article.user")).to_have_count(1)
