"""Chat templates: Hugging Face's conventions, and a sandbox that holds."""

import json

import pytest
from support.front_end.tiny_tokenizer import TEMPLATE, write_model

from blinkpy.config import ConfigError
from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate, find_templates, load_template

MESSAGES = [{"role": "user", "content": " Hi <b> "}, {"role": "assistant", "content": "Yo"}, {"role": "user", "content": "Bye"}]


def render(source: str, messages=MESSAGES, limit: int = 10_000, **tokens: str) -> str:
    return ChatTemplate(source, tokens, limit).render(messages)


def test_a_typical_template() -> None:
    text = render(TEMPLATE, bos_token="<s>")
    assert text == "<s><|start|>user: Hi <b>\n<|start|>assistant: Yo\n<|start|>user: Bye\n<|start|>assistant: "


def test_conventions() -> None:
    assert render("{{ messages[0] | tojson }}", [{"role": "user", "content": "é<"}]) == '{"role": "user", "content": "é<"}'
    assert render("{{ messages | tojson(indent=2) }}", []) == "[]"
    assert render("{{ messages | tojson(true) }}", [{"content": "é"}]) == '[{"content": "\\u00e9"}]', "it is ensure_ascii"
    assert render("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }},{% endfor %}") == "Yo,Bye,"
    assert render("{% generation %}{{ messages[1].content }}{% endgeneration %}!") == "Yo!"
    assert len(render("{{ strftime_now('%Y') }}")) == 4
    assert render("{{ tools is none }}{{ documents is none }}") == "TrueTrue"
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
    assert render("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}") == "3"
    assert render("{{ undefined_thing }}x") == "x"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[17].content.foo() }}", "rejects these messages"),
        ("{{ 1 / 0 }}", "rejects these messages"),
        ("{% for i in range(90000) %}{% for j in range(90000) %}xxxxxxxxxx{% endfor %}{% endfor %}", "exceed 1000"),
    ],
)
def test_template_can_refuse(source, reason) -> None:
    with pytest.raises(ChatError, match=reason):
        render(source, limit=1000)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ lipsum.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% for i in range(1000000000) %}x{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    ],
)
def test_sandbox_holds(source) -> None:
    before = json.dumps(MESSAGES)
    try:
        text = render(source)
    except ChatError:
        text = ""
    assert "object" not in text
    assert "module" not in text
    assert json.dumps(MESSAGES) == before


def test_text_of_clients_is_no_template() -> None:
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "{{ 7 * 7 }}"}]) == "{{ 7 * 7 }}"


def test_where_the_template_comes_from(tmp_path) -> None:
    folder = write_model(tmp_path)
    assert find_templates(folder, {"chat_template": "a"}) == {"default": "a"}
    several = [{"name": name, "template": name[0]} for name in ("rag", "tool_use", "default")]
    assert find_templates(folder, {"chat_template": several}) == {"default": "d", "tool_use": "t"}
    assert find_templates(folder, {"chat_template": several[:1]}) == {}
    assert find_templates(folder, {}) == {}
    (folder / "chat_template.json").write_text('{"chat_template": "j"}')
    assert [find_templates(folder, config)["default"] for config in ({}, {"chat_template": "a"})] == ["j", "a"]
    (folder / "chat_template.json").unlink()
    assert load_template(folder, {}, "", 100) is None
    (folder / "chat_template.jinja").write_text("file")
    assert find_templates(folder, {"chat_template": "a"}) == {"default": "file"}
    (folder / "additional_chat_templates").mkdir()
    for name in ("rag", "tool_use"):
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(f"file of {name}")
    assert find_templates(folder, {"chat_template": several}) == {"default": "file", "tool_use": "file of tool_use"}
    own = str(tmp_path / "own.jinja")
    (tmp_path / "own.jinja").write_text("own{{ bos_token }}{{ sep_token }}")
    assert find_templates(folder, {"chat_template": "a"}, own) == {"default": "own{{ bos_token }}{{ sep_token }}"}
    template = load_template(folder, {"bos_token": {"content": "<s>"}, "sep_token": "|"}, own, 100)
    assert template.render([]) == template.with_tools.render([]) == "own<s>|"


def test_bad_templates_are_errors_at_the_start(tmp_path) -> None:
    with pytest.raises(ConfigError, match="not valid"):
        ChatTemplate("{% if %}", {}, 100)
    (tmp_path / "binary").write_bytes(b"\xff")
    (tmp_path / "large").write_bytes(b"x" * ((1 << 20) + 1))
    for name, reason in (("missing", "can't read"), ("binary", "can't read"), ("large", "larger")):
        with pytest.raises(ConfigError, match=reason):
            find_templates(tmp_path, {}, str(tmp_path / name))
    with pytest.raises(ConfigError, match="must be a template"):
        find_templates(tmp_path, {"chat_template": 5})
