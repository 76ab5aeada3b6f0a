"""The client of one queue pair: submit, poll, cancel, and detect the engine's loss. It is synchronous, for
one thread; beat() and check() may run in a second one.

Ring entries and arena space are allocated at submission, and freed when the engine has consumed the entry
(PAIR_SQ_HEAD). The slot is freed when the request's final completion was read. A completion belongs to the request in its slot.
This is unambiguous, because a slot is reused only after the final completion. Automata and token rules are written once, and stay
for later requests (grammar_arena).
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np

from blinkpy.dpu.link.grammar_arena import NOTHING, Arena, GrammarArena, Plan
from blinkpy.queues import words as W
from blinkpy.queues.byte_automaton import ByteAutomaton
from blinkpy.queues.page_hash import PageHasher
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import NOWHERE, ArenaPlace, pack_entry
from blinkpy.queues.token_rules import TokenRules
from blinkpy.queues.words import (
    FINISH_MASK,
    FLAG_MASK,
    FLAG_SHIFT,
    HAS_LOGPROBS,
    HAS_TOKEN,
    LAP_SHIFT,
    SLOT_MASK,
    TOKEN_MASK,
    TOKEN_SHIFT,
    Int32,
    hits_of,
    lap_of,
    wait_of,
)
from blinkpy.transport.contract import Transport, TransportError

FIRST_WINDOW, WINDOW = 16, 256  # completions per read: for the first read of a poll, and for its later reads
CLAIM_POLL_S = 0.0005
REQUEST_LIMIT = 0xFFFFFFFE  # requests per epoch, because ids must not repeat


class NoSpaceError(Exception):
    """No slot, ring entry or arena space is free now; try again later."""


class EngineUnavailableError(Exception):
    """The engine accepts no requests now: it is starting or draining."""


class EngineLostError(Exception):
    """The queue pair is lost, and every request in flight has failed. The message gives the reason."""


class InFlightRequest:
    """One submitted request.

    owner: the caller's object.
    after: the ring's position after its entry.
    names: digests of its grammar and its token rules.
    written: bytes of each of them that were written to the engine's memory.
    records: log-probability records of its completions with HAS_LOGPROBS, in order. The reader of such a completion pops one from
    the left.
    cached_tokens: prompt tokens found in the prefix cache; known after the first completion, when `silent` becomes False.
    waited_ns: its wait in the engine before it ran; -1 until the first completion.
    """

    __slots__ = (
        *("after", "cached_tokens", "cancelled", "names", "owner", "records", "request_id", "silent", "slot"),
        *("waited_ns", "written"),
    )

    def __init__(self, request_id: int, slot: int, owner: Any, after: int, names: tuple[int, ...] = ()):
        self.request_id, self.slot, self.owner, self.after = request_id, slot, owner, after
        self.cancelled, self.silent, self.cached_tokens, self.waited_ns, self.names = False, True, 0, -1, names
        self.written: tuple[int, ...] = ()
        self.records: deque[list[tuple[int, float]]] = deque()  # (token, log probability), as in LOGPROB_ENTRY


# One completion: the request; a token id, or REJECT_* of a refused request; FINISH_*, HAS_TOKEN and
# HAS_LOGPROBS.
# A plain tuple, which is cheap: every token has one.
CompletionEvent = tuple[InFlightRequest, int, int]


class QueuePair:
    """One queue pair of an engine.

    engine_timeout_s: an engine whose heartbeat and progress don't change for this time counts as lost.
    """

    def __init__(self, transport: Transport, engine_timeout_s: float = 2.0):
        self.transport, self.facts = transport, transport.facts
        self.sizes, self.engine_timeout_s = transport.layout.sizes, engine_timeout_s
        facts = self.facts
        self._hasher = PageHasher(facts.page_size, (facts.hash_multiplier_1, facts.hash_multiplier_2), facts.vocab_size)
        self.epoch = 0
        self.stray_completions = 0  # completions for slots without a request: the engine broke the protocol
        self.stopped_early = False  # the last poll reached a limit, so more completions may be available
        # Maximum prompt tokens that fit into the arena.
        self._arena_prompts = self.sizes.prompt_tokens - facts.grammar_arena
        self.longest_prompt = min(self._arena_prompts, (self.sizes.hash_entries + 1) * self.facts.page_size - 1)
        self._beat = 0
        self._engine_beat = -1
        self._engine_beat_seen = time.monotonic()
        self._attached = False
        self._reset()

    def _reset(self, sq_tail: int = 0, cq_position: int = 0) -> None:
        sizes = self.sizes
        self._live: list[InFlightRequest | None] = [None] * sizes.slots
        self._free = list(range(sizes.slots - 1, -1, -1))  # last in, first out: so few slots are used, and stay cached
        self._prompts, self._hashes = Arena(self._arena_prompts), Arena(sizes.hash_entries)
        self._grammars = GrammarArena(self._arena_prompts, self.facts.grammar_arena)
        self._unconsumed: deque[tuple[int, int, int]] = deque()  # ring position after the entry, arena tails
        self._sq_head = self._sq_tail = self._ended = sq_tail
        self._cq_position = cq_position
        self._requests = 0

    # ---- ownership ---------------------------------------------------------------------------------------------------

    def attach(self, timeout_s: float) -> None:
        """Claim the next epoch and wait for the engine's grant. Raises EngineLostError after timeout_s."""
        self._attached = False
        granted = self.transport.read_pair().epoch
        if granted >= W.EPOCH_LIMIT:
            raise EngineLostError("the queue pair has used up its epochs; restart the engine")
        claim = granted + 1
        self.transport.write_word(W.FRONT_CLAIM, claim)
        deadline = time.monotonic() + timeout_s
        while True:
            self.beat()
            words = self.transport.read_pair()
            if words.epoch == claim and words.attached == 1:
                break
            if words.epoch > claim:
                raise EngineLostError(f"the engine granted epoch {words.epoch}, but this front end claimed {claim}")
            if time.monotonic() >= deadline:
                state = self.state_name()
                raise EngineLostError(f"the engine ({state}) did not grant the queue pair within {timeout_s:g} s")
            time.sleep(CLAIM_POLL_S)
        self.epoch = claim
        self._reset(words.sq_head, words.cq_tail)
        self._attached = True
        self._engine_beat_seen = time.monotonic()
        self.heartbeat()

    def heartbeat(self) -> None:
        """beat() and refresh(), for a front end with one thread. Call it at least twice per lease."""
        self.beat()
        self.refresh()

    def beat(self) -> None:
        """Write the next heartbeat. A second thread may call this, and check(), between attach() and
        close().
        """
        self._beat += 1
        self.transport.write_word(W.FRONT_HEARTBEAT, self._beat)

    def refresh(self) -> None:
        """Store doorbell and head again, because a late write of an earlier owner may have overwritten them
        (O6 of docs/verification.md). Only in the thread that submits and polls; otherwise the doorbell could
        decrease.
        """
        if self._attached:
            self._ring()
            self.transport.write_word(W.FRONT_CQ_HEAD, self._stamp(self._cq_position))

    def _stamp(self, position: int) -> int:
        return self.epoch << W.EPOCH_SHIFT | position & W.POSITION_MASK

    def _ring(self) -> None:
        self.transport.ring_doorbell(self._stamp(self._sq_tail))

    def check(self) -> None:
        """Raise EngineLostError if the engine is silent, stopped, faulted or replaced, or if this epoch was revoked. Call it a
        few times per second.
        """
        transport = self.transport
        words = transport.read_engine()
        state, beat = words[W.ENGINE_STATE], words[W.ENGINE_HEARTBEAT] + words[W.ENGINE_PROGRESS]
        now = time.monotonic()
        if transport.read_fault():
            raise EngineLostError("the host reports that the engine died")
        if state in (W.STATE_STOPPED, W.STATE_FAULTED):
            raise EngineLostError(f"the engine is {W.STATE_NAMES[state]}")
        if self._attached:
            pair = transport.read_pair()
            if pair.epoch != self.epoch or pair.attached != 1:
                revoked = f"epoch {self.epoch} of the queue pair was revoked (now {pair.epoch})"
                raise EngineLostError(f"{revoked}: the lease had expired")
        if beat != self._engine_beat:
            self._engine_beat, self._engine_beat_seen = beat, now
        elif now - self._engine_beat_seen > self.engine_timeout_s:
            raise EngineLostError(f"the engine has made no progress for {now - self._engine_beat_seen:.1f} s")
        if transport.lost():
            raise EngineLostError("the engine is gone")

    def state_name(self) -> str:
        """The engine's state in words."""
        state = self.transport.read_engine()[W.ENGINE_STATE]
        return W.STATE_NAMES[state] if 0 <= state < len(W.STATE_NAMES) else f"in the unknown state {state}"

    def live(self) -> list[InFlightRequest]:
        """The requests in flight, ordered by slot."""
        return [request for request in self._live if request is not None]

    def abandon(self) -> list[InFlightRequest]:
        """Drop all requests in flight and return them, after the loss of the engine or lease."""
        lost = self.live()
        self._attached = False
        self._reset()
        return lost

    def close(self) -> None:
        """Cancel all requests in flight and release the pair."""
        with contextlib.suppress(TransportError):  # no engine is left
            for request in self.abandon():
                self.transport.write_cancel(request.slot, request.request_id)
        self.transport.close()

    # ---- requests ----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        return self.sizes.slots - len(self._free)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def context(self) -> int:
        """Maximum tokens of a sequence: the engine's max_model_len, or the tokens of all pages if that is
        less.
        """
        return min(self.facts.max_model_len, self.facts.num_pages * self.facts.page_size)

    def submit(
        self,
        prompt: Int32,
        sampling: RequestParameters,
        owner: Any = None,
        grammar: ByteAutomaton | None = None,
        rules: TokenRules | None = None,
        prediction: Int32 | None = None,
    ) -> InFlightRequest:
        """Submit a request to the engine.

        prompt: int32 [n], n >= 1.
        owner: kept in the request.
        grammar: the permitted outputs.
        rules: token rules.
        prediction: int32 [m], tokens that the output may repeat; only for an engine whose facts have `predictions`.
        Raises NoSpaceError if there is no space now, EngineUnavailableError, EngineLostError, TransportError,
        and ValueError for a request that can never fit. The request is then not in flight.
        """
        if not self._attached:
            raise EngineLostError("no queue pair is attached")
        state = self.transport.read_engine_state()
        if state != W.STATE_READY:
            if state == W.STATE_DRAINING:
                raise EngineUnavailableError("the engine is draining and accepts no new requests")
            raise EngineUnavailableError(f"the engine is {self.state_name()}")
        self.require_space(grammar, rules)
        length, count = len(prompt), len(prompt) // self.facts.page_size
        predicted = 0 if prediction is None else len(prediction)
        if not 1 <= length <= self.longest_prompt:
            raise ValueError(f"a prompt has 1 to {self.longest_prompt} tokens, not {length}")
        if predicted and (length + predicted > self._arena_prompts or not self.facts.predictions):
            raise ValueError(f"the engine can't take a prediction of {predicted} tokens after a prompt of {length}")
        if self._requests >= REQUEST_LIMIT:
            raise EngineLostError("the request ids of this epoch are used up")
        if not self._free:
            raise NoSpaceError("all slots are in use")
        parts = {part_name(part): part.words() for part in (grammar, rules) if part is not None}
        if parts and not self._has_place(parts.keys()):
            raise NoSpaceError("the requests in flight use all grammar slots of this front end")
        # A free slot implies a free ring entry: the ring has an entry for each slot, and an ended request's
        # is free.
        self._consume()
        before = self._prompts.tail, self._hashes.tail
        slot = self._free[-1]
        request = InFlightRequest(self.epoch << W.EPOCH_SHIFT | self._requests + 1, slot, owner, self._sq_tail + 1, tuple(parts))
        try:
            prompt_offset, hash_offset = self._prompts.take(length + predicted), self._hashes.take(count)
            needed = {name: len(words) for name, words in parts.items()}
            plan = self._grammars.plan(needed, self._sq_head) if needed else NOTHING
            if prompt_offset is None or hash_offset is None or plan is None:
                full = "prompt" if prompt_offset is None else "hash" if hash_offset is None else "grammar"
                raise NoSpaceError(f"the {full} arena is full")
            place = slot, prompt_offset, length, hash_offset, count
            named: dict[str, ArenaPlace] = {"grammar": _place(grammar, plan), "rules": _place(rules, plan)} if parts else {}
            entry = pack_entry(sampling, request.request_id, self.epoch, *place, **named, predicted=predicted)
        except (NoSpaceError, ValueError):
            self._prompts.undo(before[0])
            self._hashes.undo(before[1])
            raise
        transport = self.transport
        transport.write_prompt(prompt_offset, prompt if prediction is None else np.concatenate([prompt, prediction]))
        for name in plan.missing:
            transport.write_prompt(plan.offset(name), parts[name])
        if count:
            transport.write_hashes(hash_offset, self._hasher.hashes(prompt, sampling.cache_salt))
        transport.write_entry(self._sq_tail & self.sizes.sq_entries - 1, entry)
        self._free.pop()
        self._live[slot] = request
        self._requests += 1
        self._sq_tail += 1
        if parts:
            self._grammars.keep(plan, self._sq_tail)
            request.written = tuple(parts[name].nbytes for name in plan.missing)
        self._unconsumed.append((self._sq_tail, self._prompts.tail, self._hashes.tail))
        try:
            self._ring()
        except TransportError:  # the caller still has the request, so abandon() must not return it
            self._live[slot] = None
            self._free.append(slot)
            raise
        return request

    def require_space(self, grammar: ByteAutomaton | None, rules: TokenRules | None = None) -> None:
        """Raise ValueError for a grammar or token rules that can never fit into the engine."""
        most, share = min(self.facts.grammar_words, self._grammars.size), self.facts.grammar_share
        if share == 0 and (grammar is not None or rules is not None):
            raise ValueError(f"the engine does not support {'grammars' if rules is None else 'token rules'}")
        if grammar is not None and (words := len(grammar.words())) > most:
            raise ValueError(f"the grammar takes {words * 4} bytes as an automaton, but the engine's limit is {most * 4}")
        if rules is not None and (words := len(rules.words())) > most:
            raise ValueError(f"the token rules take {words * 4} bytes, but the engine's limit is {most * 4}")
        if rules is not None and rules.vocab_size != self.facts.vocab_size:
            raise ValueError(f"the token rules are for {rules.vocab_size} tokens, but the model has {self.facts.vocab_size}")
        if grammar is not None and rules is not None:
            if share == 1:
                raise ValueError("the engine has memory for a grammar or token rules, but not for both")
            if (words := len(grammar.words()) + len(rules.words())) > self._grammars.size:
                limit = self._grammars.size * 4
                raise ValueError(f"the grammar and the token rules take {words * 4} bytes, but the engine's limit is {limit}")

    def _has_place(self, names: Iterable[int]) -> bool:
        """Whether this pair's share of the engine's storage has space for one more grammar and its token rules."""
        return len(self.names_in_flight().union(names)) <= self.facts.grammar_share

    def names_in_flight(self) -> set[int]:
        """The part_name of each grammar and of all token rules in flight."""
        return {name for request in self._live if request is not None for name in request.names}

    def _consume(self) -> None:
        """Free the arena and ring space of consumed entries. The engine consumes in order, so an ended
        request's entry and earlier ones are consumed, even if the transport has not read this yet.
        """
        # Relies on O2 of docs/verification.md: entries before the head were read, so they may be overwritten.
        head = max(self.transport.read_pair().sq_head, self._ended)
        if not self._sq_head <= head <= self._sq_tail:
            raise EngineLostError(
                f"the engine reports {head} consumed entries, but {self._sq_head} to {self._sq_tail} are possible"
            )
        self._sq_head = head
        while self._unconsumed and self._unconsumed[0][0] <= head:
            _, prompt_tail, hash_tail = self._unconsumed.popleft()
            self._prompts.give_back(prompt_tail)
            self._hashes.give_back(hash_tail)

    def cancel(self, request: InFlightRequest) -> None:
        """Ask the engine to drop a request. Its final completion still follows; after that, this has no
        effect.
        """
        if self._live[request.slot] is request and not request.cancelled:
            # Keeps O7 of docs/verification.md: the word names the request, and ids are not reused.
            request.cancelled = True
            self.transport.write_cancel(request.slot, request.request_id)

    def poll(self, most: int = W.POSITION_MASK, most_final: int = W.POSITION_MASK) -> list[CompletionEvent]:
        """Read new completions in order, at most one ring. Sets `stopped_early`. On return, slots of finished
        requests are free.

        most: maximum completions.
        most_final: maximum final completions.
        """
        events: list[CompletionEvent] = []
        self.stopped_early = False
        if not self._attached:
            return events
        live, free, size = self._live, self._free, self.sizes.cq_entries
        start = position = self._cq_position
        end, window = start + min(most, size), FIRST_WINDOW
        final = 0
        while position < end and final < most_final:
            words = self.transport.read_completions(position, min(window, end - position))
            window = WINDOW
            lap = lap_of(position, size)
            count = 0
            asked: list[tuple[InFlightRequest, int]] = []  # requests with records, and their index in this window
            for word in words:
                if word >> LAP_SHIFT != lap or final == most_final:
                    break  # relies on O3 of docs/verification.md: an older word has an older lap
                count += 1
                slot = word & SLOT_MASK
                request = live[slot] if slot < len(live) else None
                if request is None:
                    self.stray_completions += 1
                    continue
                if request.silent:
                    request.silent = False
                    hit_word = self.transport.read_hits(slot)
                    request.cached_tokens = hits_of(hit_word, request.request_id) * self.facts.page_size
                    request.waited_ns = wait_of(hit_word, request.request_id)
                flags = word >> FLAG_SHIFT & FLAG_MASK
                if flags != HAS_TOKEN:  # rare
                    if flags & FINISH_MASK:
                        final += 1
                        live[slot] = None
                        free.append(slot)
                        if request.after > self._ended:
                            self._ended = request.after
                    if flags & HAS_LOGPROBS:
                        asked.append((request, count - 1))
                events.append((request, word >> TOKEN_SHIFT & TOKEN_MASK, flags))
            if asked:
                self._take_records(position, asked)
            position += count
            if count < len(words) or not words:
                break
        self.stopped_early = position == end or final == most_final
        if position != start:
            # Keeps O4 of docs/verification.md: the head is stored after the words were read.
            self._cq_position = position
            self.transport.write_word(W.FRONT_CQ_HEAD, self._stamp(position))
        return events

    def _take_records(self, position: int, asked: list[tuple[InFlightRequest, int]]) -> None:
        """Read the records of a window of completions, which begins at `position`."""
        first, last = asked[0][1], asked[-1][1]
        records = self.transport.read_logprobs(position + first, last - first + 1)
        for request, at in asked:
            request.records.append(records[at - first].tolist())


def part_name(packed: ByteAutomaton | TokenRules) -> int:
    """The name of a grammar or of token rules, derived from content and kind."""
    return packed.digest << 1 | isinstance(packed, TokenRules)


def _place(packed: ByteAutomaton | TokenRules | None, plan: Plan) -> ArenaPlace:
    """The extent of a grammar or of token rules in the prompt arena."""
    return NOWHERE if packed is None else ArenaPlace(packed.digest, plan.offset(part_name(packed)), len(packed.words()))
