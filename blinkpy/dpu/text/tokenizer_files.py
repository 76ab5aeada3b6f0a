"""The files of a tokenizer, read as transformers' AutoTokenizer reads them: the encoder, and the texts of special tokens.

tokenizer.json holds the encoder. tokenizer_config.json, special_tokens_map.json and added_tokens.json may add tokens, change
tokens' properties, and choose a class with its own stages (tokenizer_classes).

Source: transformers 5.24, PreTrainedTokenizerBase._from_pretrained and TokenizersBackend.__init__.
"""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Encoder

from blinkpy.config import ConfigError
from blinkpy.dpu.text.tokenizer_classes import COHERE, GENERIC, QWEN2, TOKENS, rebuild, tokenizer_class
from blinkpy.model_files import has_file, read_bytes, read_json

NAMED = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
CONFIG, MAP, ENCODER, OLD = "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json", "added_tokens.json"
MOST_ADDED = 1 << 16  # added tokens; published models have a few thousand
MOST_ID = 1 << 31
FLAGS_OF_TEXTS = ("add_bos_token", "add_eos_token")  # without an effect next to tokenizer.json
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
Token = str | AddedToken
logger = logging.getLogger("blinkpy.frontend")


def special_token(tokenizer_config: Mapping[str, Any], name: str) -> str | None:
    """A special token's text from tokenizer_config.json, which has a string or an object with `content`."""
    value = tokenizer_config.get(name)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def special_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Texts of all named special tokens, which chat templates read as variables, such as `bos_token` and `image_token`."""
    named = _named(tokenizer_config)
    return {name: text for name in named if (text := special_token(named, name)) is not None}


def _named(config: Mapping[str, Any]) -> dict[str, Any]:
    """All named special tokens, as the files have them."""
    found = {name: config.get(name) for name in NAMED}
    found |= {name: value for name, value in config.items() if name.endswith("_token") and name not in FLAGS_OF_TEXTS}
    for key in ("model_specific_special_tokens", "extra_special_tokens"):
        if isinstance(config.get(key), dict):
            found |= config[key]
    return found


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """Read tokenizer_config.json, with the special tokens that its class gives to absent keys. If it lists no added tokens, as
    older files do, the keys of special_tokens_map.json override its own. Raises ConfigError.
    """
    config = read_json(folder, CONFIG, optional=True)
    extra = config.get("extra_special_tokens")
    if not extra and "additional_special_tokens" in config:
        config["extra_special_tokens"] = config["additional_special_tokens"]
    if "added_tokens_decoder" not in config:
        named = read_json(folder, MAP, optional=True)
        if isinstance(named.get("extra_special_tokens"), list):
            named["extra_special_tokens"] = [*(config.get("extra_special_tokens") or ()), *named["extra_special_tokens"]]
        config |= named
        config.setdefault("extra_special_tokens", named.get("additional_special_tokens"))
    return config


def read_encoder(folder: Path, config: Mapping[str, Any] | None = None) -> Encoder:
    """Read the encoder from tokenizer.json, with the stages and tokens of the other files.

    config: the result of read_tokenizer_config, which is otherwise read here; tokens of the class are added to it.
    Raises ConfigError.
    """
    path = folder / ENCODER
    if not has_file(folder, path.name):
        raise ConfigError(f"{folder} has no {path.name}")
    content = read_bytes(folder, path.name)
    try:
        encoder = Encoder.from_buffer(content)
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"can't read {path}: {error}") from error
    values = read_tokenizer_config(folder) if config is None else config
    _require_supported(folder, values, encoder)
    own = read_json(folder, "config.json", optional=True)
    name = tokenizer_class(str(own.get("model_type", "")), values, own.get("tokenizer_class"), b'"ByteLevel"' in content)
    if name != GENERIC and isinstance(encoder.model, models.BPE):
        _rebuild(folder, encoder, name, values)
    else:
        name = GENERIC
    if isinstance(encoder.padding, dict):
        values = {"pad_token": encoder.padding["pad_token"], **values}
    values = {**TOKENS.get(name, {}), **values}
    if isinstance(config, dict):
        config |= values
    _add_tokens(folder, encoder, name, values)
    added = len(encoder.get_added_tokens_decoder())
    if added > MOST_ADDED:
        raise ConfigError(f"{path} has {added:,} added tokens; at most {MOST_ADDED:,} are supported")
    return encoder


def _rebuild(folder: Path, encoder: Encoder, name: str, config: Mapping[str, Any]) -> None:
    changed = rebuild(encoder, name, config)
    listed = config.get("added_tokens_decoder")
    if isinstance(listed, dict):
        kept = {one.get("content") for one in listed.values() if isinstance(one, dict)}
        lost = sorted(one.content for one in encoder.get_added_tokens_decoder().values() if one.content not in kept)
        if lost:
            raise ConfigError(
                f"{folder / CONFIG}: added_tokens_decoder lacks {lost[0]!r:.200}, which {ENCODER} adds and {name} drops; "
                f"add it, or set tokenizer_class to {GENERIC}"
            )
    if changed:
        logger.warning(
            "%s: tokenizer_class %s of transformers replaces %s of %s; tokenizer_class %s would keep it",
            *(folder / CONFIG, name, ", ".join(changed), ENCODER, GENERIC),
        )


def _require_supported(folder: Path, config: Mapping[str, Any], encoder: Encoder) -> None:
    """Raise ConfigError for a key whose effect in transformers is missing here."""
    path = folder / CONFIG
    if config.get("fast_tokenizer_files", [ENCODER]) != [ENCODER]:
        raise ConfigError(f"{path}: fast_tokenizer_files names other files than {ENCODER}; leave it out")
    if config.get("fix_mistral_regex"):
        raise ConfigError(
            f"{path}: fix_mistral_regex is not supported; save the tokenizer with transformers, which mends {ENCODER}"
        )
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    cleans = config.get("clean_up_tokenization_spaces", False)
    if cleans and (config.get(forced) or not isinstance(encoder.model, models.BPE)):
        raise ConfigError(f"{path}: clean_up_tokenization_spaces is not supported; set it to false")


def _add_tokens(folder: Path, encoder: Encoder, name: str, config: Mapping[str, Any]) -> None:
    """Add the tokens that an encoder lacks, or that have other properties in the config, in the order of transformers."""
    own = encoder.get_added_tokens_decoder()
    listed = _listed(folder, config, own)
    texts = {token.content for token in own.values() if token.special}
    if plain := sorted(token.content for token in listed.values() if not token.special and token.content in texts):
        raise ConfigError(
            f"{folder / CONFIG}: added_tokens_decoder has {plain[0]!r:.200} as ordinary text, but {ENCODER} as a special token; "
            "make `special` equal in both"
        )
    if name != GENERIC:
        own = {}  # such a class adds the listed tokens again
    by_text = {token.content: token for token in listed.values()}
    named: dict[str, Token] = {}
    values = _named(config)
    for key in special_tokens(config):
        value = _token(folder, key, values[key])
        named[key] = by_text.get(str_of(value), value) if key in NAMED else value
    known = {repr(token) for token in own.values()}
    new: list[Token] = [token for _, token in sorted(listed.items()) if repr(token) not in known]
    texts = {*(token.content for token in own.values()), *map(str_of, new)}
    extra = config.get("extra_special_tokens") or ()
    more = [] if isinstance(extra, dict) else [_token(folder, "extra_special_tokens", one) for one in _items(folder, extra)]
    for value in (*named.values(), *more):
        if str_of(value) not in texts and value not in new:
            new.append(value)
    specials = {str_of(value) for value in named.values()}
    _add(encoder, (_special(token, specials) for token in new))
    if name.startswith(QWEN2[:4]) and name != GENERIC:
        _add(encoder, (AddedToken(text, special=True) for text in dict.fromkeys((*specials, *map(str_of, more)))))
    elif name == COHERE:
        again = (
            AddedToken(one, special=True, normalized=False) if isinstance(one, str) else one for one in (*named.values(), *more)
        )
        encoder.add_special_tokens(list(again))


def _listed(folder: Path, config: Mapping[str, Any], own: Mapping[int, AddedToken]) -> dict[int, AddedToken]:
    """Added tokens by id: those of tokenizer_config.json, or else of added_tokens.json and tokenizer.json."""
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        if not isinstance(listed, dict) or not all(key.isdecimal() and int(key) < MOST_ID for key in listed):
            raise ConfigError(f"{folder / CONFIG}: added_tokens_decoder must be an object whose keys are token ids")
        if len(listed) > MOST_ADDED:
            raise ConfigError(f"{folder / CONFIG} has {len(listed):,} added tokens; at most {MOST_ADDED:,} are supported")
        return {int(key): _added(folder, "added_tokens_decoder", value) for key, value in listed.items()}
    old = read_json(folder, OLD, optional=True)
    if len(old) > MOST_ADDED or not all(type(number) is int and 0 <= number < MOST_ID for number in old.values()):
        raise ConfigError(f"{folder / OLD} must have a token id for each of at most {MOST_ADDED:,} tokens")
    specials = {*special_tokens(config).values()}
    found = {
        number: AddedToken(text, normalized=text not in specials, special=text in specials)
        for text, number in old.items()
        if text
    }
    return {**found, **own}


def _items(folder: Path, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) > MOST_ADDED:
        raise ConfigError(f"{folder / CONFIG}: extra_special_tokens must be a list of tokens, or an object of named tokens")
    return list(value)


def _token(folder: Path, key: str, value: Any) -> Token:
    return value if isinstance(value, str) else _added(folder, key, value, special=True)


def _added(folder: Path, key: str, value: Any, **default: bool) -> AddedToken:
    """A token from its object. default: of absent properties."""
    if isinstance(value, dict) and isinstance(value.get("content"), str) and all(type(value.get(f, True)) is bool for f in FLAGS):
        return AddedToken(value["content"], **{**default, **{flag: value[flag] for flag in FLAGS if flag in value}})
    raise ConfigError(f"{folder / CONFIG}: {key} must have tokens as texts or objects with content, not {value!r:.200}")


def _special(token: Token, specials: set[str]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if token.content in specials and not token.special:
        token.special = True
    return token


def _add(encoder: Encoder, tokens: Iterable[AddedToken]) -> None:
    if listed := list(tokens):
        encoder.add_tokens(listed)


def str_of(token: Token) -> str:
    """The text of a token."""
    return token if isinstance(token, str) else token.content
