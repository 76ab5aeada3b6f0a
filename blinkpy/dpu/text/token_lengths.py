"""How much text one token can stand for, at most."""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer as Encoder
from tokenizers import models

from blinkpy.dpu.text.detokenizer import byte_alphabet

COMPOSED = 4  # characters that NFC makes one of, at most (Unicode: longest canonical decomposition)


def most_characters(encoder: Encoder, pieces: Sequence[bytes] | None) -> int:
    """Characters of a text that one token can stand for, at most. 0: unknown, for encoders that may drop text,
    or make one token of any number of unknown characters. pieces: bytes of each token, None if they depend on
    neighbours.
    """
    if pieces is None or not isinstance(encoder.model, models.BPE) or not _covers_bytes(encoder):
        return 0
    if any(token.lstrip or token.rstrip for token in encoder.get_added_tokens_decoder().values()):
        return 0  # it takes the spaces beside it
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
    """Descriptions of a normalizer or pre-tokenizer, and of those that it is a sequence of."""

    def flat(node: dict[str, Any]) -> list[dict[str, Any]]:
        return [stage for one in node[inner] for stage in flat(one)] if node["type"] == "Sequence" else [node]

    return [] if part is None else flat(json.loads(part.__getstate__()))
