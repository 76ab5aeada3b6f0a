"""Edits of a long conversation before the model sees it: old results of calls are cleared."""

from collections.abc import Sequence
from typing import Any, NamedTuple

Message = dict[str, Any]

CLEARED = "[cleared]"  # content of a result that was cleared


class Clearing(NamedTuple):
    """When to clear results of calls, and which: those of the oldest calls. The model still sees the calls."""

    tokens: int = 100_000  # maximum prompt length before results are cleared
    calls: int | None = None  # instead of `tokens`: maximum calls before results are cleared
    keep: int = 3  # number of last calls that keep their results
    least: int = 0  # minimum tokens that clearing must save
    excluded: frozenset[str] = frozenset()  # names of functions whose results stay
    arguments: bool | frozenset[str] = False  # whether arguments are cleared, too, or the functions whose arguments are

    def due(self, tokens: int, calls: int) -> bool:
        """Whether a prompt is changed. tokens: tokens of the prompt. calls: calls in its conversation."""
        return tokens > self.tokens if self.calls is None else calls > self.calls


class Cleared(NamedTuple):
    """The number of cleared calls, and of the prompt's tokens that this saved."""

    calls: int
    tokens: int


def number_of_calls(messages: Sequence[Message]) -> int:
    return sum(len(message.get("tool_calls") or ()) for message in messages)


def cleared(messages: Sequence[Message], clearing: Clearing) -> tuple[list[Message], int]:
    """The conversation with cleared results, and the number of calls whose results these are."""
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    old = calls[: max(0, len(calls) - clearing.keep)]
    names = {call["id"]: call["function"]["name"] for call in old if call["function"]["name"] not in clearing.excluded}
    found, number = [], 0
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in names and message["content"] != CLEARED:
            message, number = message | {"content": CLEARED}, number + 1
        elif message.get("tool_calls") and clearing.arguments:
            message = message | {"tool_calls": [_without_arguments(call, names, clearing) for call in message["tool_calls"]]}
        found.append(message)
    return found, number


def _without_arguments(call: dict[str, Any], names: dict[str, str], clearing: Clearing) -> dict[str, Any]:
    name = names.get(call["id"])
    if name is None or not (clearing.arguments is True or (clearing.arguments and name in clearing.arguments)):
        return call
    return call | {"function": call["function"] | {"arguments": {}}}
