"""Scheduling policies: a pure function, rank(request) -> int; lower ranks are served first.

The rank is computed when a request begins to wait: on arrival, and after each preemption. Equal ranks are
served in order of arrival. The request with the lowest rank always makes progress, and the request with
the highest rank is preempted first. A policy is compiled into the scheduler. It may use integer arithmetic, comparisons,
branches, loops and calls of similar functions. A user's policy is compiled from guarded code (policy_language), which never
fails: a request without a rank gets WORST_RANK.
"""

import importlib.util
import inspect
import traceback
from collections.abc import Callable
from functools import lru_cache
from importlib.abc import InspectLoader
from importlib.util import decode_source
from pathlib import Path
from types import FunctionType
from typing import NamedTuple
from weakref import WeakKeyDictionary

from numba import njit, types
from numba.core.errors import NumbaError

from blinkpy.config import ConfigError
from blinkpy.scheduler.policy_language import GuardedPolicy, write_guarded
from blinkpy.scheduler.policy_program import PolicyError


class RequestFields(NamedTuple):
    """The fields of a request that a policy may read."""

    arrival: int  # number of the request, in the engine's order of acceptance
    arrival_us: int  # time of acceptance, us of the engine's monotonic clock
    prompt_length: int  # tokens of the prompt
    max_tokens: int  # maximum number of generated tokens
    generated: int  # tokens generated so far; can be more than 0 after a preemption
    priority: int  # the request's `priority`, 32 bits; a lower number is more urgent
    preemptions: int  # number of preemptions so far
    pair: int  # number of the queue pair, and so of the front-end worker: 0, 1, ...
    tenant: int  # the tenant number of its key, from the keys file; 0 without a key
    best_effort: int  # its class: 0 latency-sensitive, 1 best effort
    tenant_service: int  # service of its tenant in its class at acceptance: tokens / weight, in 1/1000 tokens


Policy = Callable[[RequestFields], int]
MOST_BYTES = 1 << 20  # maximum size of a policy's file
_SOURCES: WeakKeyDictionary[Policy, bytes] = WeakKeyDictionary()  # text of each user policy's file

SHORT_PROMPT_US = 50
"""About twice the prefill time of a token of an 8B model on one H200. 20 to 200 serve about as well: docs/tuning.md."""

BEST_EFFORT_US = 10_000_000
"""How much later than a best-effort request a latency-sensitive one may arrive and still go first."""


FAIR_BEST_EFFORT = 100_000_000
"""How much more service a latency-sensitive tenant may have and still go first, 1/1000 tokens."""


def fcfs(request):
    """First come, first served."""
    return request.arrival


def priority(request):
    """The request's priority; equal priorities in order of arrival."""
    return request.priority


def short_prompts(request):
    """Short prompts first, and latency-sensitive requests before best-effort requests. Later arrivals overtake a request only
    within SHORT_PROMPT_US per token of its prompt, plus BEST_EFFORT_US if it is best effort.
    """
    return request.arrival_us + SHORT_PROMPT_US * request.prompt_length + BEST_EFFORT_US * request.best_effort


def shortest_first(request):
    """Least remaining work first: prompt tokens plus tokens that may still be generated."""
    return request.prompt_length + request.max_tokens - request.generated


def fair(request):
    """The tenant with the least service per weight first. Latency-sensitive requests precede best-effort requests by
    FAIR_BEST_EFFORT.
    """
    return request.tenant_service + FAIR_BEST_EFFORT * request.best_effort


SHIPPED: dict[str, Policy] = {
    "fair": fair,
    "fcfs": fcfs,
    "priority": priority,
    "short-prompts": short_prompts,
    "shortest-first": shortest_first,
}


def is_shipped(policy: Policy) -> bool:
    """Whether a policy is defined in this module, and so can't fail."""
    return policy.__module__ == __name__


@lru_cache(maxsize=64)
def guarded_policy(policy: Policy) -> GuardedPolicy:
    """Rewrite a user's policy to code that never fails. Raises PolicyError, with the line, for unsupported
    code.
    """
    assert isinstance(policy, FunctionType)  # checked by read_policy
    return write_guarded(policy, RequestFields._fields)


def load_policy(name: str, source: bytes | None = None) -> Policy:
    """The shipped policy with this name, or FUNCTION of FILE.py for "FILE.py:FUNCTION".

    source: the file's text from policy_source; None reads the file.
    Raises ConfigError, with file and line, if the function is missing, or is not a function from one request
    to an
    integer in the language of policies.
    """
    function = read_policy(name, source)
    if name not in SHIPPED:
        _check_language(function, f"policy {name}")
    return function


def policy_source(name: str) -> bytes:
    """The text of a policy's file; empty for a shipped policy. Raises ConfigError for other names, and for unreadable files."""
    if name in SHIPPED:
        return b""
    file, separator, _ = name.rpartition(":")
    if not separator or not file.endswith(".py"):
        raise ConfigError(f"policy must be one of {', '.join(SHIPPED)}, or FILE.py:FUNCTION, not {name!r}")
    try:
        with open(file, "rb") as opened:
            source = opened.read(MOST_BYTES + 1)
    except FileNotFoundError as error:
        raise ConfigError(f"policy file {file} does not exist") from error
    except OSError as error:
        raise ConfigError(f"can't read policy file {file}: {error.strerror}") from error
    if len(source) > MOST_BYTES:
        raise ConfigError(f"policy file {file} has more than {MOST_BYTES} bytes")
    return source


def kept_source(policy: Policy) -> bytes:
    """The text of a user's policy file at loading. If the file imports its function, the text is that of the (last) importing
    file.
    """
    return _SOURCES[policy]


def read_policy(name: str, source: bytes | None = None) -> Policy:
    """The unchecked function of load_policy. It runs the file's code, which may raise any exception, or never end."""
    if name in SHIPPED:
        return SHIPPED[name]
    if source is None:
        source = policy_source(name)
    file, _, function_name = name.rpartition(":")
    function = _load_function(Path(file), function_name, source)
    _check_arguments(function, f"policy {name}")
    _SOURCES[function] = source
    return function


def _load_function(path: Path, name: str, source: bytes) -> Policy:
    spec = importlib.util.spec_from_file_location(f"blinkpy_policy_{path.stem}", path)
    assert spec is not None and isinstance(spec.loader, InspectLoader)  # because the name ends in .py
    module = importlib.util.module_from_spec(spec)
    try:
        # Not by an import, which would read the file again, or use stale byte code within a second
        # of a change.
        vars(module)["__loader__"] = _KeptSource(source)
        exec(spec.loader.source_to_code(source, str(path)), vars(module))
    except SyntaxError as error:
        raise ConfigError(f"policy file {path}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == path.absolute()]
        where = f", line {lines[-1]}" if lines else ""
        raise ConfigError(f"policy file {path}{where}: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if function is None:
        defined = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        raise ConfigError(f"policy file {path} has no function {name!r}; it defines {', '.join(defined) or 'none'}")
    if not inspect.isfunction(function):
        raise ConfigError(f"{name!r} in {path} is not a function")
    return function


class _KeptSource:
    """The source from which a module was loaded, even if the file changes."""

    def __init__(self, source: bytes):
        self._text = decode_source(source)

    def get_source(self, name: str) -> str:
        """The text, for importlib.abc.InspectLoader."""
        return self._text


def _where(function: Policy, what: str) -> str:
    return f"{what} ({function.__code__.co_filename}, line {function.__code__.co_firstlineno})"


def _check_arguments(function: Policy, what: str) -> None:
    """Raise ConfigError unless the function takes one request."""
    parameters = list(inspect.signature(function).parameters.values())
    required = [p for p in parameters if p.default is p.empty]
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if not parameters or len(required) > 1 or parameters[0].kind not in positional:
        raise ConfigError(f"{_where(function, what)} must take one argument, the request, not {inspect.signature(function)}")


def _check_language(function: Policy, what: str) -> None:
    """Raise ConfigError unless the function is in the language of policies, and compiles."""
    try:
        guarded = guarded_policy(function)
    except PolicyError as error:
        raise ConfigError(f"{what} ({error.place.file}, line {error.place.line}): {error.text}") from error
    fields = types.NamedTuple([types.int64] * len(RequestFields._fields), RequestFields)
    try:
        njit(guarded.function).compile((fields, types.int64[::1], types.int64))
    except NumbaError as error:
        reason = next(line.strip() for line in str(error).splitlines() if line.strip())
        raise ConfigError(f"{_where(function, what)} does not compile: {reason}") from error
