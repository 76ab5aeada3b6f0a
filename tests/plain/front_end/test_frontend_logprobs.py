"""Log probabilities over HTTP: of each token, in OpenAI's shapes, whole and streamed, through the official client."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import openai
import orjson
import pytest
from support.front_end.fake_engine import FakeEngine
from support.front_end.http_server import MODEL, serving
from support.front_end.tiny_tokenizer import byte_fallback_json, word_piece_json, write_model
from tokenizers import Tokenizer as Encoder

from blinkpy.dpu.generation import TokenLogprobs, chat_logprobs, completion_logprobs
from blinkpy.dpu.http import answers
from blinkpy.dpu.http.fields.response_fields import parse_response
from blinkpy.dpu.http.response_answer import ResponseAnswer
from blinkpy.dpu.text.detokenizer import TokenTexts
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.queues.request_parameters import RequestParameters

EOS, START = 1, 2
TEXT = "naïve 😀 日本 the dog"


class Served(NamedTuple):
    engine: FakeEngine
    tokenizer: Tokenizer
    client: openai.OpenAI


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_model(tmp_path_factory.mktemp("model"))
    with (
        FakeEngine() as engine,
        serving(engine, folder) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        yield Served(engine, Tokenizer(folder), client)


def name(piece: bytes) -> str:
    """The name of a token in completions: its text, or its bytes if they are not whole characters."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def offsets(pieces: list[bytes], special: int) -> list[int]:
    """Characters of the output before each token: those whose last byte has come. special: place of a token without text."""
    text, found = b"", []
    for i, piece in enumerate(pieces):
        found.append(len(text.decode(errors="ignore")))
        text += b"" if i == special else piece
    return found


def test_completions(served: Served) -> None:
    """Text with characters of several tokens, and a special token. The engine answers with the prompt's own tokens."""
    engine, tokenizer, client = served
    prompt = tokenizer.encode(TEXT, add_special_tokens=False).tolist()
    prompt.insert(9, START)
    count = len(prompt)
    pieces = [tokenizer.spell(token)[1] for token in prompt]
    assert b"".join(pieces[:9] + pieces[10:]) == TEXT.encode()
    names = [name(piece) for piece in pieces]
    assert names[9] == "<|start|>"
    assert any(name.startswith("bytes:") for name in names), "the text was meant to have characters of several tokens"
    ask: Any = partial(client.completions.create, model=MODEL, prompt=prompt, max_tokens=count, extra_body={"ignore_eos": True})
    whole = ask(logprobs=4).choices[0]
    logprobs = whole.logprobs
    assert logprobs.tokens == names
    assert logprobs.token_logprobs == [-2.5] * count
    assert logprobs.text_offset == offsets(pieces, 9)
    for token, top in zip(prompt, logprobs.top_logprobs, strict=True):
        tokens, values = engine.likely(token)
        expected: dict[str, float] = {}
        for other, value in [*zip(tokens[1:5], values[1:5], strict=True), (token, -2.5)]:
            text, piece = tokenizer.spell(other)
            expected.setdefault(name(piece) if piece else text, value)
        assert top == expected
    chunks = [chunk.choices[0] for chunk in ask(logprobs=4, stream=True)]
    parts = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    assert len(parts) > 1
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [one for part in parts for one in getattr(part, field)] == getattr(logprobs, field), field
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert ask(logprobs=0).choices[0].logprobs.top_logprobs == [{name: -2.5} for name in names]
    assert ask().choices[0].logprobs is None


def test_chat(served: Served) -> None:
    engine, tokenizer, client = served
    ask: Any = partial(
        client.chat.completions.create,
        model=MODEL,
        messages=[{"role": "user", "content": TEXT}],
        max_tokens=60,
        extra_body={"ignore_eos": True},
    )
    whole = ask(logprobs=True, top_logprobs=3).choices[0]
    answered = engine.submitted[-1].prompt
    tokens = [answered[i % len(answered)] for i in range(60)]
    for token, entry in zip(tokens, whole.logprobs.content, strict=True):
        listed, values = engine.likely(token)
        found = [(one.token, one.bytes, one.logprob) for one in (entry, *entry.top_logprobs)]
        spelled = [tokenizer.spell(other) for other in listed[:4]]
        assert found == [(text, list(piece), value) for (text, piece), value in zip(spelled, values[:4], strict=True)]
    text = b"".join(bytes(entry.bytes) for entry in whole.logprobs.content if not entry.token.startswith("<"))
    assert text.decode(errors="ignore").replace(" ", "") == whole.message.content.replace(" ", "")
    chunks = [chunk.choices[0] for chunk in ask(logprobs=True, top_logprobs=3, stream=True)]
    assert [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content] == whole.logprobs.content
    assert [entry.top_logprobs for entry in ask(logprobs=True).choices[0].logprobs.content] == [[]] * 60
    assert ask(logprobs=False).choices[0].logprobs is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("after", "stop"), [([EOS, 5], None), ([], ["zy dogt"])])
def test_one_entry_for_each_token_that_counts(served: Served, after: list[int], stop: list[str] | None, stream: bool) -> None:
    """The token that ends a text is one of them, and so are all that a stop string is made of, sent or not."""
    _, tokenizer, client = served
    ids = tokenizer.encode("the lazy dog", add_special_tokens=False).tolist()
    ask: Any = partial(client.completions.create, model=MODEL, prompt=ids + after, max_tokens=50, stop=stop, logprobs=1)
    if stream:
        *events, last = ask(stream=True, stream_options={"include_usage": True})
        usage, parts = last.usage, [event.choices[0].logprobs for event in events]
    else:
        body = ask()
        usage, parts = body.usage, [body.choices[0].logprobs]
    tokens = [token for part in parts if part is not None for token in part.tokens]
    assert len(tokens) == usage.completion_tokens
    assert tokens[: len(ids)] == [tokenizer.spell(token)[0] for token in ids]
    assert stop or tokens[-1] == "</s>"


def test_several_prompts(served: Served) -> None:
    ask: Any = partial(served.client.completions.create, model=MODEL, max_tokens=4)
    choices = ask(prompt=[[70, 71], [72, 73, 74]], logprobs=0).choices
    plain = ask(prompt=[[70, 71]]).choices[0]
    assert [len(choice.logprobs.tokens) for choice in choices] == [4, 4]
    assert (plain.logprobs, plain.text) == (None, choices[0].text)


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


def spell(token: int) -> tuple[str, bytes]:
    return f'"{token}\u00e9', b"\xc3"


@pytest.mark.parametrize("form", ["chat", "completion", "response"])
def test_many_log_probabilities_are_written_in_pieces_and_say_the_same(form: str, rng: np.random.Generator) -> None:
    """Around the length of a piece and of several, and with the first token of a prompt, which has no log probability."""
    chat = form != "completion"
    for count in (1, *(most * answers.PIECE + more for most in (1, 2, 3) for more in (-1, 0, 1)), int(rng.integers(1, 500))):
        top = [[(int(rng.integers(600)), -float(rng.random())) for _ in range(rng.integers(5))] for _ in range(count)]
        entries = [TokenLogprobs(i % 600, None if i == 0 and not chat else -1.5, top[i], 3 * i) for i in range(count)]
        answer: Any = answers.Answer(chat, "m", spell)
        if form == "response":
            answer = ResponseAnswer(parse_response(b'{"input": "x"}', RequestParameters()), "m", spell)
        whole = orjson.loads(answers.at_once(answer.whole([answers.Choice(0, "x", "stop", entries)], answers.Usage(1, count))))
        expected = orjson.loads(orjson.dumps(chat_logprobs(entries, spell) if chat else completion_logprobs(entries, spell)))
        if form == "response":
            assert whole["output"][0]["content"][0]["logprobs"] == expected["content"]
        else:
            assert whole["choices"][0]["logprobs"] == expected
