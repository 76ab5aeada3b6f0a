"""Placement: the engine that has the prompt's pages unless it is busy, else the least loaded; and rules that users write.

Supports claim fleet/placement.
"""

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from blinkpy.config import ConfigError
from blinkpy.dpu.fleet.placement import EngineLoad, Placement
from blinkpy.dpu.fleet.placement_rules import EXTRA_TOKENS, SHIPPED_RULES, PlacedRequest, Rule, load_rule
from blinkpy.queues.words import Int32

PAGE, ENGINES = 16, 4


def loads(*tokens_in_flight: int) -> list[EngineLoad]:
    """Engines that differ in this worker's load there."""
    return [EngineLoad(i, 8, 0, 0, 100, tokens, 0, True) for i, tokens in enumerate(tokens_in_flight)]


def tokens(rng: np.random.Generator, count: int) -> Int32:
    return rng.integers(0, 1 << 16, count, dtype=np.int32)


@pytest.fixture
def placement() -> Placement:
    return Placement(ENGINES, PAGE)


def test_a_prompt_goes_where_its_longest_part_is_known(placement: Placement, rng: np.random.Generator) -> None:
    prompt = tokens(rng, 20 * PAGE)
    placement.sent(2, prompt[: 12 * PAGE], 7)
    placement.sent(1, prompt[: 4 * PAGE], 7)
    assert placement.choose(prompt, 7, loads(0, 0, 100, 0)) == 2
    assert placement.choose(prompt[: 4 * PAGE + 1], 7, loads(0, 0, 100, 0)) == 1  # as much there, and less to do
    placement.forget(2)
    assert placement.choose(prompt, 7, loads(0, 100, 0, 0)) == 1


def test_salts_of_other_keys_share_no_prefix(placement: Placement, rng: np.random.Generator) -> None:
    prompt = tokens(rng, 8 * PAGE)
    placement.sent(3, prompt, 7)
    for salt in (0, 8, 2**63 - 1):
        assert placement.choose(prompt, salt, loads(5, 0, 5, 5)) == 1
    assert placement.choose(prompt, 7, loads(5, 0, 5, 5)) == 3


def test_a_part_of_a_page_and_the_last_token_are_not_counted(rng: np.random.Generator) -> None:
    """Pages are cached whole, and an engine computes one token at least."""
    seen: list[Sequence[int]] = []

    def look(request: PlacedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
        seen.append(request.cached)
        return engines[0]

    placement, prompt = Placement(2, PAGE, rule=look), tokens(rng, 3 * PAGE)
    placement.sent(0, prompt[: 2 * PAGE + 3], 0)
    placement.sent(1, prompt, 0)
    for length in (3 * PAGE, 3 * PAGE - 1, PAGE + 1, PAGE, 1):
        placement.choose(prompt[:length], 0, loads(0, 0))
    assert seen == [[32, 32], [32, 32], [16, 16], [0, 0], [0, 0]]
    placement.choose(np.concatenate((prompt, prompt)), 0, loads(0, 0))
    assert seen[-1] == [32, 48]


def busy(waiting: int) -> list[EngineLoad]:
    """Engines of which the first has prompts that wait."""
    return [dataclasses.replace(load, waiting_tokens=waiting if load.index == 0 else 0) for load in loads(0, 0, 1, 1)]


def test_an_engine_that_is_too_busy_does_not_get_its_prompts(placement: Placement, rng: np.random.Generator) -> None:
    prompt = tokens(rng, 64 * PAGE + 1)
    placement.sent(0, prompt, 0)
    assert placement.choose(prompt, 0, busy(0)) == 0
    assert placement.choose(prompt, 0, loads(EXTRA_TOKENS, 0, 1, 1)) == 0
    assert placement.choose(prompt, 0, loads(EXTRA_TOKENS + 1, 0, 1, 1)) == 1
    assert placement.choose(prompt, 0, loads(EXTRA_TOKENS + 1, 1, 0, 1)) == 2
    assert placement.choose(prompt, 0, busy(64 * PAGE)) == 0
    assert placement.choose(prompt, 0, busy(64 * PAGE + 1)) == 1


def test_many_at_once_that_begin_alike_are_spread(placement: Placement, rng: np.random.Generator) -> None:
    """Sent prompts count until the engine has seen them."""
    start, chosen, offered = tokens(rng, 64 * PAGE), [], loads(0, 0, 0, 0)
    for _ in range(12):
        prompt = np.concatenate((start, tokens(rng, PAGE + 1)))
        chosen.append(placement.choose(prompt, 0, offered))
        placement.sent(chosen[-1], prompt, 0)
        offered[chosen[-1]].unseen_tokens += len(prompt)
    assert {chosen.count(engine) for engine in range(ENGINES)} == {3}
    home = placement.choose(prompt, 0, loads(0, 0, 0, 0))
    assert home == chosen[-1], "its prompt is there to the last page"


@pytest.mark.parametrize("rule", SHIPPED_RULES)
def test_only_an_engine_that_accepts_is_chosen(rule: str, rng: np.random.Generator) -> None:
    placement, prompt = Placement(ENGINES, PAGE, rule=SHIPPED_RULES[rule]), tokens(rng, 9 * PAGE)
    for engine in range(ENGINES):
        placement.sent(engine, prompt[: (engine + 1) * PAGE], 0)
    for _ in range(200):
        accepts = rng.random(ENGINES) < 0.5
        offered = [dataclasses.replace(load, accepts=bool(accepts[load.index])) for load in loads(*rng.integers(0, 9, ENGINES))]
        some = [load for load in offered if load.accepts or rng.random() < 0.5]  # one without a link may be left out
        chosen = placement.choose(prompt, 0, some)
        assert (chosen is None) == (not accepts.any())
        assert chosen is None or accepts[chosen]
    assert placement.faults == 0
    assert placement.choose(prompt, 0, []) is None


@pytest.mark.parametrize("rule", ["prefix", "least-loaded", "round-robin"])
def test_equal_engines_take_turns(rule: str, rng: np.random.Generator) -> None:
    placement = Placement(3, PAGE, rule=SHIPPED_RULES[rule])
    chosen = [placement.choose(tokens(rng, 100), 0, loads(0, 0, 0)) for _ in range(9)]
    assert [chosen.count(engine) for engine in range(3)] == [3, 3, 3]


def test_random_choices_reach_all_and_follow_from_the_seed(rng: np.random.Generator, seed: int) -> None:
    def choices() -> list[int | None]:
        placement = Placement(3, PAGE, rule=SHIPPED_RULES["random"], seed=seed)
        return [placement.choose(np.ones(1, np.int32), 0, loads(0, 0, 0)) for _ in range(300)]

    first = choices()
    assert first == choices()
    assert min(first.count(engine) for engine in range(3)) > 30


@pytest.mark.parametrize("field", ["waiting_tokens", "running", "tokens_in_flight"])
@pytest.mark.parametrize("rule", ["prefix", "least-loaded"])
def test_what_an_engine_has_to_do_counts(rule: str, field: str, rng: np.random.Generator) -> None:
    placement, busy = Placement(3, PAGE, rule=SHIPPED_RULES[rule]), {field: 1000}
    offered = [dataclasses.replace(load, **(busy if load.index != 1 else {})) for load in loads(0, 0, 0)]
    assert {placement.choose(tokens(rng, 100), 0, offered) for _ in range(5)} == {1}


def test_one_engine_needs_no_record(rng: np.random.Generator) -> None:
    placement = Placement(1, PAGE)
    placement.sent(0, tokens(rng, 100), 0)
    placement.forget(0)
    assert placement.choose(tokens(rng, 100), 0, loads(0)) == 0
    assert placement._record.tokens(0) == 0


# ---- rules of users ----------------------------------------------------------------------------------------------------


def written(folder: Path, source: str) -> str:
    path = folder / "mine.py"
    path.write_text(source)
    return str(path)


def test_a_rule_of_a_file(tmp_path: Path) -> None:
    source = "def choose(request, engines):\n    return engines[request.prompt_tokens % len(engines)]\n"
    placement = Placement(3, PAGE, rule=load_rule(written(tmp_path, source)))
    assert [placement.choose(np.zeros(n, np.int32), 0, loads(0, 0, 0)) for n in (3, 4, 5)] == [0, 1, 2]
    assert placement.faults == 0


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("", "has no function choose"),
        ("choose = 1", "has no function choose"),
        ("def choose(request):\n    return 1", "line 1: choose must take a request and engines"),
        ("\nasync def choose(request, engines):\n    pass", "line 2: choose must be a plain function"),
        ("def choose(request, engines):\n    yield 1", "line 1: choose must be a plain function"),
        ("x = 1\nx = y\n", "line 2: NameError: name 'y'"),
        ("def choose(request, engines)\n", "line 1: expected ':'"),
        ("raise SystemExit(3)", "line 1: SystemExit"),
        ("x = '\0'", "mine.py"),
    ],
)
def test_a_bad_file_is_one_line_at_the_start(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]+$") as refused:
        load_rule(written(tmp_path, source))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [("nothing", "must be one of"), ("/nowhere/x.py", "does not exist"), ("x.txt", "must be one of"), ("", "must be one of")],
)
def test_a_name_of_no_rule_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_rule(name)


class Odd:
    """An object without a string form."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize("nonsense", [None, 1, True, "engine", Odd(), EngineLoad(0, 8, 0, 0, 100, 5, 0, True)])
def test_invalid_choices_fall_back_to_the_least_loaded_engine(nonsense: object, caplog: pytest.LogCaptureFixture) -> None:
    """The last one equals an engine that does not accept."""
    placement = Placement(3, PAGE, rule=lambda request, engines: nonsense)  # type: ignore[arg-type, return-value]
    offered = [dataclasses.replace(load, accepts=load.index > 0) for load in loads(5, 9, 3)]
    assert [placement.choose(np.zeros(9, np.int32), 0, offered) for _ in range(3)] == [2, 2, 2]
    assert placement.faults == 3


def test_errors_of_a_rule_are_counted_and_logged_once_a_minute(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rule = load_rule(written(tmp_path, "def choose(request, engines):\n\n    return engines[0] / request.salt\n"))
    now = 100.0
    placement = Placement(3, PAGE, rule=rule, clock=lambda: now)
    with caplog.at_level(logging.ERROR, "blinkpy.frontend"):
        for second in (0, 1, 59.9, 60.1, 61, 130):
            now = 100.0 + second
            assert placement.choose(np.zeros(9, np.int32), 0, loads(5, 9, 3)) == 2
    assert placement.faults == 6
    assert len(caplog.messages) == 3
    assert "mine.py, line 3) TypeError" in caplog.messages[0]
    assert "4 requests so far" in caplog.messages[1]


def exits(request: PlacedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
    raise SystemExit(1)


def overflows(request: PlacedRequest, engines: Sequence[EngineLoad]) -> EngineLoad:
    return overflows(request, engines)


@pytest.mark.parametrize("rule", [exits, overflows])
def test_a_rule_ends_no_worker(rule: Rule) -> None:
    placement = Placement(2, PAGE, rule=rule)
    assert placement.choose(np.zeros(9, np.int32), 0, loads(5, 0)) == 1
    assert placement.faults == 1
