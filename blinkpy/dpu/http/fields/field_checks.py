"""Checks of the fields of a request's body that have a value of one kind, each with its schema."""

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from blinkpy.dpu.admission.service_tiers import KEYS_TIER, TIERS
from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.generation import MAX_CHOICES
from blinkpy.dpu.http.fields import value_checks
from blinkpy.dpu.http.fields.field import BOOLEAN, NULL, STRING, Check, one_of, takes
from blinkpy.dpu.http.fields.http_request import StreamUsage
from blinkpy.dpu.http.fields.value_checks import integer, token_ids, typed, unsupported
from blinkpy.dpu.text.stop_strings import MAX_STOP_LENGTH, MAX_STOPS
from blinkpy.queues.request_parameters import INT32_MAX, PARAMETER, Parameter
from blinkpy.queues.submission import STOP_IDS

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
_STOP = {"minLength": 1, "maxLength": MAX_STOP_LENGTH}


def scalar(parameter: Parameter) -> Check:
    """The check of a field with the type and bounds of a parameter. Returns what the engine gets."""
    low, high = parameter.bounds
    least = "exclusiveMinimum" if parameter.above_low else "minimum"

    @takes(**{"type": "number" if parameter.is_float else "integer", least: low, "maximum": high})
    def check(name: str, value: Any) -> Any:
        if not parameter.is_float:
            integer(name, value, int(low), int(high))
        elif not parameter.in_bounds(typed(name, value, float, int)):
            raise bad_request(f"'{name}' must be {parameter.bounds_text}, not {value}.", name, "invalid_value")
        return parameter.from_request(value)

    return check


text = takes(**STRING)(value_checks.text)


@takes(**BOOLEAN)
def boolean(name: str, value: Any) -> bool:
    return bool(typed(name, value, bool))


@takes(type="integer", minimum=0, maximum=INT32_MAX)
def limit_or_none(name: str, value: Any) -> int:
    """max_tokens, which is 0 for an echo alone."""
    return 0 if value == 0 and type(value) is int else int(limit(name, value))


@takes(type="integer", minimum=1, maximum=MAX_CHOICES)
def choices(name: str, value: Any) -> int:
    return integer(name, value, 1, MAX_CHOICES)


@takes(**one_of({"type": "string"} | _STOP, {"type": "array", "items": {"type": "string"} | _STOP, "maxItems": MAX_STOPS}))
def stop_texts(name: str, value: Any) -> tuple[str, ...]:
    stops = value if type(value) is list else [value]
    if len(stops) > MAX_STOPS:
        raise bad_request(f"'{name}' can hold at most {MAX_STOPS} strings, not {len(stops)}.", name, "invalid_value")
    for stop in stops:
        if not 1 <= len(text(name, stop)) <= MAX_STOP_LENGTH:
            raise bad_request(f"each string of '{name}' must have 1 to {MAX_STOP_LENGTH} characters.", name, "invalid_value")
    return tuple(dict.fromkeys(stops))


def ids(**more: int) -> Mapping[str, Any]:
    """The schema of a list of token ids."""
    return {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": INT32_MAX}, **more}


@takes(**ids(maxItems=STOP_IDS))
def stop_ids(name: str, value: Any) -> tuple[int, ...]:
    if len(token_ids(name, value)) > STOP_IDS:
        raise bad_request(f"'{name}' can hold at most {STOP_IDS} token ids, not {len(value)}.", name, "invalid_value")
    return tuple(dict.fromkeys(value))


# Of include_obfuscation only false, for events have no padding here.
STREAM_OPTIONS = ("include_usage", "continuous_usage_stats", "include_obfuscation")


@takes(type="object", properties=dict.fromkeys(STREAM_OPTIONS, one_of(BOOLEAN, NULL)), additionalProperties=False)
def stream_options(name: str, value: Any) -> StreamUsage:
    given = dict.fromkeys(STREAM_OPTIONS, False)
    for key, option in typed(name, value, dict).items():
        if key not in given:
            raise unsupported(f"{name}.{key}")
        given[key] = option is not None and boolean(f"{name}.{key}", option)
    if given["include_obfuscation"]:
        raise unsupported(f"{name}.include_obfuscation")
    return StreamUsage(given["include_usage"], given["continuous_usage_stats"])


@takes(type="string", minLength=1)
def salt(name: str, value: Any) -> int:
    """Requests share cached prefixes only with requests of the same salt; 0, no salt, is never the hash of one."""
    if not text(name, value):
        raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
    return max(1, int.from_bytes(hashlib.sha256(value.encode()).digest()[:8], "little") >> 1)


@takes(enum=[*KEYS_TIER, *TIERS])
def service_tier(name: str, value: Any) -> str:
    if typed(name, value, str) not in (*KEYS_TIER, *TIERS):
        raise bad_request(f"'{name}' must be one of {', '.join((*KEYS_TIER, *TIERS))}.", name, "invalid_value")
    return str(value)


@takes(type="string", pattern="^[!-~]{1,128}$")
def request_id(name: str, value: Any) -> str:
    if not _REQUEST_ID.fullmatch(typed(name, value, str)):
        raise bad_request(f"'{name}' must be 1 to 128 printable characters of ASCII.", name, "invalid_value")
    return str(value)


limit, top_logprobs = scalar(PARAMETER["max_tokens"]), scalar(PARAMETER["logprobs"])
