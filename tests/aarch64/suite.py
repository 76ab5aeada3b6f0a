"""The front end on aarch64, under user-mode emulation: `make test-aarch64`.

    PYTHONPATH=tests python -m aarch64.suite [arguments of pytest, which runs in emulation]

First the front end's own tests run on an emulated Python with the base install (machine.py). Then an engine on this machine's
processor serves a native and an emulated front end over shared memory.
"""

import os
import subprocess
import sys
from pathlib import Path

from aarch64.machine import ensure_machine
from support.debian_packages import SetupError

ROOT = Path(__file__).parents[2]
LIMIT_S = 1800
PYTHON_HERE = "BLINKPY_AARCH64_PYTHON"  # for tests on this machine: the emulated Python

# Tests of the front end's code that need neither torch nor Numba.
FRONT_END = {
    "link": ("queue_layout", "queue_pair", "connect_shm", "page_hash", "handshake", "rdma_posting"),
    "front_end": ("request_fields", "chat_fields", "detokenizer", "frontend_http", "frontend_logprobs"),
    "project": ("doctor",),
}
ON_FRONT_END = ["tests/aarch64/test_base_install.py"]
ON_FRONT_END += [f"tests/plain/{folder}/test_{name}.py" for folder, names in FRONT_END.items() for name in names]
BOTH_SIDES = ["tests/aarch64/test_same_answers.py"]


def main(arguments: list[str]) -> int:
    try:
        python = ensure_machine()
    except SetupError as error:
        print(f"make test-aarch64: {error}", file=sys.stderr)
        return 1
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "--color=no", "--durations=5"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", PYTHON_HERE: str(python)}
    runs = [[str(python), *pytest, *(arguments or ON_FRONT_END)]]
    if not arguments:
        runs.append([sys.executable, *pytest, *BOTH_SIDES])
    codes = [subprocess.run(command, cwd=ROOT, env=environment, timeout=LIMIT_S).returncode for command in runs]
    print(f"make test-aarch64: {'passed' if not any(codes) else 'FAILED'}")
    return max(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
