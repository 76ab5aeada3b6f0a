"""The wire of the virtual machine (vm/guest_init.sh): two RDMA devices with a network cable between them, which can be cut."""

import subprocess
from pathlib import Path
from typing import NamedTuple

INTERFACES = Path("/sys/class/net")
NO_INTERFACE = "02:00:00:00:00:99"  # a hardware address that no interface has
COMMAND_S = 60


class End(NamedTuple):
    """One end: its RDMA device, the network interface below it, and its address."""

    device: str
    interface: str
    address: str


ENDS = End("rxe_wire0", "wire0", "192.168.78.10"), End("rxe_wire1", "wire1", "192.168.78.11")


def is_laid() -> bool:
    return all((INTERFACES / end.interface).exists() for end in ENDS)


def cut(*directions: int) -> None:
    """From now on what goes from these ends (0, 1) is lost on its way, and no sender is told: the other end's network interface
    takes nothing that is for another hardware address."""
    for number in directions:
        _send_to(number, NO_INTERFACE, "permanent")


def mend() -> None:
    """All that was cut carries again."""
    for number, other in enumerate(reversed(ENDS)):
        _send_to(number, (INTERFACES / other.interface / "address").read_text().strip(), "stale")


def carried(number: int) -> int:
    """Packets that have come to an end (0, 1) over the wire, whether or not it took them."""
    return int((INTERFACES / ENDS[number].interface / "statistics/rx_packets").read_text())


def _send_to(number: int, hardware_address: str, state: str) -> None:
    """Tell an end (0, 1) which hardware address the other one has."""
    words = "neigh", "replace", ENDS[1 - number].address, "lladdr", hardware_address, "nud", state, "dev", ENDS[number].interface
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
