"""Build the kernel and initial file system of a virtual machine with a software RDMA device (Soft-RoCE) under
~/.cache/blinkpy/rdma-vm.

The guest runs over this machine's own root file system, so it needs no disk image. It gets Debian's stock kernel, fetched and
unpacked but not installed (the cloud flavour has no rdma_rxe), and a busybox with its modules. Needs Debian 12 and, the first
time, root: apt installs the emulator and the verbs libraries. About 100 MB are fetched.
"""

import contextlib
import lzma
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from support.debian_packages import SetupError, cache_folder, install_packages, missing_packages, run

PACKAGES = (
    *("qemu-system-x86", "busybox-static", "cpio", "kmod", "iproute2"),  # the emulator, and packages of the initial file system
    *("libibverbs1", "ibverbs-providers", "python3-pyverbs"),  # the program that runs inside
)
PYVERBS = Path("/usr/lib/python3/dist-packages/pyverbs")
# virtio and 9p bring the root file system, overlay makes it writable; RDMA runs over interfaces of dummy and veth.
MODULES = (
    *("virtio_pci", "9pnet_virtio", "9p", "overlay", "dummy", "veth"),
    *("ib_uverbs", "rdma_rxe", "crc32_generic", "crc32c_generic"),
)
FOLDERS = ("bin", "modules", "proc", "sys", "dev", "host", "over", "new")
XZ_MAGIC, ELF_MAGIC = b"\xfd7zXZ\x00", b"\x7fELF"


def ensure_image() -> Path:
    """The folder with vmlinux, initrd.img and python/pyverbs, built if necessary. Raises SetupError."""
    folder = cache_folder("rdma-vm")
    init = Path(__file__).with_name("guest_init.sh").read_bytes()
    stamp = folder / "guest_init.sh"  # written last: an image with another init is rebuilt
    if stamp.exists() and stamp.read_bytes() == init and not missing_packages(PACKAGES):
        return folder
    install_packages(PACKAGES)
    check_python()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        build(Path(scratch), folder, init)
    stamp.write_bytes(init)
    return folder


def check_python() -> None:
    """The guest runs this Python with Debian's pyverbs, so the two must fit."""
    tag = f"cpython-{sys.version_info.major}{sys.version_info.minor}-"
    if not any(tag in path.name for path in PYVERBS.glob("device*.so")):
        found = ", ".join(sorted(path.name for path in PYVERBS.glob("device*.so"))) or "nothing"
        wanted = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(f"python3-pyverbs has {found}, which Python {wanted} can't load: use the distribution's own Python")


def build(scratch: Path, folder: Path, init: bytes) -> None:
    print("[rdma-vm] fetch a kernel with Soft-RoCE", flush=True)
    depends = run("apt-cache", "depends", "linux-image-amd64").splitlines()
    package = next((line.split()[-1] for line in depends if "Depends: linux-image-" in line), "")
    if not package:
        raise SetupError("apt knows no linux-image-amd64: run apt-get update")
    version = package.removeprefix("linux-image-")
    kernel = scratch / "kernel"
    with contextlib.chdir(scratch):
        run("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", package)
        run("dpkg-deb", "--extract", str(next(scratch.glob("linux-image-*.deb"))), str(kernel))
    run("depmod", "-b", str(kernel), version)
    print("[rdma-vm] make the first file system", flush=True)
    (folder / "vmlinux").write_bytes(unpacked_kernel((kernel / f"boot/vmlinuz-{version}").read_bytes()))
    root = scratch / "root"
    for name in FOLDERS:
        (root / name).mkdir(parents=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")
    order: list[str] = []
    for name in MODULES:
        shown = run("modprobe", "-d", str(kernel), "-S", version, "--show-depends", name, check=False)
        for path in (line.split()[1] for line in shown.splitlines() if line.startswith("insmod ")):
            if Path(path).name not in order:
                shutil.copy(path, root / "modules")
                order.append(Path(path).name)
    if not any(name.startswith("rdma_rxe") for name in order):
        raise SetupError(f"the kernel {version} has no Soft-RoCE (rdma_rxe)")
    (root / "modules/order").write_text("".join(f"{name}\n" for name in order))
    (root / "init").write_bytes(init)
    (root / "init").chmod(0o755)
    names = "".join(f"{path.relative_to(root)}\n" for path in sorted(root.rglob("*")))
    with open(folder / "initrd.img", "wb") as target:
        subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], input=names.encode(), stdout=target, cwd=root, check=True)
    # A folder for PYTHONPATH that holds Debian's pyverbs and none of its other packages.
    (folder / "python").mkdir(exist_ok=True)
    with contextlib.suppress(FileExistsError):
        (folder / "python/pyverbs").symlink_to(PYVERBS)


def unpacked_kernel(packed: bytes) -> bytes:
    """The ELF file inside a compressed kernel, which the emulator can enter without unpacking it in emulation."""
    at = packed.find(XZ_MAGIC)
    while at >= 0:
        with contextlib.suppress(lzma.LZMAError):
            unpacked = lzma.LZMADecompressor(format=lzma.FORMAT_XZ).decompress(packed[at:])
            if unpacked.startswith(ELF_MAGIC):
                return unpacked
        at = packed.find(XZ_MAGIC, at + 1)
    raise SetupError("the kernel is not compressed with xz, as Debian 12's are")
