"""--device on this machine, and on simulated ones; the idle time of an engine's loop, and its end."""

import random
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from blinkpy import packages
from blinkpy.config import Config, ConfigError, options
from blinkpy.engine.devices import cuda_device, host_loop
from blinkpy.engine.devices.device_contract import BrokenStateError, choose_device, device_kinds
from blinkpy.engine.engine import Engine, make_engine
from blinkpy.kv import state as S
from blinkpy.queues import words as W
from blinkpy.queues.layout import BLOCK_WORDS


def test_auto_without_a_gpu_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_device, "gpu_usable", lambda: False)
    engine = make_engine(Config())
    assert engine.device.name == engine.config.engine.device == "cpu"
    with pytest.raises(ConfigError, match="no usable NVIDIA GPU"):
        make_engine(Config().with_options({"device": "cuda"}))


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "installed", lambda name: name != "numba_cuda")
    with pytest.raises(ConfigError, match="--device cuda needs numba_cuda: pip install"):
        make_engine(Config().with_options({"device": "cuda"}))


@pytest.mark.parametrize("device", ["cpu", "null"])
def test_the_gpu_can_not_control_another_device(device: str) -> None:
    with pytest.raises(ConfigError, match=f"--control gpu needs --device cuda; the engine would run on {device}"):
        make_engine(Config().with_options({"device": device, "control": "gpu"}))


def test_packages_are_looked_for_and_not_imported() -> None:
    assert packages.installed("numpy")
    assert not packages.installed("no_such_package.inner")


def test_each_device_is_a_file_that_the_option_names() -> None:
    item = next(item for _, item in options() if item.name == "device")
    kinds = device_kinds()
    assert sorted(["auto", *kinds]) == sorted(item.metadata["choices"])
    for name, kind in kinds.items():
        device = kind()
        assert device.name == name and kind.__module__ == f"blinkpy.engine.devices.{name}_device"
        assert device.gpu == (name == "cuda") and device.reads_weights == (name != "null")


@pytest.mark.parametrize("gpu", [False, True])
def test_auto_takes_the_highest_rank_and_never_the_null_device(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    monkeypatch.setattr(cuda_device, "gpu_usable", lambda: gpu)
    ranks = {name: kind().auto_rank() for name, kind in device_kinds().items()}
    assert ranks["null"] == 0 < ranks["cpu"] and (ranks["cuda"] > ranks["cpu"]) == gpu
    assert choose_device("auto").name == ("cuda" if gpu else "cpu")
    assert [choose_device(name).name for name in ranks] == list(ranks)


@pytest.mark.parametrize("when", ["never", "idle"])
def test_an_idle_loop_sleeps_longer_and_longer_but_not_beyond_a_step_that_is_due(
    when: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """By a clock of the test's own, on which only sleeps take time. The state is checked once a period, while it idles."""
    draw, clock, sleeps, checks = random.Random(seed), [1], list[float](), list[int]()
    shortest, longest = host_loop.IDLE_SLEEP_S

    def sleep(seconds: float) -> None:
        sleeps.append(seconds)
        clock[0] += int(seconds * 1e9)

    monkeypatch.setattr(host_loop, "time", SimpleNamespace(monotonic_ns=lambda: clock[0], sleep=sleep))
    loop: Any = object.__new__(host_loop.HostLoop)
    loop.state = SimpleNamespace(counts=np.zeros(S.COUNTS, np.int64), pace=np.zeros(S.PACE_WORDS, np.int64))
    loop.scheduler, loop.compute = SimpleNamespace(mode="njit"), None
    loop._when, loop._integrity_due = when, 0
    loop.check = lambda: checks.append(clock[0]) or []
    wanted, idle, rounds = list[float](), 0, 0

    def turns(scheduler: Any, compute: Any, idle_ns: int, *more: Any) -> int:
        nonlocal idle, rounds
        assert idle_ns == (0 if idle else host_loop.IDLE_SPIN_NS) and sleeps == wanted
        rounds += 1
        works = draw.random() < (0.2 if rounds < 200 else 0.002)
        loop.state.counts[S.STEPS] += works
        due = clock[0] + draw.choice([5_000, 50_000, 500_000, 50_000_000]) if draw.random() < 0.5 else 0
        loop.state.pace[S.PACE_DUE_NS] = due
        if not works:
            pause = min(shortest * 2 ** min(idle, 20), longest)
            wanted.append(min(pause, (due - clock[0]) / 1e9) if due else pause)
        idle = 0 if works else idle + 1
        return S.NO_BATCH if rounds < 4000 else S.DRAINED

    monkeypatch.setattr(host_loop, "run_turns", turns)
    assert loop.run(0) == S.DRAINED
    assert longest in sleeps and (len(checks) > 1) == (when == "idle")
    assert all(after - before >= host_loop.INTEGRITY_PERIOD_NS for before, after in pairwise(checks))


def made_engine(when: str, ends: int | BaseException, problems: list[str]) -> Any:
    """An engine that is about to run. ends: result or error of its loop; problems: faults that its check reports."""
    engine: Any = Engine(Config().with_options({"check_integrity": when}), Mock())
    engine.views = SimpleNamespace(engine=np.zeros(BLOCK_WORDS, np.int64), control=np.zeros(BLOCK_WORDS, np.int64))
    engine.views.engine[W.ENGINE_STATE] = W.STATE_READY
    run = Mock(side_effect=[ends])
    engine.runner = SimpleNamespace(faults=(OSError,), run=run, check=Mock(return_value=problems))
    return engine


@pytest.mark.parametrize("problems", [[], ["a page is lost", "another one is"]], ids=["fine", "broken"])
@pytest.mark.parametrize("when", ["never", "idle", "always"])
@pytest.mark.parametrize("result", [S.STOPPED, S.DRAINED, S.NO_BATCH])
def test_the_state_is_checked_at_the_end_as_asked_for(result: int, when: str, problems: list[str]) -> None:
    """A drain leaves the loop idle. A fault is announced before it is raised."""
    engine = made_engine(when, result, problems)
    checks = when == "always" or (when == "idle" and result == S.DRAINED)
    words, control = engine.views.engine, engine.views.control
    if checks and problems:
        with pytest.raises(BrokenStateError, match="a page is lost"):
            engine.run()
    else:
        engine.run()
    broken = checks and bool(problems)
    assert engine.runner.check.called == checks
    assert words[W.ENGINE_STATE] == (W.STATE_FAULTED if broken else W.STATE_STOPPED)
    assert (control[W.CONTROL_FAULT], words[W.COUNTER["integrity_errors"]]) == ((1, 2) if broken else (0, 0))


def test_only_device_faults_are_announced() -> None:
    for error, announced in ((OSError("the device"), True), (KeyboardInterrupt(), False)):
        engine = made_engine("always", error, [])
        with pytest.raises(type(error)):
            engine.run()
        assert engine.views.control[W.CONTROL_FAULT] == announced
        assert engine.views.engine[W.ENGINE_STATE] == (W.STATE_FAULTED if announced else W.STATE_READY)


@pytest.mark.parametrize("state", range(len(W.STATE_NAMES)))
def test_an_engine_drains_only_if_it_serves(state: int) -> None:
    """Otherwise the state stays: front ends rely on it after a stop or a fault."""
    engine = made_engine("never", S.DRAINED, [])
    for drain in (True, False):
        engine.views.engine[W.ENGINE_STATE] = state
        engine.stop(drain)
        assert engine.views.control[W.CONTROL_COMMAND] == (W.COMMAND_DRAIN if drain else W.COMMAND_STOP)
        drains = drain and state == W.STATE_READY
        assert engine.views.engine[W.ENGINE_STATE] == (W.STATE_DRAINING if drains else state)


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_queue_pairs_share_the_slots_for_grammars(workers: int) -> None:
    """All together have as many as the option says, or a few less; none where the tokens' bytes are unknown."""
    for slots in (workers, 20, 64):
        engine: Any = Engine(Config().with_options({"grammar_slots": slots, "workers": workers}), Mock())
        engine.sizes = Mock(max_model_len=100, page_size=16, num_pages=9, max_num_seqs=4)
        facts = engine._facts(SimpleNamespace(vocab_size=50), True)
        assert slots - workers < facts.grammar_share * workers <= slots
        assert 0 < facts.grammar_words <= facts.grammar_arena
        none = engine._facts(SimpleNamespace(vocab_size=50), False)
        assert none.grammar_share == none.grammar_words == none.grammar_arena == 0
