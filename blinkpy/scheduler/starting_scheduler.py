"""A scheduler that serves while it is being compiled.

Compiling the scheduler takes some 20 s if the sources have changed. Until its code is in the cache
(blinkpy/device/compile_cache.py), the source is interpreted, on the same memory and with bit-identical state. A child process
compiles, so that compilation does not take the GIL from turns; a thread then loads the code.
"""

from __future__ import annotations

import gc
import logging
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from blinkpy.device.compile_cache import cache_folder, is_kept
from blinkpy.device.expect import describe_fault
from blinkpy.kv.invariants.check_state import check_scratch, check_state, compiled_check
from blinkpy.kv.limits import Limits
from blinkpy.kv.state import NoFaultWord, State
from blinkpy.process_exit import describe_exit
from blinkpy.queues.layout import EngineViews
from blinkpy.scheduler.host_scheduler import Scheduler, compiled_turn, table_kinds
from blinkpy.scheduler.policies import SHIPPED, Policy

logger = logging.getLogger(__name__)

PACKAGE_ROOT = Path(__file__).parents[2]
COMPILE_S = 600.0  # time limit of the child; beyond it, this process compiles
END_S = 5.0  # time for the thread to end
NOTICE = "the scheduler is interpreted until it is compiled (about 20 s on an idle machine); tokens come slowly until then"


class StartingScheduler(Scheduler):
    """Interprets turns until the compiled scheduler is loaded, then runs the compiled scheduler.

    compiler: the process that fills the cache.
    """

    def __init__(self, limits: Limits, state: State, policy: Policy, compiler: subprocess.Popen[bytes]) -> None:
        super().__init__(limits, state, policy, mode="python")
        self._policy, self._compiler, self._began = policy, compiler, time.monotonic()
        self._views: EngineViews | None = None
        self._loaded: Scheduler | BaseException | None = None
        self._closed = False
        self._loader = threading.Thread(target=self._load, name="compiled-scheduler", daemon=True)
        self._loader.start()
        logger.info(NOTICE)

    def attach(self, queues: EngineViews) -> None:
        self._views = queues
        super().attach(queues)

    def turn(self, now_ns: int) -> int:
        """See Scheduler.turn. Raises the exceptions of the compilation."""
        if self._loaded is not None:
            self._swap()
        return super().turn(now_ns)

    def check(self) -> list[str]:
        if self.mode == "njit":
            return super().check()
        fault = 0 if isinstance(self.state.fault, NoFaultWord) else int(self.state.fault[0])
        references, seen = check_scratch(self.limits)
        fault = fault or check_state(self.limits, self.state_argument, memoryview(references), memoryview(seen))
        return [describe_fault(fault)] if fault else []

    def close(self) -> None:
        """End the compiler. A second call has no effect."""
        self._closed = True
        self._compiler.kill()
        self._loader.join(END_S)  # the thread outlives this only while it compiles; then it ends together with the process

    def _load(self) -> None:
        """In a thread: wait for the compiler, then load its code, or compile in this process if it failed."""
        try:
            kinds = table_kinds(self.limits, self.state)
            try:
                self._compiler.communicate(pickle.dumps((_name_of(self._policy), kinds)), timeout=COMPILE_S)
            except (OSError, subprocess.TimeoutExpired):
                self._compiler.kill()
                self._compiler.wait()
            if self._closed:
                return
            if self._compiler.returncode:
                why = describe_exit(self._compiler.returncode)
                logger.warning("the process that compiles the scheduler %s; the engine compiles it now", why)
            loaded = Scheduler(self.limits, self.state, self._policy)
            loaded.load_check()
            self._loaded = loaded
        except BaseException as error:  # the next turn raises it
            self._loaded = error

    def _swap(self) -> None:
        loaded, self._loaded = self._loaded, None
        if isinstance(loaded, BaseException):
            raise loaded
        assert loaded is not None
        if self._views is not None:
            loaded.attach(self._views)
        self.__dict__.update(loaded.__dict__)  # the same limits and state, and the code that runs on them
        logger.info("the compiled scheduler took over after %.1f s", time.monotonic() - self._began)


def start_scheduler(limits: Limits, state: State, policy: Policy) -> Scheduler:
    """The compiled scheduler if its code is in the cache, or else a StartingScheduler.

    With a user's policy, or without a cache, this process compiles before it returns.
    """
    turn_kinds, _ = table_kinds(limits, state)
    known = _name_of(policy)
    if not known or cache_folder() is None or is_kept(compiled_turn(policy), turn_kinds):
        return Scheduler(limits, state, policy)
    path = os.pathsep.join(filter(None, [str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-P", "-m", __name__]
    # A new session, so that a terminal's Ctrl-C does not reach the child.
    compiler = subprocess.Popen(command, stdin=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path}, start_new_session=True)
    return StartingScheduler(limits, state, policy, compiler)


def _name_of(policy: Policy) -> str:
    """The name of a shipped policy; "" for any other policy."""
    return next((name for name, shipped in SHIPPED.items() if shipped is policy), "")


def main() -> None:
    """The child: compile for the types on standard input, into the cache."""
    from blinkpy.device.compile_cache import compiled_for

    gc.disable()  # Numba makes millions of objects; collecting them would take a fifth of this short-lived process's time
    signal.alarm(int(COMPILE_S))  # ends the child even if the engine was killed
    name, (turn_kinds, check_kinds) = pickle.loads(sys.stdin.buffer.read())
    compiled_for(compiled_turn(SHIPPED[name]), turn_kinds)
    compiled_check(check_kinds)


if __name__ == "__main__":
    main()
