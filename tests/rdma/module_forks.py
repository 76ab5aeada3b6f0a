"""A stand-in for subprocess.Popen: `python -P -m MODULE ...` runs in a fork of this process, which has imported the module."""

import asyncio
import inspect
import logging
import os
import resource
import runpy
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

EXECUTED = [sys.executable, "-P", "-m"]
SIGNATURE = inspect.signature(vars(subprocess.Popen)["_execute_child"])


class ModuleFork(subprocess.Popen[bytes]):
    """Runs another command as subprocess.Popen does."""

    _close_pipe_fds: Callable[..., None]

    def _execute_child(self, *arguments: Any) -> None:
        given = SIGNATURE.bind(self, *arguments).arguments
        if list(given["args"][:3]) != EXECUTED:
            super()._execute_child(*arguments)
            return
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = os.fork()
        if self.pid == 0:
            _run(given["args"][3:], ends, given["pass_fds"], given["env"], given["start_new_session"])
        self._child_created = True
        self._close_pipe_fds(*(given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")))


def _run(
    words: Sequence[str], standard: Sequence[int], kept: Sequence[int], environment: Mapping[str, str], new_session: bool
) -> NoReturn:
    """The module's main function, with the descriptors, environment, session and signals of a new process. standard: descriptors
    that become standard input, output and error; -1: the same as before."""
    code = 1
    try:
        for caught in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if callable(signal.getsignal(caught)):
                signal.signal(caught, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        asyncio._set_running_loop(None)
        logging.getLogger().handlers.clear()  # whose threads are the parent's
        if new_session:
            os.setsid()
        for number, source in enumerate(standard):
            if source not in (-1, number):
                os.dup2(source, number)
        low = 3
        for descriptor in [*sorted(kept), resource.getrlimit(resource.RLIMIT_NOFILE)[0]]:
            os.closerange(low, descriptor)
            low = descriptor + 1
        os.environ.clear()
        os.environ.update(environment)
        sys.stdin = os.fdopen(0, closefd=False)  # this process's reader may have read ahead
        sys.argv = ["-m", *words[1:]]
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
