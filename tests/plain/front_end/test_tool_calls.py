"""Tool calls in a model's text: the parsed calls equal the model's, however it is cut into pieces, and no text
is lost.

Claim outputs/calls: Calls and reasoning arrive as the model wrote them, however the text is split.
"""
# ruff: noqa: RUF001

import ast
import json
import random
import re
import string
import warnings
from collections.abc import Callable
from typing import Any

import pytest

from blinkpy.dpu.tools.call_format import call_formats
from blinkpy.dpu.tools.message_parser import Expected, MessageParser
from blinkpy.dpu.tools.output_source import HEAD_CHARACTERS, CallArguments, CallBegin, Content, Reasoning
from blinkpy.dpu.tools.reasoning import PARSERS

Call = tuple[str, dict[str, Any]]
TAGGED = ("qwen3_coder", "seed_oss", "glm45", "minimax_m2", "gemma4")  # test_tagged_calls.py
THINK = PARSERS["think"]
ALPHABET = string.printable + "éßñ日本語😀\u2028\"\\'<>{}[](),:;="
MARKERS = [
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "functools", "<|tool_call|>", "<|/tool_call|>",
    "<|python_tag|>", "<|python_start|>", '{"name": ', '"arguments": {', '"parameters"', "[get_x(", "get_x", "}}", "}", "{", "[",
    "]", '"', "\\", "\n", " ", ";", "<think>", "</think>",
]  # fmt: skip


class Message:
    """A client's sum of the parts of an answer."""

    def __init__(self) -> None:
        self.content = self.reasoning = ""
        self.calls: list[list[str]] = []
        self.order = ""  # of the kinds of parts

    def add(self, events: list[Any]) -> None:
        for event in events:
            self.order += type(event).__name__[0] if not isinstance(event, CallArguments) else ""
            if isinstance(event, CallBegin):
                self.calls.append([event.name, ""])
            elif isinstance(event, CallArguments):
                self.calls[-1][1] += event.text
            elif isinstance(event, Content):
                self.content += event.text
            else:
                assert isinstance(event, Reasoning)
                self.reasoning += event.text


def pieces(draw: random.Random, text: str) -> list[str]:
    """The text cut at random places, sometimes into characters."""
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.choice([0, 1, 3, len(text) // 3, 3 * len(text)])))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def parsed(parts: list[str], **expected: Any) -> Message:
    parser, message = MessageParser(Expected(**expected)), Message()
    for part in parts:
        message.add(parser.feed(part))
    message.add(parser.finish())
    return message


def parser_of(name: str, calls: list[Call] = (), **more: Any) -> dict[str, Any]:  # type: ignore[assignment]
    return {"calls": call_formats()[name], "tools": frozenset(["get_x", *(name for name, _ in calls)]), **more}


# ---- what models write, by hand: independent of blinkpy.dpu.tools


def value(draw: random.Random, depth: int = 0) -> Any:
    kind = draw.choice(["text", "number", "constant", "list", "object"] if depth < 4 else ["text", "number"])
    if kind == "text":
        return words(draw)
    if kind == "number":
        return draw.choice([draw.randrange(-(10**20), 10**20), draw.uniform(-1e9, 1e9), 0, 1e-7, 1e22, -5, 0.5])
    if kind == "constant":
        return draw.choice([True, False, None])
    if kind == "list":
        return [value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice([words, word])(draw): value(draw, depth + 1) for _ in range(draw.randrange(4))}


def words(draw: random.Random, most: int = 8) -> str:
    return "".join(draw.choice([draw.choice(ALPHABET), draw.choice(MARKERS)]) for _ in range(draw.randrange(most)))


def word(draw: random.Random) -> str:
    return draw.choice(string.ascii_letters) + "".join(
        draw.choice(string.ascii_letters + "_0123456789") for _ in range(draw.randrange(12))
    )


def random_calls(draw: random.Random) -> list[Call]:
    def keys(arguments: dict[Any, Any]) -> dict[str, Any]:
        return {f"k{i}{word(draw)}": entry for i, entry in enumerate(arguments.values())}

    arguments = [value(draw, 0) for _ in range(draw.randrange(1, 4))]
    return [(word(draw), keys(entry if isinstance(entry, dict) else {"x": entry})) for entry in arguments]


def written(draw: random.Random, entry: Any) -> str:
    """JSON as models write it: with and without spaces, with and without escapes."""
    separators = draw.choice([None, (",", ":"), (" , ", " : ")])
    return json.dumps(entry, ensure_ascii=draw.random() < 0.5, separators=separators, indent=draw.choice([None, None, 2]))


def one(draw: random.Random, call: Call, key: str = "arguments") -> tuple[str, str]:
    """A call's object, and its arguments as written."""
    arguments = written(draw, call[1])
    members = [f'"name": {json.dumps(call[0])}', f'"{key}":{draw.choice(["", " "])}{arguments}']
    if draw.random() < 0.2:
        members.insert(draw.randrange(3), '"id": "abcdefghi"')
    if draw.random() < 0.2:
        members.reverse()
    return "{" + draw.choice([", ", ",", " ,\n"]).join(members) + draw.choice(["", " ", "\n"]) + "}", arguments


def listed(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    objects = [one(draw, call) for call in calls]
    return "[" + draw.choice([", ", ",", ",\n"]).join(text for text, _ in objects) + "]", [arguments for _, arguments in objects]


def hermes(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    objects, space = [one(draw, call) for call in calls], draw.choice(["", "\n"])
    return "\n".join(f"<tool_call>{space}{text}{space}</tool_call>" for text, _ in objects), [a for _, a in objects]


def llama3(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    objects = [one(draw, call, "parameters") for call in calls]
    return draw.choice(["", "<|python_tag|>"]) + draw.choice(["; ", ";", "\n"]).join(text for text, _ in objects), [
        a for _, a in objects
    ]


def mistral(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    text, arguments = listed(draw, calls)
    return f"[TOOL_CALLS]{draw.choice(['', ' '])}{text}", arguments


def mistral_v11(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    arguments = [written(draw, entry) for _, entry in calls]
    between = draw.choice(["[ARGS]", "[CALL_ID]a1B2c3D4e[ARGS]", ""])
    return "".join(f"[TOOL_CALLS]{name}{between}{a}" for (name, _), a in zip(calls, arguments, strict=True)), arguments


def phi4_words(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    text, arguments = listed(draw, calls)
    return f"functools{text}", arguments


def phi4_tags(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    text, arguments = listed(draw, calls)
    return f"<|tool_call|>{text}<|/tool_call|>", arguments


def pythonic(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    texts = [f"{name}({', '.join(f'{key}={entry!r}' for key, entry in arguments.items())})" for name, arguments in calls]
    text = "[" + draw.choice([", ", ",", ",\n"]).join(texts) + "]"
    return draw.choice([text, f"<|python_start|>{text}<|python_end|>"]), [json.dumps(arguments) for _, arguments in calls]


def deepseek(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    arguments = [written(draw, entry) for _, entry in calls]
    space = draw.choice(["", "\n"])
    each = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{text}\n```<｜tool▁call▁end｜>"
        for (name, _), text in zip(calls, arguments, strict=True)
    ]
    return f"<｜tool▁calls▁begin｜>{space}{space.join(each)}{space}<｜tool▁calls▁end｜>", arguments


def deepseek_31(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    arguments = [written(draw, entry) for _, entry in calls]
    each = [
        f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{text}<｜tool▁call▁end｜>"
        for (name, _), text in zip(calls, arguments, strict=True)
    ]
    return f"<｜tool▁calls▁begin｜>{''.join(each)}<｜tool▁calls▁end｜>", arguments


def kimi(draw: random.Random, calls: list[Call]) -> tuple[str, list[str]]:
    arguments = [written(draw, entry) for _, entry in calls]
    each = [
        f"<|tool_call_begin|>{draw.choice(('functions.', ''))}{name}{draw.choice((f':{i}', ''))}"
        f"<|tool_call_argument_begin|>{text}<|tool_call_end|>"
        for i, ((name, _), text) in enumerate(zip(calls, arguments, strict=True))
    ]
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>", arguments


WRITERS: dict[str, list[Callable[[random.Random, list[Call]], tuple[str, list[str]]]]] = {
    "hermes": [hermes],
    "llama3_json": [llama3],
    "mistral": [mistral, mistral_v11],
    "mistral_v11": [mistral, mistral_v11],
    "phi4_mini_json": [phi4_words, phi4_tags],
    "phi4_mini": [phi4_words, phi4_tags],
    "pythonic": [pythonic],
    "deepseek_v3": [deepseek, deepseek_31],
    "deepseek_v31": [deepseek, deepseek_31],
    "kimi_k2": [kimi],
}
MARKED = [name for name in WRITERS if name not in ("llama3_json", "pythonic")]


def test_every_format_is_tried() -> None:
    assert {*WRITERS, *TAGGED} == {name for name, entry in call_formats().items() if not entry.whole}


@pytest.mark.parametrize("name", WRITERS)
def test_calls_are_parsed_as_written(name: str, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(60):
        calls = random_calls(draw)
        text, arguments = draw.choice(WRITERS[name])(draw, calls)
        before = draw.choice(["", "", "\n\n", "Let me look.", "Let me look.\n\n"]) if name in MARKED else draw.choice(["", "\n"])
        message = parsed(pieces(draw, before + text + draw.choice(["", "\n"])), **parser_of(name, calls))
        assert message.content == before.strip(), text
        assert [call[0] for call in message.calls] == [call[0] for call in calls], text
        assert [json.loads(call[1]) for call in message.calls] == [entry for _, entry in calls], text
        if name != "pythonic":
            assert [call[1] for call in message.calls] == arguments, "arguments stay as the model wrote them"


@pytest.mark.parametrize("name", WRITERS)
def test_other_text_is_content(name: str, seed: int) -> None:
    """Scraps of calls, with numbered words among them: no word is lost, and text without a call is unchanged."""
    draw, calls = random.Random(seed), 0
    for _ in range(150):
        scraps = [draw.choice([draw.choice(MARKERS), f"w{i}w", words(draw, 3)]) for i in range(draw.randrange(30))]
        text = draw.choice(["", "", "[get_x(", "{"]) + "".join(scraps)
        message = parsed(pieces(draw, text), **parser_of(name))
        if not message.calls:
            assert message.content == text
        calls += bool(message.calls)
        kept = message.content + "".join(name + arguments for name, arguments in message.calls)
        kept += "".join(re.findall(r"\[CALL_ID\]\s*([\w.-]{1,64})", text))  # the server gives its own ids
        assert [scrap for scrap in scraps if scrap.endswith("w") and scrap not in kept] == []
    assert calls < 100


@pytest.mark.parametrize("name", WRITERS)
def test_broken_calls_are_not_lost(name: str, seed: int) -> None:
    """A call that ends early, or with a character missing or one too many: every word of it arrives."""
    draw = random.Random(seed)
    for _ in range(100):
        calls = [(f"call_{i}_call", {f"k{i}k{j}k": f"w{i}w{j}w" for j in range(3)}) for i in range(draw.randrange(1, 4))]
        text, _ = draw.choice(WRITERS[name])(draw, calls)
        at = draw.randrange(len(text))
        broken = draw.choice([text[:at], text[:at] + text[at + 1 :], text[:at] + draw.choice(MARKERS) + text[at:]])
        message = parsed(pieces(draw, broken), **parser_of(name, calls))
        kept = message.content + "".join(f"{name} {arguments} " for name, arguments in message.calls)
        for called, arguments in calls:
            for some in (called, *arguments, *arguments.values()):
                assert some not in broken or some in kept, broken


def llama3_list(draw: random.Random, calls: list[Call]) -> str:
    texts = [one(draw, call, "parameters")[0] for call in calls]
    return draw.choice(["", "<|python_tag|>"]) + "[" + draw.choice([", ", ",", ",\n"]).join(texts) + "]"


@pytest.mark.parametrize("name", [name for name in WRITERS if name not in MARKED])
def test_where_nothing_marks_a_call_each_must_name_a_tool(name: str, seed: int) -> None:
    """Also behind others: text without a name, and all behind it, is text."""
    draw = random.Random(seed)
    for _ in range(100):
        calls: list[Call] = [(f"call_{i}_call", {f"k{i}k": draw.randrange(1000)}) for i in range(draw.randrange(1, 5))]
        known = [call for call in calls if draw.random() < 0.7]
        first = next((i for i, call in enumerate(calls) if call not in known), len(calls))
        text = llama3_list(draw, calls) if name == "llama3_json" and draw.random() < 0.5 else WRITERS[name][0](draw, calls)[0]
        message = parsed(pieces(draw, text), **parser_of(name, known))
        assert [(call, json.loads(arguments)) for call, arguments in message.calls] == calls[:first], text
        assert [call for call, _ in calls if call in message.content] == [call for call, _ in calls[first:]], text


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "pythonic"])
def test_arguments_are_streamed_as_generated(name: str, seed: int) -> None:
    """Character by character: nothing of them is held back."""
    draw = random.Random(seed)
    for _ in range(20):
        calls = [(word(draw), {"text": words(draw, 40), "more": value(draw)})]
        text, (arguments,) = draw.choice(WRITERS[name])(draw, calls)
        start = text.index(arguments)
        parser, message = MessageParser(Expected(**parser_of(name, calls))), Message()
        for i, character in enumerate(text):
            message.add(parser.feed(character))
            if start <= i < start + len(arguments) and text.index('"name"' if '"name"' in text else calls[0][0]) < start:
                assert message.calls[0][1] == arguments[: i - start + 1]


@pytest.mark.parametrize("name", WRITERS)
def test_what_is_held_back_is_bounded(name: str) -> None:
    """A start that is never followed by a call comes as content, long before the end."""
    opening = {
        "hermes": "<tool_call>",
        "phi4_mini_json": "functools",
        "phi4_mini": "<|tool_call|>",
        "pythonic": "",
        "llama3_json": "",
        "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>",
    }
    for start in ('[{"id": "', '{"id": ', "[get_x(a='", '[{"id":' + "[" * 50):
        parser, message = MessageParser(Expected(**parser_of(name))), Message()
        text = opening.get(name, "[TOOL_CALLS]") + start
        message.add(parser.feed(text))
        for _ in range(20):
            message.add(parser.feed("1" * 1000))
        limit = 1 << 16 if name == "pythonic" and "get_x" in start else HEAD_CHARACTERS
        for _ in range(limit // 1000 + 2):
            message.add(parser.feed("1" * 1000))
        assert message.content.startswith(text)
        assert not message.calls


def test_ends_of_calls() -> None:
    def content_and_calls(name: str, text: str, **more: Any) -> tuple[str, list[list[str]]]:
        message = parsed([text], **parser_of(name, [], **more))
        return message.content, message.calls

    call = [["f", '{"a": 1}']]
    for text in (
        '<tool_call>{"name": "f", "arguments": {"a": 1}}', '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
        '<tool_call>[{"name": "f", "arguments": {"a": 1}}]</tool_call>',
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        '<tool_call>\n\n{"type": "function", "name": "f", "parameters": {"a": 1}}\n</tool_call>\n\n',
    ):  # fmt: skip
        assert content_and_calls("hermes", text) == ("", call), text
    assert content_and_calls("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call>!') == ("!", [["f", '{"a": 1']])
    for none in ("null", '""'):
        assert content_and_calls("hermes", f'<tool_call>{{"name": "f", "arguments": {none}}}</tool_call>') == ("", [["f", "{}"]])
    assert content_and_calls("hermes", '<tool_call>{"name": "f"}</tool_call>') == ("", [["f", "{}"]])
    two = '<tool_call>{"name": "f", "arguments": {"a": 1}}\n{"name": "g", "arguments": {}}</tool_call>'
    assert content_and_calls("hermes", two) == ("", [*call, ["g", "{}"]])
    assert content_and_calls("hermes", two + " and more ", parallel=False) == (" and more", call)
    after = '<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n\nDone.\n'
    assert content_and_calls("hermes", after) == ("\n\nDone.", call)
    assert content_and_calls("hermes", "A \n" + after.replace("\n\nDone.\n", "B")) == ("AB", call)
    assert content_and_calls("hermes", '<tool_call>{"name": "no name!", "arguments": {}}')[1] == []
    assert content_and_calls("hermes", '<tool_call>{"name": "f", "arguments": {}, "other": 5}')[0] == ', "other": 5}'
    assert content_and_calls("llama3_json", '{"name": "Bob", "parameters": {"age": 5}}') == (
        '{"name": "Bob", "parameters": {"age": 5}}',
        [],
    )
    assert content_and_calls("llama3_json", '<|python_tag|>print("x")') == ('<|python_tag|>print("x")', [])
    spaces = " " * 300 + "</tool_call>"  # too many to wait behind them
    assert content_and_calls("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}' + spaces) == (spaces, call)
    refused = '<tool_call>{"id": "<tool_call>{"name": "f", "arguments": {"a": 1}}'  # is not searched again: time stays linear
    assert content_and_calls("hermes", refused) == (refused, [])
    assert content_and_calls("phi4_mini_json", 'functools {"name": "f"}') == ('functools {"name": "f"}', [])
    assert content_and_calls("pythonic", "[get_x(a=1)(b=2)]") == ("(b=2)]", [["get_x", '{"a": 1}']])
    assert content_and_calls("pythonic", "[other(a=1)]") == ("[other(a=1)]", [])
    assert content_and_calls("pythonic", "[1, 2, 3]") == ("[1, 2, 3]", [])
    assert content_and_calls("mistral", '[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}}') == ("", call)


@pytest.mark.parametrize(
    "expression",
    [
        "a=open('x')", "a=1+1", "a=b", "a=[i for i in 'x']", "a=f'{x}'", "a=b'x'", "a=1j", "a=lambda: 1", "1", "*[1]",
        "**{'a': 1}", "a=1, a=2", "a={'b': 1, 'b': 2}", "a={1: 2}", "a={1, 2}", "a=...", "a=not 1", "a=~1", "a=-" * 5 + "1",
        "a=1e999", "a=x.y", "a=" + "9" * 5000,
        "a=" + "[" * 50 + "]" * 50, "a=" + "-" * 50_000 + "1", "a=" + "(" * 90 + ")" * 90, "a:=1", "a=1 if 1 else 2",
    ],
)  # fmt: skip
def test_python_that_is_no_literal_stays_text(expression: str) -> None:
    text = f"[get_x({expression})]"
    message = parsed([text], **parser_of("pythonic"))
    assert (message.content, message.calls) == (text, [])


def test_python_literals() -> None:
    def arguments(text: str) -> str:
        ((_, found),) = parsed([f"[get_x({text})]"], **parser_of("pythonic")).calls
        found.encode()
        return found

    assert arguments("") == "{}"
    expected = {"a": [1, 2], "b": "é", "c": True, "d": None, "e": -1.5, "f": 1, "g": "a\\d", "h": "ab", "i": [False], "j": 255}
    text = "a=(1, 2,), b='\\u00e9', c=true, d=None, e=-1.5, f=(1), g='a\\d', h='a' 'b', i=[false,], j=0xff,"
    assert json.loads(arguments(text)) == expected
    assert json.loads(arguments("a='\\ud800'")) == {"a": "\ud800"}


def test_strings_of_any_kind_are_those_of_python(seed: int) -> None:
    """Raw or not, in either quotes, with escapes and line breaks: a literal in three quotes says the same to Python."""
    draw, read = random.Random(seed), 0
    for _ in range(300):
        prefix, quote = draw.choice(["", "", "r", "R", "u"]), draw.choice("'\"")
        parts = ["a", "é", "\n", "\n", "\\\\", "\\n", "\\d", f"\\{quote}", "\\x41", "\\\n"]
        inside = "".join(draw.choice(parts) for _ in range(draw.randrange(6)))
        whole = f"{prefix}{quote * 3}{inside}{quote * 3}"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = ast.literal_eval(whole)
        ((_, found),) = parsed([f"[get_x(a={prefix}{quote}{inside}{quote})]"], **parser_of("pythonic")).calls
        assert json.loads(found) == {"a": wanted}, whole
        read += "\n" in inside
    assert read > 50


def test_reasoning(seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(100):
        thought = "".join(
            draw.choice(["so", " ", "\n", "<", "</", "think", "<tool_call>{", '"', "é"]) for _ in range(draw.randrange(20))
        )
        thought = thought.strip("\n")
        answer = draw.choice(["", "Yes.", "1 <think> 2", "</think>"])
        inside = draw.random() < 0.5
        calls = random_calls(draw) if draw.random() < 0.5 else []
        text, arguments = hermes(draw, calls)
        opened = "" if inside and draw.random() < 0.8 else draw.choice(["", "\n"]) + "<think>"
        space = draw.choice(["", "\n", "\n\n"])
        whole = f"{opened}{space}{thought}{space}</think>{space}{answer}{space}{text}"
        if not answer and not text:
            whole = whole.rstrip("\n")
        form = parser_of("hermes", calls) if text or draw.random() < 0.5 else {}
        message = parsed(pieces(draw, whole), tags=THINK, inside=inside, **form)
        assert message.reasoning == thought, whole
        assert message.content.strip() == answer, whole
        assert message.calls == [[name, entry] for (name, _), entry in zip(calls, arguments, strict=True)], whole


def test_reasoning_that_does_not_end_or_begin() -> None:
    def reasoning_and_content(text: str, inside: bool) -> tuple[str, str]:
        message = parsed(list(text), tags=THINK, inside=inside)
        return message.reasoning, message.content

    assert reasoning_and_content("so </thin", True) == ("so </thin", "")
    assert reasoning_and_content("<think>so", False) == ("so", "")
    assert reasoning_and_content("<thin", False) == ("", "<thin")
    assert reasoning_and_content(" so</think>", False) == ("", " so</think>")
    assert reasoning_and_content("", True) == ("", "")
    assert reasoning_and_content("a\n\nb</think>\n\nc\n", True) == ("a\n\nb", "c\n")
    magistral = PARSERS["mistral"]
    assert parsed(["[THI", "NK]so[/THINK]yes"], tags=magistral).reasoning == "so"


def test_a_prefix_of_the_answer_is_part_of_it() -> None:
    expected = parser_of("hermes", prefix='<tool_call>\n{"name": "')
    message = parsed(list('f", "arguments": {}}\n</tool_call>'), **expected)
    assert (message.content, message.calls) == ("", [["f", "{}"]])
    assert parsed([], **expected).content == '<tool_call>\n{"name": "'


@pytest.mark.parametrize("name", PARSERS)
def test_reasoning_tokens_count_up_to_the_closing_tag(name: str, seed: int) -> None:
    """Of a text in any pieces: those up to the end of the tag, or all without a tag. Parts of tags are common."""
    draw, tags = random.Random(seed), PARSERS[name]
    for _ in range(300):
        inside, closed = draw.random() < 0.5, draw.random() < 0.8
        starts = [tags.close[: draw.randrange(len(tags.close))] for _ in range(draw.randrange(4))]
        thought = "x".join(f"{start}{draw.choice(['', ' ', 'x', chr(10)])}" for start in starts).replace(tags.close, "") + " "
        begun = ("" if inside else tags.open) + thought + (tags.close if closed else "")
        counter = Expected(tags=tags, inside=inside).reasoning_counter()
        assert counter is not None
        pushed = [part for part in pieces(draw, begun + (draw.choice(["", "\n\nWell.", tags.close]) if closed else "")) if part]
        for part in pushed:
            counter.push(part)
        lengths = [sum(map(len, pushed[:count])) for count in range(1, len(pushed) + 1)]
        wanted = next(count for count, length in enumerate(lengths, 1) if length >= len(begun)) if closed else len(pushed)
        assert counter.tokens == wanted, (pushed, inside)
