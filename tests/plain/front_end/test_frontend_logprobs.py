"""Log probabilities over HTTP: of each token, in OpenAI's shapes, whole and streamed, through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from support.front_end.fake_engine import FakeEngine, running
from support.front_end.http_server import MODEL, RunningServer, serving
from support.front_end.tiny_tokenizer import byte_fallback_json, word_piece_json, write_model
from tokenizers import Tokenizer as Encoder

from blinkpy.dpu.text.detokenizer import TokenTexts
from blinkpy.dpu.text.tokenizer import Tokenizer

EOS, START = 1, 2
TEXT = "naïve 😀 日本 the dog"


@pytest.fixture(scope="module")
def engine() -> Iterator[FakeEngine]:
    with running() as engine:
        yield engine


@pytest.fixture(scope="module")
def served(engine: FakeEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Tokenizer]]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    with serving(engine, folder) as server:
        yield server, Tokenizer(folder)


@pytest.fixture(scope="module")
def client(served: tuple[RunningServer, Tokenizer]) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served[0].url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def prompt(served: tuple[RunningServer, Tokenizer]) -> list[int]:
    """Text with characters of several tokens, and a special token. The engine answers with the prompt's own tokens."""
    ids = served[1].encode(TEXT, add_special_tokens=False).tolist()
    return [*ids[:9], START, *ids[9:]]


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[bytes]:
    """Bytes of each token, from the vocabulary; special tokens are spelled as they are."""
    table = tokenizer._texts.pieces
    assert table is not None
    return [{START: b"<|start|>", EOS: b"</s>"}.get(token, table[token]) for token in tokens]


def offsets(tokens: list[bytes], special: set[int]) -> list[int]:
    """Characters of the output before each token: those whose last byte has come."""
    text, found = b"", []
    for i, piece in enumerate(tokens):
        found.append(len(text.decode(errors="ignore")))
        text += b"" if i in special else piece
    return found


def test_completions(client: openai.OpenAI, served: Any, engine: FakeEngine, prompt: list[int]) -> None:
    tokenizer, count = served[1], len(prompt)
    own = pieces(tokenizer, prompt)
    kwargs: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": count, "extra_body": {"ignore_eos": True}}
    whole = client.completions.create(logprobs=4, **kwargs).choices[0]
    logprobs = whole.logprobs
    assert logprobs is not None
    names = [piece.decode() if is_text(piece) else "bytes:" + escaped(piece) for piece in own]
    assert any(name.startswith("bytes:") for name in names), "the text was meant to have characters of several tokens"
    assert logprobs.tokens == names
    assert logprobs.token_logprobs == [-2.5] * count
    assert logprobs.text_offset == offsets(own, {9})
    assert logprobs.top_logprobs is not None
    for token, top in zip(prompt, logprobs.top_logprobs, strict=True):
        tokens, values = engine.likely(token)
        expected: dict[str, float] = {}
        for other, value in [*zip(tokens[1:5], values[1:5], strict=True), (token, -2.5)]:
            text, piece = tokenizer.spell(other)
            expected.setdefault(f"bytes:{text}" if piece and not is_text(piece) else text, value)
        assert top == expected
    chunks = [chunk.choices[0] for chunk in client.completions.create(logprobs=4, stream=True, **kwargs)]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert len(parts) > 1
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts for one in getattr(part, name)] == getattr(logprobs, name), name
    assert "".join(chunk.text for chunk in chunks) == whole.text
    alone = client.completions.create(logprobs=0, **kwargs).choices[0].logprobs
    assert alone is not None
    assert alone.top_logprobs == [{name: -2.5} for name in names]
    assert client.completions.create(**kwargs).choices[0].logprobs is None


def test_chat(client: openai.OpenAI, served: Any, engine: FakeEngine) -> None:
    tokenizer = served[1]
    kwargs: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": TEXT}], "max_tokens": 60}
    kwargs["extra_body"] = {"ignore_eos": True}
    whole = client.chat.completions.create(logprobs=True, top_logprobs=3, **kwargs).choices[0]
    assert whole.logprobs is not None
    assert whole.logprobs.content is not None
    answered = engine.submitted[-1].prompt
    tokens = [answered[i % len(answered)] for i in range(60)]
    assert len(whole.logprobs.content) == 60
    for token, entry in zip(tokens, whole.logprobs.content, strict=True):
        listed, values = engine.likely(token)
        found = [(entry.token, entry.bytes, entry.logprob), *((e.token, e.bytes, e.logprob) for e in entry.top_logprobs)]
        spelled = [tokenizer.spell(other) for other in listed[:4]]
        assert found == [(text, list(piece), value) for (text, piece), value in zip(spelled, values[:4], strict=True)]
    text = b"".join(bytes(entry.bytes or []) for entry in whole.logprobs.content if not entry.token.startswith("<"))
    assert text.decode(errors="ignore").replace(" ", "") == (whole.message.content or "").replace(" ", "")
    chunks = [chunk.choices[0] for chunk in client.chat.completions.create(logprobs=True, top_logprobs=3, stream=True, **kwargs)]
    streamed = [entry for chunk in chunks if chunk.logprobs is not None for entry in chunk.logprobs.content or []]
    assert streamed == whole.logprobs.content
    bare = client.chat.completions.create(logprobs=True, **kwargs).choices[0].logprobs
    assert bare is not None
    assert [entry.top_logprobs for entry in bare.content or []] == [[]] * 60
    assert client.chat.completions.create(logprobs=False, **kwargs).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_one_entry_for_each_token_that_counts(client: openai.OpenAI, served: Any, stream: bool) -> None:
    """The token that ends a text is one of them, and so are all that a stop string is made of, sent or not."""
    ids = served[1].encode("the lazy dog", add_special_tokens=False).tolist()
    for prompt, stop in (([*ids, EOS, 5], None), (ids, ["zy dogt"])):
        kwargs: dict[str, Any] = {"model": MODEL, "prompt": prompt, "max_tokens": 50, "stop": stop, "logprobs": 1}
        if stream:
            events = list(client.completions.create(stream=True, stream_options={"include_usage": True}, **kwargs))
            usage = events[-1].usage
            listed = [event.choices[0].logprobs for event in events[:-1]]
            tokens = [token for part in listed if part is not None for token in part.tokens or []]
        else:
            body = client.completions.create(**kwargs)
            assert body.choices[0].logprobs is not None
            usage, tokens = body.usage, body.choices[0].logprobs.tokens or []
        assert usage is not None
        assert len(tokens) == usage.completion_tokens
        assert tokens[: len(ids)] == [served[1].spell(token)[0] for token in ids]
        assert stop or tokens[-1] == "</s>"


def test_several_prompts(client: openai.OpenAI) -> None:
    body = client.completions.create(model=MODEL, prompt=[[70, 71], [72, 73, 74]], max_tokens=4, logprobs=0)
    plain = client.completions.create(model=MODEL, prompt=[[70, 71]], max_tokens=4).choices[0]
    assert [len(choice.logprobs.tokens or []) for choice in body.choices if choice.logprobs] == [4, 4]
    assert plain.logprobs is None
    assert plain.text == body.choices[0].text


@pytest.mark.parametrize("make", [byte_fallback_json, word_piece_json])
def test_tokens_of_other_tokenizers(make: Any, rng: np.random.Generator) -> None:
    """Every id has a spelling, and its bytes are what the id stands for."""
    encoder = Encoder.from_str(make())
    texts = TokenTexts(encoder)
    for token in range(encoder.get_vocab_size()):
        text, piece = texts.spell(token)
        word = encoder.id_to_token(token)
        if word.startswith("<0x"):
            assert piece == bytes([int(word[3:5], 16)])
            assert text == (piece.decode() if piece[0] < 128 else f"\\x{piece[0]:02x}")
        else:
            assert text.encode() == piece
            assert text in (word.replace("▁", " "), word.removeprefix("##"))
    beyond = encoder.get_vocab_size() + int(rng.integers(1000))
    assert texts.spell(beyond) == (f"token_id:{beyond}", b"")


def is_text(piece: bytes) -> bool:
    try:
        piece.decode()
    except UnicodeDecodeError:
        return False
    return True


def escaped(piece: bytes) -> str:
    return "".join(f"\\x{byte:02x}" for byte in piece)
