"""Run a command in a virtual machine with a software RDMA device (Soft-RoCE).

The guest sees this machine's file system, read-only; its writes are lost afterwards, except in /guest_out. Its PYTHONPATH has
pyverbs. Everything is emulated (no KVM is needed), ten to thirty times slower than the machine itself: it shows that code works,
but not how fast.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import threading
from functools import partial
from pathlib import Path

from rdma.vm.image import ensure_image

# Without erms and fsrm the guest's kernel copies whole words (rep movsq). With them it would copy by rep movsb: real processors
# do this in large pieces, but the emulator copies byte by byte. Then a reader could see half of a queue's 8-byte word.
CPU = "max,la57=off,erms=off,fsrm=off"
# With random addresses of libraries, the emulator would translate their code again for each process.
KERNEL = (
    "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off nokaslr norandmaps nowatchdog tsc=reliable no_timer_check "
    "random.trust_cpu=on cryptomgr.notests"
)
MEMORY_MIB = 4096  # two engines with the demonstration model take three quarters of it
NO_END, OUT_OF_TIME = 125, 124
TAIL = 3000  # characters of the console to show if the guest did not finish


def qemu(image: Path, out: Path) -> list[str]:
    """The emulator's command line. ttyS0 is the kernel's console, ttyS1 the command's output."""
    share = "security_model=none"
    # fmt: off
    return [
        "qemu-system-x86_64", "-M", "q35", "-accel", "tcg,thread=multi", "-cpu", CPU, "-smp", "2", "-m", str(MEMORY_MIB),
        "-nodefaults", "-no-user-config", "-display", "none", "-monitor", "none", "-nic", "none", "-no-reboot",
        "-serial", f"file:{out / 'console.txt'}", "-serial", "stdio",
        "-kernel", str(image / "vmlinux"), "-initrd", str(image / "initrd.img"), "-append", KERNEL,
        "-fsdev", f"local,id=root,path=/,{share},readonly=on,multidevs=remap",
        "-device", "virtio-9p-pci,fsdev=root,mount_tag=root",
        "-fsdev", f"local,id=out,path={out},{share}", "-device", "virtio-9p-pci,fsdev=out,mount_tag=out",
        "-object", "rng-random,id=rng,filename=/dev/urandom", "-device", "virtio-rng-pci,rng=rng",
    ]
    # fmt: on


def run(command: list[str], limit_s: float, title: str = "", out: Path | None = None) -> int:
    """Boot, run the command, show its output, and return its exit code; 125: the guest did not finish; 124: out of time.

    title: prefix of each line; lines are then shown whole. out: an empty folder that gets the files of /guest_out.
    """
    with tempfile.TemporaryDirectory(prefix="rdma-vm-") as thrown_away:
        return _run(command, (out or Path(thrown_away)).resolve(), limit_s, title)


def _run(command: list[str], out: Path, limit_s: float, title: str) -> int:
    image = ensure_image()
    path = os.pathsep.join(filter(None, [str(image / "python"), os.environ.get("PYTHONPATH")]))
    lines = [f"export PYTHONPATH={shlex.quote(path)}", f"cd {shlex.quote(os.getcwd())}", shlex.join(command)]
    (out / "command.sh").write_text("\n".join(lines) + "\n")
    status = out / "status"
    machine = subprocess.Popen(qemu(image, out), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    timer = threading.Timer(limit_s, machine.kill)
    timer.start()
    try:
        for piece in machine.stdout if title else iter(partial(os.read, machine.stdout.fileno(), 4096), b""):
            sys.stdout.buffer.write(title.encode() + piece.replace(b"\r\n", b"\n"))
            sys.stdout.buffer.flush()
        machine.wait()
    finally:
        in_time = timer.is_alive()
        timer.cancel()
        machine.kill()
        machine.wait()
    if status.exists() and status.read_text().strip():
        return int(status.read_text())
    kernel = out / "console.txt"
    print((kernel.read_text(errors="replace") if kernel.exists() else "")[-TAIL:], file=sys.stderr)
    print("rdma-vm: " + ("the guest did not come to an end" if in_time else f"out of time after {limit_s:g} s"), file=sys.stderr)
    return NO_END if in_time else OUT_OF_TIME
