"""Options of several engines behind one front end."""

from dataclasses import dataclass

from blinkpy.config import extends, option


@extends("frontend")
@dataclass(frozen=True)
class FleetOptions:
    """Several engines behind one front end."""

    max_moves: int = option(
        3, "times that a request goes on in another of several engines when its own is lost (0: it ends)", low=0, high=1000
    )
    move_timeout_s: int = option(
        30, "longest time that a request is between engines, before it ends with an error", low=1, high=3600
    )
