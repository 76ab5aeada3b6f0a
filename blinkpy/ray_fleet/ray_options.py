"""Options of `blinkpy ray`. This module is light, so that `--help` needs nothing installed."""

from dataclasses import dataclass, fields

from blinkpy.config import ConfigError, check_value, option

UP = "up"


@dataclass(frozen=True)
class RayOptions:
    """Start engines and front ends in a Ray cluster, then watch and scale them; Ctrl-C stops them in order."""

    action: str = option("", "'up CONFIG', with the path of a TOML file (docs/fleet.md)")
    address: str = option("", "address of a running cluster, HOST:PORT or auto (default: start one on this machine)")

    def __post_init__(self) -> None:
        for item in fields(self):
            check_value(item, getattr(self, item.name))
        verb, _, path = self.action.partition(" ")
        if verb != UP:
            raise ConfigError(
                f"unknown action {verb!r} of ray; use: ray up CONFIG" if verb else "missing action of ray; use: ray up CONFIG"
            )
        if not path:
            raise ConfigError("missing file; use: ray up CONFIG")

    @property
    def path(self) -> str:
        """The path of the plan."""
        return self.action.partition(" ")[2]
