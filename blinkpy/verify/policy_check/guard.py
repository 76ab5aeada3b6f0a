"""Running the user's code at arm's length: the child process of a check, its messages, and its deadlines."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from blinkpy.config import ConfigError
from blinkpy.process_exit import describe_exit
from blinkpy.verify.policy_check.check_options import CheckOptions
from blinkpy.verify.policy_check.findings import Finding

if TYPE_CHECKING:
    from blinkpy.scheduler.policies import Policy

START_S = 120.0  # of the child's computing until it says something for the first time: it imports Numba
IDLE_S, LEAST_SHARE = 120.0, 0.01  # a child that computes less than this share of so long waits for something
LOOK_S = 0.5  # between two looks at a silent child
NO_END = "no end within the time for it; the policy's process was ended"
PACKAGE_ROOT = Path(__file__).parents[3]


def run_child(options: CheckOptions, depth: Literal["quick", "thorough"]) -> Iterator[dict[str, Any]]:
    """The child's messages (see blinkpy.verify.policy_check.check_child). A child that takes too long, or dies,
    ends in an error finding.

    Raises ConfigError if the child refuses the options, or the policy can't be loaded at all.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "blinkpy.verify.policy_check.check_child", json.dumps(dataclasses.asdict(options)), depth]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        try:
            yield from _messages(child)
        finally:
            child.kill()


class ComputeLimit:
    """How long a process may compute, by its own clock: a busy machine may give it little of the time. seconds: of computing."""

    def __init__(self, process: int, seconds: float):
        self._clock = (~process << 3) | 2  # Linux: the id of another process's CPU-time clock
        self._most = self._computed() + seconds
        self._since, self._then = time.monotonic(), self._computed()

    def _computed(self) -> float:
        try:
            return time.clock_gettime(self._clock)
        except OSError:  # it has ended, and its messages say how
            return 0.0

    def reached(self) -> bool:
        """Whether it has computed for too long, or has waited for IDLE_S."""
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
    """Why the child died. errors: the end of its standard error."""
    if code == -signal.SIGXCPU:
        return NO_END
    last = errors.decode(errors="replace").strip().splitlines()
    return f"the policy's process {describe_exit(code)}{': ' + last[-1] if last else ''}"


def _finding(stage: str, text: str) -> dict[str, Any]:
    return {"finding": Finding("error", stage.split()[0], text)}


def vetted_policy(name: str) -> Policy:
    """load_policy for a process that must not hang: the source, import and calls of a user's file are tried in
    a separate process first. Raises ConfigError with the line for the first error.
    """
    from blinkpy.scheduler.policies import SHIPPED, load_policy

    if name not in SHIPPED:
        for message in run_child(CheckOptions(policy=name), "quick"):
            finding = Finding(*message.get("finding", ("fine", "", "")))
            if finding.level == "error":
                where = f"{name.rpartition(':')[0]}, line {finding.line}" if finding.line else name
                raise ConfigError(f"policy {where}: {finding.text}")
    return load_policy(name)
