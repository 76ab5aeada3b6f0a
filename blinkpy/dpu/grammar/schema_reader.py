"""Converts a conjunction of schemas to shapes, one for each alternative; references are followed. A valid value has one of the
shapes.
"""

from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from blinkpy.dpu.grammar.grammar_errors import GrammarTooLargeError
from blinkpy.dpu.grammar.schema_keywords import (
    ANNOTATIONS,
    FORBIDDEN,
    GROUPS,
    KEYWORDS,
    NULLABLE,
    PLACES,
    REFERENCE,
    REFUSED,
    Alternatives,
    forbid,
    misspelt,
)
from blinkpy.dpu.grammar.schema_shapes import Conjunction, Place, Shape, fault

RECURSION = 3  # how often a reference may be followed again within one value
MOST_SCHEMAS = 20_000  # schemas read for one grammar, counting repeated ones
MOST_SHAPES = 500  # of one value


class SchemaReader:
    """Reads parts of one schema.

    exclude: raises GrammarError unless the schemas of oneOf exclude each other for values of a shape.
    cut: whether a recursion was cut off.
    """

    def __init__(self, root: Any, exclude: Callable[[Alternatives, Shape], None]):
        self.root, self._exclude = root, exclude
        self.cut = False
        self._schemas = 0
        self._anchors: dict[str, Place] | None = None

    def shapes(self, conjunction: Conjunction, start: Shape | None = None) -> list[Shape]:
        """The shapes of the values that satisfy all these schemas; none if they obviously contradict each other.
        Raises GrammarError."""
        waiting = list(conjunction)
        shape = start or Shape()
        choices: list[Alternatives] = []
        while waiting:
            place = waiting.pop(0)
            waiting += self._apply(place, shape, choices)
            if not shape.types:
                return []
        return self._spelled_out(shape, choices)

    def _spelled_out(self, shape: Shape, choices: list[Alternatives]) -> list[Shape]:
        if not choices:
            return [shape]
        first, *rest = choices
        if first.exclusive:
            self._exclude(first, shape)
        found: list[Shape] = []
        for place in first.places:
            for one in self.shapes((place,), shape.copy()):
                found += self._spelled_out(one, rest)
                if len(found) > MOST_SHAPES:
                    raise GrammarTooLargeError(f"The schema has more than {MOST_SHAPES} alternatives: simplify it.", place.path)
        return found

    def _apply(self, place: Place, shape: Shape, choices: list[Alternatives]) -> list[Place]:
        """Restrict the shape by one schema. Returns the further schemas that must hold; alternatives are appended to
        `choices`."""
        self._schemas += 1
        if self._schemas > MOST_SCHEMAS:
            raise GrammarTooLargeError(
                f"The grammar has more than {MOST_SCHEMAS} schemas, counting repeated references: simplify it."
            )
        schema = place.schema
        if schema is True or schema is False:
            shape.types &= shape.types if schema else frozenset()
            return []
        if type(schema) is not dict:
            raise fault(place, place.path.rpartition("/")[2], "must be a schema: an object or a boolean.")
        if NULLABLE in schema and isinstance(either := KEYWORDS[NULLABLE].apply(shape, schema[NULLABLE], place), Alternatives):
            choices.append(either)
            return []
        more: list[Place] = []
        done: set[tuple[str, ...]] = set()
        for name, value in schema.items():
            if name == FORBIDDEN:
                forbid(shape, value, place)
            elif name == REFERENCE:
                more += self._referred(place, value, shape)
            elif name in KEYWORDS:
                group = next((group for group in GROUPS if name in group), (name,))
                if group not in done:
                    done.add(group)
                    result = KEYWORDS[name].apply(shape, value, place)
                    if isinstance(result, Alternatives):
                        choices.append(result)
                    else:
                        more += result or []
            elif name in REFUSED:
                raise fault(place, name, f"is not supported: {REFUSED[name]}.")
            elif name not in ANNOTATIONS and name not in PLACES and (meant := misspelt(name)) is not None:
                raise fault(place, name[:100], f"is not a keyword; did you mean '{meant}'?")
        return more

    def _referred(self, place: Place, reference: Any, shape: Shape) -> list[Place]:
        if type(reference) is not str:
            raise fault(place, REFERENCE, "must be a string.")
        target = self._target(place, reference)
        if place.trail.count(target.path) > RECURSION:
            self.cut = True
            shape.types = frozenset()
            return []
        return [Place(target.schema, target.path, (*place.trail, target.path))]

    def _target(self, place: Place, reference: str) -> Place:
        own = self.root.get("$id", self.root.get("id")) if type(self.root) is dict else None
        document, _, fragment = reference.partition("#")
        if document and document != own and f"{document}#" != own:
            raise fault(place, REFERENCE, f"refers outside the schema: '{reference[:200]}'.")
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            if self._anchors is None:
                self._anchors = {}
                self._find_anchors(Place(self.root, "#"))
            if fragment not in self._anchors:
                raise fault(place, REFERENCE, f"refers to nothing: '{reference[:200]}'.")
            return self._anchors[fragment]
        target = Place(self.root, "#")
        for key in fragment.split("/")[1:]:
            name = key.replace("~1", "/").replace("~0", "~")
            schema = target.schema
            if type(schema) is list and name.isascii() and name.isdigit() and int(name) < len(schema):
                target = target.below(schema[int(name)], name)
            elif type(schema) is dict and name in schema:
                target = target.below(schema[name], name)
            else:
                raise fault(place, REFERENCE, f"refers to nothing: '{reference[:200]}'.")
        return target

    def _find_anchors(self, place: Place) -> None:
        schema = place.schema
        if type(schema) is dict and type(schema.get("$anchor")) is str and self._anchors is not None:
            self._anchors.setdefault(schema["$anchor"], place)
        inside = schema.items() if type(schema) is dict else enumerate(schema) if type(schema) is list else ()
        for key, below in inside:
            self._find_anchors(place.below(below, key))
