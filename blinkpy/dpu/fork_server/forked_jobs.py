"""The process that forks for each job, so that no job uses the time or memory of another job or of a worker.

It receives jobs from a socket: for each, one byte and the job's own socket. A fork ends immediately if the other
side closes the job's socket. When the parent ends, the socket of jobs closes, and this process ends.

While no other fork runs, a fork has the normal priority for `brief_s` of CPU time, so that a short job is fast on a
busy machine. All other forks have a lower priority: even many of them do not slow an event loop down, and clients gain nothing
by disconnecting and asking again.
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
PIECE = 4096  # bytes per read of wake-ups
SPARE_NAME, JOB_NAME = b"blinkpy-spare", b"blinkpy-job"
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


class _Spare(NamedTuple):
    """A fork that waits for a job: its process id, and the socket that takes the job's."""

    pid: int
    socket: socket.socket


def serve_jobs(
    control_fd: int, work: Callable[[bytes], bytes], budget: ForkBudget, warm: Callable[[], object] | None = None
) -> None:
    """Fork for each job until the parent ends.

    work: computes a job's answer; all forks inherit its state.
    warm: called by a fork that is made ahead, so that a job waits neither for the fork nor for the first writes to shared memory;
        None: no such fork. There is at most one, made at the start and after a job when no other fork runs.
    """
    own = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    most = own + budget.memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # only the worker handles it
    gc.collect()
    gc.freeze()  # memory shared by forks stays shared
    gc.disable()  # a fork is short-lived, and garbage collection took a fifth of its time
    with socket.socket(fileno=control_fd) as control:
        _Server(control, work, budget, warm).serve()


class _Server:
    def __init__(
        self, control: socket.socket, work: Callable[[bytes], bytes], budget: ForkBudget, warm: Callable[[], object] | None
    ) -> None:
        self.control, self.work, self.budget, self.warm = control, work, budget, warm
        self.jobs: dict[int, socket.socket] = {}  # socket of each running fork, by process id
        self.spare: _Spare | None = None
        # Set at the start and after each job, so that a spare fork that dies is not replaced immediately.
        self.wants_spare = warm is not None
        self.woken, waker = socket.socketpair()
        self.woken.setblocking(False)
        waker.setblocking(False)
        self._waker = waker
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        poll = select.poll()
        for one in (self.control, self.woken):
            poll.register(one, select.POLLIN)
        while True:
            if self.wants_spare and not self.jobs:
                self._make_spare()
            ready = {descriptor for descriptor, _ in poll.poll()}
            if self.woken.fileno() in ready:
                with contextlib.suppress(BlockingIOError):
                    self.woken.recv(PIECE)
                self._reap()
            if self.control.fileno() in ready:
                order, files, _, _ = socket.recv_fds(self.control, 1, 1)
                if not order:
                    return
                self._begin(socket.socket(fileno=files[0]))
                self.wants_spare = self.warm is not None

    def _begin(self, job: socket.socket) -> None:
        """Give a job to the spare fork, or to a new one."""
        alone, spare = not self.jobs, self.spare
        if spare is not None:
            self.spare = None
            try:
                with spare.socket:
                    socket.send_fds(spare.socket, [b"\1" if alone else b"\0"], [job.fileno()])
                self.jobs[spare.pid] = job
                return
            except OSError:  # it has died
                pass
        try:
            pid = os.fork()
        except OSError:  # the machine lacks processes or memory: report the job as killed
            _end_killed(job)
            return
        if pid == 0:
            try:
                self._close_inherited()
                _run(job, self.work, self.budget, alone)
            finally:
                os._exit(0)
        self.jobs[pid] = job

    def _make_spare(self) -> None:
        """Fork ahead of the next job. If the machine lacks processes or memory, the next job forks."""
        self.wants_spare = False
        if self.spare is not None or self.warm is None:
            return
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.enter_context(theirs)
            stack.callback(ours.close)
            pid = os.fork()
            if pid == 0:
                try:
                    ours.close()
                    self._close_inherited()
                    self._wait_for_job(theirs)
                finally:
                    os._exit(0)
            theirs.close()
            stack.pop_all()
            self.spare = _Spare(pid, ours)

    def _wait_for_job(self, orders: socket.socket) -> None:
        """Run the spare fork. It ends when the server ends."""
        _name(SPARE_NAME)
        if self.warm is not None:
            self.warm()
        alone, files, _, _ = socket.recv_fds(orders, 1, 1)
        if alone:
            _name(JOB_NAME)
            _run(socket.socket(fileno=files[0]), self.work, self.budget, alone == b"\1")

    def _close_inherited(self) -> None:
        """In a fork, close the descriptors of the server and of other forks."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for one in (*self.jobs.values(), self.control, self.woken, self._waker):
            one.close()
        if self.spare is not None:
            self.spare.socket.close()

    def _reap(self) -> None:
        """Close the sockets of ended forks, and mark the forks that the kernel killed for lack of memory."""
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if self.spare is not None and pid == self.spare.pid:
                    self.spare.socket.close()
                    self.spare = None
                job = self.jobs.pop(pid, None)
                if job is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
                    _end_killed(job)
                elif job is not None:
                    job.close()


def _name(name: bytes) -> None:
    """Name this process, for operators and tests."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_bytes(name)


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
