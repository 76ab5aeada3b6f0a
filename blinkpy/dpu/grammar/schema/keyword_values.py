"""Values of keywords, checked."""

from typing import Any

from blinkpy.dpu.grammar.grammar_errors import GrammarError
from blinkpy.dpu.grammar.regex_syntax import parse_regex
from blinkpy.dpu.grammar.schema.schema_shapes import NAMES, Place

MOST_ALTERNATIVES = 1000  # of enum, anyOf and oneOf
MOST_COUNT = 100_000  # of items and members


def fault(place: Place, keyword: str, what: str) -> GrammarError:
    """The keyword of the schema at a place is at fault."""
    return GrammarError(f"'{keyword}' {what}", place.path, keyword)


def typed(place: Place, keyword: str, value: Any, *kinds: type) -> Any:
    if type(value) not in kinds:
        raise fault(place, keyword, f"must be of type {' or '.join(dict.fromkeys(NAMES[kind] for kind in kinds))}.")
    return value


def checked_count(place: Place, keyword: str, value: Any) -> int:
    number = typed(place, keyword, value, int, float)
    if number != int(number) or not 0 <= number <= MOST_COUNT:
        raise fault(place, keyword, f"must be an integer from 0 to {MOST_COUNT}.")
    return int(number)


def checked_schemas(place: Place, keyword: str, value: Any) -> list[Place]:
    if not 1 <= len(typed(place, keyword, value, list)) <= MOST_ALTERNATIVES:
        raise fault(place, keyword, f"must hold 1 to {MOST_ALTERNATIVES} schemas.")
    return [place.below(one, keyword, i) for i, one in enumerate(value)]


def named_schemas(place: Place, keyword: str) -> dict[str, Place]:
    value = place.schema.get(keyword, {})
    return {name: place.below(one, keyword, name) for name, one in typed(place, keyword, value, dict).items()}


def checked_names(place: Place, keyword: str, value: Any) -> list[str]:
    if not all(type(name) is str for name in typed(place, keyword, value, list)):
        raise fault(place, keyword, "must be an array of strings.")
    return list(value)


def checked_regex(place: Place, keyword: str, text: str) -> str:
    """The text, if it is a regular expression that is supported."""
    try:
        parse_regex(text)
    except GrammarError as error:
        raise GrammarError(error.message, place.path, keyword) from error
    return text
