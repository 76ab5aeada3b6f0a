"""Compiles a JSON Schema to a piece: the values that it allows, each in one form apart from spaces.

The members of an object are in the order of `properties`, followed by members that the schema does not name. A schema with names
but without `additionalProperties` allows no others. Recursion is unrolled (schema_reader.RECURSION), and unconstrained
values have nested containers up to FREE_DEPTH.

So the output is always valid, but not every valid value can be output.
"""

from itertools import combinations
from typing import Any

from blinkpy.dpu.grammar import byte_nfa
from blinkpy.dpu.grammar.automata.automaton_products import intersection
from blinkpy.dpu.grammar.byte_nfa import Piece, automaton_of
from blinkpy.dpu.grammar.character_sets import json_text
from blinkpy.dpu.grammar.grammar_errors import GrammarError, GrammarTooLargeError
from blinkpy.dpu.grammar.json_pieces import Member, array_of, object_of, set_of
from blinkpy.dpu.grammar.number_ranges import DIGITS
from blinkpy.dpu.grammar.schema_keywords import REFERENCE, Alternatives
from blinkpy.dpu.grammar.schema_reader import SchemaReader
from blinkpy.dpu.grammar.schema_shapes import NAMES, Conjunction, Place, Shape, fault, joined_strings, same
from blinkpy.dpu.grammar.string_rules import StringRules, WrittenOut, pattern_automaton

FREE_DEPTH = 2  # of containers inside an unconstrained value
LIMITED_DEPTH = 3  # of such containers, up to which numbers have a limit of digits: each level doubles the states
MOST_DEPTH = 40  # of nested containers
MOST_PATTERNS = 4  # patterns of one object's members
LITERALS = {None: b"null", True: b"true", False: b"false"}


class SchemaCompiler:
    """Compiles one schema.

    free_depth: see FREE_DEPTH.
    digits: see NumberRange.piece.
    written_out: see StringRules.piece.
    pieces: pieces of schemas of scalars, shared by schemas with the same digits and written_out.
    """

    def __init__(
        self,
        root: Any,
        free_depth: int = FREE_DEPTH,
        digits: int = DIGITS,
        written_out: WrittenOut = None,
        pieces: dict[str, Piece] | None = None,
    ):
        self.digits, self.written_out = digits, written_out
        self._pieces = {} if pieces is None else pieces
        self.reader = SchemaReader(root, self._exclude)
        self.free_depth = free_depth
        self._contradiction = ""

    def compile(self, place: Place) -> Piece:
        """The values of the schema or of a part of it. Raises GrammarError for an unsupported schema, and if no value
        fits."""
        piece = self.piece((place,), self.free_depth, 0)
        if piece is byte_nfa.nothing:
            ended = " within the depth of recursion" if self.reader.cut else ""
            raise GrammarError(f"No value fits the schema{ended}: its requirements contradict each other.", self._contradiction)
        return piece

    def piece(self, conjunction: Conjunction, free: int, depth: int) -> Piece:
        """The values that satisfy all these schemas. free: nesting depth of unconstrained containers. Returns
        byte_nfa.nothing if no value does."""
        if depth > MOST_DEPTH:
            path = conjunction[0].path if conjunction else "#"
            raise GrammarTooLargeError(f"Objects and arrays are nested more than {MOST_DEPTH} levels deep.", path)
        said = tuple(place for place in conjunction if place.schema is not True and place.schema != {})
        if len(said) == 1 and self.written_out is not None and _is_flat(said[0].schema):
            key = repr(said[0].schema)
            piece = self._pieces.get(key)
            if piece is None:
                piece = self._uncached(said, free, depth)
                if piece is not byte_nfa.nothing:
                    self._pieces[key] = piece
            return piece
        return self._uncached(said, free, depth)

    def _uncached(self, said: Conjunction, free: int, depth: int) -> Piece:
        free = self.free_depth if said else free - 1
        if free < 0:
            shapes = [Shape(types=frozenset({"null", "boolean", "number", "string"}))]
        else:
            shapes = joined_strings(self.reader.shapes(said))
        try:
            piece = byte_nfa.choice(*(one for shape in shapes for one in self._of_shape(shape, free, depth)))
        except GrammarError as error:
            if error.path == "#" and said:
                error.path = said[0].path
            raise
        if piece is byte_nfa.nothing:
            self._contradiction = self._contradiction or (said[0].path if said else "#")
        return piece

    def _of_shape(self, shape: Shape, free: int, depth: int) -> list[Piece]:
        if shape.literals is not None:
            return [byte_nfa.words(_scalar(value) for value in shape.allowed_literals())]
        pieces = []
        for value, text in LITERALS.items():
            if NAMES[type(value)] in shape.types and not any(value is one for one in shape.refused):
                pieces.append(byte_nfa.literal(text))
        if "number" in shape.types:
            if any(type(one) in (int, float) for one in shape.refused):
                raise GrammarError("'not' is not supported with numbers.", keyword="not")
            within = self.free_depth - free <= LIMITED_DEPTH
            pieces.append(shape.number_range().piece(self.digits if within else None))
        if "string" in shape.types:
            taken = tuple(one for one in shape.refused if type(one) is str)
            pieces.append(shape.strings.without(taken).piece(self.written_out))
        if "array" in shape.types:
            pieces.append(self._array(shape, free, depth + 1))
        if "object" in shape.types:
            pieces.append(self._object(shape, free, depth + 1))
        return pieces

    # ---- arrays ------------------------------------------------------------------------------------------------------

    def _array(self, shape: Shape, free: int, depth: int) -> Piece:
        length = max((len(items.first) for items in shape.items), default=0)
        least, most = shape.least_items, shape.most_items
        if most is not None and least > most:
            return byte_nfa.nothing
        if most is not None:
            length = min(length, most)
        if shape.unique is not None and (most is None or most > 1):
            return self._distinct_items(shape, length, shape.unique)
        first = []
        for index in range(length):
            places = [items.first[index] if index < len(items.first) else items.others for items in shape.items]
            first.append(self.piece(tuple(place for place in places if place is not None), free, depth))
            if first[-1] is byte_nfa.nothing:
                return array_of(first, byte_nfa.nothing, least, index) if index >= least else byte_nfa.nothing
        if most == length:
            return array_of(first, byte_nfa.nothing, least, most)
        others = self.piece(tuple(items.others for items in shape.items if items.others is not None), free, depth)
        if others is byte_nfa.nothing:
            return array_of(first, others, least, length) if length >= least else byte_nfa.nothing
        return array_of(first, others, least, most)

    def _distinct_items(self, shape: Shape, length: int, place: Place) -> Piece:
        """Different items of a list of scalars, in the order of this list."""
        items = tuple(one.others for one in shape.items if one.others is not None)
        values = list[Any]()
        for one in [Shape()] if length else self.reader.shapes(items):
            if one.literals is None and one.types <= {"null", "boolean"}:
                one.literals = [value for value in LITERALS if NAMES[type(value)] in one.types]
            if one.literals is None:
                raise fault(
                    place,
                    "uniqueItems",
                    "is supported only for items with an enum or const, booleans and null: automata can't compare others.",
                )
            for value in one.allowed_literals():
                if not any(same(value, other) for other in values):
                    values.append(value)
        pieces = [byte_nfa.literal(_scalar(value)) for value in values]
        least, most = shape.least_items, shape.most_items
        return set_of(pieces, least, most) if least <= len(pieces) else byte_nfa.nothing

    # ---- objects -----------------------------------------------------------------------------------------------------

    def _object(self, shape: Shape, free: int, depth: int) -> Piece:
        names = dict.fromkeys(name for members in shape.members for name in members.properties)
        declared = {name for members in shape.members if members.closing for name in members.properties}
        names |= shape.required
        schemas = {name: self._member(shape, name) for name in names}
        key_rules = self._key_rules(shape)
        values: dict[str, Piece] = {}
        # Required members first, and constants before others: alternatives that contradict each other end there.
        for name in sorted(names, key=lambda name: (name not in shape.required, not _is_constant(schemas[name]))):
            fits = all(rule is not None and rule.accepts(json_text(name)) for rule in key_rules)
            values[name] = self.piece(schemas[name], free, depth) if fits else byte_nfa.nothing
            if name in shape.required and values[name] is byte_nfa.nothing:
                return byte_nfa.nothing
        named = [
            Member(byte_nfa.literal(json_text(name)), values[name], name in shape.required)
            for name in names
            if values[name] is not byte_nfa.nothing
        ]
        closed = bool(declared) or any(members.patterns for members in shape.members)
        closed &= all(members.others is None for members in shape.members)
        others = [] if shape.most_members == len(shape.required) else self._others(shape, names, key_rules, closed, free, depth)
        return self._counted(shape, named, others)

    def _counted(self, shape: Shape, named: list[Member], others: list[Member]) -> Piece:
        needed, least, most = len(shape.required), shape.least_members, shape.most_members
        if most is not None and max(least, needed) > most:
            return byte_nfa.nothing
        if not others:
            if least > len(named):
                return byte_nfa.nothing
            most = None if most is not None and most >= len(named) else most
        elif least > needed + 1:
            message = "'minProperties' may exceed the number of required members by at most 1 if unnamed members are allowed."
            raise GrammarError(message, keyword="minProperties")
        return object_of(named, others, 0 if least <= needed else least, most)

    def _member(self, shape: Shape, name: str) -> Conjunction:
        """The schemas of the member of this name."""
        found: list[Place] = []
        for members in shape.members:
            own = [members.properties[name]] if name in members.properties else []
            own += [place for text, place in members.patterns.items() if _matches(text, name)]
            found += own or ([members.others] if members.others is not None else [])
        return tuple(found)

    def _others(
        self, shape: Shape, names: dict[str, None], key_rules: list[Any], closed: bool, free: int, depth: int
    ) -> list[Member]:
        """Members that the schema does not name, by the patterns that their names match."""
        patterns = tuple(dict.fromkeys(text for members in shape.members for text in members.patterns))
        if len(patterns) > MOST_PATTERNS:
            raise GrammarError(f"'patternProperties' may have at most {MOST_PATTERNS} patterns.", keyword="patternProperties")
        found = []
        for count in range(len(patterns) + 1):
            for matched in combinations(patterns, count):
                if closed and not matched:
                    continue
                value = self.piece(self._unnamed(shape, matched), free, depth)
                if value is byte_nfa.nothing:
                    continue
                avoided = tuple(text for text in patterns if text not in matched)
                key = StringRules(patterns=matched, avoided=avoided, taken=tuple(names)).piece()
                if key_rules:
                    automaton = automaton_of(key)
                    for rule in key_rules:
                        automaton = intersection(automaton, rule)
                    key = byte_nfa.embedded(automaton)
                if key is not byte_nfa.nothing:
                    found.append(Member(key, value))
        return found

    def _unnamed(self, shape: Shape, matched: tuple[str, ...]) -> Conjunction:
        found: list[Place] = []
        for members in shape.members:
            own = [place for text, place in members.patterns.items() if text in matched]
            found += own or ([members.others] if members.others is not None else [])
        return tuple(found)

    def _key_rules(self, shape: Shape) -> list[Any]:
        strings, kept = Place({"type": "string"}, "#"), self.written_out
        self.written_out = None  # no counted strings: the rules are intersected
        rules = [automaton_of(self.piece((place, strings), 0, 0)) for place in shape.names]
        self.written_out = kept
        return rules

    # ---- oneOf -------------------------------------------------------------------------------------------------------

    def _exclude(self, choice: Alternatives, shape: Shape) -> None:
        """Raise GrammarError if two schemas of oneOf have a common value."""
        kept = self._contradiction
        for one, other in combinations(choice.places, 2):
            for both in self.reader.shapes((one, other), shape.copy()):
                if any(piece is not byte_nfa.nothing for piece in self._of_shape(both, self.free_depth, 0)):
                    place = Place(None, one.path.rpartition("/oneOf/")[0])
                    raise fault(
                        place,
                        "oneOf",
                        f"is supported only if its schemas exclude each other, but {one.path} and {other.path} do not.",
                    )
        self._contradiction = kept


def _is_flat(schema: Any) -> bool:
    """Whether a schema of scalars has no schemas or references in it, so its piece depends on nothing else."""
    return (
        type(schema) is dict
        and schema.get("type") in ("string", "integer", "number", "boolean", "null")
        and all(name != REFERENCE and _is_plain(value) for name, value in schema.items())
    )


def _is_plain(value: Any) -> bool:
    """Whether a value is a scalar, or a list of scalars."""
    return type(value) is not dict and (type(value) is not list or all(type(one) not in (dict, list) for one in value))


def _scalar(value: Any) -> bytes:
    """A scalar as JSON."""
    return (
        json_text(value) if type(value) is str else LITERALS[value] if type(value) in (bool, type(None)) else repr(value).encode()
    )


def _is_constant(conjunction: Conjunction) -> bool:
    return any(type(place.schema) is dict and ("const" in place.schema or "enum" in place.schema) for place in conjunction)


def _matches(pattern: str, name: str) -> bool:
    automaton = pattern_automaton(pattern)
    return automaton is not None and automaton.accepts(json_text(name))
