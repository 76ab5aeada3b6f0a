"""Synthetic requests that a policy is asked about: ordinary ones, and every field at its bounds."""

import random

from blinkpy.scheduler.policies import RequestFields

LONGEST = 1 << 22  # tokens: the bound of --max-model-len
BOUNDS: dict[str, tuple[int, ...]] = {
    "arrival": (0, 1, 1 << 40),
    "arrival_us": (0, 1, 1 << 45),  # a year
    "prompt_length": (1, 2, LONGEST - 1),
    "max_tokens": (1, 2, LONGEST - 1),
    "generated": (0, 1, LONGEST - 2),
    "priority": (-(1 << 31), -1, 0, 1, (1 << 31) - 1),
    "preemptions": (0, 1, 1 << 20),
    "pair": (0, 1, 63),
    "tenant": (0, 1, (1 << 31) - 1),
    "best_effort": (0, 1),
    "tenant_service": (0, 1, 1 << 50),
}


def ordinary(draw: random.Random) -> RequestFields:
    """A request as servers see them. Lengths and times are spread evenly over their orders of magnitude."""

    def spread(most: int) -> int:
        return int(2 ** draw.uniform(0, most.bit_length() - 1))

    max_tokens, preemptions = spread(8192), draw.choice((0, 0, 0, 1, 2))
    return RequestFields(
        arrival=spread(1 << 24),
        arrival_us=spread(1 << 40),
        prompt_length=spread(32768),
        max_tokens=max_tokens,
        generated=draw.randrange(max_tokens) if preemptions else 0,
        priority=draw.choice((0, 0, 0, draw.randint(-10, 10))),
        preemptions=preemptions,
        pair=draw.randrange(4),
        tenant=draw.choice((0, 0, draw.randrange(4), draw.randrange(1 << 31))),
        best_effort=draw.choice((0, 0, 0, 1)),
        tenant_service=spread(1 << 24),
    )


def sample_requests(count: int, seed: int) -> list[RequestFields]:
    """Ordinary requests first, then some with one field at a bound, then some with all of them there."""
    draw = random.Random(seed)
    samples = [ordinary(draw) for _ in range(count)]
    for name, values in BOUNDS.items():
        samples += [ordinary(draw)._replace(**{name: value}) for value in values]
    extremes = [{name: draw.choice(values) for name, values in BOUNDS.items()} for _ in range(count // 4)]
    return samples + [RequestFields(**values) for values in extremes]
