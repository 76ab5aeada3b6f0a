"""Contents that are lists or nothing: a chat template gets them as it reads them, as in Hugging Face's library."""

import orjson
import pytest
from support.front_end.tiny_tokenizer import write_model

from blinkpy.config import ModelOptions
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.http.fields.chat_fields import parse_chat
from blinkpy.dpu.http.fields.http_request import Request
from blinkpy.dpu.http.fields.response_fields import parse_response
from blinkpy.dpu.text.chat_template import ChatTemplate
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.request_parameters import RequestParameters

PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
# Reads only parts of users, and writes calls only if an assistant has no text, as DeepSeek's templates do.
READING = """{% for m in messages %}[{{ m.role }}:
{%- if m.role == 'user' and m.content is not string %}{% for p in m.content %}<{{ p.text }}>{% endfor %}
{%- elif m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}!{{ c.function.name }}{% endfor %}
{%- else %}{{ m.content | trim }}{% endif %}]{% endfor %}"""
PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two<|start|>"}]
CALL = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_model(tmp_path_factory.mktemp("model")))


def prompt(source: str, tokenizer: Tokenizer, messages: list[dict], **fields: object) -> str:
    dialect = ChatDialect(ChatTemplate(source, {}, 10_000), ModelOptions(), "")
    request = parse_chat(orjson.dumps({"messages": messages, **fields}), RequestParameters())
    return tokenizer.specials.unmark(dialect.prompt(request, tokenizer.specials)[0])


def test_parts_are_joined_for_templates_that_do_not_read_them(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": PARTS}, {"role": "user", "content": PARTS}]
    assert prompt(PLAIN, tokenizer, messages) == "[system:one\ntwo<|start|>][user:one\ntwo<|start|>]"
    assert prompt(READING, tokenizer, messages) == "[system:one\ntwo<|start|>][user:<one><two<|start|>>]"


def test_refusals_are_texts_of_an_assistant(tokenizer: Tokenizer) -> None:
    """In chats and in /v1/responses, as OpenAI's clients return answers; the model must see its own output."""
    refusal: dict = {"type": "refusal", "refusal": "I won't"}
    for other, parse_it in (("text", _chat), ("output_text", _response)):
        said = [{"type": other, "text": "No:"}, refusal]
        messages = parse_it([{"role": "assistant", "content": said}, {"role": "user", "content": "x"}]).messages
        assert prompt_of(messages, tokenizer) == "[assistant:No:\nI won't][user:x]"
        for wrong in ({"role": "user", "content": [refusal]}, {"role": "assistant", "content": [{**refusal, "refusal": 5}]},
                      {"role": "assistant", "content": [{"type": "refusal"}]}):  # fmt: skip
            with pytest.raises(ApiError, match=r"content\[0\]"):
                parse_it([wrong])


def _chat(messages: list[dict]) -> Request:
    return parse_chat(orjson.dumps({"messages": messages}), RequestParameters())


def _response(messages: list[dict]) -> Request:
    return parse_response(orjson.dumps({"input": messages}), RequestParameters())


def prompt_of(messages: list[dict] | None, tokenizer: Tokenizer) -> str:
    dialect = ChatDialect(ChatTemplate(PLAIN, {}, 10_000), ModelOptions(), "")
    return tokenizer.specials.unmark(dialect.prompt(Request(RequestParameters(), messages=messages), tokenizer.specials)[0])


def test_special_tokens_of_parts_are_text(tokenizer: Tokenizer) -> None:
    dialect = ChatDialect(ChatTemplate(READING, {}, 10_000), ModelOptions(), "")
    request = parse_chat(orjson.dumps({"messages": [{"role": "user", "content": PARTS}]}), RequestParameters())
    text, _ = dialect.prompt(request, tokenizer.specials)
    special = tokenizer.encode("<|start|>", False, parse_special=True)
    assert len(special) == 1 and special[0] not in tokenizer.encode(text, False, parse_special=True)


def test_a_last_message_in_parts_can_be_continued(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": PARTS}]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert prompt(READING, tokenizer, messages, **more) == "[user:<one><two<|start|>"
    assert prompt(PLAIN, tokenizer, messages, **more) == "[user:one\ntwo<|start|>"


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_no_content_beside_calls(tokenizer: Tokenizer, content: dict) -> None:
    """Null stays null if a template accepts it, and becomes an empty text if it would print it or fail."""
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", **content, "tool_calls": [CALL]}]
    assert prompt(READING, tokenizer, messages) == "[user:x][assistant:!look]"
    names = "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}"
    for written in ("m.content", "'' + m.content"):
        source = f"{{% for m in messages %}}[{{{{ {written} }}}}{names}]{{% endfor %}}"
        assert prompt(source, tokenizer, messages) == "[x][!look]"


def test_an_assistant_message_may_be_empty(tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, "reasoning_content": "hm"}]
    assert prompt(PLAIN, tokenizer, messages) == "[user:x][assistant:]"


def test_no_message_is_left_out(tokenizer: Tokenizer) -> None:
    """Instructions that a template would omit: a developer's become the system's, the first ones become one message, and later
    ones the beginning of a user's message. A template that writes them gets them unchanged."""
    system, developer, user = ({"role": role, "content": role} for role in ("system", "developer", "user"))
    assert prompt(PLAIN, tokenizer, [system, developer, user, developer]) == "".join(
        f"[{role}:{role}]" for role in ("system", "developer", "user", "developer")
    )
    instructions = "m.role in ('system', 'developer')"
    shown = f"{{% if loop.first or not {instructions} %}}[{{{{ m.role }}}}:{{{{ m.content }}}}]{{% endif %}}"
    first = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    assert prompt(first, tokenizer, [system, developer, user]) == "[system:system\n\ndeveloper][user:user]"
    for late in (system, developer):
        reported = f"[system:system][user:user][user:{late['role']}]"
        assert prompt(first, tokenizer, [system, user, late]) == reported
        assert prompt(first, tokenizer, [system, user, late, user]) == f"[system:system][user:user][user:{late['role']}\n\nuser]"
    unknown = "{% for m in messages if m.role != 'developer' %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
    assert prompt(unknown, tokenizer, [developer, user, developer]) == "[system:developer][user:user][system:developer]"


def test_a_developer_is_the_system_where_a_template_refuses_that_role(tokenizer: Tokenizer) -> None:
    """Clients send it by themselves for newer models. If a template refuses both, a user's message has it."""
    asked = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    for roles, wanted in (("'system', 'user', 'assistant'", "[system:a][user:b]"), ("'user', 'assistant'", "[user:a\n\nb]")):
        refusing = f"{{% if m.role not in ({roles}) %}}{{{{ raise_exception('no ' + m.role) }}}}{{% endif %}}"
        source = f"{{% for m in messages %}}{refusing}[{{{{ m.role }}}}:{{{{ m.content }}}}]{{% endfor %}}"
        assert prompt(source, tokenizer, asked) == wanted


def test_reasoning_by_the_name_that_a_template_has(tokenizer: Tokenizer) -> None:
    calls = "{% for c in m.tool_calls or [] %}!{{ c.function.name }}{% endfor %}"
    for name, wanted in (("reasoning_content", "hm"), ("thinking", "hm"), ("thoughts", "")):
        source = f"{{% for m in messages %}}[{{{{ m.{name} }}}}{calls}]{{% endfor %}}"
        for given in ("reasoning_content", "thinking", "reasoning"):
            messages = [{"role": "user", "content": "x"}, {"role": "assistant", given: "hm", "tool_calls": [CALL]}]
            assert prompt(source, tokenizer, messages) == f"[][{wanted}!look]"
