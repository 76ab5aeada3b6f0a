"""Converts token ids to text incrementally, without breaking characters whose bytes span several tokens.

In most tokenizers, a token's bytes don't depend on its neighbors. Examples are byte-level BPE (GPT-2, Llama
3, Qwen, Phi-4), and SentencePiece style with a space mark and byte fallback (Llama 2, Mistral, Phi-3). For
these, a table of every token's bytes is computed once, and each token costs one look-up. Only the bytes of
incomplete characters pass through a UTF-8 decoder. Any other decoder decodes the last few tokens with and
without the new one, which costs a few microseconds per token.

The text is the difference between decoding prompt and output together and decoding the prompt alone. So a
leading space, which a decoder strips from the start of a text, is kept. Hidden special tokens have no text.
Each invalid UTF-8 sequence becomes U+FFFD as soon as it is certain. Within a run of byte-fallback tokens, the
number of U+FFFD may differ from `Tokenizer.decode`, which sees the whole run. A character that is incomplete
at the end is dropped, unless `finish` is called.
"""

import codecs
import json
import re
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from types import MappingProxyType
from typing import Any, Self

from tokenizers import Tokenizer as Encoder

REPLACEMENT = "\ufffd"
WINDOW_LIMIT = 16  # tokens that a decoder without a table may delay; a character has at most 4 bytes
CHARACTER_BYTES = 4  # at most
BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_INCREMENTAL = codecs.getincrementaldecoder("utf-8")


def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level BPE (GPT-2's table) writes bytes: printable ones unchanged, the
    others from U+0100.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


def _stages(node: dict[str, Any]) -> list[dict[str, Any]]:
    """The stages of a decoder's description; nested sequences are flattened."""
    return [stage for inner in node["decoders"] for stage in _stages(inner)] if node["type"] == "Sequence" else [node]


class TokenTexts:
    """The text of every token, unless the decoder depends on neighbors. Computed once for a tokenizer, and
    shared by its detokenizers. Unknown ids have no text, as in `Tokenizer.decode`.
    """

    def __init__(self, encoder: Encoder):
        self.encoder = encoder
        self.skip_special_tokens = True
        self.pieces: list[bytes] | None = None  # bytes of each token
        self.texts: list[str | None] | None = None  # its text, or None if its bytes are not complete characters
        self.marks: dict[int, str] = {}  # marks that replace a token's text
        added = encoder.get_added_tokens_decoder()
        # The library hides a token if its spelling is the text of a special token. A token that became special only in
        # tokenizer_config.json keeps the spelling of the normalizer ("▁two▁words"), so the library shows it.
        special = {one.content for one in added.values() if one.special}
        self.hidden = frozenset(token for token in added if encoder.id_to_token(token) in special)
        state = {"type": None} if encoder.decoder is None else json.loads(encoder.decoder.__getstate__())
        spell = self._speller(_stages(state))
        if spell is None:
            return
        size = max([encoder.get_vocab_size(with_added_tokens=True), *(token + 1 for token in added)])
        words = (None if token in self.hidden else encoder.id_to_token(token) for token in range(size))
        self.pieces = [b"" if word is None else spell(word) for word in words]
        self.texts = [_whole(piece) for piece in self.pieces]

    def showing(self, names: Iterable[str], marks: Mapping[str, str] = MappingProxyType({})) -> Self:
        """A copy in which some special tokens have text.

        names: texts of these special tokens; other names have no effect.
        marks: text to use instead of a token's name: a surrogate, which no other token can produce.
        """
        other, ids = copy(self), {name: self.encoder.token_to_id(name) for name in (*names, *marks)}
        shown = {token: name for name, token in ids.items() if token in self.hidden and name not in marks}
        other.marks = {token: marks[name] for name, token in ids.items() if token is not None and name in marks}
        other.hidden = self.hidden - shown.keys()
        if self.pieces is not None and self.texts is not None:
            other.pieces, other.texts = list(self.pieces), list(self.texts)
            for token, name in shown.items():
                other.pieces[token], other.texts[token] = name.encode(), name
            for token, mark in other.marks.items():
                other.pieces[token], other.texts[token] = b"", mark
        return other

    def spell(self, token: int) -> tuple[str, bytes]:
        r"""Text and bytes of a single token, including special tokens. Bytes that are not text are written as
        \\xNN, and an unknown id as token_id:ID without bytes.
        """
        piece = self.pieces[token] if self.pieces is not None and token < len(self.pieces) else b""
        if not piece:
            known = str(self.encoder.decode([token], skip_special_tokens=False))
            return (known, known.encode()) if known else (f"token_id:{token}", b"")
        text = _whole(piece)
        return ("".join(f"\\x{byte:02x}" for byte in piece) if text is None else text), piece

    @staticmethod
    def _speller(stages: list[dict[str, Any]]) -> Callable[[str], bytes] | None:
        """The function from a token's spelling to its bytes, or None if the decoder depends on neighbors."""
        kinds = [stage["type"] for stage in stages]
        if kinds == ["ByteLevel"]:
            alphabet = byte_alphabet()

            def byte_level(word: str) -> bytes:
                try:
                    return bytes([alphabet[character] for character in word])
                except KeyError:  # an added token, spelled literally
                    return word.encode()

            return byte_level
        if kinds == ["Metaspace"]:
            mark = stages[0]["replacement"]
            return lambda word: word.replace(mark, " ").encode()
        # Strip removes spaces only at the start of a text, which belongs to the prompt.
        strips = [stage for stage in stages if stage["type"] == "Strip"]
        others = [kind for kind in kinds if kind != "Strip"]
        if others not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback"], ["ByteFallback", "Fuse"]):
            return None
        early = strips and kinds.index("Strip") <= kinds.index("ByteFallback") + ("Fuse" not in kinds)
        replace = stages[0] if kinds[0] == "Replace" else None
        if early or any(stage.get("stop") != 0 for stage in strips) or (replace and "String" not in replace["pattern"]):
            return None

        def fallback(word: str) -> bytes:
            if replace is not None:
                word = word.replace(replace["pattern"]["String"], replace["content"])
            byte = BYTE_PIECE.fullmatch(word)
            return bytes([int(byte[1], 16)]) if byte else word.encode()

        return fallback


def _whole(piece: bytes) -> str | None:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return None


class Detokenizer:
    """Detokenizes one request's output. prompt_tail: the prompt's last tokens, for decoders that depend on
    neighbors.
    """

    __slots__ = ("_bytes", "_encoder", "_hidden", "_marks", "_pieces", "_shown", "_texts", "_window")

    def __init__(self, table: TokenTexts, prompt_tail: list[int] | None = None):
        self._encoder, self._hidden, self._marks = table.encoder, table.hidden, table.marks
        self._texts, self._pieces = table.texts, table.pieces
        self._bytes: codecs.IncrementalDecoder | None = None  # set while a character is incomplete
        self._window: list[int] = []
        self._shown = ""
        if table.texts is None:
            tail = (prompt_tail or [])[-WINDOW_LIMIT // 2 :]
            for start in range(min(CHARACTER_BYTES, len(tail) + 1)):  # start at a character's first byte
                self._window = tail[start:]
                self._shown = self._decode()
                if not self._shown.startswith(REPLACEMENT):
                    break

    def push(self, token: int) -> str:
        """Add a token, and return the text that is now certain."""
        texts = self._texts
        if texts is None:
            return self._push_slowly(token)
        if token >= len(texts):
            return ""
        text = texts[token]
        decoder = self._bytes
        if decoder is None:
            if text is not None:
                return text
            decoder = self._bytes = _INCREMENTAL("replace")
        elif token in self._marks:
            return self.finish() + self._marks[token]
        text = decoder.decode(self._pieces[token])  # type: ignore[index]
        if not decoder.getstate()[0]:
            self._bytes = None
        return text

    def finish(self) -> str:
        """U+FFFD if the last character is incomplete, as in a full decode; otherwise ""."""
        if self._texts is None:
            rest = self._decode()[len(self._shown) :]
            self._window, self._shown = [], ""
            return rest
        decoder, self._bytes = self._bytes, None
        return "" if decoder is None else decoder.decode(b"", True)

    def _decode(self) -> str:
        window = [token for token in self._window if token not in self._hidden]
        return str(self._encoder.decode(window, skip_special_tokens=False)) if window else ""

    def _push_slowly(self, token: int) -> str:
        if token in self._marks:
            return self.finish() + self._marks[token]
        if token in self._hidden:
            return ""
        self._window.append(token)
        text = self._decode()
        if text.endswith(REPLACEMENT) and len(self._window) < WINDOW_LIMIT:
            return ""  # perhaps the start of a character
        new = text[len(self._shown) :] if text.startswith(self._shown) else ""
        # Keep a few tokens as context for the next one.
        if len(self._window) >= WINDOW_LIMIT // 2:
            whole = self._window
            for kept in range(WINDOW_LIMIT // 4, WINDOW_LIMIT // 4 + CHARACTER_BYTES):  # don't cut a character
                self._window = whole[-kept:]
                self._shown = self._decode()
                if text.endswith(self._shown):
                    return new
            text = self._shown
        self._shown = text
        return new
