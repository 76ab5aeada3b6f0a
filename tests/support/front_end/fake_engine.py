"""The engine's side of the queues in plain Python, for tests of the front end: correct, slow, and easy to disturb.

It generates by echo: token i of an answer is prompt[i % len(prompt)], so a test knows every answer beforehand. Attributes may be
changed while it runs.
"""

import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from support.waiting import wait_for

from blinkpy.dpu.link.queue_pair import InFlightRequest, QueuePair
from blinkpy.queues import words as C
from blinkpy.queues import words as W
from blinkpy.queues.layout import EngineFacts, QueueSizes
from blinkpy.queues.submission import SQ_ENTRY, SUBMIT_SCORE_PROMPT
from blinkpy.queues.words import LOGPROB_ENTRY, TOP_LOGPROBS, pack_hits
from blinkpy.transport.segment import create_segment

SIZES = QueueSizes(pairs=1, slots=8, sq_entries=8, cq_entries=64, prompt_tokens=512, hash_entries=128)
FACTS = EngineFacts(
    instance=1,
    hash_multiplier_1=123_457,
    hash_multiplier_2=765_433,
    max_model_len=128,
    vocab_size=600,
    page_size=4,
    num_pages=64,
    max_num_seqs=8,
    lease_ms=60_000,  # a busy machine delays a front end
)


@dataclass
class Request:
    """A request as the engine read it from the queue."""

    pair: int
    entry: np.void
    prompt: list[int]
    hashes: list[int]
    grammar: np.ndarray  # a packed automaton
    rules: np.ndarray  # packed token rules
    prediction: list[int]
    made: int = 0  # generated; below 0 while the prompt is scored


@dataclass
class Pair:
    """The engine's state of one queue pair."""

    epoch: int = 0
    attached: bool = False
    sq_head: int = 0
    cq_tail: int = 0
    heartbeat: int = 0
    seen: float = 0.0
    requests: dict[int, Request] = field(default_factory=dict)
    owed: deque[tuple[int, int, int]] = field(default_factory=deque)  # final words that wait for free entries


class FakeEngine(threading.Thread):
    """An engine that runs from start() to stop(), or within a block. step_s: time of a step, in which every running request gets
    one token.

    paused: the engine stops, including its heartbeat. hold: it accepts and cancels requests, but makes no tokens.
    most_tokens: no request makes more, until a test raises it.
    script: tokens of answers instead of an echo. Tokens that equal a prediction's count as its drafts, except the last token.
    reject: reason to reject the next request; 0: accept it.
    hit_pages, waited_ns: values to report for each further request. submitted: all requests so far.
    """

    def __init__(
        self, name: str | None = None, sizes: QueueSizes = SIZES, facts: EngineFacts = FACTS, step_s: float = 0.0005
    ) -> None:
        super().__init__(daemon=True)
        self.segment_name = name or f"test-{secrets.token_hex(6)}"
        self.sizes, self.facts, self.step_s = sizes, facts._replace(instance=secrets.randbits(62)), step_s
        self.segment = create_segment(self.segment_name, sizes, self.facts)
        self.views = self.segment.views()
        self.pairs = [Pair() for _ in range(sizes.pairs)]
        self.submitted: list[Request] = []
        self.paused = self.hold = self.consume_nothing = False
        self.reject = self.hit_pages = self.waited_ns = 0
        self.most_tokens = W.POSITION_MASK
        self.script: list[int] = []
        self.stalls = self.fences = self.cancels = 0
        self._stop_asked, self._turn = threading.Event(), threading.RLock()
        self.state(W.STATE_READY)

    def state(self, state: int) -> None:
        """Publish another state."""
        self.views.engine[W.ENGINE_STATE] = state

    def pause(self) -> None:
        """Stop the engine until `paused` is False."""
        self.paused = True
        with self._turn:  # a step that has begun
            pass

    def stop(self) -> None:
        """End the thread and remove the segment."""
        self._stop_asked.set()
        if self.is_alive():
            self.join(10)
        self.state(W.STATE_STOPPED)
        self.segment.close()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self) -> None:
        following = time.monotonic()
        while not self._stop_asked.is_set():
            with self._turn:
                if not self.paused:
                    self._step()
            following = max(following + self.step_s, time.monotonic())
            time.sleep(max(0.0, following - time.monotonic()))

    def _step(self) -> None:
        self.views.engine[W.ENGINE_HEARTBEAT] += 1
        for index, pair in enumerate(self.pairs):
            self._lease(index, pair)
            if not pair.attached:
                continue
            self._cancel(index, pair)
            self._take_in(index, pair)
            self._generate(index, pair)

    # ---- ownership

    def fence(self, index: int) -> None:
        """End the epoch of a pair, as an expired lease does."""
        pair = self.pairs[index]
        with self._turn:  # between two steps, in any thread
            self.views.pair[index, W.PAIR_ATTACHED] = 0
            pair.attached = False
            pair.requests.clear()
            pair.owed.clear()
            self.fences += 1

    def _lease(self, index: int, pair: Pair) -> None:
        front, words = self.views.front[index], self.views.pair[index]
        now, beat = time.monotonic(), int(front[W.FRONT_HEARTBEAT])
        if beat != pair.heartbeat:
            pair.heartbeat, pair.seen = beat, now
        elif pair.attached and now - pair.seen > self.facts.lease_ms / 1000:
            self.fence(index)
        claim = int(front[W.FRONT_CLAIM])
        if claim == pair.epoch + 1:
            if pair.attached:
                self.fence(index)
            tail = int(front[W.FRONT_DOORBELL]) & W.POSITION_MASK
            pair.sq_head += (tail - pair.sq_head) & W.POSITION_MASK
            pair.epoch, pair.attached, pair.seen = claim, True, now
            words[W.PAIR_SQ_HEAD], words[W.PAIR_EPOCH] = pair.sq_head, claim
            words[W.PAIR_ATTACHED] = 1

    # ---- requests

    def _take_in(self, index: int, pair: Pair) -> None:
        views, size = self.views, self.sizes.sq_entries
        doorbell = int(views.front[index, W.FRONT_DOORBELL])
        if doorbell >> W.EPOCH_SHIFT != pair.epoch or self.consume_nothing:  # read after the doorbell: later doorbells wait
            return
        waiting = ((doorbell & W.POSITION_MASK) - pair.sq_head) & W.POSITION_MASK
        assert waiting <= size, f"doorbell {waiting} entries ahead"
        for position in range(pair.sq_head, pair.sq_head + waiting):
            entry = np.frombuffer(views.sq[index, position % size].tobytes(), SQ_ENTRY)[0]
            if entry["epoch"] != pair.epoch:
                continue
            prompt = views.prompt[index, entry["prompt_offset"] :][: entry["prompt_length"]].tolist()
            grammar, rules = (
                views.prompt[index, entry[f"{name}_offset"] :][: entry[f"{name}_words"]].copy() for name in ("grammar", "rules")
            )
            hashes = views.hashes[index, entry["hash_offset"] :][: entry["hash_count"]].tolist()
            end = entry["prompt_offset"] + entry["prompt_length"]
            prediction = views.prompt[index, end:][: entry["predicted_tokens"]].tolist()
            slot, request = int(entry["slot"]), Request(index, entry, prompt, hashes, grammar, rules, prediction)
            request.made -= len(prompt) - 1 if entry["flags"] & SUBMIT_SCORE_PROMPT else 0
            assert slot not in pair.requests, f"slot {slot} is busy"
            self.submitted.append(request)
            if self.reject:
                pair.owed.append((slot, self.reject, C.FINISH_REJECTED))
                self.reject = 0
            else:
                pair.requests[slot] = request
                views.hits[index, slot] = pack_hits(int(entry["request_id"]), self.hit_pages, self.waited_ns)
                views.engine[W.COUNTER["requests_accepted"]] += 1
        pair.sq_head += waiting
        views.pair[index, W.PAIR_SQ_HEAD] = pair.sq_head

    def _cancel(self, index: int, pair: Pair) -> None:
        for slot, request in list(pair.requests.items()):
            if self.views.cancel[index, slot] == request.entry["request_id"]:
                del pair.requests[slot]
                pair.owed.append((slot, 0, C.FINISH_CANCELLED))
                self.cancels += 1

    def _space(self, index: int, pair: Pair) -> int:
        head = int(self.views.front[index, W.FRONT_CQ_HEAD])
        unread = (pair.cq_tail - (head & W.POSITION_MASK)) & W.POSITION_MASK
        return self.sizes.cq_entries - unread if head >> W.EPOCH_SHIFT == pair.epoch else 0

    def _publish(self, index: int, pair: Pair, slot: int, token: int, flags: int) -> None:
        size = self.sizes.cq_entries
        if flags & C.HAS_LOGPROBS:
            pairs = self.views.records[index, pair.cq_tail % size].view(LOGPROB_ENTRY)
            pairs["token"], pairs["logprob"] = self.likely(token)
        self.views.cq[index, pair.cq_tail % size] = C.pack_completion(slot, token, flags, C.lap_of(pair.cq_tail, size))
        pair.cq_tail += 1
        self.views.pair[index, W.PAIR_CQ_TAIL] = pair.cq_tail

    def _generate(self, index: int, pair: Pair) -> None:
        space, counters = self._space(index, pair), self.views.engine
        while pair.owed and space:
            self._publish(index, pair, *pair.owed.popleft())
            space -= 1
        most = 0 if self.hold else self.most_tokens
        running = [(slot, request) for slot, request in pair.requests.items() if request.made < most and most]
        self.stalls += len(running) > space
        for slot, request in running[:space]:
            entry = request.entry
            token = self.says(request)
            request.made += 1
            flags = C.HAS_TOKEN | (C.HAS_LOGPROBS if entry["logprobs"] >= 0 else 0)
            if request.made > 0 and token in entry["stop_ids"] and request.made > entry["min_tokens"]:
                flags |= C.FINISH_STOP
            elif request.made >= entry["max_tokens"]:
                flags |= C.FINISH_LENGTH
            else:
                flags |= self.drafted(request, token)
            self._publish(index, pair, slot, token, flags)
            counters[W.COUNTER["generated_tokens"]] += 1
            if flags & C.FINISH_MASK:
                del pair.requests[slot]
                counters[W.COUNTER["requests_finished"]] += 1

    def says(self, request: Request) -> int:
        """The next token of a request."""
        said = self.script if self.script and request.made >= 0 else request.prompt
        return said[request.made % len(said)]

    def drafted(self, request: Request, token: int) -> int:
        """Flags of a request's last token, which does not end it."""
        right = request.made > 0 and request.prediction[request.made - 1 : request.made] == [token]
        return C.WAS_DRAFTED | C.WAS_PREDICTED if right else 0

    def likely(self, token: int) -> tuple[list[int], list[float]]:
        """A record's tokens and log probabilities: the generated token is the third most likely."""
        top = [(token + distance) % self.facts.vocab_size for distance in (-2, -1, *range(TOP_LOGPROBS - 2))]
        return [token, *top], [-2.5, *(-0.5 - rank for rank in range(TOP_LOGPROBS))]


def drain(pair: QueuePair) -> dict[InFlightRequest, list[tuple[int, int]]]:
    """Poll until no request is in flight. Returns token and flags of each completion, by request."""
    got: dict[InFlightRequest, list[tuple[int, int]]] = {}

    def done() -> bool:
        for request, token, flags in pair.poll():
            got.setdefault(request, []).append((token, flags))
        return not pair.in_flight

    wait_for(done, 60)
    return got
