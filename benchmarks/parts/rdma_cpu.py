"""CPU time of a front end over RDMA, without HTTP and tokenization, and without a network card.

    python -m benchmarks.parts.rdma_cpu

The transport runs as it is; the verbs below it go to a stand-in in plain Python that copies the bytes immediately, so what is
measured includes the stand-in's calls and copies, where pyverbs makes one call into C each: an upper bound, except what a
driver does in those calls. CPU time of the thread (CLOCK_THREAD_CPUTIME_ID), everything in one process, one request at a time;
every prompt and completion is compared:

    submit_N    QueuePair.submit of a prompt of N tokens, page hashes included
    news        QueuePair.poll that returns the request's only completion
    nothing     QueuePair.poll that finds none
    request_N   submit_N and the look with news
"""

import ctypes
import gc
import secrets
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.distribution import describe
from benchmarks.common.harness import Flag, Run, check, run_benchmark
from blinkpy.dpu.link import connect_rdma, rdma_writes
from blinkpy.dpu.link.connect_rdma import DEPTH, RdmaTransport
from blinkpy.dpu.link.queue_pair import QueuePair
from blinkpy.queues import words as W
from blinkpy.queues.layout import BLOCK_WORDS, HEADER, EngineFacts, QueueSizes
from blinkpy.queues.request_parameters import RequestParameters
from blinkpy.queues.submission import WORD_PROMPT_OFFSET
from blinkpy.queues.words import FINISH_LENGTH, HAS_TOKEN, TOKEN_MASK, lap_of, pack_completion
from blinkpy.transport.handshake import Region, Welcome
from blinkpy.transport.segment import Segment, create_segment
from blinkpy.transport.verbs import INLINE_WANTED, Endpoint

TARGET_US = 50.0
SIZES = QueueSizes(pairs=1, slots=256, sq_entries=256, cq_entries=8192, prompt_tokens=1 << 16, hash_entries=1 << 12)
FACTS = EngineFacts(1, 65_537, 131_071, 8192, 4096, 16, 1 << 14, 256, 3_600_000)
PROMPTS = (32, 128, 1024, 4096)  # tokens
FLAGS = HAS_TOKEN | FINISH_LENGTH
HEARTBEAT_EVERY = 100  # requests


class Card:
    """Replaces a network card and its driver (pyverbs' queue pair and completion queue). Posted work completes
    immediately."""

    def __init__(self) -> None:
        self.qp = self.cq = self
        self.inline = INLINE_WANTED
        self.wr_id = self.wr_flags = 0
        self._read, self._remote, self._done = False, 0, list[Any]()

    def wr_start(self) -> None:
        pass

    wr_complete = close = wr_start

    def wr_rdma_read(self, rkey: int, remote: int) -> None:
        self._read, self._remote = True, remote

    def wr_rdma_write(self, rkey: int, remote: int) -> None:
        self._read, self._remote = False, remote

    def wr_set_sge(self, sge: Any) -> None:
        self.wr_set_inline_data(sge.addr, sge.length)

    def wr_set_inline_data(self, local: int, length: int) -> None:
        self._copy(*((local, self._remote) if self._read else (self._remote, local)), length)
        if self.wr_flags & 1:
            self._done.append(SimpleNamespace(status=0, wr_id=self.wr_id))

    _copy = staticmethod(ctypes.memmove)  # to, from, bytes

    def poll(self, most: int) -> tuple[int, list[Any]]:
        done, self._done = self._done, []
        return len(done), done

    def register(self, address: int, length: int, access: int) -> Any:
        return SimpleNamespace(lkey=1)


def stand_in_for_verbs() -> None:
    """Constants and modules of pyverbs that suit a Card."""
    values = dict.fromkeys(rdma_writes.REASONS, -1)
    values |= {"IBV_SEND_SIGNALED": 1, "IBV_SEND_INLINE": 2, "IBV_WC_SUCCESS": 0, "IBV_ACCESS_LOCAL_WRITE": 1}
    constants = SimpleNamespace(**values)
    modules: dict[str, Any] = {
        "wr": SimpleNamespace(SGE=lambda a, b, c: SimpleNamespace(addr=a, length=b, lkey=c)),
        "pyverbs_error": SimpleNamespace(PyverbsError=RuntimeError),
    }
    setattr(rdma_writes, "module", modules.__getitem__)  # noqa: B010 (not their types)
    for target in (rdma_writes, connect_rdma):
        setattr(target, "constants", lambda: constants)  # noqa: B010


def connect(segment: Segment, card: Card, pairs: int = 0) -> RdmaTransport:
    """A transport to a segment of this process. pairs: address of its queue pairs, if they are not in the segment."""
    stand_in_for_verbs()
    layout = segment.layout
    base = int(np.frombuffer(segment.buffer, np.uint8).ctypes.data)
    first = (pairs or base + layout.first_pair) - layout.first_pair
    regions = (
        Region(base + layout.engine_words, 1, 2 * BLOCK_WORDS * 8),
        Region(first + layout.front_region(0), 2, layout.front_region_bytes),
        Region(first + layout.engine_region(0), 3, layout.engine_region_bytes),
    )
    welcome = Welcome(bytes(segment.buffer[: HEADER.itemsize]), 0, Endpoint(0, 0, "::1", 0, 5, 16), *regions)
    transport = RdmaTransport(card, card, DEPTH, welcome)  # type: ignore[arg-type]
    transport.first_look(1.0)
    return transport


class Answers:
    """The engine's side, which is not measured: grants the pair, and answers each request with one completion."""

    def __init__(self, segment: Segment):
        self._views, self._made = segment.views(), 0
        self._views.engine[W.ENGINE_STATE] = W.STATE_READY

    def grant(self) -> None:
        """Prepare the grant for the front end's next claim."""
        self._views.pair[0, W.PAIR_EPOCH] = self._views.pair[0, W.PAIR_ATTACHED] = 1

    def one(self, slot: int, prompt: NDArray[np.int32]) -> None:
        entry = self._views.sq[0, self._made % SIZES.sq_entries]
        start = int(entry[WORD_PROMPT_OFFSET])
        check(bool((self._views.prompt[0, start : start + len(prompt)] == prompt).all()), "another prompt came")
        token, size = self._made & TOKEN_MASK, SIZES.cq_entries
        self._views.cq[0, self._made % size] = pack_completion(slot, token, FLAGS, lap_of(self._made, size))
        self._made += 1
        self._views.engine[W.ENGINE_HEARTBEAT] += 1
        self._views.pair[0, W.PAIR_SQ_HEAD] = self._views.pair[0, W.PAIR_CQ_TAIL] = self._made


def benchmark(run: Run) -> None:
    options, rng = run.options, np.random.default_rng(run.options.seed)
    segment = create_segment(f"serve-benchmark-{secrets.token_hex(6)}", SIZES, FACTS)
    parts: dict[str, list[float]] = {}
    clock, sampling = time.thread_time_ns, RequestParameters(max_tokens=1, seed=1)
    gc.disable()
    try:
        answers = Answers(segment)
        pair = QueuePair(connect(segment, Card()))
        answers.grant()
        pair.attach(1.0)
        for round_ in range(options.rounds + 1):  # the first run is a warm-up
            run.progress("requests", round_, options.rounds)
            for length in PROMPTS:
                prompts = rng.integers(0, FACTS.vocab_size, (options.count, length), dtype=np.int32)
                for number, prompt in enumerate(prompts):
                    began = clock()
                    request = pair.submit(prompt, sampling)
                    submitted = clock()
                    check(not pair.poll(), "news before there was any")
                    looked = clock()
                    answers.one(request.slot, prompt)
                    answered = clock()
                    events = pair.poll()
                    news = clock() - answered
                    check(len(events) == 1 and events[0][0] is request, "another completion came")
                    submit = submitted - began
                    times = {f"submit_{length}": submit, "nothing": looked - submitted, "news": news}
                    for name, value in (times | {f"request_{length}": submit + news}).items() if round_ else ():
                        parts.setdefault(name, []).append(value / 1000)
                    if number % HEARTBEAT_EVERY == 0:
                        pair.heartbeat()
                        pair.check()
            gc.collect()
    finally:
        gc.enable()
        segment.close()
    results = {name: describe(times, "us") for name, times in sorted(parts.items())}
    for length in PROMPTS:
        what = f"CPU of a request of {length} tokens and one completion, median"
        run.target(what, results[f"request_{length}"]["p50"]["value"], TARGET_US, "us")
    run.write(__doc__, results)


if __name__ == "__main__":
    run_benchmark(
        "parts.rdma_cpu",
        "CPU time of a front end over RDMA, with a stand-in for the network card.",
        benchmark,
        rounds=Flag(10, "rounds, in each of which every length is measured", smoke=1),
        count=Flag(1000, "requests of one length in a round", smoke=100),
        seed=Flag(1, "of the prompts"),
    )
