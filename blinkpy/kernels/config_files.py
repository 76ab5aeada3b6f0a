"""Files of measured configurations: one for each GPU model and kind of kernel, shipped in configs/. No kernel is tuned at the
start.
"""

import json
import re
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TypeVar

from blinkpy.config import ConfigError
from blinkpy.device.cuda.cubin import SHARED_MEMORY_LIMIT

CAPABILITY = 90
THREAD_REGISTERS = 255
REGISTERS = 65_536  # registers of a multiprocessor; one program may use all
WARP = 32
OTHER_REGISTERS = 8  # registers of a thread for addresses and counters
OTHER_SHARED = 1024  # bytes in addition to the buffers
MATRIX_UNIT_ROWS = 64  # minimum rows of the first operand for which Hopper's matrix unit reads both operands from shared memory


class Needs(NamedTuple):
    """The needs of a program.

    shared: bytes of shared memory.
    values: 32-bit values that stay in registers during the loop, of all threads together.
    """

    shared: int = 0
    values: int = 0

    def registers(self, warps: int) -> int:
        """Minimum registers per thread."""
        return -(-self.values // (warps * WARP)) + OTHER_REGISTERS if self.values else 0


def pipeline_bytes(tile: int, stages: int, first_rows: int, warps: int, *, tf32: bool = False) -> int:
    """Shared memory of a loop over products. Operands that the matrix unit reads from shared memory are in
    use for one more step.

    tile: bytes of the operands of one step.
    first_rows: rows of the first operand.
    tf32: the operands are float32.
    """
    from_shared = first_rows >= MATRIX_UNIT_ROWS and warps % 4 == 0 and not tf32
    return (stages if from_shared else max(1, stages - 1)) * tile + OTHER_SHARED


def check_needs(needs: Needs, warps: int, what: str) -> None:
    """Raise ConfigError if one program with this number of warps does not fit a multiprocessor.

    what: name of the configuration in the message.
    """
    limit, registers = SHARED_MEMORY_LIMIT[CAPABILITY], needs.registers(warps)
    if needs.shared > limit:
        raise ConfigError(f"{what} needs {needs.shared:,} bytes of shared memory, but the limit is {limit:,}")
    most = min(THREAD_REGISTERS, REGISTERS // (warps * WARP))
    if registers > most:
        raise ConfigError(
            f"{what} needs at least {registers} registers per thread, but with {warps} warps a thread has only {most}"
        )


FOLDER = Path(__file__).parent / "configs"
VERSION = 1

T = TypeVar("T")


def gpus_with_tables(folder: Path = FOLDER) -> list[str]:
    """Names of the GPU models for which a table of any kind is shipped."""
    return sorted({json.loads(path.read_text(encoding="utf-8"))["gpu"] for path in folder.glob("*.json")})


def check_power_of_two(what: str, value: int, least: int) -> None:
    """Raise ConfigError unless `value` is a power of two and at least `least`."""
    if value < least or value & (value - 1):
        raise ConfigError(f"{what} {value} must be a power of two of at least {least}")


def power_of_two_at_most(value: int) -> int:
    """The largest power of two up to `value`, at least 1."""
    return 1 << (max(1, value).bit_length() - 1)


class ConfigTable(Generic[T]):
    """Measured configurations of one GPU model, by the names of shapes. Other shapes get defaults."""

    section: ClassVar[str]  # key of the entries in the file
    suffix: ClassVar[str] = ""  # of the file's name

    @staticmethod
    def from_json(name: str, entry: Any) -> Any:
        """Parse an entry of the file. Raises ValueError, KeyError, TypeError or AttributeError for a damaged
        entry.
        """
        raise NotImplementedError

    @staticmethod
    def to_json(entry: Any) -> Any:
        raise NotImplementedError

    def __init__(self, entries: dict[str, T] | None = None) -> None:
        self.entries = entries or {}

    @classmethod
    def path(cls, gpu_name: str, folder: Path) -> Path:
        """The path of a GPU model's table: nvidia_h200.json for "NVIDIA H200"."""
        slug = re.sub(r"[^a-z0-9]+", "_", gpu_name.lower()).strip("_")
        return folder / f"{slug}{cls.suffix}.json"

    @classmethod
    def load(cls, gpu_name: str, folder: Path = FOLDER) -> Self:
        """The shipped table of a GPU model, or an empty one. Raises ConfigError for a damaged table."""
        path = cls.path(gpu_name, folder)
        if not path.exists():
            return cls()
        try:
            document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            if document["version"] != VERSION:
                raise ConfigError(f"version {document['version']}, expected {VERSION}")
            entries = dict(document[cls.section].items())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"{path}: section {cls.section!r} is not a valid table of configurations: {error}") from error
        return cls({name: cls._entry(path, name, entry) for name, entry in entries.items()})

    @classmethod
    def _entry(cls, path: Path, name: str, entry: Any) -> T:
        try:
            checked: T = cls.from_json(name, entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            words = f"unknown field {error}" if isinstance(error, KeyError) else str(error)
            raise ConfigError(
                f"{path}: entry {name!r} of {cls.section!r}: {words}; remove the entry, or measure it again "
                f"(docs/gpu-loop.md): shapes without an entry use defaults"
            ) from error
        return checked

    def save(self, gpu_name: str, measured: dict[str, Any], folder: Path = FOLDER) -> Path:
        """Write the table. measured: versions and date of the measurement."""
        path = self.path(gpu_name, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        entries = {name: self.to_json(entry) for name, entry in sorted(self.entries.items())}
        document = {"version": VERSION, "gpu": gpu_name, "measured": measured, self.section: entries}
        path.write_text(json.dumps(document, indent=1) + "\n")
        return path
