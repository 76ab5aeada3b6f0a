"""Prompts and conversations of the offline API, and checks of their types."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from blinkpy.queues.request_parameters import INT32_MAX
from blinkpy.queues.words import Int32

Plain = str | Sequence[int]
Prompt = Plain | Mapping[str, Plain]  # vLLM's forms: {"prompt": text} and {"prompt_token_ids": ids}
Conversation = Sequence[Mapping[str, Any]]


def prompt_list(prompts: Prompt | Iterable[Prompt]) -> list[Plain]:
    """One prompt or several, as a list. Raises ValueError for other values."""
    if isinstance(prompts, (str, Mapping)):
        return [_plain(prompts)]
    if not isinstance(prompts, Iterable) or isinstance(prompts, bytes):
        raise ValueError(f"prompts must be texts, token ids, dicts, or a list of these, not {type(prompts).__name__}")
    several: list[Any] = list(prompts)
    return [several] if several and all(map(_is_id, several)) else [_plain(prompt) for prompt in several]


def _plain(prompt: Prompt) -> Plain:
    """A text or token ids, possibly from a dict without further keys. Raises ValueError."""
    kind = "a text or token ids"
    if isinstance(prompt, Mapping):
        if list(prompt) not in (["prompt"], ["prompt_token_ids"]):
            raise ValueError(f"a prompt as a dict must have only 'prompt' or 'prompt_token_ids', not {[*prompt]}")
        ((name, prompt),) = prompt.items()
        kind = "a text" if name == "prompt" else "token ids"
    if isinstance(prompt, str) and kind != "token ids":
        return encodable(prompt)
    if kind == "a text" or not isinstance(prompt, Iterable) or isinstance(prompt, (str, bytes)):
        raise ValueError(f"a prompt must be {kind}, not {type(prompt).__name__}")
    ids: list[Any] = list(prompt)
    wrong = next((token for token in ids if not _is_id(token)), None)
    if wrong is not None:
        raise ValueError(f"a prompt must have token ids, not {wrong!r}")
    return ids


def _is_id(token: Any) -> bool:
    """Whether the value is an integer of Python or NumPy, but not a bool."""
    return isinstance(token, Integral) and not isinstance(token, bool)


def id_array(ids: Sequence[int]) -> Int32:
    """Token ids as int32 [n]. Values outside int32 become ids that no model has, so that a later check refuses them."""
    return np.array([min(max(int(token), -1), INT32_MAX) for token in ids], np.int32)


def as_dict(value: Any) -> Any:
    """A mapping as a dict, like JSON's parser; other values unchanged, so that a check refuses them."""
    return dict(value) if isinstance(value, Mapping) else value


def as_dicts(values: Any) -> Any:
    """A list of mappings as a list of dicts."""
    return [as_dict(value) for value in values] if isinstance(values, Sequence) and not isinstance(values, str) else values


def encodable(text: str) -> str:
    """The text. Raises UnicodeEncodeError, a ValueError, for lone surrogates, which no token can represent."""
    text.encode()
    return text
