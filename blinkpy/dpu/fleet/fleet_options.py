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
        3,
        "maximum number of times that a request moves to another engine because its engine failed; beyond it the request "
        "ends with an error (0: no moves)",
        low=0,
        high=1000,
    )
    placement: str = option(
        PREFIX,
        "rule that chooses the engine of a request: prefix, least-loaded, round-robin, random or FILE.py (docs/policies.md)",
    )
    engines_file: str = option(
        "",
        "file with one engine per line, read again whenever it changes; replaces --engine (docs/fleet.md)",
        commands="frontend",
    )
    move_timeout_s: int = option(
        30,
        "time that a request may wait for another engine after losing its own, in seconds; then it ends with an error",
        low=1,
        high=3600,
    )


def check_placement(config: Config, engines: int) -> None:
    """Raise ConfigError for an unknown placement, or for any placement with one engine."""
    placement = config.extension(FleetOptions).placement
    if engines == 1 and placement != PREFIX:
        raise ConfigError("--placement needs several engines: --engine A --engine B, or serve --data-parallel-size")
    load_rule(placement)
