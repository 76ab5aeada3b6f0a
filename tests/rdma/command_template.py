"""Importing this prepares the process that is forked for each command: all code is in memory, compiled and not, and caches are
filled."""

import os
import secrets
from importlib import import_module
from pathlib import Path

from rdma.forked_commands import MODULES
from support.commands import START_S
from support.waiting import wait_for

from blinkpy.config import Config
from blinkpy.dpu.grammar.compile_server import prepare
from blinkpy.dpu.tools.call_format import call_formats
from blinkpy.engine.engine import make_engine

for module in MODULES:
    import_module(module)
prepare()
call_formats()
if code := os.environ.get("XDG_CACHE_HOME"):  # in the virtual machine, the host compiles it meanwhile
    wait_for(Path(code).exists, START_S, f"compiled code in {code}")
_engine = make_engine(Config().with_options({"device": "null", "name": f"template-{secrets.token_hex(4)}", "max_model_len": 64}))
try:
    _engine.start()
finally:
    _engine.close()
