"""Policies of the user: what is accepted, and what is told about the others."""

from __future__ import annotations

from pathlib import Path

import pytest
from numba import njit
from support.scheduler_cases import make_case, tokens

from blinkpy.config import ConfigError
from blinkpy.scheduler.policies import SHIPPED, RequestFields, load_policy
from blinkpy.verify.policy_check.policy_calls import compile_for_gpu


def test_a_user_function_decides_the_order(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("LIMIT = 100\n\ndef longest(request):\n    return LIMIT - request.prompt_length\n")
    case = make_case(load_policy(f"{tmp_path}/mine.py:longest"), pairs=1, rows=1)
    requests = [case.submit(tokens(n), 2) for n in (3, 9, 6)]
    case.finish()
    assert [requests.index(request) for request in case.done] == [1, 2, 0]


def test_a_policy_may_call_functions_of_its_file(tmp_path: Path) -> None:
    """In Python, compiled for the CPU, and compiled for a GPU."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def twice(x):\n    return half(4 * x)\n\ndef half(x):\n    return x // 2\n\n"
        "def rank(request):\n    return twice(request.prompt_length) + request.pair\n"
    )
    policy = load_policy(f"{file}:rank")
    request = RequestFields(1, 2, 3, 4, 5, 6, 7, 8)
    assert policy(request) == njit(policy)(request) == 14
    assert compile_for_gpu(policy).level == "fine"


@pytest.mark.parametrize("name", sorted(SHIPPED))
def test_shipped_policies_are_found_by_name(name: str) -> None:
    assert load_policy(name) is SHIPPED[name]
    assert isinstance(load_policy(name)(RequestFields(1, 2, 3, 4, 5, 6, 7, 8)), int)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def rank(request):\n  return (\n", "line 2"),
        ("import no_such_module\n", r"line 1: ModuleNotFoundError"),
        ("x = 1\ny = x / 0\n", "line 2: ZeroDivisionError"),
        ("def other(request):\n    return 1\n", "has no function 'rank'; it defines other"),
        ("rank = 3\n", "is not a function"),
        ("def rank():\n    return 1\n", "must take one argument"),
        ("def rank(a, b):\n    return 1\n", "must take one argument"),
        ("def rank(request):\n    return request.arrival / 2\n", "must return an integer, not float64"),
        ("def rank(request):\n    pass\n", "must return an integer"),
        ("def rank(request):\n    return request.colour\n", "(?s)does not compile.*colour"),
        ("def rank(request):\n    x = 1\n    return unknown(x)\n", "(?s)does not compile.*unknown"),
        ("def rank(request):\n    return {}[request.arrival].lower()\n", "does not compile"),
    ],
)
def test_what_is_wrong_with_a_policy_is_told(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as told:
        load_policy(f"{tmp_path}/mine.py:rank")
    assert "\n" not in str(told.value)
    assert "mine.py" in str(told.value)


@pytest.mark.parametrize("name", ["fastest", "mine.py", "mine:rank", "", ":rank"])
def test_unknown_policies_are_named(name: str) -> None:
    with pytest.raises(ConfigError, match=r"policy must be fcfs, priority, short-prompts, shortest-first or FILE\.py:FUNCTION"):
        load_policy(name)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_policy(f"{tmp_path}/none.py:rank")
