"""The input of a custom tool, from the arguments of a call.

Chat templates know only functions, so the model sees a custom tool as a function with one string. Its arguments are
`{"input": TEXT}`, and TEXT is decoded while it arrives.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

INPUT = "input"  # the parameter of a custom tool
_HEAD = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_HEAD_CHARACTERS = 256  # maximum characters before the value
_PLAIN = re.compile(r'[^"\\]+')
_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_HEX = re.compile(r"[0-9A-Fa-f]{4}")


def input_schema(pattern: str | None) -> Mapping[str, Any]:
    """The JSON Schema of a custom tool's arguments. pattern: a regular expression that the whole text must match."""
    text = {"type": "string"} if pattern is None else {"type": "string", "pattern": f"^(?:{pattern})$"}
    return {"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": False}


def input_arguments(text: str) -> dict[str, str]:
    """The arguments of an earlier call of a custom tool."""
    return {INPUT: text}


class CustomInput:
    """The input of one call. feed() returns text as soon as it is certain, finish() the rest.

    Without a grammar, a model may write arguments in another form. At the end of the call, the input is the only string of an
    object, the text of a string, or else all of the arguments.
    """

    def __init__(self) -> None:
        self._text = ""  # not decoded yet
        self._inside = False  # of the string
        self._ended = False  # after the string

    def feed(self, text: str) -> str:
        """More text of the arguments. Returns more of the input."""
        if self._ended:
            return ""
        self._text += text
        if not self._inside:
            head = _HEAD.match(self._text[:_HEAD_CHARACTERS])
            if head is None:
                return ""
            self._inside, self._text = True, self._text[head.end() :]
        return self._decoded()

    def finish(self) -> str:
        """The rest of the input, at the end of the call."""
        if self._inside:
            return ""
        try:
            value = json.loads(self._text, strict=False)
        except (ValueError, RecursionError):
            begun = re.sub(r"\s", "", self._text[:_HEAD_CHARACTERS])
            return "" if f'{{"{INPUT}":"'.startswith(begun) else self._text
        if isinstance(value, dict):
            texts = [entry for entry in value.values() if isinstance(entry, str)]
            value = value.get(INPUT, texts[0] if len(texts) == len(value) == 1 else None)
        if value is None and self._text.strip() in ("{}", "null"):
            return ""
        return value if isinstance(value, str) else self._text

    def _decoded(self) -> str:
        """Return all complete characters of the string, and hold back an incomplete escape."""
        text, at, parts = self._text, 0, list[str]()
        while at < len(text):
            plain = _PLAIN.match(text, at)
            if plain is not None:
                parts.append(plain[0])
                at = plain.end()
            elif text[at] == '"':
                self._ended = True
                at = len(text)
            else:
                found = _escaped(text, at)
                if found is None:
                    break
                parts.append(found[0])
                at = found[1]
        self._text = text[at:]
        return "".join(parts)


def _escaped(text: str, at: int) -> tuple[str, int] | None:
    """The character of an escape, and its end; None for an incomplete escape. An unknown escape is text."""
    if at + 1 >= len(text):
        return None
    if text[at + 1] != "u":
        known = _SHORT.get(text[at + 1])
        return (text[at], at + 1) if known is None else (known, at + 2)
    if len(text) < at + 6:
        return None if _HEX.fullmatch(text[at + 2 :].ljust(4, "0")) else (text[at], at + 1)
    if not _HEX.match(text, at + 2):
        return text[at], at + 1
    code = int(text[at + 2 : at + 6], 16)
    if 0xD800 <= code < 0xDC00:  # a pair
        rest = text[at + 6 : at + 12]
        if len(rest) < 6 and "\\u".startswith(rest[:2]):
            return None
        if rest.startswith("\\u") and _HEX.match(rest, 2) and 0xDC00 <= int(rest[2:], 16) < 0xE000:
            return chr(0x10000 + ((code - 0xD800) << 10) + int(rest[2:], 16) - 0xDC00), at + 12
    return ("\ufffd" if 0xD800 <= code < 0xE000 else chr(code)), at + 6  # a lone surrogate is not a character
