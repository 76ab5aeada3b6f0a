"""The grammar of attacks: client, kind of work, amount, pace, and end.

An attack is a value: a seed draws it, JSON keeps it, and `simpler` lists the attacks that are one step smaller.
"""

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Self

from benchmarks.serving.attack_kinds import KINDS, LARGEST

STRANGER, TENANT, NEIGHBOUR = "no key", "another tenant", "the victim's tenant"
WHO = (STRANGER, TENANT, NEIGHBOUR)
WHOLE, PIPELINED, DRIPPED, CHUNKED, STALLED = PACES = ("whole", "pipelined", "dripped", "small chunks", "stalled")
READS, SLOWLY, NEVER = READING = ("at once", "slowly", "never")
STAYS, MIDWAY, IMMEDIATELY, RESET, HALF = LEAVES = ("at the end", "midway", "immediately", "by reset", "by half")
MOST_CONNECTIONS, MOST_SIZE = 3000, 1 << 20
HEAVY_BYTES = 1 << 30  # maximum connections times bytes of a body: the attacker's memory and time


@dataclass(frozen=True)
class Attack:
    """One attack. work: a name of KINDS."""

    work: str
    who: str = TENANT
    connections: int = 8  # open at the same time; each is reopened when it ends
    size: int = 1  # factor of the field that grows
    pace: str = WHOLE  # of sending
    reading: str = READS
    leaves: str = STAYS
    addresses: int = 1  # of the clients, in 127.0.0.0/8
    rounds: int = 0  # maximum number of times that each connection is opened; 0: no limit
    prepared: int = 16  # different requests, made before the attack

    @classmethod
    def drawn(cls, rng: random.Random) -> Self:
        """A random attack."""
        work = rng.choice(sorted(KINDS))
        kind = KINDS[work]
        return cls(
            work,
            rng.choice(WHO if not kind.needs_key else WHO[1:]),
            _log_uniform(rng, MOST_CONNECTIONS),
            _log_uniform(rng, MOST_SIZE) if kind.grows else 1,
            rng.choices(PACES, (6, 2, 1, 1, 1))[0],
            rng.choices(READING, (4, 1, 1))[0],
            rng.choices(LEAVES, (4, 1, 2, 1, 1))[0],
            rng.choice((1, 1000)),
            rng.choice((0, 0, 1)),
        ).bounded()

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """An attack from its JSON form. Raises TypeError for unknown fields, ValueError for unknown words."""
        attack = cls(**values)
        words = (
            (attack.work, KINDS),
            (attack.who, WHO),
            (attack.pace, PACES),
            (attack.reading, READING),
            (attack.leaves, LEAVES),
        )
        if unknown := [word for word, known in words if word not in known]:
            raise ValueError(f"unknown words of an attack: {', '.join(unknown)}")
        return attack.bounded()

    def bounded(self) -> Self:
        """The attack with at most as many connections as the attacker's memory allows."""
        most = max(1, HEAVY_BYTES // min(LARGEST, self.size * 16))
        return replace(self, connections=max(1, min(self.connections, MOST_CONNECTIONS, most)), size=min(self.size, MOST_SIZE))

    def simpler(self) -> Iterator[Self]:
        """Attacks that are one step smaller, the largest steps first."""
        for name, least in (("connections", 1), ("size", 1)):
            value = getattr(self, name)
            for divisor in (8, 2):
                if value > least:
                    yield replace(self, **{name: max(least, value // divisor)})
        plain: dict[str, Any] = {"pace": WHOLE, "reading": READS, "leaves": STAYS, "addresses": 1}
        for name, value in plain.items():
            if getattr(self, name) != value:
                yield replace(self, **{name: value})

    def __str__(self) -> str:
        size = f", size {self.size:,}" if KINDS[self.work].grows else ""
        once = ", once" if self.rounds == 1 else f", {self.rounds} times" if self.rounds else ""
        where = f" from {self.addresses:,} addresses" if self.addresses > 1 else ""
        return (
            f"{self.work} by {self.who}: {self.connections:,} connections{where}{size}, sent {self.pace}, "
            f"read {self.reading}, left {self.leaves}{once}"
        )

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def _log_uniform(rng: random.Random, most: int) -> int:
    return round(most ** rng.random())
