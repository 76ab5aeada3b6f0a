"""The process that forks for each job, so that none takes the time or memory of another one, or of a worker.

It gets jobs from a socket, one byte and an open file each: the job's own socket. The fork reads the job
from that, up to the end, and answers, or closes it without an answer when its budget did not suffice. It
ends immediately when the other side closes the job's socket. The process ends when its parent does, which
closes the socket of jobs.
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

NICENESS = 10  # behind the event loops on the same cores
PAGE = resource.getpagesize()
KILLED = b"\0the kernel has killed this job\0"  # at the end of the output of a killed fork


class ForkBudget(NamedTuple):
    """Of each job: CPU time in seconds; address space beyond that of the process itself, in bytes; and the CPU time after which
    it steps back behind others, in seconds."""

    cpu_s: float
    memory_bytes: int
    brief_s: float


def serve_jobs(control_fd: int, work: Callable[[bytes], bytes], budget: ForkBudget) -> None:
    """Fork for each job until the parent is gone. work: from a job to its answer; its state is shared by all
    forks.
    """
    own = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    most = own + budget.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it is for the worker
    jobs: dict[int, socket.socket] = {}  # of the forks that run, by process id
    signal.signal(signal.SIGCHLD, lambda *_: _reap(jobs))
    gc.collect()
    gc.freeze()  # memory shared by forks stays shared
    gc.disable()  # a fork ends before what it drops matters, and looking for that took a fifth of its time
    with socket.socket(fileno=control_fd) as control:
        while True:
            order, files, _, _ = socket.recv_fds(control, 1, 1)
            if not order:
                return
            job = socket.socket(fileno=files[0])
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # its end comes after its entry in the table
            try:
                pid = os.fork()
                if pid == 0:
                    try:
                        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
                        for other in jobs.values():
                            other.close()
                        control.close()
                        _run(job, work, budget)
                    finally:
                        os._exit(0)
                jobs[pid] = job
            except OSError:  # no process or no memory for one: as if it had been killed
                _end_killed(job)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})


def _reap(jobs: dict[int, socket.socket]) -> None:
    """Close the sockets of forks that have ended, and mark those that were killed: the kernel does so when memory runs out."""
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


def _run(job: socket.socket, work: Callable[[bytes], bytes], budget: ForkBudget) -> None:
    """One job, in its fork."""
    if budget.brief_s:  # CPU time, not wall time: small jobs run immediately even on a busy machine
        signal.signal(signal.SIGVTALRM, lambda *_: os.nice(NICENESS))
        signal.setitimer(signal.ITIMER_VIRTUAL, budget.brief_s)
    else:
        os.nice(NICENESS)
    signal.setitimer(signal.ITIMER_PROF, budget.cpu_s)  # its signal ends the fork
    with job.makefile("rb") as source:
        content = source.read()
    # Until it has an answer, the kernel ends this process when the other side closes: that is what SIGIO does.
    fcntl.fcntl(job, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(job, fcntl.F_SETFL, os.O_ASYNC)
    poll = select.poll()
    poll.register(job, 0)
    if poll.poll(0):
        return  # it closed before
    answer = work(content)
    fcntl.fcntl(job, fcntl.F_SETFL, 0)
    signal.setitimer(signal.ITIMER_PROF, 0)
    with contextlib.suppress(ConnectionError):
        job.sendall(answer)
