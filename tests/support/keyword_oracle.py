"""An oracle of schemas: each keyword alone, with itself, and with each other keyword, over documents at the boundaries of their
values.

Two validators judge each document: jsonschema, and jsonschema-rs, which is written in Rust. The automaton must accept a
document in one of its forms if and only if it is valid. Random outputs of the automaton must be valid too.
"""

import importlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from decimal import Decimal
from typing import Any, NamedTuple

import jsonschema_rs
import numpy as np
from support.schema_validator import document, validator

from blinkpy.queues.byte_automaton import ByteAutomaton

Json = Any
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
FREE_DEPTH = 1  # of containers in values without a schema: deeper values would take most of the time
MOST_STEPS = 40  # of a random output, before it takes the shortest path to its end
OUTPUTS = 3  # of each schema
TYPES = ("number", "string", "array", "object")

NUMBERS: list[Json] = [
    *range(-4, 7), *(n / 2 for n in range(-7, 10, 2)), 0.25, -0.75, 0.1, 0.3, 1.05, 2.01, 10, 12, 100, 999, 1000,
    2**31 - 1, 2**31, -(2**31), -(2**31) - 1, 2**53, 2**63 - 1,
]  # fmt: skip
STRINGS: list[Json] = [
    *("", "a", "b", "1", "é", "😀", "ab", "ba", "aa", "a1", "1é", "😀😀", "abc", "aab", "é1a", "abab", "aaaa", "b1b1b", "ab c"),
    *('"', "\\", '"a\\', "/", "a\tb", "ba é 😀"),
]
ITEMS: list[Json] = [
    [],
    [1], ["a"], [None], [2, 1], [1, "a"], ["a", 1], ["a", "b"], [[1]], [1, 1, 1], ["a", 1, None], [3, "ab", True], [1, 2, 3, 4],
]  # fmt: skip
OBJECTS: list[Json] = [
    dict(zip(names, values, strict=True))
    for count in range(4)
    for names in itertools.combinations(("a", "b", "ab", "c"), count)
    for values in itertools.islice(itertools.product((1, "x", 3), repeat=count), 0, None, max(1, 3 ** (count - 1)))
]
DOCUMENTS = {"number": NUMBERS, "string": STRINGS, "array": ITEMS, "object": OBJECTS}
OTHERS: list[Json] = [None, True, False]

Draw = Callable[[np.random.Generator], Json]


def one_of(*values: Json) -> Draw:
    return lambda rng: values[rng.integers(len(values))]


def a_map(names: tuple[str, ...], value: Draw, most: int = 2) -> Draw:
    """An object of some of the names, in their order."""

    def draw(rng: np.random.Generator) -> Json:
        chosen = sorted(rng.choice(len(names), int(rng.integers(1, most + 1)), replace=False).tolist())
        return {names[i]: value(rng) for i in chosen}

    return draw


SMALL = one_of(
    {"type": "integer"}, {"type": "string"}, {"maximum": 2}, {"enum": [1, "a", "x"]}, {"minLength": 2}, {"const": 1}, True, False
)
NAMES = ("a", "b", "ab", "c")
BOUND = one_of(-2, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 10, 2**31)
LENGTH, COUNT = one_of(0, 1, 2, 3, 4), one_of(0, 1, 2, 3)
PATTERN = one_of("^a", "b$", "^(ab|1)*$", "[0-9]", "^.{1,2}$", "^[^a]*$", "é|\\\\", "a+b?", "^$", "^a{2,}$")
LITERALS = one_of([1, "a", None], [2.5, -1, "ab"], ["", "é", 0, True], [3, [1], {"a": 1}], ["a", "ab", "abc"], [1, 2, 3, 100])

KEYWORDS: dict[str, tuple[str, Draw]] = {  # the type whose values it restricts, "" for any, and its values
    "minimum": ("number", BOUND),
    "maximum": ("number", BOUND),
    "exclusiveMinimum": ("number", BOUND),
    "exclusiveMaximum": ("number", BOUND),
    "multipleOf": ("number", one_of(1, 2, 3, 4, 5, 6, 10, 0.5, 0.25, 1.5, 2.5)),
    "minLength": ("string", LENGTH),
    "maxLength": ("string", LENGTH),
    "pattern": ("string", PATTERN),
    "minItems": ("array", COUNT),
    "maxItems": ("array", COUNT),
    "items": ("array", SMALL),
    "prefixItems": ("array", lambda rng: [SMALL(rng) for _ in range(rng.integers(1, 4))]),
    "properties": ("object", a_map(NAMES, SMALL)),
    "additionalProperties": ("object", SMALL),
    "patternProperties": ("object", a_map(("^a", "b$", "^c$"), SMALL)),
    "required": ("object", one_of([], ["a"], ["b"], ["a", "b"], ["c"])),
    "propertyNames": ("object", one_of({"maxLength": 1}, {"pattern": "^a"}, {"enum": ["a", "c"]}, {"minLength": 2})),
    "minProperties": ("object", one_of(0, 1, 2)),
    "maxProperties": ("object", COUNT),
    "dependentRequired": ("object", a_map(NAMES, one_of(["a"], ["b"], ["c"], []))),
    "dependentSchemas": (
        "object",
        a_map(NAMES, one_of({"required": ["b"]}, {"maxProperties": 1}, {"properties": {"b": {"const": 1}}})),
    ),
    "enum": ("", LITERALS),
    "const": ("", one_of(1, "a", None, 2.5, "", [1], {"a": 1}, 0, False)),
    "type": ("", one_of("integer", "number", "string", "array", "object", ["integer", "string"], ["array", "null"], "boolean")),
    "not": (
        "",
        one_of({"enum": ["a", "ab"]}, {"const": "x"}, {"type": "string"}, {"type": ["null", "array"]}, {"enum": [None, "é"]}),
    ),
    "anyOf": ("", lambda rng: [SMALL(rng), one_of({"type": "array"}, {"minimum": 3}, {"required": ["a"]})(rng)]),
    "allOf": ("", lambda rng: [SMALL(rng), one_of({"maxItems": 1}, {"minimum": 1}, {"maxLength": 2})(rng)]),
    "oneOf": (
        "",
        one_of(
            [{"type": "integer"}, {"type": "string"}],
            [{"minimum": 2, "type": "number"}, {"maximum": 1, "type": "number"}],
            [{"const": 1}, {"enum": ["a", 2.5]}],
        ),
    ),
    "$ref": ("", one_of("#/$defs/small", "#/$defs/large")),
}
NEW_KEYWORDS = {"prefixItems", "dependentRequired", "dependentSchemas", "$ref"}  # unknown in draft 7; or, $ref, only alone
OLD_KEYWORDS: dict[str, tuple[str, Draw]] = {  # of draft 7
    "dependencies": ("object", a_map(NAMES, one_of(["a"], ["b", "c"], {"required": ["b"]}, {"maxProperties": 1}))),
    "items": ("array", lambda rng: [SMALL(rng) for _ in range(rng.integers(1, 3))]),
    "additionalItems": ("array", SMALL),
}
DEFINITIONS = {
    "small": {"maximum": 2, "maxLength": 2, "maxItems": 2},
    "large": {"minimum": 1, "minLength": 1, "type": ["number", "string"]},
}
FREE = ("properties", "patternProperties")  # an object with these, but without additionalProperties, has no other members


class Case(NamedTuple):
    """A schema of one or two keywords."""

    keywords: tuple[str, str]
    schema: dict[str, Json]


class WrongError(AssertionError):
    """The automaton and the validators disagree."""


def cases(rng: np.random.Generator, only: str = "") -> Iterator[Case]:
    """Each keyword alone and three times with itself, and each pair of keywords, with fresh values. only: a keyword that
    each case has; "" for any."""
    older = {name: draw for name, draw in KEYWORDS.items() if name not in NEW_KEYWORDS}
    for known in (KEYWORDS, {**older, **OLD_KEYWORDS}):
        pairs = [(name, name) for name in known] * 3 + list(itertools.combinations_with_replacement(known, 2))
        for alone, (one, other) in zip([True] * len(known) + [False] * len(pairs), pairs, strict=False):
            old = known is not KEYWORDS
            if (only and only not in (one, other)) or (old and not {one, other} & OLD_KEYWORDS.keys()):
                continue
            if old and "additionalItems" in (one, other) and "items" not in (one, other):
                other = "items"  # without it, additionalItems has no effect
            first, second = known[one][1](rng), known[other][1](rng)
            if known[one][1] is known[other][1] and one != other and rng.random() < 0.5:
                second = first  # two bounds meet
            schema: dict[str, Json] = {one: first}
            if not alone:
                both = one != other and rng.random() < 0.5
                schema = {one: first, other: second} if both else {"allOf": [{one: first}, {other: second}]}
            types = sorted({kind for kind in (known[one][0], known[other][0]) if kind})
            if types and rng.random() < 0.7:
                schema = {"allOf": [schema], "type": types} if "type" in schema else {"type": types, **schema}
            if "$ref" in (one, other):
                schema["$defs"] = DEFINITIONS
            yield Case((one, other), {"$schema": DRAFT_7, **schema} if old else schema)


def compile_schema(schema: Json) -> ByteAutomaton | None:
    """The automaton of a schema, or None for an empty language. Imports the compiler here, so that a test may plant bugs in
    it."""
    compiler = importlib.import_module("blinkpy.dpu.grammar.schema_compiler").SchemaCompiler(schema, FREE_DEPTH)
    places, pieces = (importlib.import_module(f"blinkpy.dpu.grammar.{name}") for name in ("schema_shapes", "byte_nfa"))
    made = pieces.automaton_of(compiler.compile(places.Place(schema, "#")))
    assert made is None or isinstance(made, ByteAutomaton)
    return made


def judge(case: Case, rng: np.random.Generator, counts: Counter[str]) -> None:
    """Compare the automaton of a case with both validators. Raises WrongError. counts: of documents, outputs and refusals."""
    schema, texts = case.schema, None
    check, other = validator(schema), jsonschema_rs.validator_for(schema)
    try:
        automaton = compile_schema(schema)
        texts = None if automaton is None else _Texts(automaton)
    except ValueError as error:
        if type(error).__name__ not in ("GrammarError", "GrammarTooLargeError"):
            raise
        counts["contradictions" if "contradict" in str(error) else f"refused: {error.keyword}"] += 1  # type: ignore[attr-defined]
        if "contradict" not in str(error):
            return
    for one in itertools.chain(*DOCUMENTS.values(), OTHERS):
        valid = check.is_valid(one)
        if valid != other.is_valid(one):
            counts["validators disagree"] += 1
            continue
        counts["valid" if valid else "invalid"] += 1
        accepted = texts is not None and any(texts.accept(form) for form in forms(one))
        if accepted and not valid:
            raise WrongError(f"accepts {one!r} under {json.dumps(schema)}")
        if valid and not accepted and not may_omit(schema, one):
            raise WrongError(f"refuses {one!r} under {json.dumps(schema)}")
    if texts is not None:
        _judge_outputs(case, texts, check, other, rng, counts)


class _Texts:
    """The strings that an automaton accepts: checks and draws them."""

    def __init__(self, automaton: ByteAutomaton) -> None:
        self.rows, self.accepting = automaton.next_state.tolist(), automaton.accepting.tolist()
        self.class_of, self.distances = automaton.class_of.tolist(), automaton.distances().tolist()
        self.members = [np.flatnonzero(automaton.class_of == one).tolist() for one in range(automaton.classes)]

    def accept(self, text: bytes) -> bool:
        state = 0
        for byte in text:
            state = self.rows[state][self.class_of[byte]]
            if state < 0:
                return False
        return bool(self.accepting[state])

    def draw(self, rng: np.random.Generator, steps: int) -> bytes:
        """A string: some random steps, then the shortest path to an end."""
        text, state = bytearray(), 0
        while not (self.accepting[state] and len(text) >= steps):
            edges = [(kind, after) for kind, after in enumerate(self.rows[state]) if after >= 0]
            if len(text) >= steps:
                edges = [(kind, after) for kind, after in edges if self.distances[after] < self.distances[state]]
            if not edges:
                break
            kind, state = edges[rng.integers(len(edges))]
            text.append(self.members[kind][rng.integers(len(self.members[kind]))])
        return bytes(text)


def _judge_outputs(case: Case, texts: _Texts, check: Any, other: Any, rng: np.random.Generator, counts: Counter[str]) -> None:
    for _ in range(OUTPUTS):
        text = texts.draw(rng, int(rng.integers(MOST_STEPS)))
        if _beyond_doubles(text):
            continue
        one = document(text)
        counts["outputs"] += 1
        if not (check.is_valid(one) or other.is_valid(one)):
            raise WrongError(f"generates {text!r} under {json.dumps(case.schema)}")
        if not (check.is_valid(one) and other.is_valid(one)):
            counts["validators disagree"] += 1


def _beyond_doubles(text: bytes) -> bool:
    """Whether a fraction has more digits than a double keeps, so that validators would judge a rounded number."""
    digits = list[int]()
    json.loads(text, parse_float=lambda number: digits.append(len(Decimal(number).as_tuple().digits)))
    return max(digits, default=0) > sys.float_info.dig


def forms(value: Json) -> Iterator[bytes]:
    """The texts of a document: members in each order, whole numbers with and without a fraction."""
    for text in _texts(value):
        yield text.encode()


def _texts(value: Json) -> list[str]:
    if isinstance(value, dict):
        members = [[f"{json.dumps(name, ensure_ascii=False)}: {text}" for text in _texts(one)] for name, one in value.items()]
        return [
            "{" + ", ".join(order) + "}" for chosen in itertools.product(*members) for order in itertools.permutations(chosen)
        ]
    if isinstance(value, list):
        return ["[" + ", ".join(chosen) + "]" for chosen in itertools.product(*map(_texts, value))]
    text = json.dumps(value, ensure_ascii=False)
    whole = isinstance(value, int) and not isinstance(value, bool)
    return [text, f"{text}.0"] if whole else [text]


def may_omit(schema: Json, value: Json) -> bool:
    """Whether an automaton may refuse this valid document, an object: if the schema names members but has no
    additionalProperties, the automaton allows no further members."""
    text = json.dumps(schema)
    named = any(f'"{name}"' in text for name in FREE) and '"additionalProperties"' not in text
    return isinstance(value, dict) and named
