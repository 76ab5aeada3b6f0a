"""Folders with a tokenizer of each kind, and difficult texts, for comparisons with transformers' AutoTokenizer."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from support.front_end.tiny_tokenizer import TEXT
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from blinkpy.dpu.text.tokenizer_classes import QWEN2_WORDS

BOS, EOS, START, UNKNOWN = "<s>", "</s>", "<|start|>", "<unk>"
SPECIALS = [BOS, EOS, UNKNOWN, START]
LETTERS = "abcdefghijklmnopqrstuvwxyz,.éTI"
MERGES = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("a", "n"), ("o", "u"), ("▁", "T"), ("e", "r"), ("▁", "▁")]
EDGES = [
    *("", " ", "  ", "\n", "\t\n ", "the", " the dog ", "  two  spaces  ", "a" * 300, "the" * 100, "don't WE'LL 's 12345 3.14"),
    *(
        "naïve café",
        "e\u0301 a\u0308\u0323",
        "क्षि ते",
        "👩\u200d👩\u200d👧\u200d👦 🏳\ufe0f\u200d🌈",
        "日本語のテキスト",
        "\u200b\ufeff",
        "▁the▁a",
        "Ġthe",
        "<0x41>",
    ),
    *("\x00\x01\x7f", "ﬁ Å Ω", "\r\n\r\n x", "a.\u3000b", " ,  . !", "it 's n't", "\U0010ffff"),
]


def _byte_level(words: str | None) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    if words is None:
        tokenizer.pre_tokenizer = byte_level
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TEXT, trainer)
    return tokenizer


def _marked(kind: str) -> Tokenizer:
    """SentencePiece's variants: an older and a newer Llama, and Gemma."""
    pieces = [
        *SPECIALS,
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        *LETTERS,
        *(first + second for first, second in MERGES),
    ]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    unknown = UNKNOWN if kind == "gemma" else None
    tokenizer = Tokenizer(models.BPE(vocabulary, MERGES, unk_token=unknown, byte_fallback=True, fuse_unk=True))
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    elif kind == "llama":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    else:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if kind != "gemma":
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def encoders() -> dict[str, Tokenizer]:
    """A tokenizer of each kind; each puts BOS before a text."""
    found = {
        "byte-level": _byte_level(None),
        "qwen": _byte_level(QWEN2_WORDS),
        **{kind: _marked(kind) for kind in ("old-llama", "llama", "gemma")},
    }
    for encoder in found.values():
        encoder.add_tokens([AddedToken("<tool>", special=False), AddedToken("two words é", special=False)])
        bos = encoder.token_to_id(BOS)
        encoder.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, bos)]
        )
    return found


CLASSES = {
    "byte-level": "GPT2Tokenizer",
    "qwen": "Qwen2Tokenizer",
    "old-llama": "LlamaTokenizer",
    "llama": "LlamaTokenizer",
    "gemma": "GemmaTokenizer",
}


def config_of(encoder: Tokenizer, tokenizer_class: str, template: str) -> dict[str, Any]:
    """A typical tokenizer_config.json."""
    added = {str(number): token.__getstate__() for number, token in encoder.get_added_tokens_decoder().items()}
    return {
        "added_tokens_decoder": added,
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": UNKNOWN,
        "pad_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "tokenizer_class": tokenizer_class,
        "chat_template": template,
    }


def write_files(folder: Path, files: dict[str, Any]) -> Path:
    """Write files of a folder: JSON or text. None leaves a file out."""
    for name, content in files.items():
        if content is not None:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return folder


def some_texts(rng: np.random.Generator, number: int) -> list[str]:
    """Texts of several difficult pieces and special tokens."""
    parts = [*EDGES, *SPECIALS, "<tool>", "two words é", "<x>", " <x> "]
    return ["".join(parts[i] for i in rng.integers(len(parts), size=int(rng.integers(1, 6)))) for _ in range(number)]


def auto_tokenizer(folder: Path) -> Any:
    """transformers' tokenizer of a folder. Raises many kinds of errors."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
