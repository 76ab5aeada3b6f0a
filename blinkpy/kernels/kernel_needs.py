"""The resources that a kernel's program needs on a multiprocessor, by formula, before anything is loaded or
compiled.

Shared memory holds the operands of a software pipeline, in as many buffers as Triton 3.6 makes of its stages. Registers are at
least those of the tensors that live through a kernel's loop. Ahead-of-time compiling (benchmarks/common/aot_compile.py) compares
the formulas with the compiler's report for every kernel.
"""

from typing import NamedTuple

from blinkpy.config import ConfigError
from blinkpy.device.cuda.cubin import SHARED_MEMORY_LIMIT

CAPABILITY = 90
THREAD_REGISTERS = 255
REGISTERS = 65_536  # of a multiprocessor, which one program may have all of
WARP = 32
OTHER_REGISTERS = 8  # of a thread, for addresses and counters
OTHER_SHARED = 1024  # bytes in addition to the buffers
MATRIX_UNIT_ROWS = 64  # of the first operand, from which Hopper's matrix unit reads both from shared memory


class Needs(NamedTuple):
    """shared: bytes of shared memory.
    values: 32-bit values of all threads that live through the loop.
    """

    shared: int = 0
    values: int = 0

    def registers(self, warps: int) -> int:
        """Of a thread, at least."""
        return -(-self.values // (warps * WARP)) + OTHER_REGISTERS if self.values else 0


def pipeline_bytes(tile: int, stages: int, first_rows: int, warps: int, *, tf32: bool = False) -> int:
    """Shared memory of a loop over products. tile: bytes of the operands of one step.
    first_rows: rows of the first operand.
    tf32: whether operands are float32.

    Operands that the matrix unit reads from shared memory are in use for one more step.
    """
    from_shared = first_rows >= MATRIX_UNIT_ROWS and warps % 4 == 0 and not tf32
    return (stages if from_shared else max(1, stages - 1)) * tile + OTHER_SHARED


def check_needs(needs: Needs, warps: int, what: str) -> None:
    """Raise ConfigError if one program with this number of warps does not fit a multiprocessor. what: the
    configuration, for the message.
    """
    limit, registers = SHARED_MEMORY_LIMIT[CAPABILITY], needs.registers(warps)
    if needs.shared > limit:
        raise ConfigError(f"{what} needs {needs.shared:,} bytes of shared memory, and a program has at most {limit:,}")
    most = min(THREAD_REGISTERS, REGISTERS // (warps * WARP))
    if registers > most:
        raise ConfigError(f"{what} needs at least {registers} registers a thread, and a thread of {warps} warps has {most}")
