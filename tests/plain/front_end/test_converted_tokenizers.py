"""Folders without tokenizer.json: the error names the file that was found, and its command makes a folder with equal ids.

Also folders with templates in separate files.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.front_end.tokenizer_folders import SPECIALS, auto_tokenizer, config_of, encoders, some_texts, write_files

from blinkpy.config import ConfigError
from blinkpy.dpu.text.chat_template import load_template
from blinkpy.dpu.text.tokenizer import Tokenizer
from blinkpy.models.weights.model_folder import OTHER_FORMS, resolve_model

TEMPLATES = {name: f"{name} {{{{ messages[0].content }}}}" for name in ("config", "file", "tool_use", "rag", "processor")}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


def with_vocabulary(folder: Path) -> None:
    encoder = encoders()["byte-level"]
    encoder.model.save(str(folder))
    config = config_of(encoder, "GPT2Tokenizer", "{{ messages }}")
    write_files(folder, {"tokenizer_config.json": config, "config.json": {"model_type": "gpt2"}})


def with_tekken(folder: Path) -> None:
    words = [*(bytes([byte]) for byte in range(256)), b"th", b"the", b" t", b" the", b"an", b"ou"]
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    sizes = {"num_vocab_tokens": len(words), "default_vocab_size": len(words) + len(SPECIALS)}
    pieces = [
        {"rank": rank, "token_bytes": base64.b64encode(word).decode(), "token_str": word.decode(errors="replace")}
        for rank, word in enumerate(words)
    ]
    special = [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIALS)]
    config = {"pattern": pattern, **sizes, "default_num_special_tokens": len(SPECIALS), "version": "v3"}
    files = {
        "tekken.json": {"config": config, "vocab": pieces, "special_tokens": special},
        "config.json": {"model_type": "mistral3"},
    }
    write_files(folder, files)


@pytest.mark.parametrize(("name", "write"), [("vocab.json", with_vocabulary), ("tekken.json", with_tekken)])
def test_the_command_of_the_error_makes_equal_ids(name: str, write: Any, tmp_path: Path, rng: np.random.Generator) -> None:
    write(tmp_path)
    before = auto_tokenizer(tmp_path)
    texts = some_texts(rng, 40)
    expected = [before.encode(text, add_special_tokens=False) for text in texts]
    with pytest.raises(ConfigError, match=f"{name} has to be converted first") as refusal:
        resolve_model(str(tmp_path), weights=False)
    command = re.search(r'python -c "(.*)"$', str(refusal.value))
    assert command is not None
    exec(command[1])
    resolve_model(str(tmp_path), weights=False)
    own = Tokenizer(tmp_path)
    assert [own.encode(text, False, parse_special=True).tolist() for text in texts] == expected
    after = auto_tokenizer(tmp_path)
    assert [own.encode(text, True, parse_special=True).tolist() for text in texts] == [after.encode(text) for text in texts]


@pytest.mark.parametrize("name", OTHER_FORMS["tokenizer.json"])
def test_each_other_form_is_named(name: str, tmp_path: Path) -> None:
    write_files(tmp_path, {name: "x", "config.json": {}})
    with pytest.raises(ConfigError, match=f"has no tokenizer.json; {re.escape(name)} has to be converted first: python -c"):
        resolve_model(str(tmp_path), weights=False)


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    """All places in all combinations. If transformers has no template for a chat, any is accepted."""
    encoder = encoders()["llama"]
    named = [{"name": name, "template": TEMPLATES[text]} for name, text in (("default", "config"), ("tool_use", "rag"))]
    for number in range(3 * 2 * 2 * 2):
        kind, rest = divmod(number, 8)
        config = config_of(encoder, "PreTrainedTokenizerFast", [None, TEMPLATES["config"], named][kind])
        files = {
            "chat_template.jinja": "file",
            "additional_chat_templates/tool_use.jinja": "tool_use",
            "additional_chat_templates/rag.jinja": "rag",
        }
        chosen = {name: TEMPLATES[text] for place, (name, text) in enumerate(files.items()) if rest >> place & 1}
        folder = write_files(
            tmp_path / str(number),
            {
                "tokenizer.json": encoder.to_str(),
                "tokenizer_config.json": config,
                "config.json": {"model_type": "llama"},
                **chosen,
            },
        )
        auto, own = auto_tokenizer(folder), Tokenizer(folder)
        template = load_template(folder, own.config, "", 1000)
        messages = [{"role": "user", "content": "x"}]
        for tools in (None, TOOLS):
            try:
                expected = auto.apply_chat_template(messages, tools=tools, tokenize=False)
            except ValueError:
                continue
            assert template is not None
            found = (template.with_tools if tools else template).render(messages, tools=tools)
            assert found == expected, f"{sorted(chosen)} and {json.dumps(config['chat_template'])}, tools: {tools}"
