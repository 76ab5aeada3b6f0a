"""What a child process runs: `python -m blinkpy.serving.children ENTRY FD`, started by blinkpy.serving.processes.Child."""

import contextlib
import os
import signal
import sys
import threading
from multiprocessing.connection import Connection

from blinkpy.config import Config, ConfigError
from blinkpy.process_exit import exit_process
from blinkpy.serving.engine_process import engine_child
from blinkpy.serving.frontend_process import frontend_child
from blinkpy.serving.processes import Reporter

CHILD_ENTRIES = {"engine": engine_child, "frontend": frontend_child}


def child_main(entry: str, fd: int) -> int:
    """Read the config, follow the parent, and run the entry. Returns the exit code."""
    os.set_inheritable(fd, False)
    parent = Connection(fd)
    try:
        options = parent.recv()
    except (EOFError, OSError):
        return 1  # the parent died before it said anything
    threading.Thread(target=follow_parent, args=(parent,), name="parent", daemon=True).start()
    reporter = Reporter(parent)
    try:
        return CHILD_ENTRIES[entry](Config().with_options(options), reporter)
    except ConfigError as error:
        reporter.error(str(error))
        return 2
    except Exception as error:
        reporter.error(f"{type(error).__name__}: {error}")
        raise


def follow_parent(parent: Connection) -> None:
    """End this process in order when the parent is gone: its socket then reads as ended."""
    with contextlib.suppress(EOFError, OSError):
        parent.recv()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    exit_process(child_main(sys.argv[1], int(sys.argv[2])))
