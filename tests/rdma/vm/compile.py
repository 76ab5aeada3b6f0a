"""Compile the host code of the guest's engines outside of the emulation, in which it would take minutes.

    PYTHONPATH=tests python -m rdma.vm.compile FOLDER

Code for "generic" processors runs in both places; the guest finds it with the same environment.
"""

import os
import secrets
import sys
from pathlib import Path

from rdma.limits import NIGHTLY


def environment(folder: Path) -> dict[str, str]:
    """The environment of processes that compile into the folder, or load from it."""
    return {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "", "XDG_CACHE_HOME": str(folder.resolve())}


def main(folder: Path) -> None:
    os.environ.update(environment(folder))  # before Numba is imported
    from blinkpy.config import Config
    from blinkpy.engine.engine import make_engine

    for device in ("null", "cpu") if NIGHTLY else ("null",):  # test_serving's
        options = {"device": device, "threads": 1, "name": f"compile-{secrets.token_hex(4)}", "max_model_len": 64}
        engine = make_engine(Config().with_options(options))
        try:
            engine.start()
        finally:
            engine.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
