"""The process that prepares large requests: it forks for each of them, so that none takes a worker's time or memory.

It reads its options and the model's folder from standard input, and gets jobs from a socket, one byte and an open file each: the
job's own socket. The fork reads kind, limits and body from that, up to the end, and answers with a pickled result or error, or
with nothing when it took too much time or memory. It ends at once when the other side closes the job's socket. The process ends
when its parent does, which closes the socket of jobs.
"""

import contextlib
import fcntl
import gc
import json
import os
import pickle
import resource
import select
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

from blinkpy.config import Config, options
from blinkpy.dpu.api_errors import ApiError
from blinkpy.dpu.http.preparation.request_jobs import JOBS, EngineLimits, RequestReader

NICENESS = 10  # behind the event loops on the same cores
PAGE = resource.getpagesize()


def pack_job(kind: str, limits: EngineLimits, body: bytes | bytearray) -> tuple[bytes, bytes | bytearray]:
    """What a job's socket gets: its first line, and the body."""
    return json.dumps([kind, *limits]).encode() + b"\n", body


def serve(control: socket.socket, reader: RequestReader) -> None:
    """Fork for each job until the parent is gone."""
    own = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    most = own + (reader.options.prepare_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the worker
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    gc.collect()
    gc.freeze()  # what forks share stays shared
    while True:
        order, files, _, _ = socket.recv_fds(control, 1, 1)
        if not order:
            return
        with socket.socket(fileno=files[0]) as job:
            if os.fork() == 0:
                try:
                    control.close()
                    os.nice(NICENESS)
                    _run(job, reader)
                finally:
                    os._exit(0)


def _run(job: socket.socket, reader: RequestReader) -> None:
    """One job, in its fork."""
    signal.setitimer(signal.ITIMER_PROF, reader.options.prepare_ms / 1000)  # its signal ends the fork
    with job.makefile("rb") as source:
        kind, *limits = json.loads(source.readline())
        body = source.read()
    # Until it has a result, the kernel ends this process when the other side closes: that is what SIGIO does.
    fcntl.fcntl(job, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(job, fcntl.F_SETFL, os.O_ASYNC)
    poll = select.poll()
    poll.register(job, 0)
    if poll.poll(0):
        return  # it closed before
    answer = pickle.dumps(_result(kind, body, EngineLimits(*limits), reader))
    fcntl.fcntl(job, fcntl.F_SETFL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    with contextlib.suppress(ConnectionError):
        job.sendall(answer)


def _result(kind: str, body: bytes, limits: EngineLimits, reader: RequestReader) -> tuple[str, Any]:
    try:
        return "result", JOBS[kind](reader, body, limits)
    except ApiError as error:
        if error.code == "invalid_json" and "memory" in error.message:  # as orjson says that it had not enough
            return "too much", None
        return "error", (error.status, error.message, error.param, error.code)
    except (MemoryError, RecursionError):
        return "too much", None
    except Exception:
        return "fault", traceback.format_exc()


if __name__ == "__main__":
    table, folder = json.load(sys.stdin)
    known = {item.name for _, item in options()}
    given = {name: value for name, value in table.items() if name in known}
    with socket.socket(fileno=int(sys.argv[1])) as parent:
        serve(parent, RequestReader(Config().with_options(given), Path(folder)))
