"""Harmony, gpt-oss's format: messages come out as they were written, however they are cut, and nothing else is lost."""

import random
import re
import string
from typing import Any

import pytest

from blinkpy.dpu.tools.call_format import call_formats, choose_format
from blinkpy.dpu.tools.harmony_calls import MARKS, MOST_HEADER, answer_begun, marked, unmarked
from blinkpy.dpu.tools.message_parser import Expected, MessageParser, TagCounter
from blinkpy.dpu.tools.output_source import CallArguments, CallBegin, Content, NextMessage, OutputEvent, Reasoning
from blinkpy.dpu.tools.reasoning import PARSERS

HARMONY = call_formats()["openai"]
ALPHABET = string.printable + "éß日本語😀\u2028"
NAMES = [
    "<|start|>",
    "<|channel|>",
    "<|constrain|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
]  # of the tokens, by hand
WORDS = [
    "assistant",
    "analysis",
    "commentary",
    "final",
    "to=functions.get_x",
    " to=python",
    " json",
    "{}",
    "t",
    " ",
    "\n",
    "!",
    "é",
]
Part = tuple[str, str]  # (reasoning, content or the name of a call, its text)


def parts_of(events: list[OutputEvent]) -> list[Part]:
    """Messages and calls, each with its text."""
    parts: list[list[str]] = []
    for event in events:
        if isinstance(event, NextMessage):
            parts.append(["", ""])
        elif isinstance(event, CallBegin):
            parts.append([event.name, ""])
        else:
            kind = "" if isinstance(event, CallArguments) else type(event).__name__.lower()
            if kind and (not parts or parts[-1][0] not in ("", kind)):
                parts.append(["", ""])
            parts[-1][0] = kind or parts[-1][0]
            parts[-1][1] += event.text
    return [(kind, text) for kind, text in parts if kind]


def parsed(pieces: list[str], tools: tuple[str, ...] = ("get_x",), **more: Any) -> list[Part]:
    parser = MessageParser(Expected(calls=HARMONY, tools=frozenset(tools), **more))
    events = [event for piece in pieces for event in parser.feed(piece)]
    return parts_of([*events, *parser.finish()])


def cut(draw: random.Random, text: str) -> list[str]:
    """The text cut at random places, sometimes into characters. A token is one character, as it comes whole."""
    cuts = sorted(draw.randrange(len(text) + 1) for _ in range(draw.choice([0, 1, 3, len(text) // 3, 3 * len(text)])))
    return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


NEXT = "<|end|><|start|>assistant"
THOUGHT = "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant"
CALL = '<|message|>{"city":"Oslo"}<|call|>'
WEATHER = ("get_weather", '{"city":"Oslo"}')


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("<|channel|>final<|message|>4.<|return|>", [("content", "4.")]),
        (THOUGHT + "<|channel|>final<|message|> 4.\n<|return|>", [("reasoning", "Need the weather."), ("content", " 4.\n")]),
        (
            THOUGHT + "<|channel|>commentary to=functions.get_weather <|constrain|>json" + CALL,
            [("reasoning", "Need the weather."), WEATHER],
        ),
        ("<|channel|>commentary to=functions.get_weather<|constrain|>json" + CALL, [WEATHER]),
        ("<|channel|>commentary to=functions.get_weather json" + CALL, [WEATHER]),
        ("<|channel|>analysis to=functions.get_weather code" + CALL, [WEATHER]),
        ("<|channel|>commentary to=get_weather" + CALL, [WEATHER]),
        (" to=functions.get_weather<|channel|>commentary <|constrain|>json" + CALL, [WEATHER]),
        ("<|start|>assistant to=functions.get_weather<|channel|>commentary" + CALL, [WEATHER]),
        (
            "<|channel|>commentary<|message|>I'll look." + NEXT + "<|channel|>commentary to=functions.other json" + CALL,
            [("content", "I'll look."), ("other", '{"city":"Oslo"}')],
        ),
        ("<|channel|>commentary to=functions.now<|message|>  <|call|>", [("now", "{}")]),
        ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", [("reasoning", "1 + 1")]),
        ("<|channel|>analysis<|message|>a" + NEXT + "<|channel|>analysis<|message|>b", [("reasoning", "a"), ("reasoning", "b")]),
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", [("reasoning", "a"), ("content", "b")]),
        ("<|start|>assistant<|message|>b", [("content", "b")]),
        ("<|channel|>final<|message|>a<|end|>stray", [("content", "astray")]),
        ("<|channel|>analysis<|message|>a<|end|>stray", [("reasoning", "a"), ("content", "stray")]),
        ("Just text.", [("content", "Just text.")]),
        ("to be", [("content", "to be")]),
        ("", []),
        ("<|channel|>ana", []),
        ("<|channel|>commentary to=functions.get_w", []),
        ("<|channel|>anal, ysis<|message|>a", [("content", "anal, ysisa")]),
        ("<|channel|>final<|end|>a", [("content", "finala")]),
        (f"<|channel|>{'x' * MOST_HEADER}<|message|>a", [("content", "x" * MOST_HEADER + "a")]),
    ],
)  # fmt: skip
def test_answers_by_hand(text: str, parts: list[Part], seed: int) -> None:
    """From the format's public description, and from errors seen in practice."""
    draw = random.Random(seed)
    for _ in range(20):
        assert parsed(cut(draw, marked(text)), ("get_weather",)) == parts


def test_without_tools_there_are_no_calls() -> None:
    text = marked("<|channel|>commentary to=functions.get_x json<|message|>{}<|call|>")
    assert parsed([text], ()) == [("content", "{}")]
    assert parsed([text]) == [("get_x", "{}")]


def test_only_the_first_call_is_wanted() -> None:
    call = "<|channel|>commentary to=functions.get_x<|message|>{}<|call|>"
    assert parsed([marked(call + "<|start|>assistant" + call)], parallel=False) == [("get_x", "{}")]
    assert parsed([marked(call + "<|start|>assistant" + call)]) == [("get_x", "{}")] * 2


def test_reasoning_may_stay_in_the_text() -> None:
    text = marked("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b")
    assert parsed([text], as_content=True) == [("content", "a"), ("content", "b")]


def random_text(draw: random.Random) -> str:
    """With text that is spelled like tokens."""
    return "".join(
        draw.choice([draw.choice(ALPHABET), draw.choice(NAMES), draw.choice(WORDS)]) for _ in range(draw.randrange(12))
    )


def random_message(draw: random.Random) -> tuple[str, Part]:
    """A message from its channel on, with marks, and its kind."""
    text, channel = random_text(draw), draw.choice(["analysis", "commentary", "final", "call", "call"])
    if channel != "call":
        head = f"<|channel|>{channel}<|message|>"
        return marked(head) + text, ("reasoning" if channel == "analysis" else "content", text)
    name = draw.choice(["get_x", "a.b-c", "x" * 64])
    to, kind = f" to=functions.{name}", draw.choice(["", " json", "<|constrain|>json", " <|constrain|>json", " code"])
    where = draw.choice(["commentary", "commentary", "analysis"])
    head = draw.choice([f"<|channel|>{where}{to}{kind}", f"{to}<|channel|>{where}{kind}"])
    return marked(f"{head}<|message|>") + text, (name, text.lstrip() or "{}")


def test_messages_are_parsed_as_written(seed: int) -> None:
    draw, calls = random.Random(seed), 0
    for _ in range(150):
        written = [random_message(draw) for _ in range(draw.randrange(1, 5))]
        text = marked("<|end|><|start|>assistant").join(text for text, _ in written) + marked(
            draw.choice(["", "<|return|>", "<|call|>"])
        )
        wanted = [part for _, part in written if part[1]]
        assert parsed(cut(draw, text)) == wanted, text
        calls += sum(name not in ("reasoning", "content") for name, _ in wanted)
    assert calls > 50


def test_garbage_is_not_lost(seed: int) -> None:
    """Tokens and scraps in any order: each word arrives, no mark does, and cuts make no difference."""
    draw, found = random.Random(seed), 0
    for _ in range(300):
        scraps = [draw.choice([marked(draw.choice(NAMES)), draw.choice(WORDS), f"w{i}w!"]) for i in range(draw.randrange(25))]
        text = "".join(scraps)
        parts = parsed(cut(draw, text))
        shown = "".join(name + text for name, text in parts)
        assert not set(shown) & set(MARKS.values())
        assert [scrap for scrap in scraps if scrap.endswith("!") and scrap not in shown] == []
        again = parsed(cut(draw, text))
        assert joined(parts) == joined(again), text
        found += len(parts)
    assert found > 200


def joined(parts: list[Part]) -> list[Part]:
    return [(name, text) for name, text in parts if text]


def test_text_is_not_held_back() -> None:
    parser = MessageParser(Expected(calls=HARMONY, tools=frozenset(["get_x"])))
    assert parser.feed(marked("<|channel|>ana")) == []
    assert parser.feed(marked("lysis<|message|>So")) == [NextMessage(), Reasoning("So")]
    assert parser.feed(" what? ") == [Reasoning(" what? ")]
    assert parser.feed(marked("<|end|><|start|>assistant<|channel|>final<|message|>Well")) == [NextMessage(), Content("Well")]
    assert parser.feed(marked("<|end|><|start|>assistant<|channel|>commentary to=functions.get_x<|message|>")) == [
        CallBegin("get_x")
    ]
    assert parser.feed('{"') == [CallArguments('{"')]


def test_an_answer_that_the_prompt_has_begun() -> None:
    """It continues the message that the prompt's last header began."""
    said = "<|start|>user<|message|>Hi<|end|><|start|>assistant"
    assert answer_begun(said) == ""
    assert answer_begun(said + "<|channel|>final<|message|>Well<|end|>") == ""
    final = answer_begun(said + "<|channel|>final<|message|>We")
    assert unmarked(final) == "<|channel|>final<|message|>"
    assert parsed(["ll"], prefix=final) == [("content", "ll")]
    analysis = answer_begun(said + "<|channel|>analysis<|message|>")
    assert parsed([marked("Hm<|end|>")], prefix=analysis) == [("reasoning", "Hm")]


def test_the_format_is_found() -> None:
    for template, kind in (("{{ '<|start|>assistant<|channel|>final<|message|>' }}", "llama"), ("", "gpt_oss")):
        assert choose_format("auto", template, kind) is HARMONY
    assert choose_format("none", "<|channel|><|message|>", "gpt_oss") is None


# ---- counts --------------------------------------------------------------------------------------------------------------


def tokens_of(draw: random.Random, text: str) -> list[str]:
    """As a tokenizer cuts: the tokens of the format are separate tokens."""
    marks = "".join(MARKS.values())
    parts = [part for part in re.split(f"([{marks}])", text) if part]
    return [token for part in parts for token in ([part] if part in marks else cut(draw, part))]


def test_reasoning_tokens_of_messages(seed: int) -> None:
    """All tokens from the start of an analysis message to its end."""
    draw, most = random.Random(seed), 0
    for _ in range(100):
        counter = Expected(calls=HARMONY, tools=frozenset(["get_x"])).reasoning_counter()
        assert counter is not None
        wanted, begin = 0, ""
        for _ in range(draw.randrange(1, 5)):
            text, (kind, _) = random_message(draw)
            tokens = tokens_of(draw, marked(begin) + text + marked("<|end|>"))
            wanted += len(tokens) if kind == "reasoning" else 0
            for token in tokens:
                counter.push(token)
            begin = "<|start|>assistant"
        assert counter.tokens == wanted
        most = max(most, wanted)
    assert most > 10


def test_reasoning_tokens_of_messages_without_an_end() -> None:
    """The start of the next message is not part of the previous message."""
    for begin in ("<|start|>", "<|channel|>"):
        counter = Expected(calls=HARMONY).reasoning_counter()
        assert counter is not None
        for token in ("<|channel|>", "analysis", "<|message|>", "a", begin, "final", "<|message|>", "b", "<|end|>", "c"):
            counter.push(marked(token))
        assert counter.tokens == 4


def test_reasoning_tokens_between_tags(seed: int) -> None:
    """All tokens up to the end of the closing tag."""
    draw = random.Random(seed)
    tags = PARSERS["think"]
    for _ in range(200):
        inside, space = draw.random() < 0.5, draw.choice(["", "\n "])
        thought = random_text(draw).replace("<", "")
        head = draw.choice(["", space + tags.open]) if inside else space + tags.open
        before, after = cut(draw, head + thought + tags.close[:-1]), cut(draw, random_text(draw))
        counter = TagCounter(tags, inside)
        for token in [*before, tags.close[-1], *after]:
            counter.push(token)
        assert counter.tokens == len(before) + 1
        plain = TagCounter(tags, False)
        for token in ["<", "think", " > no </think>", *after]:
            plain.push(token)
        assert plain.tokens == 0
        cut_off = TagCounter(tags, True)
        for token in before[:5]:
            cut_off.push(token)
        assert cut_off.tokens == len(before[:5])
