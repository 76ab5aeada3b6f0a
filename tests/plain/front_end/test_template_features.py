"""Features of chat templates: random templates have the same text in the sandbox as in transformers, or both refuse them."""

import json
from typing import Any

import numpy as np
import pytest
from support.front_end.chat_templates import FORMATS
from transformers.utils.chat_template_utils import _compile_jinja_template

from blinkpy.config import ConfigError
from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate

TOKENS = {"bos_token": "<s>", "image_token": "<img>"}
VALUES: list[Any] = [
    *(
        "text",
        "<b> & 'q' \"d\"",
        "naïve 日本 😀",
        "",
        " x \n",
        7,
        -1.5,
        True,
        None,
        [1, "é", {"a": None}],
        {"b": [1], "a": "é<"},
        [],
    ),
]
FILTERS = [
    *("trim", "upper", "length", "string", "tojson", "tojson(indent=2)", "tojson(indent=4, ensure_ascii=True)", "list", "first"),
    *(
        "tojson(ensure_ascii=True)",
        'tojson(separators=(",", ":"))',
        "tojson(sort_keys=True)",
        "default('d', true)",
        "int",
        "float",
    ),
    *(
        "items | list",
        "dictsort",
        "join(', ')",
        "replace('x', 'y')",
        "e",
        "safe",
        "title",
        "capitalize",
        "indent(2)",
        "last",
        "sort",
    ),
    *(
        "map('string') | join('-')",
        "selectattr('a', 'defined') | list",
        "reverse | list",
        "batch(2) | list",
        "unique | list",
        "wordcount",
    ),
    *(
        "format(1)",
        "round(1)",
        "abs",
        "urlize",
        "escape",
        "xmlattr",
        "pprint",
        "striptags",
        "center(9)",
        "slice(2) | list",
        "count",
    ),
]
TESTS = [
    "defined",
    "none",
    "string",
    "mapping",
    "iterable",
    "sequence",
    "number",
    "boolean",
    "true",
    "false",
    "integer",
    "odd",
    "in 'text'",
]
PIECES = [
    *(
        "{{ m.role }}",
        "{{ m['content'] }}",
        "{{ loop.index0 }}{{ loop.last }}",
        "{{ loop.previtem.role if loop.previtem else '-' }}",
    ),
    *(
        "{{ bos_token }}",
        "{{ image_token }}",
        "{{ eos_token }}",
        "{{ pad_token is defined }}",
        "{{ undefined_name }}",
        "{{ tools }}",
    ),
    *(
        "{{- m.role -}}",
        "\n  {%- if true %}  \n x {% endif %}\n",
        "{# comment #}\n",
        "{% raw %}{{ }}{% endraw %}",
        "{{ documents }}",
    ),
    *(
        "{% set ns.n = ns.n + 1 %}{{ ns.n }}",
        "{% set seen = m.role %}{{ seen }}",
        "{{ seen }}",
        "{% set ns._x = 1 %}",
        "{{ ns.__class__ }}",
    ),
    *(
        "{% if loop.index0 > 0 %}{% break %}{% endif %}",
        "{% if m.role == 'user' %}{% continue %}{% endif %}",
        "{{ m.get('absent') }}",
    ),
    *("{% generation %}{{ m.content }}{% endgeneration %}", "{% generation %}{% set inner = 3 %}{% endgeneration %}{{ inner }}"),
    *(
        "{% generation %}{% set ns.n = 9 %}{{ loop.index }}{% endgeneration %}{{ ns.n }}",
        "{% generation %}{% break %}{% endgeneration %}",
    ),
    *(
        "{% generation %}\n  {{ m.content | trim }}\n{% endgeneration %}\n",
        "{% for c in m.content %}{{ loop.index }}{{ c }}{% else %}-{% endfor %}",
    ),
    *(
        "{{ raise_exception('no') }}",
        "{{ strftime_now('%Y') }}",
        "{{ dict(a=1, b=m.role) | tojson }}",
        "{{ dict.fromkeys(['a', 'b'], 1) }}",
    ),
    *(
        "{{ namespace(a=1).a }}",
        "{{ namespace(_a=1)._a }}",
        "{{ namespace({'self': 2}, b=3).self }}",
        "{{ dict.mro() }}",
        "{{ namespace.mro() }}",
    ),
    *(
        "{{ range(3) | list }}",
        "{{ range(10 ** 6) | length }}",
        "{{ m.content.split('x') }}",
        "{{ m.content.format(1) }}",
        "{{ lipsum }}",
    ),
    *(
        "{{ m.update({'role': 'z'}) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].role }}",
        "{{ messages[::-1] | length }}",
        "{{ cycler(1, 2).next() }}",
    ),
    *(
        "{% macro f(x, y=2) %}{{ x }}{{ y }}{{ kwargs }}{% endmacro %}{{ f(m.role, y=3) }}",
        "{% call f() %}{% endcall %}",
        "{{ m.role ~ 1 }}",
    ),
    *(
        "{% filter upper %}{{ m.role }}{% endfilter %}",
        "{% set block %}{{ m.role }}{% endset %}{{ block }}",
        "{{ joiner(', ')() }}",
        "{{ ''.__class__ }}",
    ),
    *(
        "{{ 'a' if m.role == 'user' else 'b' }}",
        "{{ m.content is string and m.content[:2] }}",
        "{{ (1, 2) + (3,) }}",
        "{{ 7 // 2 ** 1 % 3 }}",
    ),
    *(
        "{% with a = 1 %}{{ a }}{% endwith %}",
        "{% include 'x' %}",
        "{{ self }}",
        "{% debug %}",
        "{% trans %}x{% endtrans %}",
        "{{ {} | attr('get') }}",
    ),
    "{{ add_generation_prompt }}",
]


def template(rng: np.random.Generator) -> str:
    """A random template over `messages`, with a namespace `ns`."""
    parts = []
    for _ in range(int(rng.integers(1, 6))):
        if rng.integers(3):
            parts.append(PIECES[rng.integers(len(PIECES))])
        else:
            chosen = [FILTERS[i] for i in rng.integers(len(FILTERS), size=int(rng.integers(1, 3)))]
            value = "m.content" if rng.integers(2) else json.dumps(VALUES[rng.integers(len(VALUES))]).replace("null", "none")
            parts.append("{{ " + " | ".join([value, *chosen]) + f" }}}}{{{{ {value} is {TESTS[rng.integers(len(TESTS))]} }}}}")
    body = "\n".join(parts)
    return f"{{% set ns = namespace(n=0) %}}{{% for m in messages %}}{body}\n{{% endfor %}}{{{{ ns.n }}}}"


def rendered(source: str, values: dict[str, Any]) -> str | None:
    """transformers' text; None: it refuses the template."""
    try:
        return str(_compile_jinja_template(source).render(**TOKENS, documents=None, **values))
    except Exception:  # Jinja's errors, and those of Python's operators
        return None


def own_text(source: str, values: dict[str, Any]) -> str | None:
    try:
        return ChatTemplate(source, TOKENS, 1 << 20).render(**values)
    except (ChatError, ConfigError):
        return None


def test_random_templates_have_transformers_text(rng: np.random.Generator) -> None:
    texts = 0
    for _ in range(400):
        source = template(rng)
        roles = ["system", "user", "assistant"]
        messages = [{"role": roles[i % 3], "content": VALUES[rng.integers(len(VALUES))]} for i in range(int(rng.integers(1, 4)))]
        values = {"messages": messages, "tools": None, "add_generation_prompt": bool(rng.integers(2))}
        expected, found = rendered(source, values), own_text(source, values)
        if expected is not None and " object at 0x" in expected:
            continue
        assert found == expected, f"{source!r} with {messages}"
        texts += expected is not None
    assert texts > 100, "too few templates are valid"


@pytest.mark.parametrize("name", FILTERS)
def test_each_filter_has_transformers_text(name: str) -> None:
    source = f"{{% for m in messages %}}{{{{ m.content | {name} }}}}{{% endfor %}}"
    for value in VALUES:
        values = {"messages": [{"role": "user", "content": value}], "tools": None, "add_generation_prompt": True}
        expected = rendered(source, values)
        if expected is None or " object at 0x" not in expected:
            assert own_text(source, values) == expected, value


@pytest.mark.parametrize("piece", PIECES)
def test_each_feature_alone_has_transformers_text(piece: str) -> None:
    source = f"{{% set ns = namespace(n=0) %}}{{% for m in messages %}}{piece}\n{{% endfor %}}"
    values = {
        "messages": [{"role": "user", "content": "a x"}, {"role": "z", "content": "é"}],
        "tools": [],
        "add_generation_prompt": True,
    }
    expected, found = rendered(source, values), own_text(source, values)
    if expected is not None and " object at 0x" in expected:
        assert found is not None
    else:
        assert found == expected


@pytest.mark.parametrize("name", list(FORMATS))
def test_templates_of_the_formats_have_transformers_text(name: str) -> None:
    source = FORMATS[name]
    for prompted in (True, False):
        values = {"messages": [{"role": "user", "content": "Hi é <"}], "tools": None, "add_generation_prompt": prompted}
        assert own_text(source, values) == rendered(source, values)
