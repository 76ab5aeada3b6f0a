"""Accesses to shared memory: a program is a generator that yields them and receives the loaded values."""

from collections.abc import Callable, Generator
from typing import Any, NamedTuple


class Load(NamedTuple):
    """The value of a word. wanted: waits for a value that it accepts, as a polling loop does."""

    word: str
    acquire: bool = False
    wanted: Callable[[Any], bool] | None = None


class LoadLater(NamedTuple):
    """Begin to copy a word. Its result is a ticket for Value."""

    word: str


class Value(NamedTuple):
    """The value that a LoadLater has copied."""

    ticket: int


class Store(NamedTuple):
    word: str
    value: Any
    release: bool = False


class Bulk(NamedTuple):
    """Write several words, in no order among themselves."""

    words: tuple[tuple[str, Any], ...]


class Fence(NamedTuple):
    """All accesses before it happen before all accesses after it."""


class Silence(NamedTuple):
    """Wait until another party has ended and all its stores are visible."""

    party: int


Operation = Load | LoadLater | Value | Store | Bulk | Fence | Silence
Steps = Generator[Operation, Any, None]
Program = Callable[[], Steps]
