"""The main module of a child process: `python -m blinkpy.serving.children ENTRY FD`, started by
blinkpy.processes.Child.
"""

import sys
from functools import partial
from importlib import import_module

from blinkpy.dpu.watch.log_output import end_process
from blinkpy.processes import Entry, child_main, collect_rarely

ENTRIES = {"engine": "engine_process", "frontend": "frontend_process"}  # module of NAME_child


def load_entry(name: str) -> Entry:
    """The entry with a name. Imports only its module, which makes the start of a child shorter."""
    entry: Entry = getattr(import_module(f"blinkpy.serving.{ENTRIES[name]}"), f"{name}_child")
    return entry


if __name__ == "__main__":
    collect_rarely()
    name = sys.argv[1]
    end_process(partial(child_main, {name: load_entry(name)}, name, int(sys.argv[2])))
