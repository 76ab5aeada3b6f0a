"""Finds optional packages without importing them, and modules by their file names."""

import pkgutil
import traceback
from fnmatch import fnmatch
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

from blinkpy.config import ConfigError


def installed(name: str) -> bool:
    """Whether a package or module is installed. A package that fails when it is imported counts as installed."""
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name
        return False


def missing_packages(part: str, *names: str, extra: str = "") -> str:
    """A message with the missing packages and how to install them; "" if all are installed.

    part: the part of blinkpy that needs them.
    extra: the extra of blinkpy-serve that includes them; "": the base install.
    """
    missing = [name for name in names if not installed(name)]
    source = f"'blinkpy-serve[{extra}]'" if extra else "blinkpy-serve"
    return f"{part} needs {', '.join(missing)}: pip install {source}" if missing else ""


def require_packages(part: str, *names: str, extra: str = "") -> None:
    """Raise ConfigError with missing_packages() if a package is missing."""
    problem = missing_packages(part, *names, extra=extra)
    if problem:
        raise ConfigError(problem)


def modules_of(package: str, pattern: str, *names: str) -> dict[str, ModuleType]:
    """The modules of a package whose file names match a pattern, such as "*_calls", by file name, in order.

    names: names that each module must define.
    Raises ConfigError, with file and line, for a module that fails at its import or lacks a name.
    """
    (folder,) = import_module(package).__path__
    files = sorted(module.name for module in pkgutil.iter_modules([folder]) if fnmatch(module.name, pattern))
    found: dict[str, ModuleType] = {}
    for name in files:
        path = str(Path(folder, f"{name}.py"))
        try:
            found[name] = import_module(f"{package}.{name}")
        except Exception as error:
            lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path]
            line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else 1
            raise ConfigError(f"{path}:{line}: import failed: {type(error).__name__}: {error}") from error
        missing = [each for each in names if not hasattr(found[name], each)]
        if missing:
            raise ConfigError(f"{path}: {' and '.join(missing)} is not defined; each {pattern}.py file must define it")
    return found
