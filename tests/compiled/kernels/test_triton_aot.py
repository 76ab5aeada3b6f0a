"""Every Triton kernel variant compiles for sm_90 within the limits, in a process of its own (it replaces Triton's driver).

A fresh sample is compiled, which has each flag of each kernel; with BLINKPY_PROFILE=nightly all of it.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

from benchmarks.common.aot_sample import DRAWN, SHARE, AskedFor, choose
from blinkpy.device.cuda.cubin import Cubin, CubinError, KernelResources, read_cubin

ENTRIES = ("linear.linear", "attention.attention", "moe.experts", "sampling.sample_tokens")
ROOT = Path(__file__).parents[3]


@pytest.mark.timeout(920)
def test_every_variant_compiles_within_the_limits(seed: int, left_out: Callable[[str], None]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "benchmarks.common.aot_compile"]
    command += [] if os.environ.get("BLINKPY_PROFILE") == "nightly" else ["--sample", str(seed)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.stdout, done.stderr[-4000:]
    left_out(done.stderr.strip().rpartition("\n")[2])
    variants = [json.loads(line) for line in done.stdout.splitlines()]
    registries = [import_module(f"blinkpy.kernels.{name}").VARIANTS for name in ENTRIES]
    registered = [variant for variants in registries for variant in variants.values()]
    names = {kernel.__name__.lstrip("_") for variant in registered for kernel in variant.kernels}
    others = {"embed", "rms_norm", "rope_and_cache", "last_tokens", "swiglu", "softcap", "router", "gate_shared"}
    others |= {"quantise_rows", "swiglu_rows", "write_logprobs", "place_pages", "keep_spilled"}
    assert {v["kernel"] for v in variants} == names | others
    problems = {f"{v['kernel']} {v['label']}": v["problems"] for v in variants if v["problems"]}
    assert not problems
    assert done.returncode == 0


def test_a_sample_has_each_flag_and_a_fresh_share_of_all_others(seed: int, rng: np.random.Generator) -> None:
    def facts(first: int, last: int) -> frozenset[tuple[int]]:
        return frozenset((int(n),) for n in rng.integers(first, last, 3))

    asked = {key: AskedFor(key, facts(0, 40), facts(40, 100)) for key in map(str, range(300))}
    chosen = choose(asked, seed)
    has = [asked[key].facts for key in chosen]
    assert frozenset().union(*has) == frozenset().union(*(kernel.facts for kernel in asked.values()))
    assert 240 // SHARE <= len(chosen) <= 40 + 60 // DRAWN + 300 // SHARE + 1
    assert choose(asked, seed) == chosen != choose(asked, seed + 1)
    alone = {key: AskedFor(key, frozenset(), frozenset({(key,)})) for key in asked}
    assert len(choose(alone, seed)) == 300 // DRAWN + -(-(300 - 300 // DRAWN) // SHARE)
    assert frozenset().union(*(choose(alone, seed + run) for run in range(90))) == alone.keys(), "runs after each other see all"


def test_the_gate_rejects_an_oversized_tile() -> None:
    """The gate itself: a tile that needs more shared memory than a block may have is reported."""
    code = """
import sys
sys.path[:0] = [{root!r}]
import torch
from benchmarks.common import aot_compile as aot
from blinkpy.kernels.linear.linear import linear
from blinkpy.kernels.linear.linear_config import LinearConfig
from blinkpy.kernels.linear.linear_variants import LinearCall, LinearWorkspace
gate = aot.Gate()
x = aot.meta(64, 4096, dtype=torch.bfloat16)
config = LinearConfig(block_m=64, block_n=256, block_k=128, stages=5, warps=8)
workspace = LinearWorkspace.allocate("meta", torch.bfloat16)
call = LinearCall(x, aot.meta(4096, 4096, dtype=torch.bfloat16), x, workspace, aot.meta(8, dtype=torch.int64))
gate.run("large", lambda: linear(call, config))
print(*(variant.problems() for variant in gate.variants.values()))
"""
    filled = code.format(root=str(ROOT))
    done = subprocess.run([sys.executable, "-c", filled], capture_output=True, text=True, timeout=120)
    assert "shared memory" in done.stdout, f"{done.stdout}\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("data", [b"", b"\x7fELF", b"\x7fELF\x02\x01" + bytes(58), b"\x7fELF\x02\x01" + b"\xff" * 200])
def test_damaged_cubin(data: bytes) -> None:
    with pytest.raises(CubinError):
        read_cubin(data)


def test_unresolved_symbols() -> None:
    cubin = Cubin(("cudaGraphLaunch", "__cuda_syscall_x", "my_function"), {"kernel": KernelResources(32, 0, 0, 0)})
    assert cubin.unresolved == ("my_function",)
