"""The fields of a request that change single tokens: OpenAI's `logit_bias`, vLLM's `allowed_token_ids` and `bad_words`."""

import math
from typing import Any

from blinkpy.dpu.api_errors import bad_request
from blinkpy.dpu.banned_words import MAX_BAD_WORD, MOST_BAD_WORDS
from blinkpy.dpu.http.fields.value_checks import text, token_ids, typed
from blinkpy.queues.request_parameters import INT32_MAX
from blinkpy.queues.token_rules import HIGHEST_BIAS, MOST_BIASES

MAX_DIGITS = 10  # of a token id as text


def logit_bias(name: str, value: Any) -> dict[int, float]:
    """An object from token ids, as text, to what is added to their logits."""
    if len(typed(name, value, dict)) > MOST_BIASES:
        raise bad_request(f"'{name}' can hold at most {MOST_BIASES} tokens, not {len(value)}.", name, "invalid_value")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not (len(key) <= MAX_DIGITS and key.isascii() and key.isdecimal() and int(key) <= INT32_MAX):
            raise bad_request(f"'{name}' must have token ids as its names, not {key[:100]!r}.", name, "invalid_value")
        number = float(typed(f"{name}.{key}", bias, float, int))
        if not abs(number) <= HIGHEST_BIAS or math.isnan(number):
            message = f"'{name}.{key}' must be {-HIGHEST_BIAS:g} to {HIGHEST_BIAS:g}, not {bias}."
            raise bad_request(message, f"{name}.{key}", "invalid_value")
        if int(key) in biases:
            raise bad_request(f"'{name}' has token {int(key)} twice.", name, "invalid_value")
        biases[int(key)] = number + 0.0  # -0.0 becomes 0.0
    return biases


def allowed_token_ids(name: str, value: Any) -> tuple[int, ...]:
    """Token ids, one at least."""
    if not token_ids(name, value):  # what a client computed, perhaps: all tokens are the opposite of none
        raise bad_request(f"'{name}' must not be empty.", name, "invalid_value")
    return tuple(dict.fromkeys(value))


def bad_words(name: str, value: Any) -> tuple[str, ...]:
    """Texts that must not be in the output."""
    if len(typed(name, value, list)) > MOST_BAD_WORDS:
        raise bad_request(f"'{name}' can hold at most {MOST_BAD_WORDS} strings, not {len(value)}.", name, "invalid_value")
    for word in value:
        if not (text(name, word).strip() and len(word) <= MAX_BAD_WORD):
            message = f"each string of '{name}' must have 1 to {MAX_BAD_WORD} characters, and not spaces alone."
            raise bad_request(message, name, "invalid_value")
    return tuple(dict.fromkeys(value))
