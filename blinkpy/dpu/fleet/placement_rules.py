"""Rules of placement: plain functions, choose(request, engines) -> one of the engines. docs/policies.md shows
how to write a rule.

They run as Python on the worker's event loop, once per request.
"""

import importlib.util
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from blinkpy.config import ConfigError
from blinkpy.dpu.fleet.engine_load import EngineLoad

FUNCTION = "choose"  # name of the function in a user's file
ROW_TOKENS = 64
"""Prompt tokens that cost an engine about as much time as one running request."""
EXTRA_TOKENS = 32768
"""Additional work, in tokens, that an engine with a prompt's pages may have compared with the least loaded engine."""


@dataclass(slots=True, eq=False)
class PlacedRequest:
    """The request, as a rule sees it."""

    number: int  # number of requests that this worker placed before
    prompt_tokens: int  # tokens of the prompt
    cached: Sequence[int]  # by engine.index: tokens at its start that are probably in that engine's prefix cache for its key
    salt: int  # of the tenant's part of the prefix caches; 0: the shared part
    draw: int  # a random integer of 32 bits


Rule = Callable[[PlacedRequest, Sequence[EngineLoad]], EngineLoad]


def work(engine: EngineLoad) -> int:
    """An engine's outstanding work in tokens. This worker's requests count immediately; requests of other workers count once the
    engine has published them.
    """
    return engine.tokens_in_flight + engine.waiting_tokens + ROW_TOKENS * engine.running


def least_loaded(request: PlacedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
    """The engine with the least work; engines with equal work take turns."""
    least: float = inf
    equal: list[EngineLoad] = []
    for engine in engines:
        tokens = engine.tokens_in_flight + engine.waiting_tokens + ROW_TOKENS * engine.running  # work(), inlined
        if tokens < least:
            least, equal = tokens, [engine]
        elif tokens == least:
            equal.append(engine)
    return equal[request.number % len(equal)]


def prefix(request: PlacedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
    """The engine with the longest part of the prompt in its prefix cache.

    Chooses the least loaded engine instead if the engine with the prefix has EXTRA_TOKENS more work, or more waiting prompt
    tokens than the hit saves. So a burst of requests with a common prefix spreads over engines.
    """
    least, cached = least_loaded(request, engines), request.cached
    own = most = cached[least.index]
    if own == max(cached):
        return least
    homes: list[EngineLoad] = []
    for engine in engines:
        found = cached[engine.index]
        if found > most:
            most, homes = found, [engine]
        elif found == most:
            homes.append(engine)
    best = homes[0] if len(homes) == 1 else least_loaded(request, homes)
    if work(best) - work(least) > EXTRA_TOKENS:
        return least
    later = best.waiting_tokens + best.unseen_tokens - least.waiting_tokens - least.unseen_tokens
    return best if later <= most - own else least


def round_robin(request: PlacedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
    """The engines in turn."""
    return engines[request.number % len(engines)]


def at_random(request: PlacedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
    """A random engine."""
    return engines[request.draw % len(engines)]


SHIPPED_RULES: dict[str, Rule] = {
    "prefix": prefix,
    "least-loaded": least_loaded,
    "round-robin": round_robin,
    "random": at_random,
}


def load_rule(name: str) -> Rule:
    """The shipped rule with this name, or the function `choose` of a Python file. Raises ConfigError, with
    the line, if there is no such function, or it does not take a request and engines.
    """
    if name in SHIPPED_RULES:
        return SHIPPED_RULES[name]
    path = Path(name)
    if path.suffix != ".py":
        raise ConfigError(f"placement must be one of {', '.join(SHIPPED_RULES)}, or FILE.py, not {name!r}")
    if not path.is_file():
        raise ConfigError(f"placement file {path} does not exist")
    rule = _module_of(path).get(FUNCTION)
    if not inspect.isfunction(rule):
        raise ConfigError(f"placement file {path} has no function {FUNCTION}(request, engines)")
    where = f"placement file {path}, line {rule.__code__.co_firstlineno}"
    if inspect.iscoroutinefunction(rule) or inspect.isgeneratorfunction(rule):
        raise ConfigError(f"{where}: {FUNCTION} must be a plain function")
    try:
        inspect.signature(rule).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"{where}: {FUNCTION} must take a request and engines: {error}") from error
    return rule


def _module_of(path: Path) -> dict[str, object]:
    """Run a file, and return its globals."""
    spec = importlib.util.spec_from_file_location(f"blinkpy_placement_{path.stem}", path)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    try:
        # Not by an import: cached byte code may be stale within a second of a change.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except SyntaxError as error:
        raise ConfigError(f"placement file {path}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"placement file {path}{where}: {type(error).__name__}: {error}") from error
    return vars(module)
