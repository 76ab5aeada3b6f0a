"""Debian packages that tests on emulated machines need, and commands whose errors are one line."""

import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

COMMAND_S = 600  # for any one command


class SetupError(RuntimeError):
    """The packages of the tests can't be installed here. The message is one readable line."""


def cache_folder(name: str) -> Path:
    """A folder for files that take minutes to make; all clones share it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blinkpy" / name


def missing_packages(wanted: Iterable[str]) -> list[str]:
    """The packages that are not installed. Raises SetupError if the system is not Debian."""
    if shutil.which("dpkg-query") is None:
        raise SetupError("emulated machines are made of Debian 12's packages, and this is not a Debian")
    asked = ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *wanted]
    lines = subprocess.run(asked, capture_output=True, text=True, timeout=COMMAND_S).stdout.splitlines()
    return [name for name in wanted if f"{name} installed" not in lines]


def install_packages(wanted: Iterable[str]) -> None:
    """Install the missing packages, as root. Raises SetupError."""
    missing = missing_packages(wanted)
    if not missing:
        return
    if os.geteuid() != 0:
        raise SetupError(f"packages are missing: as root, apt-get install {' '.join(missing)}")
    print(f"[apt] install {' '.join(missing)}", flush=True)
    run("apt-get", "update", "-qq")
    run("apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing)


def run(*command: str, check: bool = True, env: dict[str, str] | None = None) -> str:
    """Standard output of a command. env: added to the environment. Raises SetupError with its last line if it fails."""
    path = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"  # depmod and modprobe, which many users' PATH lacks
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "PATH": path} | (env or {})
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, env=environment)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SetupError(f"{command[0]} failed: {error}") from error
    if check and done.returncode != 0:
        words = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise SetupError(f"{' '.join(command[:3])} failed: {words}")
    return done.stdout
