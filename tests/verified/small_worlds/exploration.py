"""All sequences of events of a small world, up to a length: each state that they reach is explored once."""

from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol


class SmallWorld(Protocol):
    """A world of real code that can return to an earlier state."""

    def save(self) -> Any:
        """The whole state."""

    def load(self, saved: Any) -> None:
        """Return to a saved state."""

    def key(self) -> Hashable:
        """Equal for states with the same future."""

    def events(self) -> Iterator[Any]:
        """The possible next events."""

    def play(self, event: Any) -> None:
        """Apply an event, and check all that must be true afterwards. Raises an error if anything is wrong."""

    def settle(self) -> None:
        """In a new state: continue until all requests have ended. Raises an error if any does not end."""


class WrongError(AssertionError):
    """A check failed; the message has the shortest sequence of events to the fault."""


@dataclass
class Explored:
    """longest: events of the longest counted sequences. complete: longer sequences reach no other state."""

    states: int = 0
    transitions: int = 0
    sequences: int = 0
    longest: int = 0
    complete: bool = False

    def __str__(self) -> str:
        sequences = f"{self.sequences:,} sequences of up to {self.longest} events"
        more = "; longer ones lead nowhere else" if self.complete else ""
        return f"{self.states:,} states, {self.transitions:,} transitions, {sequences}{more}"


def explore(world: SmallWorld, longest: int) -> Explored:
    """Play all sequences of up to `longest` events from the world's present state; of any length, if these reach no new state.
    Raises WrongError."""
    found = Explored(states=1)
    numbers: dict[Hashable, int] = {world.key(): 0}
    new: list[tuple[int, Any, tuple[Any, ...]]] = [(0, world.save(), ())]  # states at this length, and the events before each
    after: list[list[int]] = []  # by state: the next state after each of its events
    counts = Counter({0: 1})  # sequences of this length, by their last state
    while found.longest < longest and not found.complete:
        states, new = new, []
        for number, saved, path in states:
            assert number == len(after)
            after.append([])
            for event in _events_of(world, saved):
                world.load(saved)
                try:
                    world.play(event)
                    key = world.key()
                    if key not in numbers:
                        numbers[key] = len(numbers)
                        new.append((numbers[key], world.save(), (*path, event)))
                        world.settle()
                except Exception as error:
                    raise WrongError(f"{type(error).__name__}: {error}, after {[*path, event]}") from error
                after[number].append(numbers[key])
                found.transitions += 1
        longer: Counter[int] = Counter()
        for number, count in counts.items():
            for following in after[number]:
                longer[following] += count
        counts, found.longest = longer, found.longest + 1
        found.sequences += counts.total()
        found.states, found.complete = len(numbers), not new
    return found


def _events_of(world: SmallWorld, saved: Any) -> list[Any]:
    world.load(saved)
    return list(world.events())
