"""Small tokenizers, made at run time: byte-level BPE, and SentencePiece style with a space mark and byte fallback."""

import json
from functools import cache
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TEXT = [
    "The quick brown fox jumps over the lazy dog, and the dog does not mind.",
    "It was the best of times, it was the worst of times; naïve café, déjà vu, 日本語のテキスト, 😀 and more.",
    "Tell me a story about a king who lived in a castle by the sea with his daughter and her cat.",
] * 4
BOS, EOS, START = "<s>", "</s>", "<|start|>"
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' and message.content == 'refuse' %}{{ raise_exception('refused by the template') }}{% endif %}"
    "<|start|>{{ message.role }}: {{ message.content | trim }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)


@cache
def byte_level_json() -> str:
    """tokenizer.json of a byte-level BPE tokenizer of 500 tokens that puts <s> before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=[BOS, EOS, START],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("two words é", special=False)])
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, bos)])
    return str(tokenizer.to_str())


@cache
def byte_fallback_json() -> str:
    """tokenizer.json in the style of Llama 2: spaces as a mark, characters without a piece as bytes."""
    pieces = [BOS, EOS, "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz,.éTI"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("a", "n"), ("o", "u"), ("▁", "T"), ("e", "r")]
    pieces += [first + second for first, second in merges]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([BOS, EOS, "<unk>"])
    return str(tokenizer.to_str())


@cache
def word_piece_json() -> str:
    """tokenizer.json with a decoder whose output depends on neighbouring tokens."""
    words = ["[UNK]", "the", "king", "##s", "##dom", "cat", ",", "cas", "##tle", "don", "'", "t"]
    tokenizer = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return str(tokenizer.to_str())


def write_model(folder: Path, tokenizer_json: str | None = None, **more: object) -> Path:
    """A model's folder without weights. more: entries of tokenizer_config.json; None removes one."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer_json or byte_level_json())
    config: dict[str, object] = {"bos_token": BOS, "eos_token": {"content": EOS}, "chat_template": TEMPLATE}
    config.update(more)
    (folder / "tokenizer_config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 1}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "eos_token_id": [1]}))
    return folder
