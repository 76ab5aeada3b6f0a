"""The kernels of the loop, including the scheduler, compile for sm_90 without a GPU, within the limits of a block of 256
threads."""

import importlib
import re
from collections import Counter
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed: nothing can be compiled for a GPU here")

from support.expecting_phases import EXPECTING
from support.part_of_cases import part_of
from support.ranked_turns import exchanges
from support.scheduler_cases import make_case
from support.seeded_bugs import Bug, planted

from blinkpy.device.cuda.cubin import _sections, read_cubin
from blinkpy.device.cuda.kernel_compiler import KernelCode, compile_kernel
from blinkpy.kernels import loop_kernels as K
from blinkpy.kernels import loop_kernels as L
from blinkpy.kernels.loop_kernels import _load, _store, device_arguments
from blinkpy.scheduler.cycle import engine_phases, make_phases
from blinkpy.scheduler.rank_exchange import rank_phases

REGISTERS, STACK_BYTES, SHARED_BYTES, CODE_BYTES = 160, 160, 8192, 416 << 10
DRAFTING_BYTES = 430 << 10  # of schedule with drafts, which also has the snapshot code that every variant has
RANK_BYTES = 512  # of shared memory: a rank's table has two more tuples of arrays
WORLD = make_case(attached=False)
KIND, TABLE = device_arguments(WORLD.limits, WORLD.views, WORLD.state)
PHASE, DRAFTING = [(engine_phases(make_phases(drafts=drafts, snapshots=False)), KIND, len(TABLE)) for drafts in (False, True)]
KEEPING = engine_phases(make_phases(drafts=False)), KIND, len(TABLE)
RANK_KIND, RANK_TABLE = device_arguments(
    WORLD.limits, WORLD.views, WORLD.state, (WORLD.views, exchanges(2, [np.zeros(8, np.int64)] * 2)[1])
)
RANK = rank_phases(make_phases(drafts=False, snapshots=False)), RANK_KIND, len(RANK_TABLE)
FEW = 16  # instructions of some thousand
CONDITION = ("cudaGraphSetConditional",)
LANES = ("shfl.sync", "bar.sync")
KERNELS = {  # (maker, words of parameters, functions of the driver, required instructions).
    # blinkpy.engine.loop_graph packs arrays of one dimension as 7 words, arrays of two as 9, handles and numbers as one.
    "overlap": (lambda: K.overlap_kernel(*PHASE), 7 + 7, (), ("ld.acquire.sys", "ld.relaxed.sys", "st.release.sys", *LANES)),
    "schedule": (lambda: K.schedule_kernel(*PHASE), 7 + 7 + 7 + 7 + 9 + 3, CONDITION, ("st.release.sys", *LANES)),
    "overlap with drafts": (
        lambda: K.overlap_kernel(*DRAFTING),
        7 + 7,
        (),
        ("ld.acquire.sys", "ld.relaxed.sys", "st.release.sys", *LANES),
    ),
    "schedule with snapshots": (
        lambda: K.schedule_kernel(*KEEPING),
        7 + 7 + 7 + 7 + 9 + 3,
        CONDITION,
        ("st.release.sys", *LANES),
    ),
    "schedule with drafts": (lambda: K.schedule_kernel(*DRAFTING), 7 + 7 + 7 + 7 + 9 + 3, CONDITION, ("st.release.sys", *LANES)),
    "publish": (lambda: K.publish_kernel(*PHASE), 7 + 7, (), ("st.relaxed.sys",)),
    "overlap of a rank": (
        lambda: K.overlap_kernel(*RANK),
        7 + 7,
        (),
        ("ld.acquire.sys", "ld.relaxed.sys", "st.release.sys", *LANES),
    ),
    "schedule of a rank": (lambda: K.schedule_kernel(*RANK), 7 + 7 + 7 + 7 + 9 + 3, CONDITION, ("st.release.sys", *LANES)),
    "publish of a rank": (lambda: K.publish_kernel(*RANK), 7 + 7, (), ("st.relaxed.sys", *LANES)),
    "after_copy": (K.after_copy_kernel, 7 + 7 + 7 + 2, CONDITION, ()),
    "stamp": (K.stamp_kernel, 7 + 9 + 1, (), ()),
}


@cache
def compiled(name: str) -> KernelCode:
    """A compiled kernel, cached for several tests, because compilation is slow."""
    return compile_kernel(KERNELS[name][0](), getattr(K, f"{name.split()[0].upper()}_SIGNATURE"))


VARIANTS = [name for name in KERNELS if " " in name]  # kernels of drafts, snapshots and ranks: a part of them in each run


@pytest.mark.parametrize("name", [*(name for name in KERNELS if " " not in name), *part_of(VARIANTS, 4)])
def test_the_loops_kernels_compile(name: str) -> None:
    _, parameters, undefined, instructions = KERNELS[name]
    code = compiled(name)
    cubin = read_cubin(code.cubin)
    assert cubin.undefined == undefined
    assert not cubin.unresolved  # the driver provides it
    assert len(code.cubin) < (DRAFTING_BYTES if name.endswith("drafts") else CODE_BYTES)
    for function, needs in cubin.kernels.items():
        assert needs.registers <= REGISTERS, (function, needs)
        assert needs.min_stack <= STACK_BYTES, (function, needs)
        assert needs.shared <= SHARED_BYTES + (RANK_BYTES if "rank" in name else 0), (function, needs)
    assert all(instruction in code.ptx for instruction in (".target sm_90", *instructions))
    head = code.ptx[code.ptx.index(".entry") :]
    assert head[: head.index("{")].count(".param") == parameters
    assert ("griddepcontrol.wait" in code.ptx) == name.startswith(("schedule", "stamp"))
    assert ("griddepcontrol.launch_dependents" in code.ptx) == name.startswith("overlap")


def test_the_loops_memory_has_the_shapes_of_the_signature() -> None:
    _, _, _, words, trace, *_ = K.SCHEDULE_SIGNATURE.args
    assert (np.zeros(L.LOOP_WORDS).ndim, np.zeros((1, L.TRACE_COLUMNS)).ndim) == (words.ndim, trace.ndim)


def test_compiled_code_is_kept(tmp_path) -> None:
    code = KernelCode("entry", "", bytes(range(256)))
    path = tmp_path / "loop.kernel"
    _store(path, code)
    assert _load(path)[0::2] == code[0::2]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="truncated"):
        _load(path)


def test_the_code_that_serves_expects_nothing(monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    """A kernel of the loop for sm_90 has the same instructions with and without the `expect` lines of a file, which differs by
    run. Only a few may differ, by the choice of registers: a remaining `expect` would add a load, a branch and a store. Without
    the lines of all files, the compiler would unroll other loops."""
    assert sum(EXPECTING.values()) >= 2 * (len(EXPECTING) - 1)
    files = sorted(path for path, count in EXPECTING.items() if count)
    chosen = files[int(rng.integers(len(files)))]

    def without_expects(loader: SourceFileLoader, name: str) -> Any:
        source = loader.get_source(name) or ""
        if Path(loader.path) == chosen:
            source = re.sub(r"^ +expect\(.*\)\n", "", source, flags=re.M)
            assert "    expect(" not in source
        return compile(source, loader.path, "exec")

    with planted(Bug("nothing", "check_state", "# inbox", "# inbox")):  # all phases import it
        monkeypatch.setattr(SourceFileLoader, "get_code", without_expects)
        cycle = importlib.import_module("blinkpy.scheduler.cycle")
        phases = cycle.engine_phases(cycle.make_phases(drafts=False, snapshots=False))
        kernels = importlib.import_module("blinkpy.kernels.loop_kernels")
        kind, table = kernels.device_arguments(WORLD.limits, WORLD.views, WORLD.state)
        name = str(rng.choice(("overlap", "schedule")))
        kernel = getattr(kernels, f"{name}_kernel")(phases, kind, len(table))
        stripped = compile_kernel(kernel, getattr(kernels, f"{name.upper()}_SIGNATURE"))
        for with_them, without in zip(machine_code(compiled(name)), machine_code(stripped), strict=True):
            assert len(with_them) == len(without), (chosen, name)
            ours, theirs = instructions(with_them), instructions(without)
            assert sum((ours - theirs).values()) <= FEW, (chosen, name, ours - theirs, theirs - ours)


def machine_code(code: KernelCode) -> list[bytes]:
    return [code.cubin[s.offset : s.offset + s.size] for s in _sections(code.cubin) if s.name.startswith(".text.")]


def instructions(code: bytes) -> Counter[int]:
    """The number of instructions of each kind: the lowest 12 bits of each 16 bytes."""
    return Counter(int.from_bytes(code[at : at + 2], "little") & 0xFFF for at in range(0, len(code), 16))
