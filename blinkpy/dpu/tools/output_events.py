"""The parts of a message, in the order in which a model writes them."""

from typing import NamedTuple


class Content(NamedTuple):
    """More text for the user."""

    text: str


class Reasoning(NamedTuple):
    """More text of what the model thinks before it answers."""

    text: str


class CallBegin(NamedTuple):
    """A tool call begins; its arguments follow."""

    name: str


class CallArguments(NamedTuple):
    """More text of the arguments of the call that began last: together JSON, if the model wrote JSON."""

    text: str


class NextMessage(NamedTuple):
    """Text that follows is of another message of the same answer."""


OutputEvent = Content | Reasoning | CallBegin | CallArguments | NextMessage
