"""The fields about the format of the output: OpenAI's `response_format`, vLLM's `structured_outputs` and its older `guided_*`.

Each gives a grammar (blinkpy.dpu.grammar.compile_grammar). It is compiled, and so checked, later.
"""

from typing import Annotated, Any, NamedTuple

import orjson
from msgspec import Meta

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.grammar.compile_grammar import MOST_CHOICES, Grammar
from blinkpy.dpu.http.fields.body_model import Body, only, rule
from blinkpy.dpu.http.fields.request_body import refuse_unsupported

OBJECT: Grammar = {"object": True}
TEXT = {"type": "text"}
MAX_NAME = 64  # characters of a schema's name, as in OpenAI's API
NO_EBNF = "use a JSON Schema or a regular expression, not EBNF"

Schema = Annotated[dict[str, Any] | str | bool, rule(kind="a JSON Schema: an object")]  # or the text of one
Regex = Annotated[str, Meta(min_length=1)]
Choices = Annotated[list[str], Meta(min_length=1, max_length=MOST_CHOICES)]


class GrammarField(NamedTuple):
    """A grammar, and the name of its field."""

    param: str
    grammar: Grammar
    needed: bool = True  # if not, an engine without grammars serves the request, too


class TextFormat(NamedTuple):
    """`text.format` of /v1/responses, as given, and its grammar."""

    given: dict[str, Any]
    grammar: GrammarField | None


class _Format(Body, tag_field="type"):
    """A kind of output."""


class AnyText(_Format, tag="text"):
    """Any text."""


class JsonObject(_Format, tag="json_object"):
    """Any JSON object, or an object of a schema, in the form of llama.cpp and Together."""

    schema: Schema | None = None


class NamedSchema(Body):
    """A schema with a name. The output follows it whether `strict` is true or not."""

    name: Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]
    schema: Schema | None = None
    strict: bool | None = None
    description: str | None = None


class SchemaFormat(_Format, tag="json_schema"):
    """JSON that follows a schema, in the form of /v1/chat/completions."""

    json_schema: NamedSchema


class FlatSchemaFormat(NamedSchema, tag_field="type", tag="json_schema"):
    """JSON that follows a schema, in the form of /v1/responses."""


ResponseFormat = AnyText | JsonObject | SchemaFormat
FlatFormat = AnyText | JsonObject | FlatSchemaFormat


class StructuredOutputs(Body):
    """One of four formats of the output. vLLM's options are accepted if they are false."""

    json: Schema | None = None
    regex: Regex | None = None
    choice: Choices | None = None
    json_object: bool | None = None
    grammar: Annotated[Any, only(why=NO_EBNF)] = None
    disable_any_whitespace: Annotated[Any, only(False)] = None
    disable_fallback: Annotated[Any, only(False)] = None
    disable_additional_properties: Annotated[Any, only(False)] = None


STRUCTURES = ("json", "regex", "choice", "json_object")


def format_grammar(name: str, given: ResponseFormat | FlatFormat) -> GrammarField | None:
    """The grammar of a format; None for any text. name: the name of its field."""
    if isinstance(given, AnyText):
        return None
    if isinstance(given, JsonObject):
        return GrammarField(name, OBJECT) if given.schema is None else schema_grammar(f"{name}.schema", given.schema)
    where, named = (f"{name}.json_schema", given.json_schema) if isinstance(given, SchemaFormat) else (name, given)
    if named.schema is None:
        return GrammarField(f"{where}.schema", OBJECT)
    return schema_grammar(f"{where}.schema", named.schema)


def schema_grammar(name: str, schema: Any) -> GrammarField:
    """The grammar of a JSON Schema, given as an object or as text. Raises ApiError for a text that is not a schema."""
    if type(schema) is str:
        try:
            schema = orjson.loads(schema)
        except orjson.JSONDecodeError as error:
            raise bad_request(f"'{name}' is not valid JSON: {error}.", name, "invalid_value") from error
    if type(schema) not in (dict, bool):
        raise bad_request(f"'{name}' must be a JSON Schema: an object.", name, "invalid_type")
    return GrammarField(name, {"schema": schema})


def structures_grammar(name: str, given: StructuredOutputs) -> GrammarField | None:
    """The grammar of `structured_outputs`; None if it is unset. Raises ApiError."""
    refuse_unsupported(given, name)
    found = [
        None if given.json is None else schema_grammar(f"{name}.json", given.json),
        None if given.regex is None else GrammarField(f"{name}.regex", {"regex": given.regex}),
        None if given.choice is None else GrammarField(f"{name}.choice", {"choice": given.choice}),
        GrammarField(f"{name}.json_object", OBJECT) if given.json_object else None,
    ]
    grammars = [grammar for grammar in found if grammar is not None]
    if len(grammars) > 1:
        raise bad_request(f"'{name}' must have only one of {', '.join(STRUCTURES)}.", name, "invalid_value")
    return grammars[0] if grammars else None
