"""Worlds for tests of one behaviour at a time: in plain Python, with every front end attached."""

from __future__ import annotations

from typing import Any

from support.scheduler_world import Sizes, World

from blinkpy.kv.state import DECODE_ROWS, ROWS, TOKENS
from blinkpy.scheduler.policies import SHIPPED


def world(policy: str = "fcfs", **sizes: Any) -> World:
    """A small world whose front ends have their pairs. sizes: of Sizes."""
    made = World(Sizes(**sizes), "python", SHIPPED[policy])
    made.attach()
    return made


def prompt(n: int, start: int = 0) -> list[int]:
    """n tokens; equal for equal arguments."""
    return [(start + 3 * i) % 50 for i in range(n)]


def counts(made: World) -> list[int]:
    """Rows, tokens and decoding rows of the batch."""
    return [int(made.state.batch.counts[i]) for i in (ROWS, TOKENS, DECODE_ROWS)]


def statuses(made: World, pair: int = 0) -> list[int]:
    """Of a pair's request slots."""
    slots = made.sizes.slots
    return made.state.requests.status[pair * slots : (pair + 1) * slots].tolist()
