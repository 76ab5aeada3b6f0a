"""The prediction of latencies: the work of a step is counted correctly, and costs what the model states."""

import argparse
from dataclasses import dataclass, field

import numpy as np
import pytest

from benchmarks.tuning.capacity import Choice, StepTimes, predict, requests_of
from blinkpy.scheduler.policies import fcfs
from blinkpy.verify.policy_check.timed_server import ServerModel, TimedSimulation, Work, serve

DECODE = ((1, 3.0), (8, 4.0), (64, 5.0))
OPTIONS = argparse.Namespace(max_num_seqs=64, page_size=16, num_pages=4096)


@dataclass(frozen=True)
class Watched(ServerModel):
    """Records the work of each step."""

    seen: list[Work] = field(default_factory=list)

    def step_ns(self, work: Work) -> int:
        self.seen.append(work)
        return 1_000_000


def test_the_work_of_steps_adds_up_to_that_of_the_requests(rng: np.random.Generator) -> None:
    """Half of the requests arrive together: more than 300 tokens wait while the first of them decode."""
    arrivals = np.sort(np.append(rng.uniform(0, 0.2, 20), np.full(20, 0.1)))
    requests = requests_of(arrivals, np.append(rng.integers(1, 300, 20), rng.integers(100, 300, 20)), rng.integers(2, 40, 40))
    machine = Watched(
        16, 200, page_size=16, num_pages=4096, step_us=0, row_us=0, token_us=0, mixed_step_tokens=64, burst_tokens=300
    )
    serve(TimedSimulation(fcfs, machine, requests))
    prompts, outputs = requests.prompt.tolist(), requests.output.tolist()
    assert sum(work.prefill + work.decoding for work in machine.seen) == sum(prompts) + sum(outputs) - 40
    attended = sum(work.prefill_context + work.decode_context for work in machine.seen)
    assert attended == sum(sum(range(1, n + m)) for n, m in zip(prompts, outputs, strict=True))
    sizes = {work.prefill + work.decoding for work in machine.seen if work.decoding and work.prefill}
    assert max(sizes) == 200, "no burst in this world"
    assert 64 in sizes, "no step of the smaller size in this world"
    assert all(work.prefill + work.decoding <= work.tokens for work in machine.seen)


def test_a_request_alone_takes_the_time_of_its_steps() -> None:
    times = StepTimes(DECODE, context_ns=1000.0, weights_ms=2.0, overhead_ms=1.0, prefill_tokens_s=100_000.0, attention_ns=10.0)
    found = predict(Choice("fcfs", 256), times, requests_of(np.zeros(1), np.array([300]), np.array([3])), OPTIONS)
    chunks = [np.cbrt(8 + (1 + bucket / 100) ** 3) for bucket in (256, 64)]  # 256 tokens, and 44 in the smallest mixed step
    prefill = sum(chunks) + 1e-5 * 300 * 301 / 2
    assert found["ttft_p50"] == pytest.approx(prefill + 1.2, rel=1e-3)
    decode = [3.0 + 0.001 * context for context in (301, 302)]
    assert found["tpot_p50"] == pytest.approx(np.mean(decode), rel=1e-3)
    assert found["itl_p99"] == pytest.approx(decode[1], rel=1e-3)
