"""The kinds of transports. The two ends of one are found by their file names: `connect_NAME.py` in blinkpy/dpu/link, the front
end's, and `listen_NAME.py` in blinkpy/engine/link, the engine's. Each file has an `END`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from blinkpy.config import TRANSPORTS, Config, ConfigError
from blinkpy.packages import modules_of


class WorkerIdentity(NamedTuple):
    """The identity of a worker that asks for a queue pair."""

    pair: int  # the preferred one
    owner: int = 0  # see blinkpy.transport.handshake.Hello; 0 for a new one


class End(NamedTuple):
    """One end of a transport.

    open: front end: (config, WorkerIdentity) -> blinkpy.transport.contract.Transport; engine: config ->
    blinkpy.engine.link.listeners.Listener.
    check: (config, names of the given options); raises ConfigError if the options don't fit. It is called
        before anything starts.
    """

    name: str
    doc: str  # the purpose of the transport
    crosses_machines: bool
    options: type | None  # dataclass with its options, decorated with config.extends
    open: Callable[..., Any]
    check: Callable[[Config, frozenset[str]], None] = lambda config, given: None


@cache
def ends_in(package: str, pattern: str) -> Mapping[str, End]:
    """The transports' ends whose files are in a package, by name, first those within one machine.

    Registers their options with Config.
    """
    found: list[End] = [module.END for module in modules_of(package, pattern, "END").values()]
    ends = {end.name: end for end in sorted(found, key=lambda end: (end.crosses_machines, end.name))}
    TRANSPORTS.update((end.name, end.doc) for end in ends.values())
    return ends


def chosen_end(ends: Mapping[str, End], config: Config) -> End:
    """The end that --transport names. Raises ConfigError for an unknown name."""
    name = config.transport.transport
    if name not in ends:
        raise ConfigError(f"transport must be one of {', '.join(ends)}, not {name!r}")
    return ends[name]


def check_end(ends: Mapping[str, End], config: Config, given: frozenset[str]) -> None:
    """Raise ConfigError if options of the transports don't fit each other.

    given: names of the options that the user set.
    """
    chosen = chosen_end(ends, config)
    for end in ends.values():
        if end.options is not None and end.options is not chosen.options:
            for item in dataclasses.fields(end.options):
                if item.name in given:
                    raise ConfigError(f"--{item.name.replace('_', '-')} needs --transport {end.name}")
    chosen.check(config, given)
