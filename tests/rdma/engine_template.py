"""Importing this starts and ends an engine, so that the process has all its code in memory, compiled and not."""

import secrets

from blinkpy.config import Config
from blinkpy.engine.engine import make_engine

_engine = make_engine(Config().with_options({"device": "null", "name": f"template-{secrets.token_hex(4)}", "max_model_len": 64}))
try:
    _engine.start()
finally:
    _engine.close()
