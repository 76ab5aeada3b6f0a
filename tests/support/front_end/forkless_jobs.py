"""A process for jobs whose first forks fail. Its order: the error of these forks, and how many there are."""

import errno
import json
import os
import sys
from typing import Any

from blinkpy.dpu.fork_server.forked_jobs import ForkBudget, serve_jobs

if __name__ == "__main__":
    error, failing = json.load(sys.stdin)
    fork: Any = os.fork
    left = [None] * failing

    def fork_or_fail() -> int:
        if left:
            left.pop()
            raise OSError(getattr(errno, error), error)
        return int(fork())

    os.fork = fork_or_fail
    serve_jobs(int(sys.argv[1]), lambda job: b"done: " + job, ForkBudget(10.0, 1 << 30, 0.0))
