"""The fields of a request that say what its output may be: OpenAI's `response_format`, vLLM's `structured_outputs` and its older
`guided_*`. Each gives a grammar (blinkpy.dpu.grammar.compile_grammar); it is compiled, and so checked, later."""

from collections.abc import Callable
from typing import Any, NamedTuple

import orjson

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.grammar.compile_grammar import MOST_CHOICES, Grammar

OBJECT: Grammar = {"object": True}
TEXT = {"type": "text"}
MAX_NAME = 64  # characters of a schema's name, as OpenAI has it


class GrammarField(NamedTuple):
    """A grammar, and the field that it came from. needed: whether the answer means nothing without it."""

    param: str
    grammar: Grammar
    needed: bool = True


class TextFormat(NamedTuple):
    """`text.format` of /v1/responses, as given, and its grammar."""

    given: dict[str, Any]
    grammar: GrammarField | None


def text_format(name: str, value: Any) -> GrammarField | None:
    """The same as response_format, in the form of /v1/responses: what describes a schema stands beside its type."""
    if _object(name, value).get("type") == "json_schema":
        return _named_schema(name, {key: entry for key, entry in value.items() if key != "type"})
    return response_format(name, value)


def response_format(name: str, value: Any) -> GrammarField | None:
    """{"type": "text"}, "json_object", or "json_schema" with {"json_schema": {"name", "schema", ...}}. None: any text. The schema
    is kept to whether `strict` is true or not."""
    kind = _object(name, value).get("type")
    if kind == "json_schema":
        _only(name, value, "type", "json_schema")
        return _named_schema(f"{name}.json_schema", value.get("json_schema"))
    if kind not in ("text", "json_object"):
        raise bad_request(f"'{name}.type' must be text, json_object or json_schema.", f"{name}.type", "invalid_value")
    _only(name, value, "type")
    return GrammarField(name, OBJECT) if kind == "json_object" else None


def _named_schema(name: str, value: Any) -> GrammarField:
    _only(name, _object(name, value), "name", "schema", "strict", "description")
    title = value.get("name")
    if type(title) is not str or not 1 <= len(title) <= MAX_NAME:
        raise bad_request(f"'{name}.name' must be a string of 1 to {MAX_NAME} characters.", f"{name}.name", "invalid_value")
    for key, kind, what in (("strict", bool, "a boolean"), ("description", str, "a string")):
        if value.get(key) is not None and type(value[key]) is not kind:
            raise bad_request(f"'{name}.{key}' must be {what}.", f"{name}.{key}", "invalid_type")
    if value.get("schema") is None:
        return GrammarField(f"{name}.schema", OBJECT)
    return schema_field(f"{name}.schema", value["schema"])


def schema_field(name: str, value: Any) -> GrammarField:
    """A JSON Schema, or the text of one."""
    if type(value) is str:
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError as error:
            raise bad_request(f"'{name}' is not valid JSON: {error}.", name, "invalid_value") from error
    if type(value) not in (dict, bool):
        raise bad_request(f"'{name}' must be a JSON Schema: an object.", name, "invalid_type")
    return GrammarField(name, {"schema": value})


def regex_field(name: str, value: Any) -> GrammarField:
    """A regular expression for the whole output."""
    if type(value) is not str or not value:
        raise bad_request(f"'{name}' must be a regular expression: a string.", name, "invalid_type")
    return GrammarField(name, {"regex": value})


def choice_field(name: str, value: Any) -> GrammarField:
    """Texts, one of which is the output."""
    if type(value) is not list or not value or not all(type(text) is str for text in value):
        raise bad_request(f"'{name}' must be an array of strings.", name, "invalid_type")
    if len(value) > MOST_CHOICES:
        raise bad_request(f"'{name}' can hold at most {MOST_CHOICES} strings, not {len(value)}.", name, "invalid_value")
    return GrammarField(name, {"choice": value})


def _object_field(name: str, value: Any) -> GrammarField | None:
    if type(value) is not bool:
        raise bad_request(f"'{name}' must be a boolean.", name, "invalid_type")
    return GrammarField(name, OBJECT) if value else None


STRUCTURES: dict[str, Callable[[str, Any], GrammarField | None]] = {
    "json": schema_field,
    "regex": regex_field,
    "choice": choice_field,
    "json_object": _object_field,
}


NO_EBNF = "use a JSON Schema or a regular expression, not EBNF"
OPTIONS = ("disable_any_whitespace", "disable_fallback", "disable_additional_properties")  # of vLLM; false asks for nothing


def structured_outputs(name: str, value: Any) -> GrammarField | None:
    """An object with one of STRUCTURES."""
    given = {
        key: one for key, one in _object(name, value).items() if one is not None and (one is not False or key not in OPTIONS)
    }
    if "grammar" in given:
        raise bad_request(f"'{name}.grammar' is not supported; {NO_EBNF}.", f"{name}.grammar", "unsupported_parameter")
    _only(name, given, *STRUCTURES)
    found = [check(f"{name}.{key}", given[key]) for key, check in STRUCTURES.items() if key in given]
    grammars = [one for one in found if one is not None]
    if len(grammars) > 1:
        raise bad_request(f"'{name}' can hold one of {', '.join(STRUCTURES)}, not several.", name, "invalid_value")
    return grammars[0] if grammars else None


def _object(name: str, value: Any) -> dict[str, Any]:
    if type(value) is not dict:
        raise bad_request(f"'{name}' must be an object.", name, "invalid_type")
    return value


def _only(name: str, value: dict[str, Any], *keys: str) -> None:
    for key, given in value.items():
        if key not in keys and given is not None:
            raise bad_request(f"'{name}.{key[:100]}' is not supported.", f"{name}.{key[:100]}", "unsupported_parameter")
