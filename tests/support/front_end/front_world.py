"""The real client of the queue pairs, blinkpy.dpu.link.queue_pair, against the real scheduler in plain Python, in one thread.

A `WireTransport` is memory that writes reach later: in order, when the world delivers them. The model and the checks after each
call are the simulator's, so a front end knows all its tokens from the prompt alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from blinkpy.device.array_trees import as_memoryviews
from blinkpy.device.expect import PROBLEMS
from blinkpy.kv.integrity import check_integrity
from blinkpy.kv.state import ROWS
from blinkpy.queues.array_types import Int32, Int64
from blinkpy.queues.completion import (
    FINISH_CANCELLED,
    FINISH_LENGTH,
    FINISH_MASK,
    FINISH_NONE,
    FINISH_STOP,
    HAS_LOGPROBS,
    HAS_TOKEN,
)
from blinkpy.queues.header import read_header
from blinkpy.queues.logprob_record import RECORD_PAIR, RECORD_PAIRS, Records
from blinkpy.queues.request_parameters import Sampling
from blinkpy.queues.words import ENGINE_STATE, FRONT_DOORBELL, PAIR_ATTACHED, PAIR_CQ_TAIL, PAIR_EPOCH, PAIR_SQ_HEAD, STATE_READY
from blinkpy.transport.contract import PairWords
from blinkpy.verify.sim.simulation import plain_sim
from blinkpy.verify.sim.synthetic_model import check_padding, compute, record_word, token_after, value_of
from blinkpy.verify.sim.turn_invariants import check_promises
from blinkpy.verify.sim.world import TICK_NS, make_world

LONG_NS = 1 << 40


@dataclass
class Sent:
    """A request and what it must get. It is the owner of its InFlight."""

    prompt: list[int]
    sampling: Sampling
    expected: list[int]
    finish: int
    got: list[int] = field(default_factory=list)
    cancelled: bool = False
    ended: int = FINISH_NONE


class WireTransport:
    """See blinkpy.transport.contract.Transport. on_claim: called while a front end waits for its grant: the engine moves."""

    def __init__(self, world: FrontWorld, pair: int) -> None:
        self.layout, self.facts = read_header(world.segment)
        self.world, self.pair = world, pair
        self.wire: deque[Callable[[], None]] = deque()
        self.while_attaching: Callable[[], None] | None = None  # what others do in each call in which this one waits

    def _write(self, array: Any, index: Any, value: Any) -> None:
        kept = np.array(value)

        def land() -> None:
            array[index] = kept

        self.wire.append(land)

    def deliver(self, writes: int) -> None:
        for _ in range(min(writes, len(self.wire))):
            self.wire.popleft()()

    def write_prompt(self, offset: int, tokens: Int32) -> None:
        self._write(self.world.views.prompt[self.pair], slice(offset, offset + len(tokens)), tokens)

    def write_hashes(self, offset: int, hashes: Int64) -> None:
        self._write(self.world.views.hashes[self.pair], slice(offset, offset + len(hashes)), hashes)

    def write_entry(self, index: int, entry: bytes) -> None:
        self._write(self.world.views.sq[self.pair], index, np.frombuffer(entry, np.int32))

    def ring(self, doorbell: int) -> None:
        self.write_word(FRONT_DOORBELL, doorbell)

    def write_cancel(self, slot: int, request_id: int) -> None:
        self._write(self.world.views.cancel[self.pair], slot, request_id)

    def write_word(self, index: int, value: int) -> None:
        self._write(self.world.views.front[self.pair], index, value)

    def read_completions(self, position: int, limit: int) -> list[int]:
        ring = self.world.views.cq[self.pair]
        index = position % len(ring)
        return [int(word) for word in ring[index : min(index + limit, len(ring))]]

    def read_logprobs(self, position: int, count: int) -> Records:
        index = position % self.world.views.cq.shape[1]
        return self.world.views.records[self.pair, index : index + count].copy().view(RECORD_PAIR)

    def read_pair(self) -> PairWords:
        if self.while_attaching is not None:  # the client waits for its grant: let it come
            self.deliver(len(self.wire))
            self.while_attaching()
            self.world.call()
        words = self.world.views.pair[self.pair]
        return PairWords(*(int(words[i]) for i in (PAIR_SQ_HEAD, PAIR_CQ_TAIL, PAIR_EPOCH, PAIR_ATTACHED)))

    def read_engine_state(self) -> int:
        return int(self.world.views.engine[ENGINE_STATE])

    def read_engine(self) -> list[int]:
        words: list[int] = self.world.views.engine.tolist()
        return words

    def read_fault(self) -> int:
        return 0

    def lost(self) -> bool:
        return False

    def close(self) -> None:
        self.wire.clear()


class FrontWorld:
    """Queues, scheduler and model, sized by a seed. schedule: of make_turn; it runs in plain Python."""

    def __init__(self, seed: int, schedule: Callable[..., int]) -> None:
        self.world = make_world(seed, 1, tight=True)
        self.limits, self.state, self.views = self.world[:3]
        self.segment = self.world.segment
        self._arrays, self._queues, self._sim = as_memoryviews(self.state), as_memoryviews(self.views), plain_sim(self.world)
        self._schedule = schedule
        self.now, self.bucket = 1, -1
        self.views.engine[ENGINE_STATE] = STATE_READY

    def call(self) -> int:
        """One call of the scheduler, judged, and the model's step."""
        self.now += TICK_NS
        self.bucket = self._schedule(self.limits, self._queues, self._arrays, self.now, 0, 1)
        problems = check_integrity(self.limits, self.state)
        assert not problems, problems
        fault = check_promises(self.limits, self._queues, self._arrays, self._sim, self.now)
        assert fault == 0, PROBLEMS[fault]
        assert (self.bucket >= 0) == (self.state.batch.counts[ROWS] > 0)
        if self.bucket >= 0:
            fault = check_padding(self._arrays, self.bucket) or compute(self.limits, self._arrays, self._sim.cache, -1)
            assert fault == 0, PROBLEMS[fault]
        return self.bucket

    def foresee(self, prompt: list[int], sampling: Sampling) -> Sent:
        """A request with all that it must get."""
        total = value = 0
        for i, token in enumerate(prompt):
            value = value_of(value, token, i, sampling.cache_salt)
            total += value * (i + 1)
        expected: list[int] = []
        most = min(sampling.max_tokens, self.limits.max_model_len - len(prompt))
        while True:
            token = token_after(total, sampling.seed, self.limits.vocab_size)
            position = len(prompt) + len(expected)
            expected.append(token)
            value = value_of(value, token, position, sampling.cache_salt)
            total += value * (position + 1)
            if len(expected) > sampling.min_tokens and token in sampling.stop_ids:
                return Sent(prompt, sampling, expected, FINISH_STOP)
            if len(expected) == most:
                return Sent(prompt, sampling, expected, FINISH_LENGTH)

    def take(self, sent: Sent, token: int, flags: int, records: deque[Any]) -> None:
        """Check one completion of a request. records: InFlight.records, from which its record is taken."""
        assert sent.ended == FINISH_NONE, "a completion after the last one"
        finish = flags & FINISH_MASK
        if flags & HAS_TOKEN:
            sent.got.append(token)
            assert sent.got == sent.expected[: len(sent.got)], (sent.got, sent.expected)
        assert bool(flags & HAS_LOGPROBS) == bool(flags & HAS_TOKEN and sent.sampling.logprobs >= 0)
        if flags & HAS_LOGPROBS:
            context = len(sent.prompt) + len(sent.got) - 1
            record = np.array([record_word(token, context, k) for k in range(RECORD_PAIRS)])
            assert records.popleft() == record.view(RECORD_PAIR).tolist(), "the log probabilities of another token"
        assert finish or len(sent.got) < len(sent.expected), "all tokens have come, and no end"
        if finish in (FINISH_STOP, FINISH_LENGTH):
            assert (sent.got, finish) == (sent.expected, sent.finish)
        elif finish:
            assert finish == FINISH_CANCELLED and sent.cancelled, finish
        sent.ended = finish
