"""Run tests/rdma in the virtual machine: `make test-rdma`.

    PYTHONPATH=tests python -m rdma.vm.suite [arguments of pytest | seeded-bugs]

The first run builds the machine (image.py) and compiles host code for it (compile.py), some two minutes; later ones load both.
Without arguments the tests run in two machines at the same time.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rdma.vm import boot, compile
from rdma.vm.image import ensure_image
from support.debian_packages import SetupError

ROOT = Path(__file__).parents[3]
CACHE = ROOT / "build" / "rdma"  # of compiled host code
LIMIT_S = 4000  # for a slow machine
# Tests wait half of the time, so two machines run side by side. By day, both groups take about the same time.
SERVING = [f"tests/rdma/test_{name}.py" for name in ("serving", "memory")]
GROUPS = {"serving": SERVING, "transport": ["tests/rdma", *(f"--ignore={path}" for path in SERVING)]}
SEEDED_BUGS = "seeded-bugs"  # instead of tests: rdma.seeded_bugs
# A copy in memory: the guest reads the host's files slowly.
COPY = 'cp -r "$0" /run/cache && exec "$@"'


def main(arguments: list[str]) -> int:
    try:
        prepare()
    except SetupError as error:
        print(f"make test-rdma: {error}", file=sys.stderr)
        return 1
    if arguments[:1] == [SEEDED_BUGS]:  # their tests need no compiled code
        return run_inside([sys.executable, "-m", "rdma.seeded_bugs", *arguments[1:]])
    compile_host_code()
    if arguments:
        return run_tests(arguments)
    with ThreadPoolExecutor() as pool:
        codes = list(pool.map(run_tests, GROUPS.values(), (f"{name:<10}" for name in GROUPS)))
    print(f"make test-rdma: {'passed' if not any(codes) else 'FAILED'}")
    return max(codes)


def prepare() -> None:
    """Build the image, and the environment of programs in the guest. Raises SetupError."""
    ensure_image()
    CACHE.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    os.environ.update({"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})
    os.chdir(ROOT)


def compile_host_code() -> None:
    """Compile host code, and byte code, too: files that the guest writes are lost."""
    sources = [str(ROOT / name) for name in ("blinkpy", "benchmarks", "tests/rdma", "tests/support")]
    subprocess.run([sys.executable, "-m", "compileall", "-qq", "-j2", *sources], check=True)
    subprocess.run([sys.executable, "-m", "rdma.vm.compile", str(CACHE)], stdout=subprocess.DEVNULL, check=True)


def run_tests(arguments: list[str], title: str = "") -> int:
    """pytest in its own machine; its exit code."""
    pytest = [sys.executable, "-m", "pytest", "-p", "timeout", "-p", "no:cacheprovider", "--color=no", "--durations=8"]
    return run_inside([*pytest, *arguments], title)


def run_inside(program: list[str], title: str = "", limit_s: float = LIMIT_S, out: Path | None = None) -> int:
    """A program in its own machine, with the compiled code and the settings of this run; its exit code. Other parameters: see
    boot.run().
    """
    inside = [f"{name}={value}" for name, value in compile.environment(Path("/run/cache")).items()]
    # With the emulator's AVX2, np.argsort of 14 numbers or more is wrong.
    inside.append("NPY_DISABLE_CPU_FEATURES=X86_V3 X86_V4")
    inside += [
        f"{name}={os.environ[name]}"
        for name in ("BLINKPY_SEED", "BLINKPY_PROFILE", "BLINKPY_ORDER_TRIES")
        if os.environ.get(name)
    ]
    inside.append("COLUMNS=300")  # pytest's summary shows why a test failed, up to this width
    inside.append("PYTEST_DISABLE_PLUGIN_AUTOLOAD=1")  # Hypothesis and others, whose import takes seconds
    command = ["bash", "-c", COPY, str(CACHE), "env", "OMP_NUM_THREADS=1", *inside, *program]
    limit_s += int(os.environ.get("BLINKPY_ORDER_TRIES") or 0) / 40
    return boot.run(command, limit_s, title, out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
