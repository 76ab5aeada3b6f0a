"""Looking for one mutant: the tests that reach its module, likely killers first, each with a deadline."""

import importlib
import os
import random
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test
from support.front_end.front_machine import PROFILES, FrontMachine
from support.hunts import deadline
from support.seeded_bugs import replaced

from blinkpy.scheduler.policies import SHIPPED
from blinkpy.sources import PACKAGE
from blinkpy.verify.sim.simulation import simulate
from mutants.mutations import Mutant

ROOT = PACKAGE.parent
COPIED = (
    "blinkpy",
    "tests",
    "tools",
    "benchmarks",
    "docs",
    "pyproject.toml",
    "README.md",
    "CONTRIBUTING.md",
    "Makefile",
    "systemd",
)
SIMULATED_S, PROPERTIES_S, TESTED_S = 25, 25, 400
STORM, EXAMPLES = 400, 400  # turns of a world; examples of the state machine
LANES = (1, 1, 2, 1, 1, 5, 1, 1, 32)  # of the scheduler, world by world: several find missing barriers, and take longer
MEMORY_BYTES = 16 << 30


class Group(NamedTuple):
    """Modules, and who looks for their mutants. A new file in one of the folders joins by being there."""

    name: str
    parts: tuple[str, ...]  # folders and files of the package
    tests: tuple[str, ...]  # likely killers first
    simulated: bool = False
    stateful: bool = False  # the state machine, with the real client


LINK, SAMPLING = "tests/plain/link", "tests/compiled/kernels/interpreted"
ORDERS = "tests/verified/test_orders.py"
GROUPS = (
    Group("scheduler", ("scheduler",), (ORDERS, "tests/compiled/scheduler", "tests/compiled/recording"), True, True),
    Group("kv", ("kv",), ("tests/compiled/scheduler", "tests/compiled/recording"), True, True),
    Group("queues", ("queues",), (LINK, "tests/compiled/scheduler", "tests/plain/front_end"), True, True),
    Group("transport", ("transport",), (LINK,), False, True),
    Group("link", ("dpu/link",), (LINK, ORDERS), False, True),
    Group("client", ("dpu/engine_link.py",), ("tests/plain/front_end", LINK)),
    Group(
        "sampling",
        ("kernels/sampling", "models/cpu/cpu_sampler.py"),
        ("tests/plain/models", "tests/compiled/kernels/interpreted"),
    ),
)


class Verdict(NamedTuple):
    """What became of a mutant. by: who noticed it, "" for a survivor. said: the first line of what they said."""

    mutant: Mutant
    by: str
    said: str
    seconds: float


def hunt(mutant: Mutant, group: Group, seed: int, tree: Path) -> Verdict:
    """Look for a mutant. seed: of all that is random. tree: of copy_tree, for the tests that run as processes of their own."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    started = time.monotonic()
    stages: list[tuple[str, Callable[[], str]]] = []
    if group.simulated:
        stages.append(("simulator", lambda: _simulated(mutant, seed)))
    if group.stateful:
        stages.append(("state machine", lambda: _properties(mutant, seed)))
    stages.append(("tests", lambda: _tested(mutant, group, tree)))
    for name, stage in stages:
        if said := stage():
            return Verdict(mutant, name, said.splitlines()[0][:200], time.monotonic() - started)
    return Verdict(mutant, "", "", time.monotonic() - started)


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _simulated(mutant: Mutant, seed: int) -> str:
    """What the simulator's checks and the oracle, both without the mutant, say about a scheduler with it, in plain Python."""
    draw, until, made = random.Random(seed), time.monotonic() + SIMULATED_S, 0
    try:
        with replaced(mutant.module, mutant.path, mutant.source):
            make_turn = importlib.import_module("blinkpy.scheduler.cycle").make_turn
        turns = [(policy, make_turn(policy)) for policy in SHIPPED.values()]
        while time.monotonic() < until:
            policy, turn = turns[made % len(turns)]
            with deadline(SIMULATED_S):
                lanes = LANES[made % len(LANES)]
                outcome = simulate(draw.randrange(1 << 30), STORM, policy, scheduler=turn, oracle=True, records=True, lanes=lanes)
            made += 1
            if outcome.failure:
                return str(outcome.failure)
    except Exception as error:  # a mutant that can't be loaded is noticed, too
        return _told(error)
    return ""


def _properties(mutant: Mutant, seed: int) -> str:
    """What the state machine says, with client, queues and scheduler as the mutant has them."""
    chosen = settings(PROFILES["ci"], phases=(Phase.generate,), database=None, max_examples=EXAMPLES, print_blob=False)
    try:
        with deadline(4 * PROPERTIES_S), replaced(mutant.module, mutant.path, mutant.source):
            until = time.monotonic() + PROPERTIES_S
            while time.monotonic() < until:
                run_state_machine_as_test(FrontMachine, settings=settings(chosen, max_examples=EXAMPLES // 20))
    except Exception as error:
        return _told(error)
    return ""


def copy_tree(to: Path) -> None:
    """A copy of the sources and tests, for mutants of its own."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "results"), dirs_exist_ok=True)
        else:
            shutil.copy2(ROOT / name, to / name)


def _tested(mutant: Mutant, group: Group, tree: Path) -> str:
    """What the tests say in a copy of the tree that has the mutant."""
    file = tree / mutant.path.relative_to(ROOT)
    file.write_text(mutant.source)
    environment = os.environ | {
        "PYTHONPATH": str(tree),
        "XDG_CACHE_HOME": str(tree / "cache"),  # compiled code of a mutant serves nobody else
        "TRITON_CACHE_DIR": str(tree / "cache" / "triton"),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    command = [sys.executable, "-m", "pytest", "-x", "-q", "--no-header", "--tb=line", "-p", "no:cacheprovider", *group.tests]
    try:
        run = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=TESTED_S)
    except subprocess.TimeoutExpired:
        return f"the tests take longer than {TESTED_S} s"
    finally:
        shutil.copy2(mutant.path, file)
        shutil.rmtree(tree / "cache", ignore_errors=True)
    if run.returncode == 0:
        return ""
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return (failed or run.stdout.strip().splitlines() or [run.stderr.strip() or "no output"])[-1]
