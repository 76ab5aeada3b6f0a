"""A replacement for pyverbs, the cards and the network: refuses the same calls, and notices objects that are not closed.

Names, values and messages are those of pyverbs and libibverbs. Posted work is done when the caller polls for completions; inline
data is copied immediately. Both ends of a connection are in this process, so a transfer copies memory.
"""

import ctypes
import ipaddress
import os
import re
import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from blinkpy.transport import verbs

CONSTANTS = {
    "IBV_ACCESS_LOCAL_WRITE": 1, "IBV_ACCESS_REMOTE_WRITE": 2, "IBV_ACCESS_REMOTE_READ": 4, "IBV_QPT_RC": 2,
    "IBV_SEND_SIGNALED": 2, "IBV_SEND_INLINE": 8, "IBV_QP_EX_WITH_RDMA_WRITE": 1, "IBV_QP_EX_WITH_RDMA_READ": 16,
    "IBV_QP_INIT_ATTR_PD": 1, "IBV_QP_INIT_ATTR_SEND_OPS_FLAGS": 64, "IBV_LINK_LAYER_INFINIBAND": 1,
    "IBV_LINK_LAYER_ETHERNET": 2, "IBV_PORT_DOWN": 1, "IBV_PORT_ACTIVE": 4, "IBV_GID_TYPE_SYSFS_ROCE_V2": 1,
    "IBV_WC_SUCCESS": 0, "IBV_WC_LOC_PROT_ERR": 4, "IBV_WC_WR_FLUSH_ERR": 5, "IBV_WC_REM_INV_REQ_ERR": 9,
    "IBV_WC_REM_ACCESS_ERR": 10, "IBV_WC_REM_OP_ERR": 11, "IBV_WC_RETRY_EXC_ERR": 12,
}  # fmt: skip
C = SimpleNamespace(**CONSTANTS)
RTR = {"path_mtu", "dest_qp_num", "rq_psn", "max_dest_rd_atomic", "min_rnr_timer", "ah_attr"}
RTS = {"sq_psn", "timeout", "retry_cnt", "rnr_retry", "max_rd_atomic"}
ENOMEM, EINVAL = 12, 22


class PyverbsError(Exception):
    pass


class PyverbsRDMAError(PyverbsError):
    def __init__(self, message: str, error_code: int = -1):
        super().__init__(message + (f". Errno: {error_code}, {os.strerror(error_code)}" if error_code > 0 else ""))
        self.error_code = error_code


class Trouble:
    """fails: number of calls of pyverbs until one fails without a reason; 0: no call fails."""

    fails = 0


def need(fine: object, what: str, code: int = EINVAL) -> None:
    Trouble.fails -= 1
    if not fine or Trouble.fails == 0:
        raise PyverbsRDMAError(what, code)


class Part:
    """An object that must be closed once, after all objects made from it."""

    def __init__(self, *parents: "Part"):
        self.open, self.children, self.parents = True, list[Part](), parents
        need(True, f"Failed to create a {type(self).__name__}", ENOMEM)
        for parent in parents:
            assert parent.open
            parent.children.append(self)

    def close(self) -> None:
        assert self.open, f"{type(self).__name__}: a second close ends the process"
        assert not self.children, f"{type(self).__name__} has {[type(child).__name__ for child in self.children]}"
        self.open = False
        for parent in self.parents:
            parent.children.remove(self)


def card(name: str = "rxe0", **changed: Any) -> SimpleNamespace:
    """A device. ports: (state, link layer, GIDs by index: (address, 1 for RoCE v2)). Its limits are typical of drivers."""
    gids = {0: ("fe80::1", 0), 1: ("::ffff:10.0.0.1", 1)}
    values = {"ports": [(C.IBV_PORT_ACTIVE, C.IBV_LINK_LAYER_ETHERNET, gids)], "max_qp_wr": 1024, "max_cqe": 2048, "lid": 0}
    return SimpleNamespace(**{"name": name, "max_qp_rd_atom": 8, "inline": 512, "mtu": 3} | values | changed)


class Context(Part):
    """`Context(name=...)`; mr_limit: bytes that may be registered."""

    cards: tuple[Any, ...] = ()
    made: list["Context"] = []  # noqa: RUF012 - contexts of a test, which must close all of them
    mr_limit = 1 << 40

    def __init__(self, name: str):
        super().__init__()
        self._card = next(card for card in self.cards if card.name == name)
        self.name = name  # a device's name is bytes
        self.made.append(self)

    def query_device(self) -> Any:
        its = self._card
        return SimpleNamespace(
            max_qp_wr=its.max_qp_wr, max_cqe=its.max_cqe, max_qp_rd_atom=its.max_qp_rd_atom, phys_port_cnt=len(its.ports)
        )

    def query_port(self, number: int) -> Any:
        need(1 <= number <= len(self._card.ports), "Failed to query port")
        state, layer, gids = self._card.ports[number - 1]
        table = max(gids, default=0) + 1
        return SimpleNamespace(state=state, link_layer=layer, gid_tbl_len=table, active_mtu=self._card.mtu, lid=self._card.lid)

    def _gid(self, number: int, index: int) -> tuple[str, int]:
        gids = self._card.ports[number - 1][2]
        need(index in gids, "Failed to query gid")
        found: tuple[str, int] = gids[index]
        return found

    def query_gid(self, number: int, index: int) -> Any:
        return GID(ipaddress.IPv6Address(self._gid(number, index)[0]).packed.hex(":", 2))

    def query_gid_type(self, number: int, index: int) -> int:
        return self._gid(number, index)[1]


def get_device_list() -> list[Any]:
    return [SimpleNamespace(name=card.name.encode()) for card in Context.cards]


class GID:
    def __init__(self, value: str):
        if not re.fullmatch("([0-9a-f]{4}:){7}[0-9a-f]{4}", value):
            raise PyverbsError(f"Invalid GID value ({value})")
        self.gid = value


class PD(Part):
    def __init__(self, context: Context):
        super().__init__(context)
        self.context, self.regions = context, list[MR]()


class CQ(Part):
    def __init__(self, context: Context, cqe: int):
        need(1 <= cqe <= context.query_device().max_cqe, "Failed to create a CQ")
        super().__init__(context)
        self.cqe, self.queue, self.done = cqe, None, deque[Any]()

    def poll(self, num_entries: int = 1) -> tuple[int, list[Any]]:
        assert num_entries > 0
        if self.queue is not None:
            self.queue.work()
        taken = [self.done.popleft() for _ in range(min(num_entries, len(self.done)))]
        if self.queue is not None:
            self.queue.outstanding -= sum(completion.ended for completion in taken)
        return len(taken), taken


class MR(Part):
    keys = 0x100

    def __init__(self, pd: PD, length: int, access: int, address: int):
        need(access & ~7 == 0 and (access & 1 or not access & 2), "Failed to register a MR: access")
        need(length <= Context.mr_limit, "Failed to register a MR", ENOMEM)
        ctypes.string_at(address, length)  # is there
        super().__init__(pd)
        MR.keys += 0x10
        self.pd, self.lkey, self.rkey = pd, MR.keys, MR.keys + 1
        self.address, self.length, self.access = address, length, access
        pd.regions.append(self)

    def close(self) -> None:
        super().close()
        self.pd.regions.remove(self)

    def holds(self, address: int, length: int, access: int) -> bool:
        inside = self.address <= address and address + length <= self.address + self.length
        return inside and self.access & access == access


class QPAttr:
    """Records which attributes were set: a transition requires exactly its own attributes."""

    def __init__(self, port_num: int = 1):
        self.port_num = port_num

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name} was not set")

    def only(self, names: set[str]) -> None:
        assert set(vars(self)) == names | {"port_num"}, f"set {sorted(vars(self))}, needed {sorted(names)}"


class QP(Part):
    """An RC queue pair. all: open queue pairs by number. transitions: attributes of each transition."""

    all: dict[int, "QP"] = {}  # noqa: RUF012
    numbers, lazy = 16, 0

    def __init__(self, pd: PD, init: Any):
        assert init.scq is init.rcq
        assert (init.qp_type, init.sq_sig_all) == (C.IBV_QPT_RC, 0)
        context, cap = pd.context, init.cap
        need(1 <= cap.max_send_wr <= context.query_device().max_qp_wr, "Failed to create QP")
        need(cap.max_inline_data <= context._card.inline and cap.max_recv_wr == cap.max_recv_sge == 1, "Failed to create QP")
        need(cap.max_send_sge == 1 and cap.max_send_wr <= init.scq.cqe, "Failed to create QP")
        super().__init__(pd, init.scq)
        QP.numbers += 1
        self.qp_num, self.pd, self.cap, self.cq, self.state = QP.numbers, pd, cap, init.scq, "RESET"
        self.transitions: dict[str, Any] = {}
        self.posted, self.failed = deque[Any](), False
        self.batch: Any = None
        self.outstanding = self.silent = 0  # requests without a polled completion; those of them done since the last completion
        self.all[self.qp_num] = self.cq.queue = self
        self.wr_id = self.wr_flags = 0

    def _to(self, before: str, after: str, attributes: QPAttr, names: set[str]) -> None:
        need(self.state == before, f"Failed to modify QP state to {after}")
        attributes.only(names)
        self.state, self.transitions[after] = after, attributes

    def to_init(self, attributes: QPAttr) -> None:
        self._to("RESET", "INIT", attributes, {"qp_access_flags"})

    def to_rtr(self, attributes: QPAttr) -> None:
        address = attributes.ah_attr
        need(attributes.max_dest_rd_atomic <= self.pd.context.query_device().max_qp_rd_atom, "Failed to modify QP state to RTR")
        need(address.gr.sgid_index in self._gids() and attributes.path_mtu <= self.pd.context._card.mtu, "Failed to modify QP")
        self._to("INIT", "RTR", attributes, RTR)

    def to_rts(self, attributes: QPAttr) -> None:
        need(attributes.max_rd_atomic <= self.pd.context.query_device().max_qp_rd_atom, "Failed to modify QP state to RTS")
        self._to("RTR", "RTS", attributes, RTS)

    def _gids(self) -> dict[int, tuple[str, int]]:
        gids: dict[int, tuple[str, int]] = self.pd.context._card.ports[self.transitions["INIT"].port_num - 1][2]
        return gids

    def gid(self) -> str:
        """The GID from which the queue pair sends."""
        return ipaddress.IPv6Address(self._gids()[self.transitions["RTR"].ah_attr.gr.sgid_index][0]).packed.hex(":", 2)

    def close(self) -> None:
        super().close()
        del self.all[self.qp_num]
        self.cq.queue = None

    # ---- posted work --------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Do the posted work in order, except for the last `lazy` requests. After the first error no more work is done."""
        while len(self.posted) > self.lazy:
            work = self.posted.popleft()
            status = C.IBV_WC_WR_FLUSH_ERR if self.failed else self._status(work)
            if status:
                self.failed = True
            else:
                source = work.data if work.data is not None else work.local
                ctypes.memmove(*((work.local, work.remote) if work.read else (work.remote, source)), work.length)
            self.silent += 1
            if work.signaled or status:
                assert len(self.cq.done) < self.cq.cqe, "the completion queue overflows"
                self.cq.done.append(SimpleNamespace(status=status, wr_id=work.id, ended=self.silent))
                self.silent = 0

    def _status(self, work: Any) -> int:
        """The status of one request, as both ends' cards judge it."""
        mine = [region for region in self.pd.regions if region.lkey == work.lkey]
        if work.data is None and not any(region.holds(work.local, work.length, work.read) for region in mine):
            return int(C.IBV_WC_LOC_PROT_ERR)
        near, peer = self.transitions["RTR"], self.all.get(self.transitions["RTR"].dest_qp_num)
        far = peer.transitions.get("RTR") if peer else None
        if peer is None or far is None or far.dest_qp_num != self.qp_num or far.path_mtu != near.path_mtu:
            return int(C.IBV_WC_RETRY_EXC_ERR)
        if (
            far.rq_psn != self.transitions["RTS"].sq_psn
            or near.ah_attr.gr.dgid.gid != peer.gid()
            or far.ah_attr.gr.dgid.gid != self.gid()
        ):
            return int(C.IBV_WC_RETRY_EXC_ERR)
        if self.transitions["RTS"].max_rd_atomic > far.max_dest_rd_atomic:
            return int(C.IBV_WC_REM_INV_REQ_ERR)
        right = C.IBV_ACCESS_REMOTE_READ if work.read else C.IBV_ACCESS_REMOTE_WRITE
        theirs = [region for region in peer.pd.regions if region.rkey == work.rkey]
        allowed = peer.transitions["INIT"].qp_access_flags & right and any(
            r.holds(work.remote, work.length, right) for r in theirs
        )
        return 0 if allowed else int(C.IBV_WC_REM_ACCESS_ERR)


class QPEx(QP):
    """reads, writes: (address, bytes) of each posted request."""

    def __init__(self, context: Context, init: Any):
        assert init.pd.context is context
        assert init.comp_mask == C.IBV_QP_INIT_ATTR_PD | C.IBV_QP_INIT_ATTR_SEND_OPS_FLAGS
        assert init.send_ops_flags == C.IBV_QP_EX_WITH_RDMA_WRITE | C.IBV_QP_EX_WITH_RDMA_READ
        super().__init__(init.pd, init)
        self.begun: Any = None
        self.reads, self.writes = list[tuple[int, int]](), list[tuple[int, int]]()

    def wr_start(self) -> None:
        assert self.batch is None
        self.batch = []

    def _begin(self, read: bool, rkey: int, remote: int) -> None:
        assert self.batch is not None
        assert self.begun is None
        assert self.wr_flags & ~(C.IBV_SEND_SIGNALED | C.IBV_SEND_INLINE) == 0
        signaled, inline = (bool(self.wr_flags & flag) for flag in (C.IBV_SEND_SIGNALED, C.IBV_SEND_INLINE))
        self.begun = SimpleNamespace(
            read=read, rkey=rkey, remote=remote, id=self.wr_id, signaled=signaled, inline=inline, data=None, lkey=None
        )  # fmt: skip

    def wr_rdma_write(self, rkey: int, remote_addr: int) -> None:
        self._begin(False, rkey, remote_addr)

    def wr_rdma_read(self, rkey: int, remote_addr: int) -> None:
        self._begin(True, rkey, remote_addr)

    def wr_set_inline_data(self, addr: int, length: int) -> None:
        assert self.begun.inline
        assert not self.begun.read
        need(length <= self.cap.max_inline_data, "too much inline data", ENOMEM)
        self.begun.data = ctypes.string_at(addr, length)
        self._set(addr, length)

    def wr_set_sge(self, sge: Any) -> None:
        assert not self.begun.inline
        self.begun.lkey = sge.lkey
        self._set(sge.addr, sge.length)

    def _set(self, local: int, length: int) -> None:
        self.begun.local, self.begun.length = local, length
        self.batch.append(self.begun)
        self.begun = None

    def wr_complete(self) -> None:
        need(self.state == "RTS" and self.begun is None, "Failed to post")
        batch, self.batch = self.batch, None
        need(self.outstanding + len(batch) <= self.cap.max_send_wr, "Failed to post", ENOMEM)
        self.outstanding += len(batch)
        assert [work.signaled for work in batch] == [False] * (len(batch) - 1) + [True]
        self.posted.extend(batch)
        for work in batch:
            (self.reads if work.read else self.writes).append((work.remote, work.length))


def made(**defaults: Any) -> Any:
    """A class of plain values that accepts only its own fields."""

    def make(**values: Any) -> SimpleNamespace:
        assert set(values) <= set(defaults), f"unknown: {set(values) - set(defaults)}"
        return SimpleNamespace(**defaults | values)

    return make


def install(monkeypatch: pytest.MonkeyPatch, *cards: Any, enums: str = "enums") -> None:
    """Make `import pyverbs` find this replacement with these cards. enums: name of the module of constants, which newer releases
    changed."""
    init = {"qp_type": 0, "scq": None, "rcq": None, "cap": None, "sq_sig_all": 1}
    modules: dict[str, dict[str, Any]] = {
        "": {"__path__": []},
        "device": {"Context": Context, "get_device_list": get_device_list},
        "pd": {"PD": PD},
        "cq": {"CQ": CQ},
        "mr": {"MR": MR},
        "qp": {
            "QP": QP, "QPEx": QPEx, "QPAttr": QPAttr,
            "QPCap": made(max_send_wr=1, max_recv_wr=10, max_send_sge=1, max_recv_sge=1, max_inline_data=0),
            "QPInitAttr": made(**init), "QPInitAttrEx": made(**init, pd=None, send_ops_flags=0, comp_mask=0),
        },
        "addr": {
            "GID": GID, "GlobalRoute": made(dgid=None, sgid_index=0, hop_limit=1),
            "AHAttr": made(port_num=1, is_global=0, gr=None, dlid=0),
        },
        "wr": {"SGE": lambda addr, length, lkey: SimpleNamespace(addr=addr, length=length, lkey=lkey)},
        "pyverbs_error": {"PyverbsError": PyverbsError, "PyverbsRDMAError": PyverbsRDMAError},
        enums: CONSTANTS,
    }  # fmt: skip
    for name in [name for name in sys.modules if name.partition(".")[0] == "pyverbs"]:
        monkeypatch.delitem(sys.modules, name)
    for name, contents in modules.items():
        whole = ModuleType(f"pyverbs.{name}" if name else "pyverbs")
        vars(whole).update(contents)
        monkeypatch.setitem(sys.modules, whole.__name__, whole)
    verbs.module.cache_clear()
    verbs.constants.cache_clear()
    monkeypatch.setattr(Context, "cards", cards)
    monkeypatch.setattr(Context, "made", [])
    monkeypatch.setattr(Context, "mr_limit", 1 << 40)
    monkeypatch.setattr(Trouble, "fails", 0)
    monkeypatch.setattr(QP, "all", {})


def uninstall() -> None:
    """Remove the replacement, and check that all objects were closed."""
    verbs.module.cache_clear()
    verbs.constants.cache_clear()
    left = [type(child).__name__ for context in Context.made for child in context.children]
    assert not left, f"{left} were not closed"
    assert not any(context.open for context in Context.made)
    assert not QP.all
