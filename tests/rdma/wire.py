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
    """Lose all packets that these ends (0, 1) send, without an error for the sender: the other end's network interface drops
    packets for another hardware address."""
    for number in directions:
        _send_to(number, NO_INTERFACE, "permanent")


def mend() -> None:
    """Carry packets in both directions again."""
    for number, other in enumerate(reversed(ENDS)):
        _send_to(number, (INTERFACES / other.interface / "address").read_text().strip(), "stale")


def carried(number: int) -> int:
    """Packets that have reached an end (0, 1) over the wire, whether accepted or dropped."""
    return int((INTERFACES / ENDS[number].interface / "statistics/rx_packets").read_text())


def _send_to(number: int, hardware_address: str, state: str) -> None:
    """Set the hardware address to which an end (0, 1) sends."""
    words = "neigh", "replace", ENDS[1 - number].address, "lladdr", hardware_address, "nud", state, "dev", ENDS[number].interface
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=COMMAND_S)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
