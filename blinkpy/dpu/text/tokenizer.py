"""The tokenizer of a model's folder: encoding by Hugging Face's library, end-of-sequence ids, detokenizers.

Encoding a long text releases the GIL, so it can run in a thread next to an event loop.
"""

import json
import logging
import os
import re
import secrets
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Encoder

from blinkpy.config import ConfigError
from blinkpy.dpu.grammar.compile_grammar import TOKEN_BYTE, token_bytes
from blinkpy.dpu.text.detokenizer import Detokenizer, TokenTexts, byte_alphabet
from blinkpy.dpu.text.generation_config import longest_output, request_defaults
from blinkpy.dpu.text.tokenizer_files import read_encoder, read_tokenizer_config, special_token
from blinkpy.model_files import read_json
from blinkpy.queues.request_parameters import INT32_MAX, RequestParameters
from blinkpy.queues.submission import STOP_IDS
from blinkpy.queues.words import Int32


def token_pieces(encoder: Encoder, pieces: Sequence[bytes]) -> list[bytes]:
    """The bytes of each token for grammars.

    pieces: the bytes that each token adds to a text.
    Special tokens get the bytes of compile_grammar.token_bytes. Other tokens whose bytes contain TOKEN_BYTE,
    which no text contains, get no bytes.
    """
    added = encoder.get_added_tokens_decoder().items()
    special = {token: token_bytes(one.content) for token, one in added if one.special and one.content}
    plain = [b"" if TOKEN_BYTE in piece else piece for piece in pieces]
    return [special.get(token, piece) for token, piece in enumerate(plain)]


UTF8_BYTES = frozenset({*range(0xC0), *range(0xC2, 0xF5)})
COMPOSED = 4  # maximum characters that NFC composes to one (Unicode: longest canonical decomposition)


def most_characters(encoder: Encoder, pieces: Sequence[bytes] | None) -> int:
    """Maximum characters of text per token; 0 without a known bound, because the encoder may drop text, or merge many unknown
    characters into one token.

    pieces: bytes of each token, or None if they depend on neighbors.
    """
    if pieces is None or not isinstance(encoder.model, models.BPE) or not _covers_bytes(encoder):
        return 0
    if any(token.lstrip or token.rstrip for token in encoder.get_added_tokens_decoder().values()):
        return 0  # such a token absorbs adjacent spaces
    factor = 1
    for stage in _stages(encoder.normalizer, "normalizers"):
        pattern = stage.get("pattern", {}).get("String", "")
        if stage["type"] == "NFC":
            factor = COMPOSED
        elif stage["type"] != "Prepend" and not (stage["type"] == "Replace" and 0 < len(pattern) <= len(stage["content"])):
            return 0
    for stage in _stages(encoder.pre_tokenizer, "pretokenizers"):
        kept = stage["type"] in ("ByteLevel", "Digits", "Metaspace") or (
            stage["type"] == "Split" and stage["behavior"] != "Removed"
        )
        if not kept:
            return 0
    return factor * max(map(len, pieces), default=0)


def _covers_bytes(encoder: Encoder) -> bool:
    """Whether each byte has a token, so that no character is unknown."""
    if getattr(encoder.model, "byte_fallback", False):
        return all(encoder.token_to_id(f"<0x{byte:02X}>") is not None for byte in range(256))
    return all(encoder.token_to_id(character) is not None for character in byte_alphabet())


def _stages(part: Any, inner: str) -> list[dict[str, Any]]:
    """Descriptions of a normalizer or pre-tokenizer; sequences are flattened."""

    def flat(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [stage for one in node[inner] for stage in flat(one)] if node["type"] == "Sequence" else [node]

    return [] if part is None else flat(json.loads(part.__getstate__()))


# Keys whose values are words of the API. Templates build special tokens from them, such as '<|' + role +
# '|>'.
WORD_KEYS = frozenset({"role", "type"})
LONGEST, MOST_CHARACTERS = 256, 1 << 21  # limits on special tokens, because all their prefixes and suffixes are stored


class SpecialTokens:
    """Distinguishes special tokens from text that is spelled like them. It adds aliases to the encoder, which
    afterwards encodes such text as ordinary text.
    """

    def __init__(self, encoder: Encoder):
        added = encoder.get_added_tokens_decoder()
        special = {token.content: (number, token) for number, token in added.items() if token.special and token.content}
        names = sorted(special, key=len, reverse=True)  # the longest match wins
        if len(names[0] if names else "") > LONGEST or sum(map(len, names)) > MOST_CHARACTERS:
            limits = f"{LONGEST} characters each and {MOST_CHARACTERS:,} together"
            raise ConfigError(f"the tokenizer's special tokens are too long (limits: {limits})")
        nonce = str(secrets.randbelow(10**18))
        self._aliases = {name: f"\ue000{nonce}.{i}\ue001" for i, name in enumerate(names)}
        taken = {*encoder.get_vocab(with_added_tokens=True).values(), *added}
        meant: dict[int, int] = {}  # alias to special token
        encoder.encode_special_tokens = True
        aliases = []
        for name in names:
            _, token = special[name]
            # normalized=False: a normalizer that adds leading spaces would hide all but the first.
            how = {"lstrip": token.lstrip, "rstrip": token.rstrip, "normalized": False}
            aliases.append(AddedToken(self._aliases[name], special=False, **how))
        encoder.add_tokens(aliases)  # in one call, because each call rebuilds the automaton over all added tokens
        for name in names:
            meant[int(encoder.token_to_id(self._aliases[name]) or 0)] = special[name][0]
        if taken & meant.keys():
            raise ConfigError(f"the tokenizer's ids have gaps: {sorted(taken & meant.keys())[:3]} would be assigned twice")
        self._first_alias = min(meant, default=INT32_MAX)
        self._ids = np.array([meant[alias] for alias in sorted(meant)], np.int32)  # aliases have consecutive ids
        patterns = [rf"(?<!\w){re.escape(n)}(?!\w)" if special[n][1].single_word else re.escape(n) for n in names]
        self.names = re.compile("|".join(patterns) or r"(?!)")  # matches text spelled like a special token
        self._heads = {name[:end] for name in names for end in range(1, len(name))}
        self._tails = {name[start:] for name in names for start in range(1, len(name))}
        self._all_names = "\0".join(names)
        self._longest = max(map(len, names), default=1)
        # Lower-case letters and digits only, which templates' filters don't change.
        self._marks = {name: f"xq{nonce}m{i}x" for i, name in enumerate(names)}
        self._border, self.end_mark = f"xq{nonce}bx", f"xq{nonce}ex"
        self._any_mark = re.compile(f"xq{nonce}(?:m([0-9]+)|b)x", re.IGNORECASE)
        self._listed = names

    def mark(self, value: Any) -> Any:
        """Add marks to the texts of a JSON value for a chat template. Unaffected values are returned
        unchanged.
        """
        if isinstance(value, str):
            return self._mark_text(value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            # Templates look up keys by name, so only special tokens in keys are marked.
            return {self._mark_names(key): self._mark_value(key, item) for key, item in value.items()}
        return value

    def _mark_value(self, key: str, value: Any) -> Any:
        if key in WORD_KEYS and isinstance(value, str):
            return self._mark_names(value)
        return self.mark(value)

    def _mark_names(self, text: str) -> str:
        return self.names.sub(lambda found: self._marks[found[0]], text)

    def _mark_text(self, text: str) -> str:
        marked = self._mark_names(text)
        body = marked.strip()  # as templates do
        if not body:
            return marked
        lengths = range(1, min(len(body), self._longest - 1) + 1)
        within = len(body) < self._longest and body in self._all_names
        before = within or any(body[:length] in self._tails for length in lengths)
        after = within or any(body[-length:] in self._heads for length in lengths)
        if before or after:
            start = len(marked) - len(marked.lstrip())
            end = start + len(body)
            body = (self._border if before else "") + body + (self._border if after else "")
            marked = marked[:start] + body + marked[end:]
        return marked

    def unmark(self, text: str) -> str:
        """Remove the marks from a text."""
        return self._any_mark.sub(lambda found: self._listed[int(found[1])] if found[1] else "", text)

    def aliased(self, text: str) -> str:
        """Replace the special tokens of a text by their aliases, and remove the marks, for encoding."""
        return self.unmark(self.names.sub(lambda found: self._aliases[found[0]], text))

    def resolved(self, ids: Int32) -> Int32:
        """Replace the ids of aliases by those of their special tokens. ids: int32 [n], changed in place."""
        if not ids.size or np.maximum.reduce(ids) < self._first_alias:
            return ids
        aliases = ids >= self._first_alias
        ids[aliases] = self._ids[ids[aliases] - self._first_alias]
        return ids


# The library's threads would compete with the other workers for cores.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MOST_ENDS = 1 << 10  # ids in an eos_token_id
logger = logging.getLogger("blinkpy.frontend")


class Shown(NamedTuple):
    """Special tokens that are shown as text. marks: (name, text to use instead)."""

    names: tuple[str, ...] = ()
    marks: tuple[tuple[str, str], ...] = ()


NOTHING = Shown()


class Tokenizer:
    """The tokenizer of a model's folder.

    Reads tokenizer.json, tokenizer_config.json, special_tokens_map.json, generation_config.json and
    config.json. Raises ConfigError.
    config: the result of read_tokenizer_config.
    vocab_size: number of tokens, including added tokens; the model's vocabulary may be larger.
    bos_id: token at the start of a text, or None.
    eos_ids: at most STOP_IDS; each ends a text.
    longest_output: default of a request's maximum output, in tokens, or None.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_tokenizer_config(folder)
        self.generation_config = read_json(folder, "generation_config.json", optional=True)
        self.longest_output = longest_output(folder, self.generation_config)
        self.encoder = read_encoder(folder, self.config)
        # tokenizer.json may contain the truncation used in training, which would cut prompts silently.
        self.encoder.no_truncation()
        self.encoder.no_padding()
        self.vocab_size = self.encoder.get_vocab_size(with_added_tokens=True)  # the model's may be larger
        self.bos_id = self._id(special_token(self.config, "bos_token"))  # at the start of a text, if any
        model_config = read_json(folder, "config.json", optional=True)
        self.model_type = str(model_config.get("model_type", ""))
        self._eos_id = self._id(special_token(self.config, "eos_token"))  # at the end of a text, if any
        self.eos_ids = self._eos_ids(model_config)  # each ends a text; at most STOP_IDS
        self._texts = TokenTexts(self.encoder)
        self._texts_showing: dict[tuple[Shown, bool], TokenTexts] = {}
        self._all_texts = self._texts.showing(token.content for token in self.encoder.get_added_tokens_decoder().values())
        self._most_characters = most_characters(self.encoder, self._all_texts.pieces)
        self._splits = bool(self.config.get("split_special_tokens"))
        self.specials = SpecialTokens(self.encoder)

    def _id(self, token: str | None) -> int | None:
        found = None if token is None else self.encoder.token_to_id(token)
        return None if found is None else int(found)

    def _eos_ids(self, model_config: dict[str, Any]) -> tuple[int, ...]:
        found: dict[int, None] = {}  # a set that keeps its order
        for source in (self.generation_config, model_config):
            value = source.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if len(ids) > MOST_ENDS or not all(type(token) is int and 0 <= token <= INT32_MAX for token in ids):
                raise ConfigError(f"{self.folder}: eos_token_id must be a token id or a list of them, not {value!r:.200}")
            found.update(dict.fromkeys(ids))
        ids = [*([] if self._eos_id is None else [self._eos_id]), *found]  # the tokenizer's own id has priority
        ids = list(dict.fromkeys(ids))
        if len(ids) > STOP_IDS:
            logger.warning(
                "%s has %d end-of-sequence ids, more than supported; ignoring %s", self.folder, len(ids), ids[STOP_IDS:]
            )
        return tuple(ids[:STOP_IDS])

    def request_defaults(self) -> RequestParameters:
        """Default parameters of requests, from generation_config.json. Logs the keys without an effect. Raises ConfigError."""
        return request_defaults(self.folder, self.generation_config)

    def end_with(self, names: Iterable[str]) -> None:
        """Add tokens that end a text. If there are too many, the added tokens have priority."""
        own = [token for name in names if (token := self._id(name)) is not None]
        self.eos_ids = tuple(dict.fromkeys((*own, *self.eos_ids)))[:STOP_IDS]

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = False) -> Int32:
        """Encode a text. Returns token ids, int32 [n]. Releases the GIL.

        add_special_tokens: add the BOS token (and others) that tokenizer.json adds; as in transformers 5,
            add_bos_token of tokenizer_config.json has no effect. A chat template's text already has BOS.
        parse_special: encode text spelled like a special token as that token, except where `specials` marked
            it; for text made by a chat template.
        """
        if parse_special:
            text = self.specials.unmark(text) if self._splits else self.specials.aliased(text)
        encoding = self.encoder.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        return self.specials.resolved(np.array(encoding.ids, np.int32))

    def least_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens in the text, without encoding it; 0 without a bound."""
        return -(-len(self.specials.unmark(text)) // self._most_characters) if self._most_characters else 0

    def detokenizer(self, prompt: Int32 | None = None, skip_special_tokens: bool = True, showing: Shown = NOTHING) -> Detokenizer:
        """Create a detokenizer for a request's output.

        prompt: its prompt, which only a few kinds of tokenizers need.
        showing: special tokens that are shown as text. Each value has its own table in memory, so use few values.
        """
        if showing is NOTHING:
            texts = self._texts if skip_special_tokens else self._all_texts
        elif (key := (showing, skip_special_tokens)) in self._texts_showing:
            texts = self._texts_showing[key]
        else:
            table = self._texts if skip_special_tokens else self._all_texts
            texts = self._texts_showing[key] = table.showing(showing.names, dict(showing.marks))
        tail = None if prompt is None or texts.texts is not None else prompt[-16:].tolist()
        return Detokenizer(texts, tail)

    @cached_property
    def pieces_in_grammars(self) -> list[bytes] | None:
        """The bytes of each token for grammars, or None if they depend on other tokens."""
        pieces = self._texts.pieces
        return None if pieces is None else token_pieces(self.encoder, pieces)

    @property
    def spells_bytes(self) -> bool:
        """Whether each byte of UTF-8 is a token. Then any text can be spelled byte by byte."""
        return {piece[0] for piece in self.pieces_in_grammars or () if len(piece) == 1} >= UTF8_BYTES

    def spell(self, token: int) -> tuple[str, bytes]:
        r"""Text and bytes of a single token, including special tokens. Bytes that are not text are written as
        \\xNN.
        """
        return self._texts.spell(token)

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole output. Unknown ids have no text."""
        detokenizer = self.detokenizer(skip_special_tokens=skip_special_tokens)
        return "".join([detokenizer.push(token) for token in ids]) + detokenizer.finish()
