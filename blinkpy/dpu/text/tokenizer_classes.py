"""Tokenizer classes of transformers 5 that build their own stages instead of those in tokenizer.json.

For most models, tokenizer.json holds the same stages, and then nothing changes. Older checkpoints differ. For example,
LlamaTokenizer puts a space mark at the start of a text; the normalizer of older files also puts it after each special token.
Only for these classes, `legacy` and `add_prefix_space` of tokenizer_config.json count.

Source: transformers 5.24, models/auto/tokenization_auto.py and the modules of the classes.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tokenizers import Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Encoder

GENERIC = "TokenizersBackend"  # takes every stage from tokenizer.json
GENERIC_NAMES = frozenset({GENERIC, "PreTrainedTokenizer", "PythonBackend"})
LLAMA, GEMMA, COHERE, NEOX = "LlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer"
GPT2, QWEN2, QWEN3_5 = "GPT2Tokenizer", "Qwen2Tokenizer", "Qwen3_5Tokenizer"
QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN3_5_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The class of a model type, which replaces a generic `tokenizer_class`; other types are left out.
OF_TYPES = {
    **dict.fromkeys(("cohere", "cohere2"), COHERE),
    **dict.fromkeys(("gemma2", "gemma3", "gemma3_text"), GEMMA),
    **dict.fromkeys(("internvl", "qwen2", "qwen2_5_vl", "qwen2_audio", "qwen2_moe", "qwen2_vl", "qwen3"), QWEN2),
    **dict.fromkeys(("qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe"), QWEN2),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_text", "qwen3_5_moe_text"), QWEN3_5),
    "olmoe": NEOX,
    **dict.fromkeys(("ernie4_5", "ernie4_5_moe", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm4v", "glm4v_moe"), GENERIC),
    **dict.fromkeys(("granite", "granitemoehybrid", "kimi_k25", "llava", "llava_next", "minimax_m2", "ministral"), GENERIC),
    **dict.fromkeys(("ministral3", "mistral", "mistral3", "mixtral", "olmo2", "olmo3", "phi3", "smolvlm", "voxtral"), GENERIC),
}
# Model types whose published `tokenizer_class` is wrong: the class of the type counts.
WRONG_CLASSES = frozenset({"ernie4_5", "ernie4_5_moe", "llava", "llava_next", "minimax_m2", "phi3", "smolvlm", "qwen2"})
WRONG_CLASSES |= {"qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"}
# Texts of special tokens that tokenizer_config.json doesn't set.
TOKENS: dict[str, dict[str, str]] = {
    LLAMA: {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    GEMMA: {"unk_token": "<unk>", "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "mask_token": "<mask>"},
    COHERE: {
        "unk_token": "<UNK>",
        "bos_token": "<BOS_TOKEN>",
        "eos_token": "<|END_OF_TURN_TOKEN|>",
        "pad_token": "<PAD>",
        "cls_token": "<CLS>",
        "sep_token": "<SEP>",
        "mask_token": "<MASK_TOKEN>",
    },
    NEOX: {**dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"), "pad_token": "<|padding|>"},
    GPT2: dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"),
    **dict.fromkeys((QWEN2, QWEN3_5), dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")),
}


class Stages(NamedTuple):
    """The stages of a class. model: attributes of the BPE model."""

    normalizer: Any
    pre_tokenizer: Any
    decoder: Any
    model: Mapping[str, Any]


def tokenizer_class(model_type: str, config: Mapping[str, Any], declared: str | None, byte_level: bool) -> str:
    """The class that transformers' AutoTokenizer chooses, or GENERIC if it takes every stage from tokenizer.json.

    model_type: of config.json. config: tokenizer_config.json. declared: `tokenizer_class` of config.json, for files without.
    byte_level: whether tokenizer.json names the stage ByteLevel.
    """
    name = config.get("tokenizer_class") or declared
    name = name.removesuffix("Fast") if isinstance(name, str) else None
    remote = "auto_map" in config and model_type not in WRONG_CLASSES
    registered = None if remote else OF_TYPES.get(model_type)
    if name == LLAMA and byte_level and not remote and model_type not in WRONG_CLASSES:
        return GENERIC
    if name is None:
        name = registered
    elif registered is not None and registered != name:
        if registered == GENERIC:
            return GENERIC
        name = registered if model_type in WRONG_CLASSES else name
    return name if name in TOKENS else GENERIC


def stages(name: str, config: Mapping[str, Any]) -> Stages:
    """The stages of a class of TOKENS. config: tokenizer_config.json."""
    spaced = config.get("add_prefix_space")
    if name == LLAMA:
        return _llama(spaced is None or bool(spaced), bool(config.get("legacy", False)))
    if name == GEMMA:
        space = pre_tokenizers.Split(" ", "merged_with_previous", invert=False)
        fallback = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        unknown = _text(config.get("unk_token", "<unk>"))
        model = {"fuse_unk": True, "byte_fallback": True, "unk_token": unknown}
        return Stages(normalizers.Replace(" ", "▁"), space, fallback, model)
    spaced = bool(spaced)
    words: Any = pre_tokenizers.ByteLevel(add_prefix_space=spaced)
    decoder = decoders.ByteLevel()
    if name == COHERE:
        words = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    elif name in (QWEN2, QWEN3_5):
        pattern = Regex(QWEN2_WORDS if name == QWEN2 else QWEN3_5_WORDS)
        split = pre_tokenizers.Split(pattern, "isolated", invert=False)
        words = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=spaced, use_regex=False)])
    model = {"fuse_unk": False, "byte_fallback": False, "unk_token": None}
    return Stages(None if name == GPT2 else normalizers.NFC(), words, decoder, model)


def _llama(spaced: bool, legacy: bool) -> Stages:
    scheme = ("always" if legacy else "first") if spaced else "never"
    mark = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if spaced:
        steps.append(decoders.Strip(" ", 1, 0))
    return Stages(None, mark, decoders.Sequence(steps), {"fuse_unk": True, "byte_fallback": True, "unk_token": None})


def _text(token: Any) -> str:
    return str(token.get("content") if isinstance(token, Mapping) else token)


def rebuild(encoder: Encoder, name: str, config: Mapping[str, Any]) -> list[str]:
    """Give an encoder the stages of a class of TOKENS. Returns the names of the stages that differed."""
    own = stages(name, config)
    changed = []
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        before, after = getattr(encoder, part), getattr(own, part)
        if _effect(part, before) != _effect(part, after):
            changed.append(part)
        setattr(encoder, part, after)
    for key, value in own.model.items():
        if getattr(encoder.model, key) != value:
            changed.append(f"model.{key}")
            setattr(encoder.model, key, value)
    if name == NEOX and encoder.post_processor is not None:
        changed.append("post_processor")
        encoder.post_processor = None
    return changed


def _effect(part: str, stage: Any) -> Any:
    """A stage's JSON without values that change no text and no id: offsets of tokens, and all values of a decoder of bytes."""

    def without(value: Any) -> Any:
        if isinstance(value, list):
            return [without(one) for one in value]
        if not isinstance(value, dict):
            return value
        if part == "decoder" and value.get("type") == "ByteLevel":
            return {"type": "ByteLevel"}
        return {key: without(one) for key, one in value.items() if key != "trim_offsets"}

    return None if stage is None else without(json.loads(stage.__getstate__()))
