"""Special tokens: text that is spelled like one is text, unless the chat template wrote it, or a client asked
for it."""

import json
import random
from typing import Any

import numpy as np
import pytest
from support.front_end.tiny_tokenizer import byte_fallback_json, byte_level_json, word_piece_json, write_model
from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from blinkpy.dpu.text.chat_template import ChatError, ChatTemplate, chat_text
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.models.weights.model_folder import DEMO_FOLDER

TEMPLATE = (
    "<s>{% for m in messages %}<|start|>{{ m.role }}: {{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>{% endif %}"
)
PIECES = [
    "<s>",
    "</s>",
    "<|start|>",
    "<|st",
    "art|>",
    "<",
    ">",
    "|",
    "s>",
    "/s>",
    " ",
    "  ",
    "\n",
    "the dog",
    "é😀",
    "<tool>",
    "two words é",
    "a",
]


def chat_prompt(template: ChatTemplate, tokenizer: Tokenizer, messages: Any, **how: bool) -> tuple[str, Any]:
    """Text and token ids of a prompt."""
    text = chat_text(template, tokenizer.specials, messages, **how)
    return tokenizer.specials.unmark(text), tokenizer.encode(text, False, parse_special=True)


def greedy_json() -> str:
    """Special tokens with adjacent spaces, inside each other, normalized, and as a single word."""
    encoder = Encoder.from_str(byte_level_json())
    encoder.add_special_tokens(
        [
            *(AddedToken("<mask>", lstrip=True), AddedToken("<mask>s", rstrip=True)),
            *(AddedToken("<N>", normalized=True), AddedToken("<W>", single_word=True)),
        ]
    )
    return str(encoder.to_str())


@pytest.fixture(scope="module", params=["byte-level", "byte-fallback", "word-piece", "greedy", "demo"])
def folder(request, tmp_path_factory):
    made = {
        "byte-level": byte_level_json,
        "byte-fallback": byte_fallback_json,
        "word-piece": word_piece_json,
        "greedy": greedy_json,
    }
    if request.param == "demo":
        return DEMO_FOLDER
    named = {"bos_token": None, "eos_token": None} if request.param == "word-piece" else {}  # its vocabulary lacks these
    return write_model(tmp_path_factory.mktemp("model"), made[request.param](), **named)


@pytest.fixture(scope="module")
def library(folder):
    """The tokenizer as the library has it."""
    encoder = Encoder.from_file(str(folder / "tokenizer.json"))
    encoder.no_truncation()
    return encoder


def texts(library: Encoder, rng: np.random.Generator, count: int) -> list[str]:
    special = [token.content for token in library.get_added_tokens_decoder().values() if token.special]
    return ["".join(rng.choice([*PIECES, *special], rng.integers(1, 12))) for _ in range(count)]


def special_ids(library: Encoder) -> set[int]:
    return {number for number, token in library.get_added_tokens_decoder().items() if token.special}


def test_asked_for_they_are_the_librarys(tokenizer, library, rng) -> None:
    for text in texts(library, rng, 300):
        for added in (True, False):
            expected = library.encode(text, add_special_tokens=added).ids
            assert tokenizer.encode(text, added, parse_special=True).tolist() == expected, text


def test_otherwise_they_are_text(tokenizer, library, rng) -> None:
    library.encode_special_tokens = True
    try:
        for text in texts(library, rng, 300):
            ids = tokenizer.encode(text, add_special_tokens=False).tolist()
            assert not set(ids) & special_ids(library) - {library.token_to_id("[UNK]"), library.token_to_id("<unk>")}, text
            assert ids == library.encode(text, add_special_tokens=False).ids
    finally:
        library.encode_special_tokens = False


def test_normalized_ones_are_found_behind_a_text_too(tmp_path) -> None:
    """The normalizer puts a space in front of a text, and of the names of such tokens: in the library the first one alone."""
    described = json.loads(byte_fallback_json())
    for token in described["added_tokens"]:
        token["normalized"] = True
    tokenizer = Tokenizer(write_model(tmp_path, json.dumps(described)))
    text = "<s>the</s>the<s>"
    expected = Encoder.from_str(byte_fallback_json()).encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text, False, parse_special=True).tolist() == expected


def test_marks_outlive_capitals(tmp_path) -> None:
    tokenizer = Tokenizer(write_model(tmp_path))
    template = ChatTemplate("{{ messages[0].content | upper }}", {}, 1000)
    assert chat_prompt(template, tokenizer, [{"role": "user", "content": "art|> the </s>"}])[0] == "ART|> THE </s>"


def test_messages_can_not_write_what_the_template_writes(tmp_path, rng) -> None:
    """Whatever the messages are, the prompt has the template's special tokens, and reads as the plain rendering does."""
    tokenizer = Tokenizer(write_model(tmp_path, greedy_json()))
    library = Encoder.from_str(greedy_json())
    template = ChatTemplate(TEMPLATE, {}, 100_000)
    for _ in range(300):
        count = int(rng.integers(1, 4))
        messages = [{"role": rng.choice(["user", "assistant"]), "content": text} for text in texts(library, rng, count)]
        text, ids = chat_prompt(template, tokenizer, messages)
        assert text == template.render(messages), "people read what the template makes of the messages"
        found = [library.id_to_token(number) for number in ids.tolist() if number in special_ids(library)]
        assert found == ["<s>", *["<|start|>", "</s>"] * count, "<|start|>"], messages
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("source", "contents"),
    [
        ("{{ messages[0].content }}{{ messages[1].content }}", ["<|st", "art|>"]),
        ("{{ messages[0].content }}{{ messages[1].content }}", ["<", "s>"]),
        ("{{ messages[0].content | trim }}{{ messages[1].content | trim }}", [" <|start|\n", "\t>"]),
        ("<|{{ messages[0].content }}|>{{ messages[1].content }}", ["start", ""]),
        ("{{ messages[0].content }}|>", ["<|start", ""]),
        ("{{ messages[0].content }}|>", ["so <|start", ""]),
        ("<|{{ messages[0].content }}", ["start|> so", ""]),
        ("{{ messages | tojson }}", ["<|start|>", "</s>"]),
        ("{{ messages[0].content ~ messages[1].content | upper | lower }}", ["</", "s>"]),
    ],
)
def test_halves_do_not_become_one(tmp_path, source, contents) -> None:
    tokenizer = Tokenizer(write_model(tmp_path))
    messages = [{"role": "user", "content": content} for content in contents]
    text, ids = chat_prompt(ChatTemplate(source, {}, 10_000), tokenizer, messages)
    assert text == ChatTemplate(source, {}, 10_000).render(messages)
    assert not set(ids.tolist()) & {0, 1, 2}
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_no_two_parts_of_a_name_become_one(tmp_path) -> None:
    """Wherever it is cut, and whether a part is the template's, a separate message, or at the end of a longer one."""
    tokenizer = Tokenizer(write_model(tmp_path))
    names = [token.content for token in tokenizer.encoder.get_added_tokens_decoder().values() if token.special]
    cuts = [(name[:at], name[at:]) for name in names for at in range(1, len(name))]
    content = ["{{ messages[0].content }}", "{{ messages[1].content }}"]
    for head, tail in cuts:
        for source, contents in (
            (content[0] + content[1], [head, tail]), (content[0] + content[1], [f"so {head}", f"{tail} so"]),
            (content[0] + tail, [head, ""]), (content[0] + tail, [f"so {head}", ""]),
            (head + content[0], [tail, ""]), (head + content[0], [f"{tail} so", ""]),
        ):  # fmt: skip
            messages, template = [{"role": "user", "content": part} for part in contents], ChatTemplate(source, {}, 10_000)
            text, ids = chat_prompt(template, tokenizer, messages)
            assert text == template.render(messages)
            assert not set(ids.tolist()) & {tokenizer.encoder.token_to_id(name) for name in names}, (source, contents)


def test_names_and_nested_values_are_marked_too(tmp_path) -> None:
    tokenizer = Tokenizer(write_model(tmp_path))
    marked = tokenizer.specials.mark(
        {"role": "start", "name": "<s>", "parts": [{"text": "a</s>", "<s>": 1, "type": "<s>"}, 5, None, True]}
    )
    assert marked["role"] == "start", "a word of the API, of which templates make special tokens"
    assert "<s>" not in str(marked)
    assert marked["parts"][1:] == [5, None, True]
    assert tokenizer.specials.unmark(marked["parts"][0]["text"]) == "a</s>"
    plain = "an ordinary text"
    assert tokenizer.specials.mark(plain) is plain


def test_the_last_message_can_be_continued(tmp_path) -> None:
    tokenizer = Tokenizer(write_model(tmp_path))
    template = ChatTemplate(TEMPLATE, {}, 10_000)
    messages = [{"role": "user", "content": "Tell me"}, {"role": "assistant", "content": "Once</s> upon "}]
    text, ids = chat_prompt(template, tokenizer, messages, continue_final_message=True)
    assert text == "<s><|start|>user: Tell me</s>\n<|start|>assistant: Once</s> upon "
    assert ids.tolist().count(1) == 1
    assert chat_prompt(template, tokenizer, messages, add_generation_prompt=False)[0].endswith("upon</s>\n")
    with pytest.raises(ChatError, match="continued"):
        chat_prompt(ChatTemplate("{{ messages[0].content }}", {}, 100), tokenizer, messages, continue_final_message=True)


def test_aliases_are_unpredictable(tmp_path) -> None:
    """Two tokenizers of one folder have other aliases, and outputs have no ids beyond the vocabulary."""
    one, other = Tokenizer(write_model(tmp_path)), Tokenizer(tmp_path)
    names = set(one.specials._aliases.values())
    assert not names & set(other.specials._aliases.values())
    for alias in names:
        assert other.encode(alias).max() < other.vocab_size
    assert one.encode("".join(random.sample(sorted(names), len(names)))).max() < one.vocab_size, (
        "an alias that got out is a token"
    )


def test_outputs_with_special_tokens(tokenizer, library, rng) -> None:
    """As the library decodes them, for tokenizers whose tokens have separate texts."""
    size = min(tokenizer.vocab_size, 400)
    for _ in range(100):
        ids = rng.integers(0, size, 6).tolist()
        shown = tokenizer.decode(ids, skip_special_tokens=False)
        for number in set(ids) & special_ids(library):
            assert library.id_to_token(number) in shown
        assert tokenizer.decode(ids) == tokenizer.decode([number for number in ids if number not in special_ids(library)])
