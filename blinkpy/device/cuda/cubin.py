"""A small reader of CUDA machine code (cubin, an ELF file) in pure Python, without CUDA tools or a GPU.

It reads the values that a build gate checks. `cuobjdump --dump-elf` prints the attribute numbers of the `.nv.info` section
(EIATTR_REGCOUNT, EIATTR_FRAME_SIZE, EIATTR_MIN_STACK_SIZE).
"""

import struct
from dataclasses import dataclass
from typing import NamedTuple

SHARED_MEMORY_LIMIT = {90: 232_448}
"""Largest shared memory of one block in bytes, by compute capability (227 KiB on Hopper)."""

DRIVER_SYMBOLS = frozenset({"cudaGraphLaunch", "cudaGraphSetConditional", "vprintf", "__assertfail", "malloc", "free"})
"""Undefined symbols that the driver resolves when it loads the module."""

SHARED = ".nv.shared."  # followed by a kernel's name: the section of its static shared memory
_ATTRIBUTES = {0x2F: "registers", 0x11: "stack_frame", 0x12: "min_stack"}
_FORMAT_SIZED = 4  # EIFMT_SVAL: a 16-bit size, then the bytes; other formats hold their value in these 16 bits
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


class CubinError(ValueError):
    """The bytes are not a supported cubin."""


@dataclass(frozen=True)
class KernelResources:
    """The resources of one kernel: 32-bit registers, and bytes."""

    registers: int = 0  # per thread
    stack_frame: int = 0  # local memory per thread (spilled registers and arrays); 0 without spills
    min_stack: int = 0  # stack per thread including called functions
    shared: int = 0  # static shared memory per block; dynamic shared memory (of Triton) is not in the file


@dataclass(frozen=True)
class Cubin:
    undefined: tuple[str, ...]  # symbols that the file uses but does not define
    kernels: dict[str, KernelResources]  # of kernels and non-inlined device functions, by (mangled) name

    @property
    def unresolved(self) -> tuple[str, ...]:
        """Undefined symbols that the driver does not provide; with any of them, the file can't be loaded."""
        return tuple(s for s in self.undefined if s not in DRIVER_SYMBOLS and not s.startswith("__cuda_syscall_"))


class _Section(NamedTuple):
    name: str
    offset: int
    size: int
    link: int


def read_cubin(data: bytes) -> Cubin:
    """Read a cubin. Raises CubinError unless it is a complete 64-bit little-endian ELF file with a symbol
    table.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise CubinError("not a cubin: no 64-bit little-endian ELF header")
    try:
        return _read(data)
    except (struct.error, IndexError, KeyError, ValueError, OverflowError) as error:
        raise CubinError(f"damaged cubin: {error}") from error


def _read(data: bytes) -> Cubin:
    sections = _sections(data)
    by_name = {section.name: section for section in sections}
    symbols = _symbols(data, by_name[".symtab"], sections)
    undefined = tuple(name for name, index in symbols if index == 0 and name and not name.startswith(".nv.reservedSmem"))
    found: dict[str, dict[str, int]] = {}
    if ".nv.info" in by_name:
        for symbol, attribute, value in _attributes(data, by_name[".nv.info"]):
            found.setdefault(symbols[symbol][0], {})[attribute] = value
    shared = {name.removeprefix(SHARED): section.size for name, section in by_name.items() if name.startswith(SHARED)}
    kernels = {name: KernelResources(**values, shared=shared.get(name, 0)) for name, values in found.items()}
    return Cubin(undefined, kernels)


def _text(data: bytes, offset: int) -> str:
    return data[offset : data.index(b"\0", offset)].decode()


def _sections(data: bytes) -> list[_Section]:
    (table,) = struct.unpack_from("<Q", data, 40)
    entry_size, count, names_index = struct.unpack_from("<HHH", data, 58)
    headers = [_SECTION_HEADER.unpack_from(data, table + i * entry_size) for i in range(count)]
    names = headers[names_index][4]
    return [_Section(_text(data, names + h[0]), offset=h[4], size=h[5], link=h[6]) for h in headers]


def _symbols(data: bytes, table: _Section, sections: list[_Section]) -> list[tuple[str, int]]:
    """(name, section index) of each symbol; section 0 means undefined."""
    strings = sections[table.link].offset
    entries = (_SYMBOL.unpack_from(data, table.offset + i) for i in range(0, table.size, _SYMBOL.size))
    return [(_text(data, strings + entry[0]), entry[3]) for entry in entries]


def _attributes(data: bytes, info: _Section) -> list[tuple[int, str, int]]:
    """(symbol index, attribute, value) of each per-kernel attribute in `.nv.info`."""
    found = []
    offset, end = info.offset, info.offset + info.size
    while offset < end:
        form, attribute, size = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form != _FORMAT_SIZED:
            continue
        if attribute in _ATTRIBUTES and size == 8:
            symbol, value = struct.unpack_from("<II", data, offset)
            found.append((symbol, _ATTRIBUTES[attribute], value))
        offset += size
    return found
