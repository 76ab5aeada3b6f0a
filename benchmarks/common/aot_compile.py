"""Compiles the Triton kernels that the served models use for sm_90, without a GPU, and reads the registers and memory of each.

Steps of published models are launched in every form that is served (aot_models.py), and so is each case that a variant declares
(aot_cases.py). Tensors are meta tensors: shapes without memory. A stand-in replaces Triton's driver and names only the target.
So each launch is specialised exactly as by the JIT (alignment, arguments equal to 1) and recorded, but not started. Each
distinct kernel is compiled once. `python -m benchmarks.common.aot_compile` prints a JSON object for each kernel, also for a
kernel that does not compile. With `--sample SEED`, it compiles a sample that has each kernel and a quarter of the flags' values
(aot_sample.py).
"""

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import chain
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from benchmarks.common.aot_cases import case_launches
from benchmarks.common.aot_models import all_forms, steps_of
from benchmarks.common.aot_needs import LONG, MORE_SHARED, MOST_SHARED, formula
from benchmarks.common.aot_sample import AskedFor, asked_for, choose, drawn_facts, drawn_steps
from blinkpy.device.cuda.cubin import SHARED_MEMORY_LIMIT, read_cubin

CAPABILITY = 90
REGISTER_LIMIT = 255
# Bytes of stack frame that a kernel may use; others must not spill. The assembler sometimes keeps two words of the epilogue of
# `linear` on the stack although registers are free. `adjust` gets fewer registers than it would take, so that more programs share
# a multiprocessor; what it spills belongs to the penalties. Triton 3.7 keeps two words of `sample_tokens` there.
# Attention over an FP8 cache with heads of 160 to 256 keeps up to eight words there. A norm of float32 inputs that gathers last
# tokens or quantises keeps two words there, in 30 of 371 variants, although it has registers left.
SPILL_ALLOWED = {
    "linear": 16,
    "adjust": 64,
    "sample_tokens": 8,
    "prefill_attention": 32,
    "decode_attention": 32,
    "rms_norm": 8,
}
SPILL_ALLOWED["latent_prefill"] = 8  # two words, in 2 of 51 variants: the sums of 64 queries of 512 take half of all registers
SPILL_ALLOWED["recur_blocks"] = 344  # matrices of 128 x 128 and their parts take most registers.
# Kernels with inputs of float32, which serves comparisons: three products for each, and heads of 256 leave too few registers.
FLOAT32_SPILL_ALLOWED = 512
# Groups of 16 query heads of 256 over an FP8 cache (Qwen3.5-122B-A10B): 624 to 760 bytes in 8 warps with tiles of 32 keys. With 4
# or 16 warps, or tiles of 16 keys, they are more. Heads of 512 (Gemma 4): 888 to 1,184 bytes in 8 warps with tiles of 32 keys.
# More with tiles of 16 keys, which groups of 16 query heads (12B) need.
FLOAT32_SPILLS = {"decode_attention": 8192, "prefill_attention": 1184}
TARGET = GPUTarget("cuda", CAPABILITY, 32)


CONSTANT_FP8 = re.compile(r"E4M3\.UNPACK_B\S* R\d+, [^R]")
"""In the machine code: ptxas 12.8 takes the upper half of a constant 0 for the byte 0xFF, which is NaN."""

GATHER = re.compile(r"tt\.gather.*axis = (\d+).*: \(tensor<((?:\d+x)+)\w+>, tensor<((?:\d+x)+)")
"""In Triton's first form of a kernel: axis, shape of the source and of the indices."""


@dataclass(frozen=True)
class Variant:
    """One compiled kernel.

    label: a launch that needs the kernel.
    error: why it does not compile; the other figures are then 0.
    formula: estimated need: (bytes of shared memory, 0 if unknown; registers of a thread).
    long: whether its loop has enough steps to fill the pipeline, which the formulas assume.
    """

    label: str
    kernel: str
    warps: int
    registers: int = 0
    shared: int = 0
    stack_frame: int = 0
    unresolved: tuple[str, ...] = ()
    float32: bool = False
    error: str = ""
    constant_bytes: int = 0  # FP8 numbers that are constants of the compiler: see CONSTANT_FP8
    narrow_gathers: int = 0  # see narrow_gathers()
    formula: tuple[int, int] | None = None
    long: bool = True

    def problems(self) -> list[str]:
        shared_limit, registers = SHARED_MEMORY_LIMIT[CAPABILITY], self.registers
        of_float32 = FLOAT32_SPILLS.get(self.kernel, FLOAT32_SPILL_ALLOWED) if self.float32 else 0
        spill = max(SPILL_ALLOWED.get(self.kernel, 0), of_float32)
        found = {
            f"does not compile: {self.error}": bool(self.error),
            f"converts {self.constant_bytes} constant FP8 numbers, which ptxas may take for NaN": self.constant_bytes > 0,
            f"{self.narrow_gathers} gathers from tensors with too few rows for {self.warps} warps": self.narrow_gathers > 0,
            f"shared memory {self.shared} over {shared_limit}": self.shared > shared_limit,
            f"{registers} registers in {self.warps} warps": registers > REGISTER_LIMIT or registers * self.warps * 32 > 65_536,
            f"stack frame of {self.stack_frame} bytes": self.stack_frame > spill,
            f"unresolved symbols {self.unresolved}": bool(self.unresolved),
            f"by formula {self.formula} for {self.shared} bytes and {registers} registers": self.formula_errs(),
        }
        return [problem for problem, there in found.items() if there]

    def formula_errs(self) -> bool:
        """Whether the formula exceeds the compiler's report, or is far below it for shared memory."""
        if self.formula is None or self.error:
            return False
        shared, registers = self.formula
        below = self.long and shared > self.shared
        return registers > self.registers or below or bool(shared and self.shared > MOST_SHARED * shared + MORE_SHARED)


class Recorded(NamedTuple):
    """A kernel that a launch needs, with all inputs of its compilation."""

    label: str
    asked: AskedFor
    function: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: Any
    options: dict[str, Any]

    @property
    def float32(self) -> bool:
        return "*fp32" in [*self.signature.values()][:2]

    @property
    def named(self) -> dict[str, Any]:
        """The constants by name."""
        names = [*self.signature]
        return {names[place[0]]: value for place, value in self.constants.items() if len(place) == 1}

    def formula(self) -> tuple[int, int] | None:
        """See Variant."""
        warps, stages = self.options["num_warps"], self.options["num_stages"]
        needs = formula(self.function.__name__, self.named, [*map(str, self.signature.values())], warps, stages)
        return None if needs is None else (needs.shared, needs.registers(warps))


COMPILE_ONLY = SimpleNamespace(  # replaces Triton's CUDA driver; launches nothing
    get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: TARGET
)


class Gate:
    """Collects the kernels that launches need. Replaces Triton's driver in the whole process."""

    def __init__(self) -> None:
        triton.runtime.driver.set_active(COMPILE_ONLY)
        self.variants: dict[str, Variant] = {}
        self.recorded: dict[str, Recorded] = {}
        self.refused: list[Variant] = []  # launches that raised an error

    def run(self, label: str, launch: Callable[[], object]) -> None:
        """Compile everything that a launch needs, like the JIT, into Triton's cache."""
        original = JITFunction.run

        def compile_only(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            compiled = original(kernel, *args, grid=grid, warmup=True, **kwargs)
            if compiled is not None and compiled.hash not in self.variants:  # None: a hook left it out
                self.variants[compiled.hash] = needs_of(compiled, label)
            return compiled

        with patch.object(JITFunction, "run", compile_only):
            launch()

    def record(self, label: str, launch: Callable[[], object]) -> frozenset[str]:
        """Record everything that a launch needs, without compiling. Returns the keys of the kernels."""
        keys = set[str]()

        def note(**info: Any) -> bool:
            asked, how = asked_for(info), info["compile"]
            keys.add(asked.key)
            if asked.key not in self.recorded:
                options = json.loads(how["specialization_data"])["options"]
                sources = info["fn"].jit_function, how["signature"], how["constants"], how["configs"][0]
                self.recorded[asked.key] = Recorded(label, asked, *sources, {k: _hashable(v) for k, v in options.items()})
            return True  # it is not compiled

        before, knobs.runtime.jit_cache_hook = knobs.runtime.jit_cache_hook, note
        try:
            self.run(label, launch)
        except Exception as error:  # of a check, or of a launcher
            words = ", ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
            self.refused.append(Variant(label, "launch", 0, error=words[:2000]))
        finally:
            knobs.runtime.jit_cache_hook = before
        return frozenset(keys)


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value


def needs_of(compiled: Any, label: str) -> Variant:
    """The needs of a compiled kernel, from its cubin."""
    cubin, name, warps = read_cubin(compiled.asm["cubin"]), compiled.metadata.name, compiled.metadata.num_warps
    needs = cubin.kernels[name]
    shared = compiled.metadata.shared + needs.shared
    constants = len(CONSTANT_FP8.findall(compiled.asm["sass"])) if "e4m3" in compiled.asm["ptx"] else 0
    sizes = needs.registers, shared, needs.stack_frame
    gathers = narrow_gathers(compiled.asm["ttir"], warps)
    return Variant(label, name.lstrip("_"), warps, *sizes, cubin.unresolved, constant_bytes=constants, narrow_gathers=gathers)


def narrow_gathers(ttir: str, warps: int) -> int:
    """The number of gathers that several warps share along their axis. These read outside of shared memory, without an error of
    the compiler (Triton's issue 11600). Threads of a warp are laid along the axis first, the others along other dimensions.
    """
    count = 0
    for axis, *shapes in GATHER.findall(ttir):
        for shape in ([int(size) for size in text.split("x") if size] for text in shapes):
            along = shape.pop(int(axis))
            count += math.prod(shape) * min(along, 32) < 32 * warps
    return count


def compiled_of(recorded: Recorded) -> Variant:
    """Compile a kernel, or read it from Triton's cache."""
    try:
        source = ASTSource(recorded.function, recorded.signature, recorded.constants, recorded.attributes)
        compiled = triton.compile(source, target=TARGET, options=recorded.options)
        needs = needs_of(compiled, recorded.label)
        long = recorded.named.get("K", LONG) >= LONG
        return replace(needs, float32=recorded.float32, formula=recorded.formula(), long=long)
    except Exception as error:  # of Triton, its backend or the assembler
        name, warps = recorded.function.__name__.lstrip("_"), int(recorded.options["num_warps"])
        return Variant(recorded.label, name, warps, error=f"{type(error).__name__}: {error}"[:2000])


def fits(launch: Callable[[], object]) -> bool:
    """Whether the kernels of a launch fit the GPU without spills. Compiles them into Triton's cache; replaces
    Triton's driver.
    """
    gate = Gate()
    gate.run("candidate", launch)
    return not any(variant.problems() for variant in gate.variants.values())


def record_steps(gate: Gate, steps: Iterable[Any]) -> None:
    """Record the kernels of steps, and as facts whether defaults or a table select them. Steps with a table
    come after the same steps without a table.
    """
    by_default: dict[Any, frozenset[str]] = {}
    for step in steps:
        keys, plain = gate.record(step.label, step.launch), replace(step, gpu="")
        by_default.setdefault(plain, keys if not step.gpu else frozenset())
        source, own = (f"table of {step.gpu}", keys - by_default[plain]) if step.gpu else ("defaults", keys)
        for key in own:
            recorded = gate.recorded[key]
            fact = (recorded.function.__name__, "configuration", source)
            asked = recorded.asked._replace(facts=recorded.asked.facts | {fact})
            gate.recorded[key] = recorded._replace(asked=asked)


def sampled(seed: int) -> tuple[list[Recorded], list[Variant]]:
    """A sample of all kernels, with each of them; and the launches that raised an error."""
    gate = Gate()
    for label, launch in case_launches():
        gate.record(label, launch)
    record_steps(gate, drawn_steps(all_forms(), seed))
    chosen = choose(drawn_facts({key: recorded.asked for key, recorded in gate.recorded.items()}, seed), seed)
    left = len(gate.recorded) - len(chosen)
    print(f"{left} of {len(gate.recorded)} kernels of drawn steps left out, with seed {seed}", file=sys.stderr)
    return [recorded for key, recorded in gate.recorded.items() if key in chosen], gate.refused


def every() -> tuple[list[Recorded], list[Variant]]:
    """Each kernel of every form of every published model, and of all cases; and the launches that raised an error."""
    gate = Gate()
    for label, launch in case_launches():
        gate.record(label, launch)
    record_steps(gate, (step for form in all_forms() for step in steps_of(form)))
    print(f"0 of {len(gate.recorded)} kernels left out", file=sys.stderr)
    return list(gate.recorded.values()), gate.refused


def compile_all(recorded: list[Recorded], processes: int = 1) -> Iterator[Variant]:
    """The needs of each kernel, in order."""
    if processes == 1:
        yield from map(compiled_of, recorded)
        return
    IN_CHILDREN[:] = recorded
    with get_context("fork").Pool(processes) as pool:
        yield from pool.imap(_compiled_at, range(len(recorded)), chunksize=8)


IN_CHILDREN: list[Recorded] = []
"""What forked processes compile: kernels can't be sent to them."""


def _compiled_at(index: int) -> Variant:
    return compiled_of(IN_CHILDREN[index])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sample", type=int, metavar="SEED", help="a sample, with each kernel")
    parser.add_argument("--processes", type=int, default=1, help="that compile, at the same time")
    options = parser.parse_args()
    wanted, refused = every() if options.sample is None else sampled(options.sample)
    failed = False
    for variant in chain(refused, compile_all(wanted, options.processes)):
        problems = variant.problems()
        failed |= bool(problems)
        print(json.dumps(asdict(variant) | {"problems": problems}), flush=True)
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
