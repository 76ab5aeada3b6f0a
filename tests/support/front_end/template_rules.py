"""Rules by which public chat templates refuse conversations, in random combinations, and typical conversations of agents."""

import random
from typing import Any

BEGIN = "{%- set ns = namespace() %}"
# A rule is a part of a template that raises.
RULES = {
    "alternate": (
        "{%- set ns.n = 0 %}{%- for m in messages %}"
        "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
        "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}{{ raise_exception('alternate') }}{%- endif %}"
        "{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}"
    ),
    "strict_alternate": (
        "{%- set ns.n = 0 %}{%- for m in messages %}{%- if m.role in ('user','tool','assistant') %}"
        "{%- if (m.role in ('user','tool')) != (ns.n % 2 == 0) %}{{ raise_exception('strict alternate') }}"
        "{%- endif %}{%- set ns.n = ns.n + 1 %}{%- endif %}{%- endfor %}"
    ),
    "system_first": (
        "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('system first') }}{%- endif %}{%- endfor %}"
    ),
    "no_developer": (
        "{%- for m in messages %}{%- if m.role not in ('system','user','assistant','tool') %}"
        "{{ raise_exception('unknown role') }}{%- endif %}{%- endfor %}"
    ),
    "tool_after_call": (
        "{%- for m in messages %}"
        "{%- if m.role == 'tool' and (loop.first or not (loop.previtem.role == 'tool' or loop.previtem.tool_calls)) %}"
        "{{ raise_exception('tool after call') }}{%- endif %}{%- endfor %}"
    ),
    "known_id": (
        "{%- set ns.ids = [] %}{%- for m in messages %}{%- for c in m.tool_calls or [] %}"
        "{%- set ns.ids = ns.ids + [c.id] %}{%- endfor %}"
        "{%- if m.role == 'tool' and m.tool_call_id not in ns.ids %}{{ raise_exception('unknown id') }}"
        "{%- endif %}{%- endfor %}"
    ),
    "content_string": (
        "{%- for m in messages %}{%- if not m.tool_calls and m.content is not string %}"
        "{{ raise_exception('content string') }}{%- endif %}{%- endfor %}"
    ),
    "content_always_string": (
        "{%- for m in messages %}{%- if m.content is not string %}{{ raise_exception('content string') }}"
        "{%- endif %}{%- endfor %}"
    ),
    "nonempty_assistant": (
        "{%- for m in messages %}{%- if m.role == 'assistant' and not m.content and not m.tool_calls %}"
        "{{ raise_exception('empty assistant') }}{%- endif %}{%- endfor %}"
    ),
    "nonempty": (
        "{%- for m in messages %}{%- if not m.content and not m.tool_calls %}"
        "{{ raise_exception('empty message') }}{%- endif %}{%- endfor %}"
    ),
    "mapping": (
        "{%- for m in messages %}{%- for c in m.tool_calls or [] %}{%- if c.function.arguments is not mapping %}"
        "{{ raise_exception('mapping') }}{%- endif %}{%- endfor %}{%- endfor %}"
    ),
    "string_args": (
        "{%- for m in messages %}{%- for c in m.tool_calls or [] %}{%- if c.function.arguments is not string %}"
        "{{ raise_exception('string') }}{%- endif %}{%- endfor %}{%- endfor %}"
    ),
    "nine": (
        "{%- for m in messages %}{%- for c in m.tool_calls or [] %}{%- if c.id|length != 9 %}"
        "{{ raise_exception('nine') }}{%- endif %}{%- endfor %}{%- endfor %}"
    ),
    "one_call": (
        "{%- for m in messages %}{%- if m.tool_calls and m.tool_calls|length > 1 %}"
        "{{ raise_exception('one call') }}{%- endif %}{%- endfor %}"
    ),
    "name_of_result": (
        "{%- for m in messages %}{%- if m.role == 'tool' and not m.name %}"
        "{{ raise_exception('result needs name') }}{%- endif %}{%- endfor %}"
    ),
    "begins_user": (
        "{%- for m in messages %}"
        "{%- if m.role != 'system' and loop.index0 <= 1 and m.role != 'user' and (loop.first or messages[0].role == 'system') %}"
        "{{ raise_exception('begin with user') }}{%- endif %}{%- endfor %}"
    ),
    "order_of_results": (
        "{%- set ns.q = [] %}{%- for m in messages %}{%- for c in m.tool_calls or [] %}"
        "{%- set ns.q = ns.q + [c.id] %}{%- endfor %}{%- if m.role == 'tool' %}"
        "{%- if not ns.q or ns.q[0] != m.tool_call_id %}{{ raise_exception('order of results') }}{%- endif %}"
        "{%- set ns.q = ns.q[1:] %}{%- endif %}{%- endfor %}"
    ),
    "count_results": (
        "{%- set ns.q = 0 %}{%- for m in messages %}{%- if m.role != 'tool' and ns.q != 0 %}"
        "{{ raise_exception('number of results') }}{%- endif %}{%- if m.tool_calls %}"
        "{%- set ns.q = m.tool_calls|length %}{%- endif %}{%- if m.role == 'tool' %}{%- set ns.q = ns.q - 1 %}"
        "{%- endif %}{%- endfor %}{%- if ns.q != 0 %}{{ raise_exception('number of results at end') }}{%- endif %}"
    ),
    "has_query": (
        "{%- set ns.u = 0 %}{%- for m in messages %}{%- if m.role == 'user' and m.content %}{%- set ns.u = 1 %}"
        "{%- endif %}{%- endfor %}{%- if not ns.u %}{{ raise_exception('no user query') }}{%- endif %}"
    ),
    "no_system": (
        "{%- for m in messages %}{%- if m.role == 'system' %}{{ raise_exception('no system') }}{%- endif %}{%- endfor %}"
    ),
    "no_tool_role": (
        "{%- for m in messages %}{%- if m.role == 'tool' or m.tool_calls %}{{ raise_exception('no tools') }}"
        "{%- endif %}{%- endfor %}"
    ),
    "strip": "{%- for m in messages %}{%- set x = m.content.strip() %}{%- endfor %}",
    "parts_only": (
        "{%- for m in messages %}{%- if m.content and m.content is string and m.role=='user' %}"
        "{{ raise_exception('parts only') }}{%- endif %}{%- endfor %}"
    ),
    "tools_have_params": "{%- for t in tools or [] %}{%- set x = t.function.parameters.properties.items() %}{%- endfor %}",
    "tools_have_required": (
        "{%- for t in tools or [] %}{%- if 'x' in t.function.parameters.required %}{%- endif %}"
        "{%- set y = t.function.description.strip() %}{%- endfor %}"
    ),
}
CONTRADICTORY = {"parts_only": ("strip", "content_string", "content_always_string"), "mapping": ("string_args",)}
# The rest of a template: it writes all texts; content may be a text or a list.
BODY = """{%- if tools %}<tools>{%- for t in tools %}{{ t | tojson }}{%- endfor %}</tools>{%- endif %}
{%- for m in messages %}<|{{ m.role }}|>
{%- if m.content is string %}{{ m.content }}{%- elif m.content %}{%- for p in m.content %}{{ p.text }}{%- endfor %}{%- endif %}
{%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments":
{{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}
</tool_call>{%- endfor %}{%- endfor %}{%- if add_generation_prompt %}<|assistant|>{%- endif %}"""
ARGUMENTS = ('{"city": "A"}', "{}", "", '{"city": ', "null", "[1]", '"x"')


def template_of(draw: random.Random, rules: int) -> tuple[list[str], str]:
    """The names of some compatible rules, and a template with them."""
    while True:
        names = draw.sample(list(RULES), rules)
        if not any(other in names for name in names for other in CONTRADICTORY.get(name, ())):
            return names, BEGIN + "".join(RULES[name] for name in names) + BODY


class Conversation:
    """Random messages that end with a user's or a tool's. texts: all texts in the messages, each once."""

    def __init__(self, draw: random.Random):
        self.draw, self.messages, self.texts = draw, list[dict[str, Any]](), list[str]()
        for _ in range(draw.choice([0, 1, 1, 2])):
            self._add("system", "developer")
        if draw.random() < 0.2:
            self._add("assistant")
        for _ in range(draw.randint(1, 4)):
            for _ in range(draw.choice([1, 1, 1, 2])):
                self._add("user")
            if draw.random() < 0.2:
                self._add("system", "developer")
            if draw.random() < 0.6:
                self._calls()
            kind = draw.random()
            if kind < 0.4:
                self._add("assistant")
            elif kind < 0.6:
                cut = {"content": None, "reasoning_content": "a cut-off thought"}
                self.messages.append({"role": "assistant", **draw.choice([{"content": ""}, cut])})
        self._add("user")

    def _text(self) -> str:
        self.texts.append(f"text{len(self.texts)}.")
        return self.texts[-1]

    def _add(self, *roles: str, **more: Any) -> None:
        text = self._text()
        content = text if self.draw.random() < 0.6 else [{"type": "text", "text": text}]
        self.messages.append({"role": self.draw.choice(roles), "content": content, **more})

    def _calls(self) -> None:
        """Calls and results: possibly in another order, with an empty text, or without the last result, as after an interrupt."""
        draw, count = self.draw, self.draw.choice([1, 1, 2, 3])
        forms = ("call_{}", "toolu_{}", "{:09d}", "functions.get_weather:{}")
        ids = [draw.choice(forms).format(draw.randrange(10**9)) for _ in range(count)]
        calls = [
            {"id": one, "type": "function", "function": {"name": "get_weather", "arguments": draw.choice(ARGUMENTS)}}
            for one in ids
        ]
        message: dict[str, Any] = {"role": "assistant", "tool_calls": calls}
        kind = draw.random()
        if kind < 0.8:
            message["content"] = None if kind < 0.3 else "" if kind < 0.5 else self._text()
        self.messages.append(message)
        if draw.random() < 0.3:
            draw.shuffle(ids)
        for one in ids[: count - (draw.random() < 0.1)]:
            self._add("tool", tool_call_id=one)
            if draw.random() < 0.1:
                self.messages[-1]["content"] = ""
                self.texts.pop()
