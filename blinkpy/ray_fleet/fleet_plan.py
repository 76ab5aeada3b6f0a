"""The file of `blinkpy ray up`: a TOML file with options of engines and front ends by their usual names, and
additional tables.

    model = "Qwen/Qwen3-8B"

    [engines]
    least = 1
    most = 4

    [front_ends]
    number = 2

    [scale]
    requests = 64

docs/fleet.md explains them.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from blinkpy.config import (
    MOST_ENGINES,
    Config,
    ConfigError,
    check_value,
    meant,
    option,
    option_values,
    options,
    read_toml,
)
from blinkpy.dpu.fleet.fleet_options import check_placement
from blinkpy.dpu.link.connectors import ENDS
from blinkpy.ray_fleet.scaling_rule import ScaleTargets
from blinkpy.serving import load_choices
from blinkpy.transport.contract import chosen_end
from blinkpy.transport.verbs import RdmaOptions

MOST_FRONT_ENDS = 64
NO_GPU = ("cpu", "null")  # devices
MOST_LOOKS = 10_000  # maximum samples in the history of a decision to remove engines
# Options that this file replaces, with the replacement.
OWN_OPTIONS = {
    "name": "engines get generated names",
    "engine": "front ends get all engines",
    "engines_file": "front ends get all engines",
    "listen": "engines listen on the addresses of their nodes",
    "data_parallel_size": "[engines] least and most say how many there are",
    "restart": "engines that died are always started again",
    "uds": "front ends listen on ports",
}


@dataclass(frozen=True)
class EnginesPlan:
    """The number of engines, and the resources of each."""

    least: int = option(1, "minimum number of engines", low=1, high=MOST_ENGINES)
    most: int = option(0, "maximum number of engines (0: equal to least)", low=0, high=MOST_ENGINES)
    gpus: float = option(
        1.0, "GPUs of an engine, times tensor_parallel_size: 1, or a fraction (0 with --device cpu or null)", low=0, high=1
    )
    cpus: float = option(0.0, "cores that Ray reserves for an engine", low=0, high=1024)
    resource: str = option("", "a Ray resource that an engine's node must have")


@dataclass(frozen=True)
class FrontEndsPlan:
    """The number of front ends, and the resources of each. The first listens on `port`, each further front end
    on the next port.
    """

    number: int = option(1, "number of front ends", low=1, high=MOST_FRONT_ENDS)
    cpus: float = option(0.0, "cores that Ray reserves for a front end", low=0, high=1024)
    resource: str = option("", "a Ray resource that a front end's node must have, such as a DPU")


@dataclass(frozen=True)
class FleetPlan:
    """The plan of a fleet. config: options that all front ends and engines share; engine_config() adds those of an engine."""

    config: Config
    engines: EnginesPlan = field(default_factory=EnginesPlan)
    front_ends: FrontEndsPlan = field(default_factory=FrontEndsPlan)
    scale: ScaleTargets = field(default_factory=ScaleTargets)

    @property
    def most(self) -> int:
        """The maximum number of engines."""
        return self.engines.most or self.engines.least

    @property
    def engine_gpus(self) -> float:
        """The GPUs of an engine."""
        return 0.0 if self.config.engine.device in NO_GPU else self.engines.gpus * self.config.engine.tensor_parallel_size

    @property
    def crosses_machines(self) -> bool:
        """Whether engines and front ends may be on different nodes; otherwise all are on one."""
        return chosen_end(ENDS, self.config).crosses_machines

    def engine_config(self) -> Config:
        """The config of each engine, without its name and address. Every worker of every front end has a
        queue pair.
        """
        return self.config.with_options({"workers": self.config.frontend.workers * self.front_ends.number})

    def front_end_config(self, number: int) -> Config:
        """The config of a front end. number: from 0."""
        return self.config.with_options({"port": self.port(number)})

    def port(self, number: int) -> int:
        """The port of a front end. number: from 0."""
        return self.config.frontend.port + number


TABLES: dict[str, type] = {"engines": EnginesPlan, "front_ends": FrontEndsPlan, "scale": ScaleTargets}


def read_plan(path: str) -> FleetPlan:
    """Read a plan. Raises ConfigError for a file that can't be read, and for unknown or inconsistent
    options.
    """
    load_choices()
    content = read_toml(path)
    tables = {name: content.pop(name) for name in TABLES if name in content}
    for name in content:  # report misspelled tables before their entries
        if isinstance(content[name], dict) and meant(name, TABLES) and name not in {section for section, _ in options()}:
            raise ConfigError(f"{path}: unknown table {name!r}{meant(name, TABLES)}")
    values = option_values(content, path)
    for name in values:
        if name in OWN_OPTIONS:
            raise ConfigError(f"{path}: remove {name}: {OWN_OPTIONS[name]}")
    parts = {name: _part(path, name, table) for name, table in tables.items()}
    plan = FleetPlan(Config().with_options(values), **parts)
    try:
        _check(plan)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return plan


def _part(path: str, name: str, table: Any) -> Any:
    kind = TABLES[name]
    if not isinstance(table, Mapping):
        raise ConfigError(f"{path}: {name} must be a table: [{name}]")
    known = {item.name: item for item in dataclasses.fields(kind)}
    for entry, value in table.items():
        if entry not in known:
            raise ConfigError(f"{path}: unknown option '{name}.{entry}'{meant(entry, known)}")
        try:
            check_value(known[entry], value)
        except ConfigError as error:
            raise ConfigError(f"{path}: {name}.{error}") from error
    return kind(**table)


def _check(plan: FleetPlan) -> None:
    least, most = plan.engines.least, plan.most
    if most < least:
        raise ConfigError(f"engines.most ({most}) must be at least engines.least ({least})")
    if most > least and not plan.scale.has_target:
        raise ConfigError("engines.most needs a target above 0 in [scale]")
    port, number = plan.config.frontend.port, plan.front_ends.number
    if not 1 <= port <= 65536 - number:
        raise ConfigError(f"port must be 1 to {65536 - number} with {number} front ends, not {port}")
    if plan.engines.gpus == 0 and plan.config.engine.device not in NO_GPU:
        raise ConfigError("engines.gpus 0 needs device cpu or null, since Ray would not reserve the engine's GPU")
    if plan.engines.gpus < 1 < plan.config.engine.tensor_parallel_size:
        raise ConfigError(f"engines.gpus must be 1 with tensor_parallel_size above 1, not {plan.engines.gpus:g}")
    check_placement(plan.config, MOST_ENGINES)
    rdma = plan.config.extension(RdmaOptions)
    if plan.crosses_machines and not rdma.link_key_file and not rdma.insecure_link:
        raise ConfigError("--transport rdma needs link_key_file with a path that exists on every node, or insecure_link")
    if plan.scale.down_s > MOST_LOOKS * plan.scale.interval_s:
        raise ConfigError(f"scale.down_s ({plan.scale.down_s:g}) must be at most {MOST_LOOKS} times scale.interval_s")
    plan.engine_config()  # raises for numbers that don't fit
