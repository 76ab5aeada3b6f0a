"""An independent judge of documents under a JSON Schema: the package jsonschema."""

import datetime
import json
from typing import Any

import jsonschema

FORMATS = jsonschema.FormatChecker(("date", "email", "ipv4", "ipv6", "uuid"))


@FORMATS.checks("date-time", ValueError)
def _date_time(value: object) -> bool:
    return not isinstance(value, str) or datetime.datetime.fromisoformat(value).tzinfo is not None


def validator(schema: Any) -> Any:
    """A validator. Its patterns are Python's, in which $ also matches before a last line feed, and `.` most line ends; so both
    are rewritten."""
    text = json.dumps(schema).replace('$"', r'\\Z"').replace('"^.{', r'"^[^\\n\\r\\u2028\\u2029]{')
    changed = json.loads(text)
    kind = jsonschema.validators.validator_for(changed, jsonschema.Draft202012Validator)
    return kind(changed, format_checker=FORMATS)


def document(text: bytes) -> Any:
    """A parsed document. If a member occurs twice, the last counts, as in most parsers."""
    return json.loads(text.decode())
