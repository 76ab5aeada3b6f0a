"""From grammars to automata.

A grammar is plain JSON, so it can be sent to another process, and its content names it. It is one of

    {"schema": S}                        a value that JSON Schema S allows, S with its `$ref`s inside
    {"schema": S, "path": P, "root": R}  S as the part of R at path P; without "root", S has no references outside itself
    {"object": true}                     any JSON object, nested up to OBJECT_DEPTH levels
    {"regex": R}                         a text that R matches as a whole
    {"choice": [T, ...]}                 one of these texts
    {"text": T}                          this text
    {"token": T}                         the special token of this name
    {"without": R}                       any text in which R has no match
    {"sequence": [G, ...]}               grammars in sequence
    {"any": [G, ...]}                    one of these grammars
    {"repeat": G, "low": n, "high": m}   n to m times, m null for any number
    {"separated": G, "by": B}            G one or more times, with B between
    {"part": G, "of": [F, N]}            G, from the field F of the tool N, which errors name
"""

from dataclasses import replace
from typing import Any, NamedTuple

from blinkpy.dpu.grammar import byte_nfa
from blinkpy.dpu.grammar.automata.automaton_edges import MixedCountsError
from blinkpy.dpu.grammar.automata.automaton_products import difference
from blinkpy.dpu.grammar.byte_nfa import Piece, automaton_of
from blinkpy.dpu.grammar.character_sets import ALL, utf8_character
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError, located
from blinkpy.dpu.grammar.number_ranges import DIGITS
from blinkpy.dpu.grammar.regex_syntax import anywhere, parse_regex, whole
from blinkpy.dpu.grammar.schema_compiler import SchemaCompiler
from blinkpy.dpu.grammar.schema_shapes import Place
from blinkpy.dpu.grammar.string_rules import WrittenOut
from blinkpy.queues.byte_automaton import ByteAutomaton

Grammar = dict[str, Any]

ANY = {"type": "object"}
OBJECT_DEPTH = 5  # maximum depth of containers in {"object": true}, including the object itself
MOST_STATES = 1 << 14
MOST_BYTES = 1 << 20  # maximum size of a packed automaton; an engine may accept less (--grammar-kib)
MOST_CHOICES = 10_000
MOST_REPEATS = 1000
TOKEN_BYTE = b"\xff"  # before a special token's name; UTF-8 has no such byte, so only {"token": T} allows it


def token_bytes(name: str) -> bytes:
    """The encoding of a special token in the bytes of an automaton."""
    return TOKEN_BYTE + name.encode()


def automaton_of_grammar(grammar: Grammar, digits: int = DIGITS, closes: bool = True) -> ByteAutomaton:
    """The automaton of a grammar.

    digits: the maximum digits of a number before the point, and after it.
    closes: see ByteAutomaton; only for vocabularies in which each byte is a token.

    Raises GrammarError if the grammar is unsupported, matches nothing, or is too large.
    """
    written_out: set[tuple[int, int]] = set()
    try:
        automaton = _with_counts(grammar, digits, written_out)
        if automaton is None:
            raise GrammarError("No output matches the grammar.")
        size = len(automaton.words()) * 4
        if automaton.states > MOST_STATES or size > MOST_BYTES:
            limits = f"the limits are {MOST_STATES} states and {MOST_BYTES} bytes"
            raise GrammarTooLargeError(f"The grammar needs {automaton.states} states and {size} bytes; {limits}.")
    except GrammarTooLargeError as error:
        raise located(grammar, error, written_out) from None
    return automaton if closes else replace(automaton, closes=False)


def _with_counts(grammar: Grammar, digits: int, written_out: set[tuple[int, int]]) -> ByteAutomaton | None:
    """The automaton with counted strings, if one counter suffices. written_out: receives the lengths that can't be counted."""
    while True:  # each round adds lengths to written_out
        try:
            return automaton_of(_piece(grammar, "#", _Forms(digits, written_out, {})))
        except MixedCountsError as error:
            written_out |= error.lengths


class _Forms(NamedTuple):
    digits: int  # see NumberRange.piece
    written_out: WrittenOut  # see StringRules.piece
    pieces: dict[str, Piece]  # see SchemaCompiler


def _piece(grammar: Grammar, path: str, forms: _Forms) -> Piece:
    kind, value = next(iter(grammar.items()))
    if kind == "schema":
        root = grammar.get("root", value)
        compiler = SchemaCompiler(root, digits=forms.digits, written_out=forms.written_out, pieces=forms.pieces)
        return compiler.compile(Place(value, grammar.get("path", "#")))
    if kind == "part":
        try:
            return _piece(value, path, forms)
        except GrammarError as error:
            error.part = grammar["of"]
            raise
    if kind == "object":
        return SchemaCompiler(ANY, OBJECT_DEPTH - 1, forms.digits).compile(Place(ANY, "#"))
    if kind == "regex":
        return byte_nfa.embedded(whole(parse_regex(value), utf8_character))  # its anchors refer to its own ends
    if kind == "choice":
        if not 1 <= len(value) <= MOST_CHOICES:
            raise GrammarError(f"The grammar must have 1 to {MOST_CHOICES} choices, not {len(value)}.", path)
        return byte_nfa.words(text.encode() for text in value)
    if kind == "text":
        return byte_nfa.literal(value.encode())
    if kind == "token":
        return byte_nfa.literal(token_bytes(value))
    if kind == "without":
        any_text = automaton_of(byte_nfa.repeat(utf8_character(ALL), 0, None))
        return byte_nfa.embedded(difference(any_text, anywhere(parse_regex(value), utf8_character)))
    if kind == "sequence":
        return byte_nfa.sequence(*(_piece(part, path, forms) for part in value))
    if kind == "any":
        return byte_nfa.choice(*(_piece(part, path, forms) for part in value))
    if kind == "separated":
        return byte_nfa.separated(_piece(value, path, forms), _piece(grammar["by"], path, forms))
    low, high = grammar["low"], grammar["high"]
    if max(low, high or 0) > MOST_REPEATS:
        raise GrammarError(f"A grammar may be repeated at most {MOST_REPEATS} times.", path)
    return byte_nfa.repeat(_piece(value, path, forms), low, high)
