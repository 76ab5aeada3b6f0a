"""Memory on the NUMA node of a device: Linux takes the pages that a thread asks for from the node of the core it runs on."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

DEVICES = Path("/sys/bus/pci/devices")


def cores_near(address: str) -> frozenset[int]:
    """The cores of a PCI device's NUMA node that this thread may run on; empty if unknown. address: such as
    0000:18:00.0.
    """
    try:
        listed = (DEVICES / address / "local_cpulist").read_text()
        return frozenset(_cores_of(listed)) & os.sched_getaffinity(0)
    except (OSError, ValueError):
        return frozenset()


def _cores_of(listed: str) -> Iterator[int]:
    """The cores of a list of Linux, as 0-15,32."""
    for part in filter(None, listed.strip().split(",")):
        first, _, last = part.partition("-")
        yield from range(int(first), int(last or first) + 1)


@contextlib.contextmanager
def running_on(cores: frozenset[int]) -> Iterator[None]:
    """Pin this thread to these cores within the block; an empty set means all."""
    allowed = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
