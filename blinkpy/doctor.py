"""`blinkpy doctor`: checks whether this machine can run a front end or an engine over RDMA, with advice.

It changes nothing, and needs only NumPy: it queries the NVIDIA driver through its library.
"""

import ctypes
import os
import platform
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from blinkpy.config import Config
from blinkpy.dpu.link.store_fence import FenceError, store_fence
from blinkpy.engine.link.pair_memory import WRITES_ORDERED
from blinkpy.transport.contract import TransportError
from blinkpy.transport.verbs import INLINE_LEAST, Port, QueuePairEnd, RdmaOptions, device_names

OK, NOTE, BAD = "ok", "note", "BAD"  # NOTE: missing, and needed only on some machines
LOCKED_LEAST = 64 << 20  # approximate bytes of memory that an engine or a worker registers
DMABUF_KERNEL = (5, 12)
MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
MTU_GOOD = 4096

# CUdevice_attribute of the driver's API.
GPU_DIRECT_RDMA_SUPPORTED, WRITES_ORDERING, DMA_BUF_SUPPORTED = 116, 118, 124


class Finding(NamedTuple):
    """The result of one check. text: the finding, with advice if it is not OK."""

    state: str
    what: str
    text: str


def doctor(config: Config, given: frozenset[str] = frozenset()) -> int:
    """Print the findings. Returns exit code 1 if one of them is BAD."""
    options = config.extension(RdmaOptions)
    bad = 0
    for finding in (*front_end(options.rdma_device, options.rdma_gid_index), *engine()):
        bad += finding.state == BAD
        print(f"{finding.state:5} {finding.what:18} {finding.text}", flush=True)
    print(f"\n{'Not ready for --transport rdma.' if bad else 'Ready for --transport rdma.'}")
    return 1 if bad else 0


# ---- what front ends and engines need ------------------------------------------------------------------------------------


def front_end(device: str, gid_index: int) -> Iterator[Finding]:
    """Requirements of both ends of a link: fences, locked memory, verbs and a port. device, gid_index: as in
    RdmaOptions.
    """
    yield Finding(OK, "machine", f"{platform.machine()}, Linux {platform.release()}, Python {platform.python_version()}")
    try:
        store_fence()
        yield Finding(OK, "memory fence", "stores can be ordered")
    except FenceError as error:
        yield Finding(NOTE, "memory fence", f"{error}; only front ends on the engine's own machine need it")
    yield locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0])
    try:
        names = device_names()
    except TransportError as error:
        yield Finding(BAD, "verbs", str(error))
        return
    yield Finding(OK, "verbs", f"RDMA devices: {', '.join(names) or 'none'}")
    try:
        port = Port(device, gid_index)
    except TransportError as error:
        yield Finding(BAD, "RDMA port", str(error))
        return
    try:
        yield from port_findings(port)
    finally:
        port.close()


def locked_memory(limit: int) -> Finding:
    """Check the limit of locked memory. limit: in bytes."""
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0 or limit >= LOCKED_LEAST:
        return Finding(OK, "locked memory", "no relevant limit")
    text = f"only {limit >> 20} MiB may be locked: LimitMEMLOCK=infinity in the systemd unit, or `ulimit -l unlimited`"
    return Finding(BAD, "locked memory", text)


def port_findings(port: Port) -> Iterator[Finding]:
    """Check an open RDMA port: its GID, its MTU, and whether it supports a queue pair."""
    kind = "Ethernet (RoCE)" if port.ethernet else "InfiniBand"
    yield Finding(OK, "RDMA port", f"{port.name} port {port.number}, {kind}, active")
    listed = ", ".join(f"{index}: {gid} ({kind})" for index, gid, kind in port.gids())
    chosen = f"{port.gid_index} ({port.gid_kind}) of {listed}"
    if port.gid_kind == "RoCE v1":
        yield Finding(BAD, "GID", f"{chosen}: RoCE v1 is not routed; give the interface an IP address")
    else:
        yield Finding(OK, "GID", chosen)
    mtu = MTU_BYTES.get(port.mtu, 0)
    advice = "" if mtu >= MTU_GOOD else f"; with an interface MTU of 4200 or more it would be {MTU_GOOD}"
    yield Finding(OK if mtu >= MTU_GOOD else NOTE, "MTU", f"{mtu} bytes{advice}")
    try:
        end = QueuePairEnd(port, depth=16)
    except TransportError as error:
        yield Finding(BAD, "queue pair", f"{error}: the driver needs ibv_wr_* and {INLINE_LEAST} inline bytes, as mlx5 provides")
        return
    yield Finding(OK, "queue pair", f"{end.inline} inline bytes, {port.reads} concurrent reads")
    end.close()


# ---- what an engine on a GPU needs ---------------------------------------------------------------------------------------


def engine() -> Iterator[Finding]:
    """Check the first GPU of this machine, as its driver describes it."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        yield Finding(NOTE, "GPU", "no NVIDIA driver, which is fine on a DPU and for CPU engines")
        return
    device, count = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or not count.value:
        yield Finding(NOTE, "GPU", "the NVIDIA driver finds no GPU")
        return
    driver.cuDeviceGet(ctypes.byref(device), 0)

    def attribute(number: int) -> int:
        value = ctypes.c_int()
        return 0 if driver.cuDeviceGetAttribute(ctypes.byref(value), number, device) else value.value

    modules = Path("/sys/module")
    yield from gpu_findings(
        attribute(GPU_DIRECT_RDMA_SUPPORTED),
        attribute(DMA_BUF_SUPPORTED),
        attribute(WRITES_ORDERING),
        (modules / "nvidia_peermem").exists(),
        platform.release(),
    )


def gpu_findings(rdma: int, dmabuf: int, ordering: int, peer_memory: bool, release: str) -> Iterator[Finding]:
    """Check attributes of the driver. Queues in host memory do not depend on them, so no finding is BAD."""
    kernel = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if not rdma:
        yield Finding(NOTE, "GPUDirect RDMA", "network cards can't access the memory of this GPU; keep the queues in host memory")
        return
    if dmabuf and kernel >= DMABUF_KERNEL:
        yield Finding(OK, "GPU memory", "works as a dma-buf: use --queue-memory dmabuf")
    elif peer_memory:
        yield Finding(OK, "GPU memory", "works through nvidia-peermem: use --queue-memory peermem")
    else:
        text = "no dma-buf (needs NVIDIA's open kernel modules and Linux 5.12) and no peer-memory (modprobe nvidia-peermem)"
        yield Finding(NOTE, "GPU memory", text)
    if ordering >= WRITES_ORDERED:
        yield Finding(OK, "GPU write order", "the GPU sees a network card's writes in order, without a flush")
    else:
        text = "the GPU needs a flush to see a network card's writes to its memory: keep the queues in host memory"
        yield Finding(NOTE, "GPU write order", text)
