"""Endless grammars for measurements, and a byte-level tokenizer for them."""

import json
import random
from typing import Any

from blinkpy.dpu.grammar.compile_grammar import automaton_of_grammar
from blinkpy.dpu.text.detokenizer import byte_alphabet
from blinkpy.queues.byte_automaton import ByteAutomaton

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "string", "format": "date"},
        "city": {"enum": ["Amsterdam", "Berlin", "Chicago", "Delhi", "Edinburgh", "Florence", "Geneva", "Helsinki"]},
        "amount": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
        "address": {"type": "object", "properties": {"street": {"type": "string"}, "number": {"type": "integer"}}},
    },
    "required": ["name", "born", "city", "amount", "tags", "address"],
}
# The engine counts the characters of these strings; at least 200, so that most steps are within one.
COUNTED: dict[str, Any] = {
    **SCHEMA,
    "properties": {
        **SCHEMA["properties"],
        "name": {"type": "string", "minLength": 200, "maxLength": 524_288},
        "tags": {"type": "array", "items": {"type": "string", "minLength": 200, "maxLength": 2000}, "maxItems": 3},
    },
}
# By the values of decode_step's --grammar.
ENDLESS = {"strings": SCHEMA, "counted": COUNTED}
# For servers that support only JSON Schema: 64 towns are more than 250 of the tokens that shapes have.
LONG_OBJECT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "city": SCHEMA["properties"]["city"],
        "amount": {"type": "integer"},
        "seen": {"type": "array", "items": {"enum": ["Berlin", "Delhi", "Geneva", "Oslo"]}, "minItems": 64},
    },
    "required": ["name", "city", "amount", "seen"],
    "additionalProperties": False,
}


def endless_objects(kind: str) -> ByteAutomaton:
    """Consecutive objects of a schema of ENDLESS. A NUL byte, which no token of the tokenizer below contains, ends them.

    Since no token reaches an end, the engine must not lead outputs to one near max_tokens (ByteAutomaton's `closes`).
    """
    objects = {"repeat": {"schema": ENDLESS[kind]}, "low": 0, "high": None}
    return automaton_of_grammar({"sequence": [objects, {"text": "\0"}]}, closes=False)


def byte_level_tokenizer(vocab_size: int) -> str:
    """tokenizer.json of a vocabulary of all bytes except NUL, and words of 2 to 12 letters, digits and signs,
    with realistic lengths.
    """
    alphabet = byte_alphabet()
    spelled = {byte: character for character, byte in alphabet.items()}
    single = [character for character, byte in alphabet.items() if byte]
    vocabulary, draw = {character: i for i, character in enumerate(single)}, random.Random(1)
    while len(vocabulary) < vocab_size:
        word = "".join(draw.choices('abcdefghijklmnopqrstuvwxyz0123456789,.:"{}[]-_ ', k=draw.randint(2, 12)))
        vocabulary.setdefault("".join(spelled[byte] for byte in word.encode()), len(vocabulary))
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return json.dumps({"model": model, "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}})
