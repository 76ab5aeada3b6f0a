"""Text of tokens, one by one, against the tokenizer's own decoding of the whole; and up to stop strings."""

import json
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.front_end.tiny_tokenizer import BOS, EOS, START, byte_fallback_json, byte_level_json, word_piece_json, write_model
from tokenizers import AddedToken
from tokenizers import Tokenizer as Encoder

from blinkpy.config import ConfigError
from blinkpy.dpu.text.chat_template import load_template
from blinkpy.dpu.text.detokenizer import REPLACEMENT, Detokenizer, TokenTexts, byte_alphabet
from blinkpy.dpu.text.stop_strings import StopStrings
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.dpu.text.tokenizer_files import special_token

SAMPLES = ["a", "Z", " ", "\n", "é", "ß", "日", "本", "😀", "👩\u200d👧", "\u0301", "\u200f", "ﷺ", "the ", "worst of times"]


def random_text(rng: np.random.Generator, length: int) -> str:
    return "".join(rng.choice(SAMPLES) for _ in range(length))


def texts_of(source: Callable[[], str]) -> tuple[Encoder, TokenTexts]:
    encoder = Encoder.from_str(source())
    return encoder, TokenTexts(encoder)


def stream(table: TokenTexts, ids: list[int], prompt: list[int] | None = None) -> tuple[str, list[str]]:
    """The whole text, and the text of each token."""
    detokenizer = Detokenizer(table, prompt)
    parts = [detokenizer.push(token) for token in ids]
    return "".join(parts) + detokenizer.finish(), parts


@pytest.mark.parametrize("source", [byte_level_json, byte_fallback_json])
def test_encoded_text_decodes_to_itself(source, rng) -> None:
    encoder, table = texts_of(source)
    assert table.texts is not None
    for _ in range(50):
        text = "k" + random_text(rng, int(rng.integers(1, 40)))
        if source is byte_fallback_json:
            text = text.replace("Z", "z")
        ids = encoder.encode(text, add_special_tokens=False).ids
        whole, parts = stream(table, ids)
        assert whole.lstrip(" ") == text
        assert not any(REPLACEMENT in part for part in parts), "a character was broken"


def test_a_token_is_spelled_as_its_text_or_byte_by_byte(rng) -> None:
    """Tokens of any bytes, mixed of text and parts of characters."""
    _, table = texts_of(byte_level_json)
    table.pieces = [
        rng.choice([*range(256), 10, 195, 169], int(rng.integers(1, 6))).astype(np.uint8).tobytes() for _ in range(400)
    ]
    for token, piece in enumerate(table.pieces):
        text, given = table.spell(token)
        whole = piece.decode(errors="ignore")
        assert given == piece
        assert text == whole if whole.encode() == piece else bytes.fromhex(text.replace("\\x", " ")) == piece, piece
        assert whole.encode() == piece or len(text) == 4 * len(piece)


def test_byte_level_equals_full_decode_of_any_tokens(rng) -> None:
    """Special tokens have no text, and added ones have. Invalid UTF-8 gives the same replacement characters, at
    the latest at the end."""
    encoder, table = texts_of(byte_level_json)
    size = encoder.get_vocab_size()
    for _ in range(300):
        ids = rng.integers(0, size + 3, rng.integers(1, 30)).tolist()  # some are outside
        assert stream(table, ids)[0] == encoder.decode(ids, skip_special_tokens=True)


def test_byte_fallback_continues_the_prompt(rng) -> None:
    """The text that a prompt's continuation adds to the prompt's text, including a leading space."""
    encoder, table = texts_of(byte_fallback_json)
    prompt = encoder.encode("the answer", add_special_tokens=False).ids
    for _ in range(200):
        ids = []
        for _ in range(int(rng.integers(1, 12))):
            if rng.random() < 0.4:
                character = str(rng.choice(["é", "日", "😀", "x"]))
                ids += [encoder.token_to_id(f"<0x{byte:02X}>") for byte in character.encode()]
            else:
                ids.append(int(rng.integers(259, encoder.get_vocab_size())))
        expected = encoder.decode(prompt + ids, skip_special_tokens=True)[len(encoder.decode(prompt)) :]
        assert stream(table, ids)[0] == expected
    space = encoder.token_to_id("▁the")
    assert stream(table, [space])[0] == " the"


def test_byte_fallback_shows_a_character_as_soon_as_it_is_whole() -> None:
    encoder, table = texts_of(byte_fallback_json)
    ids = [encoder.token_to_id(f"<0x{byte:02X}>") for byte in "😀日".encode()]
    assert stream(table, ids)[1] == ["", "", "", "😀", "", "", "日"]


@pytest.mark.parametrize("hidden", [0, 30])
def test_decoder_that_depends_on_adjacent_tokens(rng, hidden) -> None:
    """hidden: times that a token without text is likelier than others; runs of it are as long as what is looked at."""
    encoder = Encoder.from_str(word_piece_json())
    encoder.add_special_tokens(["[UNK]"] if hidden else [])
    table = TokenTexts(encoder)
    assert table.texts is None
    size = encoder.get_vocab_size()
    prompt = [1, 2]
    for _ in range(100):
        ids = np.maximum(rng.integers(-hidden, size, rng.integers(1, 60)), 0).tolist()
        expected = encoder.decode(prompt + ids)[len(encoder.decode(prompt)) :]
        assert stream(table, ids, prompt)[0] == expected


@pytest.mark.parametrize("prompt", ["", "日本語の"])
def test_bytes_of_characters_stay_together_in_an_unusual_order_of_the_decoder(rng, prompt) -> None:
    """Replace behind ByteFallback: there is no table of texts."""
    state = json.loads(byte_fallback_json())
    state["decoder"]["decoders"][:2] = state["decoder"]["decoders"][1::-1]
    encoder, _ = texts_of(byte_fallback_json)
    encoder = Encoder.from_str(json.dumps(state))
    table = TokenTexts(encoder)
    assert table.texts is None
    before = encoder.encode("x" + prompt, add_special_tokens=False).ids
    for _ in range(50):
        text = "".join(rng.choice(["日", "本", "語", "😀", "é", "the ", "a"], int(rng.integers(1, 60))))
        ids = encoder.encode("x" + prompt + text, add_special_tokens=False).ids[len(before) :]
        assert stream(table, ids, before)[0] == text


def test_long_outputs_cost_the_same_per_token() -> None:
    """Byte after byte that never makes a character is the worst case: no work may pile up."""
    marks = {byte: character for character, byte in byte_alphabet().items()}
    for source, piece in ((byte_level_json, marks[0xF0]), (byte_fallback_json, "<0xF0>")):
        encoder, table = texts_of(source)
        token = encoder.token_to_id(piece)
        detokenizer = Detokenizer(table)
        start = time.thread_time()
        assert sum(len(detokenizer.push(token)) for _ in range(100_000)) >= 99_990
        assert time.thread_time() - start < 2.0


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, bool]:
    """The text before the first complete stop string; of several that are complete together, before the longest."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end - max(map(len, met))], True
    return text, False


LETTERS = "ab"  # so that texts almost match
TEXTS = st.lists(st.text(LETTERS, max_size=4), max_size=20)
STOPS = st.lists(st.text(LETTERS, min_size=1, max_size=6), min_size=1, max_size=4, unique=True).map(tuple)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)  # the machine may be busy
@given(pieces=TEXTS, stops=STOPS)
def test_equals_the_reference_and_holds_back_no_more_than_needed(pieces, stops) -> None:
    filter_ = StopStrings(stops)
    whole, _ = reference("".join(pieces), stops)
    text = out = ""
    for piece in pieces:
        text += piece
        out += filter_.push(piece)
        assert whole.startswith(out), "something was sent that had to be held back"
        assert filter_.stopped == reference(text, stops)[1]
        held = text[len(out) :]
        assert filter_.stopped or not held or any(stop.startswith(held) and stop != held for stop in stops)
    assert out + filter_.finish() == whole


def test_a_stop_string_may_come_too_early() -> None:
    filter_ = StopStrings(("aba",))
    assert filter_.push("xaba", may_stop=False) + filter_.push("c", may_stop=False) == "xabac"
    assert filter_.push("aba", may_stop=False) == "ab"
    assert filter_.push("ba") == ""
    assert filter_.stopped, "one that began before, and ends behind"


def test_special_characters_are_plain() -> None:
    for stop in ("]", "^", "-", "\\", ".*", "[a]"):
        filter_ = StopStrings((stop,))
        assert filter_.push(f"x{stop}y") == "x"
        assert filter_.stopped


def test_many_long_stops_stay_cheap() -> None:
    """Periodic stop strings, and a text that keeps almost matching them all."""
    stops = tuple("a" * 1000 + chr(ord("b") + i) for i in range(16))
    filter_ = StopStrings(stops)
    start = time.thread_time()
    total = sum(len(filter_.push("aaaa")) for _ in range(2500))
    assert total == 10_000 - 1000
    assert time.thread_time() - start < 2.0


def test_encoding_adds_what_the_model_wants(tmp_path) -> None:
    by_template = Tokenizer(write_model(tmp_path / "a"))
    without = by_template.encode("the dog", add_special_tokens=False)
    assert without.dtype == np.int32
    assert by_template.bos_id == 0
    assert by_template.eos_ids == (1,)
    assert by_template.encode("the dog").tolist() == [0, *without.tolist()]


@pytest.mark.parametrize("kind", ["LlamaTokenizerFast", "PreTrainedTokenizerFast", "CohereTokenizer", None])
@pytest.mark.parametrize("adds", [True, False])
def test_tokenizer_json_alone_says_what_is_added(tmp_path, kind: str | None, adds: bool) -> None:
    """As in transformers 5, whatever tokenizer_config.json says."""
    from transformers import AutoTokenizer

    keys = {"tokenizer_class": kind} if kind else {}
    folder = write_model(tmp_path, add_bos_token=adds, add_eos_token=adds, **keys)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config = {key: value["content"] if isinstance(value, dict) and "content" in value else value for key, value in config.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    found = Tokenizer(folder).encode("the dog").tolist()
    assert found == [0, *Tokenizer(folder).encode("the dog", add_special_tokens=False).tolist()]
    assert found == AutoTokenizer.from_pretrained(folder)("the dog")["input_ids"]


SHOWING = "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}"


@pytest.mark.parametrize("form", ["string", "object"])
@pytest.mark.parametrize("lists_added", [False, True])
def test_special_tokens_of_older_checkpoints(tmp_path, form: str, lists_added: bool, rng) -> None:
    """As transformers takes them: from special_tokens_map.json, or tokenizer_config.json, or both."""
    from transformers import AutoTokenizer

    for case in range(6):
        entries: dict[str, dict] = {"tokenizer_config.json": {}, "special_tokens_map.json": {}}
        for file, named in entries.items():
            kind = {"__type": "AddedToken"} if file == "tokenizer_config.json" else {}
            for name in ("bos_token", "eos_token", "pad_token"):
                text = str(rng.choice([BOS, EOS, START]))
                if rng.random() < 0.6:
                    named[name] = text if form == "string" else {**kind, "content": text, "lstrip": False, "special": True}
        more: dict = {"bos_token": None, "eos_token": None, "add_bos_token": True, "chat_template": SHOWING}
        if lists_added:
            more["added_tokens_decoder"] = {"0": {"content": BOS, "special": True}}
        more |= {"tokenizer_class": "PreTrainedTokenizerFast", **entries["tokenizer_config.json"]}
        folder = write_model(tmp_path / str(case), **more)
        (folder / "special_tokens_map.json").write_text(json.dumps(entries["special_tokens_map.json"]))
        theirs, ours = AutoTokenizer.from_pretrained(str(folder)), Tokenizer(folder)
        assert ours.bos_id == theirs.bos_token_id, entries
        assert special_token(ours.config, "eos_token") == theirs.eos_token, entries
        template = load_template(folder, ours.config, "", 1000)
        assert template is not None
        reported = [{"role": "user", "content": "x"}]
        assert template.render(reported) == theirs.apply_chat_template(reported, tokenize=False), entries


def test_of_several_ends_the_tokenizers_own_is_appended_and_kept(tmp_path, caplog) -> None:
    folder = write_model(tmp_path)
    ids = [7, 8, 1, *range(20, 30)]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    tokenizer = Tokenizer(folder)
    assert tokenizer.eos_ids == (1, 7, 8, 20, 21, 22, 23, 24)
    assert "has 13 end-of-sequence ids, more than supported; ignoring [25, 26, 27, 28, 29]" in caplog.text
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ids[:3]}))
    assert Tokenizer(folder).eos_ids == (1, 7, 8) and len(caplog.messages) == 1


def test_truncation_in_the_file_is_ignored(tmp_path) -> None:
    encoder = Encoder.from_str(byte_level_json())
    encoder.enable_truncation(4)
    encoder.enable_padding(length=8)
    tokenizer = Tokenizer(write_model(tmp_path, encoder.to_str()))
    assert len(tokenizer.encode("the quick brown fox jumps over the lazy dog", add_special_tokens=False)) > 8
    assert len(tokenizer.encode("a", add_special_tokens=False)) == 1


def test_decode_drops_nothing(tmp_path, rng) -> None:
    tokenizer = Tokenizer(write_model(tmp_path))
    text = random_text(rng, 30)
    assert tokenizer.decode(tokenizer.encode(text).tolist()) == text


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("tokenizer.json", "{", "can't read"),
        ("tokenizer.json", None, "no tokenizer.json"),
        ("tokenizer_config.json", "[]", "must hold an object"),
        ("special_tokens_map.json", "{", "is not JSON"),
        ("generation_config.json", "{", "is not JSON"),
        ("config.json", '{"eos_token_id": "x"}', "eos_token_id"),
        ("config.json", '{"eos_token_id": true}', "eos_token_id"),
    ],
)
def test_bad_folders(tmp_path, name, content, reason) -> None:
    folder = write_model(tmp_path)
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_text(content)
    with pytest.raises(ConfigError, match=reason):
        Tokenizer(folder)


@pytest.mark.parametrize("made", [byte_level_json, byte_fallback_json, word_piece_json])
def test_special_tokens_that_are_shown(made) -> None:
    """Only these tokens have text, with a table and without."""
    encoder = Encoder.from_str(made())
    encoder.add_special_tokens(["[SHOWN]", "[HIDDEN]"])
    ids = [encoder.token_to_id(token) for token in ("[SHOWN]", "[HIDDEN]", "[SHOWN]")]
    table = TokenTexts(encoder)
    for shown, count in (((), 0), (("[SHOWN]", "the", "nowhere"), 2), (("[SHOWN]", "[HIDDEN]"), 3)):
        detokenizer = Detokenizer(table.showing(shown))
        text = "".join(map(detokenizer.push, ids)) + detokenizer.finish()
        assert (text.count("[SHOWN]"), text.count("[")) == (min(count, 2), count)
    assert Detokenizer(table).push(ids[0]) == ""


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_tokens_that_the_config_makes_special_are_hidden_as_in_the_library(tmp_path, normalized: bool, special: bool) -> None:
    """added_tokens_decoder redefines tokens that are plain in tokenizer.json, under a normalizer that changes their spelling."""
    encoder = Encoder.from_str(byte_fallback_json())
    names = ["two words", "[ONE]"]
    encoder.add_tokens([AddedToken(name, normalized=True) for name in names])
    redefined = {
        str(encoder.token_to_id(name)): {"content": name, "normalized": normalized, "special": special} for name in names
    }
    more: dict = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": redefined}
    ours = Tokenizer(write_model(tmp_path, encoder.to_str(), **more))
    words = ours.encoder.encode("the king", add_special_tokens=False).ids
    table = TokenTexts(ours.encoder)
    for token in map(int, redefined):
        ids = [*words, token, *words]
        assert stream(table, ids)[0].strip() == ours.encoder.decode(ids, skip_special_tokens=True).strip()


def test_marks_stand_for_tokens_in_every_kind_of_tokenizer() -> None:
    """With a table of texts, and if neighbours count; an incomplete text before a mark is finished."""
    for source, begun in ((byte_level_json(), True), (word_piece_json(), False)):
        encoder = Encoder.from_str(source)
        encoder.add_special_tokens([AddedToken("<|mark|>", special=True), AddedToken("<|other|>", special=True)])
        mark, other = (encoder.token_to_id(name) for name in ("<|mark|>", "<|other|>"))
        detokenizer = Detokenizer(TokenTexts(encoder).showing((), {"<|mark|>": "\udc01"}))
        words = encoder.encode("the king", add_special_tokens=False).ids
        texts = [detokenizer.push(token) for token in (*words, mark, other, *words, mark)]
        assert "".join(texts).split("\udc01") == ["the king", "the king", ""]
        assert texts[len(words)] == texts[-1] == "\udc01"
        if begun:
            byte = encoder.token_to_id("Ã")  # the first byte of é
            assert [detokenizer.push(token) for token in (byte, mark)] == ["", "\ufffd\udc01"]
        assert detokenizer.finish() == ""
