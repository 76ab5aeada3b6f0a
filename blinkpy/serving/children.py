"""The main module of a child process: `python -m blinkpy.serving.children ENTRY FD`, started by
blinkpy.processes.Child.
"""

import sys
from functools import partial

from blinkpy.dpu.watch.log_output import end_process
from blinkpy.processes import Entry, child_main
from blinkpy.serving.engine_process import engine_child
from blinkpy.serving.frontend_process import frontend_child

CHILD_ENTRIES: dict[str, Entry] = {"engine": engine_child, "frontend": frontend_child}

if __name__ == "__main__":
    end_process(partial(child_main, CHILD_ENTRIES, sys.argv[1], int(sys.argv[2])))
