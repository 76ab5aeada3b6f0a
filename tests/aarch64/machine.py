"""Make an aarch64 Python with blinkpy's base install under ~/.cache/blinkpy/aarch64, which runs here in user-mode emulation.

Debian's aarch64 packages of Python and pyverbs are fetched and unpacked. On that Python, pip installs the wheels of
pyproject.toml's dependencies into an environment, without torch and Numba. Processes use this machine's own file system, network
and shared memory, so they can communicate with its processes. Needs Debian 12 and, the first time, root for the emulator; some
100 MB are fetched, in one to two minutes. This machine's own packages do not change.
"""

import hashlib
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

from support.debian_packages import SetupError, cache_folder, install_packages, missing_packages, run

ROOT = Path(__file__).parents[2]
EMULATOR = "qemu-aarch64-static"
HERE = ("qemu-user-static",)  # packages on this machine
THERE = ("python3", "python3-pyverbs", "libstdc++6")  # and of aarch64
FOR_TESTS = ("pytest", "pytest-timeout", "hypothesis", "httpx", "openai")  # packages of the extras that the tests import

# A separate state of apt, so that it neither uses nor changes this machine's packages.
APT = """Dir::State "{folder}/state";
Dir::State::status "{folder}/status";
Dir::Cache "{folder}/cache";
APT::Architecture "arm64";
APT::Architectures {{ "arm64"; }};
APT::Sandbox::User "root";
Acquire::Languages "none";
Debug::NoLocking "true";
"""

# A program that looks to Python like an environment's interpreter: it passes its own path, so its children are emulated, too.
PYTHON = """#!/bin/sh
exec {emulator} -L {root} -0 "$0" {python} "$@"
"""
ENVIRONMENT = """home = {home}
include-system-site-packages = true
"""  # the system's packages: pyverbs, as in docs/bluefield.md


def ensure_machine() -> Path:
    """The emulated Python, made if need be. Raises SetupError."""
    folder = cache_folder("aarch64")
    python, stamp = folder / "environment/bin/python", folder / "stamp"
    wanted = hashlib.sha256("\n".join([Path(__file__).read_text(), *requirements()]).encode()).hexdigest()
    if stamp.exists() and stamp.read_text() == wanted and not missing_packages(HERE):
        return python
    install_packages(HERE)
    if shutil.which(EMULATOR) is None:
        raise SetupError(f"{' '.join(HERE)} has no {EMULATOR}")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "apt").mkdir(parents=True)
    unpack_packages(folder / "apt", folder / "root")
    make_environment(folder, python)
    stamp.write_text(wanted)
    return python


def requirements() -> list[str]:
    """The requirements of the base install, and the extras that the tests import."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    named = {match[0]: line for line in extras if (match := re.match(r"[\w-]+", line))}
    return [*project["dependencies"], *(named[name] for name in FOR_TESTS)]


def unpack_packages(apt: Path, root: Path) -> None:
    """Fetch the packages, with all that they depend on, and unpack them; nothing of theirs is run."""
    print("[aarch64] fetch Debian's packages", flush=True)
    for name in ("state/lists/partial", "cache/archives/partial"):
        (apt / name).mkdir(parents=True)
    (apt / "status").touch()
    (apt / "apt.conf").write_text(APT.format(folder=apt))
    configured = {"APT_CONFIG": str(apt / "apt.conf")}
    run("apt-get", "update", "-qq", env=configured)
    run("apt-get", "install", "-qq", "-y", "--download-only", "--no-install-recommends", *THERE, env=configured)
    root.mkdir()
    for archive in sorted((apt / "cache/archives").glob("*.deb")):
        run("dpkg-deb", "--extract", str(archive), str(root))
    shutil.rmtree(apt)


def make_environment(folder: Path, python: Path) -> None:
    """An environment of the unpacked Python, with the wheels."""
    found = sorted((folder / "root/usr/bin").glob("python3.[0-9]*"))
    real = next((path for path in found if re.fullmatch(r"python3\.\d+", path.name)), None)
    if real is None:
        raise SetupError(f"Debian's packages brought no Python: {[path.name for path in found]}")
    python.parent.mkdir(parents=True)
    names = {"emulator": EMULATOR, "root": folder / "root", "python": real}
    python.write_text(PYTHON.format(**{name: shlex.quote(str(value)) for name, value in names.items()}))
    python.chmod(0o755)
    (python.parents[1] / "pyvenv.cfg").write_text(ENVIRONMENT.format(home=real.parent))
    (python.parents[1] / "lib" / real.name / "site-packages").mkdir(parents=True)
    print("[aarch64] install the base install's wheels, by pip in emulation: a minute", flush=True)
    run(sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "--only-binary=:all:", "-d", str(folder / "pip"), "pip")
    pip = next((folder / "pip").glob("pip-*.whl")) / "pip"  # Python runs a wheel without unpacking it
    options = ("--no-compile", "--disable-pip-version-check", "--no-input", "--only-binary=:all:")
    run(str(python), str(pip), "install", "-qq", *options, *requirements(), env={"PYTHONPATH": ""})
