"""The declaration of an option: a dataclass field whose metadata holds help text, bounds and the commands with the flag.

Values from all sources are checked in the same way. Other modules, such as transports, add options by `extends`.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any, TypeVar

Options = TypeVar("Options")
EXTENSIONS: dict[type, str] = {}  # dataclasses of options, and the sections that they extend
ENGINE, FRONT, LINK, ALL = "serve engine", "serve frontend", "engine frontend", "serve engine frontend"
# The commands that have the flags of a section.
COMMANDS = {
    **dict.fromkeys(("model", "cache", "scheduler", "queue", "engine"), ENGINE),
    "transport": LINK,
    **dict.fromkeys(("frontend", "access", "watch"), FRONT),
}


class ConfigError(ValueError):
    """blinkpy does not support an option, a model or a file. The message is one line for the user."""


def option(
    default: Any,
    help: str = "",
    *,
    low: float | None = None,
    high: float | None = None,
    choices: tuple[str, ...] | Mapping[str, str] = (),
    commands: str = "",
    repeats: bool = False,
) -> Any:
    """A dataclass field that is an option.

    low, high: inclusive bounds.
    choices: allowed strings, or a mapping from them to descriptions.
    commands: names of the commands with the flag, if they differ from those of its section.
    repeats: the flag may be repeated; the values are joined by commas.
    """
    about = {"help": help, "low": low, "high": high, "choices": choices, "commands": commands, "repeats": repeats}
    return field(default=default, metadata=about)


def extends(section: str) -> Callable[[type[Options]], type[Options]]:
    """Decorate a frozen dataclass of options: it adds them to the section. Read their values by
    Config.extension(the class).
    """

    def add(kind: type[Options]) -> type[Options]:
        EXTENSIONS[kind] = section
        return kind

    return add


def help_text(item: dataclasses.Field[Any]) -> str:
    """The help text of an option, or a list of its choices."""
    choices = item.metadata["choices"]
    return str(item.metadata["help"]) or "; ".join(f"{name}: {choices[name]}" for name in choices)


def option_type(item: dataclasses.Field[Any]) -> type:
    """The type of an option: str, int, float or bool."""
    names: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
    return names[getattr(item.type, "__name__", str(item.type))]  # a string if annotations are strings


def check_value(item: dataclasses.Field[Any], value: Any) -> None:
    """Raise ConfigError unless the value has the field's type and is within its bounds."""
    wanted = option_type(item)
    accepted = (int, float) if wanted is float else (wanted,)
    if not isinstance(value, accepted) or (isinstance(value, bool) and wanted is not bool):
        raise ConfigError(f"{item.name} must be {wanted.__name__}, not {type(value).__name__} ({value!r})")
    if isinstance(value, str) and "\0" in value:
        raise ConfigError(f"{item.name} contains a NUL character")
    low, high, choices = (item.metadata[key] for key in ("low", "high", "choices"))
    if (low is not None and not value >= low) or (high is not None and not value <= high):
        raise ConfigError(f"{item.name} must be {low} to {high}, not {value}")
    if choices and value not in choices:
        raise ConfigError(f"{item.name} must be one of {', '.join(choices)}, not {value!r}")


def split_address(text: str, name: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT; an IPv6 host is in brackets. name: the option's name, for ConfigError."""
    host, colon, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        host = ""
    if not colon or not host or not port.isascii() or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ConfigError(f"{name} must be HOST:PORT, not {text!r}")
    return host, int(port)


def listed(text: str, name: str) -> list[str]:
    """The entries of a list option: a JSON list of strings, as in vLLM, or text with commas.

    name: the option's name, for ConfigError.
    """
    if not text.startswith("["):
        return [entry.strip() for entry in text.split(",") if entry.strip()]
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not a JSON list: {error}") from error
    if not all(isinstance(entry, str) for entry in entries):
        raise ConfigError(f"{name} must be a list of strings, not {text}")
    return list(entries)
