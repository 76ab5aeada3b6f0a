"""Fresh random inputs for every run; a failure prints the seed, and BLINKPY_SEED repeats it."""

import gc
import os
import secrets
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from fcntl import LOCK_EX, flock
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

# torch, Triton and transformers are millions of objects, which each full collection would go through: a fourth of the time of
# many tests.
gc.disable()
YOUNG = 20_000  # objects until a collection; Python's own number is 700

# Each HTTP client would load the machine's certificates: 30 ms of CPU time, at each look of a test that waits for a server.
vars(import_module("httpx._transports.default"))["create_ssl_context"] = cache(httpx.create_ssl_context)

SEED = int(os.environ.get("BLINKPY_SEED", "0")) or secrets.randbelow(2**31 - 1) + 1
os.environ["BLINKPY_SEED"] = str(SEED)  # that of the processes that share the tests, too
# torch's threads: two in every third run and by night, otherwise one. Products of small models take a quarter more time on two.
TWO_THREADS = (SEED >> 8) % 3 == 0 or os.environ.get("BLINKPY_PROFILE") == "nightly"
os.environ.setdefault("OMP_NUM_THREADS", "2" if TWO_THREADS else "1")


# Long files run first, in this order, so that all test processes end at about the same time. The simulator compiles every
# policy's scheduler; tests of servers begin after it, and load the compiled code.
LONGEST = (
    "simulator triton_interpreted triton_aot seeded_bugs draft_layers serve models_against_transformers serving_benchmarks "
    "fp8_models rank_weights handover attacks shortages call_format_round_trips evaluation restart loop_kernel benchmarks "
    "constrained_calls request_preparation connections fleet counted_strings ranked_decoder config_defaults bounded_end "
    "frontend_engine conversation_round_trips grammar_outputs small_worlds batch_invariant drain attack_minute "
    "grammar_compiler fleet_check standing_loop budgets properties fp8_cache fleet_serving memory_model llm order_bugs"
)


# Schedulers are compiled there, with separate policies or for a GPU. They share most functions, but only within a process: one
# runs all of a kind.
TOGETHER = {
    "njit": (
        *("test_simulator.py", "test_class_checks.py", "test_executions.py", "test_policies.py", "test_hostile_front_end.py"),
        *("test_engine.py", "test_expect.py", "test_integrity.py", "test_policy_check.py"),
    ),
    "sm_90": ("test_loop_kernel.py", "test_numba_sm90.py"),
}
APART = ("test_triton_interpreted.py",)  # each of its tests is a process that takes minutes


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seeds", type=int, default=1, help="run only the tests with random inputs, with this many seeds (default: all, 1)"
    )


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its option
def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis draws from the run's seed, too."""
    if not config.getoption("hypothesis_seed", None):
        config.option.hypothesis_seed = str(SEED)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    count = metafunc.config.getoption("seeds")
    parametrized = [mark.args[0] for mark in metafunc.definition.iter_markers("parametrize")]
    if count > 1 and "seed" in metafunc.fixturenames and "seed" not in parametrized:
        metafunc.parametrize("seed", range(SEED, SEED + count), indirect=True)


def pytest_report_header() -> str:
    return f"random inputs: BLINKPY_SEED={SEED}"


@contextmanager
def one_at_a_time(path: Path) -> Iterator[None]:
    """Among the processes that share the tests: the first one compiles what the file needs, and the others load it."""
    with path.open() as file:
        flock(file, LOCK_EX)
        yield


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Each test module is rewritten once, not in each process: half of the time of a collection."""
    with one_at_a_time(collector.path) if isinstance(collector, pytest.Module) else nullcontext():
        return (yield)


def pytest_collection_finish() -> None:
    """Leave what was imported out of all later collections."""
    gc.freeze()
    gc.set_threshold(YOUNG, 10, 10)
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Generator[None, None, None]:
    """Run the tests of LONGEST first, and distribute the waiting tests of front ends among the tests that compute."""
    with one_at_a_time(Path(__file__)):  # Hypothesis reads and keeps the constants of all modules
        yield
    if config.getoption("seeds") > 1:
        items[:] = [item for item in items if "seed" in getattr(item, "fixturenames", ())]
    files = list(dict.fromkeys(item.path for item in items))
    waiting = [path for path in files if path.parent.name == "front_end"]
    computing = [path for path in files if path.parent.name != "front_end"]
    places = {path: at / len(group) for group in (waiting, computing) for at, path in enumerate(group)}
    longest = {f"test_{name}.py": at for at, name in enumerate(LONGEST.split(), -LONGEST.count(" ") - 1)}
    items.sort(key=lambda item: longest.get(item.path.name, places[item.path]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With --dist loadfile a file's tests are one process's, and those of TOGETHER are. The tests of APART may be of several."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Together(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            if file.endswith(APART):
                return nodeid
            return next((kind for kind, files in TOGETHER.items() if file.endswith(files)), file)

    return Together(config, log)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Report the tests omitted from this run."""
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, reported in report.user_properties:
            if name == "left out":
                terminalreporter.write_line(f"{report.nodeid}: {reported}")


@pytest.fixture
def left_out(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Call it with a description of the omitted test: the end of the run reports it."""
    return partial(record_property, "left out")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed, or another of --seeds. It is printed with every failing test."""
    own: int = getattr(request, "param", SEED)
    print(f"BLINKPY_SEED={own}")
    return own


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    """A generator seeded from the run's seed."""
    return np.random.default_rng(seed)
