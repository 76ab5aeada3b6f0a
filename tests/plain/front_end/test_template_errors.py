"""Conversations of agents reach the model through any template that raises by rules of template_rules."""

import random
import re
from typing import Any

import orjson
import pytest
from support.front_end import chat_templates
from support.front_end.scripted_model import folder_with
from support.front_end.template_rules import BEGIN, BODY, RULES, Conversation, template_of

from blinkpy.config import ModelOptions
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.chat_dialect import ChatDialect
from blinkpy.dpu.http.fields.chat_fields import parse_chat
from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.request_parameters import RequestParameters

TEMPLATES, CONVERSATIONS = 25, 8
TOOLS: list[list[dict[str, Any]]] = [
    [],
    [{"name": "get_weather", "description": "d", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}],
    [{"name": "get_weather"}, {"name": "other", "parameters": {}}],
]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(folder_with(tmp_path_factory.mktemp("model"), chat_templates.HERMES))


@pytest.mark.parametrize("rules", [1, 2, 3])
def test_every_text_reaches_the_model(rules: int, tokenizer: Tokenizer, seed: int) -> None:
    draw = random.Random(seed + rules)
    for _ in range(TEMPLATES):
        names, source = template_of(draw, rules)
        dialect = ChatDialect(ChatTemplate(source, {}, 100_000), ModelOptions(tool_call_parser="hermes"), "")
        for _ in range(CONVERSATIONS):
            talk = Conversation(draw)
            tools = [{"type": "function", "function": function} for function in draw.choice(TOOLS)]
            body = orjson.dumps({"messages": talk.messages, "tools": tools})
            prompt = tokenizer.specials.unmark(dialect.prompt(parse_chat(body, RequestParameters()), tokenizer.specials)[0])
            assert all(text in prompt for text in talk.texts), (names, talk.messages, prompt)


HARD = {  # rules that no form of turns with calls satisfies
    "one message": "{%- if messages|length > 1 %}{{ raise_exception('one') }}{%- endif %}",
    "ends with a user": "{%- if messages[-1].role != 'user' %}{{ raise_exception('user last') }}{%- endif %}",
    "few messages": "{%- if messages|length > 4 %}{{ raise_exception('few') }}{%- endif %}",
    "a user before each assistant": "{%- for m in messages %}{%- if m.role == 'assistant'"
    " and (loop.first or loop.previtem.role != 'user') %}{{ raise_exception('user before') }}{%- endif %}{%- endfor %}",
}


@pytest.mark.parametrize("rule", HARD)
def test_the_last_resort_is_plain_text(rule: str, tokenizer: Tokenizer, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    """Turns of texts, or one message; the log says that."""
    draw = random.Random(seed)
    for more in ("", *draw.sample([rule for name, rule in RULES.items() if name != "parts_only"], 4)):
        dialect = ChatDialect(ChatTemplate(BEGIN + HARD[rule] + more + BODY, {}, 100_000), ModelOptions(), "")
        for _ in range(CONVERSATIONS):
            talk = Conversation(draw)
            if draw.random() < 0.3:
                talk.messages.append({"role": "assistant", "content": "an answer."})
                talk.texts.append("an answer.")
            body = orjson.dumps({"messages": talk.messages})
            prompt = tokenizer.specials.unmark(dialect.prompt(parse_chat(body, RequestParameters()), tokenizer.specials)[0])
            assert all(text in prompt for text in talk.texts), (more, talk.messages, prompt)
    assert "plain text" in caplog.text


REFUSES = (
    "{%- for m in messages %}{%- if 'POISON' in (m.content | string) %}{{ raise_exception('poison') }}{%- endif %}{%- endfor %}"
)


@pytest.mark.parametrize("rule", RULES)
def test_a_refusal_names_the_message_as_it_was_sent(rule: str, tokenizer: Tokenizer, seed: int) -> None:
    """Although the server joins, inserts and omits messages. An earlier message is named in two cases: the refused message was
    joined with it; or the template also refuses a beginning, for lack of results."""
    draw, named = random.Random(seed), 0
    dialect = ChatDialect(
        ChatTemplate(BEGIN + RULES[rule] + REFUSES + BODY, {}, 100_000), ModelOptions(tool_call_parser="hermes"), ""
    )
    for _ in range(3 * CONVERSATIONS):
        messages = Conversation(draw).messages
        texts = [i for i, one in enumerate(messages) if one.get("content") and one["role"] in ("user", "assistant")]
        poisoned = draw.choice(texts)
        messages[poisoned]["content"] = "POISON"
        with pytest.raises(ApiError) as refused:
            dialect.prompt(parse_chat(orjson.dumps({"messages": messages}), RequestParameters()), tokenizer.specials)
        found = re.fullmatch(r"messages\[(\d+)\]\.(\w+)", str(refused.value.param))
        assert found is not None
        at = int(found[1])
        assert at <= poisoned, (at, poisoned, messages)
        named += at == poisoned and found[2] in ("content", "role")
    assert named


def test_every_rule_refuses_something(seed: int) -> None:
    """As they are sent, without the server's changes."""
    draw = random.Random(seed)
    for name, rule in RULES.items():
        template, refused = ChatTemplate("{%- set ns = namespace() %}" + rule, {}, 1000), 0
        for _ in range(300):
            talk = Conversation(draw)
            messages = [{"content": None, **message} for message in talk.messages]
            if draw.random() < 0.1:
                messages = [message for message in messages if message["role"] != "user"]
            if draw.random() < 0.1:
                messages.insert(1, {"role": "tool", "content": "x", "tool_call_id": "unknown"})
            for call in (call for message in messages for call in message.get("tool_calls", ())):
                if draw.random() < 0.3:
                    call["function"]["arguments"] = {"city": "A"}
            try:
                template.render(messages, tools=[{"type": "function", "function": one} for one in draw.choice(TOOLS)])
            except ChatError:
                refused += 1
        assert refused, name
