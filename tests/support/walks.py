"""Random strings of an automaton."""

import numpy as np

from blinkpy.queues.byte_automaton import BYTES, DEAD, ByteAutomaton
from blinkpy.verify.sim.grammar_supply import written_out


class Walker:
    """Draws strings: random steps for a while, then the shortest path to an end."""

    def __init__(self, automaton: ByteAutomaton):
        table, accepting, _ = written_out(automaton)
        self.rows = table[:, automaton.class_of].tolist()
        self.accepting = accepting.tolist()
        self.bytes_of = [[byte for byte in range(BYTES) if row[byte] != DEAD] for row in self.rows]
        self.classes = [
            sorted({row[byte]: byte for byte in bytes_of}) for row, bytes_of in zip(self.rows, self.bytes_of, strict=True)
        ]
        self.distance = self._distances()

    def _distances(self) -> list[int]:
        """The minimum number of bytes from each state to an accepting state."""
        sources: list[set[int]] = [set() for _ in self.rows]
        for state, row in enumerate(self.rows):
            for target in set(row) - {DEAD}:
                sources[target].add(state)
        distance = [0 if last else -1 for last in self.accepting]
        found = [state for state, last in enumerate(self.accepting) if last]
        for state in found:
            for source in sources[state]:
                if distance[source] < 0:
                    distance[source] = distance[state] + 1
                    found.append(source)
        assert min(distance) >= 0, "a state that reaches no end"
        return distance

    def longest(self) -> int | None:
        """The bytes of the longest string; None if strings are unbounded."""
        found: dict[int, int] = {}
        waiting, open_states = [0], set[int]()
        while waiting:
            state = waiting[-1]
            targets = {self.rows[state][byte] for byte in self.bytes_of[state]}
            if state in open_states:  # all its targets are known
                found[state] = max((1 + found[target] for target in targets), default=0)
                open_states.remove(state)
                waiting.pop()
            elif state in found:
                waiting.pop()
            else:
                if targets & open_states or state in targets:
                    return None
                open_states.add(state)
                waiting += targets - found.keys()
        return found[0]

    def draw(self, rng: np.random.Generator, steps: int, start: bytes = b"") -> bytes:
        """A string with up to `steps` random bytes. start: its first bytes, which the automaton must allow."""
        text, state = bytearray(start), 0
        for byte in start:
            state = self.rows[state][byte]
        steps += len(start)
        while True:
            free = len(text) < steps
            if self.accepting[state] and (not free or not self.bytes_of[state] or rng.random() < 0.1):
                return bytes(text)
            row, bytes_of = self.rows[state], self.bytes_of[state]
            if free and rng.random() < 0.5:  # each next state is equally likely, however many bytes lead to it
                target = self.classes[state][rng.integers(len(self.classes[state]))]
                bytes_of = [byte for byte in bytes_of if row[byte] == target]
            elif not free:
                bytes_of = [byte for byte in bytes_of if self.distance[row[byte]] < self.distance[state]]
            byte = int(bytes_of[rng.integers(len(bytes_of))])
            text.append(byte)
            state = row[byte]
