"""Run tests/rdma in the virtual machine: `make test-rdma`.

    PYTHONPATH=tests python -m rdma.vm.suite [arguments of pytest]

The first run builds the machine (image.py) and compiles host code for it (compile.py), some two minutes; later ones load both.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rdma.vm import boot, compile
from rdma.vm.image import ImageError, ensure_image

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build" / "rdma"  # of compiled host code
LIMIT_S = 1500  # twice what it takes on a busy machine
# A copy in memory: what the guest reads from the host's files is slow.
COPY = 'cp -r "$0" /run/cache && exec "$@"'


def main(arguments: list[str]) -> int:
    try:
        ensure_image()
    except ImageError as error:
        print(f"make test-rdma: {error}", file=sys.stderr)
        return 1
    CACHE.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    os.environ.update({"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    subprocess.run(
        [sys.executable, "-m", "rdma.vm.compile", str(CACHE)],
        env=os.environ | compile.environment(CACHE),
        stdout=subprocess.DEVNULL,
        check=True,
    )
    inside = [f"{name}={value}" for name, value in compile.environment(Path("/run/cache")).items()]
    settings = [f"{name}={os.environ[name]}" for name in ("BLINKPY_SEED", "BLINKPY_ORDER_TRIES") if os.environ.get(name)]
    tests = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--color=no",
        "--durations=8",
        *(arguments or ["tests/rdma"]),
    ]
    command = ["bash", "-c", COPY, str(CACHE), "env", "OMP_NUM_THREADS=1", *inside, *settings, *tests]
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as out:
        limit_s = LIMIT_S + int(os.environ.get("BLINKPY_ORDER_TRIES", "0")) / 200
        return boot.run(command, Path(out).resolve(), limit_s, smp=2, memory=3072)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
