"""The demonstration model as shipped: complete, small, exact in its tokens, and able to write English."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "blinkpy" / "models" / "demo"
BEGIN, END, PAD = 0, 1, 5

PROMPTS = (
    "Tell me a story about a dog.",
    "Tell me a story about a king.",
    "It was a dark night",
    "Once upon a time",
    "Where are you going, Tom?",
    "Tell me about Alice.",
    "Write a short story about a ship.",
    "The old man looked at me,",
)

FIRST_TOKENS = 2000  # of the tokenizer; 975 of them are whole words, the commonest of the training text


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))


@pytest.fixture
def own_model(config: dict, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The model by the training script's own definition."""
    from safetensors.torch import load_file

    monkeypatch.syspath_prepend(ROOT / "tools")
    from demo_llama import Llama, Shape

    shape = Shape(**{name: config[name] for name in Shape.__dataclass_fields__})
    assert shape == Shape()  # the script's defaults, with which these weights were trained
    model = Llama(shape).eval()
    model.load_state_dict({name: value.float() for name, value in load_file(FOLDER / "model.safetensors").items()})
    return model


def render(messages: list[dict], add_generation_prompt: bool = True) -> str:
    """The chat template in the environment that Hugging Face and the front end give it."""

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    template = environment.from_string((FOLDER / "chat_template.jinja").read_text(encoding="utf-8"))
    return template.render(
        messages=messages, add_generation_prompt=add_generation_prompt, bos_token="<|begin|>", eos_token="<|end|>"
    )


def test_folder_is_complete_and_small():
    files = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert set(files) == {
        "README.md", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(files.values()) <= 12_000_000


def test_special_tokens(tokenizer, config):
    names = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
    assert [tokenizer.token_to_id(name) for name in names] == list(range(6))
    assert tokenizer.get_vocab_size() == config["vocab_size"]
    generation = json.loads((FOLDER / "generation_config.json").read_text(encoding="utf-8"))
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (BEGIN, END, PAD)
    assert generation["eos_token_id"] == [END]
    assert tokenizer.encode("Once").ids[0] == BEGIN
    assert tokenizer.decode(tokenizer.encode("Once").ids) == "Once"


def test_every_string_round_trips(tokenizer, rng):
    def points(low: int, high: int) -> str:
        drawn = rng.integers(low, high, rng.integers(0, 60))
        return "".join(chr(c) for c in drawn if not 0xD800 <= c < 0xE000)

    texts = [
        "",
        " ",
        "\n\n \t\r\n",
        "don't  stop\u2014'tis",
        "<|user|> in a text <|end|>",
        "e\u0301\u200d\U0001f469",
        "\x00\ufffd",
    ]
    texts += [points(*bounds) for bounds in ((0, 0x80), (0, 0x800), (0, 0x10000), (0, 0x110000)) for _ in range(50)]
    texts += [bytes(rng.integers(0, 256, 80, dtype=np.uint8)).decode("utf-8", "replace") for _ in range(50)]
    for text, encoding in zip(texts, tokenizer.encode_batch(texts, add_special_tokens=False), strict=True):
        assert tokenizer.decode(encoding.ids, skip_special_tokens=False) == text


def test_every_byte_is_a_token(tokenizer):
    single = {token for token in tokenizer.get_vocab() if len(token) == 1}
    assert len(single) == 256


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([{"role": "user", "content": " Hello!\n"}], "<|begin|><|user|>Hello!<|end|><|assistant|>"),
        (
            [
                {"role": "system", "content": "You are a storyteller."},
                {"role": "user", "content": "Begin."},
                {"role": "assistant", "content": "A king had a son."},
                {"role": "user", "content": [{"type": "text", "text": "Go on."}]},
            ],
            "<|begin|><|system|>You are a storyteller.<|end|><|user|>Begin.<|end|>"
            "<|assistant|>A king had a son.<|end|><|user|>Go on.<|end|><|assistant|>",
        ),
        ([{"role": "assistant", "content": None}], "<|begin|><|assistant|><|end|><|assistant|>"),
    ],
)
def test_chat_template(messages, text):
    assert render(messages) == text
    assert render(messages, add_generation_prompt=False) == text.removesuffix("<|assistant|>")


def test_chat_template_refuses_other_roles():
    with pytest.raises(TemplateError, match="tool"):
        render([{"role": "tool", "content": "42"}])


def test_writes_english(tokenizer):
    """Of the words in the model's greedy answers 93 % are common ones, and 55 are different. Random weights repeat one token or a
    few: at most 10 different words."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    prompts = [tokenizer.encode(render([{"role": "user", "content": text}]), add_special_tokens=False).ids for text in PROMPTS]
    longest = max(map(len, prompts))
    ids = torch.tensor([[PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    greedy = {"do_sample": False, "temperature": None, "top_p": None}
    output = model.generate(input_ids=ids, attention_mask=(ids != PAD).long(), max_new_tokens=48, **greedy)
    texts = [tokenizer.decode(row.tolist()) for row in output[:, longest:]]
    print(texts)
    words = [word.lower() for text in texts for word in re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)*", text)]
    common = {token[1:].lower() for token, number in tokenizer.get_vocab().items() if token[0] == "Ġ" and number < FIRST_TOKENS}
    assert len(words) > 150
    assert sum(word in common for word in words) > 0.75 * len(words)
    assert len(set(words)) > 35
    assert all("\ufffd" not in text for text in texts)


def test_own_definition_is_transformers_llama(own_model, config, rng):
    import torch
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokens = torch.from_numpy(rng.integers(0, config["vocab_size"], (2, 300)))
    with torch.no_grad():
        assert (own_model(tokens) - reference(tokens).logits).abs().max() < 1e-4


def test_prefers_sentences_to_shuffled_words(own_model, tokenizer, rng):
    """On a passage that is in none of the books. Measured: 2.57 nats per token, and 7.04 to 8.40 for its words in 300
    random orders; 8.32 is a model that knows nothing of 4096 tokens."""
    import torch

    text = (
        "The old woman opened the door and looked out into the garden. It had rained all night, and the grass was wet. "
        '"Come in, my dear," she said to the boy, "and sit down by the fire. You must be very tired, for you have come '
        'a long way." He thanked her, and took off his hat, and sat down in the chair that stood by the window.'
    )
    words = text.split(" ")

    def loss(passage: str) -> float:
        ids = torch.tensor([tokenizer.encode(passage).ids])
        with torch.no_grad():
            return torch.nn.functional.cross_entropy(own_model(ids)[0, :-1], ids[0, 1:]).item()

    shuffled = " ".join(words[i] for i in rng.permutation(len(words)))
    print(loss(text), loss(shuffled))
    assert loss(text) < 2.7
    assert loss(shuffled) > loss(text) + 2


def test_training_script_writes_a_model(tmp_path, monkeypatch, capsys):
    """A few steps on a synthetic book: a complete folder that transformers loads, the same bits on a second run."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.syspath_prepend(ROOT / "tools")
    import train_demo_model

    paragraphs = [
        f"The {noun} was in the garden, and the {noun}\nof the {place} had seen a {noun} by wall number {n}.\n\n"
        f'"Where is the {noun}?" said the king\nof the {place}.\n\n"The {noun} is gone," said the queen.'
        for n in range(12)
        for noun in ("dog", "cat", "fox", "goat")
        for place in ("house", "wood")
    ]
    books = tmp_path / "books"
    books.mkdir()
    (books / "book.txt").write_text("CHAPTER I.\n\n" + "\n\n".join(paragraphs), encoding="utf-8")
    small = "--device cpu --steps 3 --teacher-steps 2 --teachers 1 --batch 2 --context 32 --vocab-size 300 --hidden-size 32"
    small += " --intermediate-size 32 --layers 1 --chats 40 --report 3 --warmup 1 --seed 3 --held-out 0.2"
    for name in ("first", "second"):
        assert train_demo_model.main(["--books", str(books), "--out", str(tmp_path / name), *small.split()]) == 0
    assert "held-out loss" in capsys.readouterr().out
    first, second = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "second"))
    assert first == second
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "first")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "first")
    assert model.config.vocab_size == len(loaded) <= 300
    assert loaded.chat_template


def test_training_script_explains_a_wrong_folder(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tools")
    import train_demo_model

    with pytest.raises(SystemExit, match=r"no \*\.txt files"):
        train_demo_model.main(["--books", str(tmp_path), "--out", str(tmp_path / "out"), "--device", "cpu"])
