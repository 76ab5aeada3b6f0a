"""The engines of a front end, from its options."""

from dataclasses import fields

from blinkpy.config import MOST_ENGINES, Config, ConfigError
from blinkpy.dpu.fleet.fleet_options import check_placement
from blinkpy.dpu.link.connectors import ENDS
from blinkpy.transport.contract import TransportError
from blinkpy.transport.segment import segment_path
from blinkpy.transport.transport_kinds import check_end, chosen_end
from blinkpy.transport.verbs import RdmaOptions

SHM = "shm:"  # before a name, where the others are addresses


def engine_configs(config: Config) -> dict[str, Config]:
    """A config for the link to each engine, by what the engine is called. Raises ConfigError."""
    entries = [entry.strip() for entry in config.extension(RdmaOptions).engine.split(",") if entry.strip()]
    if not entries:
        return {config.engine.name: config}
    if len(entries) > MOST_ENGINES:
        raise ConfigError(f"--engine can name at most {MOST_ENGINES} engines, not {len(entries)}")
    if twice := next((entry for entry in entries if entries.count(entry) > 1), None):
        raise ConfigError(f"--engine names {twice!r} twice")
    crosses = chosen_end(ENDS, config).crosses_machines
    return {entry: _link_config(config, entry, crosses) for entry in entries}


def _link_config(config: Config, entry: str, crosses_machines: bool) -> Config:
    if crosses_machines and not entry.startswith(SHM):
        return config.with_options({"engine": entry})
    name = entry.removeprefix(SHM)
    if ":" in name:
        raise ConfigError(f"--engine {entry} needs --transport rdma")
    try:
        segment_path(name)
    except TransportError as error:
        raise ConfigError(f"--engine {entry}: {error}") from error
    transport = "shm" if crosses_machines else config.transport.transport
    return config.with_options({"transport": transport, "name": name, "engine": ""})


def check_engines(config: Config, given: frozenset[str]) -> None:
    """Raise ConfigError when options of the transports don't fit each other, or for a wrong placement. given: names of
    the options that somebody set."""
    configs = engine_configs(config)
    check_placement(config, len(configs))
    several = any(chosen_end(ENDS, one).crosses_machines for one in configs.values())
    for one in configs.values():
        end, mine = chosen_end(ENDS, one), given
        if "engine" in given and not end.crosses_machines:
            if "name" in given:
                raise ConfigError("--engine names the engines: leave out --name")
            mine = given - {"engine"}
            if several:  # what the links to the others need
                kinds = [other.options for other in ENDS.values() if other.crosses_machines and other.options is not None]
                mine = mine - {name for kind in kinds for name in [item.name for item in fields(kind)]}
        check_end(ENDS, one, mine)
