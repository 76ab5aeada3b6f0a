"""Policies: their order, the errors about invalid ones, and the identity of their compiled code."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from numba.core.errors import TypingError
from support.scheduler_cases import make_case, tokens

from blinkpy.config import ConfigError
from blinkpy.kernels import loop_kernels
from blinkpy.queues.words import ENGINE_POLICY_FAULT
from blinkpy.scheduler import policies
from blinkpy.scheduler.guarded_arithmetic import describe_policy_fault
from blinkpy.scheduler.host_scheduler import compiled_turn
from blinkpy.scheduler.policies import SHIPPED, RequestFields, fair, fcfs, guarded_policy, load_policy, read_policy
from blinkpy.scheduler.policy_key import policy_digest
from blinkpy.verify.policy_check.waiting_bounds import compile_for_gpu, compile_ranks

ROOT = Path(__file__).parents[3]
NAMES = "fair, fcfs, priority, short-prompts, shortest-first"


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        *(("fcfs", [0, 1, 2]), ("priority", [1, 2, 0]), ("shortest-first", [2, 0, 1]), ("short-prompts", [2, 0, 1])),
        ("{folder}/mine.py:longest", [1, 0, 2]),
    ],
)
def test_policies_decide_the_order(tmp_path: Path, policy: str, order: list[int]) -> None:
    (tmp_path / "mine.py").write_text("LIMIT = 100\n\ndef longest(request):\n    return LIMIT - request.prompt_length\n")
    case = make_case(load_policy(policy.format(folder=tmp_path)), pairs=1, rows=1)
    requests = [case.submit(tokens(n), 2, priority=p) for n, p in ((5, 9), (9, 1), (2, 1))]
    case.finish()
    assert [requests.index(request) for request in case.done] == order


def test_shipped_policies_load_without_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """No caller waits for their compilation only to check them."""
    monkeypatch.setattr(policies, "_check_language", None)
    assert {name: load_policy(name) for name in SHIPPED} == SHIPPED


def test_numba_compile_errors_name_the_policy_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the language accepts it by mistake, an engine must not start with it."""
    (tmp_path / "mine.py").write_text("\ndef rank(request):\n    return request.arrival\n")

    def refuse(arguments: object) -> None:
        raise TypingError("\n  no such form\n  of anything")

    monkeypatch.setattr(policies, "njit", lambda function: SimpleNamespace(compile=refuse))
    with pytest.raises(ConfigError, match=r"^policy .*mine.py:rank \(.*mine.py, line 2\) does not compile: .*no such form$"):
        load_policy(f"{tmp_path}/mine.py:rank")


def test_shipped_policies_by_hand(rng: np.random.Generator) -> None:
    for _ in range(20):
        r = RequestFields(*rng.integers(0, 1 << 40, len(RequestFields._fields)).tolist())
        ranks = {name: policy(r) for name, policy in SHIPPED.items()}
        assert ranks == {
            "fair": r.tenant_service + 100_000_000 * r.best_effort,
            "fcfs": r.arrival,
            "priority": r.priority,
            "short-prompts": r.arrival_us + 50 * r.prompt_length + 10_000_000 * r.best_effort,
            "shortest-first": r.prompt_length + r.max_tokens - r.generated,
        }


def test_a_policy_sees_the_tenant(tmp_path: Path, rng: np.random.Generator) -> None:
    (tmp_path / "mine.py").write_text("def rank(request):\n    return -request.tenant\n")
    case = make_case(load_policy(f"{tmp_path}/mine.py:rank"), pairs=1, rows=1)
    tenants = rng.permutation([0, 1, 2, 2**31 - 1]).tolist()
    requests = [case.submit(tokens(n), 2, tenant=tenant) for n, tenant in enumerate(tenants, 3)]
    case.finish()
    assert [tenants[requests.index(request)] for request in case.done] == [2**31 - 1, 2, 1, 0]


@pytest.mark.parametrize("lanes", [1, 3])
def test_requests_without_a_rank_go_last_and_the_latest_fault_is_published(lanes: int) -> None:
    """The oracle agrees after each turn. Requests after a fault get a rank again."""
    policy = read_policy(f"{ROOT}/tests/support/faulting_policy.py:rank")
    case = make_case(policy, lanes, pairs=1, rows=1, slots=9, intake_entries=8)
    requests = [case.submit(tokens(n), 4) for n in (3, 4, 7, 6, 5, 2)]
    case.turn()
    fault = int(case.views.engine[ENGINE_POLICY_FAULT])
    assert describe_policy_fault(fault, guarded_policy(policy).places)[0].line == 17
    requests += [case.submit(tokens(8, start), 4) for start in range(2, 5)]
    case.finish()
    assert [requests.index(request) for request in case.done] == [4, 6, 7, 8, 1, 0, 2, 3, 5]
    assert case.counter("policy_faults") == 4


def test_a_policy_is_what_was_loaded_whatever_becomes_of_its_file(tmp_path: Path) -> None:
    """Its source is kept: later compilations, in lanes or for a GPU, use the function's own text."""
    fields = RequestFields(*range(len(RequestFields._fields)))
    for became in ("def rank(request):\n    return 8\n", "nothing", ""):
        (tmp_path / "mine.py").write_text("def rank(request):\n    return 7\n")
        policy = read_policy(f"{tmp_path}/mine.py:rank")
        (tmp_path / "mine.py").write_text(became)
        assert guarded_policy(policy).function(fields, [0], 0) == policy(fields) == 7


def test_a_policy_may_call_functions_of_its_file(tmp_path: Path) -> None:
    """In Python, compiled for the CPU, and compiled for a GPU."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def twice(x):\n    return half(4 * x)\n\ndef half(x):\n    return x // 2\n\n"
        "def rank(request):\n    return twice(request.prompt_length) + request.pair\n"
    )
    policy = load_policy(f"{file}:rank")
    request = RequestFields(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 11)
    assert policy(request) == compile_ranks(policy)(np.array([request]))[0] == 14
    assert compile_for_gpu(policy).level == "fine"


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
        (
            "def rank(request):\n    return request.arrival / 2\n",
            "line 2.: rank uses a float; a policy computes with integers: scale it",
        ),
        ("def rank(request):\n    pass\n", "must return an integer"),
        ("def rank(request):\n    return request.colour\n", "line 2.: a request has no field colour; fields: arrival, .*, pair"),
        ("def rank(request):\n    return request.promt_length\n", "line 2.*did you mean prompt_length?"),
        ("def rank(request):\n    x = 1\n    return unknown(x)\n", "line 3.: unknown is not defined"),
        (
            "def rank(request):\n    if request.pair:\n        x = 1\n    return x\n",
            "line 4.: x may be read before it is assigned",
        ),
        ("def rank(request):\n    if request.pair:\n        return 1\n", "line 1.: .*but may end without `return`"),
        (
            "def rank(request):\n    x = 1\n    x = 0.5\n    return 1\n",
            "line 3.: rank uses a float",
        ),
        ("def rank(request):\n    return request.pair // 0.5\n", "line 2.: rank uses a float"),
        ("def rank(request):\n    return rank(request)\n", "line 2.: rank calls itself"),
        ("def rank(request):\n    return round(5)\n", r"line 2.: rank calls `round\(5\)`; a policy can call min, max,"),
        (
            "def rank(request):\n    for x in (1, 2):\n        pass\n    return 1\n",
            "line 2.: a `for` in a policy must loop over range",
        ),
        ("def rank(request):\n    f = lambda x: x\n    return f(1)\n", "line 2.: rank uses a function inside the function"),
        ("def rank(request):\n    return 1 << 62 if request else 'a'\n", "line 2.: the request can't be a condition"),
        ("def rank(request):\n    return 'a'\n", "line 2.: rank uses a string"),
        ("T = ((1, 2), (3, 4))\ndef rank(request):\n    return T[0]\n", "line 3.: T must be a one-dimensional tuple"),
        ("def rank(request):\n    return 1 << 64 | 99999999999999999999\n", "line 2.: 99999999999999999999 does not fit into 64"),
        ("def rank(request):\n    return {}[request.arrival].lower()\n", "line 2.: .*which policies do not support"),
    ],
)
def test_invalid_policies_are_refused_with_a_reason(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    with pytest.raises(ConfigError, match=message) as reported:
        load_policy(f"{tmp_path}/mine.py:rank")
    assert "\n" not in str(reported.value)
    assert "mine.py" in str(reported.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        *(
            (name, rf"policy must be one of {NAMES}, or FILE\.py:FUNCTION")
            for name in ("fastest", "mine.py", "mine:rank", "", ":rank")
        ),
        ("/nowhere/none.py:rank", "does not exist"),
    ],
)
def test_unknown_policies_are_named(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_policy(name)


# ---- the digest: equal in every process, different after any change of a value ----------------------------------------

POLICY = """
import numpy as np
from numba import int64, njit

import {helpers}

WEIGHT = 3
TABLE = np.array([1, 2, 4])

@njit
def half(x):
    return x // 2

def make(offset, scale=5):
    def rank(request):
        if request.pair in (1, 2):
            return int64(np.minimum(request.arrival, offset)) * scale
        return WEIGHT * half(request.prompt_length) + TABLE[request.pair & 1] + {helpers}.STEPS + offset
    return rank

rank = make(11)
"""

CHANGES = {
    "a global": ("WEIGHT = 3", "WEIGHT = 4"),
    "an array": ("[1, 2, 4]", "[1, 2, 5]"),
    "the type of an array": ("[1, 2, 4]", "[1, 2, 4.0]"),
    "a helper": ("x // 2", "x // 3"),
    "how a helper is compiled": ("@njit", "@njit(fastmath=True)"),
    "what a closure holds": ("make(11)", "make(12)"),
    "a default": ("scale=5", "scale=6"),
    "a constant of the code": ("(1, 2)", "(1, 3)"),
    "a function of a library": ("np.minimum", "np.maximum"),
}


def digest_of(folder: Path, helpers: str, change: tuple[str, str] = ("", "")) -> str | None:
    """The digest of the policy after one replacement in its file."""
    source = POLICY.format(helpers=helpers)
    assert change[0] in source
    file = folder / "policy.py"
    file.write_text(source.replace(*change) if change[0] else source)
    return policy_digest(read_policy(f"{file}:rank"))


@pytest.fixture
def helpers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of constants that policies import, with a unique name."""
    name = f"helpers_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text("STEPS = 7\n")
    monkeypatch.syspath_prepend(tmp_path)
    return name


@pytest.mark.parametrize("what", CHANGES)
def test_a_changed_helper_changes_the_digest(tmp_path: Path, helpers: str, what: str) -> None:
    before = digest_of(tmp_path, helpers)
    assert before is not None
    assert digest_of(tmp_path, helpers) == before
    assert digest_of(tmp_path, helpers, CHANGES[what]) not in (before, None)


def test_a_change_in_another_module_changes_the_digest(tmp_path: Path, helpers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest_of(tmp_path, helpers)
    monkeypatch.setattr(f"{helpers}.STEPS", 8)
    assert digest_of(tmp_path, helpers) not in (before, None)


def test_other_processes_find_the_same(tmp_path: Path, helpers: str) -> None:
    here = digest_of(tmp_path, helpers)
    code = f"""
import sys
sys.path[:0] = [{str(tmp_path)!r}, {str(ROOT)!r}]
from blinkpy.scheduler.policies import read_policy
from blinkpy.scheduler.policy_key import policy_digest
print(policy_digest(read_policy("{tmp_path}/policy.py:rank")))
"""
    there = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert there.stdout == f"{here}\n", there.stderr


def test_kept_code_is_of_the_very_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the host and on the GPU: after a change of its global, a policy gets neither the previous compiled code, nor byte code
    cached in the same second.

    Claim policies/cache: Cached compiled code belongs to exactly this policy, including its globals and
    helpers.
    """
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    file = tmp_path / "policy.py"
    host, gpu = set(), set()
    for weight in (3, 4, 3):
        file.write_text(f"WEIGHT = {weight}\n\ndef rank(request):\n    return WEIGHT * request.arrival\n")
        policy = read_policy(f"{file}:rank")
        host.add(compiled_turn(policy)._cache._key)
        gpu.add(loop_kernels._cached_at("turn", policy, SimpleNamespace(key="kind"), 8, (False, False), (9, 0)))
    assert (len(host), len(gpu), None in gpu) == (2, 2, False)


def test_kept_code_is_of_the_very_kernel_table_and_gpu() -> None:
    same = {"name": "turn", "policy": fcfs, "kind": SimpleNamespace(key="kind"), "words": 8, "parts": (False, False)}
    same["capability"] = (9, 0)
    others = {"name": "overlap", "policy": fair, "kind": SimpleNamespace(key="k"), "words": 9, "parts": (True, False)}
    others["capability"] = (10, 0)
    made = [loop_kernels._cached_at(**{**same, name: other}) for name, other in (*others.items(), ("words", 8), ("words", 8))]
    assert None not in made and made[-1] == made[-2] and len(set(made)) == len(others) + 1


def test_the_shipped_policies_differ() -> None:
    digests = {policy_digest(policy) for policy in SHIPPED.values()}
    assert len(digests - {None}) == len(SHIPPED)


def test_what_cannot_be_compared_has_no_digest(tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text("class Thing:\n    pass\n\nTHING = Thing()\n\ndef rank(request):\n    return THING.x\n")
    assert policy_digest(read_policy(f"{tmp_path / 'policy.py'}:rank")) is None
