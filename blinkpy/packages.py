"""Packages that a command needs and this install may lack, looked for without importing them."""

from importlib.util import find_spec

from blinkpy.config import ConfigError


def installed(name: str) -> bool:
    """Whether a package or module is installed. A package that fails when it is imported counts as installed."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def missing_packages(who: str, *names: str, extra: str = "") -> str:
    """A message with the missing packages and how to install them; "" if all are installed.

    who: the part that needs them.
    extra: the extra of blinkpy-serve that includes them; "": the base install.
    """
    missing = [name for name in names if not installed(name)]
    source = f"'blinkpy-serve[{extra}]'" if extra else "blinkpy-serve"
    return f"{who} needs {', '.join(missing)}: pip install {source}" if missing else ""


def require_packages(who: str, *names: str, extra: str = "") -> None:
    """Raise ConfigError with missing_packages() unless there are none."""
    problem = missing_packages(who, *names, extra=extra)
    if problem:
        raise ConfigError(problem)
