"""A process for jobs whose first forks fail. Its input: the error of these forks, their number, and the maximum CPU time of a
job, s.

A job is two numbers: seconds to wait, and seconds to compute."""

import errno
import json
import os
import sys
import time
from typing import Any

from blinkpy.dpu.fork_server.forked_jobs import ForkBudget, serve_jobs


def work(job: bytes) -> bytes:
    waits, computes = map(float, job.split())
    time.sleep(waits)
    while time.process_time() < computes:
        pass
    return b"done: " + job


if __name__ == "__main__":
    error, failing, cpu_s = json.load(sys.stdin)
    fork: Any = os.fork
    left = [None] * failing

    def fork_or_fail() -> int:
        if left:
            left.pop()
            raise OSError(getattr(errno, error), error)
        return int(fork())

    os.fork = fork_or_fail
    serve_jobs(int(sys.argv[1]), work, ForkBudget(cpu_s, 1 << 30, 0.0))
