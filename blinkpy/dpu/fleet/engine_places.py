"""The engines of a fleet, which may come and go: each has a link with an index, its place.

An engine that is no longer listed leaves: its link submits nothing more, and lets go once what it had in flight has ended there,
or goes on elsewhere because the link was lost. Then its place is vacant, and the next engine that comes gets it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from blinkpy.dpu.engine_starts import EngineStarts
from blinkpy.dpu.fleet.fleet_link import FleetLink
from blinkpy.dpu.link.queue_pair import QueuePair


@dataclass(frozen=True)
class EngineEntry:
    """One engine of a fleet. connect: as of EngineLink."""

    label: str
    connect: Callable[[], QueuePair]
    starts: EngineStarts | None = None


class EnginePlaces:
    """make: a link, of its index and engine. links: those that have an engine; always the same list."""

    def __init__(self, make: Callable[[int, EngineEntry], FleetLink], entries: Sequence[EngineEntry]):
        self._make = make
        self.links = [make(index, entry) for index, entry in enumerate(entries)]
        self._all = self.links.copy()

    def __len__(self) -> int:
        """Places, with vacant ones."""
        return len(self._all)

    def __getitem__(self, index: int) -> FleetLink:
        return self._all[index]

    def put(self, entries: Sequence[EngineEntry]) -> tuple[list[FleetLink], dict[int, str]]:
        """These are the engines now. Returns links that are new, and the engines that have been let go, by their indexes."""
        listed = {entry.label for entry in entries}
        gone = dict[int, str]()
        for link in self.links:
            link.leaving = link.label not in listed
            if link.leaving and link.is_idle():
                link.vacate()
                gone[link.index] = link.label
        known = {link.label for link in self.links if not link.vacant}
        free, made = [link for link in self._all if link.vacant], list[FleetLink]()
        for entry in entries:
            if entry.label in known:
                continue
            if free:
                free.pop(0).occupy(entry.label, entry.connect, entry.starts)
            else:
                made.append(self._make(len(self._all), entry))
                self._all.append(made[-1])
        self.links[:] = [link for link in self._all if not link.vacant]
        return made, gone
