"""The engine's reports about faults of its policy."""

import logging
from pathlib import Path

import numpy as np
import pytest

from blinkpy.engine.flight_recorder import PERIOD_S, PolicyFaultLog
from blinkpy.queues.words import COUNTER, ENGINE_POLICY_FAULT
from blinkpy.scheduler.guarded_arithmetic import FAULT_SHIFT, describe_policy_fault
from blinkpy.scheduler.policies import fcfs, guarded_policy, read_policy
from blinkpy.scheduler.policy_trial import sample_requests


def test_faults_are_logged_with_their_line_at_a_bounded_rate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def rank(request):\n    return 1 // (request.pair - request.pair)\n")
    policy, words, times = read_policy(f"{file}:rank"), np.zeros(96, np.int64), [0.0]
    log = PolicyFaultLog("mine.py:rank", policy, words, lambda: times[0])
    log.look()
    words[COUNTER["policy_faults"]] = 1
    log.look()  # the count is published, but the fault is not yet
    assert not caplog.records
    faults = [0]
    guarded_policy(policy).function(sample_requests(1, 1)[0], faults, 0)
    words[ENGINE_POLICY_FAULT] = faults[0] >> FAULT_SHIFT
    with caplog.at_level(logging.WARNING):
        for times[0], count in ((0.0, 1), (1.0, 5), (PERIOD_S - 1, 2000), (PERIOD_S + 1, 2000), (3 * PERIOD_S, 2000)):
            words[COUNTER["policy_faults"]] = count
            log.look()
    line = f"policy mine.py:rank: {file}, line 2: division by zero; "
    assert [record.message for record in caplog.records] == [
        f"{line}a request gets the last rank",
        f"{line}1,999 requests get the last rank",
    ]


def test_a_shipped_policy_has_nothing_to_log(caplog: pytest.LogCaptureFixture) -> None:
    words = np.full(96, 7, np.int64)
    PolicyFaultLog("fcfs", fcfs, words).look()
    assert not caplog.records


def test_a_number_that_is_no_fault_is_refused() -> None:
    with pytest.raises(ValueError, match="not a fault"):
        describe_policy_fault(0, ())
