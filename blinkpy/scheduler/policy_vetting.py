"""Vets a user's policy in a child process before an engine or a replay loads it: the parent's side, with
deadlines.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from blinkpy.config import ConfigError
from blinkpy.process_exit import describe_exit

if TYPE_CHECKING:
    from blinkpy.scheduler.policies import Policy

START_S = 120.0  # CPU time of the child before its first message: it imports Numba
IDLE_S, LEAST_SHARE = 120.0, 0.01  # a child that uses less than this share of a core for this time counts as blocked
LOOK_S = 0.5  # between two checks of a silent child
NO_END = "no end within the time for it; the policy's process was ended"
PACKAGE_ROOT = Path(__file__).parents[2]
TRIAL = "blinkpy.scheduler.policy_trial"  # module of the child

Level = Literal["fine", "note", "warning", "error"]


class Finding(NamedTuple):
    """One result of a check, on one line."""

    level: Level
    part: str  # of the check, one word
    text: str
    line: int = 0  # of the policy's file; 0: not about a line


def run_child(module: str, options: dict[str, Any], source: bytes = b"") -> Iterator[dict[str, Any]]:
    """Yield the messages of a process that tries a policy. A child that takes too long or dies yields an
    error finding.

    module: its `main()` reads `options` as JSON from its first argument, and `source` from standard input.
    source: text of the policy's file.
    Raises ConfigError if the child refuses the options or can't load the policy.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", module, json.dumps(options)]
    with tempfile.TemporaryFile() as text:
        text.write(source)
        text.seek(0)
        with subprocess.Popen(command, stdin=text, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
            try:
                yield from _messages(child)
            finally:
                child.kill()


class ComputeLimit:
    """A limit on a process's CPU time, in seconds. Wall-clock time would depend on the machine's load."""

    def __init__(self, process: int, seconds: float):
        self._clock = (~process << 3) | 2  # Linux: the id of another process's CPU-time clock
        self._most = self._computed() + seconds
        self._since, self._then = time.monotonic(), self._computed()

    def _computed(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # the process has ended; its messages have the reason
            return 0.0

    def reached(self) -> bool:
        """Whether the process has reached its limit, or has been idle for IDLE_S."""
        now, computed = time.monotonic(), self._computed()
        if now - self._since > IDLE_S:
            idle, self._since, self._then = computed - self._then < LEAST_SHARE * IDLE_S, now, computed
            return idle
        return computed > self._most


def _messages(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None and child.stderr is not None
    stage, limit = "start", ComputeLimit(child.pid, START_S)
    buffered, errors = b"", b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stderr, selectors.EVENT_READ)
        while not limit.reached():
            for key, _ in selector.select(LOOK_S):
                data = os.read(key.fd, 1 << 16)
                if key.fileobj is child.stderr:
                    errors = (errors + data)[-4096:]
                    if not data:
                        selector.unregister(child.stderr)
                    continue
                if not data:
                    yield _finding(stage, _death(child.wait(), errors))
                    return
                *lines, buffered = (buffered + data).split(b"\n")
                for message in map(json.loads, lines):
                    if "refused" in message:
                        raise ConfigError(message["refused"])
                    if "stage" in message:
                        stage, limit = message["stage"], ComputeLimit(child.pid, message["compute_s"])
                    yield message
                    if "done" in message:
                        return
    yield _finding(stage, NO_END)


def _death(code: int, errors: bytes) -> str:
    """The reason of the child's death. errors: the end of its standard error."""
    if code == -signal.SIGXCPU:
        return NO_END
    last = errors.decode(errors="replace").strip().splitlines()
    return f"the policy's process {describe_exit(code)}{': ' + last[-1] if last else ''}"


def _finding(stage: str, text: str) -> dict[str, Any]:
    return {"finding": Finding("error", stage.split()[0], text)}


def vetted_policy(name: str) -> Policy:
    """load_policy for a process that must not hang.

    The file is read once; its text is loaded and called in a child process first, then here. Raises ConfigError with the line of
    the first error, and for a file whose policy differs between loads.
    """
    from blinkpy.scheduler.policies import SHIPPED, load_policy, policy_source
    from blinkpy.scheduler.policy_key import policy_digest

    if name in SHIPPED:
        return SHIPPED[name]
    source, digest = policy_source(name), ""
    for message in run_child(TRIAL, {"policy": name}, source):
        finding = Finding(*message.get("finding", ("fine", "", "")))
        if finding.level == "error":
            where = f"{name.rpartition(':')[0]}, line {finding.line}" if finding.line else name
            raise ConfigError(f"policy {where}: {finding.text}")
        digest = message.get("digest", digest)
    policy = load_policy(name, source)
    if policy_digest(policy) != digest:
        raise ConfigError(
            f"policy {name}: its file defines a different policy at each load; constants must not depend on time, random "
            "numbers or the process"
        )
    return policy


def policy_facts(name: str, policy: Policy) -> dict[str, str]:
    """A recording's description of its policy: the name, and a digest of its file."""
    from blinkpy.scheduler.policies import SHIPPED, kept_source

    digest = ""
    if name not in SHIPPED:
        digest = hashlib.sha256(kept_source(policy)).hexdigest()
    return {"policy": name, "policy_digest": digest}


def recorded_policy(about: dict[str, Any], given: str) -> Policy:
    """The policy of a recording with this description. given: the value of --policy, or "".

    A recording omits the code of a user's policy, because a replay would run that code. Raises
    ConfigError if `given` does not match.
    """
    from blinkpy.scheduler.policies import SHIPPED

    name = str(about.get("policy", ""))
    if name in SHIPPED:
        if given not in ("", name):
            raise ConfigError(f"the recording was made with the policy {name}, not {given}")
        return SHIPPED[name]
    if not given:
        raise ConfigError(f"the recording was made with the policy {name}: give it with --policy FILE.py:FUNCTION")
    policy = vetted_policy(given)
    if policy_facts(given, policy)["policy_digest"] != about.get("policy_digest"):
        print(f"blinkpy: {given} is not the file that the engine had: it may decide differently", file=sys.stderr)
    return policy
