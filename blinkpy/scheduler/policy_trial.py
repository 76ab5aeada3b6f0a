"""A trial of a user's policy in a child process: it loads the policy, checks the rules of the language, and calls the policy.

The process writes one JSON object per line to standard output: {"stage": name, "compute_s": n} before each
stage, {"finding": [...]}, {"digest": text} of the policy, and {"done": true} at the end. The policy's own
output is discarded.
"""

import contextlib
import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

from blinkpy.config import ConfigError
from blinkpy.scheduler.guarded_arithmetic import FAULT_SHIFT, checked_rank, describe_policy_fault
from blinkpy.scheduler.policies import SHIPPED, Policy, RequestFields, guarded_policy, policy_source, read_policy
from blinkpy.scheduler.policy_key import policy_digest
from blinkpy.scheduler.policy_program import PolicyError
from blinkpy.scheduler.policy_vetting import Finding

USUAL_IMPORTS = frozenset({"typing", "numba", "numpy", "math", "blinkpy"})  # for annotations, constants, or tests
SAMPLES = 1000
LOAD_S, CALLS_S = 30, 60  # CPU time of a stage
IMPORT_S, CALL_S = 15.0, 5.0  # CPU time of the file with its imports, and of calls; beyond it, the finding names the line
IDLE_S, LEAST_SHARE = 60.0, 0.01  # a stage that uses less than this share of a core for this time only waits, and is ended
MOST_LINES = 200_000  # per call; a longer call counts as endless
MANY_LINES = 1_000  # per call; beyond it a note warns, because each call delays the step
INT64 = range(-(1 << 63), 1 << 63)

LONGEST = 1 << 22  # tokens: the limit of --max-model-len

BOUNDS: dict[str, tuple[int, ...]] = {
    "arrival": (0, 1, 1 << 40),
    "arrival_us": (0, 1, 1 << 45),  # a year
    "prompt_length": (1, 2, LONGEST - 1),
    "max_tokens": (1, 2, LONGEST - 1),
    "generated": (0, 1, LONGEST - 2),
    "priority": (-(1 << 31), -1, 0, 1, (1 << 31) - 1),
    "preemptions": (0, 1, 1 << 20),
    "pair": (0, 1, 63),
    "tenant": (0, 1, (1 << 31) - 1),
    "best_effort": (0, 1),
    "tenant_service": (0, 1, 1 << 50),
}


def ordinary(draw: random.Random) -> RequestFields:
    """A typical request. Lengths and times are distributed log-uniformly."""

    def spread(most: int) -> int:
        return int(2 ** draw.uniform(0, most.bit_length() - 1))

    max_tokens, preemptions = spread(8192), draw.choice((0, 0, 0, 1, 2))
    return RequestFields(
        arrival=spread(1 << 24),
        arrival_us=spread(1 << 40),
        prompt_length=spread(32768),
        max_tokens=max_tokens,
        generated=draw.randrange(max_tokens) if preemptions else 0,
        priority=draw.choice((0, 0, 0, draw.randint(-10, 10))),
        preemptions=preemptions,
        pair=draw.randrange(4),
        tenant=draw.choice((0, 0, draw.randrange(4), draw.randrange(1 << 31))),
        best_effort=draw.choice((0, 0, 0, 1)),
        tenant_service=spread(1 << 24),
    )


def sample_requests(count: int, seed: int) -> list[RequestFields]:
    """Ordinary requests, then requests with one field at a bound, then requests with all fields at a
    bound.
    """
    draw = random.Random(seed)
    samples = [ordinary(draw) for _ in range(count)]
    for name, values in BOUNDS.items():
        samples += [ordinary(draw)._replace(**{name: value}) for value in values]
    extremes = [{name: draw.choice(values) for name, values in BOUNDS.items()} for _ in range(count // 4)]
    return samples + [RequestFields(**values) for values in extremes]


class Failed(BaseException):
    """Ends the check. args: its last findings. Not an Exception, so that a hanging policy can't catch it."""


class Trial:
    """One check of a policy."""

    def __init__(
        self,
        policy: str,  # name, as in load_policy
        send: Callable[[dict[str, Any]], None],  # takes a message for the parent
        seed: int = 0,  # of the synthetic requests
        source: bytes | None = None,  # text of the policy's file; None: read the file
    ):
        self.policy = policy
        self.seed = seed
        self._send = send
        self.source = source

    def stage(self, name: str, compute_s: float) -> None:
        """Begin a stage. After compute_s of CPU time the kernel ends this process."""
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        with contextlib.suppress(ValueError):  # the hard limit is lower
            resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time() + compute_s) + 1, hard))
        self._send({"stage": name, "compute_s": compute_s})

    def report(self, *findings: Finding) -> None:
        for finding in findings:
            self._send({"finding": finding})

    def require(self, *findings: Finding) -> None:
        """Report findings, and end the check if one of them is an error."""
        if any(finding.level == "error" for finding in findings):
            raise Failed(*findings)
        self.report(*findings)

    def load(self) -> Policy:
        """Run the policy's file."""
        name = self.policy
        if self.source is None:
            self.source = policy_source(name)
        return within(Path(name.rpartition(":")[0]).absolute(), lambda: read_policy(name, self.source), IMPORT_S)

    def quick(self) -> tuple[Policy, list[RequestFields], list[int]]:
        """Run the checks before an engine starts: import, language and calls. Returns the policy, requests and
        their ranks.
        """
        self.stage("load", LOAD_S)
        function = self.load()
        if self.policy not in SHIPPED:
            self.require(*check_language(function))
        self.stage("calls", CALLS_S)
        requests = sample_requests(SAMPLES, self.seed)
        path = Path(function.__code__.co_filename)
        ranks, findings = within(path, lambda: call_in_python(function, requests))
        self.require(*findings)
        self.require(*within(path, lambda: call_again(function, requests, ranks, "when computed again")))
        if self.policy not in SHIPPED:
            self.require(*call_guarded(function, requests, ranks))
        text = f"{len(requests):,} requests: every rank is an integer, and the same when computed again"
        self.report(Finding("fine", "calls", text))
        self._send({"digest": policy_digest(function)})
        return function, requests, ranks


def within(path: Path, function: Callable[[], Any], most_s: float = CALL_S) -> Any:
    """Call function(). Raises Failed after most_s of CPU time, or if it waits for IDLE_S. path: the policy's
    file.
    """
    computed = time.process_time()

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal computed
        before, computed = computed, time.process_time()
        waits = number == signal.SIGALRM
        if waits and computed - before > LEAST_SHARE * IDLE_S:
            return
        while frame is not None and Path(frame.f_code.co_filename) != path:
            frame = frame.f_back
        blocked = f"a call blocked for {IDLE_S:.0f} s almost without computing"
        text = blocked if waits else f"a call did not return within {most_s:.0f} s of CPU time"
        raise Failed(Finding("error", "calls", text, frame.f_lineno if frame is not None else 0))

    timers = ((signal.ITIMER_PROF, signal.SIGPROF, most_s), (signal.ITIMER_REAL, signal.SIGALRM, IDLE_S))
    before = [signal.signal(number, handle) for _, number, _ in timers]
    for timer, _, seconds in timers:
        signal.setitimer(timer, seconds, seconds)
    try:
        return function()
    finally:
        for (timer, number, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


class EndlessCall(BaseException):
    """An endless call. Not an Exception, so that the policy can't catch it."""


class CountedCalls:
    """Wraps the function, and counts the source lines of its file that each call runs.

    lines: number of lines that the last call ran.
    line: the last line that ran.
    """

    def __init__(self, function: Policy):
        self.function = function
        self.lines = 0
        self.line = 0
        self._file = function.__code__.co_filename

    def __call__(self, request: RequestFields) -> Any:
        """Call the function. Raises EndlessCall after MOST_LINES, and the function's exceptions."""
        self.lines = 0
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return self.function(request)
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename != self._file:
            return None
        if event == "line":
            self.lines += 1
            self.line = frame.f_lineno
            if self.lines > MOST_LINES:
                raise EndlessCall
        return self._trace


def call_in_python(function: Policy, requests: list[RequestFields]) -> tuple[list[int], list[Finding]]:
    """The ranks of requests, and the first problem of each kind."""
    counted, longest = CountedCalls(function), 0
    ranks: list[int] = []
    for request in requests:
        problem = ""
        try:
            rank = counted(request)
        except EndlessCall:
            problem = f"a call did not return within {MOST_LINES:,} lines"
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        else:
            if type(rank) is not int:
                problem = f"returns {rank!r} ({type(rank).__name__}), not an integer,"
            elif rank not in INT64:
                problem = f"returns {rank}, which does not fit into 64 bits,"
        if problem:
            return ranks, [Finding("error", "calls", f"{problem} for {show(request)}", counted.line)]
        longest = max(longest, counted.lines)
        ranks.append(rank)
    if longest > MANY_LINES:
        text = f"a call runs up to {longest:,} lines, which delays the step whenever a request begins to wait"
        return ranks, [Finding("warning", "calls", text)]
    return ranks, []


def check_language(function: Policy) -> list[Finding]:
    """Unsupported code in the function, and possible mistakes."""
    try:
        guarded = guarded_policy(function)
    except PolicyError as error:
        other = "" if error.place.file == function.__code__.co_filename else f" [{error.place.file}, line {error.place.line}]"
        return [Finding("error", "source", f"{error.text}{other}", 0 if other else error.place.line)]
    imported = sorted(value.__name__ for value in function.__globals__.values() if isinstance(value, ModuleType))
    foreign = [name for name in imported if name.partition(".")[0] not in USUAL_IMPORTS]
    text = "the file imports {}, which a rank can't use; its code runs in the engine's process at every start"
    found = [Finding("warning", "source", text.format(name)) for name in dict.fromkeys(foreign)]
    return [*found, *(Finding("warning", "source", text, place.line) for place, text in guarded.warnings)]


def call_guarded(function: Policy, requests: list[RequestFields], ranks: list[int]) -> list[Finding]:
    """Call the guarded code that will serve, with 64-bit integers. It must return Python's ranks without a fault."""
    guarded = guarded_policy(function)
    for request, rank in zip(requests, ranks, strict=True):
        word = [0]
        own = checked_rank(guarded.function(request, word, 0), word, 0)
        if word[0] >> FAULT_SHIFT:
            place, what = describe_policy_fault(word[0] >> FAULT_SHIFT, guarded.places)
            text = f"{what} for {show(request)}; it would be served last"
            return [Finding("error", "calls", text, place.line)]
        if own != rank:
            text = f"Python gives {rank}, but compiled code gives {own} for {show(request)}: check for values over 64 bits"
            return [Finding("error", "determinism", text, function.__code__.co_firstlineno)]
    return []


def call_again(function: Policy, requests: list[RequestFields], ranks: list[int], when: str) -> list[Finding]:
    """Call for the same requests in the opposite order. when: describes the second call in a finding."""
    for request, rank in zip(reversed(requests), reversed(ranks), strict=True):
        again = function(request)
        if again != rank:
            text = f"{show(request)} has rank {rank} at first, but {again} {when}: a rank may depend only on the request"
            return [Finding("error", "determinism", text, function.__code__.co_firstlineno)]
    return []


def show(request: RequestFields) -> str:
    """The request's nonzero fields, on one line."""
    return "request(" + ", ".join(f"{name}={value}" for name, value in request._asdict().items() if value) + ")"


def run_trial(check: Callable[[dict[str, Any], bytes, Callable[[dict[str, Any]], None]], Any]) -> None:
    """Main function of the child process. Its first argument has options as JSON, and standard input the
    policy's text.

    check: runs the checks; its last argument sends a message.
    """
    source = sys.stdin.buffer.read()
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in (0, 1):
        os.dup2(nowhere, number)

    def send(message: dict[str, Any]) -> None:
        channel.write(json.dumps(message) + "\n")

    try:
        check(json.loads(sys.argv[1]), source, send)
    except Failed as failed:
        for finding in failed.args:
            send({"finding": finding})
    except ConfigError as error:
        send({"refused": str(error)})
    send({"done": True})


if __name__ == "__main__":
    run_trial(lambda options, source, send: Trial(options["policy"], send, source=source).quick())
