"""RDMA verbs through pyverbs: the choice of device and port, and one reliable queue pair.

pyverbs comes from the distribution (Debian, Ubuntu and BlueField images: python3-pyverbs) and is imported
when an endpoint is opened, so that all other parts work without it. Its objects are made once and reused: before release 64, each
work request object leaked, and closing one twice ends the process. pyverbs' calls hold the GIL, so no function here blocks.

Both ends of a connection need each other's `Endpoint`; `blinkpy.transport.handshake` exchanges them.
"""

import contextlib
import importlib
import ipaddress
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

from blinkpy.config import ConfigError, extends, option, split_address
from blinkpy.queues.submission import SQ_ENTRY_BYTES
from blinkpy.transport.contract import TransportError
from blinkpy.transport.link_key import MAKE_ONE, LinkKey, read_link_key

INSTALL = "install the distribution's pyverbs (Debian, Ubuntu: apt install python3-pyverbs) for this Python"
PSN_BITS = 24
RNR_TIMER = 12  # 0.64 ms; irrelevant, because no receive is posted
# A lost packet is resent after 4.096 us * 2**14 = 67 ms, up to six times. So a dead peer is detected within
# half a second on Soft-RoCE, and within a few seconds on hardware, which may wait four times as long.
# Soft-RoCE interprets a count of 7 as "forever".
ACK_TIMEOUT = 14
RETRIES = 6
READ_DEPTH = 16  # maximum reads in flight
HOP_LIMIT = 64
INLINE_LEAST = 32  # bytes: a doorbell's value must be copied when it is posted
INLINE_WANTED = SQ_ENTRY_BYTES  # if a device supports less, entries are read from their registered copy
SCANNED_GIDS = 64


@extends("transport")
@dataclass(frozen=True)
class RdmaOptions:
    """Options of --transport rdma, of both ends."""

    listen: str = option("", "HOST:PORT on which the engine accepts front ends, with --transport rdma", commands="engine")
    engine: str = option(
        "",
        "the engine's --name, or with --transport rdma its HOST:PORT or shm:NAME; repeat it for several engines (docs/fleet.md)",
        commands="frontend",
        repeats=True,
    )
    rdma_device: str = option(
        "",
        "RDMA device, as listed by `ibv_devices` (default: the first one with an active port)",
        commands="engine frontend doctor",
    )
    queue_memory: str = option(
        "host",
        "memory of the engine's queue pairs, with --transport rdma; dmabuf and peermem: on the GPU (docs/rdma.md)",
        choices=("host", "dmabuf", "peermem"),
        commands="engine",
    )
    rdma_gid_index: int = option(
        -1,
        "index of the local GID, as listed by `blinkpy doctor` (-1: RoCE v2 over IPv4 if available)",
        low=-1,
        high=255,
        commands="engine frontend doctor",
    )

    link_key_file: str = option(
        "", "file with the secret key that engine and front ends share, with --transport rdma", commands="engine frontend"
    )
    insecure_link: bool = option(
        False,
        "accept front ends without a key, with --transport rdma: every process that reaches the port is accepted",
        commands="engine frontend",
    )

    def address(self, name: str) -> tuple[str, int]:
        """(host, port) of the option with this name. Raises ConfigError."""
        if not getattr(self, name):
            raise ConfigError(f"--transport rdma needs --{name} HOST:PORT")
        return split_address(getattr(self, name), name)

    def link_key(self, name: str) -> LinkKey | None:
        """The key for the address in this option; None if no key is needed. Raises ConfigError."""
        if self.link_key_file and self.insecure_link:
            raise ConfigError("--link-key-file and --insecure-link exclude each other")
        if self.link_key_file:
            return read_link_key(self.link_key_file)
        host, _ = self.address(name)
        if self.insecure_link or is_loopback(host):
            return None
        raise ConfigError(
            f"--{name} {host} is reachable from other machines: use --link-key-file FILE to require a key "
            f"({MAKE_ONE} makes one), or --insecure-link to accept everyone"
        )


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Endpoint(NamedTuple):
    """The data that the other end needs to connect."""

    qpn: int
    psn: int
    gid: str  # 16 bytes as an IPv6 address
    lid: int  # 0 on Ethernet
    mtu: int  # IBV_MTU_* (1: 256 bytes; each increment doubles it)
    reads: int  # maximum RDMA reads in flight


@cache
def module(name: str) -> ModuleType:
    """A module of pyverbs. Raises TransportError with instructions if it is not installed."""
    try:
        return importlib.import_module(f"pyverbs.{name}")
    except ImportError as error:
        raise TransportError(f"--transport rdma needs pyverbs ({error}): {INSTALL}") from error


@cache
def constants() -> ModuleType:
    """The module with the constants of libibverbs, whose name changed in pyverbs 59."""
    module("pyverbs_error")  # raises the error with instructions if pyverbs is not installed
    try:
        return importlib.import_module("pyverbs.enums")
    except ImportError:
        return module("libibverbs_enums")


@contextlib.contextmanager
def reported(what: str) -> Iterator[None]:
    """Convert errors of pyverbs to TransportError: "could not WHAT: REASON"."""
    try:
        yield
    except module("pyverbs_error").PyverbsError as error:
        number = getattr(error, "error_code", None)
        text = f"could not {what}: {str(error).rstrip('.')}"
        raise TransportError(number, text) if isinstance(number, int) and number > 0 else TransportError(text) from error


class Port:
    """An open device, one of its ports, and the GID from which it sends.

    device: its name; "": the first device with an active port.
    gid_index: -1: the best GID, in the order RoCE v2 over IPv4 (routable), RoCE v2 over IPv6, InfiniBand.
    Raises TransportError.
    """

    def __init__(self, device: str = "", gid_index: int = -1):
        self.context, self.number = _open(device)
        try:
            with reported("query the RDMA port"):
                self.name = _text(self.context.name)
                self.attributes = self.context.query_port(self.number)
                self.limits = self.context.query_device()
            self.ethernet = int(self.attributes.link_layer) == int(constants().IBV_LINK_LAYER_ETHERNET)
            self.mtu = int(self.attributes.active_mtu)  # IBV_MTU_*
            self.reads = max(1, min(READ_DEPTH, int(self.limits.max_qp_rd_atom)))  # in flight per queue pair
            self.gid_index, self.gid, self.gid_kind = self._choose_gid(gid_index)
        except BaseException:
            self.context.close()
            raise

    def gids(self) -> list[tuple[int, str, str]]:
        """(index, address, kind) of the port's GIDs; kind: "RoCE v2", "RoCE v1" or "InfiniBand"."""
        found = []
        for index in range(min(int(self.attributes.gid_tbl_len), SCANNED_GIDS)):
            try:
                gid = str(ipaddress.IPv6Address(bytes.fromhex(self.context.query_gid(self.number, index).gid.replace(":", ""))))
                kind = int(self.context.query_gid_type(self.number, index))
            except module("pyverbs_error").PyverbsError:  # an empty entry of the GID table
                continue
            if int(ipaddress.IPv6Address(gid)):
                v2 = kind == int(getattr(constants(), "IBV_GID_TYPE_SYSFS_ROCE_V2", 1))
                found.append((index, gid, "InfiniBand" if not self.ethernet else "RoCE v2" if v2 else "RoCE v1"))
        return found

    def _choose_gid(self, wanted: int) -> tuple[int, str, str]:
        gids = self.gids()
        if wanted >= 0:
            for entry in gids:
                if entry[0] == wanted:
                    return entry
            raise TransportError(f"{self.name} has no GID with index {wanted}; it has {sorted(entry[0] for entry in gids)}")
        if not gids:
            raise TransportError(f"{self.name} has no GID; bring its network interface up and give it an IP address")

        return min(gids, key=lambda entry: (entry[2] == "RoCE v1", ipaddress.IPv6Address(entry[1]).ipv4_mapped is None, entry[0]))

    def close(self) -> None:
        self.context.close()


def _text(name: Any) -> str:
    return name.decode() if isinstance(name, bytes) else str(name)


def device_names() -> list[str]:
    """The RDMA devices of this machine. Raises TransportError if pyverbs or the kernel's modules are
    missing.
    """
    with reported("list RDMA devices (are the kernel's modules loaded: ib_uverbs and the driver?)"):
        return [_text(device.name) for device in module("device").get_device_list()]


def _open(wanted: str) -> tuple[Any, int]:
    """(context, port) of a device with an active port."""
    names = device_names()
    if wanted and wanted not in names:
        raise TransportError(f"unknown RDMA device {wanted!r}; this machine has {', '.join(names) or 'none'}")
    if not names:
        raise TransportError("this machine has no RDMA device; run `blinkpy doctor` for details")
    active = int(constants().IBV_PORT_ACTIVE)
    for name in [wanted] if wanted else names:
        with reported(f"open the RDMA device {name}"), contextlib.ExitStack() as opened:
            context = opened.enter_context(contextlib.closing(module("device").Context(name=name)))
            for port in range(1, int(context.query_device().phys_port_cnt) + 1):
                if int(context.query_port(port).state) == active:
                    opened.pop_all()  # the caller closes it
                    return context, port
    raise TransportError(f"no port of {wanted or ', '.join(names)} is active; check the cable and the network interface")


class QueuePairEnd:
    """One end of a reliable connection (RC): protection domain, completion queue, queue pair, memory regions.

    Other ends can't access its regions, even if they know the keys.
    depth: maximum number of outstanding work requests; 0 for an end that only answers.
    """

    def __init__(self, port: Port, depth: int = 0):
        e = constants()
        self.port, self.psn = port, secrets.randbits(PSN_BITS)
        self._regions: list[Any] = []
        self._parts: list[Any] = []  # in the order of their creation
        try:
            with reported("make an RDMA queue pair"):
                self.pd = self._made(module("pd").PD(port.context))
                self.cq = self._made(module("cq").CQ(port.context, max(1, depth)))
                self.qp = self._made(self._sender(depth, INLINE_WANTED) if depth else self._responder())
                attributes = module("qp").QPAttr(port_num=port.number)
                attributes.qp_access_flags = 0 if depth else e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
                self.qp.to_init(attributes)
        except BaseException:
            self.close()
            raise

    def _made(self, part: Any) -> Any:
        self._parts.append(part)
        return part

    def _responder(self) -> Any:
        q = module("qp")
        cap = q.QPCap(max_send_wr=1, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
        return q.QP(self.pd, q.QPInitAttr(qp_type=constants().IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap, sq_sig_all=0))

    def _sender(self, depth: int, inline: int) -> Any:
        """A queue pair that posts by ibv_wr_*, without new objects. It inlines as many bytes as the device supports."""
        q, e = module("qp"), constants()
        init = q.QPInitAttrEx(
            qp_type=e.IBV_QPT_RC,
            scq=self.cq,
            rcq=self.cq,
            cap=q.QPCap(max_send_wr=depth, max_recv_wr=1, max_send_sge=1, max_recv_sge=1, max_inline_data=inline),
            sq_sig_all=0,
            pd=self.pd,
            send_ops_flags=e.IBV_QP_EX_WITH_RDMA_WRITE | e.IBV_QP_EX_WITH_RDMA_READ,
            comp_mask=e.IBV_QP_INIT_ATTR_PD | e.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
        )
        self.inline = inline
        try:
            return q.QPEx(self.port.context, init)
        except module("pyverbs_error").PyverbsError:
            if inline == INLINE_LEAST:
                raise
            return self._sender(depth, INLINE_LEAST)

    def endpoint(self) -> Endpoint:
        """The data for the other end."""
        port = self.port
        return Endpoint(int(self.qp.qp_num), self.psn, port.gid, int(port.attributes.lid), port.mtu, port.reads)

    def register(self, address: int, length: int, access: int) -> Any:
        """Register host memory, which must live as long as this end. Returns pyverbs' MR: lkey, rkey."""
        with reported(f"register {length >> 10} KiB of memory for RDMA (is `ulimit -l` high enough?)"):
            return self.keep(module("mr").MR(self.pd, length, access, address=address))

    def keep(self, region: Any) -> Any:
        """Close a memory region together with this end."""
        self._regions.append(region)
        return region

    def answer(self, peer: Endpoint) -> None:
        """Become ready to answer a peer's reads and writes."""
        q = module("qp")
        attributes = q.QPAttr(port_num=self.port.number)
        attributes.path_mtu = min(self.port.mtu, peer.mtu)
        attributes.dest_qp_num, attributes.rq_psn = peer.qpn, peer.psn
        attributes.max_dest_rd_atomic = min(self.port.reads, peer.reads)
        attributes.min_rnr_timer = RNR_TIMER
        address = module("addr")
        gid = address.GID(ipaddress.IPv6Address(peer.gid).packed.hex(":", 2))  # pyverbs takes eight groups of four digits
        route = address.GlobalRoute(dgid=gid, sgid_index=self.port.gid_index, hop_limit=HOP_LIMIT)
        attributes.ah_attr = address.AHAttr(port_num=self.port.number, is_global=1, gr=route, dlid=peer.lid)
        with reported(f"connect to the peer with GID {peer.gid}"):
            self.qp.to_rtr(attributes)

    def send_to(self, peer: Endpoint) -> None:
        """Become ready to read and write a peer's memory. The peer must be ready to answer."""
        self.answer(peer)
        attributes = module("qp").QPAttr(port_num=self.port.number)
        attributes.sq_psn, attributes.timeout = self.psn, ACK_TIMEOUT
        attributes.retry_cnt = attributes.rnr_retry = RETRIES
        attributes.max_rd_atomic = min(self.port.reads, peer.reads)
        with reported(f"connect to the peer with GID {peer.gid}"):
            self.qp.to_rts(attributes)

    def close(self) -> None:
        """Free all resources. Later reads and writes of the other end fail. A second call has no effect."""
        for part in [*self._regions, *reversed(self._parts)]:
            part.close()
        self._regions, self._parts = [], []
