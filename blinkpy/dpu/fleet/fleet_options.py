"""Options of several engines behind one front end."""

from dataclasses import dataclass

from blinkpy.config import Config, ConfigError, extends, option
from blinkpy.dpu.fleet.placement_rules import load_rule

PREFIX = "prefix"  # the default placement


@extends("frontend")
@dataclass(frozen=True)
class FleetOptions:
    """Several engines behind one front end."""

    max_moves: int = option(
        3, "times that a request may move to another engine when its own is lost (0: it ends)", low=0, high=1000
    )
    placement: str = option(
        PREFIX,
        "which engine gets a request: prefix, least-loaded, round-robin, random or FILE.py (docs/policies.md)",
    )
    engines_file: str = option(
        "",
        "in place of --engine: a file with an engine in each line, read again when it changes (docs/fleet.md)",
        commands="frontend",
    )
    move_timeout_s: int = option(30, "seconds a request may be without an engine before it ends with an error", low=1, high=3600)


def check_placement(config: Config, engines: int) -> None:
    """Raise ConfigError for a placement that does not exist, or that one engine has no use for."""
    placement = config.extension(FleetOptions).placement
    if engines == 1 and placement != PREFIX:
        raise ConfigError("--placement needs several engines: --engine A --engine B, or serve --data-parallel-size")
    load_rule(placement)
