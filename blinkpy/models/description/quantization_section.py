"""An object of a config.json's `quantization_config`, whose keys are read once and then checked."""

from collections.abc import Mapping
from typing import Any

from blinkpy.config import ConfigError

MOST_IGNORED, LONGEST_IGNORED = 1 << 16, 1000  # entries of an ignore list, and characters of one
BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"  # of a module's name
NONE_AT_ALL: tuple[Any, ...] = (None, False, [], {}, "")
INERT_NUMBERS = {"observer", "observer_kwargs", "strategy", "dynamic", "group_size", "block_structure"}


class Section:
    """An object of the section, whose keys are read once and then checked."""

    def __init__(self, values: Any, where: str):
        if not isinstance(values, Mapping):
            raise ConfigError(f"{where} must be an object, not {str(values)[:80]}")
        self.values = values
        self.where = where
        self._known = set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self._known.add(key)
        return self.values.get(key, default)

    def one_of(self, key: str, *supported: Any) -> Any:
        """The value of a key, which must be one of `supported`; None if the key is missing."""
        value = self.get(key)
        if not any(value == some and type(value) is type(some) for some in supported):
            listed = ", ".join("nothing" if some is None else str(some) for some in supported)
            raise self.error(f"{key} {str(value)[:80]!r} is not supported (supported: {listed})")
        return value

    def names(self, *keys: str) -> list[str]:
        """The names in all these lists."""
        found = [entry for key in keys for entry in _list(self.get(key), f"{self.where}: {key}")]
        if len(found) > MOST_IGNORED or any(not _is_name(name) for name in found):
            raise self.error(f"{keys[0]} must be at most {MOST_IGNORED} names of 1 to {LONGEST_IGNORED} characters")
        return found

    def error(self, text: str) -> ConfigError:
        return ConfigError(f"{self.where}: {text}")

    def check_rest(self) -> None:
        """Raise ConfigError for a key that was not read and may have an effect."""
        unknown = sorted(key for key in self.values if key not in self._known and self.values[key] not in NONE_AT_ALL)
        if unknown:
            raise self.error(f"{', '.join(unknown)[:200]} not supported")


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= LONGEST_IGNORED


def _list(value: Any, where: str) -> list[Any]:
    if value is not None and not isinstance(value, list):
        raise ConfigError(f"{where} must be a list, not {str(value)[:80]}")
    return value or []
