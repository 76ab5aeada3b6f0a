"""Sets of characters, and their encodings: as UTF-8, or inside a JSON string in one canonical form.

A set is a tuple of (first, last) code points, disjoint and in order. Surrogates are not characters.

In a JSON string, each character has one form, that of Python's json.dumps(ensure_ascii=False): itself, or the shortest
escape if JSON requires an escape. So strings and their forms correspond one to one, and a rule for strings is also a
rule for their bytes.
"""

import json
from collections.abc import Iterable
from functools import lru_cache

from blinkpy.dpu.grammar.automata.nfa_nodes import ByteNfa
from blinkpy.dpu.grammar.byte_nfa import Piece

Characters = tuple[tuple[int, int], ...]
ALL: Characters = ((0, 0xD7FF), (0xE000, 0x10FFFF))
MOST_FORMS = 4096  # cached
CONTROL, QUOTE, BACKSLASH = 0x20, 0x22, 0x5C
UTF8_LENGTHS = ((0x7F, 1), (0x7FF, 2), (0xFFFF, 3), (0x10FFFF, 4))  # last code point, bytes


def union(parts: Iterable[tuple[int, int]]) -> Characters:
    """The set of all characters of some ranges, without surrogates."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(parts):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], high))
        else:
            merged.append((low, high))
    return intersection(tuple(merged), ALL)


def intersection(a: Characters, b: Characters) -> Characters:
    """The characters in both sets."""
    both = ((max(low, first), min(high, last)) for low, high in a for first, last in b)
    return tuple(sorted((low, high) for low, high in both if low <= high))


def complement(a: Characters) -> Characters:
    """All other characters."""
    gaps, at = [], 0
    for low, high in a:
        gaps.append((at, low - 1))
        at = high + 1
    gaps.append((at, 0x10FFFF))
    return union((low, high) for low, high in gaps if low <= high)


def of_text(text: str) -> Characters:
    """The characters of a text."""
    return union((ord(one), ord(one)) for one in text)


@lru_cache(MOST_FORMS)
def utf8_forms(characters: Characters) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Sequences of byte ranges that together cover the UTF-8 forms of the characters; each form is in exactly one sequence."""
    return tuple(form for low, high in characters for form in _utf8_range(low, high))


def _utf8_range(low: int, high: int) -> list[tuple[tuple[int, int], ...]]:
    for last, _ in UTF8_LENGTHS:
        if low <= last < high:
            return _utf8_range(low, last) + _utf8_range(last + 1, high)
    begin, end = chr(low).encode(), chr(high).encode()
    for rest in range(len(begin) - 1, 0, -1):  # bytes after the byte at which the range is split
        block = 1 << 6 * rest
        if low // block == high // block:
            continue
        if low % block:
            cut = (low // block + 1) * block
            return _utf8_range(low, cut - 1) + _utf8_range(cut, high)
        if (high + 1) % block:
            cut = high // block * block
            return _utf8_range(low, cut - 1) + _utf8_range(cut, high)
    return [tuple(zip(begin, end, strict=True))]


@lru_cache(MOST_FORMS)
def json_forms(characters: Characters) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Like utf8_forms, for characters inside a JSON string."""
    plain = utf8_forms(intersection(characters, complement(ESCAPED)))
    escaped = (code for low, high in intersection(characters, ESCAPED) for code in range(low, high + 1))
    return plain + tuple(tuple((byte, byte) for byte in json_text(chr(code))[1:-1]) for code in escaped)


ESCAPED: Characters = union([(0, CONTROL - 1), (QUOTE, QUOTE), (BACKSLASH, BACKSLASH)])


def json_text(text: str) -> bytes:
    """A JSON string in its canonical form, with quotes."""
    return json.dumps(text, ensure_ascii=False).encode()


def one_of_forms(forms: tuple[tuple[tuple[int, int], ...], ...]) -> Piece:
    """A piece of byte ranges in sequence; equal ends of forms share nodes."""

    def add(nfa: ByteNfa, source: int, target: int) -> None:
        tails: dict[tuple[tuple[int, int], ...], int] = {(): target}
        heads: dict[tuple[tuple[int, int], ...], int] = {(): source}
        for form in forms:
            # ASCII forms share their starts (escapes), others their ends: neither adds a form to another
            shared = len(form) - 1 if form[0][0] == BACKSLASH else 0
            node = source
            for at in range(len(form)):
                head, tail = form[: at + 1], form[at + 1 :]
                places, key = (heads, head) if at < shared else (tails, tail)
                if at < shared and key in places:
                    node = places[key]
                    continue
                if key not in places:
                    places[key] = nfa.node()
                edge = (*form[at], places[key])
                if edge not in nfa.edges[node]:
                    nfa.edges[node].append(edge)
                node = places[key]

    return add


def utf8_character(characters: Characters) -> Piece:
    """One of the characters, as UTF-8."""
    return one_of_forms(utf8_forms(characters))


def json_character(characters: Characters) -> Piece:
    """One of the characters, as written inside a JSON string."""
    return one_of_forms(json_forms(characters))
