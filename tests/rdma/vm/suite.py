"""Run tests/rdma in the virtual machine: `make test-rdma`.

    PYTHONPATH=tests python -m rdma.vm.suite [arguments of pytest | seeded-bugs]

The first run builds the machine (image.py). Host code for it is compiled (compile.py) while it starts; later runs load both.
Without arguments the tests run in two machines at the same time.
"""

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rdma.vm import boot, compile
from rdma.vm.image import ensure_image
from support.debian_packages import SetupError

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build" / "rdma"  # of compiled host code
ARCHIVE = ROOT / "build" / "rdma.tar"  # of the folders that the guest has in memory
LIMIT_S = 4000  # for a slow machine
# Tests wait half of the time, so two machines run side by side. The second begins with tests that need no compiled code.
GROUPS = {
    "serving": [f"tests/rdma/{name}.py" for name in ("test_serving", "test_load")],
    "transport": [f"tests/rdma/{name}.py" for name in ("test_transport", "test_memory", "test_ordering", "test_fleet_moves")],
}
SEEDED_BUGS = "seeded-bugs"  # instead of tests: rdma.seeded_bugs
HANDED, COPIED = "compiled", Path("/run/cache")  # compiled code, in /guest_out and in the guest's memory

# The guest opens a file of the host in 20 ms, and a file in memory in half a millisecond. Each front end reads the package three
# times. The host hands compiled code over when it is complete; engines wait for the copy.
IN_MEMORY = "blinkpy", "tests"
COPY = f"""
mkdir /run/copies && tar -xf {shlex.quote(str(ARCHIVE))} -C /run/copies || exit
for folder in {" ".join(IN_MEMORY)}; do mount --bind /run/copies/$folder $folder || exit; done
(until [ -e /guest_out/$0 ]; do sleep 1; done; cp -r /guest_out/$0 /run/partial && mv /run/partial /run/cache) &
exec "$@"
"""


def main(arguments: list[str]) -> int:
    try:
        prepare()
    except SetupError as error:
        print(f"make test-rdma: {error}", file=sys.stderr)
        return 1
    if arguments[:1] == [SEEDED_BUGS]:  # their tests need no compiled code
        return run_inside([sys.executable, "-m", "rdma.seeded_bugs", *arguments[1:]])
    groups = {"": arguments} if arguments else GROUPS
    with contextlib.ExitStack() as stack, ThreadPoolExecutor() as pool:
        folders = [Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rdma-vm-"))) for _ in groups]
        running = [
            pool.submit(run_tests, tests, f"{name:<10}" if name else "", folder)
            for (name, tests), folder in zip(groups.items(), folders, strict=True)
        ]
        compile_host_code()  # while the machines start
        for folder in folders:
            hand_over(folder)
        codes = [each.result() for each in running]
    print(f"make test-rdma: {'passed' if not any(codes) else 'FAILED'}")
    return max(codes)


def prepare() -> None:
    """Build the image, and the environment of programs in the guest. Raises SetupError."""
    ensure_image()
    CACHE.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    os.environ.update({"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    os.chdir(ROOT)
    pack_folders()


def pack_folders() -> None:
    """Compile byte code, and pack the folders that the guest has in memory."""
    sources = [str(ROOT / name) for name in ("blinkpy", "benchmarks", "tests/rdma", "tests/support")]
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j2", *sources], check=True)
    with tarfile.open(ARCHIVE, "w") as made:
        for name in IN_MEMORY:
            made.add(ROOT / name, name)


def compile_host_code() -> None:
    """Compile host code: files that the guest writes are lost."""
    subprocess.run([sys.executable, "-m", "rdma.vm.compile", str(CACHE)], stdout=subprocess.DEVNULL, check=True)


def hand_over(folder: Path) -> None:
    """Give the compiled code to the machine with this folder as its /guest_out."""
    partial = folder / f"{HANDED}.partial"
    shutil.copytree(CACHE, partial)
    partial.rename(folder / HANDED)


def run_tests(arguments: list[str], title: str, out: Path) -> int:
    """pytest in its own machine, which waits for hand_over(out) when it starts an engine; its exit code."""
    pytest = [sys.executable, "-m", "pytest", "-p", "timeout", "-p", "no:cacheprovider", "--color=no", "--durations=8"]
    return run_inside([*pytest, *arguments], title, out=out)


def run_inside(program: list[str], title: str = "", limit_s: float = LIMIT_S, out: Path | None = None) -> int:
    """A program in its own machine, with the settings of this run; its exit code. Parameters: see boot.run()."""
    inside = [f"{name}={value}" for name, value in compile.environment(COPIED).items()]
    # With the emulator's AVX2, np.argsort of 14 numbers or more is wrong.
    inside.append("NPY_DISABLE_CPU_FEATURES=X86_V3 X86_V4")
    inside += [
        f"{name}={os.environ[name]}"
        for name in ("BLINKPY_SEED", "BLINKPY_PROFILE", "BLINKPY_ORDER_TRIES")
        if os.environ.get(name)
    ]
    inside.append("COLUMNS=300")  # pytest's summary shows why a test failed, up to this width
    inside.append("PYTEST_DISABLE_PLUGIN_AUTOLOAD=1")  # Hypothesis and others, whose import takes seconds
    command = ["bash", "-c", COPY, HANDED, "env", "OMP_NUM_THREADS=1", *inside, *program]
    limit_s += int(os.environ.get("BLINKPY_ORDER_TRIES") or 0) / 40
    return boot.run(command, limit_s, title, out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
