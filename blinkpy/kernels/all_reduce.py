"""Sums over ranks, and the logits of all ranks, through memory of peers: NVLink, no host, no library.

One shot: a rank stores its addend into a box on every rank, then each rank adds the boxes. Two shots, for larger tensors: rank r
reads the r-th part of every rank's addend, and stores the sum of these parts on every rank. Both add in the order of ranks, in
float32, and round once. So the bits depend on neither the batch nor the form, and are equal on all ranks.

A program waits only for programs of the same number on the peers, at most SPINS reads of a flag. Beyond that, it stores a fault.
After a fault no program waits, and the loop ends with that fault. All launches have PROGRAMS programs, so the epochs of all
programs are equal. An epoch's boxes are written again two epochs later. A rank that writes them has seen all flags of the epoch
in between, which a peer raises only after its kernel of the first epoch has ended. A batch without tokens has no epoch: kernels
are loaded with it, one rank after another.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from blinkpy.kernels import ONE_SHOT_BYTES, launch
from blinkpy.kernels.launch import COUNT_TOKENS

PROGRAMS = 32
BLOCK = 1024  # elements that a program moves at a time
SPINS = 1_500_000  # maximum reads of a flag, about 0.5 us each
LATE = tl.constexpr(1)
"""Value of the fault word after a peer was late; the second word has its rank."""


class Peers(NamedTuple):
    """The arguments of one rank's kernels.

    boxes: int64 [ranks], address of each rank's box: [2 sides, ranks, capacity] elements.
    addends: int64 [ranks], address of each rank's addend.
    logits: int64 [ranks], address of each rank's logits.
    flags: int64 [ranks], address of each rank's flags: int32 [2 phases, ranks, PROGRAMS], 0 at the start.
    addend: [tokens, hidden] of this rank. Products write it, and all_reduce sums it over the ranks.
    whole: float32 [rows, vocab], this rank's logits.
    part: float32 [rows, own columns], the logits that this rank computes.
    first: the first of its columns.
    epochs: int32 [PROGRAMS] of this rank, 0 at the start.
    fault: int32 [2] of this rank.
    memory: the tensors at the addresses, of all ranks.
    """

    rank: int
    ranks: int
    boxes: torch.Tensor
    addends: torch.Tensor
    logits: torch.Tensor
    flags: torch.Tensor
    addend: torch.Tensor
    whole: torch.Tensor
    part: torch.Tensor
    first: int
    epochs: torch.Tensor
    fault: torch.Tensor
    memory: tuple[torch.Tensor, ...]


@triton.jit
def _raise_flags(flags_ptr, phase, program, epoch, RANK: tl.constexpr, RANKS: tl.constexpr, PROGRAMS_: tl.constexpr):
    """Notify each rank that this program's stores of a phase are done."""
    tl.debug_barrier()
    for peer in tl.static_range(RANKS):
        flags = tl.load(flags_ptr + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(flags + (phase * RANKS + RANK) * PROGRAMS_ + program, epoch, sem="release", scope="sys")


@triton.jit
def _await_flags(
    flags_ptr, fault_ptr, phase, program, epoch,
    RANK: tl.constexpr, RANKS: tl.constexpr, PROGRAMS_: tl.constexpr, SPINS_: tl.constexpr,
):  # fmt: skip
    """Wait until the same program of each rank has raised its flag: at most SPINS reads per flag, or one read after a fault."""
    own = tl.load(flags_ptr + RANK).to(tl.pointer_type(tl.int32))
    most = tl.where(tl.load(fault_ptr, volatile=True) == 0, SPINS_, 0)
    for peer in tl.static_range(RANKS):
        flag = own + (phase * RANKS + peer) * PROGRAMS_ + program
        seen, spins = tl.atomic_add(flag, 0, sem="acquire", scope="sys"), 0
        while (seen - epoch < 0) & (spins < most):  # a difference, because epochs wrap around
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
            spins += 1
        if seen - epoch < 0:
            tl.store(fault_ptr + 1, peer)
            tl.store(fault_ptr, LATE)
            most = 0
    tl.debug_barrier()


@triton.jit
def _store_sum(out_ptr, at, count, total, ADD: tl.constexpr):
    """total: in the dtype of the addends."""
    if ADD:
        before = tl.load(out_ptr + at, mask=at < count, other=0).to(tl.float32)
        total = (before + total.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + at, total, mask=at < count)


@triton.jit
def _all_reduce(
    x_ptr,  # [T, WIDTH] this rank's addend
    out_ptr,  # [T, WIDTH] the sum; with ADD, out + the sum
    counts_ptr,  # int64 [8] batch header
    boxes_ptr, addends_ptr, flags_ptr, epochs_ptr, fault_ptr,  # see Peers
    WIDTH: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, CAPACITY: tl.constexpr, BLOCK_: tl.constexpr,
    PROGRAMS_: tl.constexpr, SPINS_: tl.constexpr, TWO_SHOTS: tl.constexpr, ADD: tl.constexpr, PHASES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """PHASES: bits of the phases to run: 1 stores, 2 adds, 4 copies the sums of two shots. A GPU runs all in one launch."""
    program = tl.program_id(0)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    count = tl.load(counts_ptr + COUNT_TOKENS).to(tl.int32) * WIDTH
    if count > 0:
        epoch = tl.load(epochs_ptr + program) + 1
        side = epoch & 1
        element = x_ptr.dtype.element_ty
        blocks = tl.cdiv(count, BLOCK_)
        share = tl.cdiv(blocks, RANKS)  # blocks that each rank adds in two shots
        if PHASES & 1:
            if not TWO_SHOTS:
                for block in range(program, blocks, PROGRAMS_):
                    at = block * BLOCK_ + tl.arange(0, BLOCK_)
                    addend = tl.load(x_ptr + at, mask=at < count, other=0)
                    for peer in tl.static_range(RANKS):
                        box = tl.load(boxes_ptr + peer).to(tl.pointer_type(element))
                        tl.store(box + (side * RANKS + RANK) * CAPACITY + at, addend, mask=at < count)
            _raise_flags(flags_ptr, 0, program, epoch, RANK, RANKS, PROGRAMS_)
        if PHASES & 2:
            _await_flags(flags_ptr, fault_ptr, 0, program, epoch, RANK, RANKS, PROGRAMS_, SPINS_)
            if TWO_SHOTS:
                for block in range(RANK * share + program, tl.minimum((RANK + 1) * share, blocks), PROGRAMS_):
                    at = block * BLOCK_ + tl.arange(0, BLOCK_)
                    total = tl.zeros([BLOCK_], tl.float32)
                    for peer in tl.static_range(RANKS):
                        addend = tl.load(addends_ptr + peer).to(tl.pointer_type(element)) + at
                        total += tl.load(addend, mask=at < count, other=0, volatile=True).to(tl.float32)
                    for peer in tl.static_range(RANKS):
                        addend = tl.load(addends_ptr + peer).to(tl.pointer_type(element)) + at
                        tl.store(addend, total.to(element), mask=at < count)
                _raise_flags(flags_ptr, 1, program, epoch, RANK, RANKS, PROGRAMS_)
            else:
                own = tl.load(boxes_ptr + RANK).to(tl.pointer_type(element)) + side * RANKS * CAPACITY
                for block in range(program, blocks, PROGRAMS_):
                    at = block * BLOCK_ + tl.arange(0, BLOCK_)
                    total = tl.zeros([BLOCK_], tl.float32)
                    for peer in tl.static_range(RANKS):
                        total += tl.load(own + peer * CAPACITY + at, mask=at < count, other=0, volatile=True).to(tl.float32)
                    _store_sum(out_ptr, at, count, total.to(element), ADD)
        if PHASES & 4:
            if TWO_SHOTS:
                _await_flags(flags_ptr, fault_ptr, 1, program, epoch, RANK, RANKS, PROGRAMS_, SPINS_)
                for part in tl.static_range(RANKS):
                    for block in range(part * share + program, tl.minimum((part + 1) * share, blocks), PROGRAMS_):
                        at = block * BLOCK_ + tl.arange(0, BLOCK_)
                        total = tl.load(x_ptr + at, mask=at < count, other=0, volatile=True)
                        _store_sum(out_ptr, at, count, total, ADD)
            tl.store(epochs_ptr + program, epoch)


def all_reduce(
    out: torch.Tensor,
    counts: torch.Tensor,
    peers: Peers,
    *,
    add: bool = False,
    pdl: bool = False,
    spins: int = SPINS,
    phases: int = 7,
) -> None:
    """out = the sum of the first counts[TOKENS] rows of all ranks' addends, which are not valid afterwards. Every
    rank launches it with the same shape, in the same order.

    out: [T, hidden] in the addend's dtype, contiguous.
    counts: int64 [8].
    add: add the sum to out, each rounded to its dtype.
    spins: reads of a flag until a peer is late.
    phases: see the kernel; the interpreter runs one phase after another.
    """
    rows, width = out.shape
    launch.check_tensors(
        (peers.addend, "addend", (launch.AtLeast(rows), width)),
        (out, "out", (rows, width), peers.addend.dtype),
        (counts, "counts", *launch.HEADER),
    )
    two_shots = out.numel() * out.itemsize > ONE_SHOT_BYTES
    _all_reduce[(PROGRAMS,)](
        peers.addend, out, counts, peers.boxes, peers.addends, peers.flags, peers.epochs, peers.fault,
        width, peers.rank, peers.ranks, ONE_SHOT_BYTES // out.itemsize, BLOCK, PROGRAMS, spins, two_shots, add, phases, pdl,
        num_warps=8, **launch.options(pdl),
    )  # fmt: skip


@triton.jit
def _gather_logits(
    part_ptr,  # float32 [B, OWN] this rank's columns
    counts_ptr,  # int64 [8] batch header
    logits_ptr, flags_ptr, epochs_ptr, fault_ptr,  # see Peers
    rows,  # B
    OWN: tl.constexpr, FIRST: tl.constexpr, VOCAB: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK_: tl.constexpr,
    PROGRAMS_: tl.constexpr, SPINS_: tl.constexpr, PHASES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """PHASES: 1 stores, 2 waits."""
    program = tl.program_id(0)
    launch.release_successor(PDL)
    launch.wait_for_predecessor(PDL)
    valid = tl.minimum(tl.load(counts_ptr + COUNT_TOKENS).to(tl.int32), rows)
    if valid > 0:
        epoch = tl.load(epochs_ptr + program) + 1
        if PHASES & 1:
            tiles = tl.cdiv(OWN, BLOCK_)
            for tile in range(program, valid * tiles, PROGRAMS_):
                row, column = (tile // tiles).to(tl.int64), tile % tiles * BLOCK_ + tl.arange(0, BLOCK_)
                own = tl.load(part_ptr + row * OWN + column, mask=column < OWN, other=0)
                for peer in tl.static_range(RANKS):
                    logits = tl.load(logits_ptr + peer).to(tl.pointer_type(tl.float32))
                    tl.store(logits + row * VOCAB + FIRST + column, own, mask=column < OWN)
            _raise_flags(flags_ptr, 0, program, epoch, RANK, RANKS, PROGRAMS_)
        if PHASES & 2:
            _await_flags(flags_ptr, fault_ptr, 0, program, epoch, RANK, RANKS, PROGRAMS_, SPINS_)
            tl.store(epochs_ptr + program, epoch)


def gather_logits(
    rows: int, counts: torch.Tensor, peers: Peers, *, pdl: bool = False, spins: int = SPINS, phases: int = 3
) -> torch.Tensor:
    """The first `rows` rows of all ranks' parts of the logits, side by side, on every rank: float32 [rows, vocab].

    Call it like all_reduce, and call all_reduce before the next gather_logits. Rows from counts[TOKENS] on are not valid.
    """
    part, whole = peers.part[:rows], peers.whole[:rows]
    launch.check_tensors(
        (part, "part", (rows, None), torch.float32),
        (whole, "whole", (rows, launch.AtLeast(peers.first + part.shape[1])), torch.float32),
        (counts, "counts", *launch.HEADER),
    )
    _gather_logits[(PROGRAMS,)](
        part, counts, peers.logits, peers.flags, peers.epochs, peers.fault, rows, part.shape[1], peers.first, whole.shape[1],
        peers.rank, peers.ranks, BLOCK, PROGRAMS, spins, phases, pdl, num_warps=8, **launch.options(pdl),
    )  # fmt: skip
    return whole


def connect_peers(
    devices: list[torch.device], dtype: torch.dtype, tokens: int, hidden: int, rows: int, head: list[range]
) -> list[Peers]:
    """The peers of each rank, with memory on its device. Each device must be able to access the memory of all.

    dtype: the addends' dtype.
    tokens, hidden: shape of the largest sum.
    rows: rows of the logits.
    head: the columns of the logits that each rank computes.
    """
    ranks = len(devices)

    def on_each(*shape: int, kind: torch.dtype = dtype) -> list[torch.Tensor]:
        return [torch.zeros(shape, dtype=kind, device=device) for device in devices]

    boxes = on_each(2, ranks, ONE_SHOT_BYTES // dtype.itemsize)
    addends, logits = on_each(tokens, hidden), on_each(rows, head[-1].stop, kind=torch.float32)
    flags = on_each(2, ranks, PROGRAMS, kind=torch.int32)
    epochs, faults = on_each(PROGRAMS, kind=torch.int32), on_each(2, kind=torch.int32)
    shared, found = (boxes, addends, logits, flags), list[Peers]()
    memory = tuple(tensor for of_all in shared for tensor in of_all)
    for rank, device in enumerate(devices):
        at_boxes, at_addends, at_logits, at_flags = (
            torch.tensor([tensor.data_ptr() for tensor in of_all], device=device) for of_all in shared
        )
        part = torch.zeros(rows, len(head[rank]), dtype=torch.float32, device=device)
        own = addends[rank], logits[rank], part, head[rank].start, epochs[rank], faults[rank]
        found.append(Peers(rank, ranks, at_boxes, at_addends, at_logits, at_flags, *own, memory))
    return found
