"""Each key of a tokenizer's files, changed: a folder is refused with file and key, or it has transformers' ids and texts.

The keys of tokenizer_config.json come from the sources of transformers, and the sections of tokenizer.json from the files.
"""

import inspect
import json
import logging
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.front_end.tiny_tokenizer import TEMPLATE
from support.front_end.tokenizer_folders import CLASSES, auto_tokenizer, config_of, encoders, some_texts, write_files
from support.part_of_cases import part_of
from tokenizers import AddedToken
from transformers.models.auto.tokenization_auto import (
    MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS,
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)
from transformers.tokenization_utils_base import PreTrainedTokenizerBase
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from blinkpy.config import ConfigError
from blinkpy.dpu.text.chat_template import chat_text, load_template
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.dpu.text.tokenizer_classes import GENERIC, TOKENS, tokenizer_class
from blinkpy.dpu.text.tokenizer_files import read_encoder
from blinkpy.models.families.family import families

TEXTS, OUTPUTS, LIMIT = 12, 6, 1 << 20
KINDS = sorted({*CLASSES.items(), *((kind, GENERIC) for kind in CLASSES)})
ANY = [True, False, None, 7, "<x>", "the", ["<x>"], {"x_token": "<x>"}]  # for each key
OBJECT = {"content": "<x>", "lstrip": True, "rstrip": False, "single_word": False, "normalized": False, "special": True}
TYPED = {"__type": "AddedToken", **OBJECT}
ADDED = {
    "500": OBJECT | {"special": False, "lstrip": False, "normalized": True},
    "501": OBJECT | {"content": "the", "lstrip": False},
    "3": OBJECT | {"content": "<|start|>", "rstrip": True},
}
NAMED_TEMPLATES = [{"name": name, "template": "{{ bos_token }}" + name + TEMPLATE} for name in ("default", "tool_use", "rag")]
MORE: dict[str, list[Any]] = {
    "bos_token": [TYPED, "</s>", ""],
    "eos_token": [TYPED, "<s>", "<|start|>"],
    "unk_token": [TYPED, "<s>"],
    "pad_token": [TYPED, "<s>", "<tool>"],
    "mask_token": [TYPED],
    "extra_special_tokens": [["<x>", "<|start|>", "the"], [TYPED, "<tool>"], [], {"image_token": "<img>", "x": "the"}],
    "additional_special_tokens": [["<x>", "<|start|>"], [TYPED], []],
    "image_token": ["<img>", TYPED],
    "added_tokens_decoder": [{}],
    "chat_template": [NAMED_TEMPLATES, NAMED_TEMPLATES[:1], NAMED_TEMPLATES[1:], {"default": TEMPLATE}],
    "tokenizer_class": [*TOKENS, "LlamaTokenizerFast", "PreTrainedTokenizerFast", "PreTrainedTokenizer", "UnheardOfTokenizer"],
    "padding_side": ["left", "right"],
    "fast_tokenizer_files": [["tokenizer.json"], ["tokenizer.4.0.json"]],
}
MODEL_KEYS: dict[str, list[Any]] = {
    "fuse_unk": [True, False],
    "byte_fallback": [True, False],
    "ignore_merges": [True],
    "unk_token": ["<unk>", None],
}
SECTIONS: dict[str, list[Any]] = {
    "normalizer": [
        None,
        {"type": "NFC"},
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Strip", "strip_left": True, "strip_right": True},
    ],
    "pre_tokenizer": [
        *(None, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}),
        *({"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False} for scheme in ("always", "never")),
        {"type": "Digits", "individual_digits": True},
    ],
    "post_processor": [
        *(None, {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True}),
        *({"type": "BertProcessing", "sep": ["</s>", 1], "cls": ["<s>", 0]},),
    ],
    "decoder": [
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False},
    ],
    "truncation": [{"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}],
    "padding": [
        *(
            {"strategy": strategy, "direction": "Left", "pad_to_multiple_of": 8, "pad_id": 1, "pad_type_id": 0, "pad_token": pad}
            for strategy, pad in (("BatchLongest", "</s>"), ({"Fixed": 16}, "<pad>"))
        )
    ],
}
# Of transformers alone: the objects that replace its files, and names of its arguments.
OBJECTS = {"kwargs", "self", "token", "tokenizer", "gguf_file", "repo_id", "commit_message", "use_source_tokenizer"}


def known_keys() -> list[str]:
    """The keys of tokenizer_config.json that transformers reads."""
    classes = [tokenizer_class_from_name(name) for name in TOKENS]
    loader = PreTrainedTokenizerBase._from_pretrained.__func__
    sources = [PreTrainedTokenizerBase.__init__, loader, TokenizersBackend, *(one.__init__ for one in classes)]
    keys = set(PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES) | MORE.keys()
    for source in map(inspect.getsource, sources):
        keys |= set(re.findall(r'kwargs(?:\.(?:pop|get|setdefault)\(\s*|\[)"(\w+)"', source))
        keys |= set(re.findall(r'"(\w+)" (?:not )?in (?:init_|local_)?kwargs', source))
    for one in classes:
        keys |= set(inspect.signature(one.__init__).parameters)
    assert len(keys) > 50, "the sources have another form"
    return sorted(keys - OBJECTS)


def changes(files: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """File, key and all files, with one value changed."""
    config, encoder = files["tokenizer_config.json"], files["tokenizer.json"]
    for key in known_keys():
        for value in (*ANY, *MORE.get(key, ())):
            yield "tokenizer_config.json", key, {**files, "tokenizer_config.json": {**config, key: value}}
        if key in config:
            without = {name: value for name, value in config.items() if name != key}
            yield "tokenizer_config.json", key, {**files, "tokenizer_config.json": without}
    added = config["added_tokens_decoder"]
    listed = [added | {number: token} for number, token in ADDED.items()]
    listed += [{number: token for number, token in added.items() if number != lost} for lost in added]
    listed += [
        {**added, number: {**token, flag: not token[flag]}}
        for number, token in added.items()
        for flag in ("lstrip", "normalized", "special")
    ]
    for one in listed:
        yield (
            "tokenizer_config.json",
            "added_tokens_decoder",
            {**files, "tokenizer_config.json": {**config, "added_tokens_decoder": one}},
        )
    for key, options in SECTIONS.items():
        for value in options:
            yield "tokenizer.json", key, {**files, "tokenizer.json": {**encoder, key: value}}
    for key, settings in MODEL_KEYS.items():
        for setting in settings:
            yield "tokenizer.json", key, {**files, "tokenizer.json": {**encoder, "model": {**encoder["model"], key: setting}}}
    old = {name: value for name, value in config.items() if name != "added_tokens_decoder"}
    for name in ("special_tokens_map.json", "added_tokens.json"):
        contents: list[dict[str, Any]] = [{"<x>": 500, "the": 501}]
        if name == "special_tokens_map.json":
            named, lists = (
                ("bos_token", "eos_token", "pad_token", "image_token"),
                ("additional_special_tokens", "extra_special_tokens"),
            )
            contents = [{key: value} for key in named for value in ("<x>", OBJECT, "the")]
            contents += [{key: [*tokens]} for key in lists for tokens in (["<x>"], ["the", "<tool>"])]
        for content in contents:
            key = next(iter(content))
            yield name, key, {**files, name: content, "tokenizer_config.json": old}
            yield name, key, {**files, name: content}
    for model_type in sorted({"", *(one.model_type for one in families().values())}):
        for published in (None, GENERIC, "LlamaTokenizerFast", "Qwen2Tokenizer"):
            changed = {**config, "tokenizer_class": published}
            yield (
                "config.json",
                "model_type",
                {**files, "config.json": {"model_type": model_type}, "tokenizer_config.json": changed},
            )


def differences(folder: Path, auto: Any, rng: np.random.Generator) -> list[str]:
    """Differences from transformers, of ids, texts and chats. Raises ConfigError."""
    own, found = Tokenizer(folder), list[str]()
    find_everywhere(auto)
    for text in some_texts(rng, TEXTS):
        for special in (True, False):
            expected, ids = auto.encode(text, add_special_tokens=special), own.encode(text, special, parse_special=True).tolist()
            found += [] if ids == expected else [f"{text!r} has ids {ids}, not {expected}"]
    found += text_differences(own, auto, rng)
    template = load_template(folder, own.config, "", LIMIT)
    tools = [{"type": "function", "function": {"name": "f<s>", "parameters": {}}}]
    for given in (None, tools):
        for prompted in (True, False):
            users = [{"role": "user", "content": text or "x"} for text in some_texts(rng, 2)]
            try:
                expected = auto.apply_chat_template(users, tools=given, add_generation_prompt=prompted, tokenize=False)
            except Exception:  # without a template for it, or without a template at all
                continue
            assert template is not None
            chosen = template.with_tools if given else template
            marked = chat_text(chosen, own.specials, users, prompted, tools=given)
            text, ids = own.specials.unmark(marked), own.encode(marked, False, parse_special=True).tolist()
            found += [] if text == expected else [f"the chat is {text!r}, not {expected!r}"]
            plain = auto.encode(expected, add_special_tokens=False)
            names = [token.content for token in own.encoder.get_added_tokens_decoder().values() if token.special]
            if not any(name in user["content"] for user in users for name in names):
                found += [] if ids == plain else [f"the chat {text!r} has ids {ids}, not {plain}"]
    return found


def find_everywhere(auto: Any) -> None:
    """Find special tokens anywhere in a text, as blinkpy does. A normalizer that prepends a space hides normalized ones from
    transformers, except at the start of a text.
    """
    added = auto._tokenizer.get_added_tokens_decoder().values()
    normalized = [one.__getstate__() for one in added if one.special and one.normalized]
    auto._tokenizer.add_tokens([AddedToken(**{**state, "normalized": False}) for state in normalized])


def text_differences(own: Tokenizer, auto: Any, rng: np.random.Generator) -> list[str]:
    found = []
    for text in some_texts(rng, OUTPUTS):
        ids = [*auto.encode(text, add_special_tokens=False), *rng.integers(len(auto), size=4).tolist()]
        plain = [token for token in ids if not re.fullmatch(r"<0x..>", auto.convert_ids_to_tokens(token) or "")]
        for output in (ids[:-4], plain):  # invalid runs of bytes have another number of U+FFFD
            prompt = auto.encode("a", add_special_tokens=False)
            for skips in (True, False):
                before = auto.decode(prompt, skip_special_tokens=skips)
                expected = auto.decode([*prompt, *output], skip_special_tokens=skips)
                stream = own.detokenizer(np.array(prompt, np.int32), skips)
                shown = before + "".join(map(stream.push, output)) + stream.finish()
                found += [] if shown == expected else [f"{output} is {shown!r}, not {expected!r} (skips: {skips})"]
    return found


@pytest.mark.parametrize(("kind", "name"), KINDS)
def test_a_changed_value_is_refused_or_has_its_effect(
    kind: str, name: str, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    encoder = encoders()[kind]
    config = config_of(encoder, name, TEMPLATE)
    files = {
        "tokenizer.json": json.loads(encoder.to_str()),
        "tokenizer_config.json": config,
        "config.json": {"model_type": "llama"},
    }
    outcomes, wrong = Counter[str](), list[str]()
    for number, (file, key, changed) in enumerate(part_of(changes(files), 24)):
        folder = write_files(tmp_path / str(number), changed)
        value = {name: content for name, content in changed.items() if content is not files.get(name)}
        label = f"{file}: {key}: {json.dumps(value.get(file, value).get(key, value.get(file)), ensure_ascii=False)[-200:]}"
        try:
            auto = auto_tokenizer(folder)
            auto.encode("<s>the", add_special_tokens=True)
        except KeyboardInterrupt:
            raise
        except BaseException:  # transformers and its library have no single error; a panic has another base
            outcomes["transformers refuses"] += 1
            continue
        try:
            found = differences(folder, auto, rng)
        except ConfigError as refusal:
            outcomes["refused"] += 1
            wrong += [] if key in str(refusal) and file in str(refusal) else [f"{label}: refused without file and key: {refusal}"]
            continue
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        outcomes["as transformers"] += 1
        wrong += [f"{label}: {found[0]} ({len(found)} differences)"] if found else []
    assert not wrong, f"{len(wrong)} of {outcomes}\n" + "\n".join(wrong)
    assert outcomes["as transformers"] > 20, outcomes


@pytest.mark.parametrize("kind", CLASSES)
def test_a_warning_names_the_stages_that_a_class_changes(
    kind: str, tmp_path: Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """Values without an effect on ids and texts cause no warning; files of Qwen have such values."""
    encoder = encoders()[kind]
    content = json.loads(encoder.to_str().replace('"trim_offsets":true', '"trim_offsets":false'))
    if kind in ("byte-level", "qwen"):
        content["decoder"] |= {"add_prefix_space": False, "use_regex": False}
    own = {"old-llama": ["normalizer", "pre_tokenizer"]}.get(kind, [])
    part, stage = (("normalizer", {"type": "Lowercase"}), ("decoder", {"type": "Fuse"}))[int(rng.integers(2))]
    both = [name for name in ("normalizer", "pre_tokenizer", "decoder") if name in (*own, part)]
    for changed, expected in (({}, own), ({part: stage}, both)):
        caplog.clear()
        files = {"tokenizer.json": content | changed, "tokenizer_config.json": config_of(encoder, CLASSES[kind], TEMPLATE)}
        read_encoder(write_files(tmp_path, files))
        words = f"tokenizer_class {CLASSES[kind]} of transformers replaces {', '.join(expected)} of tokenizer.json"
        assert [record.message.partition(": ")[2].partition(";")[0] for record in caplog.records] == [words] * bool(expected)


def test_each_model_type_has_transformers_class() -> None:
    """The class that AutoTokenizer registers for each served model type, and the types whose published class it overrules."""
    for model_type in sorted({one.model_type for one in families().values()}):
        registered = TOKENIZER_MAPPING_NAMES.get(model_type)
        own = tokenizer_class(model_type, {}, None, byte_level=False)
        assert own == (registered if registered in TOKENS else GENERIC), f"{model_type}: OF_TYPES lacks {registered}"
        published = "GPT2Tokenizer" if registered != "GPT2Tokenizer" else "LlamaTokenizer"
        overruled = model_type in MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
        expected = (
            published if registered is None else GENERIC if registered == GENERIC else registered if overruled else published
        )
        found = tokenizer_class(model_type, {"tokenizer_class": published}, None, byte_level=False)
        assert found == expected, f"{model_type}: OF_TYPES or WRONG_CLASSES lacks it"
