"""Random worlds, and random courses of events in them, from one seed."""

from __future__ import annotations

import dataclasses
import random

from support.protocol_front import Front
from support.scheduler_world import MULTIPLIERS, Sizes, World

from blinkpy.queues.submission import SUBMIT_NO_PREFIX_CACHE
from blinkpy.queues.words import FRONT_DOORBELL


def random_sizes(seed: int) -> Sizes:
    """Parameters of a random small world."""
    draw = random.Random(seed)
    rows = draw.randint(1, 6)
    tokens = rows + draw.randint(0, 20)
    sizes = Sizes(
        pairs=draw.randint(1, 5),
        slots=draw.randint(1, 6),
        cq_entries=draw.choice((2, 4, 16, 64)),
        rows=rows,
        tokens=tokens,
        mixed_tokens=draw.randint(2 * rows, tokens) if 2 * rows <= tokens and draw.random() < 0.5 else 0,
        burst_tokens=draw.choice((1, 8, 24, 0)),
        page_size=draw.choice((1, 2, 4, 8)),
        pages=draw.randint(3, 24),
        max_model_len=draw.randint(8, 48),
        prefix_caching=draw.random() < 0.85,
        multipliers=draw.choice((MULTIPLIERS, MULTIPLIERS, (0, 0))),  # 0: hashes say little, so that they collide
    )
    mixed = sizes.mixed_tokens
    return dataclasses.replace(sizes, burst_step_tokens=(0, mixed, (mixed + tokens) // 2)[sizes.pages % 3] if mixed else 0)


class Story:
    """A random course of events in a world, from one seed: submissions with shared prefixes, cancels, slow readers, crashes
    and returns, late writes of owners that are gone."""

    def __init__(self, world: World, seed: int, load: float = 0.6) -> None:
        self.world, self.random, self.load = world, random.Random(seed), load
        draw = self.random
        sizes = world.sizes
        length = sizes.max_model_len - 2
        self.stems = [[draw.randrange(sizes.vocab_size) for _ in range(length)] for _ in range(3)]
        self.slow = [draw.random() < 0.3 for _ in world.fronts]
        world.attach()

    def prompt(self) -> list[int]:
        draw, sizes = self.random, self.world.sizes
        stem = draw.choice(self.stems)
        longest = min(sizes.max_model_len - 2, sizes.pages * sizes.page_size - 2)
        length = draw.randint(1, max(1, longest)) if draw.random() < 0.5 else draw.randint(1, max(1, longest // 3))
        own = draw.randint(0, min(3, length - 1))
        return stem[: length - own] + [draw.randrange(sizes.vocab_size) for _ in range(own)]

    def tick(self) -> None:
        world, draw = self.world, self.random
        for pair, front in enumerate(world.fronts):
            if draw.random() < 0.01:
                self._crash(front)
            if not front.alive:
                if draw.random() < 0.08:
                    front.alive = True
                    front.claim()
                elif draw.random() < 0.2:  # what is still on its way
                    world.views.front[pair, FRONT_DOORBELL] = draw.choice((0, front.epoch << 32 | draw.randrange(1 << 20)))
                continue
            if not front.settle():
                continue
            if not front.attached:
                front.claim()
                continue
            self._act(front)
        world.step()
        if draw.random() < 0.002:
            world.now += 2 * world.limits.lease_ns  # nobody is heard for a while

    def _crash(self, front: Front) -> None:
        front.alive = False
        front.lost += [sent for sent in front.slots if sent is not None]
        front.slots = [None] * front.sizes.slots

    def _act(self, front: Front) -> None:
        draw, sizes = self.random, self.world.sizes
        while draw.random() < self.load and front.free_slot() is not None:
            prompt = self.prompt()
            room = min(sizes.max_model_len, sizes.pages * sizes.page_size + 1) - len(prompt)
            stop_ids = tuple(draw.randrange(sizes.vocab_size) for _ in range(draw.choice((0, 0, 3))))
            broken = draw.choice(({"temperature": -1}, {"hash_offset": -1})) if draw.random() < 0.05 else {}
            front.submit(
                prompt,
                draw.randint(1, max(1, min(room, 12))),
                min_tokens=draw.choice((0, 0, 2)),
                stop_ids=stop_ids,
                priority=draw.randint(-2, 2),
                cache_salt=draw.choice((0, 0, 0, 9)),
                flags=draw.choice((0, 0, 0, SUBMIT_NO_PREFIX_CACHE)),
                logprobs=draw.choice((-1, -1, 0, 20)),
                ring=draw.random() < 0.8,
                **broken,
            )
        if draw.random() < 0.5:
            front.ring()
        for slot in range(sizes.slots):
            if draw.random() < 0.03:
                front.cancel(slot)
        if not self.slow[front.pair]:
            front.poll()
        elif draw.random() < 0.2:
            front.poll(draw.randint(0, 4))
        if draw.random() < 0.02:
            self.slow[front.pair] = not self.slow[front.pair]

    def end(self) -> None:
        """Everybody reads again; all requests must end, and all pages come back."""
        world = self.world
        for front in world.fronts:
            if not front.alive or front.epoch == 0 or not front.attached:
                front.claim()
            front.alive = True
        for _ in range(3):
            for front in world.fronts:
                if front.settle():
                    front.ring()
            world.step()
        world.finish()
        assert (world.state.pages.refcount == 0).all()
