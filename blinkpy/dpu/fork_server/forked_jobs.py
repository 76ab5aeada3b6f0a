"""The process that forks for each job, so that no job uses the time or memory of another job or of a worker.

It receives jobs from a socket: one byte and the job's own socket each. A fork ends immediately if the other
side closes the job's socket. The end of the parent closes the socket of jobs, and so ends the process.

While no other fork runs, a fork has the normal priority for `brief_s` of CPU time, so that a short job is fast on a
busy machine. Many forks slow no event loop down, even if their clients leave and ask again.
"""

import contextlib
import fcntl
import gc
import os
import resource
import select
import signal
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

NICENESS = 10  # lower priority than event loops on the same cores
PAGE = resource.getpagesize()
KILLED = b"\0the kernel has killed this job\0"  # at the end of the output of a killed fork


class ForkBudget(NamedTuple):
    """Limits of each job.

    cpu_s: CPU time, s.
    memory_bytes: address space in addition to the process's own.
    brief_s: CPU time, s, after which a lone job gets the lower priority; concurrent jobs begin with that priority.
    """

    cpu_s: float
    memory_bytes: int
    brief_s: float


def serve_jobs(control_fd: int, work: Callable[[bytes], bytes], budget: ForkBudget) -> None:
    """Fork for each job until the parent ends. work: computes a job's answer; all forks inherit its state."""
    own = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    most = own + budget.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # only the worker handles it
    jobs: dict[int, socket.socket] = {}  # socket of each running fork, by process id
    signal.signal(signal.SIGCHLD, lambda *_: _reap(jobs))
    gc.collect()
    gc.freeze()  # memory shared by forks stays shared
    gc.disable()  # a fork is short-lived, and garbage collection took a fifth of its time
    with socket.socket(fileno=control_fd) as control:
        while True:
            order, files, _, _ = socket.recv_fds(control, 1, 1)
            if not order:
                return
            job = socket.socket(fileno=files[0])
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # until the fork is in the table
            try:
                pid = os.fork()
                if pid == 0:
                    try:
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                        for other in jobs.values():
                            other.close()
                        control.close()
                        _run(job, work, budget, alone=not jobs)
                    finally:
                        os._exit(0)
                jobs[pid] = job
            except OSError:  # no process or memory: report it as killed
                _end_killed(job)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _reap(jobs: dict[int, socket.socket]) -> None:
    """Close the sockets of ended forks, and mark the forks that the kernel killed for lack of memory."""
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            job = jobs.pop(pid, None)
            if job is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                _end_killed(job)
            elif job is not None:
                job.close()


def _end_killed(job: socket.socket) -> None:
    with job, contextlib.suppress(OSError):
        job.setblocking(False)
        job.sendall(KILLED)


def _run(job: socket.socket, work: Callable[[bytes], bytes], budget: ForkBudget, alone: bool) -> None:
    """Run one job in its fork. alone: no other fork runs."""
    if budget.brief_s and alone:
        signal.signal(signal.SIGVTALRM, lambda *_: os.nice(NICENESS))
        signal.setitimer(signal.ITIMER_VIRTUAL, budget.brief_s)
    else:
        os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_PROF, budget.cpu_s)  # its signal ends the fork
    with job.makefile("rb") as source:
        content = source.read()
    # Until it has an answer, SIGIO ends this process if the other side closes.
    fcntl.fcntl(job, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(job, fcntl.F_SETFL, os.O_ASYNC)
    poll = select.poll()
    poll.register(job, 0)
    if poll.poll(0):
        return  # already closed
    answer = work(content)
    fcntl.fcntl(job, fcntl.F_SETFL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    with contextlib.suppress(ConnectionError):
        job.sendall(answer)
