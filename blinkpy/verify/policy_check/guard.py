"""Running the user's code at arm's length: the child process of a check, its messages, and its deadlines."""

from __future__ import annotations

import dataclasses
import json
import os
import selectors
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

START_S = 120.0  # until the child says something for the first time: it imports Numba
PACKAGE_ROOT = Path(__file__).parents[3]


def run_child(options: CheckOptions, depth: Literal["quick", "thorough"]) -> Iterator[dict[str, Any]]:
    """The child's messages (see blinkpy.verify.policy_check.check_child). A child that is silent for too long, or dies, ends in
    an error finding.

    Raises ConfigError when the child refuses the options, or the policy can't be loaded at all.
    """
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(PACKAGE_ROOT), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "blinkpy.verify.policy_check.check_child", json.dumps(dataclasses.asdict(options)), depth]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as child:
        try:
            yield from _messages(child)
        finally:
            child.kill()


def _messages(child: subprocess.Popen[bytes]) -> Iterator[dict[str, Any]]:
    assert child.stdout is not None and child.stderr is not None
    stage, deadline = "start", time.monotonic() + START_S
    buffered, errors = b"", b""
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        selector.register(child.stderr, selectors.EVENT_READ)
        while True:
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                yield _failed(stage, "no end within the time for it; the policy's process was ended")
                return
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                if key.fileobj is child.stderr:
                    errors = (errors + data)[-4096:]
                    if not data:
                        selector.unregister(child.stderr)
                    continue
                if not data:
                    last = errors.decode(errors="replace").strip().splitlines()
                    yield _failed(stage, f"the policy's process {describe_exit(child.wait())}{': ' + last[-1] if last else ''}")
                    return
                *lines, buffered = (buffered + data).split(b"\n")
                for line in lines:
                    message = json.loads(line)
                    if "refused" in message:
                        raise ConfigError(message["refused"])
                    if "stage" in message:
                        stage, deadline = message["stage"], time.monotonic() + message["deadline_s"]
                    yield message
                    if "done" in message:
                        return


def _failed(stage: str, text: str) -> dict[str, Any]:
    return {"finding": list(Finding("error", stage.split()[0], text))}


def vetted_policy(name: str) -> Policy:
    """load_policy for a process that must not hang: a user's file runs in a process of its own first. Raises ConfigError."""
    from blinkpy.scheduler.policies import SHIPPED, load_policy

    if name not in SHIPPED:
        require_sane(name)
    return load_policy(name)


def require_sane(policy: str) -> None:
    """Source, import and calls of a policy, in a process of its own. Raises ConfigError with the line for the first error."""
    for message in run_child(CheckOptions(policy=policy), "quick"):
        if "finding" in message:
            finding = Finding(*message["finding"])
            if finding.level == "error":
                raise ConfigError(f"policy {located(policy, finding)}: {finding.text}")


def located(policy: str, finding: Finding) -> str:
    """Where a finding is: the policy's file with the line, if there is one."""
    return f"{policy.rpartition(':')[0]}, line {finding.line}" if finding.line else policy
