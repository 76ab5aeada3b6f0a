"""A front-end worker: the protocol of blinkpy.queues in plain Python, with a check of each completion."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from support.front_end.hash_reference import page_hashes
from support.made_up_model import generate, record_of

from blinkpy.queues.completion import (
    FINISH_CANCELLED,
    FINISH_LENGTH,
    FINISH_NONE,
    FINISH_REJECTED,
    FINISH_STOP,
    Completion,
    lap_of,
    unpack_completion,
)
from blinkpy.queues.submission import neutral_entries
from blinkpy.queues.words import (
    FRONT_CLAIM,
    FRONT_CQ_HEAD,
    FRONT_DOORBELL,
    FRONT_HEARTBEAT,
    PAIR_ATTACHED,
    PAIR_CQ_TAIL,
    PAIR_EPOCH,
    PAIR_SQ_HEAD,
    POSITION_MASK,
)

if TYPE_CHECKING:
    from support.scheduler_world import World


@dataclass
class Sent:
    """A request as its front end knows it."""

    request_id: int
    prompt: list[int]
    expected: list[int]
    finish: int
    got: list[int] = field(default_factory=list)
    cancelled: bool = False
    ended: int = FINISH_NONE
    reason: int = 0  # of a rejection
    logprobs: int = -1


class Front:
    """One front-end worker: the protocol of blinkpy.queues, in plain Python."""

    def __init__(self, world: World, pair: int) -> None:
        self.world, self.pair = world, pair
        self.views, self.sizes = world.views, world.sizes
        self.epoch, self.alive, self.counter = 0, True, 0
        self.slots: list[Sent | None] = [None] * self.sizes.slots
        self.done: list[Sent] = []
        self.lost: list[Sent] = []  # of an earlier life of this pair

    def word(self, index: int) -> int:
        return int(self.views.pair[self.pair, index])

    def beat(self) -> None:
        """Show that this front end lives."""
        self.views.front[self.pair, FRONT_HEARTBEAT] += 1

    @property
    def attached(self) -> bool:
        return self.epoch > 0 and self.word(PAIR_EPOCH) == self.epoch and self.word(PAIR_ATTACHED) == 1

    def claim(self) -> None:
        """Ask for the pair; what was in flight is lost. Complete once `settle` was called and `attached`."""
        self.lost += [sent for sent in self.slots if sent is not None]
        self.slots = [None] * self.sizes.slots
        self.epoch = 0
        self.views.front[self.pair, FRONT_CLAIM] = self.word(PAIR_EPOCH) + 1

    def settle(self) -> bool:
        """Take over the pair if the claim was granted."""
        claim = int(self.views.front[self.pair, FRONT_CLAIM])
        if self.epoch == 0 and self.word(PAIR_EPOCH) == claim and self.word(PAIR_ATTACHED) == 1:
            self.epoch, self.sq_tail, self.cq_head = claim, self.word(PAIR_SQ_HEAD), self.word(PAIR_CQ_TAIL)
        return self.epoch > 0

    def free_slot(self) -> int | None:
        full = self.sq_tail - self.word(PAIR_SQ_HEAD) >= self.world.queue.sq_entries
        return None if full else next((i for i, sent in enumerate(self.slots) if sent is None), None)

    def submit(
        self,
        prompt: list[int],
        max_tokens: int = 4,
        *,
        min_tokens: int = 0,
        stop_ids: tuple[int, ...] = (),
        slot: int | None = None,
        ring: bool = True,
        **fields: Any,
    ) -> Sent:
        """Write a request and, unless ring is False, the doorbell. fields: of the entry, as they are, to break the rules."""
        chosen = self.free_slot() if slot is None else slot
        assert chosen is not None
        world, where = self.world, self.sq_tail % self.world.queue.sq_entries
        self.counter += 1
        entry = neutral_entries(1)
        salt = fields.get("cache_salt", 0)
        hashes = page_hashes(prompt, self.sizes.page_size, self.sizes.multipliers, salt)
        offset, hash_offset = where * self.sizes.max_model_len, where * (world.queue.hash_entries // world.queue.sq_entries)
        values = {
            "request_id": self.epoch << 32 | self.counter,
            "seed": 5,
            "epoch": self.epoch,
            "slot": chosen,
            "prompt_offset": offset,
            "prompt_length": len(prompt),
            "hash_offset": hash_offset,
            "hash_count": len(hashes),
            "max_tokens": max_tokens,
            "min_tokens": min_tokens,
            "temperature": 0,
        } | fields
        entry["stop_ids"][0, : len(stop_ids)] = stop_ids
        for name, value in values.items():
            entry[name] = value
        room = min(len(prompt), world.queue.prompt_tokens - offset)
        self.views.prompt[self.pair, offset : offset + room] = prompt[:room]
        room = min(len(hashes), world.queue.hash_entries - hash_offset)
        self.views.hashes[self.pair, hash_offset : hash_offset + room] = hashes[:room]
        self.views.sq[self.pair, where] = entry.view(np.int32)
        self.sq_tail += 1
        if ring:
            self.ring()
        most = max(1, min(max_tokens, self.sizes.max_model_len - len(prompt)))
        expected, finish = generate(prompt, most, min_tokens, list(stop_ids), self.sizes.vocab_size)
        sent = Sent(int(entry["request_id"][0]), prompt, expected, finish, logprobs=int(entry["logprobs"][0]))
        if 0 <= chosen < self.sizes.slots and self.slots[chosen] is None:
            self.slots[chosen] = sent
        return sent

    def ring(self) -> None:
        self.views.front[self.pair, FRONT_DOORBELL] = self.epoch << 32 | self.sq_tail & POSITION_MASK

    def cancel(self, slot: int) -> None:
        sent = self.slots[slot]
        if sent is not None:
            sent.cancelled = True
            self.views.cancel[self.pair, slot] = sent.request_id

    def poll(self, most: int = 1 << 30) -> None:
        """Read completions and check each: the right token of the right request, in order, once."""
        for _ in range(most):
            word = int(self.views.cq[self.pair, self.cq_head % self.sizes.cq_entries])
            completion = unpack_completion(word)
            if completion.lap != lap_of(self.cq_head, self.sizes.cq_entries):
                break
            record = self.views.records[self.pair, self.cq_head % self.sizes.cq_entries]
            self.cq_head += 1
            self._take(completion, record)
        self.views.front[self.pair, FRONT_CQ_HEAD] = self.epoch << 32 | self.cq_head & POSITION_MASK

    def _take(self, completion: Completion, record: np.ndarray) -> None:
        sent = self.slots[completion.slot]
        assert sent is not None, f"a completion for nobody: {completion}"
        if completion.has_token:
            sent.got.append(completion.token)
            assert sent.got == sent.expected[: len(sent.got)], (sent.got, sent.expected)
            assert completion.has_logprobs == (sent.logprobs >= 0)
            if completion.has_logprobs:
                assert (record == record_of(completion.token, len(sent.prompt) + len(sent.got) - 1)).all()
        else:
            assert not completion.has_logprobs
        if completion.finish:
            sent.ended = completion.finish
            sent.reason = completion.token if completion.finish == FINISH_REJECTED else 0
            if completion.finish in (FINISH_STOP, FINISH_LENGTH):
                assert sent.got == sent.expected
                assert sent.finish == completion.finish
            elif completion.finish == FINISH_CANCELLED:
                assert sent.cancelled
            self.slots[completion.slot] = None
            self.done.append(sent)
        else:
            assert len(sent.got) < len(sent.expected)

    @property
    def busy(self) -> bool:
        return any(sent is not None for sent in self.slots)
