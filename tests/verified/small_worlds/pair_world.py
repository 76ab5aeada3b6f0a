"""One queue pair: real client and real scheduler in plain Python, with writes, turns and reads in every order."""

import copy
import dataclasses
import hashlib
import importlib
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
from support.expected_request import ExpectedRequest
from support.front_end.wire_transport import WireTransport
from support.scheduler_cases import case_sizes
from verified.small_worlds.packed_arrays import PackedArrays

from blinkpy.device.expect import describe_fault
from blinkpy.device.tables import as_memoryviews, named_arrays
from blinkpy.kv import state as S
from blinkpy.kv.invariants.check_state import check_state
from blinkpy.queues import words as W
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.scheduler.policies import fcfs
from blinkpy.verify.sim.simulation import plain_sim
from blinkpy.verify.sim.synthetic_model import compute
from blinkpy.verify.sim.turn_invariants import check_turn
from blinkpy.verify.sim.world import TICK_NS, Sim, make_world

PAGE_SIZE = 2
KINDS = (((1,), 1), ((1, 0), 2))  # prompt, and tokens that the request may generate
EVERYTHING = 1 << 30
CALM_ROUNDS = 12
Event = tuple[Any, ...]
# No decision depends on these: times, numbers of turns, service of tenants, working memory, the client's clock.
UNKEYED = (
    *("scratch.", "forecast.", "inbox.", "recorder.", "counters", "counts"),
    *("requests.arrival_us", "batch.logprobs", "pairs.heartbeat", "pairs.granted_ns", "pairs.verdict"),
    *("tenants.", "requests.service", "requests.charged"),
)
CLIENT_FIXED = ("transport", "facts", "sizes", "_hasher", "engine_timeout_s", "longest_prompt", "_engine_beat_seen")


class Parts(NamedTuple):
    state: S.State
    sim: Sim


class PairWorld:
    """Up to `slots` concurrent requests, and a completion ring of cq_entries. The constructor looks up client and scheduler, so
    that a test may plant bugs in them."""

    def __init__(self, slots: int, cq_entries: int) -> None:
        self._modules = importlib.import_module("blinkpy.dpu.link.queue_pair")
        self._schedule = importlib.import_module("blinkpy.scheduler.cycle").make_turn(fcfs)
        queue, facts, options = case_sizes(
            pairs=1, slots=slots, cq_entries=cq_entries, rows=slots, tokens=4, page_size=PAGE_SIZE, pages=3, max_model_len=4
        )
        queue = dataclasses.replace(queue, hash_entries=1)  # space for one prompt with a full page
        world = make_world(1, 1, chosen=(queue, facts, options))
        world = world._replace(limits=world.limits._replace(claim_ns=0))  # claims do not wait, which makes fewer states
        self._packed = PackedArrays(Parts(world.state, world.sim))
        self.limits, (self.state, sim) = world.limits, self._packed.tree
        self.views, self.segment = world.queues, world.segment
        world = world._replace(state=self.state, sim=sim)
        self._arguments = self.limits, as_memoryviews(self.views), as_memoryviews(self.state), plain_sim(world)
        self._arrays = [array for name, array in named_arrays(self.state) if not name.startswith(UNKEYED)]
        timed = ("beat", "beat_ns", "granted_ns")
        self._arrays += [array for name, array in named_arrays(sim.observed) if name not in timed] + [sim.cache]
        self.views.engine[W.ENGINE_STATE] = W.STATE_READY
        self.now, self.bucket, self.owners, self.excused = 1, -1, 0, False
        self.awaited: list[ExpectedRequest] = []
        self._claim()

    # ---- states ----------------------------------------------------------------------------------------------------------

    def _client_fields(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.client).items() if name not in CLIENT_FIXED}

    def save(self) -> Any:
        python = copy.deepcopy((self._client_fields(), self.awaited))
        wire = tuple(self.client.transport.wire)
        numbers = self.now, self.bucket, self.owners, self.excused
        return self._packed.save(), bytes(self.segment), numbers, self.client, wire, python

    def load(self, saved: Any) -> None:
        memory, segment, numbers, self.client, wire, python = saved
        self.now, self.bucket, self.owners, self.excused = numbers
        self._packed.load(memory)
        self.segment[:] = segment
        fields, self.awaited = copy.deepcopy(python)
        vars(self.client).update(fields)
        self.client.transport.wire.clear()
        self.client.transport.wire.extend(wire)
        self.client.transport.catch_up()

    def key(self) -> Hashable:
        state, views, client = self.state, self.views, self.client
        received = views.front[0, W.FRONT_HEARTBEAT] != state.pairs.heartbeat[0]
        counts = np.delete(state.counts, (S.TURNS, S.STEPS))
        front = np.delete(views.front, W.FRONT_HEARTBEAT, axis=1)
        shared = views.pair, front, views.cq, views.sq, views.prompt, views.hashes, views.cancel, counts
        sent = [(write.func.__name__, *map(_plain, write.args)) for write in client.transport.wire]
        sent = [word[:2] if word[:2] == ("write_word", W.FRONT_HEARTBEAT) else word for word in sent]
        live = [(request.request_id, request.slot, request.cancelled) for request in client.live()]
        fields = client._free, client._sq_head, client._sq_tail, client._ended, client._cq_position, client._requests
        arenas = [vars(arena) for arena in (client._prompts, client._hashes)]
        got = [(request.got, request.cancelled, request.ended) for request in self.awaited]
        python = repr((sent, live, fields, arenas, list(client._unconsumed), got, client.epoch))
        silent = min(self.now - int(state.pairs.heartbeat_ns[0]), self.limits.lease_ns + 1)
        arrays = b"".join(np.ascontiguousarray(array).tobytes() for array in (*self._arrays, *shared))
        digest = hashlib.blake2b(arrays + python.encode()).digest()
        return digest, bool(received), silent, self.bucket, self.owners, self.excused

    # ---- events ----------------------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Event]:
        yield from (("submit", kind) for kind in range(len(KINDS)))
        yield from (("cancel", i) for i, request in enumerate(self.client.live()) if not request.cancelled)
        if self.client.transport.wire:
            yield from (("arrive", 1), ("arrive", EVERYTHING))
        yield from (("turn", 0), ("turn", 2 * self.limits.lease_ns), ("read",), ("beat",), ("round", 0))
        yield ("round", 3 * self.limits.lease_ns // 5)
        if self.owners < 2:
            yield ("claim",)
        else:
            yield ("late",)

    def play(self, event: Event) -> None:
        name, *arguments = event
        getattr(self, f"_{name}")(*arguments)

    def _submit(self, kind: int) -> None:
        client, (prompt, most) = self.client, KINDS[kind]
        request = ExpectedRequest(self.limits, list(prompt), RequestParameters(max_tokens=most, seed=5))
        read_up_to = int(self.state.pairs.sq_head[0])
        unread = [sent.owner for sent in client.live() if sent.after > read_up_to]
        hashed = len(prompt) >= PAGE_SIZE and any(len(request.prompt) >= PAGE_SIZE for request in unread)
        free = client.free_slots and not hashed
        try:
            client.submit(np.array(prompt, np.int32), request.sampling, request)
        except self._modules.NoSpaceError:
            assert not free, "the queue has free slots"
            return
        assert free, "the queue has no free slot"
        self.awaited.append(request)

    def _cancel(self, which: int) -> None:
        request = self.client.live()[which]
        request.owner.cancelled = True
        self.client.cancel(request)

    def _arrive(self, writes: int) -> None:
        self.client.transport.deliver(writes)

    def _read(self) -> None:
        for sent, token, flags in self.client.poll():
            sent.owner.take(token, flags, sent.records)
        assert self.client.stray_completions == 0, "a completion without a request"
        live = {id(request.owner) for request in self.client.live()}
        assert live == {id(request) for request in self.awaited if not request.ended}, "requests in flight"

    def _beat(self) -> None:
        self.client.heartbeat()

    def _turn(self, later_ns: int) -> None:
        """The engine computes the last step and makes a turn, possibly after a time without heartbeats."""
        limits, queues, state, sim = self._arguments
        self.now += TICK_NS + later_ns
        self.excused = self.excused or later_ns > 0
        fault = compute(limits, queues, state, sim) if self.bucket >= 0 else 0
        self.bucket = self._schedule(limits, queues, state, self.now, 0, 1)
        fault = fault or check_state(limits, state, sim.references, sim.seen) or check_turn(limits, queues, state, sim, self.now)
        assert fault == 0, describe_fault(fault)

    def turn(self) -> None:
        """A turn while a client waits for its grant."""
        self._turn(0)

    def _claim(self) -> None:
        """The pair's owner dies while its writes are in flight; a successor claims the pair."""
        transport = WireTransport(self, 0)  # type: ignore[arg-type]
        self.client = self._modules.QueuePair(transport, engine_timeout_s=1e9)
        transport.while_attaching = lambda: None
        self.client.attach(60.0)
        transport.while_attaching = None
        self.awaited, self.excused = [], False
        self.owners += 1

    def _round(self, later_ns: int) -> None:
        """One usual round of both parties, after a time shorter than a lease."""
        self._beat()
        self._arrive(EVERYTHING)
        self.now += later_ns
        self._turn(0)
        words = self.client.transport.read_pair()
        lives = (words.epoch, words.attached) == (self.client.epoch, 1)
        try:
            self.client.check()
            assert lives, "a client does not notice that it lost its pair"
            self._read()
        except self._modules.EngineLostError:
            assert not lives and self.excused, "a client lost its pair without missing a heartbeat"
            self._claim()

    def _late(self) -> None:
        """A late doorbell of the previous owner overwrites the present owner's."""
        self.views.front[0, W.FRONT_DOORBELL] = self.client.epoch - 1 << W.EPOCH_SHIFT | 1

    # ---- invariants ------------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """All parties behave from now on: all requests must end as expected and free all pages."""
        for _ in range(CALM_ROUNDS):
            self._round(0)
            if all(request.ended for request in self.awaited) and not self.state.requests.status.any():
                assert not self.state.pages.refcount.any(), "not all pages are freed"
                assert not self.awaited or self.client.free_slots == self.limits.slots, "not all slots are freed"
                return
        raise AssertionError(f"requests do not end within {CALM_ROUNDS} rounds")


def _plain(argument: Any) -> Any:
    return argument.tobytes() if isinstance(argument, np.ndarray) else argument
