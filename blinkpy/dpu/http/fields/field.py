"""A field of a request's body: its check, its schema in /openapi.json, and its line in docs/api.md."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.http.fields.unsupported_fields import UNSUPPORTED

BOOLEAN = {"type": "boolean"}
STRING = {"type": "string"}
NULL = {"type": "null"}  # within a field, as clients send back what they know of an answer


@dataclass(frozen=True)
class Check:
    """The check of a field's value: run(name, value) returns what the service gets, or raises ApiError. schema: JSON Schema of
    the values, which may take more than `run` does."""

    run: Callable[[str, Any], Any]
    schema: Mapping[str, Any]

    def __call__(self, name: str, value: Any) -> Any:
        return self.run(name, value)


def takes(**schema: Any) -> Callable[[Callable[[str, Any], Any]], Check]:
    """Makes a function with a schema to a check."""
    return lambda run: Check(run, schema)


def one_of(*schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema of values of several kinds."""
    return {"anyOf": list(schemas)}


class Field(NamedTuple):
    """A field of a request's body."""

    attribute: str  # of Request, or of RequestParameters after "parameters.", or "" when there is none
    check: Callable[[str, Any], Any]
    values: str = "accepted, without effect"  # for docs/api.md, as is default
    default: str = ""
    supported: bool = True  # False: only values that ask for nothing are accepted

    @property
    def schema(self) -> Mapping[str, Any]:
        """JSON Schema of the field's values."""
        return {**getattr(self.check, "schema", {}), "description": self.values}


_NULLS = {"type": "object", "additionalProperties": {"type": "null"}}


def only(*allowed: Any, why: str = "") -> Field:
    """A field of which values that ask for nothing are accepted, and others refused by name."""
    shown = [orjson.dumps(one).decode() for one in allowed]

    @takes(**(one_of({"enum": list(allowed)}, _NULLS) if {} in allowed else {"enum": list(allowed)}))
    def check(name: str, value: Any) -> None:
        given = {key: entry for key, entry in value.items() if entry is not None} if type(value) is dict else value
        if not any(given == one and type(given) is type(one) for one in allowed):
            rule = f"supported with the value {' or '.join(shown)} only" if allowed else "not supported"
            raise bad_request(f"'{name}' is {rule}{f': {why}' if why else ''}.", name, "unsupported_parameter")

    return Field("", check, (f"`{'`, `'.join(shown)}`; " if allowed else "") + why, supported=False)


def unsupported_fields(endpoint: str) -> dict[str, Field]:
    """Those of an endpoint of blinkpy.dpu.http.fields.unsupported_fields."""
    return {row.name: only(*row.harmless, why=row.why) for row in UNSUPPORTED if endpoint in row.endpoints}
