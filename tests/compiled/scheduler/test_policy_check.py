"""blinkpy check finds each possible error of a policy, with its line, and measures correctly.

Supports claim policies/faults.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from blinkpy import cli
from blinkpy.config import ConfigError
from blinkpy.scheduler.policies import (
    BEST_EFFORT_US,
    SHORT_PROMPT_US,
    RequestFields,
    fcfs,
    read_policy,
    short_prompts,
    shortest_first,
)
from blinkpy.scheduler.policy_trial import (
    Failed,
    call_again,
    call_guarded,
    call_in_python,
    check_language,
    sample_requests,
    within,
)
from blinkpy.scheduler.policy_vetting import TRIAL, ComputeLimit, run_child, vetted_policy
from blinkpy.tool_options import CheckOptions
from blinkpy.verify.policy_check.check_child import waiting_findings
from blinkpy.verify.policy_check.check_workload import Workload, load_workload
from blinkpy.verify.policy_check.timed_server import ServerModel, ServerOutcome, simulate
from blinkpy.verify.policy_check.waiting_bounds import compare_compiled, compile_ranks, flood, overtaking
from blinkpy.verify.sim import simulation as storms

FOLDER_POLICY = "def rank(request):\n    return request.arrival_us // 1000 + 10 * request.prompt_length\n"


def policy_file(folder: Path, source: str) -> str:
    path = folder / "mine.py"
    path.write_text(source)
    return f"{path}:rank"


@pytest.mark.parametrize(
    ("body", "line", "what"),
    [
        ("    return {1: 2}[request.pair]", 2, "a dictionary"),
        ("    x = [1, 2]\n    return x[0]", 2, "a list"),
        ("    x = 1\n    return int(f'{x}')", 3, "a string"),
        ("    return request.pair / 2", 2, "uses a float; a policy computes with integers: scale it"),
        ("    return int(request.pair * 1.5)", 2, "uses a float; a policy computes with integers: scale it"),
        ("    return float(request.pair)", 2, "uses a float; a policy computes with integers: scale it"),
        ("    try:\n        return 1\n    except ValueError:\n        return 2", 2, "try"),
        ("    global seen\n    seen = 1\n    return seen", 2, "global"),
        ("    import math\n    return 1", 2, "an import"),
        ("    return helper(request)\n\ndef helper(request):\n    return len({1, 2})", 5, "a set"),
    ],
)
def test_python_that_a_device_has_no_word_for_is_named_with_its_line(tmp_path: Path, body: str, line: int, what: str) -> None:
    function = read_policy(policy_file(tmp_path, f"def rank(request):\n{body}\n"))
    errors = [finding for finding in check_language(function) if finding.level == "error"]
    assert [(errors[0].line, what in errors[0].text)] == [(line, True)]


def test_imports_and_hidden_state_are_warned_about_and_plain_arithmetic_is_not(tmp_path: Path) -> None:
    source = "import socket\nimport typing\nTABLE = [1]\ndef rank(request):\n    return TABLE[0] + request.pair * TABLE[-1]\n"
    found = check_language(read_policy(policy_file(tmp_path, source)))
    assert [(f.line, f.level) for f in found] == [(0, "warning"), (5, "warning")]
    assert "imports socket" in found[0].text and "reads TABLE, which can change" in found[1].text
    assert check_language(read_policy(policy_file(tmp_path, FOLDER_POLICY))) == []


@pytest.mark.parametrize(
    ("body", "line", "what"),
    [
        ("    n = 0\n    while n >= 0: n += 1\n    return n", 3, "did not return within"),
        ("    x = 1\n    return x // request.generated", 3, "ZeroDivisionError"),
        ("    if request.pair == 0:\n        return None\n    return 1", 3, "not an integer"),
        ("    return request.arrival / 2", 2, "not an integer"),
        ("    return request.priority < 0", 2, "bool"),
        ("    return request.arrival_us ** 3", 2, "64 bits"),
        ("    n = 0\n    for i in range(2000):\n        n += i\n    return n", 0, "a call runs up to 4,003 lines"),
    ],
)
def test_faults_of_calls_name_the_line_and_the_request(tmp_path: Path, body: str, line: int, what: str) -> None:
    function = read_policy(policy_file(tmp_path, f"def rank(request):\n{body}\n"))
    _, (finding,) = call_in_python(function, sample_requests(50, 1))
    assert (finding.line, what in finding.text) == (line, True)
    assert finding.level == ("error" if "request(" in finding.text else "warning")


def test_a_rank_that_remembers_earlier_calls_is_found(tmp_path: Path) -> None:
    body = "SEEN = []\ndef rank(request):\n    SEEN.append(1)\n    return len(SEEN) // 40\n"
    function, requests = read_policy(policy_file(tmp_path, body)), sample_requests(40, 1)
    ranks, _ = call_in_python(function, requests)
    assert [f.part for f in call_again(function, requests, ranks, "when computed again")] == ["determinism"]


def test_compiled_code_must_give_pythons_ranks(tmp_path: Path) -> None:
    requests = sample_requests(200, 2)
    for body, parts in (
        ("return request.prompt_length * 3 - request.arrival", []),
        ("return request.arrival_us * request.arrival_us * 4 // 4", ["determinism"]),  # exact in Python, 64 bits compiled
    ):
        function = read_policy(policy_file(tmp_path, f"def rank(request):\n    {body}\n"))
        ranks = [function(request) for request in requests]
        small = [rank if -(1 << 63) <= rank < 1 << 63 else 0 for rank in ranks]
        assert [f.part for f in compare_compiled(function, compile_ranks(function), requests, small)] == parts


def by_age(request):
    return request.arrival_us // 1000 + request.prompt_length


def latest_first(request):
    return -request.arrival


def after_preemption_last(request):
    return request.arrival + (1 << 60) * (request.preemptions > 0)


def test_the_overtaking_window() -> None:
    assert overtaking(compile_ranks(fcfs), 1).window_s == 0
    aged = overtaking(compile_ranks(by_age), 1)
    assert aged.bounded
    assert 0.8 * 32.768 < aged.window_s <= 32.768  # a millisecond for each token of the longest prompt, 32,768
    assert aged.waits.prompt_length > 1000 * (aged.window_s - 1) + aged.overtakes.prompt_length
    for preempted in (False, True):
        short = overtaking(compile_ranks(short_prompts), 1, preempted)
        assert short.bounded
        prompts_s = short.window_s - BEST_EFFORT_US / 1e6
        assert 0.6 * 32.768 < 1000 * prompts_s / SHORT_PROMPT_US <= 32.768
        assert (short.waits.best_effort, short.overtakes.best_effort) == (1, 0)
    for starving in (shortest_first, latest_first):
        assert not overtaking(compile_ranks(starving), 1).bounded
    assert overtaking(compile_ranks(after_preemption_last), 1).bounded
    assert not overtaking(compile_ranks(after_preemption_last), 1, preempted=True).bounded


def test_starvation_is_shown_on_the_scheduler() -> None:
    found = overtaking(compile_ranks(shortest_first), 3)
    shown = flood(shortest_first, found)
    assert not shown.started
    assert shown.overtaken_by > 1900
    fair = flood(fcfs, found)  # the same two kinds of requests
    assert fair.started
    assert fair.overtaken_by == 0
    assert fair.waited_s < shown.waited_s / 20


def test_findings_about_waiting_name_both_requests() -> None:
    (first, second) = waiting_findings(shortest_first, compile_ranks(shortest_first), CheckOptions(policy="shortest-first"))
    assert (first.level, second.level) == ("error", "error")
    assert first.text.count("request(") == 2
    assert "overtaken by 1,9" in first.text
    allowed = CheckOptions(policy="fcfs", allow_starvation=True)
    assert {f.level for f in waiting_findings(shortest_first, compile_ranks(shortest_first), allowed)} == {"warning"}
    assert {f.level for f in waiting_findings(fcfs, compile_ranks(fcfs), allowed)} == {"fine"}


def made_workload(n: int, rng: np.random.Generator) -> Workload:
    arrival, output = np.sort(rng.integers(0, 10**9, n)), rng.integers(1, 61, n)
    return Workload(arrival, rng.integers(1, 301, n), output, output + rng.integers(0, 21, n), np.zeros(n, np.int64))


def test_one_request_alone_takes_the_time_that_its_steps_take() -> None:
    one = Workload(*(np.array([value], np.int64) for value in (0, 250, 5, 9, 0)))
    outcome = simulate(fcfs, ServerModel(4, 100, page_size=16, num_pages=64, step_us=1000, row_us=7, token_us=3), one)
    assert outcome.steps == 3 + 4  # chunks of 100, 100 and 50 tokens, which give the first token; four more
    assert outcome.started.tolist() == [0]
    assert outcome.first_token.tolist() == [3 * 1_000_000 + 250 * 3000]
    assert outcome.ended.tolist() == [outcome.first_token[0] + 4 * 1_007_000]


def test_all_requests_of_a_crowded_server_end_and_fcfs_never_overtakes(rng: np.random.Generator) -> None:
    requests = made_workload(500, rng)
    tight = ServerModel(16, 64, page_size=16, num_pages=40, step_us=1000, row_us=10, token_us=10)
    fair, short = simulate(fcfs, tight, requests), simulate(shortest_first, tight, requests)
    for outcome in (fair, short):
        assert (requests.arrival_ns <= outcome.started).all()
        assert (outcome.started < outcome.first_token).all()
        assert (outcome.first_token <= outcome.ended).all()
        assert outcome.preemptions.sum() > 0, "the world is too roomy to prove anything"
    assert max(fair.overtakers()) == 0
    assert max(short.overtakers()) > 50
    assert np.median(short.waiting_s) < np.median(fair.waiting_s)


def test_overtakers_are_counted(rng: np.random.Generator) -> None:
    started = rng.permutation(1000)[:60]
    outcome = ServerOutcome(np.arange(60), started, started, started, started, 0)
    assert outcome.overtakers() == [int((started[i + 1 :] < started[i]).sum()) for i in range(60)]


def test_the_shipped_workload_has_the_lengths_of_conversations() -> None:
    azure = load_workload("azure")
    assert len(azure) == 2000
    assert 1000 < azure.prompt.mean() < 1300
    assert 200 < azure.output.mean() < 300
    assert (azure.max_tokens >= azure.output).all()
    scaled = azure.at_rate(8)
    assert scaled.arrival_ns[-1] == pytest.approx(1999 / 8 * 1e9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column arrival_s"),
        ("arrival_s,prompt_tokens\n0,1\n", "no column generated_tokens"),
        ("arrival_s,prompt_tokens,generated_tokens\n0,1,1\n", "fewer than two"),
        ("# x\narrival_s,prompt_tokens,generated_tokens\n0,1,1\n1,2\n", "line 4"),
        ("arrival_s,prompt_tokens,generated_tokens\n0,1,1\n1,2,x\n", "line 3: could not convert"),
        ("arrival_s,prompt_tokens,generated_tokens\n0,1,1\n1,0,2\n", "line 3: prompt_tokens must be 1 to"),
        ("arrival_s,prompt_tokens,generated_tokens,priority\n0,1,1,0\n1,1,2,1e12\n", "line 3: priority"),
        ("arrival_s,prompt_tokens,generated_tokens\n0,1,1\nnan,1,2\n", "line 3: arrival_s"),
    ],
)
def test_invalid_workloads_are_refused_with_a_reason(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "w.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_workload(str(tmp_path / "w.csv"))


def test_priorities_and_limits_of_a_workload_are_read(tmp_path: Path) -> None:
    head = "arrival_s, prompt_tokens, generated_tokens, max_tokens, priority, note"
    (tmp_path / "w.csv").write_text(f"{head}\n7.5,3,4,9,-2,x\n7,1,5,2,0,y\n")
    read = load_workload(str(tmp_path / "w.csv"))
    assert (read.arrival_ns.tolist(), read.prompt.tolist(), read.output.tolist()) == ([0, 500_000_000], [1, 3], [5, 4])
    assert (read.max_tokens.tolist(), read.priority.tolist()) == ([5, 9], [0, -2])


SOON = "import signal\nsignal.setitimer(signal.ITIMER_PROF, 0.3)\n"  # the time for a file ends early


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (f"{SOON}n = 0\nwhile True:\n    n += 1\n", r"mine.py, line [45]: a call did not return within 15 s of CPU time"),
        ("import os\nos._exit(3)\n", "the policy's process ended with exit code 3"),
        ("import sys\nsys.exit(3)\n", "mine.py, line 2: SystemExit"),
        ("import random\ndef rank(r):\n    return random.getrandbits(9)\n", r"line 3: rank calls `random.getrandbits\(9\)`"),
        (
            "import random\nSALT = random.getrandbits(60)\ndef rank(r):\n    return SALT\n",
            "defines a different policy at each load",
        ),
    ],
)
def test_serve_refuses_a_policy_that_misbehaves_and_never_hangs(tmp_path: Path, source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vetted_policy(policy_file(tmp_path, source))


def test_a_sane_policy_passes_the_quick_check(tmp_path: Path) -> None:
    assert vetted_policy("fcfs") is fcfs
    loaded = vetted_policy(policy_file(tmp_path, "print('hello')\n" + FOLDER_POLICY))
    assert loaded(sample_requests(1, 1)[0]) == by_age(sample_requests(1, 1)[0]) + 9 * sample_requests(1, 1)[0].prompt_length


def test_the_whole_check_of_a_good_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: plots can't be tried here")
    plot, reported = tmp_path / "plot.svg", tmp_path / "told.json"
    policy = read_policy(policy_file(tmp_path, FOLDER_POLICY))
    storms.simulate(1, 1, policy)  # earlier tests have compiled most of this code, which the child loads
    arguments = ["--requests", "200", "--storm", "20000", "--plot", str(plot), "--json", str(reported)]
    assert cli.main(["check", policy_file(tmp_path, FOLDER_POLICY), *arguments]) == 0
    out = capsys.readouterr().out
    assert "simulated worlds with injected faults: all invariants hold" in out
    assert "no errors found" in out
    assert [line.split()[:2] for line in out.splitlines() if line[2:9] in ("classes", "tenants")] == [
        *[["classes", "ok"]] * 3,
        ["tenants", "note"],
    ]
    for name in ("mine.py:rank", "fcfs", "short-prompts", "shortest-first"):
        assert f"\n  {name} " in out
    assert plot.read_text().startswith("<?xml")
    outcomes = json.loads(reported.read_text())["outcomes"]
    assert [len(outcome["waiting_s_samples"]) for outcome in outcomes] == [200] * 4


def test_an_error_gives_exit_code_1_and_its_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", policy_file(tmp_path, "def rank(request):\n    return 1 // request.generated\n")]) == 1
    out = capsys.readouterr().out
    assert "ERROR    line 2: ZeroDivisionError" in out
    assert "1 error found" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "policy must be one of fair, fcfs"),
        (["/nowhere/x.py:rank"], "does not exist"),
        (["fcfs", "--plot", "x.gif"], "plot must end in"),
        (["fcfs", "--json", "/nowhere/x.json"], "folder /nowhere does not exist"),
        (["fcfs", "--workload", "/nowhere/x.csv"], "can't be read"),
        (["fcfs", "--requests", "5"], "requests must be 10 to"),
        (["fcfs", "--num-pages", "20"], "increase num_pages"),
        ([], "POLICY"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", *arguments]) == 2
    err = [line for line in capsys.readouterr().err.splitlines() if line.startswith("blinkpy: error:")]
    assert len(err) == 1
    assert message in err[0]


def test_plain_python_that_sleeps_is_ended_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkpy.scheduler.policy_trial.IDLE_S", 0.2)
    name = policy_file(tmp_path, "import time\ntime.sleep(60)\n")
    with pytest.raises(Failed) as failed:
        within(tmp_path / "mine.py", lambda: read_policy(name))
    assert [(finding.line, finding.part) for finding in failed.value.args] == [(2, "calls")]


def test_divisors_that_may_be_0_are_warned_about(tmp_path: Path) -> None:
    fine = (
        "7",
        "STEP",
        "-STEP",
        "request.max_tokens",
        "(request.generated + 1)",
        "max(1, request.priority)",
        "(3 if x else 2)",
        "n",
    )
    doubtful = (
        "request.generated",
        "request.priority",
        "(request.pair - 1)",
        "x",
        "request.pair % 4",
        "abs(request.priority)",
        "m",
    )
    for divisor in (*fine, *doubtful):
        body = f"x = request.pair\n    n = 5\n    m = 5\n    m -= 5\n    return request.arrival // {divisor} % {divisor}\n"
        function = read_policy(policy_file(tmp_path, f"STEP = 1000\ndef rank(request):\n    {body}"))
        found = [(f.level, f.line) for f in check_language(function)]
        assert found == ([("warning", 7)] if divisor in doubtful else []), divisor


def test_rank_differences_of_compiled_code_are_reported(tmp_path: Path) -> None:
    """A product that only Python's integers can hold."""
    policy = read_policy(policy_file(tmp_path, "def rank(request):\n    x = request.arrival_us << 20\n    return x * x >> 60\n"))
    requests = [RequestFields(*(9,) * 11), RequestFields(*(1 << 40,) * 11)]
    (finding,) = call_guarded(policy, requests, [policy(request) for request in requests])
    assert (finding.level, finding.line) == ("error", 3)
    assert finding.text.startswith("the result does not fit into 64 bits for request(arrival=1099511627776")


def test_a_childs_own_clock_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is stopped, as on an overloaded machine, has used no time; waiting is different."""
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            limit = ComputeLimit(child.pid, 0.5)
            while not limit.reached():
                time.sleep(0.02)
            child.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # until then it computes
            limit = ComputeLimit(child.pid, 0.5)
            time.sleep(0.7)
            assert not limit.reached()
            monkeypatch.setattr("blinkpy.scheduler.policy_vetting.IDLE_S", 0.1)
            assert limit.reached()
        finally:
            child.kill()


def test_a_stage_that_computes_too_long_ends_even_in_c() -> None:
    code = "from blinkpy.scheduler.policy_trial import Trial; Trial('fcfs', print).stage('x', 0); sum(range(10**15))"
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == -signal.SIGXCPU


def test_a_silent_child_process_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("blinkpy.scheduler.policy_vetting.START_S", -1.0)  # it ends before it begins
    messages = list(run_child(TRIAL, {"policy": "fcfs"}))
    assert [message["finding"][0] for message in messages] == ["error"]
    assert "no end within the time" in messages[0]["finding"][2]
