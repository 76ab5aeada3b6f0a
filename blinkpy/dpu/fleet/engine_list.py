"""The engines of a front end, from its options and from the file of --engines-file."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Generic, TypeVar

from blinkpy.config import MOST_ENGINES, Config, ConfigError
from blinkpy.dpu.fleet.fleet_options import FleetOptions, check_placement
from blinkpy.dpu.link.connectors import ENDS
from blinkpy.transport.contract import TransportError, check_end, chosen_end
from blinkpy.transport.segment import segment_path
from blinkpy.transport.verbs import RdmaOptions

MOST_BYTES = 1 << 16  # maximum size of an engines file
LOOK_S = 0.5  # between two checks of the file
SHM = "shm:"  # prefix of a name among addresses

logger = logging.getLogger("blinkpy.frontend")

T = TypeVar("T")


def engine_configs(config: Config) -> dict[str, Config]:
    """The config of each engine's link, by the engine's label. Raises ConfigError."""
    file = config.extension(FleetOptions).engines_file
    if file:
        return {entry: one for entry, one in _link_configs(config, engines_in(Path(file)), f"{file}:").items() if _checked(one)}
    entries = [entry.strip() for entry in config.extension(RdmaOptions).engine.split(",") if entry.strip()]
    return _link_configs(config, entries, "--engine") if entries else {config.engine.name: config}


def engines_in(path: Path) -> list[str]:
    """The engines in a file of --engines-file, possibly none. Raises ConfigError if it can't be read."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        lines = content.decode().splitlines()
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text") from error
    if len(content) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES} bytes")
    entries = (line.partition("#")[0].strip() for line in lines)
    return [entry for entry in entries if entry]


def _link_configs(config: Config, entries: list[str], source: str) -> dict[str, Config]:
    if len(entries) > MOST_ENGINES:
        raise ConfigError(f"{source} may list at most {MOST_ENGINES} engines, not {len(entries)}")
    if twice := next((entry for entry in entries if entries.count(entry) > 1), None):
        raise ConfigError(f"{source} names {twice!r} twice")
    crosses = chosen_end(ENDS, config).crosses_machines
    return {entry: _link_config(config, entry, crosses, source) for entry in entries}


def _link_config(config: Config, entry: str, crosses_machines: bool, source: str) -> Config:
    if crosses_machines and not entry.startswith(SHM):
        return config.with_options({"engine": entry})
    name = entry.removeprefix(SHM)
    if ":" in name:
        raise ConfigError(f"{source} {entry} needs --transport rdma")
    try:
        segment_path(name)
    except TransportError as error:
        raise ConfigError(f"{source} {entry}: {error}") from error
    transport = "shm" if crosses_machines else config.transport.transport
    return config.with_options({"transport": transport, "name": name, "engine": ""})


def _checked(config: Config) -> bool:
    chosen_end(ENDS, config).check(config, frozenset())
    return True


def check_engines(config: Config, given: frozenset[str]) -> None:
    """Raise ConfigError if the transports' options contradict each other, or for an invalid placement. given: names
    of the options that the user set.
    """
    file = config.extension(FleetOptions).engines_file
    if file and given & {"engine", "name"}:
        raise ConfigError("--engines-file replaces --engine and --name: leave them out")
    configs = engine_configs(config)
    check_placement(config, MOST_ENGINES if file else len(configs))
    several = bool(file) or any(chosen_end(ENDS, one).crosses_machines for one in configs.values())
    for one in configs.values():
        end, mine = chosen_end(ENDS, one), given
        if given & {"engine", "engines_file"} and not end.crosses_machines:
            if "name" in given:
                raise ConfigError("--engine replaces --name: leave it out")
            mine = given - {"engine"}
            if several:  # the options of the other links
                kinds = [other.options for other in ENDS.values() if other.crosses_machines and other.options is not None]
                mine = mine - {name for kind in kinds for name in [item.name for item in fields(kind)]}
        check_end(ENDS, one, mine)


class EnginesFile(Generic[T]):
    """The file of --engines-file: the engines of a front end, which may change while it runs.

    The file is checked at most twice per second. Replace the file by a rename; of a half-written file, only the complete lines
    are read.
    config: the front end's options, with the file's path.
    entry: makes an engine from its label and the config of its link.
    entries: the engines of the last valid list.
    Raises ConfigError.
    """

    def __init__(self, config: Config, entry: Callable[[str, Config], T]):
        self._config, self._entry = config, entry
        self._path = Path(config.extension(FleetOptions).engines_file)
        self._seen: tuple[int, ...] | None = self._signature()
        self.entries = self._read()

    def look(self) -> Sequence[T]:
        """The current engines. An invalid new list is logged, and the old list stays."""
        seen = self._signature()
        if seen != self._seen:
            self._seen = seen
            try:
                self.entries = self._read()
                logger.info("%s: %d engines", self._path, len(self.entries))
            except ConfigError as error:
                logger.error("%s; keeping the previous engines", error)
                if isinstance(error.__cause__, OSError):  # perhaps no descriptor is free: the next check retries
                    self._seen = None
        return self.entries

    async def watch(self, take: Callable[[Sequence[T]], None]) -> None:
        """Call `take` with the current engines after every check, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            take(await asyncio.to_thread(self.look))

    def _read(self) -> list[T]:
        return [self._entry(label, config) for label, config in engine_configs(self._config).items()]

    def _signature(self) -> tuple[int, ...]:
        try:
            status = self._path.stat()
        except OSError:
            return ()
        return status.st_mtime_ns, status.st_ino, status.st_size
