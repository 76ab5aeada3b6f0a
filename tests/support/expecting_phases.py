"""The scheduler's phases, and the number of conditions that each expects."""

import re

from blinkpy.sources import PACKAGE

_PHASES = sorted(path for path in (PACKAGE / "scheduler" / "phases").glob("*.py") if path.name != "__init__.py")
_PHASES.append(PACKAGE / "scheduler" / "suspension.py")
EXPECTING = {path: len(re.findall(r"^ +expect\(state, .*, F\.[A-Z_]+\)$", path.read_text(), re.M)) for path in _PHASES}
